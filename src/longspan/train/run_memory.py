"""The choice of a run's measures and of the rows of a slot by a plan of memory, the same on every rank.

It is made before the model is prepared; what is counted and what it costs is in `longspan.plan.memory`. The rows are
kept in the run's folder: where a rank runs out of memory in the warm-up, the run begins anew with half of them.
"""

import json
import math
import os
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from heapq import nlargest
from operator import itemgetter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from transformers import PreTrainedModel

from longspan.comm import World
from longspan.comm.all_ranks import LogLine, run_on_every_rank, run_on_first_rank
from longspan.config.keys import AUTO
from longspan.config.sections import RunConfig, check_memory_keys, chooses_measures
from longspan.errors import CommError, ConfigError, PlanError, plural
from longspan.files import read_json, write_atomically
from longspan.host import free_host_bytes
from longspan.layout import Layout
from longspan.plain_text import bytes_text
from longspan.plan import Cost, Machine, MemoryBudget, MemoryNeeds, MemoryPlan, MemorySettings, Plan, choose_memory
from longspan.plan.memory.memory_plan import mean_step_seconds
from longspan.plan.memory.settings import GPU_SHARE, HOST_SHARE, MOMENTS, gib_text
from longspan.plan.memory.stage_bytes import CONTEXT_BYTES, ModelNumbers
from longspan.ssm.kernels.packages import fla_device_lack
from longspan.train.plans import PlannerConfig, plan_row_multiple
from longspan.train.plans.run_cost import (
    can_be_free,
    find_run_cost,
    fixed_memory_keys,
    read_run_machine,
    run_memory_settings,
)

if TYPE_CHECKING:
    from longspan.plan import MemoryPlan


_highest: dict[torch.device, int] = {}  # the peak of each GPU before `measure_added_peak` reset its allocator's figure


@contextmanager
def measure_added_peak(device: torch.device) -> Iterator[list[int]]:
    """Measure the most bytes that the block adds on a GPU, put into the list at its end; `peak_memory_bytes` stays."""
    added = list[int]()
    if device.type != "cuda":
        yield added
        return
    _highest[device], bytes_before = peak_memory_bytes(device), _allocator_figure(device, "allocated_bytes", "current")
    torch.cuda.reset_peak_memory_stats(device)
    yield added
    added.append(_allocator_figure(device, "allocated_bytes", "peak") - bytes_before)


def unused_bytes(device: torch.device, ranks: int) -> int:
    """Return the bytes that a rank could still take of its GPU, or of the host, shared by `ranks`; 0: unknown."""
    if device.type == "cuda":
        free, in_use = torch.cuda.mem_get_info(device)[0], _allocator_figure(device, "allocated_bytes", "current")
        return free + _allocator_figure(device, "reserved_bytes", "current") - in_use
    try:
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // ranks
    except (AttributeError, ValueError):  # Windows and macOS have no such figures
        return 0


def _allocator_figure(device: torch.device, name: str, which: Literal["current", "peak"]) -> int:
    # torch.cuda.memory_allocated and the like take longer: they flatten and sort all two hundred figures
    figures = torch.cuda.memory_stats_as_nested_dict(device)
    return figures[name]["all"][which] if figures else 0


def allocator_retries(device: torch.device) -> int:
    figures = torch.cuda.memory_stats_as_nested_dict(device) if device.type == "cuda" else {}
    return figures.get("num_alloc_retries", 0)


def peak_reserved_bytes(device: torch.device) -> int:
    return _allocator_figure(device, "reserved_bytes", "peak") if device.type == "cuda" else 0


def allocator_retries_text(times: float, in_use: int, reserved: int) -> str:
    """Return a warning of an allocator that ran out of memory `times` a step; `in_use`, `reserved` are peak bytes."""
    return (
        f"the GPU's allocator ran out of memory {times:.3g} times a step: each time it waits for the GPU, gives back "
        f"what is free and takes it again ({bytes_text(reserved)} taken at most, {bytes_text(in_use)} in use); a lower "
        "train.device_memory_limit leaves it room (docs/memory.md)"
    )


