"""A run on GPUs as a question of memory and time sees it: its configuration, model, home, prices and budget.

From the keys of a configuration follow the settings of its memory and of its cost. No torch, no weights, no world.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from longspan.cli.gpu_plans.gpus import Gpus
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
from longspan.plan.shape.model_shape import ModelShape, no_experts_text, read_experts, read_query_heads
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
from longspan.train.memory.memory_settings import fixed_keys, run_memory_settings
from longspan.train.plans import PlanChoice, home_of
from longspan.train.plans.run_cost import run_cost_settings


@dataclass(frozen=True)
class RunOnGpus:
    """A run of a resolved configuration on GPUs; `target_share` of its tokens are predicted.

    `model` names the model to planners (`planner_model`), and `image_rows` are the mean rows of images in a step.

    >>> run = RunOnGpus.of(config, gpus)  # doctest: +SKIP
    >>> run.home.slots, run.budget.device  # doctest: +SKIP
    (4, 79027434946)
    """

    config: RunConfig
    gpus: Gpus
    home: Layout
    model: Any
    target_share: float = 1.0
    image_rows: float = 0.0

    @classmethod
    def of(cls, config: RunConfig, gpus: Gpus) -> "RunOnGpus":
        """Make the run of a configuration. Raises ConfigError, LayoutError or PlanError for keys that do not fit."""
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
        model = planner_model(config)
        _check_experts(model, home)
        return cls(config, gpus, home, model)

    def change_count(self, count: int) -> "RunOnGpus":
        """Return the same run on another number of these GPUs."""
        gpus = replace(self.gpus, count=count)
        return replace(self, gpus=gpus, home=home_of(self.config.parallel, count))

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
    def settings(self) -> MemorySettings:
        """Return what of the keys decides the run's bytes.

        A step's rows of images are dealt to all slots; encoder.max_rows is the most that a slot encodes at once.
        """
        rows, most_rows = int(self.image_rows / self.home.slots), self.config.encoder.max_rows
        rows = min(rows, most_rows) if most_rows else rows
        return run_memory_settings(self.config, target_share=self.target_share, encoder_rows=rows)

    @cached_property
    def heads(self) -> int | None:
        """The query heads of the model."""
        return read_query_heads(self.model)

    @cached_property
    def shape(self) -> ModelShape:
        """The sizes of the model."""
        return ModelShape.of(self.model, depths=self.config.mtp.depths)

    @property
    def node_size(self) -> int:
        """Slots of one host: of the machine's, if the key leaves it open."""
        size = self.config.context.node_size
        return size if isinstance(size, int) else max(1, self.gpus.machine.node_size // self.home.tp)

    def cost(self, memory: MemoryPlan | None = None) -> Cost:
        """Return the price of a step with what a plan of memory recomputes and gathers; None: what the keys say."""
        settings = run_cost_settings(self.config, slots=self.home.slots, target_share=self.target_share, memory=memory)
        return self.gpus.machine.cost(self.model, settings)

    @cached_property
    def choice(self) -> PlanChoice:
        """Return how the run's steps are planned; where the keys leave the host's size open, it is the machine's.

        A tensor-parallel rank has 1 / tp of the parameters, which free mode gathers and sums over slots.
        """
        config = self.config
        if config.context.node_size == AUTO:
            config = replace(config, context=replace(config.context, node_size=self.node_size))
        weights = int(self.shape.stored_weights / config.parallel.tp)
        return PlanChoice.training(config, cost=self.cost(), heads=self.heads, weights=weights)

    @property
    def fixed(self) -> FixedMemory:
        """The keys of memory that are given by hand."""
        return fixed_keys(self.config)

    def plan_memory(self, plans: Sequence[Plan]) -> MemoryPlan:
        """Plan the memory of these plans: the fastest way, or that of the keys where train.memory chooses nothing.

        Raises PlanError, with the bytes, where it does not fit.
        """
        machine, budget = self.gpus.machine, self.budget
        if self.config.train.memory == AUTO:
            choice_arguments = {"machine": machine, "fixed": self.fixed}
            return choose_memory(self.model, self.home, list(plans), self.settings, budget, **choice_arguments)
        memory = next(self.leanest_plans(plans, self.fixed))
        if not memory.fits(budget):
            device, host = memory.device.total, memory.host.total
            raise PlanError(
                f"the run does not fit with its keys of memory (train.memory is {self.config.train.memory!r}): a rank "
                f"needs {device:,} bytes of a GPU that may fill {budget.device:,}, and {host:,} of its host's "
                f"{budget.host:,}"
            )
        return memory

    def seconds(self, plans: Sequence[Plan], memory: MemoryPlan) -> float:
        """Return the mean seconds of the steps of these plans, with what the plan of memory adds."""
        cost = self.cost(memory).shared_by(self.home.tp)
        return step_seconds(self.model, plans, memory, self.memory_needs(plans), self.gpus.machine, cost)

    def memory_needs(self, plans: Sequence[Plan]) -> MemoryNeeds:
        """Return what these plans need before it is decided what layers keep."""
        return MemoryNeeds.of(self.model, self.home, list(plans), self.settings, machine=self.gpus.machine)

    def leanest_plans(self, plans: Sequence[Plan], fixed: FixedMemory) -> Iterator[MemoryPlan]:
        """Yield plans of memory in which every layer keeps as little as the keys allow; the least on the device first.

        They are plans of memory whether they fit or not.
        """
        return leanest_plans(self.memory_needs(plans), fixed)

    def plan(self, lengths: Sequence[int], targets: int | None = None) -> Plan:
        """Plan a step of documents of these lengths, of whose tokens `targets` are predicted (None: all but the first).

        Raises PlanError where they exceed the run's limit of rows.
        """
        return self.choice.plan(lengths, self.home, targets=targets)


def _check_experts(model: Any, home: Layout) -> None:
    """Raise PlanError, in the words of a run that has loaded the model, if slots share experts of which it has none."""
    if home.ep > 1 and not read_experts(model).of_layer:
        read = ConfigReader.read_whole(model)
        classes = read.value("architectures") or [read.family or read.where]
        raise PlanError(no_experts_text(home.ep, str(classes[0])))


def planner_model(config: RunConfig) -> Any:
    """Return what names the model to planners: its folder or config.json, or the values of a preset.

    A preset without a number of embedding rows has one for each id of the run's tokenizer.
    """
    if config.model.source:
        return config.model.source
    preset = PRESETS[config.model.preset_name]
    values = dict(preset.values) | {"model_type": preset.model_type}
    return values if preset.rows else values | {"vocab_size": config.data.vocab_size}
