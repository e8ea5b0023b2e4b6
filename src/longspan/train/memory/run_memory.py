"""The choice of a run's measures by a plan of memory, before its model is prepared, the same on every rank.

What is counted and what it costs is in `longspan.plan.memory`, which plans are looked at in `coming_plans.py`. Where
rows of a slot are "auto", some numbers of rows are compared, each with the measures that it needs.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from longspan.comm import World
from longspan.comm.all_ranks import LogLine, run_on_first_rank
from longspan.config.keys import AUTO
from longspan.config.sections import RunConfig, check_measures, chooses_measures, key_checkpointing
from longspan.errors import ConfigError, PlanError
from longspan.host_memory import free_host_bytes
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
from longspan.train.memory.coming_plans import ComingSteps
from longspan.train.memory.memory_settings import fixed_keys, run_memory_settings
from longspan.train.memory.model_fits import count_ranks_of_host
from longspan.train.plans.run_cost import find_run_cost, read_run_machine

UNEVEN = 1.25  # times the mean rows of images in a step, for steps with more of them


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
