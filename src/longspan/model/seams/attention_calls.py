"""Attention of transformers' models over a sharded sequence: the function that stands for "longspan" in its interface.

Which rows see which is the shard's, never a mask tensor of the model's; Llama 4's chunks are an argument of `attend`.
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from longspan.attention import SpanMask, attend
from longspan.comm import SequenceShard, world_of
from longspan.comm.autograd import break_graphs_around
from longspan.errors import ModelError
from longspan.model.kinds import attends_to_entries
from longspan.model.layers import (
    decoder_layers,
    mtp_blocks,
    text_model,
)
from longspan.model.seams.model_calls import require_one_row_shard
from longspan.model.seams.running_layer import running_layer
from longspan.model.seams.trial_shards import Probe, RecordedCall, SeparateRows, attend_separately


def number_layers(model: PreTrainedModel) -> None:
    """Set `layer_idx`, in every module that has it as -1 (Zamba 2), to the index of the decoder layer around it.

    `attend` tells the calls of layers apart by it. Blocks of multi-token prediction copy the last layer, index too.
    """
    layers = [*decoder_layers(model).values()]
    numbered_blocks = [(len(layers) - 1, block) for block in mtp_blocks(model).values()]
    for index, layer in (*enumerate(layers), *numbered_blocks):
        modules: list[Any] = [*layer.modules()]
        for module in modules:
            if getattr(module, "layer_idx", None) == -1:
                module.layer_idx = index


def chunk_size(module: nn.Module) -> int | None:
    """Return how many positions each chunk of this attention module's layer has; None for a layer without chunks."""
    in_chunks = layer_type(module) == "chunked_attention"
    return getattr(getattr(module, "config", None), "attention_chunk_size", None) if in_chunks else None


def layer_type(module: nn.Module) -> str:
    """Return the type of this attention module's layer, as its configuration names it; "" where it names none."""
    layer = getattr(module, "layer_idx", None)
    types = getattr(getattr(module, "config", None), "layer_types", None) or ()
    return types[layer] if isinstance(layer, int) and 0 <= layer < len(types) else ""


def set_spans_of_layers(model: nn.Module, spans: Mapping[str, SpanMask]) -> None:
    """Have the text model's attention modules see so much of a shard's spans, by the type of their layer."""
    for module in text_model(model).modules():  # pyright: ignore[reportArgumentType]
        if hasattr(module, "layer_idx"):
            setattr(module, _SPANS, spans.get(layer_type(module), "later"))


def defer_query_scaling(model: nn.Module) -> None:
    """Turn off attention modules' own scaling of queries by position ("temperature"); `sharded_attention` does it."""
    for module in model.modules():
        if scales_queries_by_row(module):
            attention: Any = module
            attention.attn_temperature_tuning = False
            setattr(attention, _SCALES_BY_POSITION, True)


def scales_queries_by_row(module: nn.Module) -> bool:
    """Return whether this attention module scales queries by row numbers that it counts within a call.

    Llama 4's do, in layers without rope.
    """
    return bool(getattr(module, "attn_temperature_tuning", False)) and not getattr(module, "use_rope", True)


def make_layers_causal(model: nn.Module) -> None:
    """Set `is_causal` of all modules of the text model to True.

    transformers sets it to False in models with bidirectional prefixes; here the shard has the spans of these.
    """
    config: Any = model.config
    for module in model.modules():
        if getattr(module, "config", None) is config.get_text_config() and hasattr(module, "is_causal"):
            module.is_causal = True  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]


IMPLEMENTATION = "longspan"
_SCALES_BY_POSITION = "scales_queries_by_position"
_SPANS = "spans_of_layer"


