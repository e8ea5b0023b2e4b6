"""A handful of documents side by side: bundles of them, each on slots of its own, as many as make them end together.

`lockstep.py` gives gaps to short documents and needs some to be good. Where there are few, every way to bundle the
documents of a micro-batch by work can be tried, and for each the widths that let the slowest bundle end earliest.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from longspan.plan.dynamic.free_slots import FreeSlots
from longspan.plan.dynamic.greedy import greedy_deal
from longspan.plan.dynamic.problem import MORE_MICRO_BATCHES, Floats, Ints, Problem
from longspan.plan.dynamic.to_micro_batches import micro_batch_of
from longspan.plan.micro_batch import MicroBatch
from longspan.plan.planners.bin_packing import spread

MOST_ITEMS = 40
MOST_SLOTS = 64
MOST_BUNDLES = 24  # in a micro-batch
MOST_MOVES = 60  # tried in a micro-batch
PATIENCE = (1.0, 1.05, 1.3, 3.0)  # of greedy micro-batches


@dataclass(frozen=True, eq=False)
class Shelf:
    """One micro-batch: the items of each bundle, its slots, and when the slowest ends, without the launch."""

    groups: dict[tuple[int, ...], list[int]]
    slowest: int  # bundle
    seconds: float


@dataclass(frozen=True, eq=False)
class BundlePlan:
    """Micro-batches of bundles, and when the last ends in lockstep."""

    problem: Problem
    shelves: list[Shelf]
    seconds: float

    def micro_batches(self) -> list[MicroBatch]:
        """The micro-batches with their groups."""
        return [micro_batch_of(self.problem, shelf.groups) for shelf in self.shelves]


def plan_bundles(problem: Problem) -> BundlePlan | None:
    """The best plan of bundles; None where there are too many items or slots to try, or nothing fits."""
    if len(problem.tokens) > MOST_ITEMS or problem.request.slots > MOST_SLOTS:
        return None
    launch, multiple = problem.request.cost.micro_batch_seconds, problem.request.micro_batch_multiple
    best: BundlePlan | None = None
    for shelves in (*_bundled(problem), *_greedy(problem)):
        launches = -(-len(shelves) // multiple) * multiple
        seconds = sum(shelf.seconds for shelf in shelves) + launches * launch
        if best is None or seconds < best.seconds:
            best = BundlePlan(problem, shelves, seconds)
    return best


def _bundled(problem: Problem) -> Iterator[list[Shelf]]:
    """The best bundles of each deal."""
    for count in range(problem.least_micro_batches, problem.least_micro_batches + MORE_MICRO_BATCHES + 1):
        for parts in _deals(problem, count):
            shelves = [shelf for part in parts if (shelf := _best_shelf(problem, part)) is not None]
            if len(shelves) == len(parts):
                yield shelves


def _greedy(problem: Problem) -> Iterator[list[Shelf]]:
    """Greedy micro-batches as they are, or with the widths that suit their bundles best."""
    for deal in (greedy_deal(problem, patience) for patience in PATIENCE):
        shelves: list[Shelf] = []
        for batch in deal:
            bundles, widths = [items for items, _ in batch], np.array([width for _, width in batch], dtype=np.int64)
            both = [_placed(problem, bundles, widths), _shelf(problem, bundles)]
            shelves.append(min((s for s in both if s is not None), key=lambda shelf: shelf.seconds))
        if shelves:
            yield shelves


def _deals(problem: Problem, count: int) -> list[list[list[int]]]:
    """Two ways to deal the items to micro-batches: equal work in each, or the longest together."""
    room = problem.request.slots * problem.cap
    tokens: list[int] = problem.tokens.tolist()
    even = spread(tokens, problem.work.tolist(), count, room)
    middle = np.cumsum(problem.tokens) - problem.tokens // 2
    sorted_parts: list[int] = np.minimum(middle * count // int(problem.tokens.sum()), count - 1).tolist()
    deals = [deal for deal in (even, sorted_parts if count > 1 else None) if deal is not None]
    return [[part for m in range(count) if (part := [i for i, at in enumerate(deal) if at == m])] for deal in deals]


def _best_shelf(problem: Problem, items: list[int]) -> Shelf | None:
    """The number of bundles whose slowest ends earliest."""
    tokens, work = problem.tokens[items].tolist(), problem.work[items].tolist()
    best: Shelf | None = None
    for count in range(1, min(len(items), problem.request.slots // problem.min_cp, MOST_BUNDLES) + 1):
        places = spread(tokens, work, count, problem.max_cp * problem.cap)
        if places is None:
            continue
        bundles = [[item for item, at in zip(items, places, strict=True) if at == b] for b in range(count)]
        shelf = _shelf(problem, bundles)
        if shelf is not None and (best is None or shelf.seconds < best.seconds):
            best = shelf
    return None if best is None else _improved(problem, best)


def _improved(problem: Problem, shelf: Shelf) -> Shelf:
    """The shelf after moving items out of its slowest bundle, one at a time, as long as that helps."""
    left = MOST_MOVES
    while left > 0:
        bundles = list(shelf.groups.values())
        slowest, better = bundles.pop(shelf.slowest), None
        for item in slowest[::-1]:
            for other in range(len(bundles)):
                rest = [i for i in slowest if i != item]
                moved = [bundle + [item] * (b == other) for b, bundle in enumerate(bundles)] + [rest] * bool(rest)
                trial, left = _shelf(problem, moved), left - 1
                if trial is not None and trial.seconds < shelf.seconds:
                    better = trial
                    break
            if better is not None or left <= 0:
                break
        if better is None:
            break
        shelf = better
    return shelf


def _shelf(problem: Problem, bundles: list[list[int]]) -> Shelf | None:
    """Bundles on as many slots each as let the slowest end earliest."""
    tokens, squares = _sums(problem, bundles)
    widths = _widths(problem, tokens, squares)
    return None if widths is None else _placed(problem, bundles, widths)


def _sums(problem: Problem, bundles: list[list[int]]) -> tuple[Ints, Ints]:
    tokens = [int(problem.tokens[bundle].sum()) for bundle in bundles]
    squares = [int(problem.squares[bundle].sum()) for bundle in bundles]
    return np.array(tokens, dtype=np.int64), np.array(squares, dtype=np.int64)


def _placed(problem: Problem, bundles: list[list[int]], widths: Ints) -> Shelf:
    """Bundles on so many slots each, the widest first, inside blocks where they fit."""
    tokens, squares = _sums(problem, bundles)
    cost = problem.request.cost
    free, groups, ends = FreeSlots(problem), dict[tuple[int, ...], list[int]](), list[float]()
    for b in np.argsort(-widths, kind="stable").tolist():
        parts = free.take(int(widths[b]))
        inside = problem.blocks_inside and len(parts) == 1
        slots = tuple(sorted(slot for start, size in parts for slot in range(start, start + size)))
        groups[slots] = bundles[b]
        ends.append(float(cost.group_seconds(tokens[b], squares[b], int(widths[b]), inside)))
    return Shelf(groups, ends.index(max(ends)), max(ends))


def _widths(problem: Problem, tokens: Ints, squares: Ints) -> Ints | None:
    """The fewest slots of each bundle with which all end by the earliest time at which they can; None: no room."""
    seconds = _seconds(problem, tokens, squares)
    times = np.unique(seconds[np.isfinite(seconds)])
    low, high, widths = 0, len(times), None
    degrees = np.array(problem.degrees, dtype=np.int64)
    while low < high:
        middle = (low + high) // 2
        met = seconds <= times[middle]
        need = degrees[met.argmax(axis=1)]
        if met.any(axis=1).all() and int(need.sum()) <= problem.request.slots:
            widths, high = need, middle
        else:
            low = middle + 1
    return widths


def _seconds(problem: Problem, tokens: Ints, squares: Ints) -> Floats:
    """Seconds of each bundle at each degree (bundles, degrees), inf where it does not fit."""
    width = np.array(problem.degrees, dtype=np.int64)
    inside = (width <= problem.widest_block) & problem.blocks_inside
    seconds = problem.request.cost.group_seconds(tokens[:, None], squares[:, None], width, inside)
    return np.where(-(-tokens[:, None] // width) <= problem.cap, seconds, np.inf)
