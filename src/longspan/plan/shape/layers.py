"""The layers of a model by its configuration: which attend, mix rows by a recurrence, and visit an MLP or experts; the
weights that multiply a row in each; and the sizes of state-space layers.

Mamba 1, whose recurrence has a decay for each channel and state, is not priced.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

from longspan.plan.shape.config_reader import ConfigReader
from longspan.plan.shape.key_choices import BLOCKS, CHOOSING, CHOSEN_ENTRIES, ENTRIES, INDEXED, compress_rate
from longspan.plan.shape.layer_patterns import find_rule, full_is_indexed

ATTENTION = ("full_attention", "sliding_attention", "chunked_attention", *CHOOSING)
MIXING = ("linear_attention", "conv")
_OLDER_NAMES = {"mamba": "linear_attention", "attention": "full_attention", "sliding": "sliding_attention"}
_LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
# A depth has this in place of a kind of layer that the model lacks.
_INSTEAD = {"moe": "mlp", "mlp": "moe"}


class LayerKind(NamedTuple):
    """What a layer has: the kind of its `attention`, or ""; whether a recurrence or convolution `mixes` its rows; what
    it `feeds`, an MLP ("dense"), "experts" or ""; whether it has an indexer of its own, which `chooses` keys, and
    `hands_on` its choice to the next layer; and whether it is `double`: it attends twice, each time before an MLP, and
    what it feeds is beside the first of these. It `runs` so many times, `kept_runs` of these with gradients; behind the
    last one of a stack (`ends_stack`) is a norm.
    """

    attention: str
    mixes: bool
    feeds: str
    chooses: bool = False
    double: bool = False
    hands_on: bool = False
    runs: int = 1
    kept_runs: int = 1
    ends_stack: bool = False


def layer_kinds(read: ConfigReader) -> tuple[LayerKind, ...]:
    """Return the layers of a configuration, in order; `model_shape.py` decides which types are priced. A layer beyond
    the end of the list of types attends to all rows. Without a list they are those of transformers' class
    (layer_patterns.py); if that has no rule, all attend to all rows.
    """
    types = layer_types(read)
    if runs := stack_runs(read):
        size = read.count("num_layers_per_stack") or read.count("num_hidden_layers")
        layer = _layer_kind(read, 0, ATTENTION[0], separate=False)
        stacks = [layer._replace(runs=every, kept_runs=kept) for every, kept in runs]
        return tuple(kind._replace(ends_stack=i == size - 1) for kind in stacks for i in range(size))
    count = read.count(layer_count_name(read)) or len(types)
    # whether attention, mixers and MLPs are layers of their own
    separate = any(kind in ("mlp", "moe") for kind in types)
    # A configuration that names no type of model has its window in every layer.
    in_window = not types and not read.model_type and sliding_window(read)
    types += ["sliding_attention" if in_window else ATTENTION[0]] * (count - len(types))
    kinds = [_layer_kind(read, layer, kind, separate=separate) for layer, kind in enumerate(types[:count])]
    for layer, following in enumerate(kinds[1:]):
        if kinds[layer].chooses and following.attention in INDEXED and not following.chooses:
            kinds[layer] = kinds[layer]._replace(hands_on=True)
    return tuple(kinds)


def stack_runs(read: ConfigReader) -> list[tuple[int, int]]:
    """Return how often the low and the high stack of layers run in all, and with gradients; empty without stacks. In
    each cycle the last runs of the low one have gradients, as many as a list says, which counts from its end."""
    cycles = read.count("H_cycles")
    if not cycles:
        return []
    low = read.count("L_cycles")
    listed: Sequence[int] = read.value("L_bp_cycles") or [2]
    with_gradients = [*[1] * (cycles - len(listed)), *listed][:cycles]
    return [(cycles * low, sum(min(low, kept) for kept in with_gradients)), (cycles, cycles)]


def layer_count_name(read: ConfigReader) -> str:
    """Return the attribute that counts layers: `num_hidden_layers` counts attentions where a layer has two."""
    return "num_layers" if read.family.double_layers else "num_hidden_layers"


def layer_types(read: ConfigReader) -> list[str]:
    """Return the type of each layer by today's names; empty if the configuration tells no types: all layers attend."""
    for name in ("layer_types", "layers_block_type"):
        if isinstance(types := read.value(name), (list, tuple)):
            names = _OLDER_NAMES | (
                {"full_attention": "indexed_attention"} if full_is_indexed(read.model_type) else {}
            )
            return [names.get(str(kind), str(kind)) for kind in cast(Sequence[Any], types)]
    if isinstance(pattern := read.value("hybrid_override_pattern"), str):
        return [_LETTERS.get(letter, letter) for letter in pattern]
    # Of MiniMax's published files this table tells them, and of DeepSeek-V4's the rows of an entry.
    sparse = read.section("sparse_attention_config").value("sparse_attention_freq")
    if isinstance(sparse, (list, tuple)):
        return [BLOCKS if flag else "full_attention" for flag in cast(Sequence[int], sparse)]
    if isinstance(ratios := read.value("compress_ratios"), (list, tuple)):
        of_ratio = {0: "sliding_attention"} | {compress_rate(read, kind): kind for kind in ENTRIES}
        return [of_ratio.get(ratio, f"entries of {ratio} rows") for ratio in cast(Sequence[int], ratios)]
    # Other attributes tell the types of models that name none.
    layers = read.count("num_hidden_layers")
    # Kimi's configurations have this table; its layers count from 1.
    linear = read.section("linear_attn_config")
    attending = read.value("attn_layer_indices", "full_attn_idxs")
    if (full := linear.value("full_attn_layers")) is not None:
        attending = [layer - 1 for layer in full]
    if attending is not None:
        other_type = "conv" if read.count("conv_L_cache") else "linear_attention"
        return ["full_attention" if layer in attending else other_type for layer in range(layers)]
    if rule := find_rule(read.model_type):
        return [rule(read, layer) for layer in range(layers)]
    if read.count("mamba_d_ssm"):  # Falcon-H1
        return ["hybrid"] * layers
    if read.count("linear_num_value_heads"):
        # Qwen's configurations have this interval.
        interval = read.count("full_attention_interval") or 4
        return ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)]
    is_mamba2 = read.count("state_size") and read.count("num_heads")
    return ["linear_attention"] * layers if read.count("mamba_n_heads") or is_mamba2 else []


