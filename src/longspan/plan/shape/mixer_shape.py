"""The sizes of a state-space layer: gated delta nets, Kimi's delta attention, Mamba 2, short convolutions.

Not priced: Mamba 1, whose recurrence has a decay for each channel and state.
"""

from dataclasses import dataclass

from longspan.plan.shape.config_reader import ConfigReader

CHUNK = 64  # rows of a chunk of the scan, by which its products are counted


@dataclass(frozen=True, kw_only=True)
class MixerShape:
    """One state-space layer: what a row costs in it, and what its state weighs.

    >>> shape = MixerShape(kind="gated delta net", weights=1000, heads=32, key_size=128, value_size=128, delta=True)
    >>> shape.scan_flops, round(shape.summary_flops / shape.chunked_flops, 2)
    (3145728, 0.73)

    `weights` multiply each row (projections, and the convolution's `channels` x `width`), those of the `last` product
    among them. The state is `heads` matrices of `key_size` x `value_size`, none of a short convolution; under a delta
    rule (`delta`) a run of rows moves it by a matrix a head, else by a number.
    """

    kind: str
    weights: int
    last: int = 0
    heads: int = 0
    key_size: int = 0
    value_size: int = 0
    delta: bool = False
    channels: int = 0
    width: int = 1

    @property
    def state(self) -> int:
        """How many numbers a state has."""
        return self.heads * self.key_size * self.value_size

    @property
    def transition(self) -> int:
        """How many numbers describe what a run does to a state."""
        return self.heads * (self.key_size**2 if self.delta else 1)

    @property
    def halo(self) -> int:
        """How many numbers a run's convolution reads of the `width` − 1 rows before the run."""
        return self.channels * (self.width - 1)

    @property
    def scan_flops(self) -> int:
        """FLOPs of a row forward by the recurrence: the products kᵀ S (only of a delta rule), k vᵀ and qᵀ S."""
        return (6 if self.delta else 4) * self.state

    @property
    def chunked_flops(self) -> int:
        """FLOPs of a row forward in chunks, as kernels compute it: also products inside the chunk."""
        inside_chunk = 6 * self.key_size + 4 * self.value_size if self.delta else 2 * (self.key_size + self.value_size)
        return self.scan_flops + self.heads * CHUNK * inside_chunk

    @property
    def summary_flops(self) -> int:
        """Return the FLOPs of a row in the forward pass that summarizes a run.

        A summary is the final state that the run gives from an empty state, and what the run does to a state before it.
        """
        if self.delta:  # two products, as with k and k vᵀ in a scan: with the state, and with the matrix that moves it
            return 4 * self.heads * self.key_size * (self.key_size + self.value_size)
        return 2 * self.state

    @property
    def backward_summary_flops(self) -> int:
        """FLOPs of a row in the backward pass that gives the gradient of the state before a run."""
        return (4 if self.delta else 2) * self.state


def mixer_kind(read: ConfigReader) -> str:
    """Return the kind of a configuration's state-space layers, by the names of their sizes; "" without such layers.

    Mamba 1 is "" too, for it is not priced.
    """
    if read.count("linear_num_value_heads"):
        return "gated delta net"
    if read.section("linear_attn_config").count("num_heads") or read.count("linear_num_heads"):
        return "Kimi delta attention"
    if read.count("conv_L_cache"):
        return "short convolution"
    if _mamba2_heads(read):
        return "Mamba 2"
    return ""


def read_mixer_shape(read: ConfigReader) -> MixerShape | None:
    """Read the state-space layer of a configuration; None if none is priced.

    Raises PlanError for missing sizes.
    """
    make = _MAKERS.get(mixer_kind(read))
    if make is None:
        return None
    read.check_counts("hidden_size")
    return make(read, read.count("hidden_size"))


