"""The layers of a model: which attend, mix rows by a recurrence or a convolution, and visit an MLP or experts; and the
weights that multiply a row in attention, an MLP or experts. Those of state-space layers are in `mixer_shape.py`.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple, cast

from longspan.plan.shape.config_reader import ConfigReader

ATTENTION = ("full_attention", "sliding_attention", "chunked_attention")
MIXING = ("linear_attention", "conv")
_OLDER_NAMES = {"mamba": "linear_attention", "attention": "full_attention", "sliding": "sliding_attention"}
_LETTERS = {"M": "linear_attention", "E": "moe", "*": "full_attention", "-": "mlp"}
_INSTEAD = {"moe": "mlp", "mlp": "moe"}  # what a depth has in place of a kind of layer that the model lacks


class LayerKind(NamedTuple):
    """What a layer has: the kind of its `attention`, or ""; whether a recurrence or convolution `mixes` its rows; and
    what it `feeds`, an MLP ("dense"), "experts" or "".
    """

    attention: str
    mixes: bool
    feeds: str


def layer_kinds(read: ConfigReader) -> tuple[LayerKind, ...]:
    """Return the layers of a configuration, in order. `model_shape.py` decides which types are priced.

    A layer beyond the end of the list of types attends to all rows. Without a list all layers attend, inside the window
    if there is one.
    """
    types = layer_types(read)
    count = read.count("num_hidden_layers") or len(types)
    separate = any(kind in ("mlp", "moe") for kind in types)  # attention, mixers and MLPs each are layers of their own
    usual = "sliding_attention" if sliding_window(read) and not types else ATTENTION[0]
    types += [usual] * (count - len(types))
    return tuple(_layer_kind(read, layer, kind, separate) for layer, kind in enumerate(types[:count]))


def layer_types(read: ConfigReader) -> list[str]:
    """Return the type of each layer by today's names; empty if the configuration tells no types: all layers attend."""
    for name in ("layer_types", "layers_block_type"):
        if isinstance(types := read.value(name), (list, tuple)):
            return [_OLDER_NAMES.get(str(kind), str(kind)) for kind in cast(Sequence[Any], types)]
    if isinstance(pattern := read.value("hybrid_override_pattern"), str):
        return [_LETTERS.get(letter, letter) for letter in pattern]
    return _infer_types(read, read.count("num_hidden_layers"))


def depth_types(config: Any, types: Sequence[str]) -> list[str]:
    """Return the types of the layers of a depth of multi-token prediction; empty if the configuration names none.

    `types` are those of the model's own layers: if none of these has experts, the depth has an MLP in place of experts,
    and the other way round.

    >>> depth_types({"mtp_hybrid_override_pattern": "*E"}, ["linear_attention", "mlp", "full_attention"])
    ['full_attention', 'mlp']
    """
    read = config if isinstance(config, ConfigReader) else ConfigReader.of(config)
    names: Sequence[str] = read.value("mtp_layers_block_type") or [  # or by letters, as Nemotron-H has it
        _LETTERS.get(letter, letter) for letter in read.value("mtp_hybrid_override_pattern") or ""
    ]
    kinds = [_OLDER_NAMES.get(kind, kind) for kind in names]
    return [kind if kind in types else _INSTEAD.get(kind, kind) for kind in kinds]


def depth_kinds(read: ConfigReader) -> tuple[LayerKind, ...]:
    """Return the layers of a depth of multi-token prediction: those that the configuration names, else the last one."""
    types = depth_types(read, layer_types(read))
    return tuple(_layer_kind(read, 0, kind, True) for kind in types) or layer_kinds(read)[-1:]


def sliding_window(read: ConfigReader) -> int:
    """Return the rows of the window of sliding layers; 0 without a window, or if the configuration switches it off."""
    return 0 if read.value("use_sliding_window") is False else read.count("sliding_window")


def _layer_kind(read: ConfigReader, layer: int, kind: str, separate: bool) -> LayerKind:
    is_hybrid = kind == "hybrid"  # attention and a mixer side by side
    attention = ATTENTION[0] if is_hybrid else kind if kind in ATTENTION else ""
    if separate:
        feeds = {"mlp": "dense", "moe": "experts"}.get(kind, "")
    elif _is_mamba2(read) or has_shared_blocks(read):  # no MLP of its own: Zamba 2's counts with the shared block
        feeds = ""
    else:
        feeds = "experts" if _visits_experts(read, layer) else "dense"
    return LayerKind(attention, is_hybrid or kind in MIXING, feeds)