@break_graphs_around
def sharded_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    indices: Tensor | None = None,
    block_indices: Tensor | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    shard: SequenceShard | Probe | None = None,
    attention_kernel: str | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Stand in for transformers' attention function: query (1, N, T, H), key, value (1, K, T, H) to (1, T, N, H).

    `indices` (1, T, k) are the keys that an indexer chose for each row; with k = 0 each row sees every key that its
    mask allows; a mask may carry them (`pools.py`). `block_indices` (1, heads, T, b) are blocks of keys (`blocks.py`).
    Keys narrower than queries are those of latents (`latents.py`), of one head. For a `Probe` the call is recorded, and
    the output has no values; for `SeparateRows` each row attends to itself alone. Raises ModelError without a shard,
    for more than one batch row, and for a mask, unless it has no columns, as `indexers.py` gives it.
    """
    indices = getattr(attention_mask, "chosen", indices)
    block_size = getattr(attention_mask, "block_size", 1)
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if shard is None:  # the decoder layer does not hand its keyword arguments on to attention
        running = running_layer()
        shard = running.shard
        attention_kernel = attention_kernel or running.attention_kernel
    if isinstance(shard, Probe):
        sizes = (query.shape[-1], value.shape[-1])
        ignored = {"position_ids", "cache_position"}  # the shard has the positions
        unknown = tuple(name for name, x in kwargs.items() if isinstance(x, Tensor) and name not in ignored)
        limits: dict[str, Any] = {
            "window": sliding_window,
            "chunk": chunk_size(module),
            "indexed": indices is not None or block_indices is not None,
            "block_size": block_size if block_indices is None else cast(Any, module.indexer).block_size,
        }
        if attends_to_entries(module):
            compressor: Any = module.compressor
            limits |= {"entries": int(compressor.compress_rate), "entries_chosen": hasattr(compressor, "indexer")}
        shard.calls.append(RecordedCall(module, causal, softcap, unknown, *sizes, **limits))
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1]), None
    name = type(module).__name__
    checked_shard = require_one_row_shard(name, shard, query.shape[0], query.shape[2])
    if attends_to_entries(module) and not isinstance(checked_shard, SeparateRows):
        from longspan.model.seams.entries import attend_to_entries

        assert sliding_window is not None and scaling is not None
        limits = {"window": sliding_window, "scale": scaling, "sinks": s_aux, "kernel": attention_kernel}
        return attend_to_entries(module, query, key, attention_mask, checked_shard, **limits), None
    if attention_mask is not None and attention_mask.shape[-1]:
        raise ModelError(
            f"{name} got a mask of shape {tuple(attention_mask.shape)}; the shard says which rows see which"
        )
    # The queries are scaled by Llama 4's formula.
    if getattr(module, _SCALES_BY_POSITION, False):
        llama4: Any = module
        steps = torch.floor((checked_shard.position_ids.float() + 1.0) / llama4.floor_scale)
        scales = torch.log1p(steps) * llama4.attn_scale + 1.0
        query = (query * scales[:, None]).to(query.dtype)
    if isinstance(checked_shard, SeparateRows):
        return attend_separately(query, key, value, scaling), None
    # By the head size of the model, before queries are folded to the size of latents.
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    latents = key.shape[-1] < query.shape[-1]
    if latents:
        from longspan.model.seams.chosen_keys.latents import fold_queries

        query = fold_queries(module, query)
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # (T, N, H), (T, K, H), (T, K, H)
    options: dict[str, Any] = {
        "causal": causal,
        "window": sliding_window,
        "chunk": chunk_size(module),
        "latents": latents,
        "softcap": softcap,
        "scale": scaling,
        "dropout": dropout,
        "first_head": _first_head_index(module, q.shape[1], checked_shard) if dropout else 0,
        "layer": getattr(module, "layer_idx", None),
        "kernel": attention_kernel,
        "spans": getattr(module, _SPANS, "later"),
    }
    if block_indices is not None and block_indices.shape[-1]:
        from longspan.model.seams.chosen_keys.blocks import attend_to_blocks

        return attend_to_blocks(module, q, k, v, checked_shard, block_indices[0], **options).unsqueeze(0), None
    chosen = None if indices is None or not indices.shape[-1] else indices.squeeze(0)
    out = attend(
        *(q, k, v, checked_shard),
        sinks=s_aux,
        indices=chosen,
        block_size=1 if chosen is None else block_size,
        with_lse=False,
        **options,
    )
    if latents:
        from longspan.model.seams.chosen_keys.latents import unfold_values

        out = unfold_values(module, out)
    return out.unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, sharded_attention)


def _first_head_index(module: nn.Module, heads: int, shard: SequenceShard) -> int:
    """The index decides dropout's masks."""
    world = world_of(shard.world_key)
    tp = world.home.tp
    all_heads = getattr(getattr(module, "config", None), "num_attention_heads", None)
    # This attention is not split: every rank has all heads.
    if tp == 1 or heads == all_heads:
        return 0
    if all_heads is None or heads * tp != all_heads:
        raise ModelError(
            f"{type(module).__name__} attends with {heads} heads on each of {tp} tensor-parallel ranks and its "
            f"configuration has num_attention_heads {all_heads}: which of them are here is not known, and dropout's "
            "masks go by it; set its attention dropout to 0.0, or use tp 1"
        )
    return world.coordinates.tp * heads
