"""What a prepared model and its attention are called with, checked on the host; attention by transformers' interface.

The shard owns masking. Hooks note a layer's arguments for attention that does not get them, and so does recomputation.
Llama 4's chunks are `attend`'s, its scaling of queries goes by the rows' own positions.
"""

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import AttentionInterface, PreTrainedModel

from longspan.attention import attend
from longspan.comm import SequenceShard, world_of
from longspan.comm.shard import break_graphs_around
from longspan.errors import ModelError
from longspan.model.layers import (
    architecture_name,
    decoder_layers,
    decoder_model,
    layers_and_mtp_blocks,
    mtp_blocks,
    reads_other_modalities,
)
from longspan.model.seams.call_rules import call_rules, refuse_documents_beyond_positions, refuse_randomness


def find_shard(name: str, shard: object, call: str = "model(..., shard=shard)") -> SequenceShard:
    """Find the shard that a model or layer of this name was called with. Raises ModelError for something else."""
    if isinstance(shard, SequenceShard):
        return shard
    got = "no shard" if shard is None else f"shard={type(shard).__name__}"
    raise ModelError(
        f"{name} got {got}; call {call} with shard = bind(micro_batch, world); a Trainer, of TRL too, cannot make one: "
        "give the model before prepare to longspan.hf.with_longspan(Trainer)"
    )


def find_one_row_shard(name: str, shard: object, batch: int, rows: int) -> SequenceShard:
    """Return the shard that a layer of this name was called with, if it is one packed row of all the layer's rows."""
    shard = find_shard(name, shard)
    if batch != 1 or rows != shard.local_rows:
        raise ModelError(f"{name} got {batch} x {rows} rows; the shard is one packed row of {shard.local_rows}")
    return shard


def number_layers(model: PreTrainedModel) -> None:
    """Give every module whose `layer_idx` is -1 (Zamba 2) the index of its decoder layer, or of the last for depths.

    Calls of attention are told apart by it.
    """
    layers = [*decoder_layers(model).values()]
    depths = [(len(layers) - 1, block) for block in mtp_blocks(model).values()]  # which copy the last layer
    for index, layer in (*enumerate(layers), *depths):
        modules: list[Any] = [*layer.modules()]
        for module in modules:
            if getattr(module, "layer_idx", None) == -1:
                module.layer_idx = index


class RunningLayer(NamedTuple):
    """What the running layer was called with, and, in `outer`, what runs around it.

    `layer` is None in recomputation, where a forward runs without its module.
    """

    layer: nn.Module | None = None
    shard: Any = None
    attention_kernel: str | None = None
    router: Any = None
    outer: "RunningLayer | None" = None


_OUTSIDE = RunningLayer()
_running: ContextVar[RunningLayer] = ContextVar("longspan_running_layer", default=_OUTSIDE)


def running_layer() -> RunningLayer:
    """Return what the decoder layer that is running was called with; nothing outside of one."""
    return _running.get()


def hook_layer_arguments(model: PreTrainedModel) -> None:
    """Let attention in decoder layers look up what its layer, or a model around it, was called with, from here on."""
    # A pipeline stage calls the model inside alone.
    for layer in dict.fromkeys((model, decoder_model(model), *layers_and_mtp_blocks(model).values())):
        layer.register_forward_pre_hook(_enter_layer, with_kwargs=True)
        layer.register_forward_hook(_leave_layer, always_call=True)
    for module in model.modules():
        if isinstance(module, PreTrainedModel) or hasattr(module, "gradient_checkpointing"):
            module.register_forward_pre_hook(_wrap_checkpointing_functions)


def _wrap_checkpointing_functions(module: nn.Module, _: Any) -> None:
    """Whoever set the checkpointing function; in transformers 5.17 a layer's hooks ran inside its checkpoint."""
    for part in module.modules() if isinstance(module, PreTrainedModel) else (module,):
        run: Any = vars(part).get("_gradient_checkpointing_func")
        function = getattr(run, "func", run)
        # a re-entrant one gives no gradients to tensors among keyword arguments (Gemma 3n)
        if function is checkpoint:
            run = partial(run, use_reentrant=False)
        if run is not None and function is not _checkpoint_inside_layer:
            vars(part)["_gradient_checkpointing_func"] = partial(_checkpoint_inside_layer, run)


