"""Weights that multiply a row in attention, and in an MLP or experts, from a configuration."""

from typing import NamedTuple

from longspan.plan.cost.config_reader import ConfigReader
from longspan.plan.cost.layer_kinds import has_shared_blocks

_GATED_QUERIES = ("qwen3_next", "qwen3_5")  # families whose query projection has a gate for each query
_GATED_SHARED_EXPERT = ("qwen2_moe", "qwen3_next", "qwen3_5_moe")  # whose shared expert has a weight for each row


class Weights(NamedTuple):
    """Weights of a part of a layer, and those of its last product, which is not recomputed where it ends the layer."""

    all: int
    last: int


class Widths(NamedTuple):
    """heads x head size of queries and of keys; where values are of another size, the mean of both."""

    query: int
    key: int


def widths_of(read: ConfigReader) -> Widths:
    """Of a configuration whose layers attend; of a latent attention, as it is computed."""
    heads, hidden = read.count("num_attention_heads"), read.count("hidden_size")
    if latent(read):
        keys, values = _latent_sizes(read)
        return Widths(heads * (keys + values) // 2, heads * (keys + values) // 2)
    head = read.count("head_dim", "attention_head_dim") or (1 + has_shared_blocks(read)) * hidden // heads
    return Widths(heads * head, (read.count("num_key_value_heads") or heads) * head)


def latent(read: ConfigReader) -> bool:
    """Whether keys and values are projected from a narrow row."""
    return bool(read.count("kv_lora_rank"))


def attention_weights(read: ConfigReader) -> Weights:
    """Projections of one layer that attends."""
    hidden = read.count("hidden_size")
    if latent(read):
        return _latent_weights(read, hidden)
    query, key = widths_of(read)
    if has_shared_blocks(read):
        return _shared_block_weights(read, hidden, Widths(query, key))
    gate = query if read.family.startswith(_GATED_QUERIES) else 0
    return Weights(hidden * (2 * query + gate + 2 * key), query * hidden)


def _shared_block_weights(read: ConfigReader, hidden: int, widths: Widths) -> Weights:
    """Of Zamba 2's shared block in one layer: attention to [hidden | embedding], an MLP, the layer's own adapters of
    both, and its projection of what the block made."""
    attention = 2 * hidden * (widths.query + 2 * widths.key) + widths.query * hidden
    width, rank = read.count("intermediate_size") or 4 * hidden, read.count("adapter_rank")
    adapters = rank * (hidden + 2 * width) + 12 * rank * hidden * bool(read.value("use_shared_attention_adapter"))
    return Weights(attention + 3 * hidden * width + adapters + hidden * hidden, hidden * hidden)


def feed_forward_weights(read: ConfigReader, kind: str) -> Weights:
    """Of one layer's MLP (gate, up, down), or of its router and the experts that a token visits."""
    hidden = read.count("hidden_size")
    products = 2 if read.value("mlp_hidden_act") is not None else 3  # Nemotron-H has no gate
    if kind == "dense":
        width = _dense_width(read)
        return Weights(products * hidden * width, hidden * width)
    if not kind:
        return Weights(0, 0)
    visited = read.count("num_experts_per_tok", "num_experts_per_token")
    one = read.count("moe_intermediate_size") or read.count("intermediate_size")
    if gated := read.family.startswith(_GATED_SHARED_EXPERT):
        gated = bool(read.count("shared_expert_intermediate_size"))
    narrow = read.count("moe_latent_size")  # experts of Nemotron-H may read a narrower row
    weights = products * ((narrow or hidden) * visited * one + hidden * _shared_width(read, one))
    return Weights(weights + 2 * hidden * narrow + hidden * (read.experts()[1] + gated), 0)


def _shared_width(read: ConfigReader, one: int) -> int:
    """Of experts that every token visits, all together."""
    names = ("shared_expert_intermediate_size", "moe_shared_expert_intermediate_size", "shared_intermediate_size")
    if width := read.count(*names):
        return width
    # Of Llama 4, intermediate_size is that of experts, of which one is shared, and dense layers have another.
    return (1 if read.count("intermediate_size_mlp") else read.count("n_shared_experts", "num_shared_experts")) * one


def _dense_width(read: ConfigReader) -> int:
    if read.count("conv_L_cache") and not read.count("num_experts_per_tok"):
        return _fitted_width(read)
    if shared := read.count("shared_intermediate_size"):  # of Granite without experts
        return shared
    return read.count("intermediate_size_mlp") or read.count("intermediate_size")


def _fitted_width(read: ConfigReader) -> int:
    """Of LFM2: two thirds of what is said, times a factor, in whole multiples."""
    width = read.count("block_ff_dim", "intermediate_size")
    if read.value("block_auto_adjust_ff_dim") is False:
        return width
    width = int((read.value("block_ffn_dim_multiplier") or 1.0) * int(2 * width / 3))
    multiple = read.count("block_multiple_of") or 1
    return -(-width // multiple) * multiple


def _latent_sizes(read: ConfigReader) -> tuple[int, int]:
    """Numbers of a head's query or key, and of its value."""
    return read.count("qk_nope_head_dim") + read.count("qk_rope_head_dim"), read.count("v_head_dim")


def _latent_weights(read: ConfigReader, hidden: int) -> Weights:
    heads, (size, value) = read.count("num_attention_heads"), _latent_sizes(read)
    rank, narrow = read.count("kv_lora_rank"), read.count("q_lora_rank")
    queries = narrow * (hidden + heads * size) if narrow else hidden * heads * size
    keys = hidden * (rank + read.count("qk_rope_head_dim"))
    keys += rank * heads * (read.count("qk_nope_head_dim") + value)
    return Weights(queries + keys + heads * value * hidden, heads * value * hidden)