def _gated_delta_net_shape(read: ConfigReader, hidden: int) -> MixerShape:
    """Return the shape of a gated delta net, as of Qwen3-Next.

    Its weights are projections of queries, keys, values, gate and output, beta and decay of each head, and a
    convolution.
    """
    names = ("linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim")
    read.check_counts(*names)
    key_heads, heads = read.count("linear_num_key_heads"), read.count("linear_num_value_heads")
    key_size, value_size = read.count("linear_key_head_dim"), read.count("linear_value_head_dim")
    keys, values, width = key_heads * key_size, heads * value_size, read.count("linear_conv_kernel_dim")
    channels = 2 * keys + values
    return MixerShape(
        kind="gated delta net",
        weights=hidden * (2 * keys + 3 * values + 2 * heads) + channels * width,  # q k; v, gate, out; beta and decay
        last=hidden * values,
        heads=heads,
        key_size=key_size,
        value_size=value_size,
        delta=True,
        channels=channels,
        width=width,
    )


def _kimi_shape(read: ConfigReader, hidden: int) -> MixerShape:
    """Return the shape of Kimi's delta attention, which has a decay for each number of a key.

    Its weights are projections of queries, keys, values and output, a rate (beta) for each head, two gates, and
    convolutions over queries, keys and values.
    """
    linear = read.section("linear_attn_config")  # as it is published
    heads = linear.count("num_heads") or read.count("linear_num_heads")
    size = linear.count("head_dim") or read.require_count("linear_head_dim")
    width = linear.count("short_conv_kernel_size") or read.require_count("linear_conv_kernel_dim")
    inner = heads * size
    gates = 2 * size * (hidden + inner)  # decay and output gate, each of two narrow products
    return MixerShape(
        kind="Kimi delta attention",
        weights=hidden * (4 * inner + heads) + gates + 3 * inner * width,
        last=hidden * inner,
        heads=heads,
        key_size=size,
        value_size=size,
        delta=True,
        channels=3 * inner,
        width=width,
    )


def _short_convolution_shape(read: ConfigReader, hidden: int) -> MixerShape:
    """Return the shape of LFM2's short convolution, which has no state."""
    width = read.count("conv_L_cache")
    return MixerShape(
        kind="short convolution",
        weights=4 * hidden * hidden + hidden * width,
        last=hidden * hidden,
        channels=hidden,
        width=width,
    )


_OF_MAMBA2 = (
    ("mamba_d_state", "ssm_state_size", "state_size"),
    ("mamba_n_groups", "n_groups", "mamba_ngroups"),
    ("mamba_d_conv", "conv_kernel"),
)


def _mamba2_shape(read: ConfigReader, hidden: int) -> MixerShape:
    """Return the shape of Mamba 2, by the keys of Bamba and Granite, Nemotron-H, Zamba 2, or Mamba 2 itself."""
    heads = _mamba2_heads(read)
    states, groups, width = (read.require_count(*names) for names in _OF_MAMBA2)
    inner = _inner_width(read, hidden, heads)
    channels = inner + 2 * groups * states
    return MixerShape(
        kind="Mamba 2",
        weights=hidden * (inner + channels + heads) + channels * width + inner * hidden,  # gate, x B C, dt; out
        last=inner * hidden,
        heads=heads,
        key_size=states,
        value_size=inner // heads,
        channels=channels,
        width=width,
    )


def _mamba2_heads(read: ConfigReader) -> int:
    """Return the heads of a Mamba 2 layer; 0 for Mamba 1.

    `n_mamba_heads` counts only where `mamba_ngroups` is set, as in Zamba 2: the first Zamba has that key for layers of
    Mamba 1.
    """
    heads = read.count("mamba_n_heads", "mamba_num_heads") or (read.count("state_size") and read.count("num_heads"))
    return heads or (read.count("mamba_ngroups") and read.count("n_mamba_heads"))


def _inner_width(read: ConfigReader, hidden: int, heads: int) -> int:
    """Return the width of a row between a Mamba 2 layer's projections: that of its heads, or as it is configured."""
    size = read.value("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim")
    if isinstance(size, int):  # it may be "auto"
        return heads * size
    return read.count("mamba_d_ssm") or read.require_count("mamba_expand", "expand") * hidden


_MAKERS = {
    "gated delta net": _gated_delta_net_shape,
    "Kimi delta attention": _kimi_shape,
    "short convolution": _short_convolution_shape,
    "Mamba 2": _mamba2_shape,
}
