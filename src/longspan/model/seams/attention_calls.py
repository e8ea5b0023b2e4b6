"""What a prepared Hugging Face model and its attention layers are called with, checked on the host at every call.

`attention` goes through transformers' AttentionInterface under the name "longspan". No mask function is registered
under that name, so transformers builds no mask: the shard owns masking. Keyword arguments given to the model reach
every decoder layer, and the shard is one of them; the model's modules keep no communication state.
"""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from longspan.attention import attend
from longspan.comm import SequenceShard, world_of
from longspan.errors import ModelError
from longspan.model.layers import reads_other_modalities
from longspan.model.seams.attention_record import Probe, RecordedCall, call_record, unknown_tensors
from longspan.model.seams.call_rules import call_rules, refuse_positions, refuse_randomness
from longspan.model.seams.forwards.llama4 import chunk_of, scaled_by_position
from longspan.model.seams.layer_arguments import kernel_of_layer, shard_of_layer
from longspan.model.seams.separate_rows import SeparateRows, attend_separately

IMPLEMENTATION = "longspan"
_BOUNDS = ("seq_idx", "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")  # of packed rows
PARTS_OF_POSITIONS = (3, 4)  # time, height and width, or the place in the text before them


def attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    softcap: float | None = None,
    is_causal: bool | None = None,
    shard: SequenceShard | Probe | None = None,
    attention_kernel: str | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query (1, N, T, H), key and value (1, K, T, H) to (1, T, N, H) and no weights.

    Raises ModelError without a shard, with a mask, or with more than one batch row.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if shard is None:  # its layer keeps keyword arguments to itself
        shard, attention_kernel = shard_of_layer(), attention_kernel or kernel_of_layer()
    if (calls := call_record(shard)) is not None:
        sizes, unknown = (query.shape[-1], value.shape[-1]), unknown_tensors(kwargs)
        limits = {"window": sliding_window, "chunk": chunk_of(module)}
        calls.append(RecordedCall(module, causal, softcap, s_aux is not None, unknown, *sizes, **limits))
    if isinstance(shard, Probe):
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1]), None
    rows = _checked_shard(module, query, attention_mask, shard)
    query = scaled_by_position(module, query, rows.position_ids)
    if isinstance(rows, SeparateRows):
        return attend_separately(query, key, value, scaling), None
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # (T, N, H), (T, K, H), (T, K, H)
    mask = {"causal": causal, "window": sliding_window, "chunk": chunk_of(module), "sinks": s_aux, "softcap": softcap}
    first_head = _first_head(module, q.shape[1], rows) if dropout else 0
    layer = {"layer": layer_index(module), "kernel": attention_kernel, "first_head": first_head}
    return attend(q, k, v, rows, scale=scaling, dropout=dropout, **layer, **mask).unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, attention)


def _first_head(module: nn.Module, heads: int, shard: SequenceShard) -> int:
    """The index of this rank's first query head among all of the layer's, by which dropout's masks go."""
    world = world_of(shard.world_key)
    tp, all_heads = world.home.tp, getattr(getattr(module, "config", None), "num_attention_heads", None)
    if tp == 1 or heads == all_heads:
        return 0
    if all_heads is None or heads * tp != all_heads:
        raise ModelError(
            f"{type(module).__name__} attends with {heads} heads on each of {tp} tensor-parallel ranks and its "
            f"configuration has num_attention_heads {all_heads}: which of them are here is not known, and dropout's "
            "masks go by it; set its attention dropout to 0.0, or use tp 1"
        )
    return world.coordinates.tp * heads


def check_call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
    """Forward pre-hook of a prepared model: refuse what would not be exact, on the host, before any collective.

    Rows without a batch dim are taken too: `input_ids` (T,) becomes (1, T). Raises ModelError.
    """
    if len(args) > 1:
        raise ModelError(f"call {_call(model)} with keyword arguments; got {len(args)} positional ones")
    inputs = {**({"input_ids": args[0]} if args else {}), **{k: v for k, v in kwargs.items() if v is not None}}
    shard = inputs.get("shard")
    if isinstance(shard, Probe):
        return (), inputs
    if not isinstance(shard, SequenceShard):
        got = "no shard" if shard is None else f"shard={type(shard).__name__}"
        raise ModelError(f"{_name(model)} got {got}; call {_call(model)} with shard = bind(micro_batch, world)")
    _refuse_arguments(model, inputs)
    refuse_randomness(model, training=model.training)
    for name in ("input_ids", "inputs_embeds", "position_ids"):
        if name in inputs:
            inputs[name] = _one_row_of(name, inputs[name], shard)
    rules = call_rules(model)
    rules.check_rows(shard)
    rules.check_spans(shard)
    refuse_positions(rules.position_table, (shard.micro_batch,), shard.padding_rows)
    return (), rules.with_kernel(inputs) | {"use_cache": False}


