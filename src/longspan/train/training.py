"""A model under training as one rank has it: loaded, prepared, with its optimizer, and one step of it under a plan.

Nothing here needs a corpus or a run's folder: `longspan train` and `longspan bench step` build on the same functions.
"""

import math
import warnings
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.optim import Optimizer
from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PreTrainedConfig, PreTrainedModel

from longspan.comm import World
from longspan.comm.all_ranks import LogLine, run_on_every_rank, silence_warnings_of_other_ranks
from longspan.config.defaults import compute_dtype, encoder_default, encoder_is_given, loss_arguments
from longspan.config.keys import AUTO
from longspan.config.plan_section import EvalConfig, name_of_key
from longspan.config.sections import (
    ON_HOST,
    ModelConfig,
    NamedGroup,
    RunConfig,
    TrainConfig,
    given_checkpointing,
    held_out_set,
)
from longspan.errors import ConfigError, LongspanError, ModelError, plural
from longspan.host import free_host_bytes
from longspan.hub import hub_name
from longspan.layout import Layout
from longspan.model import PRESETS, load_model, prepare, preset_config
from longspan.model.exactness.check_model import check_unconnected
from longspan.model.experts.router import RouterCoefficients
from longspan.model.features import Call, features_of
from longspan.model.float8_layers import unsupported_reason
from longspan.model.kinds import SCORE_HEADS
from longspan.model.layers import MTP
from longspan.model.multimodal.multimodal_model import MultimodalModel
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.model.prepared import PrepareOptions
from longspan.model.seams.rope import scale_rope, smallest_scaling_factor
from longspan.model.weights.fill import defer_to_checkpoint, stored_formats
from longspan.model.weights.hf_folder import read_configuration
from longspan.plain_text import gib_text
from longspan.plan import Cost, Plan
from longspan.plan.memory.settings import known_state_numbers
from longspan.plan.shape.positions import has_no_positions, position_limit
from longspan.resolve.choice import PlannerConfig, query_heads
from longspan.train.optim.names import check_named_groups, freeze_by_name
from longspan.train.optim.offload_states import OffloadedStates, offload_optimizer_states
from longspan.train.optim.one_pass_adamw import RoundingBits
from longspan.train.optim.optimizer import OPTIMIZERS, OptimizerChoice, check_sharded_update, parameter_groups
from longspan.train.optim.schedule import Schedule
from longspan.train.run_depths import add_configured_depths
from longspan.train.step import StepResult, run_step
from longspan.train.step_figures import StepFigures, model_figures

if TYPE_CHECKING:
    from longspan.plan import MemoryPlan
    from longspan.train.terms.document_loss import DocumentLoss
    from longspan.train.terms.mtp import MtpLoss


def scale_positions(
    configuration: PreTrainedConfig,
    model: ModelConfig,
    longest: int,
    origin: str,
    log: LogLine,
    *,
    cut_by: str = "data.max_document_tokens =",
) -> PreTrainedConfig:
    """Return a configuration whose positions are scaled by `model.rope_scaling` to a document of `longest` tokens.

    Raises ConfigError where the document is longer still, with its source `origin` and `cut_by`, the key that cuts.
    """
    old_limit = position_limit(configuration)
    scaled = configuration
    configured = getattr(configuration.get_text_config(), "max_position_embeddings", None) or longest
    if longest > configured and has_no_positions(configuration):
        log(
            f"the longest document has {longest:,} tokens, more than max_position_embeddings, {configured:,}, which "
            f"limits nothing: attention of {configuration.model_type} has no positions"
        )
    factor = 1.0
    kind, own_factor = model.rope
    if kind:
        factor = own_factor or smallest_scaling_factor(configuration, longest)
        scaled = scale_rope(configuration, kind, factor)
    if factor > 1:
        log(
            f"rope: {kind} by {factor:g}, for documents of up to {position_limit(scaled):,} tokens; the "
            f"model knows {old_limit:,}, and the longest document has {longest:,}"
        )
    elif kind:
        log(
            f"rope: the longest document has {longest:,} tokens and the model knows {old_limit:,}: "
            f'model.rope_scaling = "{model.rope_scaling}" changes nothing'
        )
        scaled = configuration
    _check_positions(configuration, scaled, model, longest, origin, cut_by)
    return scaled