def _checkpoint_inside_layer(
    function: Callable[..., Any], run: Callable[..., Any], *args: Any, **options: Any
) -> Any:
    return function(keep_running_layer(run), *args, **options)


def keep_running_layer(run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a layer's forward, a `partial` of its keyword arguments, to set them at every call.

    Without a shard among them those of the layer around it are set, and outside of one nothing is wrapped.
    """
    arguments = _layer_from_keywords(getattr(run, "keywords", {}))
    if arguments.shard is None:
        return run

    def run_inside_layer(*args: Any) -> Any:
        token = _running.set(arguments)
        try:
            return run(*args)
        finally:  # torch ends a recomputation by an exception once it has the tensors that it needs
            _running.reset(token)

    return run_inside_layer


def _layer_from_keywords(keywords: Mapping[str, Any]) -> RunningLayer:
    if keywords.get("shard") is None:  # the model does not hand keyword arguments on to its layers
        return _running.get()._replace(layer=None, outer=None)
    return RunningLayer(None, keywords["shard"], keywords.get("attention_kernel"), keywords.get("router"))


def _enter_layer(layer: nn.Module, args: Any, kwargs: Any) -> None:
    _running.set(_layer_from_keywords(kwargs)._replace(layer=layer, outer=_running.get()))


def _leave_layer(layer: nn.Module, *_: Any) -> None:
    """Also after an error, which may have come before the arguments were set."""
    running = _running.get()
    if running.layer is layer and running.outer is not None:
        _running.set(running.outer)


_BY_POSITION = "scales_queries_by_position"


@dataclass(frozen=True)
class RecordedCall:
    """One call of attention: its layer, the features it needs, and the tensors for which `attend` has no argument."""

    module: nn.Module
    causal: bool
    softcap: float | None
    unknown: tuple[str, ...]
    head_dim: int = 0
    value_dim: int = 0
    window: int | None = None
    chunk: int | None = None
    indexed: bool = False


@dataclass(frozen=True, eq=False)
class Probe:
    """In place of a shard: the attention function records its caller in `calls`, and does not attend."""

    calls: list[RecordedCall] = field(default_factory=list[RecordedCall])


def defer_temperature(model: nn.Module) -> None:
    """Turn off each attention module's own scaling of queries by position ("temperature"); `scale_queries` does it."""
    for module in model.modules():
        if has_temperature(module):
            attention: Any = module
            attention.attn_temperature_tuning = False
            setattr(attention, _BY_POSITION, True)


def has_temperature(module: nn.Module) -> bool:
    """Return whether this attention module scales queries by row numbers that it counts within a call (Llama 4)."""
    return bool(getattr(module, "attn_temperature_tuning", False)) and not getattr(module, "use_rope", True)


def scale_queries(module: Any, query: Tensor, position_ids: Tensor) -> Tensor:
    """Scale queries (1, N, T, H) by positions (T,), by Llama 4's formula: of modules of `defer_temperature`."""
    steps = torch.floor((position_ids.float() + 1.0) / module.floor_scale)
    scales = torch.log1p(steps) * module.attn_scale + 1.0
    return (query * scales[:, None]).to(query.dtype)


def chunk_size(module: nn.Module) -> int | None:
    """Return how many positions each chunk of this attention module's layer has; None for a layer without chunks."""
    config = getattr(module, "config", None)
    layer = getattr(module, "layer_idx", None)
    types = getattr(config, "layer_types", None) or ()
    in_chunks = isinstance(layer, int) and 0 <= layer < len(types) and types[layer] == "chunked_attention"
    return getattr(config, "attention_chunk_size", None) if in_chunks else None


IMPLEMENTATION = "longspan"
# of packed rows
_BOUNDS = ("seq_idx", "cu_seqlens", "cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k")
PARTS_OF_POSITIONS = (3, 4)  # M-RoPE: time, height and width; of four, the position in the text comes first


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
    softcap: float | None = None,
    is_causal: bool | None = None,
    shard: SequenceShard | Probe | None = None,
    attention_kernel: str | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Stand in for transformers' attention function: query (1, N, T, H), key, value (1, K, T, H) to (1, T, N, H).

    `indices` (1, T, k) are keys that an indexer chose; no column stands for every key, and a mask without columns for
    none. Keys that are narrower than queries are latents (`latents.py`), of one head. A probe notes the call and gets
    an empty output, rows of SeparateRows attend to themselves alone. ModelError without a shard, with a mask, or with
    more than one batch row.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if shard is None:  # its layer keeps keyword arguments to itself
        running = running_layer()
        shard = running.shard
        attention_kernel = attention_kernel or running.attention_kernel
    if isinstance(shard, Probe):
        sizes = (query.shape[-1], value.shape[-1])
        ignored = {"position_ids", "cache_position"}
        unknown = tuple(name for name, x in kwargs.items() if isinstance(x, Tensor) and name not in ignored)
        limits = {"window": sliding_window, "chunk": chunk_size(module), "indexed": indices is not None}
        shard.calls.append(RecordedCall(module, causal, softcap, unknown, *sizes, **limits))
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1]), None
    name = type(module).__name__
    rows = find_one_row_shard(name, shard, query.shape[0], query.shape[2])
    if attention_mask is not None and attention_mask.shape[-1]:
        raise ModelError(
            f"{name} got a mask of shape {tuple(attention_mask.shape)}; the shard says which rows see which"
        )
    if getattr(module, _BY_POSITION, False):
        query = scale_queries(module, query, rows.position_ids)
    if isinstance(rows, SeparateRows):
        return attend_separately(query, key, value, scaling), None
    scaling = query.shape[-1] ** -0.5 if scaling is None else scaling
    latents = key.shape[-1] < query.shape[-1]
    if latents:
        from longspan.model.seams.latents import fold_queries

        query = fold_queries(module, query)
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # (T, N, H), (T, K, H), (T, K, H)
    out = attend(
        *(q, k, v, rows),
        causal=causal,
        window=sliding_window,
        chunk=chunk_size(module),
        sinks=s_aux,
        indices=None if indices is None or not indices.shape[-1] else indices.squeeze(0),
        latents=latents,
        softcap=softcap,
        scale=scaling,
        dropout=dropout,
        first_head=_first_head_index(module, q.shape[1], rows) if dropout else 0,
        layer=getattr(module, "layer_idx", None),
        kernel=attention_kernel,
    )
    if latents:
        from longspan.model.seams.latents import unfold_values

        out = unfold_values(module, out)
    return out.unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, sharded_attention)