def peak_memory_bytes(device: torch.device) -> int:
    """Return the most memory that this process has held: of its GPU, or resident on a CPU."""
    if device.type == "cuda":
        return max(_allocator_figure(device, "allocated_bytes", "peak"), _highest.get(device, 0))
    # macOS counts bytes, Linux KiB.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def count_ranks_of_host(world: World) -> int:
    return min(len(world.home.ranks), world.node_size * world.home.tp)


def check_model_fits(config: RunConfig, model: PreTrainedModel, world: World, *, training: bool) -> None:
    """Raise ConfigError, on every rank, where any rank has less room than its shards need, on its GPU or its host.

    `model` is not yet prepared. Without `training` only weights count. All is taken as split: more is needed, never
    less.
    """

    def check_rank_has_room() -> None:
        home, train, gpu = world.home, config.train, world.device.type == "cuda"
        shards = home.tp * home.pp * home.slots // home.dp_replicate
        weights = sum(p.nbytes for p in model.parameters()) // shards
        trained = sum(p.nbytes for p in model.parameters() if p.requires_grad and training) // shards
        moments = 0 if train.offload_optimizer_states else MOMENTS.get(config.optimizer.class_, 0)
        parts = {"weights": weights, "gradients": trained, "optimizer states": int(moments * trained)}
        needed, ranks = sum(parts.values()), count_ranks_of_host(world)
        free = torch.cuda.mem_get_info(world.device)[0] if gpu else free_host_bytes(swap=True)
        if free is None or needed <= (free := free if gpu else free // ranks):
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


UNEVEN = 1.25  # times the mean rows of images in a step, for steps with more of them
MOST_STEPS = 1024  # whose documents are looked at
FEW_STEPS = 4  # for which plans are made that are priced as those of the run


@dataclass(frozen=True)
class ComingSteps:
    """The documents of coming steps, from `first` to before `last`, for a home.

    `heads` are the model's query heads; `planners` take the place of the configuration's. `few`: only a few plans are
    made. `longest` is the longest document of the whole run, if it is known.
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

        Those with the fullest slots, by a simple cost, where all steps can be looked at; else the heaviest, and where
        rows have a limit a plan that fills every slot to it. Raises PlanError for documents that fit no group.
        """
        planners = self.planners or (config.context.planner,)
        if planners == (AUTO,):  # of several slots a run chooses one later
            planners = ("dynamic", "fixed") if self.home.slots > 1 else ("fixed",)
        configs = (replace(config, context=replace(config.context, planner=planner)) for planner in planners)
        choices = [PlannerConfig.training(one, cost=cost, heads=self.heads) for one in configs]
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
        return plans, [plan_with_full_slots(config, self.home, max(rows, multiple), self.heads)]

    def _heaviest_steps(self) -> list[int]:
        steps = range(self.first, min(self.last, self.first + MOST_STEPS))
        lengths = {step: self.lengths_of_step(step) for step in steps}
        if not lengths:
            return []
        longest_step = max(lengths, key=lambda step: max(lengths[step], default=0))
        return sorted({longest_step, max(lengths, key=lambda step: sum(lengths[step]))})

    def rows_to_try(self, config: RunConfig) -> list[int]:
        """List the rows of a slot that "auto" may become: from the fewest that hold the longest document, doubling."""
        choice = PlannerConfig.training(config, heads=self.heads)
        lengths = [self.lengths_of_step(step) for step in self._heaviest_steps()]
        longest_document = max(self.longest, *(max(step, default=1) for step in lengths), 1)
        most_tokens = max((sum(step) for step in lengths), default=1)
        multiple = 2 * choice.options.row_multiple
        rows = [-(-longest_document // choice.widest_even_degree(self.home)) + multiple]
        while rows[-1] < most_tokens / self.home.slots + multiple:
            rows.append(2 * rows[-1])
        return [-(-count // multiple) * multiple for count in rows]


def plan_with_full_slots(config: RunConfig, home: Layout, rows: int, heads: int | None = None) -> Plan:
    """Make a plan with `rows` rows on every slot in each micro-batch: a document in each of the widest groups."""
    choice = PlannerConfig.training(config, heads=heads)
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
    def memory_settings(self) -> MemorySettings:
        settings = run_memory_settings(self.config, gpu=self.gpu, encoder_rows=self.encoder_rows)
        lack = torch.cuda.is_available() and fla_device_lack(torch.device("cuda"))
        return replace(settings, scan_kernels=settings.scan_kernels and not lack)

    @property
    def machine(self) -> Machine:
        return read_run_machine(self.config) or (Machine.known("H200") if self.gpu else Machine.cpus())

    def choose_memory(self, budget: MemoryBudget) -> tuple[RunConfig, MemoryPlan]:
        """Choose the fastest measures that fit, and with them rows of a slot and mode where these are "auto".

        These are compared by the seconds of the heaviest steps, with `PlannerConfig.least_gain`. Returns the
        configuration with them. Raises PlanError, with the bytes, where nothing fits.
        """
        context = self.config.context
        given_rows, mode = context.max_tokens_per_slot, "lockstep" if context.mode == AUTO else context.mode
        ahead = self.ahead if isinstance(given_rows, int) else replace(self.ahead, few=True)
        choices, refusal = list[tuple[float, RunConfig, MemoryPlan]](), None

        def add_choice(rows: int, mode: Literal["lockstep", "free"]) -> None:
            config = replace(self.config, context=replace(context, max_tokens_per_slot=rows, mode=mode))
            seconds, memory = replace(self, config=config, ahead=ahead)._choose_memory_of_steps(budget)
            choices.append((seconds * PlannerConfig.training(config).least_gain, config, memory))

        for rows in [given_rows] if isinstance(given_rows, int) else ahead.rows_to_try(self.config):
            try:
                add_choice(rows, mode)
            except PlanError as error:
                refusal = refusal or error  # of the fewest rows
        if not choices:
            assert refusal is not None
            raise refusal
        best = min(choices, key=itemgetter(0))
        if context.mode == AUTO and self.gpu and can_be_free(self.config, self.ahead.home):
            with suppress(PlanError):  # weights and gradients do not fit whole
                add_choice(int(best[1].context.max_tokens_per_slot), "free")
        return min(choices, key=itemgetter(0))[1:]

    def _choose_memory_of_steps(self, budget: MemoryBudget) -> tuple[float, MemoryPlan]:
        """The fastest plan of memory that fits, and the mean seconds of steps under it, by the first planner."""
        ahead, model, machine = self.ahead, self.model, self.machine
        steps, limit = ahead.fullest_plans(self.config, self._run_cost())
        run = model, ahead.home, [*steps, *limit], self.memory_settings, budget, machine
        memory = choose_memory(*run, fixed=fixed_memory_keys(self.config, gpu=self.gpu))
        steps = [plan for plan in steps if plan.planner == steps[0].planner]
        needs = MemoryNeeds.of(model, ahead.home, steps, self.memory_settings, machine=machine)
        return mean_step_seconds(
            model, steps, memory, needs, machine, self._run_cost(memory).shared_by(ahead.home.tp)
        ), memory

    def _run_cost(self, memory: MemoryPlan | None = None) -> Cost:
        slots, share = self.ahead.home.slots, self.target_share
        return find_run_cost(
            self.config, self.model, lambda line: None, gpu=self.gpu, slots=slots, target_share=share, memory=memory
        )


def choose_memory_on_ranks(run: RunMemory, world: World, log: LogLine) -> tuple[RunConfig, MemoryPlan | None]:
    """Plan a run's memory before `prepare`: rows of a slot, mode, and what its layers keep; entered by all ranks.

    Returns the configuration with rows and mode in place of "auto". The plan is None where train.plan_memory and rows
    leave
    nothing to choose, on CPUs without `memory_bytes`, and where the model's bytes cannot be counted: "auto" rows are
    then the most that a step has on GPUs, where the warm-up halves them, and on CPUs the fewest that hold the longest
    document; the mode is lockstep. Raises ConfigError, on every rank, where nothing fits.
    """
    train, given_rows = run.config.train, run.config.context.max_tokens_per_slot
    check_memory_keys(train, gpu=run.gpu)
    chooses = chooses_measures(train, gpu=run.gpu)
    if isinstance(given_rows, int) and not chooses:
        return set_usual_mode(run.config), None
    budget = memory_budget(run.config, world)
    config, memory, reason = run_on_first_rank(world, partial(choose_memory_or_explain, run, budget), ConfigError)
    if reason:
        log(f"memory: not planned, and the keys of [train] hold as they are: {reason}")
    elif memory is not None and chooses:
        log(memory.summary_line(budget))
    return config, memory if run.gpu or train.device_memory_limit else None


def set_usual_mode(config: RunConfig) -> RunConfig:
    """Put lockstep in place of a mode "auto"."""
    return replace(config, context=replace(config.context, mode="lockstep")) if config.context.mode == AUTO else config


def choose_memory_or_explain(run: RunMemory, budget: MemoryBudget) -> tuple[RunConfig, MemoryPlan | None, str]:
    """Return the configuration with rows and mode, the plan of memory and ""; or why bytes cannot be counted."""
    config = set_usual_mode(run.config)
    try:
        ModelNumbers.from_configuration(run.model, run.ahead.home, run.memory_settings)
    except PlanError as error:
        if config.context.max_tokens_per_slot == AUTO:
            rows = run.ahead.rows_to_try(config)[-1 if run.gpu else 0]
            config = replace(config, context=replace(config.context, max_tokens_per_slot=rows))
        return config, None, str(error)
    try:
        return *run.choose_memory(budget), ""
    except PlanError as error:
        raise ConfigError(str(error)) from error


def memory_budget(config: RunConfig, world: World) -> MemoryBudget:
    """Return the bytes that a rank may fill of device and host, the least of all ranks (host 0: not known)."""
    host = int(HOST_SHARE * (free_host_bytes() or 0) / count_ranks_of_host(world))
    device = config.train.device_memory_limit or host or sys.maxsize
    if world.device.type == "cuda" and not config.train.device_memory_limit:
        # The CUDA context exists by now, and a plan of memory counts its bytes too, CONTEXT_BYTES at most.
        free, all_bytes = torch.cuda.mem_get_info(world.device)
        device = int(GPU_SHARE * min(all_bytes, free + CONTEXT_BYTES))
    # The control group has only a maximum.
    negative_bytes = world.control.largest_over_ranks([-float(device), -float(host)], "the least free memory")
    return MemoryBudget(device=int(-negative_bytes[0]), host=int(-negative_bytes[1]))


FILE = "max_tokens_per_slot.json"  # in the run's folder
# Keys on which the rows of a slot depend, besides those of whole sections.
_SECTIONS = ("model", "parallel", "context", "lora", "mtp", "encoder")
_KEYS = {
    "data": ("tokenizer", "vocab_size"),
    "train": (
        *("activation_checkpointing", "offload_activations", "plan_memory", "offload_optimizer_states"),
        *("mlp_tile_tokens", "fused_norms", "float8", "device_memory_limit"),
    ),
    "optimizer": ("class", "arguments", "stochastic_rounding"),
}


class SlotRowsError(ConfigError):
    """A rank that ran out of memory before step 1; with "auto" rows the run begins anew with half of them."""


@dataclass(frozen=True)
class SlotRows:
    """The `rows` of a slot in a micro-batch, halved from those `planned`, on `ranks` many ranks under these keys."""

    rows: int
    planned: int
    ranks: int
    keys: dict[str, Any]


def choose_rows(
    run: "RunMemory", world: World, log: LogLine, *, finished: bool = False
) -> "tuple[RunConfig, MemoryPlan | None]":
    """Return the configuration, with rows of a slot and mode in place of "auto", and the plan of memory; entered by all
    ranks.

    Rows that an earlier start chose on as many ranks, under these keys, hold again. A `finished` run plans nothing.
    """
    config = run.config
    if config.context.max_tokens_per_slot != AUTO:
        return (set_usual_mode(config), None) if finished else choose_memory_on_ranks(run, world, log)
    file, ranks, keys = Path(config.run.dir) / FILE, len(world.home.ranks), keys_that_decide_rows(config)

    def read_rows() -> SlotRows | None:
        if not file.is_file():
            return None
        try:
            slot_rows = SlotRows(**read_json(file))
        except (ValueError, TypeError) as error:
            raise ConfigError(f"{file} is damaged: {error}; remove it and rows are chosen again") from error
        return slot_rows if slot_rows.ranks == ranks and slot_rows.keys.items() >= keys.items() else None

    slot_rows: SlotRows | None = run_on_first_rank(world, read_rows, ConfigError)
    if slot_rows is not None:
        planned_context = replace(config.context, max_tokens_per_slot=slot_rows.planned)
        run = replace(run, config=replace(config, context=planned_context))
    if finished:
        config, memory = set_usual_mode(config), None
        planned = slot_rows.planned if slot_rows else run.ahead.rows_to_try(config)[0]
    else:
        config, memory = choose_memory_on_ranks(run, world, log)
        planned = int(config.context.max_tokens_per_slot)
    if slot_rows is None:
        slot_rows = SlotRows(planned, planned, ranks, keys)
        run_on_first_rank(world, lambda: write_atomically(file, json.dumps(vars(slot_rows), indent=1)), ConfigError)
    rows = slot_rows.rows
    halved = f" (of {slot_rows.planned:,}, for which a rank had no memory)" if rows < slot_rows.planned else ""
    log(f"max_tokens_per_slot: {rows:,} rows{halved}")
    config = replace(config, context=replace(config.context, max_tokens_per_slot=rows))
    return _set_eval_rows(config, rows), memory


def ran_short_of_memory(error: BaseException) -> bool:
    """Return whether an error is SlotRowsError, or that of another rank, which quotes it."""
    return isinstance(error, SlotRowsError) or (isinstance(error, CommError) and SlotRowsError.__name__ in str(error))


def halve_saved_rows(config: RunConfig) -> None:
    """Halve the rows that a run has kept in its folder; for the first rank."""
    file, multiple = Path(config.run.dir) / FILE, plan_row_multiple(config.parallel)
    values = read_json(file)
    rows = max(1, values["rows"] // 2 // multiple) * multiple
    write_atomically(file, json.dumps(values | {"rows": rows}, indent=1))


def set_eval_rows_of_training(config: RunConfig) -> RunConfig:
    """Put the rows that the run chose for training in place of "auto" of evaluation, which keeps less of a row."""
    if config.evaluation.max_tokens_per_slot != AUTO:
        return config
    file = Path(config.run.dir) / FILE
    try:
        rows = int(read_json(file)["rows"])
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ConfigError(
            f'evaluation.max_tokens_per_slot is "{AUTO}", the rows that training has chosen, and {file} does not '
            f"say them ({error}); give a number of rows"
        ) from error
    return _set_eval_rows(config, rows)


def _set_eval_rows(config: RunConfig, rows: int) -> RunConfig:
    if config.evaluation.max_tokens_per_slot == AUTO:
        config = replace(config, evaluation=replace(config.evaluation, max_tokens_per_slot=rows))
    sets = (
        replace(s, max_tokens_per_slot=rows) if s.max_tokens_per_slot == AUTO else s for s in config.evaluation.sets
    )
    return config.with_sets(sets)


def keys_that_decide_rows(config: RunConfig) -> dict[str, Any]:
    values = config.tables()
    names = {section: tuple(values[section]) for section in _SECTIONS} | _KEYS
    keys = {f"{section}.{key}": values[section][key] for section in names for key in names[section]}
    return json.loads(json.dumps(keys))  # tuples become lists, so that they equal those read from a file
