"""Drafts: where every item goes, as anchors with slots of their own and bins with the others; and groups from a draft.

`division.py` decides how the slots of a bin share its fillers. `make_micro_batches` makes groups: narrow ones before
wide ones, equal ones by their first slot; documents that have the same slots are one group.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from longspan.plan.dynamic.problem import Floats, Ints, Parts, Problem, list_slots
from longspan.plan.micro_batch import Group, MicroBatch


@dataclass(frozen=True)
class Anchor:
    """A document that has slots for itself, except for the fillers in the bins on these slots."""

    micro_batch: int
    item: int
    parts: Parts
    rows: int  # a slot
    seconds: float


@dataclass(eq=False)
class Bins:
    """Runs of equally busy slots inside a block, as columns; `anchor` is −1 where no anchor takes them."""

    micro_batch: list[int] = field(default_factory=list[int])
    start: list[int] = field(default_factory=list[int])
    width: list[int] = field(default_factory=list[int])
    anchor: list[int] = field(default_factory=list[int])  # index into the draft's anchors
    seconds: list[float] = field(default_factory=list[float])  # until it ends
    room: list[int] = field(default_factory=list[int])  # rows of fillers that it can still hold
    fillers: list[list[int]] = field(default_factory=list[list[int]])

    def add_bin(self, micro_batch: int, part: tuple[int, int], anchor: int, seconds: float, rows: int) -> None:
        """Add a bin of a `part` (first slot, slots) that is busy for `seconds` already and has `rows` left a slot."""
        self.micro_batch.append(micro_batch)
        self.start.append(part[0])
        self.width.append(part[1])
        self.anchor.append(anchor)
        self.seconds.append(seconds)
        self.room.append(rows * part[1])
        self.fillers.append([])


class LeastLoaded:
    """Gives each item to the bin that ends earliest with it, measured against the duration of its micro-batch.

    Bins of one width are in a heap by how late they end. A bin that is too full for an item waits in another heap, by
    its room, until the items have become short enough.
    """

    def __init__(self, bins: Bins, durations: list[float], problem: Problem) -> None:
        """Put bins whose width is a degree in a heap for each width, by how late they end already.

        `late` is how long after its micro-batch's planned duration a bin ends: below 0 for most.
        """
        self.bins = bins
        self.late: list[float] = [
            seconds - durations[m] for seconds, m in zip(bins.seconds, bins.micro_batch, strict=True)
        ]
        by_width: list[list[tuple[float, int]]] = [[] for _ in range(problem.widest_block + 1)]
        for b, (width, late) in enumerate(zip(bins.width, self.late, strict=True)):
            if width in problem.degrees:
                by_width[width].append((late, b))
        # a width, and its bins: `idle` as (late, bin), `full` as (−room, bin)
        self.heaps: list[tuple[int, list[tuple[float, int]], list[tuple[int, int]]]] = []
        for width, idle in enumerate(by_width):
            if idle:
                heapify(idle)
                self.heaps.append((width, idle, []))

    def place_items(self, items: list[int], first: int, tokens: list[int], work: list[float]) -> int:
        """Give items, from position `first` on, to the bins that end earliest with them.

        Returns the position of the first item that fits no bin, or the number of items. Bins of one width share two
        heaps: `idle` holds bins by when they end; `full` holds bins without room for some earlier item, by their room.
        The tops of the `idle` heaps, one for each width, are compared, and the bin that ends earliest with the item
        takes it. `tokens` and `work` are by item.
        """
        room, late, busy, fillers = self.bins.room, self.late, self.bins.seconds, self.bins.fillers
        heaps = self.heaps
        for position in range(first, len(items)):
            item = items[position]
            rows, seconds, earliest, chosen_width, chosen = tokens[item], work[item], np.inf, 0, None
            for width, idle, full in heaps:
                while full and -full[0][0] >= rows:
                    b = heappop(full)[1]
                    heappush(idle, (late[b], b))
                while idle and room[idle[0][1]] < rows:
                    b = heappop(idle)[1]
                    heappush(full, (-room[b], b))
                if idle and (end := idle[0][0] + seconds / width) < earliest:
                    earliest, chosen_width, chosen = end, width, idle
            if chosen is None:
                return position
            b = chosen[0][1]
            heapreplace(chosen, (earliest, b))
            late[b] = earliest
            busy[b] += seconds / chosen_width
            room[b] -= rows
            fillers[b].append(item)
        return len(items)


@dataclass(frozen=True, eq=False)
class Draft:
    """Where every item goes, before it is decided how the slots of a bin share its fillers."""

    problem: Problem
    durations: Floats  # (micro-batches,) when the last bin ends, without the launch, if fillers are shared evenly
    anchors: list[Anchor]
    bins: Bins

    @property
    def seconds(self) -> float:
        """The step's time in lockstep, launches included."""
        return lockstep_seconds(self.problem, self.durations.tolist())