def check_set_length(
    configuration: PreTrainedConfig, model: ModelConfig, longest: int, name: str, tokens: int
) -> None:
    """Raise ConfigError where a document of the evaluation set `name` has more `tokens` than the model has positions.

    `longest` is the tokens of the longest document of the run's corpus, by which positions are scaled.
    """
    # The corpus has been checked and its lines logged: "" and the empty log are not read.
    scaled = scale_positions(configuration, model, longest, "", lambda _: None)
    cut_by = f"evaluation.sets.{name}.max_document_tokens ="
    _check_positions(configuration, scaled, model, tokens, f"of set {name!r}", cut_by)


def _check_positions(
    configuration: PreTrainedConfig,
    scaled: PreTrainedConfig,
    model: ModelConfig,
    tokens: int,
    origin: str,
    cut_by: str,
) -> None:
    limit = position_limit(scaled)
    if limit is not None and tokens > limit:
        scaling = f"{model.rope[0] or 'yarn'}:{smallest_scaling_factor(configuration, tokens):g}"
        scaling_now = f' under model.rope_scaling = "{model.rope_scaling}"' if model.rope_scaling else ""
        raise ConfigError(
            f"the longest document has {tokens} tokens ({origin}), and the model knows {limit} positions{scaling_now} "
            f'(max_position_embeddings of its configuration); set model.rope_scaling = "{scaling}", or cut documents '
            f"with {cut_by} {limit}"
        )


AnyModel = PreTrainedModel | PipelineModel | MultimodalModel


def read_model_configuration(config: RunConfig, vocabulary: int) -> PreTrainedConfig:
    """Read the architecture that [model] names; a tiny preset has an embedding of `vocabulary` ids.

    With `model.num_labels` it is that of the family's class with a head that scores. ModelError for other labels.
    """
    source = config.model.source
    labels = config.model.num_labels
    if source:
        configuration = read_configuration(Path(source))
    else:
        configuration = preset_config(config.model.preset_name, vocab_size=vocabulary)
    name = next((name for name in configuration.architectures or () if name.endswith(SCORE_HEADS)), None)
    if name is not None and (name.endswith(SCORE_HEADS[1]) or labels != configuration.num_labels):
        raise ModelError(
            f"{source} holds a {name} of {plural(configuration.num_labels or 0, 'score')}, and model.num_labels is "
            f"{labels}; give a …{SCORE_HEADS[0]} of as many, as rows of a run have labels of documents, or are pairs"
        )
    if labels and name is None:
        from longspan.model.score_heads import score_class

        configuration.num_labels, configuration.architectures = labels, [score_class(configuration).__name__]
    return configuration


def load_run_model(config: RunConfig, configuration: PreTrainedConfig, *, images: bool = False) -> PreTrainedModel:
    """Load the model that [model] names, with the depths of [mtp] and, with `images`, its towers; not yet prepared.

    Weights are read or drawn once it is prepared, except those of tiny presets, which are drawn here.
    """
    model = config.model
    seed = config.train.seed
    tiny = model.preset_name and not PRESETS[model.preset_name].embedding_rows  # it has no vocabulary of its own
    options: dict[str, Any] = {"dtype": model.dtype, "seed": seed, "sharded": not tiny, "images": images}
    options["quantized"] = config.lora.rank > 0  # full training would move weights that were rounded to a few bits
    if model.num_labels and model.path:
        names = read_configuration(Path(model.path)).architectures
        if names != configuration.architectures:  # a language model, which gets a new head
            from longspan.model.score_heads import add_score_head

            configuration = deepcopy(configuration)
            configuration.architectures = names
            return add_score_head(
                load_model(model.path, config=configuration, **options), model.num_labels, seed=seed
            )
    return add_configured_depths(config, load_model(model.path or None, config=configuration, **options))