def _infer_types(read: ConfigReader, layers: int) -> list[str]:
    """Infer the types of a configuration that names none; empty if no attribute is one of mixers: all layers attend."""
    linear = read.section("linear_attn_config")  # of Kimi, whose layers count from 1
    attending = read.value("attn_layer_indices", "full_attn_idxs")
    if (full := linear.value("full_attn_layers")) is not None:
        attending = [layer - 1 for layer in full]
    if attending is not None:
        other_type = "conv" if read.count("conv_L_cache") else "linear_attention"
        return ["full_attention" if layer in attending else other_type for layer in range(layers)]
    if read.count("mamba_d_ssm"):  # Falcon-H1
        return ["hybrid"] * layers
    if read.count("linear_num_value_heads"):
        interval = read.count("full_attention_interval") or 4  # as Qwen's configurations have it
        return ["linear_attention" if (layer + 1) % interval else "full_attention" for layer in range(layers)]
    return ["linear_attention"] * layers if read.count("mamba_n_heads") or _is_mamba2(read) else []


def _is_mamba2(read: ConfigReader) -> bool:
    return bool(read.count("state_size") and read.count("num_heads"))


def has_shared_blocks(read: ConfigReader) -> bool:
    """Return whether this is Zamba 2: its layers are mixers, and some come after a block that they share."""
    return read.family == "zamba2"


def _visits_experts(read: ConfigReader, layer: int) -> bool:
    if not visited_experts(read) or read.value("num_local_experts") == 0:
        return False
    if isinstance(moe_layers := read.value("moe_layers"), list):
        return layer in cast(list[int], moe_layers)
    if isinstance(moe_layers := read.value("mlp_layer_types"), list):
        return cast(list[str], moe_layers)[layer] == "sparse"
    dense = cast(Sequence[int], read.value("mlp_only_layers") or ())
    interval = read.count("decoder_sparse_step") or 1
    first_sparse = read.count("first_k_dense_replace", "num_dense_layers")
    return layer not in dense and (layer + 1) % interval == 0 and layer >= first_sparse


def visited_experts(read: ConfigReader) -> int:
    """Return how many experts a token visits in a layer; 0 without experts."""
    return read.count("num_experts_per_tok", "num_experts_per_token")


_GATED_QUERIES = ("qwen3_next", "qwen3_5")  # families whose query projection has a gate for each query
# Families whose MLPs have two products and no gate, beside those that name their activation mlp_hidden_act.
_WITHOUT_GATE = (
    *("apertus", "arcee", "bert-generation", "biogpt", "gpt2", "gpt_bigcode", "gpt_neox", "jais2"),
    *("nanochat", "nemotron", "opt", "persimmon", "phi", "starcoder2"),
)
_GATED_SHARED_EXPERT = ("qwen2_moe", "qwen3_next", "qwen3_5_moe")  # whose shared expert has a weight for each row


