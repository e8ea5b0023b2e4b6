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
    >>> shape.scan_flops
    3145728

    `weights` multiply each row (projections, and the convolution's `channels` x `width`), those of the `last` product
    among them. The state is `heads` matrices of `key_size` x `value_size`, none of a short convolution; under a delta
    rule (`delta`) a run of rows moves it by a matrix a head, else by a number. FLOPs are of a row.
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
    def scan_flops(self) -> int:
        """Forward FLOPs by the recurrence: the products kᵀ S (only of a delta rule), k vᵀ and qᵀ S."""
        return (6 if self.delta else 4) * self.state

    @property
    def chunked_flops(self) -> int:
        """Forward FLOPs in chunks, as kernels compute it: also products inside the chunk."""
        inside_chunk = 6 * self.key_size + 4 * self.value_size if self.delta else 2 * (self.key_size + self.value_size)
        return self.scan_flops + self.heads * CHUNK * inside_chunk

    @property
    def summary_flops(self) -> int:
        """FLOPs of a run's summary, forward (its final state from an empty one, and what it does to a state before it)
        and backward (the gradient of that state). Under a delta rule the state and the matrix are two products each.
        """
        forward = 4 * self.heads * self.key_size * (self.key_size + self.value_size) if self.delta else 2 * self.state
        return forward + (4 if self.delta else 2) * self.state


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
    return "Mamba 2" if _mamba2_heads(read) else ""


def read_mixer_shape(read: ConfigReader) -> MixerShape | None:
    """Read the state-space layer of a configuration; None if none is priced. Raises PlanError for missing sizes."""
    if not (kind := mixer_kind(read)):
        return None
    hidden = read.require_count("hidden_size")
    readers = {"gated delta net": _gated_delta_net, "Kimi delta attention": _kimi, "Mamba 2": _mamba2}
    if kind in readers:
        return readers[kind](read, hidden)
    width = read.count("conv_L_cache")
    weights, last = 4 * hidden * hidden + hidden * width, hidden * hidden
    return MixerShape(kind=kind, weights=weights, last=last, channels=hidden, width=width)


def _gated_delta_net(read: ConfigReader, hidden: int) -> MixerShape:
    names = ("linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim")
    read.check_counts(*names)
    key_heads, key_size, value_size, width = (read.count(name) for name in names)
    heads = read.count("linear_num_value_heads")
    keys, values = key_heads * key_size, heads * value_size
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


def _kimi(read: ConfigReader, hidden: int) -> MixerShape:
    linear = read.section("linear_attn_config")  # as it is published
    heads = linear.count("num_heads") or read.count("linear_num_heads")
    size = linear.count("head_dim") or read.require_count("linear_head_dim")
    width = linear.count("short_conv_kernel_size") or read.require_count("linear_conv_kernel_dim")
    inner = heads * size
    gates = 2 * size * (hidden + inner)  # decay (for each number of a key) and output gate, each of two narrow products
    return MixerShape(
        kind="Kimi delta attention",
        weights=hidden * (4 * inner + heads) + gates + 3 * inner * width,  # q k v out, and beta of a head
        last=hidden * inner,
        heads=heads,
        key_size=size,
        value_size=size,
        delta=True,
        channels=3 * inner,
        width=width,
    )


def _mamba2(read: ConfigReader, hidden: int) -> MixerShape:
    """By the keys of Bamba and Granite, Nemotron-H, Zamba 2, or Mamba 2 itself."""
    heads = _mamba2_heads(read)
    states = read.require_count("mamba_d_state", "ssm_state_size", "state_size")
    groups = read.require_count("mamba_n_groups", "n_groups", "mamba_ngroups")
    width = read.require_count("mamba_d_conv", "conv_kernel")
    size = read.value("mamba_d_head", "mamba_head_dim", "mamba_headdim", "head_dim")
    if isinstance(size, int):  # it may be "auto"
        inner = heads * size
    else:
        inner = read.count("mamba_d_ssm") or read.require_count("mamba_expand", "expand") * hidden
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
    """Return the heads of a Mamba 2 layer; 0 for Mamba 1, for which the first Zamba, without groups, has a key too."""
    heads = read.count("mamba_n_heads", "mamba_num_heads") or (read.count("state_size") and read.count("num_heads"))
    return heads or (read.count("mamba_ngroups") and read.count("n_mamba_heads"))