def check_run_model(config: RunConfig, world: World, configuration: PreTrainedConfig) -> list[str]:
    """Refuse what the run's model, its folder and its adapter decide, before data are read; return the adapter's lines.

    The data decide whether a model with towers sees images: it is refused here if it could run neither way.
    """
    ways = [True] if encoder_is_given(config) else [False, True]
    if not ways[0] and type(configuration) not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        ways = [False]
    errors = list[LongspanError]()
    for images in ways:
        try:
            return _check_before_prepare(config, world, configuration, images=images)
        except LongspanError as error:
            errors.append(error)
    first, *others = errors
    if others and str(others[0]) != str(first):
        raise type(first)(f"{first}; and with images: {others[0]}") from first
    raise first


def _check_before_prepare(
    config: RunConfig, world: World, configuration: PreTrainedConfig, *, images: bool
) -> list[str]:
    from longspan.model.lora import adapter_lines

    with warnings.catch_warnings(action="ignore"):  # of what is left out, said when the model is loaded for the run
        model = load_run_model(config, configuration, images=images)
        _choose_trained_parts(config, model, images=images)
    lines = [*adapter_lines(model)] if config.lora.rank else []
    _check_comm_types_fit_layers(config, model)
    options = _prepare_options(config, world, model, None, training=True)
    with ExitStack() as forms:
        if images:
            from longspan.model.multimodal.take_apart import take_apart_or_undo

            forms.enter_context(take_apart_or_undo(model))
        features = features_of(Call(model, model, world, options))
        for feature in features:
            forms.enter_context(feature.checks_context(model))
        check_unconnected(model, features)
        for feature in features:
            if error := feature.rank_error(model):
                raise error
    return lines


def make_model_without_weights(
    config: RunConfig, configuration: PreTrainedConfig, *, images: bool = False
) -> PreTrainedModel:
    """Make a model of this configuration without weights: once it is prepared, a checkpoint fills them in."""
    model = load_model(config=configuration, dtype=config.model.dtype, sharded=True, images=images)
    add_configured_depths(config, model, read=False)
    defer_to_checkpoint(model)
    return model


def add_configured_adapter(config: RunConfig, model: PreTrainedModel) -> Any:
    """Add the new adapter that [lora] describes; the model becomes a PeftModel. Raises ModelError as `add_lora`."""
    from longspan.model.lora import NewAdapter, add_lora

    lora = config.lora
    folder = Path(config.model.path).resolve()
    name = hub_name(folder) if config.model.path else ""
    adapter = NewAdapter(
        rank=lora.rank,
        alpha=lora.alpha,
        dropout=lora.dropout,
        targets=lora.target_modules,
        whole=(MTP,) if config.mtp.train_whole else (),  # the depths of multi-token prediction, without adapters
        seed=config.train.seed,
        base=name or str(folder) if config.model.path else "",  # is saved with the adapter
        revision=folder.name if name else "",
    )
    return add_lora(model, adapter)


def prepare_run_model(
    config: RunConfig,
    world: World,
    model: PreTrainedModel,
    *,
    memory: "MemoryPlan | None" = None,
    training: bool = True,
    images: bool = False,
) -> PreTrainedModel | PipelineModel | MultimodalModel:
    """Prepare a loaded model under the world's home as the configuration has it; entered by all ranks.

    What `memory` chose takes the place of the keys of memory. With [lora] only a new adapter is trained of the language
    model. Raises ConfigError, on every rank, where a GPU has no room, ModelError for adapters that it cannot have.
    """
    _check_comm_types_fit_layers(config, model)
    with silence_warnings_of_other_ranks(world):  # about the adapter
        adapted_model = _choose_trained_parts(config, model, images=images, training=training)
    frozen, saved = _choose_frozen_weights(config, model) if config.lora.rank else ("whole", 0)
    options = replace(_prepare_options(config, world, model, memory, training=training), frozen=frozen)
    if memory is None or world.device.type != "cuda":  # a plan of memory has checked the GPU
        check_model_fits(config, model, world, training=training, saved=saved)
    encoder: Any = _encoder_home(config, world, compute_dtype=options.compute_dtype) if images else None
    return prepare(adapted_model, world, encoder=encoder, options=options)


