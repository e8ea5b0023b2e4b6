"""The model of a run prepared by its configuration, and refused before where it cannot be, or a rank has no room."""

import math
import warnings
from contextlib import ExitStack
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PreTrainedConfig, PreTrainedModel

from longspan.comm import World
from longspan.comm.all_ranks import run_on_every_rank, silence_warnings_of_other_ranks
from longspan.config.defaults import encoder_default, encoder_is_given
from longspan.config.dtypes import compute_dtype
from longspan.config.keys import AUTO
from longspan.config.memory_keys import form_of_config
from longspan.config.plan_section import name_of_key
from longspan.config.sections import ModelConfig, RunConfig, held_out_set
from longspan.errors import ConfigError, LongspanError, plural
from longspan.host import free_host_bytes
from longspan.layout import Layout
from longspan.model import prepare
from longspan.model.exactness.check_model import check_model_on_this_rank
from longspan.model.feature import Call
from longspan.model.features import features_of
from longspan.model.float8_layers import float8_device_reason
from longspan.model.multimodal.multimodal_model import MultimodalModel
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.prepared import PrepareOptions, read_call_rules
from longspan.model.weights.fill import stored_formats
from longspan.plain_text import gib_text
from longspan.plan.memory.settings import known_state_numbers
from longspan.plan.shape.sharing_rules import SharingRules
from longspan.resolve.planner_config import PlannerConfig
from longspan.train.optim.parameter_groups import check_named_groups, freeze_by_name
from longspan.train.run_model.load import add_configured_adapter, load_run_model, make_model_without_weights

if TYPE_CHECKING:
    from longspan.plan import MemoryPlan


AnyModel = PreTrainedModel | PipelineModel | MultimodalModel


def check_run_model(
    config: RunConfig, world: World, configuration: PreTrainedConfig
) -> tuple[list[str], SharingRules]:
    """Refuse what the run's model, its folder and its adapter decide, before data are read; return the adapter's lines
    for the log, and what the model forbids of shared prefixes, which data and plans of memory need. Formats of frozen
    weights that it forbids are refused.

    The model is made without weights, checked as `prepare` would on the host, and dropped again. The data decide later
    whether a model with towers sees images: it is refused here only if it can run neither without nor with them. Raises
    the LongspanError of the first check that fails; where both ways fail by different reasons, one error with both.
    """
    from longspan.model.adapters.new_adapter import adapter_notes

    if encoder_is_given(config):
        possible_images = [True]
    elif type(configuration) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        possible_images = [False, True]
    else:
        possible_images = [False]
    errors = list[LongspanError]()
    for images in possible_images:
        try:
            # The warnings come once more when the run loads the model.
            with warnings.catch_warnings(action="ignore"):
                model = load_run_model(config, configuration, images=images)
                adapted_model = _add_adapter_and_freeze(config, model, images=images)
            lines = [*adapter_notes(model)] if config.lora.rank else []
            check_comm_types_fit_layers(config, model)
            options = _prepare_options(config, world, model, None, training=True)
            if config.lora.rank:  # formats of frozen weights that this model cannot have are refused here too
                options = replace(options, frozen=frozen_form_and_saving(config.model, model)[0])
            check_as_prepare_does(model, world, options, images=images)
            return lines, _sharing_rules(adapted_model, world, options)
        except LongspanError as error:
            errors.append(error)
    first, *errors_with_images = errors
    if errors_with_images and str(errors_with_images[0]) != str(first):
        raise type(first)(f"{first}; and with images: {errors_with_images[0]}") from first
    raise first


def check_as_prepare_does(model: Any, world: World, options: PrepareOptions, *, images: bool = False) -> None:
    """Refuse a model without weights that `prepare` would refuse on this rank; it is to be dropped then."""
    with ExitStack() as forms:
        if images:
            from longspan.model.multimodal.take_apart import split_off_image_encoder_or_undo

            forms.enter_context(split_off_image_encoder_or_undo(model))
        features = features_of(Call(model, model, world, options))
        for feature in features:
            forms.enter_context(feature.checks_context(model))
        check_model_on_this_rank(model, features)
        for feature in features:
            if reason := feature.rank_error(model):
                raise reason