def depth_types(config: Any, types: Sequence[str]) -> list[str]:
    """Return the types of the layers of a depth of multi-token prediction; empty if the configuration names none.

    `types` are those of the model's own layers. If the depth names experts ("moe") and the model has no such layer, the
    depth has an MLP there; and if it names an MLP ("mlp") that the model lacks, it has experts.
    """
    read = config if isinstance(config, ConfigReader) else ConfigReader.read_language_model(config)
    names: Sequence[str] = read.value("mtp_layers_block_type") or [  # or by letters, as Nemotron-H has it
        _LETTERS.get(letter, letter) for letter in read.value("mtp_hybrid_override_pattern") or ""
    ]
    kinds = [_OLDER_NAMES.get(kind, kind) for kind in names]
    return [kind if kind in types else _INSTEAD.get(kind, kind) for kind in kinds]


def depth_kinds(read: ConfigReader) -> tuple[LayerKind, ...]:
    """Return the layers of a depth of multi-token prediction: those that are named, or one like the last."""
    types = depth_types(read, layer_types(read))
    # Configurations that name them have MLPs and experts as layers of their own: no layer's number matters.
    return tuple(_layer_kind(read, 0, kind, separate=True) for kind in types) or layer_kinds(read)[-1:]


def sliding_window(read: ConfigReader) -> int:
    """Return the rows of the window of sliding layers; 0 without a window, or if the configuration switches it off."""
    if read.value("use_sliding_window") is False:
        return 0
    # ModernBERT's files say how many rows are seen on both sides.
    return read.count("sliding_window") or read.count("local_attention") // 2


def _layer_kind(read: ConfigReader, layer: int, kind: str, *, separate: bool) -> LayerKind:
    """In a `separate` model MLPs and experts are layers of their own. `kind` is one of today's names."""
    is_hybrid = kind == "hybrid"  # attention and a mixer side by side
    attention = kind if kind in ATTENTION else ""
    if is_hybrid:
        attention = ATTENTION[0]
    if separate:
        feeds = {"mlp": "dense", "moe": "experts"}.get(kind, "")
    elif (read.count("state_size") and read.count("num_heads")) or read.family.shared_blocks:
        feeds = ""  # Mamba 2 has no MLP of its own; Zamba 2's counts with the shared block
    else:
        feeds = "experts" if experts_per_token(read) and _layer_has_experts(read, layer) else "dense"
    chooses = _has_indexer(read, layer, attention)
    return LayerKind(attention, is_hybrid or kind in MIXING, feeds, chooses, read.family.double_layers)


