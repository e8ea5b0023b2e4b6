"""What layers keep so that a step fits and takes least time, by the prices of a machine.

The first layers of each stage have one measure and the others a faster one: as few of the first as fit. A choice that
costs more, whatever its number of layers, than one that fits is not counted.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from longspan.errors import PlanError
from longspan.layout import Layout
from longspan.plan.cost.machine import Machine
from longspan.plan.memory.bytes import gib_text
from longspan.plan.memory.memory_plan import MemoryNeeds, MemoryPlan
from longspan.plan.memory.seconds import MemoryPrices
from longspan.plan.memory.settings import FixedMemory, Measure, MemoryBudget, MemorySettings
from longspan.plan.plan import Plan

TILE_ROWS = 16384  # rows of a tile where the plan runs MLPs in tiles: products of so many are as fast as those of all
SEGMENT_LAYERS = 4  # layers of a segment that the plan chooses, where nothing else fits
_UNTILED = ("llama4",)  # families whose experts do not have transformers' common interface


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

    Plans of memory are compared by the seconds that they add to the largest load, on the first pipeline stage; of equal
    ones the first choice wins. Segments, groups of layers that run forward once more in backward, are tried only where
    no plan without them fits. Raises PlanError, with the bytes, where no choice fits.
    """
    machine, fixed = machine or Machine(), fixed or FixedMemory()
    needs = MemoryNeeds.of(config, home, plan, settings, machine=machine)
    prices = MemoryPrices(config, machine, needs.places[0], max(needs.loads))
    # An eighth more: with few layers another choice may need about 1 % less than the leanest.
    roomier = MemoryBudget(device=budget.device * 9 // 8, host=budget.host * 9 // 8)
    for segments in _segment_choices(fixed):
        segmented = replace(fixed, segment_layers=segments)
        if not any_choice_fits(needs, roomier, segmented):  # far fewer to count than all choices
            continue
        choices = list(memory_choices(needs, segmented))
        bounds = sorted((prices.least_seconds(choice, pair), i) for i, (choice, *pair) in enumerate(choices))
        fastest, best = None, (math.inf, len(choices))  # seconds, and the number of the choice
        for bound in bounds:
            if bound > best:
                break
            memory = fit_fewest_layers(*choices[bound[1]], budget)
            if memory is not None and (candidate := (prices.seconds(memory), bound[1])) < best:
                fastest, best = memory, candidate
        if fastest is not None:
            return fastest
    leanest = min(
        leanest_plans(needs, fixed),
        key=lambda memory: max(0, memory.device.total - budget.device) + max(0, memory.host.total - budget.host),
    )
    keys = ", ".join(f"{name} = {value!r}" for name, value in vars(fixed).items() if value is not None)
    device, host = leanest.device.total, leanest.host.total
    raise PlanError(
        f"the run does not fit {f'with {keys}' if keys else 'under any measure'}: with a slot of {leanest.rows:,} rows "
        f"a rank needs at least {gib_text(device)} ({device:,} bytes) of a GPU that may fill "
        f"{gib_text(budget.device)} ({budget.device:,}), and {gib_text(host)} ({host:,}) of its host's "
        f"{gib_text(budget.host)} ({budget.host:,}); use more than {len(home.ranks)} ranks, fewer rows a slot "
        "(context.max_tokens_per_slot), or a higher parallel.tp"
    )


def _segment_choices(fixed: FixedMemory) -> list[int]:
    if fixed.segment_layers is not None:
        return [fixed.segment_layers]
    return [0, SEGMENT_LAYERS] if fixed.measure != "none" else [0]


def memory_choices(needs: MemoryNeeds, fixed: FixedMemory) -> Iterator[tuple[MemoryNeeds, Measure, Measure]]:
    """Yield the choices in order: the needs under each setting, with each pair of a slower measure and a faster.

    Settings that are not fixed come the fastest first, the smallest last, and only where they change anything.
    "exchanged" equals "selective" where no load exchanges heads, and is left out.
    """
    place, settings = needs.places[0], needs.places[0].settings
    can_tile = max(load.rows for load in needs.loads) > TILE_ROWS and not place.read.family.startswith(_UNTILED)
    can_offload = settings.gpu and settings.state_numbers > 0
    gathers_again = place.shards > 1 and not place.stays_whole
    exchanges = any(load.exchanged_rows for load in needs.loads)
    words: list[Measure] = [word for word in fixed.measures if exchanges or word != "exchanged"]
    for segments, tile_rows, offload_states, gathered_once in product(
        _segment_choices(fixed),
        [0, TILE_ROWS][: 1 + can_tile] if fixed.mlp_tile_rows is None else [fixed.mlp_tile_rows],
        [False, True][: 1 + can_offload] if fixed.offload_states is None else [fixed.offload_states],
        [True, False][not gathers_again :] if fixed.gathered_once is None else [fixed.gathered_once],
    ):
        changed = needs.with_settings(
            segment_layers=segments,
            mlp_tile_rows=tile_rows,
            offload_states=offload_states,
            gathered_once=gathered_once,
        )
        for i, fast in enumerate(words):
            for slow in words[i:]:
                yield changed, slow, fast


def _leanest_choices(needs: MemoryNeeds, fixed: FixedMemory) -> list[tuple[MemoryNeeds, Measure, Measure]]:
    # Any other choice needs more memory, but in a model of few layers, where another one may need about 1 % less.
    leanest = {fixed.measures[-1], *[word for word in fixed.measures if "+" not in word][-1:]}  # on the host, or not
    choices = list(memory_choices(needs, replace(fixed, gathered_once=bool(fixed.gathered_once))))
    tile_rows = max(choice.places[0].settings.mlp_tile_rows for choice, _, _ in choices)
    return [
        (choice, slow, fast)
        for choice, slow, fast in choices
        if {slow, fast} <= leanest and choice.places[0].settings.mlp_tile_rows == tile_rows
    ]


def any_choice_fits(needs: MemoryNeeds, budget: MemoryBudget, fixed: FixedMemory) -> bool:
    """Whether a choice whose layers keep least fits."""
    return any(fit_fewest_layers(*choice, budget) is not None for choice in _leanest_choices(needs, fixed))


def leanest_plans(needs: MemoryNeeds, fixed: FixedMemory) -> Iterator[MemoryPlan]:
    """Yield the plans in which layers keep as little as the fixed keys allow, the least of a GPU first."""
    for choice, slow, fast in reversed(_leanest_choices(needs, fixed)):
        if slow == fast:
            yield choice.under(slow)


def fit_fewest_layers(needs: MemoryNeeds, slow: Measure, fast: Measure, budget: MemoryBudget) -> MemoryPlan | None:
    """Return the plan that fits with the fewest layers of the slower measure; None where none fits device and host.

    More such layers take less of the device, and of the host too unless only the slower measure keeps tensors there;
    then the fewest that fit the device take least of the host. So halving finds the fewest.
    """
    low, high = 1, max(len(place.stage.layers) for place in needs.places)
    if slow == fast:
        low = high
    host_rises = "+" in slow and "+" not in fast
    search_budget = replace(budget, host=sys.maxsize) if host_rises else budget
    while low < high:
        count = (low + high) // 2
        fits = needs.under(needs.measures_of_layers(slow, count, fast)).fits(search_budget)
        low, high = (low, count) if fits else (count + 1, high)
    memory = needs.under(needs.measures_of_layers(slow, low, fast))
    return memory if memory.fits(budget) else None


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
