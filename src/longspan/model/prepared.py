"""`prepare`: bring a Hugging Face model under a home, and the encoder of a vision-language model under one of its own.

`model(input_ids, position_ids=, shard=)` then runs any plan.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, overload
from weakref import WeakKeyDictionary, ref

import torch
from torch import nn
from torch.optim import Optimizer
from transformers import PreTrainedModel

from longspan.comm import World, raise_first_error
from longspan.errors import ModelError, plural
from longspan.layout import Layout
from longspan.model.activations.host_offload import HOST_OFFLOAD, HostOffload
from longspan.model.activations.recompute import Recomputation
from longspan.model.adapters import find_adapter, unwrap_peft_model
from longspan.model.compiled_layers import (
    choose_compiled_parts,
    compile_layers,
    start_compile_workers,
    unfuse_norms_in_graphs,
)
from longspan.model.exactness.check_model import check_encoder_adapter, check_model
from longspan.model.exactness.row_trial import try_rows_before_call
from longspan.model.execution import Execution, check_same_kernels
from longspan.model.experts.moe import connect_experts
from longspan.model.float8_layers import float8_error, use_float8
from longspan.model.layers import architecture_name, expert_modules, score_columns
from longspan.model.lora import redirect_peft_model
from longspan.model.multimodal.multimodal_model import IMAGE, MultimodalModel, check_encoder_home
from longspan.model.parts import is_tied
from longspan.model.pipeline.pipeline import PipelineModel, cut_into_stages
from longspan.model.pipeline.schedules import PipelineSettings
from longspan.model.seams.attention_calls import (
    IMPLEMENTATION,
    check_model_call,
    defer_temperature,
    find_indexers,
    hook_layer_arguments,
    is_indexed,
    number_layers,
)
from longspan.model.seams.call_rules import (
    CallRules,
    guard_prepared_model,
    has_bidirectional_prefix,
    is_prepared,
    make_layers_causal,
    position_table,
)
from longspan.model.seams.indexers import shard_indexers
from longspan.model.seams.latents import latents_text
from longspan.model.seams.mixers import find_mixers, shard_mixers
from longspan.model.seams.norms import fuse_norms, split_long_norms
from longspan.model.seams.rope import choose_frequencies_by_document
from longspan.model.seams.row_loss import add_row_loss
from longspan.model.sharding import Placement, Sharding
from longspan.model.weights.fill import find_deferred_weights, pop_deferred_weights

if TYPE_CHECKING:
    from longspan.model.take_apart import EncoderHome


FORMER = "name_before_prepare"  # of parameters that `prepare` replaces


@dataclass(frozen=True, kw_only=True)
class PrepareOptions:
    """How a model is brought under a home; `prepare` takes each as a keyword and explains it."""

    shard_parameters: bool = True
    reshard_after_forward: bool = True
    sync_each_batch: bool = True
    activation_checkpointing: bool | str = False
    offload_activations: bool = False
    measures: str | Sequence[str] | None = None
    host_bytes: int = 0
    mlp_tile_tokens: int = 0
    segment_layers: int = 0
    compute_dtype: torch.dtype | None = None
    attention_kernel: str | None = None
    fused_norms: Literal["auto", "on", "off"] = "auto"
    float8: Literal["", "rows"] = ""
    compiled: Literal["auto", "layers", "none"] = "none"
    virtual_stages: int = 1
    pipeline_schedule: str = "1f1b"
    sequence_parallel: bool = False

    def placement(self, world: World) -> Placement:
        """Decide what becomes of every layer under the world's home; ModelError for options that exclude each other."""
        if self.measures is None:
            recomputation = Recomputation.from_options(
                self.activation_checkpointing, offload=self.offload_activations, host_bytes=self.host_bytes
            )
        else:
            for name in ("activation_checkpointing", "offload_activations"):
                if (value := getattr(self, name)) not in (False, "none"):
                    raise ModelError(f"measures say what each layer keeps, and {name} is {value!r}; use one of them")
            recomputation = Recomputation.from_measures(self.measures, self.host_bytes)
        # Passes of a stage's micro-batches alternate: layers that free parameters would gather them again for each.
        frees_parameters = self.reshard_after_forward and world.home.pp == 1
        return Placement(
            world,
            Sharding(
                parameters=self.shard_parameters,
                reshard_after_forward=frees_parameters,
                sync_each_batch=self.sync_each_batch,
                compute_dtype=self.compute_dtype,
            ),
            replace(recomputation, segment_layers=self.segment_layers),
            sequence_parallel=self.sequence_parallel,
            mlp_tile_tokens=self.mlp_tile_tokens,
        )

    def pipeline(self, world: World) -> PipelineSettings:
        """Decide the stages of the world's home. Raises PlanError for a schedule that does not fit it."""
        return PipelineSettings(self.pipeline_schedule, world.home.pp, self.virtual_stages)


