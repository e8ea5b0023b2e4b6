"""A language model under a home: `model(input_ids, position_ids=, shard=)` then runs any plan.

Whether a model may run is decided in `exactness/check_model.py`; the arguments of its calls are checked in
`seams/attention_calls.py`, and its layers are sharded, split and recomputed by `placement/placement.py`.
"""

from typing import Any, Literal

import torch
from torch import nn
from transformers import PreTrainedModel

from longspan.attention import AttentionCall
from longspan.comm import World
from longspan.errors import ModelError
from longspan.model.adapters import model_inside
from longspan.model.exactness.check_model import check_model
from longspan.model.execution import Execution
from longspan.model.experts.moe import expert_modules, use_experts
from longspan.model.lora.peft_model import redirect
from longspan.model.pipeline.pipeline import PipelineModel, cut_into_stages
from longspan.model.pipeline.settings import PipelineSettings
from longspan.model.placement.placement import Placement
from longspan.model.placement.recompute import Recomputation
from longspan.model.placement.sharding import Sharding
from longspan.model.seams.attention_calls import IMPLEMENTATION, check_call
from longspan.model.seams.attention_record import FirstPass
from longspan.model.seams.call_rules import (
    CallRules,
    attend_causally,
    has_prefix,
    is_prepared,
    position_table,
)
from longspan.model.seams.forwards.fused_norms import fuse_norms
from longspan.model.seams.forwards.llama4 import scale_queries_by_position
from longspan.model.seams.forwards.long_norms import split_long_norms
from longspan.model.seams.forwards.rope_by_length import choose_frequencies_by_document
from longspan.model.seams.forwards.row_loss import add_row_loss
from longspan.model.seams.layer_arguments import keep_layer_arguments
from longspan.model.seams.layer_numbers import number_layers
from longspan.model.seams.mixer_calls import check_kernels, shard_mixers
from longspan.model.seams.mixers import mixers_of
from longspan.model.seams.refusals import guard
from longspan.model.weights.fill import take_weights_to_come


def prepare_language_model(
    model: PreTrainedModel | nn.Module,
    world: World,
    *,
    shard_parameters: bool = True,
    reshard_after_forward: bool = True,
    activation_checkpointing: bool | str = False,
    offload_activations: bool = False,
    recompute_layers: int = 0,
    compute_dtype: torch.dtype | None = None,
    attention_kernel: str | None = None,
    mixer_kernels: tuple[str, ...] = (),
    fused_norms: Literal["auto", "on", "off"] = "auto",
    probe: bool = True,
    virtual_stages: int = 1,
    pipeline_schedule: str = "1f1b",
    sequence_parallel: bool = False,
) -> PreTrainedModel | PipelineModel:
    """Bring a causal language model, or a wrapper of one for text alone, under the world's home; see `prepare`.

    Raises ModelError, naming layers and settings, for a model that cannot run exactly over a sharded sequence.
    """
    pipeline_settings = PipelineSettings(pipeline_schedule, world.home.pp, virtual_stages)
    # A stage's micro-batches alternate: layers that free their parameters would gather them for each pass of each.
    frees_parameters = reshard_after_forward and world.home.pp == 1
    placement = Placement(
        world,
        Sharding(parameters=shard_parameters, reshard_after_forward=frees_parameters, compute_dtype=compute_dtype),
        Recomputation.of(activation_checkpointing, layers=recompute_layers, offload=offload_activations),
        sequence_parallel=sequence_parallel,
    )
    if fused_norms not in ("auto", "on", "off"):
        raise ModelError(f"fused_norms is {fused_norms!r}; use 'auto', 'on' or 'off'")
    peft_model, model = model, model_inside(model)

    def connect(model: PreTrainedModel) -> None:
        check_kernels(model, mixer_kernels, placement.dtype_of(model), world.device)
        _replace_norms(model, world.device.type, fused_norms)
        _connect(model, mixer_kernels)

    stages = pipeline_settings.stages
    evidence = check_model(model, placement, connect, stages=stages, kernel=attention_kernel, probe=probe)
    assert isinstance(model, PreTrainedModel)  # others were refused
    model.config.use_cache = False
    execution = _execution(model, placement, evidence.calls, attention_kernel, mixer_kernels)
    # The first pass would show it on the last stage alone, and the others wait.
    tried = add_row_loss(model, probe=probe or world.home.pp > 1, required=probe)
    rules = CallRules(
        type(model).__name__,
        attention_kernel,
        position_table(model),
        evidence.draws,
        evidence.draws_in_evaluation,
        placement.row_multiple,
        prefix=has_prefix(model.config),
        prefix_window=getattr(model.config.get_text_config(), "sliding_window", None),
    )
    weights = take_weights_to_come(model)
    if world.home.pp > 1:
        prepared = _cut_and_place(model, placement, pipeline_settings, tried=tried)
        prepared.probed = probe
        models = [stage.model for stage in prepared.stages]
    else:
        prepared, models = model, [model]
        placement.place(model, model, has_experts=bool(expert_modules(model)))
        if not probe:
            FirstPass(prepared)
    if weights is not None:
        weights.fill(models, world)
    _keep(prepared, rules, execution)
    if evidence.adapter is not None:
        prepared.adapter = evidence.adapter  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
        redirect(peft_model, prepared)
    return prepared


