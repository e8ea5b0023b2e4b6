"""The choice of a run's measures by a plan of memory, before its model is prepared, the same on every rank.

What is counted and what it costs is in `longspan.plan.memory`, which plans are looked at in `coming_plans.py`. Where
rows of a slot are "auto", some numbers of rows are compared, each with the measures that it needs.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch

from longspan.comm import World
from longspan.comm.all_ranks import LogLine, run_on_first_rank
from longspan.config.keys import AUTO
from longspan.config.memory_keys import check_measures, chooses_measures, key_checkpointing
from longspan.config.sections import RunConfig
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
from longspan.plan.memory.step_peak import CONTEXT_BYTES
from longspan.train.memory.coming_plans import ComingSteps
from longspan.train.memory.memory_settings import fixed_keys, run_memory_settings
from longspan.train.memory.model_fits import count_ranks_of_host
from longspan.train.plans.run_cost import find_run_cost, read_run_machine


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
        machine = read_run_machine(self.config)
        return machine if isinstance(machine, Machine) else Machine.known("H200") if self.gpu else Machine.cpus()

    def plan_memory(self, chosen: MemoryPlan | None) -> MemoryPlan:
        """Plan the memory of the run with the measures and settings of a chosen plan; None: with those of the keys."""
        settings = self.settings
        if chosen is not None:
            settings = replace(settings, gathered_once=chosen.gathered_once, offload_states=chosen.offload_states)
            settings = replace(settings, mlp_tile_rows=chosen.mlp_tile_rows, segment_layers=chosen.segment_layers)
        plans = self._coming_plans(self.config)
        needs = MemoryNeeds.of(self.model, self.ahead.home, plans, settings, machine=self.machine)
        return needs.under(key_measures(self.config, needs) if chosen is None else chosen.measures)

    def choose_memory(self, budget: MemoryBudget) -> MemoryPlan:
        """Choose the fastest measures that fit, and with them the rows of a slot where these are "auto".

        Numbers of rows with which nothing fits are left out. Raises PlanError, with the bytes, where none is left.
        """
        if self.config.context.max_tokens_per_slot != AUTO:
            return self._choose_plan(self._coming_plans(self.config), budget)
        choices, refusal = list[tuple[float, MemoryPlan]](), None
        for rows in self.ahead.rows_to_try(self.config):
            try:
                choices.append(self._choose_under_limit(rows, budget))
            except PlanError as error:
                refusal = error
        if not choices:
            assert refusal is not None
            raise refusal
        return min(choices, key=lambda choice: choice[0])[1]

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
        home, fixed = self.ahead.home, fixed_keys(self.config)
        return choose_memory(self.model, home, list(plans), self.settings, budget, self.machine, fixed=fixed)


def choose_memory_on_ranks(run: RunMemory, world: World, log: LogLine) -> MemoryPlan | None:
    """Choose the measures that a run's layers have, by a plan of memory; entered by all ranks, before `prepare`.

    None where the keys say what layers keep, or where the model's bytes cannot be counted. Raises ConfigError, on every
    rank, for keys that contradict each other, and with the bytes where nothing fits.
    """
    check_measures(run.config.train, gpu=run.gpu)
    if not chooses_measures(run.config.train, gpu=run.gpu):
        return None
    budget = memory_budget(run.config, world)
    memory, reason = run_on_first_rank(world, partial(choose_memory_or_explain, run, budget), ConfigError)
    log(
        memory.summary_line(budget)
        if memory
        else f"memory: not planned, and the keys of [train] hold as they are: {reason}"
    )
    return memory


def choose_memory_or_explain(run: RunMemory, budget: MemoryBudget) -> tuple[MemoryPlan | None, str]:
    """Return the plan of memory and "", or None and why the model's bytes cannot be counted.

    Raises ConfigError if the bytes can be counted and nothing fits.
    """
    try:
        ModelNumbers.of(run.model, run.ahead.home, run.settings)
    except PlanError as error:
        return None, str(error)
    try:
        return run.choose_memory(budget), ""
    except PlanError as error:
        raise ConfigError(str(error)) from error


def plan_memory_on_ranks(run: RunMemory, chosen: MemoryPlan | None, world: World) -> MemoryPlan | None:
    """Plan the memory of a run whose rows of a slot are known; entered by all ranks.

    None on CPUs without `memory_bytes`, where no budget is known, and where the model's bytes cannot be counted.
    """
    if not (run.gpu or run.config.train.memory_bytes):
        return None

    def plan_run_memory() -> MemoryPlan | None:
        """Plan the run's memory on the first rank; None where bytes cannot be counted."""
        with suppress(PlanError):
            return run.plan_memory(chosen)

    return run_on_first_rank(world, plan_run_memory, ConfigError)


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

    Without `train.memory_bytes` the device must be a GPU, whose free memory is read. The host's bytes are 0 where its
    free memory is not known.
    """
    host = int(HOST_SHARE * (free_host_bytes() or 0) / count_ranks_of_host(world))
    if config.train.memory_bytes:
        return config.train.memory_bytes, host
    # The CUDA context exists by now. Its bytes count as free, as a plan of memory counts them among its own; `min`, as
    # the context may be smaller than CONTEXT_BYTES.
    free, all_bytes = torch.cuda.mem_get_info(world.device)
    return int(config.train.memory_fraction * min(all_bytes, free + CONTEXT_BYTES)), host


def key_measures(config: RunConfig, needs: MemoryNeeds) -> tuple[str, ...]:
    """Return what each layer keeps by the keys: the first `recompute_layers` of a stage (0: each) are recomputed."""
    train, kind = config.train, key_checkpointing(config.train) or "none"
    measure = f"{kind}+host" if train.offload_activations and kind != "none" else kind
    return needs.measures_of_layers(measure, train.recompute_layers)