class Weights(NamedTuple):
    """Weights of a part of a layer, and those of its last product, which is not recomputed if it ends the layer.

    `of_experts` are those of the experts that a token visits, `unvisited` (not in `all`) those of the others.
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
    """Latent attention counts as it is computed, with full heads; a shared block attends to rows twice as wide."""
    heads, hidden = read.count("num_attention_heads"), read.count("hidden_size")
    if has_latent_attention(read):
        width = heads * sum(_latent_sizes(read)) // 2
        return Widths(width, width)
    head = read.count("head_dim", "attention_head_dim") or (1 + has_shared_blocks(read)) * hidden // heads
    return Widths(heads * head, (read.count("num_key_value_heads") or heads) * head)


def key_value_heads(read: ConfigReader) -> int:
    """Return the key/value heads of a layer that attends, at least 1: as many as query heads in latent attention."""
    heads = read.count("num_attention_heads")
    return max(1, heads if has_latent_attention(read) else read.count("num_key_value_heads") or heads)


def has_latent_attention(read: ConfigReader) -> bool:
    """Return whether keys and values are projected from a narrow row."""
    return bool(read.count("kv_lora_rank"))


def attention_weights(read: ConfigReader) -> Weights:
    """Count the weights of the projections of one layer that attends."""
    hidden = read.count("hidden_size")
    if has_latent_attention(read):
        return _latent_weights(read, hidden)
    query, key = attention_widths(read)
    if has_shared_blocks(read):
        return _shared_block_weights(read, hidden, query, key)
    gate = query if read.family.startswith(_GATED_QUERIES) else 0
    return Weights(hidden * (2 * query + gate + 2 * key), query * hidden)


def _shared_block_weights(read: ConfigReader, hidden: int, query: int, key: int) -> Weights:
    """The block attends to [hidden | embedding], rows of twice the hidden size, and has an MLP with a gate. Each layer
    adds a projection of the block's output and its own adapters of low rank: of the MLP's first product and, if
    configured, of queries, keys and values, each with 2 · hidden numbers in and as many out.
    """
    attention = 2 * hidden * (query + 2 * key) + query * hidden
    width, rank = read.count("intermediate_size") or 4 * hidden, read.count("adapter_rank")
    adapters = rank * (hidden + 2 * width) + 12 * rank * hidden * bool(read.value("use_shared_attention_adapter"))
    return Weights(attention + 3 * hidden * width + adapters + hidden * hidden, hidden * hidden)


def feed_forward_weights(read: ConfigReader, kind: str) -> Weights:
    """Count the weights of one layer's MLP (gate, up, down), or of its router and experts; none if `kind` is "".

    Of experts those count that a token visits, with a shared expert; the weights of the others are returned as
    `unvisited`. A gate of the shared expert counts as one more column of the router. Experts that read a narrower row
    (Nemotron-H) have a projection to it and back.
    """
    hidden = read.count("hidden_size")
    products = 2 if read.value("mlp_hidden_act") is not None or read.family in _WITHOUT_GATE else 3
    if kind == "dense":
        width = _dense_mlp_width(read)
        return Weights(products * hidden * width, hidden * width)
    if not kind:
        return Weights(0, 0)
    visited = visited_experts(read)
    width = read.count("moe_intermediate_size") or read.count("intermediate_size")  # of an expert
    gated = read.family.startswith(_GATED_SHARED_EXPERT) and bool(read.count("shared_expert_intermediate_size"))
    narrow_width = read.count("moe_latent_size")
    shared = read.count(
        "shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size"
    )
    if not shared:  # by a number of experts that every token visits: Llama 4 always has one
        one = bool(read.count("intermediate_size_mlp"))
        shared = width * (one or read.count("n_shared_experts", "num_shared_experts"))
    weights = products * ((narrow_width or hidden) * visited * width + hidden * shared)
    experts, expert_weights = read.experts()[1], products * (narrow_width or hidden) * width
    all_weights = weights + 2 * hidden * narrow_width + hidden * (experts + gated)
    # No last product: the router's weights multiply what experts return, so that backward needs it.
    return Weights(all_weights, 0, visited * expert_weights, max(0, experts - visited) * expert_weights)


def _dense_mlp_width(read: ConfigReader) -> int:
    # LFM2's is two thirds of the configured one, times a factor, in whole multiples; with experts it states the width.
    if not read.count("conv_L_cache") or read.count("num_experts_per_tok"):  # Granite's, Llama 4's and others'
        names = ("shared_intermediate_size", "intermediate_size_mlp", "intermediate_size")
        return next((width for name in names if (width := read.count(name))), 0)
    width = read.count("block_ff_dim", "intermediate_size")
    if read.value("block_auto_adjust_ff_dim") is False:
        return width
    width = int((read.value("block_ffn_dim_multiplier") or 1.0) * int(2 * width / 3))
    multiple = read.count("block_multiple_of") or 1
    return -(-width // multiple) * multiple


def _latent_sizes(read: ConfigReader) -> tuple[int, int]:
    return read.count("qk_nope_head_dim") + read.count("qk_rope_head_dim"), read.count("v_head_dim")


def _latent_weights(read: ConfigReader, hidden: int) -> Weights:
    """Queries go through `q_lora_rank` numbers if there is one. Keys and values come from `kv_lora_rank` numbers a row,
    and the rotary part of keys, which all heads share, straight from the row.
    """
    heads, (size, value) = read.count("num_attention_heads"), _latent_sizes(read)
    rank, query_rank = read.count("kv_lora_rank"), read.count("q_lora_rank")
    queries = query_rank * (hidden + heads * size) if query_rank else hidden * heads * size
    keys = hidden * (rank + read.count("qk_rope_head_dim"))
    keys += rank * heads * (read.count("qk_nope_head_dim") + value)
    return Weights(queries + keys + heads * value * hidden, heads * value * hidden)
