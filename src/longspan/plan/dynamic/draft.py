"""Drafts: where every item goes, as anchors with slots of their own and bins with the others; and groups from a draft.

`divide_bins` decides how the slots of a bin share its fillers: the longest are shared by all slots of the bin,
which makes all end together, and each slot takes others whole, which needs no communication. In lockstep a bin may take
as long as the slowest bin of its micro-batch, so it shares as few documents as that allows; in free mode it shares what
makes it fastest. `make_micro_batches` makes groups: narrow ones before wide ones, equal ones by their first slot;
documents that have the same slots are one group.
"""

import math
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
    anchor: list[int] = field(default_factory=list[int])
    seconds: list[float] = field(default_factory=list[float])  # until it ends
    room: list[int] = field(default_factory=list[int])  # rows of fillers that it can still hold
    fillers: list[list[int]] = field(default_factory=list[list[int]])

    def add_bin(self, micro_batch: int, part: tuple[int, int], anchor: int, seconds: float, rows: int) -> None:
        """Add a bin that is busy for some seconds already and has so many rows left on each slot."""
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
        self.bins = bins
        self.late: list[float] = [
            seconds - durations[m] for seconds, m in zip(bins.seconds, bins.micro_batch, strict=True)
        ]
        by_width: list[list[tuple[float, int]]] = [[] for _ in range(problem.widest_block + 1)]
        for b, (width, late) in enumerate(zip(bins.width, self.late, strict=True)):
            if width in problem.degrees:
                by_width[width].append((late, b))
        self.heaps: list[tuple[int, list[tuple[float, int]], list[tuple[int, int]]]] = []
        for width, heap in enumerate(by_width):
            if heap:
                heapify(heap)
                self.heaps.append((width, heap, []))

    def place_items(self, items: list[int], first: int, tokens: list[int], work: list[float]) -> int:
        """Give items, from position `first` on, to the bins that end earliest with them.

        Returns the position of the first item that fits no bin, or the number of items. Bins of one width share two
        heaps: `idle` holds bins by when they end, `full` those without room for some earlier item, by the room that
        they have. An item takes the bin at the top of `idle` of the width under which it ends earliest.
        """
        room, late, total, fillers = self.bins.room, self.late, self.bins.seconds, self.bins.fillers
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
            total[b] += seconds / chosen_width
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
    """Return the time in lockstep of micro-batches of these durations (0: without documents), with their launches."""
    multiple = problem.request.micro_batch_multiple
    count = -(-sum(duration > 0.0 for duration in durations) // multiple) * multiple
    return math.fsum(durations) + count * problem.request.cost.micro_batch_seconds


TRIED = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # numbers of shared fillers, as well as all


@dataclass(frozen=True, eq=False)
class Division:
    """For every bin of a draft how many of its fillers, longest first, are shared, and where the others are."""

    shared: Ints  # (bins,)
    slot: Ints  # (bins, most fillers) position in the bin of each filler that is not shared; −1 for others
    seconds: Floats  # (bins,) when the bin ends, anchor included, without the launch


class _FilledBins:
    """The bins of a draft that have fillers, as padded arrays; most fillers first, so that a step takes a prefix."""

    def __init__(self, draft: Draft) -> None:
        problem, bins = draft.problem, draft.bins
        counts = np.array([len(fillers) for fillers in bins.fillers], dtype=np.int64)
        self.index = np.argsort(-counts, kind="stable")[: int((counts > 0).sum())]
        self.count = counts[self.index]
        most = int(self.count.max(initial=0))
        order: list[int] = self.index.tolist()
        flat = np.array([item for b in order for item in bins.fillers[b]], dtype=np.int64)
        column = np.arange(len(flat)) - np.repeat(np.cumsum(self.count) - self.count, self.count)
        row = np.repeat(np.arange(len(self.index)), self.count)
        self.tokens, self.squares, counts = np.zeros((3, len(self.index), most), dtype=np.int64)
        self.tokens[row, column], self.squares[row, column] = problem.tokens[flat], problem.squares[flat]
        counts[row, column] = problem.counts[flat]
        self.work = problem.request.cost.work_seconds(self.tokens, self.squares)
        self.width = np.array(bins.width, dtype=np.int64)[self.index]
        node, start = problem.request.node_size, np.array(bins.start, dtype=np.int64)[self.index]
        self.shares_node = start // node == (start + self.width - 1) // node
        self._note_anchors(draft)
        first = np.zeros((len(self.index), 1), dtype=np.int64)
        self.head_tokens = np.concatenate((first, np.cumsum(self.tokens, axis=1)), axis=1)
        self.head_squares = np.concatenate((first, np.cumsum(self.squares, axis=1)), axis=1)
        self.head_counts = np.concatenate((first, np.cumsum(counts, axis=1)), axis=1)
        self.problem = problem

    def _note_anchors(self, draft: Draft) -> None:
        """Note what an anchor adds to its bin: documents of the shared group, or seconds and rows before it.

        It joins the shared group if both have the same slots.
        """
        anchor = np.array(draft.bins.anchor, dtype=np.int64)[self.index]
        parts = np.array([len(a.parts) for a in draft.anchors] or [0], dtype=np.int64)
        item = np.array([a.item for a in draft.anchors] or [0], dtype=np.int64)
        seconds = np.array([a.seconds for a in draft.anchors] or [0.0])
        rows = np.array([a.rows for a in draft.anchors] or [0], dtype=np.int64)
        has_anchor = anchor >= 0
        is_shared = has_anchor & (parts[anchor] == 1)
        apart = has_anchor & ~is_shared
        self.merged = is_shared
        self.anchor_tokens = np.where(is_shared, draft.problem.tokens[item[anchor]], 0)
        self.anchor_squares = np.where(is_shared, draft.problem.squares[item[anchor]], 0)
        self.base_seconds = np.where(apart, seconds[anchor], 0.0)
        self.base_rows = np.where(apart, rows[anchor], 0)

    def even_seconds(self) -> Floats:
        """Return when each bin would end if its work were divided evenly at no cost."""
        tokens, squares = self.head_tokens[:, -1] + self.anchor_tokens, self.head_squares[:, -1] + self.anchor_squares
        return self.base_seconds + self.problem.request.cost.work_seconds(tokens, squares) / self.width

    def try_sharing(self, rows: Ints, shared: int) -> tuple[Floats, Ints]:
        """Price bins whose first `shared` fillers go to all slots, and the others to the least loaded slot each.

        Returns the seconds of each bin, inf where the cap forbids it, and the slot of each filler, −1 if it is shared.
        `rows` are the bins, by falling numbers of fillers.
        """
        problem, p = self.problem, np.minimum(shared, self.count[rows])
        tokens = self.head_tokens[rows, p] + self.anchor_tokens[rows]
        squares = self.head_squares[rows, p] + self.anchor_squares[rows]
        width, documents = self.width[rows], self.head_counts[rows, p] + self.merged[rows]
        inside = self.shares_node[rows]
        group = problem.request.cost.group_seconds(tokens, squares, width, inside, np.maximum(documents, 1))
        start = self.base_seconds[rows] + np.where(tokens > 0, group, 0.0)
        shared_rows = self.base_rows[rows] - (-tokens // width)
        outside = np.arange(int(self.width.max())) >= width[:, None]
        load = np.where(outside, np.inf, start[:, None])
        rows_of_slot = np.repeat(shared_rows[:, None], load.shape[1], axis=1)
        slot = np.full((len(rows), self.tokens.shape[1]), -1, dtype=np.int64)
        for column in range(shared, int(self.count[rows[:1]].max(initial=0))):
            some = int((self.count[rows] > column).sum())
            here, index = rows[:some], np.arange(some)
            least = load[:some].argmin(axis=1)
            load[index, least] += self.work[here, column]
            rows_of_slot[index, least] += self.tokens[here, column]
            slot[:some, column] = least
        seconds = np.where(outside, 0.0, load).max(axis=1)
        over = (rows_of_slot > problem.cap).any(axis=1)
        return np.where(over, np.inf, seconds), slot


def divide_bins(draft: Draft, *, level: bool) -> Division:
    """Decide for every bin which fillers all its slots share; with `level` all bins of a micro-batch end together."""
    bins = draft.bins
    seconds = np.array(bins.seconds)
    empty = np.array([not fillers for fillers in bins.fillers], dtype=np.bool_)
    filled = _FilledBins(draft)
    slot = np.full((len(seconds), filled.tokens.shape[1]), -1, dtype=np.int64)
    division = Division(np.zeros(len(seconds), dtype=np.int64), slot, seconds)
    if not len(filled.index):
        return division
    every = np.arange(len(filled.index))
    all_shared, _ = filled.try_sharing(every, int(filled.count.max()))
    share_counts = [p for p in TRIED if p < int(filled.count.max())] if draft.problem.min_cp == 1 else []
    micro_batch = np.array(bins.micro_batch, dtype=np.int64)
    enough = np.zeros(len(draft.durations))
    if level:
        np.maximum.at(enough, micro_batch[empty], seconds[empty])
        enough = _earliest_ends(filled, all_shared, share_counts, micro_batch, enough)
    goal = enough[micro_batch[filled.index]]
    _choose_sharing(filled, division, goal, all_shared, share_counts)
    return division


def _earliest_ends(
    filled: _FilledBins, all_shared: Floats, share_counts: list[int], micro_batch: Ints, ends: Floats
) -> Floats:
    """Return when each micro-batch can end at the earliest: the end of its slowest bin, divided as suits that best."""
    best, member = all_shared.copy(), micro_batch[filled.index]
    floor = ends.copy()
    np.maximum.at(floor, member, filled.even_seconds())
    for p in share_counts:
        rows = np.flatnonzero((best > floor[member]) & (filled.count > p))
        if len(rows):
            best[rows] = np.minimum(best[rows], filled.try_sharing(rows, p)[0])
    np.maximum.at(ends, member, best)
    return ends


def _choose_sharing(
    filled: _FilledBins, division: Division, goal: Floats, all_shared: Floats, share_counts: list[int]
) -> None:
    """Share as few fillers as let each bin end by its goal; a bin that cannot is divided so that it ends earliest."""
    open_rows = np.ones(len(filled.index), dtype=np.bool_)
    best = np.full(len(filled.index), np.inf)
    choices = [*share_counts, int(filled.count.max())]
    for p in choices:
        rows = np.flatnonzero(open_rows & ((filled.count > p) | (p == choices[-1])))
        if not len(rows):
            continue
        seconds, slot = filled.try_sharing(rows, p) if p < choices[-1] else (all_shared[rows], None)
        better = seconds < best[rows]
        take, b = rows[better], filled.index[rows[better]]
        best[take] = seconds[better]
        division.shared[b] = np.minimum(p, filled.count[take])
        division.slot[b] = -1 if slot is None else slot[better]
        division.seconds[b] = seconds[better]
        open_rows[rows] = best[rows] > goal[rows]


def make_micro_batches(draft: Draft, division: Division) -> list[MicroBatch]:
    """Make the micro-batches of a draft, longest documents of each group first."""
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
    """Make the micro-batch in which these slots have these items."""
    ordered = sorted(groups.items(), key=lambda pair: (len(pair[0]), pair[0]))
    return MicroBatch(tuple(_make_group(problem, slots, items) for slots, items in ordered))


def _make_group(problem: Problem, slots: tuple[int, ...], items: list[int]) -> Group:
    return problem.request.group(slots, [d for item in sorted(items) for d in problem.documents[item]])


def sort_documents(batch: MicroBatch) -> MicroBatch:
    """Sort the documents of each group by falling length, so that their ids do not matter."""
    groups: list[Group] = []
    for group in batch.groups:
        order = sorted(range(len(group.documents)), key=lambda i: (-group.lengths[i], group.documents[i]))
        documents, lengths = (tuple(values[i] for i in order) for values in (group.documents, group.lengths))
        groups.append(replace(group, documents=documents, lengths=lengths))
    return MicroBatch(tuple(groups))
