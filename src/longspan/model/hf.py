"""`prepare`: bring a Hugging Face model under a home; then `model(input_ids, position_ids=, shard=)` runs anywhere.

Attention goes through transformers' AttentionInterface under the name "longspan". No mask function is registered under
that name, so transformers builds no mask: the shard owns masking. Keyword arguments given to the model reach every
attention call, and the shard is one of them; the model's modules keep no communication state.

Sharding of parameters is in `parallelize.py`, refusals in `refusals.py` and `probe.py`.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel

from longspan.attention import attend
from longspan.comm import SequenceShard, World
from longspan.errors import ModelError
from longspan.model.expert_parallel import check_experts
from longspan.model.head import open_head
from longspan.model.kernels import check_kernel, keep_kernel, with_kernel
from longspan.model.moe import expert_modules, use_experts
from longspan.model.parallelize import shard_over_slots
from longspan.model.pipeline import PipelinedModel, cut_into_stages
from longspan.model.probe import AttentionCall, Probe, probe_model, unknown_tensors
from longspan.model.recompute import check_recompute, recompute_activations
from longspan.model.refusals import refuse_unsupported
from longspan.model.schedules import check_schedule
from longspan.model.tensor_parallel import ask_for_rows, refuse_tensor_parallel, split_over_tp

IMPLEMENTATION = "longspan"


def prepare(
    model: PreTrainedModel,
    world: World,
    *,
    shard_parameters: bool = True,
    reshard_after_forward: bool = True,
    activation_checkpointing: bool | str = False,
    offload_activations: bool = False,
    recompute_layers: int = 0,
    compute_dtype: torch.dtype | None = None,
    attention_kernel: str | None = None,
    probe: bool = True,
    virtual_stages: int = 1,
    pipeline_schedule: str = "1f1b",
    sequence_parallel: bool = False,
) -> PreTrainedModel | PipelinedModel:
    """Bring a Hugging Face causal language model under the world's home; returns the same model.

    >>> model = prepare(Qwen3ForCausalLM(config), world)
    >>> shard = bind(plan.micro_batches[0], world).with_padding()
    >>> logits = model(input_ids=ids[None], position_ids=shard.position_ids[None], shard=shard).logits  # (1, T, V)

    All ranks call it together, with equal weights. `shard_parameters` shards them over the slots with FSDP2, otherwise
    every rank keeps a copy; `reshard_after_forward` frees a layer's gathered parameters between forward and backward;
    `activation_checkpointing` recomputes each decoder layer in backward: "full" (or True) all of it, "selective" all
    but attention, whose output is kept; `recompute_layers` does so for that many of a stage's layers alone, the first
    (0: each); `offload_activations` keeps in the host's memory what recomputation starts from. `compute_dtype`
    (bfloat16, say) is what FSDP2 computes in, over parameters and gradient sums in their own type. `attention_kernel`
    names a row of `longspan.attention.KERNELS`; without it each call takes the first that can. `probe=False` skips the
    trial forward pass that shows whether every layer reaches `attend`.

    Where `home.pp` is above 1, this rank's stages are cut out, `virtual_stages` of them, and returned as a
    PipelinedModel; the rest of the model is freed. `pipeline_schedule` is "1f1b" (interleaved with several virtual
    stages), "gpipe", "zero_bubble" or "zbv" (two virtual stages, folded). Parameters then stay gathered from the first
    forward to the last backward pass of a step, whatever `reshard_after_forward` says.

    Where `home.tp` is above 1, heads, widths and vocabulary are split over the tensor-parallel ranks of a slot by the
    model's plan; with `sequence_parallel`, norms and residuals hold rows / tp of a slot's rows, which must be a
    multiple of tp: plan with `row_multiple=home.tp`.

    Raises ModelError, naming layers and settings, for a model that cannot run exactly over a sharded sequence.
    """
    check_schedule(pipeline_schedule, world.home.pp, virtual_stages)
    if is_prepared(model):
        raise ModelError(f"this {type(model).__name__} was prepared already; prepare a model once")
    refuse_unsupported(model)
    refuse_tensor_parallel(model, world, sequence_parallel=sequence_parallel)
    check_experts(model, world.home, shard_parameters=shard_parameters)
    check_recompute(
        model,
        activation_checkpointing,
        offload=offload_activations,
        layers=recompute_layers,
        stages=world.home.pp * virtual_stages,
    )
    if compute_dtype is not None and not shard_parameters:
        raise ModelError("compute_dtype is FSDP2's mixed precision; it needs shard_parameters=True")
    model.set_attn_implementation(IMPLEMENTATION)
    use_experts(model)
    calls = probe_model(model) if probe else ()
    check_kernel(model, attention_kernel, calls, device=world.device, dtype=compute_dtype or model.dtype)
    model.config.use_cache = False
    open_head(model, probe=probe)
    place = partial(
        _place,
        world=world,
        shard_parameters=shard_parameters,
        reshard_after_forward=reshard_after_forward and world.home.pp == 1,  # see schedules.SPLIT_BACKWARD
        activation_checkpointing=activation_checkpointing,
        offload_activations=offload_activations,
        recompute_layers=recompute_layers,
        compute_dtype=compute_dtype,
        sequence_parallel=sequence_parallel,
        has_experts=bool(expert_modules(model)),
    )
    prepared: PreTrainedModel | PipelinedModel = model
    if world.home.pp == 1:
        place(model, root=model)
    else:
        dtype = compute_dtype or model.dtype
        stages = cut_into_stages(model, world, virtual_stages=virtual_stages, schedule=pipeline_schedule)
        for stage in stages:
            if stage.last:
                open_head(stage.model, probe=False)
            place(stage.model, root=stage)
        prepared = PipelinedModel(model, world, stages, pipeline_schedule, dtype)
    keep_kernel(prepared, attention_kernel)
    if sequence_parallel and prepared is not model:
        ask_for_rows(prepared, world.home.tp)
    # Before FSDP2's own hook, so that a wrong call fails before parameters are gathered.
    prepared.register_forward_pre_hook(check_call, with_kwargs=True, prepend=True)
    return prepared


def _place(
    model: PreTrainedModel,
    *,
    root: nn.Module,
    world: World,
    shard_parameters: bool,
    reshard_after_forward: bool,
    activation_checkpointing: bool | str,
    offload_activations: bool,
    recompute_layers: int,
    compute_dtype: torch.dtype | None,
    sequence_parallel: bool,
    has_experts: bool,
) -> None:
    """Bring the layers that are here under the home; `root` is what will be called: the model, or a stage around it.

    `has_experts` is of the whole model: a stage may have none.
    """
    if world.home.tp > 1:
        split_over_tp(model, world, sequence_parallel=sequence_parallel, sum_expert_gradients=not shard_parameters)
    recompute_activations(model, activation_checkpointing, offload=offload_activations, layers=recompute_layers)
    if shard_parameters:
        settings = {"reshard_after_forward": reshard_after_forward, "compute_dtype": compute_dtype}
        shard_over_slots(model, world, root=root, has_experts=has_experts, **settings)
    else:
        nn.Module.to(root, world.device)
    if sequence_parallel:
        ask_for_rows(root, world.home.tp)


def is_prepared(model: nn.Module) -> bool:
    """Whether `prepare` has brought this model under a home."""
    return any(hook is check_call for hook in model._forward_pre_hooks.values())


def refuse_unprepared(model: nn.Module) -> None:
    """Raise ModelError for a transformers model whose attention would take the local rows for the whole sequence."""
    if isinstance(model, PreTrainedModel) and not is_prepared(model):
        raise ModelError(
            f"{type(model).__name__} was not prepared; call model = longspan.prepare(model, world) before it runs"
        )


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
    **others: Any,
) -> tuple[Tensor, None]:
    """transformers' attention function: query (1, N, T, H), key and value (1, K, T, H) to (1, T, N, H) and no weights.

    Raises ModelError without a shard, with a mask, or with more than one batch row.
    """
    causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
    if isinstance(shard, Probe):
        sizes, unknown = (query.shape[-1], value.shape[-1]), unknown_tensors(others)
        call = AttentionCall(module, causal, sliding_window, softcap, s_aux is not None, unknown, *sizes)
        shard.calls.append(call)
        return query.new_empty(1, query.shape[2], query.shape[1], value.shape[-1]), None
    rows = _checked_shard(module, query, attention_mask, shard)
    q, k, v = (x.squeeze(0).transpose(0, 1) for x in (query, key, value))  # (T, N, H), (T, K, H), (T, K, H)
    settings = {"causal": causal, "window": sliding_window, "sinks": s_aux, "softcap": softcap}
    where = {"layer": layer_index(module), "kernel": attention_kernel}
    out = attend(q, k, v, rows, scale=scaling, dropout=dropout, **where, **settings)
    return out.unsqueeze(0), None


AttentionInterface.register(IMPLEMENTATION, attention)


def check_call(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> tuple[tuple[()], dict[str, Any]]:
    """Forward pre-hook of a prepared model: refuse what would not be exact, on the host, before any collective.

    Rows without a batch dim are taken too: `input_ids` (T,) becomes (1, T). Raises ModelError.
    """
    if len(args) > 1:
        raise ModelError(f"call {_call(model)} with keyword arguments; got {len(args)} positional ones")
    given = {**({"input_ids": args[0]} if args else {}), **{k: v for k, v in kwargs.items() if v is not None}}
    shard = given.get("shard")
    if isinstance(shard, Probe):
        return (), given
    if not isinstance(shard, SequenceShard):
        found = "no shard" if shard is None else f"shard={type(shard).__name__}"
        raise ModelError(
            f"{type(model).__name__} got {found}; call {_call(model)} with shard = bind(micro_batch, world)"
        )
    _refuse_arguments(model, given)
    for name in ("input_ids", "inputs_embeds", "position_ids"):
        if name in given:
            given[name] = _one_row_of(name, given[name], shard)
    return (), with_kernel(model, given) | {"use_cache": False}


def _refuse_arguments(model: nn.Module, given: Mapping[str, Any]) -> None:
    reasons = {
        "labels": "labels would be shifted across rows that are not neighbours; use longspan.run_step",
        "attention_mask": "the shard says which rows see which; leave attention_mask out",
        "past_key_values": "there is no key/value cache in training; leave past_key_values out",
        "output_attentions": "attention weights are never formed; leave output_attentions out",
        "use_cache": "there is no key/value cache in training; use_cache must be False",
    }
    for name, reason in reasons.items():
        if given.get(name) is not None and given[name] is not False:
            raise ModelError(f"{type(model).__name__} got {name}=: {reason}")
    if "position_ids" not in given:
        raise ModelError(
            f"{type(model).__name__} got no position_ids; the local rows are not consecutive: call {_call(model)}"
        )


def _one_row_of(name: str, x: Tensor, shard: SequenceShard) -> Tensor:
    """The tensor as (1, T, …), checked against the shard's T rows."""
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


def vocabulary_size(model: nn.Module) -> int | None:
    """How many token ids the model's input embedding knows; None where it has none to ask."""
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    return getattr(embedding, "num_embeddings", None)


def layer_index(module: nn.Module) -> int | None:
    """The global layer index that transformers gives an attention module."""
    return getattr(module, "layer_idx", None)


def _call(model: nn.Module) -> str:
    return f"{type(model).__name__}(input_ids=ids, position_ids=shard.position_ids[None], shard=shard)"