@overload
def prepare(
    model: PreTrainedModel | nn.Module,
    world: World,
    *,
    encoder: None = None,
    options: PrepareOptions | None = None,
    **changes: Any,
) -> PreTrainedModel | PipelineModel: ...


@overload
def prepare(
    model: PreTrainedModel | nn.Module,
    world: World,
    *,
    encoder: "Layout | EncoderHome",
    options: PrepareOptions | None = None,
    **changes: Any,
) -> MultimodalModel: ...


def prepare(
    model: PreTrainedModel | nn.Module,
    world: World,
    *,
    encoder: "Layout | EncoderHome | None" = None,
    options: PrepareOptions | None = None,
    **changes: Any,
) -> PreTrainedModel | PipelineModel | MultimodalModel:
    """Bring a Hugging Face causal language model under the world's home; returns the same model.

    >>> model = prepare(Qwen3ForCausalLM(config), world)
    >>> shard = bind(plan.micro_batches[0], world).with_padding()
    >>> logits = model(input_ids=ids[None], position_ids=shard.position_ids[None], shard=shard).logits  # (1, T, V)

    All ranks call it together, with equal weights. Keywords are those of `PrepareOptions`, or `options=` as one value:

    shard_parameters: over the slots with FSDP2; False: every rank keeps a copy.
    reshard_after_forward: free a layer's gathered parameters after each pass (not over stages); False: they stay
        gathered through all micro-batches of a step.
    sync_each_batch: sum gradients over the slots in every micro-batch; False, with reshard_after_forward=False: once a
        step, in its last one, until when they are whole on every rank.
    compute_dtype: of FSDP2's arithmetic, such as bfloat16; parameters and sums of gradients keep their type.
    activation_checkpointing: recompute decoder layers in backward: "full" (or True), or "selective": all but attention.
    offload_activations: keep what recomputation starts from in the host's memory.
    measures: in place of these two, a word of `longspan.plan.CHECKPOINT_POLICIES`, or one for each layer and then each
    depth of multi-token prediction; host_bytes: what a rank takes of the host for it, 0: what the first step needs.
    segment_layers: of so many recomputed layers in a row, only the first one's input is kept; 0: each one's.
    mlp_tile_tokens: most rows that MLPs and experts compute at once; 0: all.
    attention_kernel: a row of `longspan.attention.KERNELS`; without it each call takes the first that can.
    fused_norms: RMS norms as one kernel: "on", "off", or "auto": on GPUs, those that can.
    float8: "rowwise": linears and experts of decoder layers multiply in float8 (docs/precision.md).
    compiled: "layers" (each as two halves around attention), "none", or "auto": layers on GPUs without tensor
        parallelism, from 2048 features on.
    virtual_stages, pipeline_schedule: where `home.pp` is above 1; "1f1b" or "zero_bubble".
    sequence_parallel: where `home.tp` is above 1, norms and residuals hold rows / tp: plan with `row_multiple=home.tp`.
    encoder: the home of tower and projector of a model from images and text: a Layout over the same ranks, or an
        `EncoderHome`.

    Returns a PipelineModel of this rank's stages where `home.pp` is above 1, a MultimodalModel with `encoder`, and the
    model inside of a PeftModel with a LoRA adapter, which alone is trained and saved.

    A model that draws at random outside attention in training is evaluated as it is; training it is refused. Whether
    rows influence each other outside attention is tried by a few passes before the first step or call (docs/limits.md).

    Raises ModelError, naming layers and settings, for a model that cannot run exactly over a sharded sequence.
    """
    options = replace(options or PrepareOptions(), **changes)
    if encoder is None:
        return prepare_language_model(model, world, options)
    from longspan.model.take_apart import EncoderHome, prepare_and_join_encoder, take_apart_or_undo

    home = encoder
    if isinstance(home, Layout):
        sharded, dtype = options.shard_parameters, options.compute_dtype
        home = EncoderHome(home=home, shard_parameters=sharded, compute_dtype=dtype)
    elif not isinstance(home, EncoderHome):
        raise ModelError(
            f"encoder is a {type(home).__name__}; give a Layout over the language model's ranks, or "
            "EncoderHome(home=…) with settings"
        )
    stock = unwrap_peft_model(model)
    weights, adapter = find_deferred_weights(stock), find_adapter(stock)
    _name_parameters(stock)
    check_encoder_home(IMAGE, home.home, world)
    with take_apart_or_undo(stock) as parts:
        if adapter is not None:
            check_encoder_adapter(parts.encoder, adapter, home.home.tp)
        language_model: Any = prepare_language_model(model, world, options)
        language_model.adapter = adapter  # also if only the encoder has one
        prepared = prepare_and_join_encoder(parts, language_model, world, home, weights)
    redirect_peft_model(model, prepared)
    return prepared