def _first_head_index(module: nn.Module, heads: int, shard: SequenceShard) -> int:
    """The index of this rank's first query head among all of the layer's, by which dropout's masks go."""
    world = world_of(shard.world_key)
    tp = world.home.tp
    all_heads = getattr(getattr(module, "config", None), "num_attention_heads", None)
    if tp == 1 or heads == all_heads:  # this attention is not split: every rank has all heads
        return 0
    if all_heads is None or heads * tp != all_heads:
        raise ModelError(
            f"{type(module).__name__} attends with {heads} heads on each of {tp} tensor-parallel ranks and its "
            f"configuration has num_attention_heads {all_heads}: which of them are here is not known, and dropout's "
            "masks go by it; set its attention dropout to 0.0, or use tp 1"
        )
    return world.coordinates.tp * heads


def check_model_call(model: nn.Module, args: Any, kwargs: Any) -> tuple[tuple[()], dict[str, Any]]:
    """Refuse what would not be exact, on the host, before any collective: a forward pre-hook of a prepared model.

    Returns keyword arguments as the model takes them, with a batch dim; calls with a `Probe` are not checked.
    """
    if len(args) > 1:
        raise ModelError(
            f"call {_correct_call_text(model)} with keyword arguments; got {len(args)} positional ones"
        )
    inputs = {**({"input_ids": args[0]} if args else {}), **{k: v for k, v in kwargs.items() if v is not None}}
    if isinstance(inputs.get("shard"), Probe):
        return (), inputs
    shard = find_shard(architecture_name(model), inputs.get("shard"), _correct_call_text(model))
    _refuse_arguments(model, inputs)
    refuse_randomness(model, training=model.training)
    for name in ("input_ids", "inputs_embeds", "position_ids"):
        if name in inputs:
            inputs[name] = _make_one_row(name, inputs[name], shard)
    rules = call_rules(model)
    rules.check_rows(shard)
    rules.check_spans(shard)
    if any(group.parents is not None for group in shard.micro_batch.groups):
        rules.check_families((shard.micro_batch,), training=model.training)
    if rules.position_table is not None:
        refuse_documents_beyond_positions(rules.position_table, (shard.micro_batch,), shard.padding_rows)
    return (), rules.add_kernel_argument(inputs) | {"use_cache": False}