def read_run_rules(config: RunConfig, world: World, configuration: PreTrainedConfig) -> SharingRules:
    """Return the rules of `check_run_model` for a run that goes on, whose model has been checked.

    The folder of a model that is trained whole is not read: a checkpoint has its weights.
    """
    load = load_run_model if config.lora.rank else make_model_without_weights
    # The warnings come once more when the run loads the model.
    with warnings.catch_warnings(action="ignore"):
        model = load(config, configuration)
        adapted_model = _add_adapter_and_freeze(config, model, images=False)
    return _sharing_rules(adapted_model, world, _prepare_options(config, world, model, None, training=True))


def _sharing_rules(model: Any, world: World, options: PrepareOptions) -> SharingRules:
    """The model without weights is tried on the meta device, and to be dropped then."""
    rules = read_call_rules(model, world, options)
    return SharingRules(rules.separate_features(training=True), rules.length_limits)


def prepare_run_model(
    config: RunConfig,
    world: World,
    model: PreTrainedModel,
    *,
    memory: "MemoryPlan | None" = None,
    training: bool = True,
    images: bool = False,
) -> AnyModel:
    """Prepare a loaded model under the world's home as the configuration has it; entered by all ranks.

    What `memory` chose takes the place of the keys of memory. With [lora] only a new adapter is trained of the language
    model. Raises ConfigError, on every rank, where a GPU has no room, ModelError for adapters that it cannot have.
    """
    check_comm_types_fit_layers(config, model)
    # The warnings are about the adapter.
    with silence_warnings_of_other_ranks(world):
        adapted_model = _add_adapter_and_freeze(config, model, images=images, training=training)
    frozen, saved = frozen_form_and_saving(config.model, model) if config.lora.rank else ("whole", 0)
    options = replace(_prepare_options(config, world, model, memory, training=training), frozen=frozen)
    if memory is None or world.device.type != "cuda":  # a plan of memory has checked the GPU
        check_model_fits(config, model, world, training=training, saved=saved)
    encoder: Any = None
    # Encoders are on the world's ranks, with the tensor parallelism of [encoder].
    if images:
        from longspan.model import EncoderHome

        encoder = EncoderHome(
            home=Layout(world.home.ranks, tp=config.encoder.tp),
            max_rows_per_slot=config.encoder.max_tokens or None,
            recompute=config.encoder.max_tokens > 0,
            compute_dtype=options.compute_dtype,
        )
    return prepare(adapted_model, world, encoder=encoder, options=options)


def _add_adapter_and_freeze(
    config: RunConfig, model: PreTrainedModel, *, images: bool, training: bool = True
) -> Any:
    """Returns the PeftModel with an adapter. Without `training` names of parameters are not looked at."""
    adapted_model = add_configured_adapter(config, model) if config.lora.rank else model
    if images:
        from longspan.model.multimodal.image_modules import freeze_image_modules

        freeze_image_modules(model, config.encoder.trainable or encoder_default(config))
    if training:
        if config.train.freeze:
            freeze_by_name(model, config.train.freeze)
        if config.optimizer.groups:
            check_named_groups(model, config.optimizer.groups, stages=config.parallel.pp)
    return adapted_model


def _prepare_options(
    config: RunConfig, world: World, model: PreTrainedModel, memory: "MemoryPlan | None", *, training: bool
) -> PrepareOptions:
    """All ranks enter it: whether a device can multiply in float8 is asked of all."""
    dtypes = {model.dtype}
    computed_dtype = compute_dtype(config.model, world.device.type)
    if config.lora.rank:  # parameters of an adapter may be in another dtype than the model's
        dtypes |= {p.dtype for p in model.parameters() if p.requires_grad}
    float8 = config.train.float8
    if float8 and not training and world.control.flag_on_any_rank(bool(float8_device_reason(world.device))):
        float8 = ""  # an evaluation goes on without it where a device cannot; `prepare` refuses training there
    form = (memory or form_of_config(config)).for_prepare(training=training)
    return PrepareOptions(
        virtual_stages=config.parallel.vpp,
        pipeline_schedule=config.parallel.pipeline_schedule,
        offload_bytes=memory.host.kept if memory else 0,
        attention_kernel=config.context.attention_kernel or None,
        compute_dtype=None if dtypes == {computed_dtype} else computed_dtype,  # None: parameters are in it already
    ).with_form(replace(form, float8=float8, frozen="whole"))


