"""A run on GPUs as a question of memory and time sees it: its configuration, model, home, prices and budget.

From the keys of a configuration follow the settings of its memory and of its cost, and how long documents the model's
positions reach. No torch, no weights, no world.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from longspan.cli.plans.question import Gpus
from longspan.config.keys import AUTO
from longspan.config.sections import RunConfig, check_measures
from longspan.errors import PlanError
from longspan.layout import Layout
from longspan.model.presets import PRESETS
from longspan.plan import (
    Cost,
    FixedMemory,
    MemoryBudget,
    MemoryNeeds,
    MemoryPlan,
    MemorySettings,
    Plan,
    choose_memory,
)
from longspan.plan.memory.choose import leanest_plans
from longspan.plan.memory.seconds import step_seconds
from longspan.plan.shape.config_reader import ConfigReader
from longspan.plan.shape.model_shape import ModelShape, has_mixers, no_experts_text, read_experts, read_query_heads
from longspan.run.checks import (
    check_lora,
    check_mode,
    check_model_keys,
    check_mtp_section,
    check_numbers,
    check_parallel,
    check_pipeline,
    check_plans,
    check_precision,
    check_preset,
)
from longspan.train.plans import PlanChoice, home_of
from longspan.train.plans.run_cost import fixed_keys, run_cost_settings, run_memory_settings

SCALED = "yarn"
BY_LAYER = ("rope_local_base_freq", "local_rope_theta")  # in files of models with positions by type of layer
WITHOUT_ROTARY = ("nemotron_h", "kimi_linear")  # hybrids


@dataclass(frozen=True)
class RunOnGpus:
    """A run of a resolved configuration on GPUs; `target_share` of its tokens are predicted.

    `model` names the model to planners, and `image_rows` are the mean rows of images in a step.
    """

    config: RunConfig
    gpus: Gpus
    home: Layout
    model: Any
    target_share: float = 1.0
    image_rows: float = 0.0

    @classmethod
    def of(cls, config: RunConfig, gpus: Gpus) -> "RunOnGpus":
        """Make the run of a configuration, whose keys are checked."""
        check_model_keys(config, training=False)  # train.lr may be left out, as nothing is trained here
        check_numbers(config, training=False)
        home = home_of(config.parallel, gpus.count)
        for check in (check_precision, check_lora, check_mtp_section, check_pipeline, check_mode):
            check(config)
        check_measures(config.train, gpu=True)
        check_parallel(config, home)
        # An answer is about steps of training: their plans are checked, and those of the held-out documents (unless
        # data.eval_documents is 0), but not those of named evaluation sets.
        check_plans(replace(config, eval=()), home, training=True)
        check_preset(config)
        run = cls(config, gpus, home, planner_model(config))
        if home.ep > 1 and not run.experts:  # in the words of a run that has loaded the model
            read = ConfigReader.read_whole(run.model)
            classes = read.value("architectures") or [read.family or read.where]
            raise PlanError(no_experts_text(home.ep, str(classes[0])))
        return run

    def change_home(self, *, gpus: int = 0, ep: int = 0) -> "RunOnGpus":
        """Return the same run on another number of these GPUs, or with experts shared by `ep` slots (0: as it is)."""
        parallel = replace(self.config.parallel, ep=ep or self.config.parallel.ep)
        config, kind = replace(self.config, parallel=parallel), replace(self.gpus, count=gpus or self.gpus.count)
        return replace(self, config=config, gpus=kind, home=home_of(parallel, kind.count))

    def set_context(self, **keys: Any) -> "RunOnGpus":
        """Return the same run with other keys of [context]."""
        return replace(self, config=replace(self.config, context=replace(self.config.context, **keys)))

    @property
    def budget(self) -> MemoryBudget:
        """Return what a GPU and its share of the host may be filled with."""
        train = self.config.train
        device = train.memory_bytes or int(train.memory_fraction * self.gpus.bytes)
        return MemoryBudget(device=device, host=self.gpus.host_bytes)

    @cached_property
    def experts(self) -> int:
        """Experts of a layer; 0 for a model without any."""
        return read_experts(self.model).of_layer

    @cached_property
    def settings(self) -> MemorySettings:
        """Return what of the keys decides the run's bytes.

        A step's rows of images are dealt to all slots; encoder.max_rows is the most that a slot encodes at once.
        """
        rows, most_rows = int(self.image_rows / self.home.slots), self.config.encoder.max_rows
        rows = min(rows, most_rows) if most_rows else rows
        return run_memory_settings(self.config, encoder_rows=rows)

    @cached_property
    def shape(self) -> ModelShape:
        """The sizes of the model."""
        return ModelShape.of(self.model, depths=self.config.mtp.depths)

    def cost(self, memory: MemoryPlan | None = None) -> Cost:
        """Return the price of a step with what a plan of memory recomputes and gathers; None: what the keys say."""
        settings = run_cost_settings(self.config, slots=self.home.slots, target_share=self.target_share, memory=memory)
        return self.gpus.machine.cost(self.model, settings)

    @cached_property
    def choice(self) -> PlanChoice:
        """How the run's steps are planned; where the keys leave the host's size open, it is the machine's."""
        config = self.config
        if config.context.node_size == AUTO:
            node_size = max(1, self.gpus.machine.node_size // self.home.tp)
            config = replace(config, context=replace(config.context, node_size=node_size))
        weights = int(self.shape.stored_weights / config.parallel.tp)  # of a rank, which free mode gathers
        return PlanChoice.training(config, cost=self.cost(), heads=read_query_heads(self.model), weights=weights)

    @property
    def fixed(self) -> FixedMemory:
        """The keys of memory that are given by hand."""
        return fixed_keys(self.config)

    def plan(self, lengths: Sequence[int], targets: int | None = None) -> Plan:
        """Plan a step of these documents, of whose tokens `targets` are predicted (None: all but the first)."""
        return self.choice.plan(lengths, self.home, targets=targets)

    def plan_memory(self, plans: Sequence[Plan]) -> MemoryPlan:
        """Plan the memory of these plans: the fastest way, or that of the keys where train.memory chooses nothing.

        Raises PlanError, with the bytes, where it does not fit.
        """
        budget = self.budget
        if self.config.train.memory == AUTO:
            arguments: dict[str, Any] = {"machine": self.gpus.machine, "fixed": self.fixed}
            return choose_memory(self.model, self.home, list(plans), self.settings, budget, **arguments)
        memory = self.leanest_memory(plans)
        if not memory.fits(budget):
            device, host = memory.device.total, memory.host.total
            raise PlanError(
                f"the run does not fit with its keys of memory (train.memory is {self.config.train.memory!r}): a rank "
                f"needs {device:,} bytes of a GPU that may fill {budget.device:,}, and {host:,} of its host's "
                f"{budget.host:,}"
            )
        return memory

    def leanest_memory(self, plans: Sequence[Plan]) -> MemoryPlan:
        """Return the plan of memory in which layers keep as little as the keys allow, whether it fits or not."""
        return next(leanest_plans(self.memory_needs(plans), self.fixed))

    def memory_needs(self, plans: Sequence[Plan]) -> MemoryNeeds:
        """Return what these plans need before it is decided what layers keep."""
        return MemoryNeeds.of(self.model, self.home, list(plans), self.settings, machine=self.gpus.machine)

    def seconds(self, plans: Sequence[Plan], memory: MemoryPlan) -> float:
        """Return the mean seconds of the steps of these plans, with what the plan of memory adds."""
        cost = self.cost(memory).shared_by(self.home.tp)
        return step_seconds(self.model, plans, memory, self.memory_needs(plans), self.gpus.machine, cost)

    def scale_positions(self, longest: int) -> "RunOnGpus":
        """Set model.rope_scaling where a document needs it, the key is not given, and the model can be scaled."""
        limit, model = position_limit(self.model), self.config.model
        if limit is None or longest <= limit or model.rope_scaling or not can_scale(self.model):
            return self
        return replace(self, config=replace(self.config, model=replace(model, rope_scaling=SCALED)))

    def position_notes(self, longest: int) -> Iterator[str]:
        """Yield a line where documents are longer than the model's positions."""
        limit, scaling = position_limit(self.model), self.config.model.rope_scaling
        if limit is None or longest <= limit:
            return
        text = f"the model knows {limit:,} positions (max_position_embeddings), fewer than {longest:,}"
        if scaling:
            times = f"{longest / limit:,.1f}".removesuffix(".0")
            yield f"{text}: model.rope_scaling = {scaling!r} stretches them {times} times"
        else:
            yield f"{text}, and model.rope_scaling cannot stretch them: longspan train refuses longer documents"


def planner_model(config: RunConfig) -> Any:
    """Return what names the model to planners: its folder or config.json, or the values of a preset.

    A preset without a number of embedding rows has one for each id of the run's tokenizer.
    """
    if config.model.source:
        return config.model.source
    preset = PRESETS[config.model.preset_name]
    values = dict(preset.values) | {"model_type": preset.model_type}
    return values if preset.rows else values | {"vocab_size": config.data.vocab_size}


def position_limit(model: Any) -> int | None:
    """Return the longest document that a configuration stands for, its own scaling included; None if nothing limits it.

    >>> position_limit({"max_position_embeddings": 40960, "rope_scaling": {"rope_type": "linear", "factor": 4.0}})
    163840

    `longspan.model.seams.rope` reads the same from a configuration object of transformers, and the two must agree.
    """
    limit, rope = ConfigReader.of(model).count("max_position_embeddings"), _shared_rope(model)
    if not limit or _lacks_positions(model):
        return None
    factor = rope.get("factor") or 1.0
    if rope["rope_type"] in ("linear", "dynamic"):
        return int(limit * factor)
    if rope["rope_type"] == "yarn":  # whose max_position_embeddings is the stretched length in some files
        return max(limit, int(rope.get("original_max_position_embeddings", limit) * factor))
    return limit


def can_scale(model: Any) -> bool:
    """Return whether model.rope_scaling can stretch the positions of a configuration.

    It can for text models whose layers share one kind of rotary positions that their own configuration does not scale.
    """
    reader = ConfigReader.read_whole(model)
    if reader.value("text_config") is not None or any(reader.value(name) is not None for name in BY_LAYER):
        return False
    by_layer = _is_nested(reader.value("rope_parameters"))
    return not by_layer and not _lacks_positions(model) and _shared_rope(model)["rope_type"] == "default"


def _shared_rope(model: Any) -> dict[str, Any]:
    reader = ConfigReader.read_whole(model)
    for name in ("rope_parameters", "rope_scaling"):  # the second in versions of transformers before 5
        value = reader.value(name)
        if isinstance(value, Mapping) and not _is_nested(value):
            return {"rope_type": value.get("type", "default"), **value}  # "type" in older files
    return {"rope_type": "default"}


def _is_nested(rope: Any) -> bool:
    return isinstance(rope, Mapping) and any(isinstance(inner, Mapping) for inner in rope.values())


def _lacks_positions(model: Any) -> bool:
    if not has_mixers(model):
        return False
    reader = ConfigReader.of(model)
    has_other_type = (reader.value("position_embedding_type") or "rope") != "rope"  # a key of Granite 4-H
    is_switched_off = reader.family == "zamba2" and not reader.value("use_mem_rope")  # off by default in Zamba 2
    return has_other_type or reader.family in WITHOUT_ROTARY or is_switched_off
