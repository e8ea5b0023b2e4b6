"""What layers keep so that a step fits and takes least time: by prices of a machine, measure by measure.

Steps from the least memory to the fastest: each measure that a layer could have has a price in seconds, and the layers
that recompute are as few as need be. The word of a run applies to all layers but those that keep more.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from longspan.errors import PlanError
from longspan.layout import Layout
from longspan.plan.cost.machine import Machine
from longspan.plan.memory.bytes import gib
from longspan.plan.memory.memory_plan import MemoryNeeds, MemoryPlan
from longspan.plan.memory.seconds import added_seconds
from longspan.plan.memory.settings import MEASURES, Measure, MemoryBudget, MemorySettings
from longspan.plan.plan import Plan
from longspan.plan.planners.fixed import plan_fixed


@dataclass(frozen=True, kw_only=True)
class FixedMemory:
    """Keys of memory that are given by hand, and are not chosen; None leaves a key to the choice.

    `measure` is what layers keep that recompute, or "none" for all; with `layers` the first so many of a stage have it and
    the others keep all. `offload` moves what is kept to the host.
    """

    measure: str | None = None
    layers: int | None = None
    offload: bool | None = None
    gathered_once: bool | None = None
    offload_states: bool | None = None


def choose_memory(
    config: Any,
    home: Layout,
    plan: Plan | list[Plan],
    settings: MemorySettings,
    budget: MemoryBudget,
    machine: Machine | None = None,
    *,
    fixed: FixedMemory | None = None,
) -> MemoryPlan:
    """The fastest plan of memory that fits a budget.

    >>> memory = choose_memory("Qwen3-8B/config.json", home, plan, MemorySettings(), budget)  # doctest: +SKIP

    `plan` is a plan or all plans of a run. Raises PlanError, with the bytes, where no choice fits.
    """
    machine, fixed = machine or Machine(), fixed or FixedMemory()
    needs = MemoryNeeds.of(config, home, plan, settings, machine=machine)
    best = _fastest(config, needs, budget, machine, fixed)
    if best is not None:
        return best
    least = min(_least_choices(needs, fixed), key=lambda memory: memory.device.total)
    raise PlanError(_refusal(least, budget, home, fixed))


def _fastest(
    config: Any, needs: MemoryNeeds, budget: MemoryBudget, machine: Machine, fixed: FixedMemory
) -> MemoryPlan | None:
    best: tuple[float, MemoryPlan] | None = None
    for some in _settings(needs, fixed):
        for word in _words(fixed):
            memory = _fewest(some, word, budget, fixed)
            if memory is None:
                continue
            seconds = added_seconds(config, memory, some, machine)
            if best is None or seconds < best[0] - 1e-9:
                best = seconds, memory
    return best[1] if best else None


def _settings(needs: MemoryNeeds, fixed: FixedMemory) -> Iterator[MemoryNeeds]:
    """The needs under each choice of settings."""
    settings, home = needs.places[0].settings, needs.places[0].home
    free = settings.shard_parameters and home.pp == 1 and not settings.free and settings.backward
    once = [fixed.gathered_once] if fixed.gathered_once is not None else [True, False] if free else [False]
    states = [fixed.offload_states] if fixed.offload_states is not None else [False, True] if settings.gpu else [False]
    for offload_states in states:
        for gathered_once in once:
            yield needs.with_settings(replace(settings, gathered_once=gathered_once, offload_states=offload_states))


def _words(fixed: FixedMemory) -> tuple[Measure, ...]:
    """The measures that layers which do not keep all may have."""
    words = MEASURES[1:] if fixed.measure is None else tuple(w for w in MEASURES if w.split("+")[0] == fixed.measure)
    if fixed.offload is not None:
        words = tuple(word for word in words if ("+" in word) == fixed.offload)
    if fixed.measure == "none":
        return ("none",)
    if not words:
        raise PlanError(
            f"no measure keeps {fixed.measure!r} with offload {fixed.offload}; use one of {', '.join(MEASURES)}"
        )
    return words


def _fewest(needs: MemoryNeeds, word: Measure, budget: MemoryBudget, fixed: FixedMemory) -> MemoryPlan | None:
    """As few layers under a measure as fit, the first ones of each stage; None where all do not fit."""
    most = max(len(place.stage.layers) for place in needs.places)
    low, high = (0, most) if fixed.layers is None else (fixed.layers or most, fixed.layers or most)
    if fixed.measure not in (None, "none") and fixed.layers is None:
        low = most
    best: MemoryPlan | None = None
    while low <= high:
        count = (low + high) // 2
        memory = needs.under(_measures(needs, word, count))
        if memory.fits(budget):
            best, high = memory, count - 1
        else:
            low = count + 1
    return best


def _measures(needs: MemoryNeeds, word: Measure, count: int) -> tuple[Measure, ...]:
    """The word for the first so many layers of each rank's stages, "none" for the others."""
    words: list[Measure] = ["none"] * needs.layers
    for place in needs.places:
        for layer in place.stage.layers[:count]:
            words[layer] = word
    return tuple(words)


def _least_choices(needs: MemoryNeeds, fixed: FixedMemory) -> Iterator[MemoryPlan]:
    """What each choice needs if every layer keeps as little as it may."""
    for some in _settings(needs, fixed):
        for word in _words(fixed):
            yield some.under(word)


def _refusal(least: MemoryPlan, budget: MemoryBudget, home: Layout, fixed: FixedMemory) -> str:
    given = ", ".join(f"{name} = {value!r}" for name, value in vars(fixed).items() if value is not None)
    under = f" with {given}" if given else " under any measure"
    return (
        f"the run does not fit{under}: a slot of {least.rows:,} rows needs at least {gib(least.device.total)} "
        f"({least.device.total:,} bytes) of a GPU that may fill {gib(budget.device)} ({budget.device:,}), and "
        f"{gib(least.host.total)} of the host's {gib(budget.host)}; use more than {len(home.ranks)} ranks, fewer rows a "
        "slot (context.max_tokens_per_slot), or a higher tp"
    )


def longest_document(
    config: Any,
    home: Layout,
    settings: MemorySettings,
    budget: MemoryBudget,
    machine: Machine | None = None,
    measures: str = "auto",
    *,
    cp_comm_type: str = "auto",
    row_multiple: int = 1,
) -> tuple[int, MemoryPlan | None]:
    """The most tokens of one document over all slots that fit, in whole 1024 a slot, and their plan of memory.

    >>> tokens, memory = longest_document("Qwen3-8B/config.json", home, MemorySettings(), budget)  # doctest: +SKIP

    `measures` "auto" takes those that need least; a word is that of all layers. 0 and None where nothing fits.
    """
    machine = machine or Machine()
    unit = 1024 * row_multiple
    fixed = (
        FixedMemory()
        if measures == "auto"
        else FixedMemory(measure=measures.split("+")[0], layers=0, offload="+" in measures)
    )

    def fitting(rows: int) -> MemoryPlan | None:
        plan = plan_fixed([rows * home.slots], home, cp=home.slots, cp_comm_type=cp_comm_type)
        needs = MemoryNeeds.of(config, home, plan, settings, machine=machine)
        if measures == "auto":
            return _fastest(config, needs, budget, machine, fixed)
        memory = needs.under(measures)
        return memory if memory.fits(budget) else None

    low, high = 0, 1
    while fitting(high * unit) is not None and high < 1 << 16:
        low, high = high, high * 2
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if fitting(middle * unit) is not None else (low, middle)
    return low * unit * home.slots, fitting(low * unit) if low else None
