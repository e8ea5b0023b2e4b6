"""A handful of documents side by side: groups of them, each on slots of its own, as many as make them end together.

`lockstep.py` fills gaps with short documents and needs some to be good. With few documents, every way to
group those of a micro-batch by work can be tried, and for each the widths that let the slowest group end earliest.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from longspan.plan.dynamic.lockstep import lockstep_seconds, make_micro_batch
from longspan.plan.dynamic.problem import MORE_MICRO_BATCHES, Floats, FreeSlots, Ints, Problem, list_slots
from longspan.plan.micro_batch import MicroBatch
from longspan.plan.planners.bin_packing import pack_least_loaded

MOST_ITEMS, MOST_SLOTS = 40, 64  # of a step that is planned here: there are too many ways to group more
MOST_GROUPS = 24  # in a micro-batch
MOST_MOVES = 60  # tried in a micro-batch


@dataclass(frozen=True, eq=False)
class Arrangement:
    """Groups of items that work at the same time: the slots of each, and when the slowest ends, without the launch."""

    items: list[list[int]]  # of each group, the widest group first
    slots: list[tuple[int, ...]]
    slowest: int  # group
    seconds: float


def plan_few_items(problem: Problem) -> tuple[float, list[MicroBatch]] | None:
    """Search for the best plan of few items; returns its seconds and micro-batches.

    A few ways of dividing the items into micro-batches are tried, each with the best arrangement of its items side by
    side on the slots. The result is None where there are too many items or slots, or nothing fits.
    """
    if len(problem.tokens) > MOST_ITEMS or problem.request.slots > MOST_SLOTS:
        return None
    best: tuple[float, list[Arrangement]] | None = None
    for batches in _batches_of_items(problem):
        results = (_best_arrangement(problem, items) for items in batches)
        arrangements = [arrangement for arrangement in results if arrangement is not None]
        seconds = lockstep_seconds(problem, [arrangement.seconds for arrangement in arrangements])
        if len(arrangements) == len(batches) and (best is None or seconds < best[0]):
            best = seconds, arrangements
    if best is None:
        return None
    return best[0], [make_micro_batch(problem, dict(zip(a.slots, a.items, strict=True))) for a in best[1]]


def _batches_of_items(problem: Problem) -> Iterator[list[list[int]]]:
    """Items are divided in two ways: into equal work, and, sorted, into parts of equal rows, so that the longest are
    together; an item is in the part that holds its middle row. Micro-batches without items are left out.
    """
    tokens: list[int] = problem.tokens.tolist()
    middle = np.cumsum(problem.tokens) - problem.tokens // 2
    for count in range(problem.least_micro_batches, problem.least_micro_batches + MORE_MICRO_BATCHES + 1):
        even = pack_least_loaded(tokens, problem.work.tolist(), count, problem.request.slots * problem.cap)
        by_length: list[int] = np.minimum(middle * count // sum(tokens), count - 1).tolist()
        for places in (even, by_length if count > 1 else None):  # of one micro-batch both are the same
            if places is not None:
                yield [items for items in _items_by_place(range(len(places)), places, count) if items]


def _items_by_place(items: range | list[int], places: list[int], count: int) -> list[list[int]]:
    return [[item for item, place in zip(items, places, strict=True) if place == p] for p in range(count)]


def _best_arrangement(problem: Problem, items: list[int]) -> Arrangement | None:
    """Arrange items in as many groups as make the slowest end earliest; None if no number of groups holds all items."""
    tokens, work = problem.tokens[items].tolist(), problem.work[items].tolist()
    best: Arrangement | None = None
    for count in range(1, min(len(items), problem.request.slots // problem.min_cp, MOST_GROUPS) + 1):
        places = pack_least_loaded(tokens, work, count, problem.max_cp * problem.cap)
        arrangement = None if places is None else _arrange_groups(problem, _items_by_place(items, places, count))
        if arrangement is not None and (best is None or arrangement.seconds < best.seconds):
            best = arrangement
    return None if best is None else _improve_arrangement(problem, best)


def _improve_arrangement(problem: Problem, arrangement: Arrangement) -> Arrangement:
    """Move items out of the slowest group, one at a time, as long as that helps; at most `MOST_MOVES` are tried."""
    moves_left = MOST_MOVES
    while moves_left > 0:
        for groups in _groups_after_moves(arrangement):
            trial, moves_left = _arrange_groups(problem, groups), moves_left - 1
            if trial is not None and trial.seconds < arrangement.seconds:
                arrangement = trial
                break
            if moves_left <= 0:
                return arrangement
        else:
            return arrangement
    return arrangement


def _groups_after_moves(arrangement: Arrangement) -> Iterator[list[list[int]]]:
    """Yield the groups after one item of the slowest, shortest first, has gone to another; an emptied group goes."""
    groups = list(arrangement.items)
    slowest = groups.pop(arrangement.slowest)
    for item in slowest[::-1]:
        remaining = [other for other in slowest if other != item]
        for receiver in range(len(groups)):
            changed = [group + [item] * (place == receiver) for place, group in enumerate(groups)]
            yield changed + [remaining] * bool(remaining)


def _arrange_groups(problem: Problem, groups: list[list[int]]) -> Arrangement | None:
    """Give each group as many slots as let the slowest end earliest, the widest first, inside blocks if they fit.

    None where the slots do not hold all groups.
    """
    columns = (problem.tokens, problem.squares, problem.counts)
    sizes = np.array([[int(column[items].sum()) for items in groups] for column in columns], dtype=np.int64)
    widths = _group_widths(problem, sizes)
    if widths is None:
        return None
    order: list[int] = np.argsort(-widths, kind="stable").tolist()
    free, slots, inside_node = FreeSlots(problem.blocks, problem.degrees), list[tuple[int, ...]](), list[bool]()
    for width in widths[order].tolist():
        parts = free.take_slots(width)
        slots.append(list_slots(parts))
        inside_node.append(len(parts) == 1 and problem.shares_node(*parts[0]))
    tokens, squares, documents = sizes[:, order]
    seconds = problem.request.cost.group_seconds(tokens, squares, widths[order], inside_node, documents)
    slowest = int(seconds.argmax())
    return Arrangement([groups[g] for g in order], slots, slowest, float(seconds[slowest]))


def _group_widths(problem: Problem, sizes: Ints) -> Ints | None:
    """Find the fewest slots of each group (groups,) with which the slowest ends earliest; None if there is no room.

    `sizes` are the rows, squared rows and documents of groups (3, groups). The slowest group ends at one of the times
    of any group at any degree. These times, sorted, are searched by halving: with more time groups never need more
    slots.
    """
    degrees = np.array(problem.degrees, dtype=np.int64)
    tokens, squares, documents = sizes[:, :, None]
    seconds: Floats = problem.request.cost.group_seconds(
        tokens, squares, degrees, degrees <= problem.widest_in_node, documents
    )
    seconds = np.where(-(-tokens // degrees) <= problem.cap, seconds, np.inf)  # (groups, degrees)
    ends = np.unique(seconds[np.isfinite(seconds)])
    low, high, widths = 0, len(ends), None
    while low < high:
        middle = (low + high) // 2
        in_time = seconds <= ends[middle]
        fewest = degrees[in_time.argmax(axis=1)]
        if in_time.any(axis=1).all() and int(fewest.sum()) <= problem.request.slots:
            widths, high = fewest, middle
        else:
            low = middle + 1
    return widths