def prepare_language_model(
    model: PreTrainedModel | nn.Module, world: World, options: PrepareOptions
) -> PreTrainedModel | PipelineModel:
    """Bring a causal language model, or a wrapper of one for text only, under the world's home; see `prepare`.

    The whole connected model is checked and tried, then cut into stages, placed, filled and compiled.
    """
    pipeline, placement = options.pipeline(world), options.placement(world)
    if options.fused_norms not in ("auto", "on", "off"):
        raise ModelError(f"fused_norms is {options.fused_norms!r}; use 'auto', 'on' or 'off'")
    peft_model, model = model, unwrap_peft_model(model)
    compiled = options.compiled
    if compiled != "none":
        compiled = choose_compiled_parts(compiled, model, world.device, world.home.tp)
    if compiled != "none" and world.device.type == "cuda":
        ranks_of_host = min(len(world.home.ranks), world.node_size * world.home.tp)  # node_size counts slots
        start_compile_workers(ranks_of_host)

    def connect_layers(model: PreTrainedModel) -> None:
        on_gpu = world.device.type == "cuda"
        if options.fused_norms == "on" or (options.fused_norms == "auto" and on_gpu):
            fuse_norms(model)
        if on_gpu:
            split_long_norms(model)
        if compiled == "layers":  # the compiler fuses the norms in its graphs itself
            unfuse_norms_in_graphs(model)
        _connect_operations(model)

    if options.float8 and isinstance(model, PreTrainedModel):  # ranks' devices may differ
        raise_first_error(world, float8_error(model, options.float8, placement, world))
    kernel, stages = options.attention_kernel, pipeline.stages
    adapter, calls, record = check_model(model, placement, connect_layers, stages=stages, kernel=kernel)
    assert isinstance(model, PreTrainedModel)  # others were refused
    _name_parameters(model)
    model.config.use_cache = False  # no call goes on from keys and values of an earlier one
    if (
        adapter is None and not is_tied(model) and not score_columns(model)
    ):  # transformers keeps two matrices that a folder has, if unequal
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False  # so that a saved folder has both too
    mixers, float8 = len(find_mixers(model)), use_float8(model) if options.float8 else ""
    compute_dtype = placement.dtype_of(model)
    dtypes = model.dtype, compute_dtype, placement.sharding.mixed_precision_policy(model).reduce_dtype or compute_dtype
    indexed = [module for module in model.modules() if is_indexed(module)]
    latents = latents_text(indexed, kernel, compute_dtype, world.device) if indexed else ""
    execution = Execution(*dtypes, calls, options.attention_kernel, mixers, float8, latents=latents)
    if placement.recomputation.repeats_exchanges and world.home.slots > 1:
        check_same_kernels(execution, world)
    add_row_loss(model)
    rules = CallRules(
        type(model).__name__,
        kernel,
        position_table(model),
        record.draws,
        record.draws_in_evaluation,
        placement.row_multiple,
        prefix=has_bidirectional_prefix(model.config),
        prefix_window=getattr(model.config.get_text_config(), "sliding_window", None),
    )
    weights = pop_deferred_weights(model)  # None: the model has its weights already
    offload = placement.recomputation.make_offload(world)
    if world.home.pp > 1:
        prepared = _place_stages(model, placement, pipeline, offload)
        models = [stage.model for stage in prepared.stages]
    else:
        prepared, models = model, [model]
        placement.place_layers(model, model, offload, has_experts=bool(expert_modules(model)))
    setattr(prepared, HOST_OFFLOAD, offload)
    if weights is not None:
        weights.fill_weights(models, world)
    compiled_text = "" if compiled == "none" else compile_layers(models)
    values: Any = prepared
    values.call_rules, values.execution = rules, replace(execution, compiled=compiled_text)
    guard_prepared_model(prepared, rules.architecture)
    # Before FSDP2's own hook, so that a wrong call fails before parameters are gathered.
    prepared.register_forward_pre_hook(check_model_call, with_kwargs=True, prepend=True)
    if adapter is not None:
        prepared.adapter = adapter  # pyright: ignore[reportAttributeAccessIssue, reportArgumentType]
        redirect_peft_model(peft_model, prepared)
    prepared.register_forward_pre_hook(try_rows_before_call, prepend=True, with_kwargs=True)
    for parameter in prepared.parameters():  # those that were not replaced
        vars(parameter).pop(FORMER, None)
    return prepared


