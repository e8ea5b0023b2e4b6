"""The choice of a run's measures by a plan of memory, before its model is prepared, the same on every rank.

What is counted and what it costs is in `longspan.plan.memory`, which plans are looked at in `coming_plans.py`. Where
rows of a slot are "auto", some numbers of rows are compared, each with the measures that it needs.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from longspan.comm import World
from longspan.comm.all_ranks import LogLine, run_on_first_rank
from longspan.config.keys import AUTO
from longspan.config.memory_keys import check_measures, chooses_measures
from longspan.config.sections import RunConfig
from longspan.errors import ConfigError, PlanError
from longspan.plan import Cost, FixedMemory, Machine, MemoryBudget, MemoryPlan, MemorySettings, Plan, choose_memory
from longspan.plan.memory.memory_plan import MemoryNeeds
from longspan.plan.memory.seconds import added_seconds
from longspan.train.memory.coming_plans import ComingSteps
from longspan.train.memory.memory_inputs import fixed_memory, memory_budget, memory_settings, measures_by_hand
from longspan.train.plans.choice import cost_of_run, machine_of

# Without copies to the host and second exchanges, which the prices of plans leave out.
_PRICED_AS = {"selective": "exchanged", "selective+host": "exchanged", "full+host": "full"}


@dataclass(frozen=True, kw_only=True)
class RunMemory:
    """What measures of a run are chosen by: its configuration, that of its model, and its coming steps.

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
        """The settings of the plan of memory, with the keys by hand."""
        return memory_settings(
            self.config, gpu=self.gpu, target_share=self.target_share, encoder_rows=self.encoder_rows
        )

    @property
    def machine(self) -> Machine:
        """The machine by whose prices measures are compared."""
        machine = machine_of(self.config)
        return machine if isinstance(machine, Machine) else Machine.known("H200") if self.gpu else Machine.cpus()

    def plan_of_keys(self) -> MemoryPlan:
        """The memory of the run if its layers keep what the keys say."""
        plans = self._plans(self.config)
        needs = MemoryNeeds.of(self.model, self.ahead.home, plans, self.settings, machine=self.machine)
        return needs.under(measures_by_hand(self.config, needs))

    def choose(self, budget: MemoryBudget) -> MemoryPlan:
        """The fastest measures that fit, and the rows of a slot with which they do where these are "auto".

        Raises PlanError, with the bytes, where nothing fits.
        """
        if self.config.context.max_tokens_per_slot != AUTO:
            return self._choose(self._plans(self.config), budget)
        choices, refusal = list[tuple[float, MemoryPlan]](), None
        for rows in self.ahead.rows_to_try(self.config):
            try:
                choices.append(self._choose_with_rows(rows, budget))
            except PlanError as error:
                refusal = error
        if not choices:
            assert refusal is not None
            raise refusal
        return min(choices, key=lambda choice: choice[0])[1]

    def _choose_with_rows(self, rows: int, budget: MemoryBudget) -> tuple[float, MemoryPlan]:
        """The seconds of the heaviest steps under a limit of rows, and the plan of memory."""
        config = replace(self.config, context=replace(self.config.context, max_tokens_per_slot=rows))
        steps = self.ahead.fullest_plans(config, self._cost())
        memory = self._choose([*steps, *self.ahead.limit_plans(config, steps)], budget)
        cost = self._cost(memory).shared_by(self.ahead.home.tp)
        beside = self._unpriced_seconds(steps, memory)
        return sum(plan.timeline(cost).step_seconds + beside * plan.tokens for plan in steps), memory

    def _unpriced_seconds(self, plans: Sequence[Plan], memory: MemoryPlan) -> float:
        """Seconds a token that copies to the host and second exchanges take."""
        needs = MemoryNeeds.of(
            self.model, self.ahead.home, plans, replace(self.settings, gathered_once=memory.gathered_once)
        )
        words = tuple(_PRICED_AS.get(word, word) for word in memory.measures)
        priced: Any = replace(memory, measures=words)
        more = added_seconds(self.model, memory, needs, self.machine)
        more -= added_seconds(self.model, priced, needs, self.machine)
        return more / (max(load.rows for load in needs.loads) * self.ahead.home.slots)

    def _plans(self, config: RunConfig) -> list[Plan]:
        steps = self.ahead.fullest_plans(config, self._cost())
        return [*steps, *self.ahead.limit_plans(config, steps)]

    def _cost(self, memory: MemoryPlan | None = None) -> Cost:
        """The cost of plans, without the lines about it."""
        slots = self.ahead.home.slots
        share = self.target_share
        return cost_of_run(
            self.config, self.model, lambda line: None, gpu=self.gpu, slots=slots, target_share=share, memory=memory
        )

    def _choose(self, plans: Sequence[Plan], budget: MemoryBudget) -> MemoryPlan:
        fixed: FixedMemory = fixed_memory(self.config)
        return choose_memory(
            self.model, self.ahead.home, list(plans), self.settings, budget, self.machine, fixed=fixed
        )


def choose_on_ranks(run: RunMemory, world: World, log: LogLine) -> tuple[MemoryPlan | None, bool]:
    """The plan of memory of a run, and whether it chose the measures; entered by all ranks, before `prepare`.

    Where the keys say what layers keep, it only tells what that takes; None for a model whose bytes cannot be counted.
    Raises ConfigError, on every rank, for keys that contradict each other, and with the bytes where nothing fits.
    """
    train = run.config.train
    check_measures(train, gpu=run.gpu)
    if not (run.gpu or train.memory_bytes):
        return None, False
    chooses, budget = chooses_measures(train, gpu=run.gpu), memory_budget(run.config, world)
    memory, reason = run_on_first_rank(world, partial(_plan_or_reason, run, budget, chooses=chooses), ConfigError)
    if memory is None:
        log(f"memory: not planned, and the keys of [train] hold as they are: {reason}")
        return None, False
    log(memory.line(budget))
    return memory, chooses


def _plan_or_reason(run: RunMemory, budget: MemoryBudget, *, chooses: bool) -> tuple[MemoryPlan | None, str]:
    """The plan of memory, or why the model's bytes cannot be counted."""
    try:
        by_keys = run.plan_of_keys()
    except PlanError as error:
        return None, str(error)
    if not chooses:
        return by_keys, ""
    try:
        return run.choose(budget), ""
    except PlanError as error:
        raise ConfigError(str(error)) from error