def _replace_norms(model: PreTrainedModel, device: str, fused_norms: str) -> None:
    if fused_norms == "on" or (fused_norms == "auto" and device == "cuda"):
        fuse_norms(model, required=fused_norms == "on")
    if device == "cuda":
        split_long_norms(model)


def _connect(model: PreTrainedModel, mixer_kernels: tuple[str, ...]) -> None:
    """Have the model's attention, mixers and experts call this package."""
    model.set_attn_implementation(_of_text(model))
    number_layers(model)
    attend_causally(model)
    choose_frequencies_by_document(model)
    scale_queries_by_position(model)
    shard_mixers(model, mixer_kernels)
    keep_layer_arguments(model)
    use_experts(model)


def _execution(
    model: PreTrainedModel,
    placement: Placement,
    calls: tuple[AttentionCall, ...],
    kernel: str | None,
    mixer_kernels: tuple[str, ...],
) -> Execution:
    dtype, reduced = placement.dtype_of(model), placement.reduce_dtype_of(model)
    return Execution(model.dtype, dtype, reduced, calls, kernel, len(mixers_of(model)), mixer_kernels)


def _of_text(model: PreTrainedModel) -> str | dict[str, str]:
    """Our attention for a wrapper's text model and not for its towers, which see images whole."""
    config, text = model.config, model.config.get_text_config()
    names = [name for name in config.sub_configs if getattr(config, name, None) is text]
    return {"": IMPLEMENTATION, **dict.fromkeys(names, IMPLEMENTATION)} if names else IMPLEMENTATION


def _cut_and_place(
    model: PreTrainedModel, placement: Placement, pipeline_settings: PipelineSettings, *, tried: bool
) -> PipelineModel:
    """This rank's stages, each placed as a model of its own; the rest of the model is freed."""
    dtype, has_experts = placement.dtype_of(model), bool(expert_modules(model))
    stages = cut_into_stages(model, placement.world, pipeline_settings)
    for stage in stages:
        if stage.last:
            add_row_loss(stage.model, probe=False, tried=tried)
        placement.place(stage.model, stage, has_experts=has_experts)
    return PipelineModel(model, placement.world, stages, pipeline_settings, dtype)


def _keep(prepared: PreTrainedModel | PipelineModel, rules: CallRules, execution: Execution) -> None:
    """Have every call of a prepared model checked, and refuse what its own class would do with its weights."""
    values: Any = prepared
    values.call_rules, values.execution = rules, execution
    guard(prepared, rules.architecture)
    # Before FSDP2's own hook, so that a wrong call fails before parameters are gathered.
    prepared.register_forward_pre_hook(check_call, with_kwargs=True, prepend=True)


def refuse_unprepared(model: nn.Module) -> None:
    """Raise ModelError for a transformers model whose attention would take the local rows for the whole sequence."""
    if isinstance(model, PreTrainedModel) and not is_prepared(model):
        raise ModelError(
            f"{type(model).__name__} was not prepared; call model = longspan.prepare(model, world) before it runs"
        )


def vocabulary_size(model: nn.Module) -> int | None:
    """How many token ids the model's input embedding knows; None where it has none to ask."""
    if isinstance(model, PipelineModel):
        return model.vocabulary_size
    embedding = getattr(model, "get_input_embeddings", lambda: None)()
    return getattr(embedding, "num_embeddings", None)