def _has_indexer(read: ConfigReader, layer: int, attention: str) -> bool:
    """Of layers of latent attention some take the choice of a layer before. A file lists those with an indexer, by
    words or letters, or has one in every `index_topk_freq`, from `index_skip_topk_offset` - 1 on."""
    if attention not in INDEXED or not has_latent_attention(read):
        return attention in (*INDEXED, BLOCKS, CHOSEN_ENTRIES)
    if types := read.value("indexer_types", "index_topk_pattern"):
        return types[layer] not in ("shared", "S")
    every = read.count("index_topk_freq") or 1
    first = 1 if (offset := read.value("index_skip_topk_offset")) is None else offset - 1
    return max(layer - first, 0) % every == 0


def _layer_has_experts(read: ConfigReader, layer: int) -> bool:
    """The layer's number stands in the attributes that families use for that."""
    if 0 in (read.value("num_experts"), read.value("num_local_experts")):
        return False
    if isinstance(moe_layers := read.value("moe_layers"), list):
        return layer in cast(list[int], moe_layers)
    if isinstance(moe_layers := read.value("mlp_layer_types"), list):
        return cast(list[str], moe_layers)[layer] != "dense"
    if isinstance(moe_layers := read.value("moe_layer_freq"), list):
        return bool(cast(list[int], moe_layers)[layer])
    # Ernie has such an index; -1: the last layer.
    last = read.value("moe_layer_end_index")
    if last is not None and 0 <= last < layer:
        return False
    dense = cast(Sequence[int], read.value("mlp_only_layers") or ())
    interval = read.count("decoder_sparse_step", "moe_layer_interval", "interleave_moe_layer_step") or 1
    first_sparse = read.count("first_k_dense_replace", "num_dense_layers", "moe_layer_start_index")
    return layer not in dense and (layer + 1) % interval == 0 and layer >= first_sparse


def experts_per_token(read: ConfigReader) -> int:
    """Return how many experts a token visits in a layer; 0 without experts."""
    return read.count("num_experts_per_tok", "num_experts_per_token", "moe_k", "moe_topk")


class Weights(NamedTuple):
    """How many weights a part of a layer has: `all` that multiply a row, and those of its `last` product, which is not
    recomputed if it ends the layer.

    `of_experts` of `all` are those of the experts that a token visits; `unvisited`, not in `all`, those of the others.
    """

    all: int
    last: int
    of_experts: int = 0
    unvisited: int = 0


class Widths(NamedTuple):
    """heads x head size of queries and of keys; where values are of another size, the mean of both."""

    query: int
    key: int


def attention_widths(read: ConfigReader) -> Widths:
    """Return the widths of queries and of keys of a layer that attends. Latent attention counts as it is computed, with
    full heads. If no head size is named, heads divide the hidden size; in a shared block, whose rows are twice as wide,
    twice that.
    """
    heads = read.count("num_attention_heads")
    hidden = read.count("hidden_size")
    if has_latent_attention(read):
        width = heads * sum(_latent_head_sizes(read)) // 2
        return Widths(width, width)
    head = read.count("head_dim", "attention_head_dim") or (1 + read.family.shared_blocks) * hidden // heads
    return Widths(heads * head, key_value_heads(read) * head)


def key_value_heads(read: ConfigReader) -> int:
    """Return the key/value heads of a layer that attends, at least 1: as many as query heads in latent attention."""
    heads = read.count("num_attention_heads")
    if has_latent_attention(read):
        return max(1, heads)
    # GPT-BigCode has this key.
    shared_by_all = 1 if read.value("multi_query") else heads
    return max(1, read.count("num_key_value_heads") or shared_by_all)


def has_grouped_output(read: ConfigReader) -> bool:
    """Return whether queries come from a narrow row, one head is keys and values, and outputs are projected by groups
    of heads, as in models with entries.
    """
    return bool(read.count("o_groups") and read.count("o_lora_rank"))


def has_latent_attention(read: ConfigReader) -> bool:
    """Return whether keys and values are projected from a narrow row."""
    return bool(read.count("kv_lora_rank"))


