"""The choice of a run's measures by a plan of memory, before its model is prepared, the same on every rank.

What is counted and what it costs is in `longspan.plan.memory`. Plans of one degree are made for thousands of coming
steps, and those whose slots are fullest count; of dynamic plans, which take longer, those of two steps are made and,
where rows have a limit, one that fills every slot to it. Where rows of a slot are "auto", some numbers are compared.
"""

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from heapq import nlargest
from typing import Any

import torch

from longspan.comm import World
from longspan.comm.all_ranks import LogLine, run_on_first_rank
from longspan.config.keys import AUTO
from longspan.config.sections import RunConfig, check_measures, chooses_measures, key_checkpointing
from longspan.errors import ConfigError, PlanError
from longspan.host_memory import free_host_bytes
from longspan.layout import Layout
from longspan.plan import (
    Cost,
    Machine,
    MemoryBudget,
    MemoryNeeds,
    MemoryPlan,
    MemorySettings,
    Plan,
    choose_memory,
)
from longspan.plan.memory.parameters import ModelNumbers
from longspan.plan.memory.seconds import step_seconds
from longspan.plan.memory.stage_bytes import CONTEXT_BYTES
from longspan.train.memory.memory_settings import fixed_keys, run_memory_settings
from longspan.train.memory.model_fits import count_ranks_of_host
from longspan.train.plans import PlanChoice
from longspan.train.plans.run_cost import find_run_cost, read_run_machine

UNEVEN = 1.25  # times the mean rows of images in a step, for steps with more of them
MOST_STEPS = 1024  # whose documents are looked at
FEW_STEPS = 4  # for which plans are made that are priced as those of the run