def frozen_form_and_saving(
    keys: ModelConfig, model: PreTrainedModel
) -> tuple[Literal["whole", "nf4", "stored"], int]:
    """Return how the frozen weights of a model lie by its keys, and the bytes that this saves all ranks together."""
    frozen = keys.frozen
    if frozen == AUTO:
        frozen = "stored" if stored_formats(model) else "whole"
    if frozen == "whole":
        return "whole", 0
    from longspan.model.frozen.frozen_weights import choose_formats, packed_sizes

    formats = choose_formats(model, frozen)
    if not formats and keys.frozen == AUTO:  # a tiny model may have no weight large enough
        return "whole", 0
    sizes = packed_sizes(model, formats)
    return frozen, sizes.whole_bytes - sizes.packed_bytes


def check_comm_types_fit_layers(config: RunConfig, model: PreTrainedModel) -> None:
    """Raise ConfigError for lists of types that have no type for each layer of a model."""
    layers = model.config.get_text_config().num_hidden_layers
    for section in (config.context, held_out_set(config), *config.evaluation.sets):
        choice = PlannerConfig.unpriced(section, config)
        if len(choice.options.types) not in (1, layers):
            raise ConfigError(
                f"{name_of_key(choice.prefix, 'cp_comm_type')} lists {plural(len(choice.options.types), 'type')}, "
                f"the model has {plural(layers, 'layer')}; give one type, or one for each layer"
            )


def check_model_fits(
    config: RunConfig, model: PreTrainedModel, world: World, *, training: bool, saved: int = 0
) -> None:
    """Raise ConfigError, on every rank, where any rank has less room than its shards need, on its GPU or its host.

    `model` is not yet prepared, which packs its frozen weights and `saved` bytes of them. Without `training` only
    weights count. All is taken as split: more is needed, never less.
    """

    def check_rank_has_room() -> None:
        """Raise ConfigError, with the bytes of each part, where this rank's GPU, or its share of the host, is too
        small.
        """
        home = world.home
        train = config.train
        gpu = world.device.type == "cuda"
        shards = home.tp * home.pp * home.slots // home.dp_replicate
        weights = (sum(p.nbytes for p in model.parameters()) - saved) // shards
        trained = sum(p.nbytes for p in model.parameters() if p.requires_grad and training) // shards
        moments = 0.0
        if trained and not train.offload_optimizer_states:
            itemsize = max(p.dtype.itemsize for p in model.parameters() if p.requires_grad)
            moments = known_state_numbers(config.optimizer.class_, config.optimizer.moments, itemsize) or 0.0
        if gpu and training and train.offload_weights:
            # Weights wait on the host, for which `prepare` checks its room; of adapters the GPU keeps the trained ones.
            trained = trained if config.lora.rank else 0
            weights = trained
        parts = {"weights": weights, "gradients": trained, "optimizer states": int(moments * trained)}
        needed = sum(parts.values())
        ranks = world.ranks_of_host
        free = torch.cuda.mem_get_info(world.device)[0] if gpu else free_host_bytes(swap=True)
        if free is not None and not gpu:
            free //= ranks
        if free is None or needed <= free:
            return
        figures = ", ".join(f"{name} {gib_text(size)}" for name, size in parts.items() if size)
        gpus_text = plural(math.ceil(needed / max(1, free)) * len(home.ranks), "such GPU")
        where = f"rank {world.rank}, one of {ranks} on its host,"
        advice = "use GPUs, hosts with more memory, or a smaller model (are all sizes in its configuration?)"
        if gpu:
            where = f"the GPU of rank {world.rank}"
            advice = f"use at least {gpus_text}, parameters of fewer bytes (model.dtype), or a smaller model"
        raise ConfigError(
            f"the model does not fit: a rank needs at least {gib_text(needed)} before any activation ({figures}), and "
            f"{where} has {gib_text(free)} free; {advice}"
        )

    run_on_every_rank(world, check_rank_has_room, ConfigError)
