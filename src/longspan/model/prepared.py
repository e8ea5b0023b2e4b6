"""`prepare`: bring a Hugging Face model under a home, and the encoder of a vision-language model under one of its own.

`model(input_ids, position_ids=, shard=)` then runs any plan.
"""

from dataclasses import replace
from typing import TYPE_CHECKING, Any, overload

from torch import nn
from transformers import PreTrainedModel

from longspan.comm import World
from longspan.errors import ModelError
from longspan.layout import Layout
from longspan.model.adapted_modules import adapter_dropout, is_peft_module, unwrap_peft_model
from longspan.model.exactness.check_model import check_model
from longspan.model.exactness.row_trial import try_rows_before_call
from longspan.model.execution import Execution
from longspan.model.feature import Call
from longspan.model.features import features_of
from longspan.model.kinds import score_columns
from longspan.model.layers import is_tied
from longspan.model.marks import FORMER, name_parameters
from longspan.model.options import PrepareOptions
from longspan.model.seams.attention_calls import (
    IMPLEMENTATION,
    defer_query_scaling,
    make_layers_causal,
    number_layers,
)
from longspan.model.seams.call_rules import CallRules, find_position_table
from longspan.model.seams.guards import guard_prepared_model
from longspan.model.seams.meta_pass import (
    MetaRecord,
    attention_dropout,
    checked_attend_calls,
    record_calls_and_draws,
)
from longspan.model.seams.model_calls import complete_model_call
from longspan.model.seams.rope import length_limits, replace_rotary_forwards
from longspan.model.seams.row_loss import add_row_loss
from longspan.model.seams.running_layer import hook_layer_arguments
from longspan.model.weights.fill import pop_deferred_weights
from longspan.plan.shape.families import find_family

if TYPE_CHECKING:
    from longspan.model.multimodal.multimodal_model import MultimodalModel
    from longspan.model.multimodal.take_apart import EncoderHome
    from longspan.model.pipeline.pipeline import PipelineModel


# These fields of a form are none of a model; each is done by the call beside it.
_DONE_ELSEWHERE = {
    "offload_optimizer_states": "longspan.train.offload_optimizer_states(optimizer, world)",
    "mtp_layers": "longspan.add_mtp(model, depths=…) before it",
}


@overload
def prepare(
    model: PreTrainedModel | nn.Module,
    world: World,
    *,
    encoder: None = None,
    options: PrepareOptions | None = None,
    **changes: Any,
) -> "PreTrainedModel | PipelineModel": ...


@overload
def prepare(
    model: PreTrainedModel | nn.Module,
    world: World,
    *,
    encoder: "Layout | EncoderHome",
    options: PrepareOptions | None = None,
    **changes: Any,
) -> "MultimodalModel": ...


def prepare(
    model: PreTrainedModel | nn.Module,
    world: World,
    *,
    encoder: "Layout | EncoderHome | None" = None,
    options: PrepareOptions | None = None,
    **changes: Any,
) -> "PreTrainedModel | PipelineModel | MultimodalModel":
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
    offload_weights: keep weights and their gradients in the host's memory, and a layer's weights on the device while it
        runs; of a model with an adapter the frozen weights (docs/memory.md).
    compute_dtype: of FSDP2's arithmetic, such as bfloat16; parameters and sums of gradients keep their type.
    activation_checkpointing: recompute decoder layers in backward: "full" (or True), or "selective": all but attention.
    offload_activations: keep what recomputation starts from in the host's memory.
    checkpoint_policies: in place of these two, a word of `longspan.plan.CHECKPOINT_POLICIES`, or one for each layer
    and then each depth of multi-token prediction; offload_bytes: what a rank takes of the host for it, 0: what the
    first step needs.
    segment_layers: of so many recomputed layers in a row, only the first one's input is kept; 0: each one's.
    mlp_tile_tokens: most rows that MLPs and experts compute at once; 0: all.
    attention_kernel: a row of `longspan.attention.KERNELS`; without it each call takes the first that can.
    fused_norms: RMS norms as one kernel: "on", "off", or "auto": on GPUs, those that can.
    float8: "rowwise": linears and experts of decoder layers multiply in float8 (docs/precision.md).
    frozen: under an adapter, or of a model of which nothing is trained, how the linears and experts of decoder layers
        lie: "nf4" (4 bits, whole where a layer is gathered), "stored" (as the quantised folder holds them), or "whole"
        (docs/fine-tuning.md).
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
    for name in changes.keys() & _DONE_ELSEWHERE.keys():
        raise ModelError(f"{name} is no option of prepare; use {_DONE_ELSEWHERE[name]}")
    options = replace(options or PrepareOptions(), **changes)
    if encoder is None:
        return prepare_language_model(model, world, options)
    from longspan.model.multimodal.take_apart import take_encoder_apart

    with take_encoder_apart(model, world, encoder, options) as join:
        return join(prepare_language_model(model, world, options))


def read_call_rules(given: nn.Module, world: World, options: PrepareOptions) -> CallRules:
    """Return the rules that a model without weights would have once prepared; it is tried, and to be dropped then."""
    model: Any = unwrap_peft_model(given)
    features = features_of(Call(given, model, world, options))
    _connect_operations(model)
    for feature in features:
        feature.connect(model)
    return _make_call_rules(model, record_calls_and_draws(model), options, world)