@dataclass(frozen=True)
class ComingSteps:
    """The documents of coming steps, from `first` to before `last`, for a home.

    `lengths_of_step(step)` are the lengths of a step's documents.

    >>> ahead = ComingSteps(order.lengths_of_step, world.home, heads=32, first=0, last=config.train.steps)

    `heads` are the model's query heads, where they are known; `planners` take the place of the configuration's. `few`:
    only a few plans are made, whatever the planner. `longest` is the longest document of the whole run, if it is known.
    """

    lengths_of_step: Callable[[int], Sequence[int]]
    home: Layout
    heads: int | None
    first: int
    last: int
    planners: tuple[str, ...] = ()
    few: bool = False
    longest: int = 1

    @property
    def steps(self) -> range:
        """The steps that are looked at."""
        return range(self.first, min(self.last, self.first + MOST_STEPS))

    def fullest_plans(self, config: RunConfig, cost: Cost) -> list[Plan]:
        """Return the plans, by each planner, of the coming steps that need most memory.

        Those are the steps with the fullest slots, under the first planner, if all steps are looked at; otherwise the
        step with the longest document and the one with most tokens. Raises PlanError for documents that fit no group.
        """
        choices = [
            PlanChoice.training(planner_config, cost=cost, heads=self.heads)
            for planner_config in self._with_planners(config)
        ]
        steps = self.fullest_steps(choices[0]) if self._sees_all_steps(config) else self.heaviest_steps()
        return [choice.plan(self.lengths_of_step(step), self.home) for choice in choices for step in steps]

    def fullest_steps(self, choice: PlanChoice) -> Sequence[int]:
        """Return the FEW_STEPS steps with most rows in a slot, by plans at a simple cost: a millisecond each."""
        if len(self.steps) <= FEW_STEPS:
            return self.steps
        simple = replace(choice, options=replace(choice.options, cost=Cost(), cp_comm_type="p2p"))
        plans = ((simple.plan(self.lengths_of_step(step), self.home).most_rows, step) for step in self.steps)
        return [step for _, step in nlargest(FEW_STEPS, plans)]

    def _with_planners(self, config: RunConfig) -> list[RunConfig]:
        """Return the configuration with each of `planners`, or as it is."""
        planners = self.planners or (config.context.planner,)
        return [replace(config, context=replace(config.context, planner=planner)) for planner in planners]

    def limit_plans(self, config: RunConfig, plans: Sequence[Plan]) -> list[Plan]:
        """Return, as a list of one, a plan that fills every slot to its limit of rows, as a later step may.

        A slot gets no more rows than the largest of `plans` has tokens. The list is empty where all steps were looked
        at, or rows have no limit.
        """
        cap = PlanChoice.training(config, heads=self.heads).options.max_tokens_per_slot
        if not cap or self._sees_all_steps(config):
            return []
        multiple = max(plan.row_multiple for plan in plans)
        rows = min(cap, max(plan.tokens for plan in plans)) // multiple * multiple
        return [full_plan(config, self.home, max(rows, multiple), self.heads)]

    def _sees_all_steps(self, config: RunConfig) -> bool:
        """Return whether every coming step is looked at.

        That is so where steps are few, or are MOST_STEPS at most and have plans of one degree, which are made quickly.
        """
        if self.last - self.first <= FEW_STEPS:
            return True
        one_degree = PlanChoice.training(config, heads=self.heads).has_one_degree
        return one_degree and not self.few and self.steps.stop == self.last

    def heaviest_steps(self) -> Sequence[int]:
        """Return the step with the longest document and the step with most tokens, which may be one step."""
        lengths = {step: self.lengths_of_step(step) for step in self.steps}
        if not lengths:
            return []
        longest_step = max(lengths, key=lambda step: max(lengths[step], default=0))
        return sorted({longest_step, max(lengths, key=lambda step: sum(lengths[step]))})

    def rows_to_try(self, config: RunConfig) -> list[int]:
        """List the rows of a slot that `max_tokens_per_slot = "auto"` may become, the fewest first.

        The first number holds the longest document in the widest group that the heads allow. The numbers double until
        the step with most tokens is one micro-batch. There are `multiple` rows to spare, and numbers are rounded up to
        multiples of it, since a slot has two parts of a document, each padded to a whole `row_multiple`.
        """
        choice = PlanChoice.training(config, heads=self.heads)
        lengths = [self.lengths_of_step(step) for step in self.heaviest_steps()]
        longest_document = max(self.longest, *(max(step, default=1) for step in lengths), 1)
        most_tokens = max((sum(step) for step in lengths), default=1)
        multiple = 2 * choice.options.row_multiple
        rows = [-(-longest_document // choice.widest_even_degree(self.home)) + multiple]
        while rows[-1] < most_tokens / self.home.slots + multiple:
            rows.append(2 * rows[-1])
        return [-(-count // multiple) * multiple for count in rows]


def full_plan(config: RunConfig, home: Layout, rows: int, heads: int | None = None) -> Plan:
    """Make a plan with `rows` rows on every slot in each micro-batch: a document in each of the widest groups.

    A pipeline gets as many micro-batches as it holds at once. Under sequence parallelism `rows` is a multiple of tp.
    """
    choice = PlanChoice.training(config, heads=heads)
    degree = choice.widest_even_degree(home)
    in_flight = max(1, home.pp * config.parallel.vpp)
    lengths = [rows * degree] * (home.slots // degree * in_flight)
    # without a pipeline's bubble in the price, for which more and smaller micro-batches would be made
    options = replace(choice.options, max_tokens_per_slot=rows, cost=replace(choice.options.cost, chunks=1 << 20))
    return replace(choice, options=options).at_degree(degree, longest=lengths[0]).plan(lengths, home)


@dataclass(frozen=True, kw_only=True)
class RunMemory:
    """What the measures of a run depend on: its configuration, its model's configuration, and its coming steps.

    `target_share` of the rows predict a token; `encoder_rows` of images are encoded at once on a slot.
    """

    config: RunConfig
    model: Any
    ahead: ComingSteps
    gpu: bool
    target_share: float = 1.0
    encoder_rows: int = 0

    @property
    def settings(self) -> MemorySettings:
        """The settings of the plan of memory, as the keys give them."""
        share, rows = self.target_share, self.encoder_rows
        return run_memory_settings(self.config, gpu=self.gpu, target_share=share, encoder_rows=rows)

    @property
    def machine(self) -> Machine:
        """The machine by whose prices measures are compared: the run's, or else an H200, or CPUs without a GPU."""
        return read_run_machine(self.config) or (Machine.known("H200") if self.gpu else Machine.cpus())

    def plan_memory(self) -> MemoryPlan:
        """Plan the memory of the run with the measures and settings of the keys."""
        plans = self._coming_plans(self.config)
        needs = MemoryNeeds.of(self.model, self.ahead.home, plans, self.settings, machine=self.machine)
        return needs.under(key_measure(self.config))

    def choose_memory(self, budget: MemoryBudget) -> tuple[int, MemoryPlan]:
        """Choose the fastest measures that fit, and with them the rows of a slot where these are "auto".

        Returns the limit of rows and the plan. Numbers of rows with which nothing fits are left out. Raises PlanError,
        with the bytes, where none is left.
        """
        rows_of_keys = self.config.context.max_tokens_per_slot
        if isinstance(rows_of_keys, int):
            return rows_of_keys, self._choose_plan(self._coming_plans(self.config), budget)
        choices, refusal = list[tuple[float, int, MemoryPlan]](), None
        for rows in self.ahead.rows_to_try(self.config):
            try:
                seconds, memory = self._choose_under_limit(rows, budget)
                choices.append((seconds, rows, memory))
            except PlanError as error:
                refusal = refusal or error  # of the fewest rows
        if not choices:
            assert refusal is not None
            raise refusal
        _, rows, memory = min(choices, key=lambda choice: choice[0])
        return rows, memory

    def _choose_under_limit(self, rows: int, budget: MemoryBudget) -> tuple[float, MemoryPlan]:
        """Choose the plan of memory under a limit of rows; returns the seconds of the heaviest steps, and the plan.

        Only these steps are planned, as several limits are compared.
        """
        config = replace(self.config, context=replace(self.config.context, max_tokens_per_slot=rows))
        ahead = replace(self.ahead, few=True)
        steps = ahead.fullest_plans(config, self._plan_cost())
        memory = self._choose_plan([*steps, *ahead.limit_plans(config, steps)], budget)
        cost = self._plan_cost(memory).shared_by(self.ahead.home.tp)
        needs = MemoryNeeds.of(self.model, self.ahead.home, steps, self.settings, machine=self.machine)
        return step_seconds(self.model, steps, memory, needs, self.machine, cost), memory

    def _coming_plans(self, config: RunConfig) -> list[Plan]:
        """Return the plans of coming steps for which memory must suffice."""
        steps = self.ahead.fullest_plans(config, self._plan_cost())
        return [*steps, *self.ahead.limit_plans(config, steps)]

    def _plan_cost(self, memory: MemoryPlan | None = None) -> Cost:
        """Return the cost by which plans are made, under a plan of memory if there is one, without logging anything."""
        slots = self.ahead.home.slots
        share = self.target_share
        return find_run_cost(
            self.config, self.model, lambda line: None, gpu=self.gpu, slots=slots, target_share=share, memory=memory
        )

    def _choose_plan(self, plans: Sequence[Plan], budget: MemoryBudget) -> MemoryPlan:
        """Choose the fastest plan of memory in which all these plans fit."""
        home, fixed = self.ahead.home, fixed_keys(self.config, gpu=self.gpu)
        return choose_memory(self.model, home, list(plans), self.settings, budget, self.machine, fixed=fixed)


def choose_memory_on_ranks(run: RunMemory, world: World, log: LogLine) -> tuple[int, MemoryPlan | None]:
    """Plan a run's memory before `prepare`: what its layers keep, and the rows of a slot; entered by all ranks.

    The plan has what train.memory chooses, or the keys as they are. It is None where no bytes are known that a rank may
    fill (CPUs without `memory_bytes`), and where the model's bytes cannot be counted: "auto" rows are then the most
    that a step has on GPUs, where the warm-up halves them, and the fewest that hold the longest document on CPUs.
    Raises ConfigError, on every rank, for keys that contradict each other, and with the bytes where nothing fits.
    """
    train, given_rows = run.config.train, run.config.context.max_tokens_per_slot
    check_measures(train, gpu=run.gpu)
    chooses, has_budget = chooses_measures(train, gpu=run.gpu), run.gpu or train.memory_bytes > 0
    if isinstance(given_rows, int) and not has_budget:
        return given_rows, None
    budget = memory_budget(run.config, world) if chooses or given_rows == AUTO else None
    rows, memory, reason = run_on_first_rank(world, partial(plan_or_explain, run, budget), ConfigError)
    if reason and budget is not None:
        log(f"memory: not planned, and the keys of [train] hold as they are: {reason}")
    elif memory is not None and chooses:
        log(memory.summary_line(budget))
    return rows, memory if has_budget else None


def plan_or_explain(run: RunMemory, budget: MemoryBudget | None) -> tuple[int, MemoryPlan | None, str]:
    """Return the rows of a slot, the plan of memory and "", or a None and why the model's bytes cannot be counted.

    Without a budget the plan is that of the keys. Raises ConfigError if bytes can be counted and nothing fits.
    """
    given_rows = run.config.context.max_tokens_per_slot
    try:
        ModelNumbers.of(run.model, run.ahead.home, run.settings)
    except PlanError as error:
        rows = given_rows if isinstance(given_rows, int) else run.ahead.rows_to_try(run.config)[-1 if run.gpu else 0]
        return rows, None, str(error)
    try:
        if budget is not None:
            return *run.choose_memory(budget), ""
        assert isinstance(given_rows, int)
        return given_rows, run.plan_memory(), ""
    except PlanError as error:
        raise ConfigError(str(error)) from error


HOST_SHARE = 0.85  # of the host's free memory: the rest is for reading documents, and for saving


def memory_budget(config: RunConfig, world: World) -> MemoryBudget:
    """Return the bytes that a rank may fill of its device and of its host.

    Each is the least of all ranks, which call this together: the largest of the negative bytes, as the control group
    has only a maximum.
    """
    device, host = _rank_budget(config, world)
    negative_bytes = world.control.largest_of([-float(device), -float(host)], "the least free memory")
    return MemoryBudget(device=int(-negative_bytes[0]), host=int(-negative_bytes[1]))


def _rank_budget(config: RunConfig, world: World) -> tuple[int, int]:
    """Return the bytes that this rank may fill of its device and of its host, which its host's ranks share.

    Without `train.memory_bytes` these are a fraction of a GPU's free memory, and on a CPU the host's. The host's bytes
    are 0 where its free memory is not known; a CPU has no limit then.
    """
    host = int(HOST_SHARE * (free_host_bytes() or 0) / count_ranks_of_host(world))
    if config.train.memory_bytes:
        return config.train.memory_bytes, host
    if world.device.type != "cuda":
        return host or sys.maxsize, host
    # The CUDA context exists by now. Its bytes count as free, as a plan of memory counts them among its own; `min`, as
    # the context may be smaller than CONTEXT_BYTES.
    free, all_bytes = torch.cuda.mem_get_info(world.device)
    return int(config.train.memory_fraction * min(all_bytes, free + CONTEXT_BYTES)), host


def key_measure(config: RunConfig) -> str:
    """Return what each layer keeps by the keys."""
    train, kind = config.train, key_checkpointing(config.train) or "none"
    return f"{kind}+host" if train.offload_activations and kind != "none" else kind