def check_model_fits(
    config: RunConfig, model: PreTrainedModel, world: World, *, training: bool, saved: int = 0
) -> None:
    """Raise ConfigError, on every rank, where any rank has less room than its shards need, on its GPU or its host.

    `model` is not yet prepared, which packs its frozen weights and `saved` bytes of them. Without `training` only
    weights count. All is taken as split: more is needed, never less.
    """

    def check_rank_has_room() -> None:
        home = world.home
        train = config.train
        gpu = world.device.type == "cuda"
        shards = home.tp * home.pp * home.slots // home.dp_replicate
        weights = (sum(p.nbytes for p in model.parameters()) - saved) // shards
        trained = sum(p.nbytes for p in model.parameters() if p.requires_grad and training) // shards
        moments = 0.0
        if trained and not train.offload_optimizer_states:
            size = max(p.dtype.itemsize for p in model.parameters() if p.requires_grad)
            moments = known_state_numbers(config.optimizer.class_, config.optimizer.moments, size) or 0.0
        if gpu and training and train.offload_weights:  # `prepare` checks the host
            weights, trained = (trained, trained) if config.lora.rank else (0, 0)
        parts = {"weights": weights, "gradients": trained, "optimizer states": int(moments * trained)}
        needed = sum(parts.values())
        ranks = world.ranks_of_host
        free = torch.cuda.mem_get_info(world.device)[0] if gpu else free_host_bytes(swap=True)
        if free is not None and not gpu:
            free //= ranks
        if free is None or needed <= free:
            return
        figures = ", ".join(f"{name} {gib_text(size)}" for name, size in parts.items() if size)
        gpus = plural(math.ceil(needed / max(1, free)) * len(home.ranks), "such GPU")
        where = f"rank {world.rank}, one of {ranks} on its host,"
        advice = "use GPUs, hosts with more memory, or a smaller model (are all sizes in its configuration?)"
        if gpu:
            where = f"the GPU of rank {world.rank}"
            advice = f"use at least {gpus}, parameters of fewer bytes (model.dtype), or a smaller model"
        raise ConfigError(
            f"the model does not fit: a rank needs at least {gib_text(needed)} before any activation ({figures}), and "
            f"{where} has {gib_text(free)} free; {advice}"
        )

    run_on_every_rank(world, check_rank_has_room, ConfigError)


def _choose_trained_parts(config: RunConfig, model: PreTrainedModel, *, images: bool, training: bool = True) -> Any:
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
    dtypes = {model.dtype}
    computed_dtype = compute_dtype(config.model, world.device.type)
    if config.lora.rank:  # parameters of an adapter may be in another dtype than the model's
        dtypes |= {p.dtype for p in model.parameters() if p.requires_grad}
    float8 = config.train.float8
    if float8 and not training and world.control.any_rank(bool(unsupported_reason(world.device))):
        # an evaluation multiplies nothing in it where a device cannot; `prepare` refuses training there
        float8 = ""
    return PrepareOptions(
        virtual_stages=config.parallel.vpp,
        pipeline_schedule=config.parallel.pipeline_schedule,
        **options_of_memory_plan(config, memory, training=training),
        attention_kernel=config.context.attention_kernel or None,
        float8=float8,
        compiled=config.train.compile,
        sequence_parallel=config.parallel.sequence_parallel,
        compute_dtype=None if dtypes == {computed_dtype} else computed_dtype,  # None: parameters are in it already
    )