def prepare_language_model(
    given: nn.Module, world: World, options: PrepareOptions
) -> "PreTrainedModel | PipelineModel":
    """Bring a causal language model, or a wrapper of one for text only, under the world's home; see `prepare`.

    The whole connected model is checked and tried, then cut into stages, placed, filled and compiled.
    """
    model: Any = unwrap_peft_model(given)
    features = features_of(Call(given, model, world, options))
    class_draws = check_model(model, features)
    _connect_operations(model)
    for feature in features:
        feature.connect(model)
    record = record_calls_and_draws(model, class_draws)
    sharding = options.sharding(world)
    dtype = sharding.compute_dtype_of(model)
    calls = checked_attend_calls(model, options.attention_kernel, record.calls, device=world.device, dtype=dtype)
    name_parameters(model)
    model.config.use_cache = False  # no call goes on from keys and values of an earlier one
    if not (any(map(is_peft_module, model.modules())) or is_tied(model) or score_columns(model)):
        # transformers keeps two matrices that a folder has, if unequal: a saved folder is to have both too
        for config in (model.config, model.config.get_text_config()):
            config.tie_word_embeddings = False
    reduce_dtype = sharding.mixed_precision_policy(model).reduce_dtype or dtype
    added_dtype = sharding.added_dtype(model, world.home.dp_replicate)
    execution = Execution(
        model.dtype, dtype, reduce_dtype, calls, options.attention_kernel, added_dtype=added_dtype
    )
    add_row_loss(model)
    rules = _make_call_rules(model, record, options, world)
    weights = pop_deferred_weights(model)  # None: the model has its weights already
    for feature in features:
        feature.convert(model, execution)
    cuts = (feature.cut(model) for feature in features)
    # The parts are those of the first feature that cuts, or the whole model.
    parts = next(filter(None, cuts), [(model, model)])
    for root, part in parts:
        for feature in features:
            feature.place(part, root)
    prepared: Any = model
    for feature in features:
        prepared = feature.join(prepared, [root for root, _ in parts])
    models = [part for _, part in parts]
    if weights is not None:
        weights.fill_weights(models, world)
    for feature in features:
        feature.finish(prepared, models)
    prepared.call_rules = rules
    for feature in features:
        execution = replace(execution, words={**execution.words, **feature.words}, **feature.description)
    prepared.execution = execution
    guard_prepared_model(prepared, rules.architecture)
    # Before FSDP2's own hook, so that a wrong call fails before parameters are gathered.
    prepared.register_forward_pre_hook(complete_model_call, with_kwargs=True, prepend=True)
    prepared.register_forward_pre_hook(try_rows_before_call, prepend=True, with_kwargs=True)
    # Parameters that were not replaced have their name of `name_parameters` yet.
    for parameter in prepared.parameters():
        vars(parameter).pop(FORMER, None)
    return prepared


def _connect_operations(model: PreTrainedModel) -> None:
    """Layers are numbered, by which a call of attention finds its own."""
    config = model.config
    text = model.config.get_text_config()
    names = [name for name in config.sub_configs if getattr(config, name, None) is text]
    # A wrapper gets a table of the names of its text configuration; towers are not in it, as they see images whole.
    table = {"": IMPLEMENTATION, **dict.fromkeys(names, IMPLEMENTATION)}
    model.set_attn_implementation(table if names else IMPLEMENTATION)
    number_layers(model)
    if find_family(config.model_type).prefix_rows:
        make_layers_causal(model)
    replace_rotary_forwards(model)
    defer_query_scaling(model)
    hook_layer_arguments(model)
    for module in model.modules():
        # To look for padding waits for the device, and a shard has none.
        if isinstance(module, PreTrainedModel):
            vars(module)["warn_if_padding_and_no_attention_mask"] = lambda *_: None


def _make_call_rules(
    model: PreTrainedModel, record: MetaRecord, options: PrepareOptions, world: World
) -> CallRules:
    rates = [attention_dropout(call.module) for call in record.calls]
    separate = {
        "keys that an indexer chooses": any(call.indexed for call in record.calls),
        "chunks of positions that see each other": any(call.chunk for call in record.calls),
        "entries made of windows of rows": any(call.entries for call in record.calls),
    }
    drops = {
        "dropout of attention weights": any(rates),
        "dropout of an adapter's inputs": adapter_dropout(model) > 0,
    }
    return CallRules(
        type(model).__name__,
        options.attention_kernel,
        find_position_table(model),
        record.draws,
        record.draws_in_evaluation,
        row_multiple=world.home.tp if options.sequence_parallel else 1,
        prefix=find_family(model.config.model_type).prefix_rows,
        prefix_window=getattr(model.config.get_text_config(), "sliding_window", None),
        separate=tuple(name for name, has_it in separate.items() if has_it),
        separate_in_training=tuple(name for name, has_it in drops.items() if has_it),
        length_limits=tuple(sorted({limit for module in model.modules() for limit in length_limits(module)})),
    )