def attention_weights(read: ConfigReader, attention: str = "") -> Weights:
    """Count the weights of the projections of one attention layer, and of those that make entries in layers of that
    type of `attention`, but none of indexers. For a block that layers share it counts the whole block, its MLP
    included, since each layer runs it.
    """
    hidden = read.count("hidden_size")
    if has_latent_attention(read):
        return _latent_weights(read, hidden)
    query, key = attention_widths(read)
    if has_grouped_output(read):
        output = read.count("o_groups") * read.count("o_lora_rank")
        weights = read.count("q_lora_rank") * (hidden + query) + hidden * key
        weights += query * read.count("o_lora_rank") + hidden * output
        # keys and gates, in entries that two windows make one of either
        weights += {CHOSEN_ENTRIES: 4, ENTRIES[1]: 2}.get(attention, 0) * hidden * key
        return Weights(weights, hidden * output)
    if read.family.shared_blocks:
        # The block attends to [hidden | embedding], rows of twice the hidden size, and has an MLP with a gate. Each
        # layer adds a projection of the block's output and its own adapters of low rank: of the MLP's first product
        # and, if configured, of queries, keys and values, each with 2 · hidden numbers in and as many out.
        width = read.count("intermediate_size") or 4 * hidden
        rank = read.count("adapter_rank")
        weights = 2 * hidden * (query + 2 * key) + query * hidden + 3 * hidden * width + hidden * hidden
        weights += rank * (hidden + 2 * width)
        if read.value("use_shared_attention_adapter"):
            weights += 12 * rank * hidden
        return Weights(weights, hidden * hidden)
    gate = query if read.family.gated_queries else 0
    return Weights(hidden * (2 * query + gate + 2 * key), query * hidden)


def feed_forward_weights(read: ConfigReader, kind: str) -> Weights:
    """Count the weights of one layer's MLP (`kind` "dense"), of its router and experts ("experts"), or none ("").

    Of experts, `all` has the router, the shared expert (its gate is one more column of the router) and the experts that
    one token visits; `unvisited` has the rest. Experts that read a narrower row (Nemotron-H) have a projection to it
    and back. Of identity experts (LongCat), which hand rows on, a token visits as many as their share of all; the class
    has weights of their first product all the same.
    """
    hidden = read.count("hidden_size")
    # gate, up and down; without a gate two (Nemotron-H has `mlp_hidden_act`)
    has_gate = read.value("mlp_hidden_act") is None and read.family.mlp_gate
    products = 3 if has_gate else 2
    if kind == "dense":
        mlp_width = _dense_mlp_width(read)
        return Weights(products * hidden * mlp_width, hidden * mlp_width)
    if not kind:
        return Weights(0, 0)
    visited = experts_per_token(read)
    expert_width = read.count("moe_intermediate_size") or read.count("intermediate_size")
    gated = read.family.gated_shared_expert and bool(read.count("shared_expert_intermediate_size"))
    narrow_width = read.count("moe_latent_size")
    shared_width = read.count(
        "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size"
    )
    # The width follows from the number of experts that every token visits: Llama 4 always has one.
    if not shared_width:
        is_llama4 = read.count("intermediate_size_mlp")
        shared_width = expert_width * (1 if is_llama4 else read.count("n_shared_experts", "num_shared_experts"))
    weights = products * ((narrow_width or hidden) * visited * expert_width + hidden * shared_width)
    experts = read.experts_attribute_and_count()[1]
    expert_weights = products * (narrow_width or hidden) * expert_width
    if identities := read.count("zero_expert_num"):
        visits = visited * experts * expert_weights // (experts + identities)
        stored = experts * expert_weights + 2 * identities * hidden * expert_width
        return Weights(visits + hidden * (experts + identities), 0, visits, stored - visits)
    all_weights = weights + 2 * hidden * narrow_width + hidden * (experts + gated)
    # No last product: the router's weights multiply what experts return, so that backward needs it.
    return Weights(all_weights, 0, visited * expert_weights, max(0, experts - visited) * expert_weights)


