"""What layers keep so that a step fits and takes least time, by the prices of a machine; and the longest document.

The first layers of each stage have one measure and the others a faster one: as few of the first as fit. All pairs of
measures are choices, with weights gathered once or twice and states on the device or the host, and what costs least
wins; a choice that costs more, whatever its number of layers, than one that fits is not counted.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

from longspan.errors import PlanError
from longspan.layout import Layout
from longspan.plan.cost.machine import Machine
from longspan.plan.memory.bytes import gib_text
from longspan.plan.memory.memory_plan import MemoryNeeds, MemoryPlan
from longspan.plan.memory.seconds import MemoryPrices
from longspan.plan.memory.settings import FixedMemory, Measure, MemoryBudget, MemorySettings
from longspan.plan.plan import Plan
from longspan.plan.planners.fixed import plan_fixed

TILE_ROWS = 16384  # rows of a tile where the plan runs MLPs in tiles: products of so many are as fast as those of all
SEGMENT_LAYERS = 4  # layers of a segment that the plan chooses, where nothing else fits
_UNTILED = ("llama4",)  # families whose experts do not have transformers' common interface
_ROWS = 1024  # rows of a slot by which the longest document grows while it is sought


def choose_memory(
    config: Any,
    home: Layout,
    plan: Plan | Sequence[Plan],
    settings: MemorySettings,
    budget: MemoryBudget,
    machine: Machine | None = None,
    *,
    fixed: FixedMemory | None = None,
) -> MemoryPlan:
    """Choose the fastest plan of memory that fits a budget; `plan` is a plan, or all plans of a run.

    >>> memory = choose_memory("Qwen3-8B/config.json", home, plan, MemorySettings(), budget)  # doctest: +SKIP

    Plans of memory are compared by the seconds that they add to the largest load, on the first pipeline stage. Raises
    PlanError, with the bytes, where no choice fits.
    """
    machine, fixed = machine or Machine(), fixed or FixedMemory()
    needs = MemoryNeeds.of(config, home, plan, settings, machine=machine)
    prices = MemoryPrices(config, machine, needs.places[0], max(needs.loads))
    if (fastest := _find_fastest_plan(needs, budget, fixed, prices)) is not None:
        return fastest
    leanest = min(leanest_plans(needs, fixed), key=lambda memory: memory.excess(budget))
    raise PlanError(_refusal_text(leanest, budget, home, fixed))


def _find_fastest_plan(
    needs: MemoryNeeds, budget: MemoryBudget, fixed: FixedMemory, prices: MemoryPrices
) -> MemoryPlan | None:
    """Return the fastest plan that fits; None where none does.

    Segments, groups of layers that run forward once more in backward, are tried only where no plan without them fits.
    Of plans that take equally long the first choice wins.
    """
    # An eighth more: with few layers another choice may need about 1 % less than the leanest (`_leanest_choice_fits`).
    roomier = MemoryBudget(device=budget.device * 9 // 8, host=budget.host * 9 // 8)
    for size in _segment_choices(needs, fixed):
        segmented = _set_segments(needs, size)
        if not _leanest_choice_fits(segmented, roomier, fixed):  # far fewer to count than all choices
            continue
        if (fastest := _fastest_of_choices(segmented, budget, fixed, prices)) is not None:
            return fastest
    return None


def _fastest_of_choices(
    needs: MemoryNeeds, budget: MemoryBudget, fixed: FixedMemory, prices: MemoryPrices
) -> MemoryPlan | None:
    """Return the fastest plan that fits, of one plan for each setting and pair of measures; None where none fits.

    Choices are counted in the order of their lower bounds in seconds, until no bound that is left is below the seconds
    of a plan that fits. Of equally fast plans that of the first choice wins.
    """
    choices = list(_choices(needs, fixed))
    bounds = [prices.least_seconds(choice, (slow, fast)) for choice, slow, fast in choices]
    fastest, best = None, (math.inf, len(choices))  # seconds, and the number of the choice
    for bound, number in sorted(zip(bounds, range(len(choices)), strict=True)):
        if (bound, number) > best:
            break
        memory = _fit_fewest_layers(*choices[number], budget, fixed)
        if memory is not None and (candidate := (prices.seconds(memory), number)) < best:
            fastest, best = memory, candidate
    return fastest


def _segment_choices(needs: MemoryNeeds, fixed: FixedMemory) -> list[int]:
    """Return the sizes of segments to try, in layers: 0 for no segments, then SEGMENT_LAYERS where layers recompute."""
    if fixed.segment_layers is not None:
        return [fixed.segment_layers]
    return [0, SEGMENT_LAYERS] if needs.places[0].settings.backward and fixed.measure != "none" else [0]


def _set_segments(needs: MemoryNeeds, size: int) -> MemoryNeeds:
    """Return the same needs with segments of `size` layers; 0 for none."""
    return needs.with_settings(replace(needs.places[0].settings, segment_layers=size))


def _choices(needs: MemoryNeeds, fixed: FixedMemory) -> Iterator[tuple[MemoryNeeds, Measure, Measure]]:
    """Yield the choices in order: the needs under each setting, with each pair of a slower measure and a faster."""
    pairs = _measure_pairs(_distinct_measures(needs, fixed.measures))
    for changed_needs in _needs_by_setting(needs, fixed):
        for fast, slow in pairs:
            yield changed_needs, slow, fast


def _leanest_choice_fits(needs: MemoryNeeds, budget: MemoryBudget, fixed: FixedMemory) -> bool:
    """Return whether a choice with the measures that keep least fits.

    These measures are the last of those on the device and the last of those on the host, with weights that are gathered
    twice unless `fixed` says otherwise. Any other choice needs more memory, except in a model of few layers, where
    another one may need about 1 % less.
    """
    leanest_measures: list[Measure] = [
        words[-1] for words in _split_by_place(_distinct_measures(needs, fixed.measures)) if words
    ]
    gathers_once = False if fixed.gathered_once is None else fixed.gathered_once
    return any(
        _fit_fewest_layers(changed_needs, slow, fast, budget, fixed) is not None
        for changed_needs in _needs_by_setting(needs, replace(fixed, gathered_once=gathers_once))
        for fast, slow in _measure_pairs(leanest_measures)
    )


def any_choice_fits(needs: MemoryNeeds, budget: MemoryBudget, fixed: FixedMemory) -> bool:
    """Return whether a choice with the measures that keep least fits, with or without segments."""
    sizes = _segment_choices(needs, fixed)
    return any(_leanest_choice_fits(_set_segments(needs, size), budget, fixed) for size in sizes)


def _measure_pairs(words: Sequence[Measure]) -> list[tuple[Measure, Measure]]:
    """Return all pairs (fast, slow), also of a measure with itself, of measures in order, the fastest first."""
    return [(fast, slow) for i, fast in enumerate(words) for slow in words[i:]]


def _split_by_place(words: Sequence[Measure]) -> tuple[list[Measure], list[Measure]]:
    """Split measures by where layers keep what they do not recompute: on the device, or on the host."""
    return [word for word in words if "+" not in word], [word for word in words if "+" in word]


def _distinct_measures(needs: MemoryNeeds, words: Sequence[Measure]) -> list[Measure]:
    """Return the measures without "exchanged" where no load exchanges heads, for then it equals "selective"."""
    exchanges = any(load.exchanged_rows for load in needs.loads)
    return [word for word in words if exchanges or word != "exchanged"]


def _needs_by_setting(needs: MemoryNeeds, fixed: FixedMemory) -> Iterator[MemoryNeeds]:
    """Yield the needs under each combination of settings that are not fixed, the fastest first, the smallest last.

    To gather weights once is a choice only for weights that are gathered again for a backward pass, and to keep the
    optimizer's states on the host only on a GPU with states.
    """
    place = needs.places[0]
    settings = place.settings
    gathers_again = place.shards > 1 and not place.stays_whole and settings.backward
    has_states = settings.gpu and settings.backward and settings.state_numbers > 0
    gather_choices = [True, False] if gathers_again else [False]
    if fixed.gathered_once is not None:
        gather_choices = [fixed.gathered_once]
    offload_choices = [False, True] if has_states else [False]
    if fixed.offload_states is not None:
        offload_choices = [fixed.offload_states]
    for tile_rows in _tile_choices(needs, fixed):
        tiled = replace(settings, mlp_tile_rows=tile_rows)
        for offload_states in offload_choices:
            for gathered_once in gather_choices:
                yield needs.with_settings(replace(tiled, gathered_once=gathered_once, offload_states=offload_states))


def _tile_choices(needs: MemoryNeeds, fixed: FixedMemory) -> list[int]:
    """Return the rows of a tile to try: 0 for whole MLPs, and TILE_ROWS where a slot has more rows than that.

    Without a backward pass MLPs keep nothing, so that tiles would save no memory.
    """
    if fixed.mlp_tile_rows is not None:
        return [fixed.mlp_tile_rows]
    rows = max(load.rows for load in needs.loads)
    place = needs.places[0]
    can_tile = place.settings.backward and not place.read.family.startswith(_UNTILED)
    return [0, TILE_ROWS] if can_tile and rows > TILE_ROWS else [0]


def _fit_fewest_layers(
    needs: MemoryNeeds, slow: Measure, fast: Measure, budget: MemoryBudget, fixed: FixedMemory
) -> MemoryPlan | None:
    """Return the plan that fits with the fewest layers of the slower measure; None where none fits device and host.

    More such layers take less of the device, and of the host too unless only the slower measure keeps tensors there;
    then the fewest that fit the device take least of the host. So halving finds the fewest.
    """
    most_layers = max(len(place.stage.layers) for place in needs.places)
    if slow == fast:
        return _plan_if_fits(needs.under(slow), budget)
    host_rises = "+" in slow and "+" not in fast
    search_budget = replace(budget, host=sys.maxsize) if host_rises else budget
    low, high = 1, most_layers
    while low < high:
        count = (low + high) // 2
        fits = needs.under(needs.measures_of_layers(slow, count, fast)).fits(search_budget)
        low, high = (low, count) if fits else (count + 1, high)
    return _plan_if_fits(needs.under(needs.measures_of_layers(slow, low, fast)), budget)


def _plan_if_fits(memory: MemoryPlan, budget: MemoryBudget) -> MemoryPlan | None:
    """Return the plan if it fits the budget, else None."""
    return memory if memory.fits(budget) else None


def leanest_plans(needs: MemoryNeeds, fixed: FixedMemory) -> Iterator[MemoryPlan]:
    """Yield the plans in which layers keep as little as the fixed keys allow, on the device or on the host.

    The first plan needs least of the device: all that may wait on the host does.
    """
    measures = ("full", "selective") if fixed.measure is None else (fixed.measure,)
    on_host = [True, False] if fixed.offload is None else [fixed.offload]
    # dict.fromkeys: "none" has no host form, and would come twice.
    words = dict.fromkeys(f"{word}+host" if host and word != "none" else word for host in on_host for word in measures)
    leanest_settings = replace(
        fixed, gathered_once=bool(fixed.gathered_once), mlp_tile_rows=max(_tile_choices(needs, fixed))
    )
    segmented = _set_segments(needs, max(_segment_choices(needs, fixed)))
    for changed_needs in reversed(list(_needs_by_setting(segmented, leanest_settings))):  # states on the host first
        for word in words:
            yield changed_needs.under(word)


def _refusal_text(leanest: MemoryPlan, budget: MemoryBudget, home: Layout, fixed: FixedMemory) -> str:
    """Return the message that a run does not fit: what its leanest plan takes, what there is, and what would help."""
    keys = ", ".join(f"{name} = {value!r}" for name, value in vars(fixed).items() if value is not None)
    under = f"with {keys}" if keys else "under any measure"
    device, host = leanest.device.total, leanest.host.total
    return (
        f"the run does not fit {under}: with a slot of {leanest.rows:,} rows a rank needs at least {gib_text(device)} "
        f"({device:,} bytes) of a GPU that may fill {gib_text(budget.device)} ({budget.device:,}), and "
        f"{gib_text(host)} ({host:,}) of its host's {gib_text(budget.host)} ({budget.host:,}); use more than "
        f"{len(home.ranks)} ranks, fewer rows a slot (context.max_tokens_per_slot), or a higher parallel.tp"
    )


def largest_fitting(fits: Callable[[int], bool], limit: int | None = None) -> int:
    """Return the largest number that fits, or 0 for none; if a number fits, all smaller ones do.

    Numbers double until one does not fit or is at least `limit`. Halving then finds the last that fits below that one.

    >>> largest_fitting(lambda count: count <= 37)
    37
    """
    low, high = 0, 1
    while (limit is None or high < limit) and fits(high):
        low, high = high, 2 * high
    while low + 1 < high:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def longest_document(
    config: Any,
    home: Layout,
    settings: MemorySettings,
    budget: MemoryBudget,
    machine: Machine | None = None,
    measures: str = "auto",
    *,
    cp_comm_type: str = "auto",
    fixed: FixedMemory | None = None,
) -> tuple[int, MemoryPlan | None]:
    """Return the tokens of the longest document, laid over all slots, that fits, and its plan of memory.

    >>> tokens, memory = longest_document("Qwen3-8B/config.json", home, MemorySettings(), budget)  # doctest: +SKIP

    `measures` "auto": the longest that fits under any measures, and of its plans that fit the one of least time; any
    other value is that of all layers. Tokens are tried in multiples of 1024 rows a slot (times tp with sequence
    parallelism, which splits rows). Returns 0 and None where nothing fits. Raises PlanError for a model that cannot be
    counted.
    """
    machine, fixed = machine or Machine(), fixed or FixedMemory()
    multiple = home.tp if settings.sequence_parallel else 1

    def row_needs(rows: int) -> MemoryNeeds:
        """Return the needs of one document with `rows` rows on every slot."""
        plan = plan_fixed([rows * home.slots], home, cp=home.slots, cp_comm_type=cp_comm_type)
        return MemoryNeeds.of(config, home, plan, settings, machine=machine)

    def fits(rows: int) -> bool:
        """Return whether such a document fits under these measures, or under any."""
        if measures != "auto":
            return row_needs(rows).under(measures).fits(budget)
        return any_choice_fits(row_needs(rows), budget, fixed)

    step = _ROWS * multiple
    steps = largest_fitting(lambda count: fits(count * step))
    if not steps:
        return 0, None
    rows = steps * step
    needs = row_needs(rows)
    if measures != "auto":
        return rows * home.slots, needs.under(measures)
    prices = MemoryPrices(config, machine, needs.places[0], max(needs.loads))
    return rows * home.slots, _find_fastest_plan(needs, budget, fixed, prices)