def lockstep_seconds(problem: Problem, durations: list[float]) -> float:
    """Return the seconds in lockstep of micro-batches of these durations, with all launches.

    Micro-batches of duration 0 have no documents and are left out. Dummy micro-batches fill the number up to the
    request's multiple.
    """
    busy = [duration for duration in durations if duration > 0.0]
    return problem.request.cost.lockstep_seconds(busy + [0.0] * (-len(busy) % problem.request.micro_batch_multiple))


@dataclass(frozen=True, eq=False)
class Division:
    """For every bin of a draft how many of its fillers, longest first, are shared, and where the others are."""

    shared: Ints  # (bins,)
    slot: Ints  # (bins, most fillers) position in the bin of each filler that is not shared; −1 for others
    seconds: Floats  # (bins,) when the bin ends, anchor included, without the launch


def make_micro_batches(draft: Draft, division: Division) -> list[MicroBatch]:
    """Make the micro-batches of a draft, longest documents of each group first.

    An anchor has its own slots, a shared filler all slots of its bin, and any other filler the slot that the division
    names.
    """
    batches: list[dict[tuple[int, ...], list[int]]] = [{} for _ in draft.durations]
    for anchor in draft.anchors:
        batches[anchor.micro_batch].setdefault(list_slots(anchor.parts), []).append(anchor.item)
    shared, places, bins = division.shared.tolist(), division.slot.tolist(), draft.bins
    for b, fillers in enumerate(bins.fillers):
        groups, start = batches[bins.micro_batch[b]], bins.start[b]
        all_slots = tuple(range(start, start + bins.width[b]))
        for position, item in enumerate(fillers):
            slots = all_slots if position < shared[b] else (start + places[b][position],)
            groups.setdefault(slots, []).append(item)
    return [make_micro_batch(draft.problem, groups) for groups in batches if groups]


def make_micro_batch(problem: Problem, groups: Mapping[tuple[int, ...], list[int]]) -> MicroBatch:
    """Make the micro-batch in which these slots have these items; every slot takes its narrow groups first."""
    ordered = sorted(groups.items(), key=lambda pair: (len(pair[0]), pair[0]))
    return MicroBatch(tuple(_make_group(problem, slots, items) for slots, items in ordered))


def _make_group(problem: Problem, slots: tuple[int, ...], items: list[int]) -> Group:
    """Make the group of these slots with the documents of these items; items are numbered longest first."""
    return problem.request.group(slots, [d for item in sorted(items) for d in problem.documents[item]])


def sort_documents(batch: MicroBatch) -> MicroBatch:
    """Sort the documents of each group by falling length, equal lengths by id: the order in plans made from drafts."""
    groups: list[Group] = []
    for group in batch.groups:
        order = sorted(range(len(group.documents)), key=lambda i: (-group.lengths[i], group.documents[i]))
        documents, lengths = (tuple(values[i] for i in order) for values in (group.documents, group.lengths))
        groups.append(replace(group, documents=documents, lengths=lengths))
    return MicroBatch(tuple(groups))