def _choose_frozen_weights(
    config: RunConfig, model: PreTrainedModel
) -> tuple[Literal["whole", "nf4", "stored"], int]:
    """Return how frozen weights lie, and how many bytes less than whole ones they take."""
    frozen = config.model.frozen
    if frozen == AUTO:
        frozen = "stored" if stored_formats(model) else "whole"
    if frozen == "whole":
        return "whole", 0
    from longspan.model.frozen.frozen_weights import choose_formats, packed_sizes

    formats = choose_formats(model, frozen)
    if not formats and config.model.frozen == AUTO:  # a tiny model may have no weight large enough
        return "whole", 0
    sizes = packed_sizes(model, formats)
    return frozen, sizes.whole_bytes - sizes.packed_bytes


def options_of_memory_plan(config: RunConfig, memory: "MemoryPlan | None", *, training: bool) -> dict[str, Any]:
    """Return `prepare`'s options for what layers keep for backward, and where and how often parameters are whole."""
    if memory is not None:
        return {
            "offload_weights": training and memory.offload_weights,
            "checkpoint_policies": memory.measures,
            "offload_bytes": memory.host.kept,
            "reshard_after_forward": not memory.gathered_once,
            "sync_each_batch": not memory.summed_once,
            "mlp_tile_tokens": memory.mlp_tile_tokens,
            # of recomputing ones
            "segment_layers": memory.segment_layers if set(memory.measures) != {"none"} else 0,
        }
    return {
        "offload_weights": training and config.train.offload_weights,
        "activation_checkpointing": given_checkpointing(config.train) or "none",
        "offload_activations": config.train.activation_checkpointing.endswith(ON_HOST) and training,
        "reshard_after_forward": config.parallel.reshard_after_forward,
        "sync_each_batch": config.parallel.sync_each_batch,
        "mlp_tile_tokens": config.train.mlp_tile_tokens,
    }


def _encoder_home(config: RunConfig, world: World, **settings: Any) -> Any:
    from longspan.model import EncoderHome

    encoder = config.encoder
    return EncoderHome(
        home=Layout(world.home.ranks, tp=encoder.tp),
        max_rows_per_slot=encoder.max_tokens or None,
        recompute=encoder.max_tokens > 0,
        **settings,
    )


def make_optimizer(
    config: RunConfig, world: World, model: AnyModel, *, memory: "MemoryPlan | None" = None
) -> Optimizer:
    """Make the configuration's optimizer over the parameters of a prepared model; entered by all ranks.

    Each group gets an `initial_lr`: a step's rate is the schedule's in proportion to it. Raises ConfigError for a class
    that does not update sharded parameters as whole ones, and for states that cannot move to the host.
    """
    choice = OptimizerChoice.from_section(config.optimizer)
    if choice.name not in OPTIMIZERS:
        check_sharded_update(choice, model, world)
    named_groups = [*map(NamedGroup.from_text, config.optimizer.groups)]
    rates = {"": config.optimizer.lr} if named_groups else None
    if isinstance(model, MultimodalModel) and config.encoder.lr:
        rates = {"encoders": config.encoder.lr, "language_model": config.optimizer.lr}
    groups = parameter_groups(model, choice.name, choice.weight_decay, rates, named_groups)
    rounding = RoundingBits(model, world) if config.optimizer.stochastic_rounding else None
    optimizer = choice.build(groups, rounding=rounding)
    for group in optimizer.param_groups:
        group["initial_lr"] = group["lr"]
    chosen = config.train if memory is None else memory
    on_host = chosen.offload_optimizer_states or (chosen.offload_weights and not config.lora.rank)
    return offload_optimizer_states(optimizer, world, hidden_in=model) if on_host else optimizer