def _dense_mlp_width(read: ConfigReader) -> int:
    # Granite's, Llama 4's, others'
    names = ("dense_intermediate_size", "shared_intermediate_size", "intermediate_size_mlp", "intermediate_size")
    width = next((width for name in names if (width := read.count(name))), 0)
    if not read.count("conv_L_cache") or read.count("num_experts_per_tok"):
        return width
    # LFM2's is two thirds of the configured one, times a factor, in whole multiples; with experts it is as configured.
    configured = read.count("block_ff_dim", "intermediate_size")
    if read.value("block_auto_adjust_ff_dim") is False:
        return configured
    adjusted = int((read.value("block_ffn_dim_multiplier") or 1.0) * int(2 * configured / 3))
    multiple = read.count("block_multiple_of") or 1
    return -(-adjusted // multiple) * multiple


def _latent_head_sizes(read: ConfigReader) -> tuple[int, int]:
    """(query or key with its rotary part, value) of a head."""
    return read.count("qk_nope_head_dim") + read.count("qk_rope_head_dim"), read.count("v_head_dim")


class LatentWidths(NamedTuple):
    """Widths of rows in a layer of latent attention: narrow rows of queries (`query_rank`, 0: none) and of keys and
    values (`rank`), the `rotary` part of keys, which heads share, and what heads have together.
    """

    query_rank: int
    rank: int
    rotary: int
    query: int
    expanded: int
    value: int


def latent_widths(read: ConfigReader) -> LatentWidths:
    """Return the widths of latent attention; `expanded` are keys without their rotary part, and values."""
    heads = read.count("num_attention_heads")
    size, value = _latent_head_sizes(read)
    rotary = read.count("qk_rope_head_dim")
    return LatentWidths(
        query_rank=read.count("q_lora_rank"),
        rank=read.count("kv_lora_rank"),
        rotary=rotary,
        query=heads * size,
        expanded=heads * (size - rotary + value),
        value=heads * value,
    )


def _latent_weights(read: ConfigReader, hidden: int) -> Weights:
    """Queries go through `q_lora_rank` numbers if there is one. Keys and values come from `kv_lora_rank` numbers a
    row, and the rotary part of keys, which all heads share, straight from the row."""
    heads = read.count("num_attention_heads")
    size, value = _latent_head_sizes(read)
    rank = read.count("kv_lora_rank")
    query_rank = read.count("q_lora_rank")
    queries = query_rank * (hidden + heads * size) if query_rank else hidden * heads * size
    if read.family.wide_latent_queries:
        queries += query_rank * heads * (size + 2 * value)
    keys = hidden * (rank + read.count("qk_rope_head_dim"))
    keys += rank * heads * (read.count("qk_nope_head_dim") + value)
    return Weights(queries + keys + heads * value * hidden, heads * value * hidden)


CHUNK = 64  # rows of a chunk of the scan, by which its products are counted


@dataclass(frozen=True, kw_only=True)
class MixerShape:
    """One state-space layer: what a row costs in it, and what its state weighs.

    `weights` multiply each row (projections, and the convolution's `channels` x `width`), those of the `last` product
    among them; those of a delta rule have `vectors` besides. The state is `heads` matrices of `key_size` x
    `value_size`, none of a short convolution; under a delta rule (`delta`) a run of rows moves it by a matrix a head,
    else by a number. FLOPs are of a row.
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
    vectors: int = 0

    @property
    def state(self) -> int:
        return self.heads * self.key_size * self.value_size

    @property
    def scan_flops(self) -> int:
        """Forward FLOPs by the recurrence: the products kᵀ S (only of a delta rule), k vᵀ and qᵀ S."""
        return (6 if self.delta else 4) * self.state

    @property
    def chunked_flops(self) -> int:
        """Forward FLOPs in chunks, as kernels compute it: also products inside the chunk."""
        inside_chunk = (
            6 * self.key_size + 4 * self.value_size if self.delta else 2 * (self.key_size + self.value_size)
        )
        return self.scan_flops + self.heads * CHUNK * inside_chunk

    @property
    def summary_flops(self) -> int:
        """FLOPs of a run's summary, forward (its final state from an empty one, and what it does to a state before it)
        and backward (the gradient of that state). Under a delta rule the state and the matrix are two products each.
        """
        forward = (
            4 * self.heads * self.key_size * (self.key_size + self.value_size) if self.delta else 2 * self.state
        )
        return forward + (4 if self.delta else 2) * self.state


def layer_parts(read: ConfigReader, kind: LayerKind, mixer: MixerShape | None) -> list[Weights]:
    """Return the weights of each part that a layer has, in the order in which rows go through them: attention, mixer,
    and MLP or experts.
    """
    parts = [attention_weights(read, kind.attention)] if kind.attention else []
    parts += [Weights(mixer.weights, mixer.last)] if kind.mixes and mixer else []
    feeds = [feed_forward_weights(read, kind.feeds)] if kind.feeds else []
    if kind.double:
        dense = feed_forward_weights(read, "dense")
        return [*parts, dense, *feeds, *parts, dense]
    return parts + feeds


def mixer_kind(read: ConfigReader) -> str:
    """Return the kind of a configuration's state-space layers, which the names of its sizes tell; "" if it has none, or
    Mamba 1.
    """
    if read.count("linear_num_value_heads"):
        return "gated delta net"
    if read.section("linear_attn_config").count("num_heads") or read.count("linear_num_heads"):
        return "Kimi delta attention"
    if read.count("conv_L_cache"):
        return "short convolution"
    return "Mamba 2" if _count_mamba2_heads(read) else ""


def read_mixer_shape(read: ConfigReader) -> MixerShape | None:
    """Read the state-space layer of a configuration; None if it has none, or Mamba 1. Raises PlanError for missing
    sizes.
    """
    if not (kind := mixer_kind(read)):
        return None
    hidden = read.require_count("hidden_size")
    readers = {
        "gated delta net": _read_gated_delta_net,
        "Kimi delta attention": _read_kimi_delta_attention,
        "Mamba 2": _read_mamba2,
    }
    if kind in readers:
        return readers[kind](read, hidden)
    width = read.count("conv_L_cache")
    return MixerShape(
        kind=kind, weights=4 * hidden * hidden + hidden * width, last=hidden * hidden, channels=hidden, width=width
    )


def _read_gated_delta_net(read: ConfigReader, hidden: int) -> MixerShape:
    names = ("linear_num_key_heads", "linear_key_head_dim", "linear_value_head_dim", "linear_conv_kernel_dim")
    read.check_counts(*names)
    key_heads, key_size, value_size, width = (read.count(name) for name in names)
    heads = read.count("linear_num_value_heads")
    keys = key_heads * key_size
    values = heads * value_size
    channels = 2 * keys + values
    return MixerShape(
        kind="gated delta net",
        # q k; v, gate, out; beta and decay
        weights=hidden * (2 * keys + 3 * values + 2 * heads) + channels * width,
        last=hidden * values,
        heads=heads,
        key_size=key_size,
        value_size=value_size,
        delta=True,
        channels=channels,
        width=width,
        vectors=2 * heads + value_size,
    )


def _read_kimi_delta_attention(read: ConfigReader, hidden: int) -> MixerShape:
    """The names are those of its files or of transformers."""
    # Published files have this table.
    linear = read.section("linear_attn_config")
    heads = linear.count("num_heads") or read.count("linear_num_heads")
    size = linear.count("head_dim") or read.require_count("linear_head_dim")
    width = linear.count("short_conv_kernel_size") or read.require_count("linear_conv_kernel_dim")
    inner = heads * size
    # decay (for each number of a key) and output gate, each of two narrow products
    gates = 2 * size * (hidden + inner)
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
        vectors=inner + heads + size,
    )


def _read_mamba2(read: ConfigReader, hidden: int) -> MixerShape:
    heads = _count_mamba2_heads(read)
    states = read.require_count("mamba_d_state", "ssm_state_size", "state_size")
    groups = read.require_count("mamba_n_groups", "n_groups", "mamba_ngroups")
    width = read.require_count("mamba_d_conv", "conv_kernel")
    names = ("mamba_d_head", "mamba_head_dim", "mamba_headdim")
    # In a model that attends head_dim is attention's.
    size = read.value(*names) if read.count("num_attention_heads") else read.value(*names, "head_dim")
    # The size may be "auto".
    if isinstance(size, int):
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


def _count_mamba2_heads(read: ConfigReader) -> int:
    """0 for Mamba 1 and for a model without either."""
    heads = read.count("mamba_n_heads", "mamba_num_heads") or (read.count("state_size") and read.count("num_heads"))
    # The first Zamba, whose layers are Mamba 1, has n_mamba_heads too, but no groups.
    return heads or (read.count("mamba_ngroups") and read.count("n_mamba_heads"))
