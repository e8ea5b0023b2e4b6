"""The choice of a run's measures by a plan of memory, before its model is prepared, the same on every rank.

What is counted and what it costs is in `longspan.plan.memory`; the rows of a slot are kept in `slot_rows.py`.
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
from longspan.config.sections import RunConfig, check_measures, chooses_measures
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
from longspan.ssm.kernels.packages import fla_device_lack
from longspan.train.memory.memory_settings import fixed_keys, run_memory_settings
from longspan.train.memory.model_fits import count_ranks_of_host
from longspan.train.plans import PlanChoice
from longspan.train.plans.run_cost import find_run_cost, read_run_machine

UNEVEN = 1.25  # times the mean rows of images in a step, for steps with more of them
HOST_SHARE = 0.85  # of the host's free memory: the rest is for reading documents, and for saving
MOST_STEPS = 1024  # whose documents are looked at
FEW_STEPS = 4  # for which plans are made that are priced as those of the run


@dataclass(frozen=True)
class ComingSteps:
    """The documents of coming steps, from `first` to before `last`, for a home.

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

    def fullest_plans(self, config: RunConfig, cost: Cost) -> tuple[list[Plan], list[Plan]]:
        """Return the plans, by each planner, of the coming steps that need most memory, and one that fills every slot.

        Those are the steps with the fullest slots, by plans at a simple cost (a millisecond each), if all steps are
        looked at: few steps, or up to MOST_STEPS with plans of one degree. Otherwise they are the heaviest steps, and
        where rows have a limit one more plan fills every slot to it, as a later step may. Raises PlanError for
        documents that fit no group.
        """
        planners = self.planners or (config.context.planner,)
        configs = (replace(config, context=replace(config.context, planner=planner)) for planner in planners)
        choices = [PlanChoice.training(one, cost=cost, heads=self.heads) for one in configs]
        steps, sees_all = range(self.first, min(self.last, self.first + MOST_STEPS)), True
        one_degree = all(choice.has_one_degree for choice in choices)
        if self.last - self.first > FEW_STEPS and one_degree and not self.few and steps.stop == self.last:
            options = replace(choices[0].options, cost=Cost(), cp_comm_type="p2p")
            simple = replace(choices[0], options=options)
            rows = ((simple.plan(self.lengths_of_step(step), self.home).most_rows, step) for step in steps)
            steps = [step for _, step in nlargest(FEW_STEPS, rows)]
        elif self.last - self.first > FEW_STEPS:
            steps, sees_all = self._heaviest_steps(), False
        plans = [choice.plan(self.lengths_of_step(step), self.home) for choice in choices for step in steps]
        limit = choices[0].options.max_tokens_per_slot
        if not limit or sees_all:
            return plans, []
        multiple = max(plan.row_multiple for plan in plans)
        # no more rows than the largest plan has tokens
        rows = min(limit, max(plan.tokens for plan in plans)) // multiple * multiple
        return plans, [full_plan(config, self.home, max(rows, multiple), self.heads)]

    def _heaviest_steps(self) -> list[int]:
        steps = range(self.first, min(self.last, self.first + MOST_STEPS))
        lengths = {step: self.lengths_of_step(step) for step in steps}
        if not lengths:
            return []
        longest_step = max(lengths, key=lambda step: max(lengths[step], default=0))
        return sorted({longest_step, max(lengths, key=lambda step: sum(lengths[step]))})

    def rows_to_try(self, config: RunConfig) -> list[int]:
        """List the rows of a slot that "auto" may become, from the fewest that hold the longest document.

        The numbers double until the step with most tokens is one micro-batch. Two parts of a document on a slot, each
        padded to a whole `row_multiple`, are to spare.
        """
        choice = PlanChoice.training(config, heads=self.heads)
        lengths = [self.lengths_of_step(step) for step in self._heaviest_steps()]
        longest_document = max(self.longest, *(max(step, default=1) for step in lengths), 1)
        most_tokens = max((sum(step) for step in lengths), default=1)
        multiple = 2 * choice.options.row_multiple
        rows = [-(-longest_document // choice.widest_even_degree(self.home)) + multiple]
        while rows[-1] < most_tokens / self.home.slots + multiple:
            rows.append(2 * rows[-1])
        return [-(-count // multiple) * multiple for count in rows]


def full_plan(config: RunConfig, home: Layout, rows: int, heads: int | None = None) -> Plan:
    """Make a plan with `rows` rows on every slot in each micro-batch: a document in each of the widest groups."""
    choice = PlanChoice.training(config, heads=heads)
    degree = choice.widest_even_degree(home)
    in_flight = max(1, home.pp * config.parallel.vpp)  # micro-batches that a pipeline holds at once
    lengths = [rows * degree] * (home.slots // degree * in_flight)
    # without a pipeline's bubble in the price, for which more and smaller micro-batches would be made
    options = replace(choice.options, max_tokens_per_slot=rows, cost=replace(choice.options.cost, chunks=1 << 20))
    return replace(choice, options=options).at_degree(degree, longest=lengths[0]).plan(lengths, home)


@dataclass(frozen=True, kw_only=True)
class RunMemory:
    """What a run's measures depend on; `target_share` of rows predict, a slot encodes `encoder_rows` at once."""

    config: RunConfig
    model: Any
    ahead: ComingSteps
    gpu: bool
    target_share: float = 1.0
    encoder_rows: int = 0

    @property
    def settings(self) -> MemorySettings:
        """The settings of the plan of memory, as the keys and the kernels of this GPU give them."""
        settings = run_memory_settings(self.config, gpu=self.gpu, encoder_rows=self.encoder_rows)
        lack = torch.cuda.is_available() and fla_device_lack(torch.device("cuda"))
        return replace(settings, scan_kernels=settings.scan_kernels and not lack)

    @property
    def machine(self) -> Machine:
        """The machine by whose prices measures are compared."""
        return read_run_machine(self.config) or (Machine.known("H200") if self.gpu else Machine.cpus())

    def choose_memory(self, budget: MemoryBudget) -> tuple[int, MemoryPlan]:
        """Choose the fastest measures that fit, and with them the rows of a slot where these are "auto".

        Returns the limit of rows and the plan. Numbers of rows are compared by the seconds of the heaviest steps; those
        with which nothing fits are left out. Raises PlanError, with the bytes, where none is left.
        """
        rows_of_keys = self.config.context.max_tokens_per_slot
        if isinstance(rows_of_keys, int):
            return rows_of_keys, self._choose_plan(self.config, self.ahead, budget)[1]
        choices, refusal = list[tuple[float, int, MemoryPlan]](), None
        for rows in self.ahead.rows_to_try(self.config):
            config = replace(self.config, context=replace(self.config.context, max_tokens_per_slot=rows))
            try:
                steps, memory = self._choose_plan(config, replace(self.ahead, few=True), budget)
            except PlanError as error:
                refusal = refusal or error  # of the fewest rows
                continue
            cost = self._plan_cost(memory).shared_by(self.ahead.home.tp)
            needs = MemoryNeeds.of(self.model, self.ahead.home, steps, self.settings, machine=self.machine)
            seconds = step_seconds(self.model, steps, memory, needs, self.machine, cost)
            choices.append((seconds, rows, memory))
        if not choices:
            assert refusal is not None
            raise refusal
        _, rows, memory = min(choices, key=lambda choice: choice[0])
        return rows, memory

    def _choose_plan(
        self, config: RunConfig, ahead: ComingSteps, budget: MemoryBudget
    ) -> tuple[list[Plan], MemoryPlan]:
        steps, limit = ahead.fullest_plans(config, self._plan_cost())
        run = self.model, ahead.home, [*steps, *limit], self.settings, budget, self.machine
        return steps, choose_memory(*run, fixed=fixed_keys(config, gpu=self.gpu))

    def _plan_cost(self, memory: MemoryPlan | None = None) -> Cost:
        slots, share = self.ahead.home.slots, self.target_share
        return find_run_cost(
            self.config, self.model, lambda line: None, gpu=self.gpu, slots=slots, target_share=share, memory=memory
        )


def choose_memory_on_ranks(run: RunMemory, world: World, log: LogLine) -> tuple[int, MemoryPlan | None]:
    """Plan a run's memory before `prepare`: the rows of a slot, and what its layers keep; entered by all ranks.

    The plan is None where train.memory and rows leave nothing to choose, on CPUs without `memory_bytes`, and where the
    model's bytes cannot be counted: "auto" rows are then the most that a step has on GPUs, where the warm-up halves
    them, and on CPUs the fewest that hold the longest document. Raises ConfigError, on every rank, where nothing fits.
    """
    train, given_rows = run.config.train, run.config.context.max_tokens_per_slot
    check_measures(train, gpu=run.gpu)
    chooses = chooses_measures(train, gpu=run.gpu)
    if isinstance(given_rows, int) and not chooses:
        return given_rows, None
    budget = memory_budget(run.config, world)
    rows, memory, reason = run_on_first_rank(world, partial(plan_or_explain, run, budget), ConfigError)
    if reason:
        log(f"memory: not planned, and the keys of [train] hold as they are: {reason}")
    elif memory is not None and chooses:
        log(memory.summary_line(budget))
    return rows, memory if run.gpu or train.memory_bytes else None


def plan_or_explain(run: RunMemory, budget: MemoryBudget) -> tuple[int, MemoryPlan | None, str]:
    """Return the rows of a slot, the plan of memory and "", or a None and why the model's bytes cannot be counted."""
    given_rows = run.config.context.max_tokens_per_slot
    try:
        ModelNumbers.of(run.model, run.ahead.home, run.settings)
    except PlanError as error:
        rows = given_rows if isinstance(given_rows, int) else run.ahead.rows_to_try(run.config)[-1 if run.gpu else 0]
        return rows, None, str(error)
    try:
        return *run.choose_memory(budget), ""
    except PlanError as error:
        raise ConfigError(str(error)) from error


def memory_budget(config: RunConfig, world: World) -> MemoryBudget:
    """Return the bytes that a rank may fill of its device and of its host: the least of all ranks, which all call it.

    The host's bytes are 0 where its free memory is not known; a CPU has no limit then.
    """
    host = int(HOST_SHARE * (free_host_bytes() or 0) / count_ranks_of_host(world))
    device = config.train.memory_bytes or host or sys.maxsize
    if world.device.type == "cuda" and not config.train.memory_bytes:
        # The CUDA context exists by now, and a plan of memory counts its bytes too, CONTEXT_BYTES at most.
        free, all_bytes = torch.cuda.mem_get_info(world.device)
        device = int(config.train.memory_fraction * min(all_bytes, free + CONTEXT_BYTES))
    # The control group has only a maximum.
    negative_bytes = world.control.largest_of([-float(device), -float(host)], "the least free memory")
    return MemoryBudget(device=int(-negative_bytes[0]), host=int(-negative_bytes[1]))