def _refuse_arguments(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    reasons = {
        "labels": "labels would be shifted across rows that are not neighbours; use longspan.run_step",
        "attention_mask": "the shard says which rows see which; leave attention_mask out",
        "past_key_values": "there is no key/value cache in training; leave past_key_values out",
        "cache_params": "there is no cache of states in training; leave cache_params out",
        "output_attentions": "attention weights are never formed; leave output_attentions out",
        "use_cache": "there is no key/value cache in training; use_cache must be False",
        **{name: f"the shard says where documents begin; leave {name} out" for name in _BOUNDS},
    }
    for name, reason in reasons.items():
        if inputs.get(name) is not None and inputs[name] is not False:
            raise ModelError(f"{_name(model)} got {name}=: {reason}")
    if "position_ids" not in inputs:
        raise ModelError(f"{_name(model)} got no position_ids; the local rows are not consecutive: call {_call(model)}")
    if isinstance(model, PreTrainedModel) and reads_other_modalities(model):
        _refuse_other_modalities(model, inputs)


def _refuse_other_modalities(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    """Through a wrapper of several modalities text alone is exact: its text model sees nothing else."""
    texts = {"input_ids", "inputs_embeds", "position_ids", "shard", "future_ids"}
    others = [k for k, value in inputs.items() if k not in texts and isinstance(value, Tensor | list | dict)]
    if others:
        raise ModelError(
            f"{_name(model)} got {', '.join(f'{name}=' for name in others)}: through it text alone is exact; "
            "for images and the like give its encoder and its language model homes of their own "
            "(longspan.MultimodalModel, docs/bridge.md)"
        )


def _one_row_of(name: str, x: Tensor, shard: SequenceShard) -> Tensor:
    """The tensor as (1, T, …), checked against the shard's T rows; positions in parts (M-RoPE) as (n, 1, T)."""
    if name == "position_ids" and x.ndim == 3 and x.shape[0] in PARTS_OF_POSITIONS and x.shape[1] == 1:
        _one_row_of(name, x[0], shard)
        return x
    plain = 2 if name == "inputs_embeds" else 1
    x = x.unsqueeze(0) if x.ndim == plain else x
    if x.ndim != plain + 1 or x.shape[0] != 1:
        raise ModelError(f"{name} has shape {tuple(x.shape)}; a shard is one packed row: use (1, {shard.local_rows})")
    if x.shape[1] != shard.local_rows:
        raise ModelError(f"{name} has {x.shape[1]} rows, the shard holds {shard.local_rows}; use shard.scatter(x)")
    if shard.local_rows == 0:
        raise ModelError("the shard holds no rows and transformers models need one; use shard.with_padding()")
    return x


def _checked_shard(module: nn.Module, query: Tensor, mask: Tensor | None, shard: object) -> SequenceShard:
    where = type(module).__name__
    if not isinstance(shard, SequenceShard):
        raise ModelError(
            f"{where} got no shard, so it cannot know which rows it holds; call model(..., shard=shard) with "
            "shard = bind(micro_batch, world)"
        )
    if mask is not None:
        raise ModelError(f"{where} got a mask of shape {tuple(mask.shape)}; the shard says which rows see which")
    if query.shape[0] != 1 or query.shape[2] != shard.local_rows:
        raise ModelError(
            f"{where} got queries of {query.shape[0]} x {query.shape[2]} rows; the shard is one packed row of "
            f"{shard.local_rows}"
        )
    return shard


def layer_index(module: nn.Module) -> int | None:
    """The global layer index that transformers gives an attention module."""
    return getattr(module, "layer_idx", None)


def _name(model: nn.Module) -> str:
    """The architecture's name, which FSDP2 puts a word before."""
    return type(model).__name__.removeprefix("FSDP")


def _call(model: nn.Module) -> str:
    return f"{_name(model)}(input_ids=ids, position_ids=shard.position_ids[None], shard=shard)"