@dataclass(frozen=True)
class Training:
    """A prepared model, its optimizer, the cost that plans are priced by, and the plan of memory, if one was made."""

    config: RunConfig
    world: World
    model: AnyModel
    optimizer: Optimizer
    cost: Cost
    memory: "MemoryPlan | None" = field(default=None, kw_only=True)

    @property
    def training_choice(self) -> PlannerConfig:
        """How steps are planned."""
        return PlannerConfig.training(self.config, cost=self.cost, heads=query_heads(self.model.config))

    def evaluation_choice(self, entry: EvalConfig | None = None) -> PlannerConfig:
        """How evaluations are planned: of a set, or (None) of the documents that the run holds out."""
        return PlannerConfig.evaluation(self.config, entry, cost=self.cost, heads=query_heads(self.model.config))

    @property
    def time_slots(self) -> bool:
        """Whether steps time each slot, so that a slow one is named: on GPUs."""
        return self.world.device.type == "cuda"

    @property
    def router(self) -> RouterCoefficients:
        """The weights of the routers' losses in the gradient; a negative balance stands for the configuration's own."""
        balance = self.config.train.router_aux_loss_coef
        return RouterCoefficients(balance=None if balance < 0 else balance, z=self.config.train.router_z_loss_coef)

    @property
    def mtp(self) -> "MtpLoss | None":
        """The argument `mtp` of a run's steps; None without depths."""
        if not self.config.mtp.num_layers:
            return None
        from longspan.train.terms.mtp import MtpLoss

        return MtpLoss(self.config.mtp.loss_scaling_factor)

    @cached_property
    def figures(self) -> StepFigures:
        return model_figures(self.config, self.model, self.world, self.cost)

    def take_step(
        self, plan: Plan, documents: Any, step: int, host_work: Callable[[], None] | None = None
    ) -> StepResult:
        """Take the optimizer step `step`, from 0, at its learning rate; `host_work` as of `run_step`.

        Call `finish_update` before anything but the next step reads parameters.
        """
        config = self.config.train
        self.world.prepare(plan)
        if self.config.lora.dropout:  # a step has the same masks after a restart, whatever ran before it
            torch.manual_seed(zlib.crc32(repr((config.seed, step, self.world.rank)).encode()))
        schedule = Schedule.of(self.config.optimizer, config.steps)
        rate = schedule.lr_at(step)
        for group in self.optimizer.param_groups:
            group["lr"] = rate * (group["initial_lr"] / schedule.lr) if rate else 0.0  # optimizer.lr may be 0
        return run_step(
            self.model,
            plan,
            documents,
            self.world,
            optimizer=self.optimizer,
            max_grad_norm=self.config.optimizer.max_grad_norm or None,
            step=step + 1,  # for errors, which count from 1
            router=self.router,
            mtp=self.mtp,
            loss=loss_of_documents(getattr(documents, "whole", documents), config),
            time_slots=self.time_slots,
            host_work=host_work,
        )

    def finish_update(self) -> None:
        """End the last step's update, where it goes on behind the next forward pass."""
        if isinstance(self.optimizer, OffloadedStates):
            self.optimizer.finish_step()


def loss_of_documents(documents: Any, train: TrainConfig) -> "DocumentLoss | None":
    """Return the loss of a corpus' documents that are pairs, or preferences; None for others, whose loss is that of
    their model."""
    if train.loss:
        from longspan.train.terms.preferences import preference_loss

        return preference_loss(documents, train)
    margins = getattr(documents, "margins", None)
    if margins is None:
        return None
    from longspan.train.terms.scores import reward_loss

    pairs = [(2 * i, 2 * i + 1) for i in range(len(margins))]
    return reward_loss(pairs, margins=margins, **loss_arguments(train))


def _check_comm_types_fit_layers(config: RunConfig, model: PreTrainedModel) -> None:
    layers = model.config.get_text_config().num_hidden_layers
    for section in (config.context, held_out_set(config), *config.evaluation.sets):
        choice = PlannerConfig.unpriced(section, config)
        if len(choice.options.types) not in (1, layers):
            raise ConfigError(
                f"{name_of_key(choice.prefix, 'cp_comm_type')} lists {plural(len(choice.options.types), 'type')}, "
                f"the model has {plural(layers, 'layer')}; give one type, or one for each layer"
            )