def _connect_operations(model: PreTrainedModel) -> None:
    config, text = model.config, model.config.get_text_config()
    names = [name for name in config.sub_configs if getattr(config, name, None) is text]
    # Of a wrapper a table of names, without towers: they see images whole.
    table = {"": IMPLEMENTATION, **dict.fromkeys(names, IMPLEMENTATION)}
    model.set_attn_implementation(table if names else IMPLEMENTATION)
    number_layers(model)
    make_layers_causal(model)
    choose_frequencies_by_document(model)
    defer_temperature(model)
    shard_mixers(model)
    if find_indexers(model):
        shard_indexers(model)
    hook_layer_arguments(model)
    connect_experts(model)
    for module in model.modules():
        if isinstance(module, PreTrainedModel):  # to look for padding waits for the device, and a shard has none
            vars(module)["warn_if_padding_and_no_attention_mask"] = lambda *_: None


def _place_stages(
    model: PreTrainedModel, placement: Placement, pipeline: PipelineSettings, offload: HostOffload | None
) -> PipelineModel:
    """A stage is a copy without the forward that takes `row_loss`, which is set anew where the head is."""
    dtype, has_experts = placement.dtype_of(model), bool(expert_modules(model))
    stages = cut_into_stages(model, placement.world, pipeline)
    for stage in stages:
        if stage.last:
            add_row_loss(stage.model, tried=True)
        placement.place_layers(stage.model, stage, offload, has_experts=has_experts)
    return PipelineModel(model, placement.world, stages, pipeline, dtype)


def refuse_unprepared_model(model: nn.Module) -> None:
    """Raise ModelError for a transformers model whose attention would take the local rows for the whole sequence."""
    if isinstance(model, PreTrainedModel) and not is_prepared(model):
        raise ModelError(
            f"{type(model).__name__} was not prepared; call model = longspan.prepare(model, world) before it runs"
        )


def _name_parameters(model: nn.Module) -> None:
    refuse_gradient_hooks(model)
    for name, parameter in model.named_parameters():
        setattr(parameter, FORMER, name)


def refuse_gradient_hooks(model: nn.Module) -> None:
    """Raise ModelError for a parameter with a hook on its gradient."""
    for name, parameter in model.named_parameters():
        if parameter._backward_hooks or parameter._post_accumulate_grad_hooks:
            raise ModelError(
                f"{name} has a hook on its gradient, which FSDP2 does not run for a gradient that it sums; change "
                "gradients after the backward pass (in a Trainer on_pre_optimizer_step, or training_step)"
            )


_CHECKED = WeakKeyDictionary[Optimizer, ref[nn.Module]]()  # optimizers, and the model that each updates


def refuse_other_parameters(model: nn.Module, optimizer: Optimizer) -> None:
    """Raise ModelError for an optimizer of parameters that `prepare` replaced, or of none that the model trains.

    Parameters beside the model's, such as those of a loss, are the user's. An optimizer is looked at once for a model.
    """
    if (checked := _CHECKED.get(optimizer)) is not None and checked() is model:
        return
    held = {id(parameter): parameter for group in optimizer.param_groups for parameter in group["params"]}
    trains = {id(parameter): parameter.requires_grad for parameter in model.parameters()}
    others = [parameter for key, parameter in held.items() if key not in trains]
    former = [getattr(parameter, FORMER) for parameter in others if hasattr(parameter, FORMER)]
    trained, updated = sum(trains.values()), sum(trains.get(key, False) for key in held)
    idle_stage = isinstance(model, PipelineModel) and not held
    if former or (trained and not updated and not idle_stage):
        raise ModelError(
            f"the optimizer, {type(optimizer).__name__}, holds {updated} of the {trained} parameters that "
            f"{architecture_name(model)} trains, and {plural(len(others), 'other')}, of which {len(former)} were "
            f"its own before prepare replaced them {former[:1]}; make the optimizer after prepare, "
            "of model.parameters(), or in a Trainer by trainer.create_optimizer()"
        )
    _CHECKED[optimizer] = ref(model)