def _refuse_arguments(model: nn.Module, inputs: Mapping[str, Any]) -> None:
    architecture = architecture_name(model)
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
            raise ModelError(f"{architecture} got {name}=: {reason}")
    if "position_ids" not in inputs:
        raise ModelError(
            f"{architecture} got no position_ids; the local rows are not consecutive: call {_correct_call_text(model)}"
        )
    if isinstance(model, PreTrainedModel) and reads_other_modalities(model):
        # Values such as flags carry no input. `future_ids` are tokens for depths of multi-token prediction.
        text_inputs = {"input_ids", "inputs_embeds", "position_ids", "shard", "future_ids"}
        if others := [k for k, x in inputs.items() if k not in text_inputs and isinstance(x, Tensor | list | dict)]:
            raise ModelError(
                f"{architecture} got {', '.join(f'{name}=' for name in others)}: through it text alone is "
                "exact; for images and the like give its encoder and its language model homes of their own "
                "(longspan.MultimodalModel, docs/bridge.md)"
            )


def _make_one_row(name: str, x: Tensor, shard: SequenceShard) -> Tensor:
    """(1, T, …), checked against the shard's T rows; positions in parts (M-RoPE) are (n, 1, T)."""
    if name == "position_ids" and x.ndim == 3 and x.shape[0] in PARTS_OF_POSITIONS and x.shape[1] == 1:
        _make_one_row(name, x[0], shard)  # checks the rows of a part
        return x
    plain_dims = 2 if name == "inputs_embeds" else 1
    x = x.unsqueeze(0) if x.ndim == plain_dims else x
    if x.ndim != plain_dims + 1 or x.shape[0] != 1:
        raise ModelError(
            f"{name} has shape {tuple(x.shape)}; a shard is one packed row: use (1, {shard.local_rows})"
        )
    if x.shape[1] != shard.local_rows:
        raise ModelError(f"{name} has {x.shape[1]} rows, the shard holds {shard.local_rows}; use shard.scatter(x)")
    if shard.local_rows == 0:
        raise ModelError("the shard holds no rows and transformers models need one; use shard.with_padding()")
    return x


def _correct_call_text(model: nn.Module) -> str:
    return f"{architecture_name(model)}(input_ids=ids, position_ids=shard.position_ids[None], shard=shard)"


# ---- rows that see only themselves


class SeparateRows(SequenceShard):
    """A shard whose rows do not meet, neither in attention nor in mixers."""

    __slots__ = ()

    @classmethod
    def from_shard(cls, shard: SequenceShard) -> "SeparateRows":
        """Make a shard with the rows, positions and documents of another, whose rows do not meet, in spans neither."""
        rows = object.__new__(cls)
        rows._set(**{name: getattr(shard, name) for name in SequenceShard.__slots__} | {"spans": ()})
        return rows


def attend_separately(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Attention of each row to itself, for trials: query (1, N, T, H), key, value (1, K, T, H) -> (1, T, N, H).

    Softmax would give the value alone. These weights depend on query and key, so that a change of either shows; they
    are 0.5 to 2.5, so that rounding is not made larger.
    """
    groups = query.shape[1] // key.shape[1]
    wide_dtype = torch.promote_types(query.dtype, torch.float32)
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    q, k = query.to(wide_dtype), key.to(wide_dtype)
    lengths = q.norm(dim=-1, keepdim=True) * k.norm(dim=-1, keepdim=True)  # (1, N, T, 1)
    cosine = (q * k).sum(-1, keepdim=True) / lengths.clamp(min=1e-30)
    size = lengths * (scaling or 1.0)
    weights = 1.5 + 0.5 * cosine * (1 + size / (1 + size))
    return (weights * value).to(value.dtype).transpose(1, 2).contiguous()
