"""Documents into micro-batches of wanted durations: long ones side by side, the others into the gaps that they leave.

Long documents (*anchors*) take slots of their own, each in the micro-batch and at the degree that waste least. That cuts
every micro-batch into *cells*: runs of slots inside a block that are equally busy. All other documents (*fillers*),
longest first, go to the cell that ends earliest with it, measured against the wanted duration of its micro-batch; the
slots of a cell are taken to share its fillers evenly (`cells.py` decides how).
"""

import math
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from longspan.plan.dynamic.degrees import Degrees
from longspan.plan.dynamic.problem import Floats, Ints, Parts, Problem
from longspan.plan.dynamic.slots import FreeSlots


@dataclass(frozen=True)
class Anchor:
    """A document that has slots for itself, but for fillers in its cells."""

    micro_batch: int
    item: int
    parts: Parts
    rows: int  # a slot
    seconds: float


@dataclass(eq=False)
class Cells:
    """Runs of equally busy slots inside a block, as columns; `anchor` is −1 where no anchor takes them."""

    micro_batch: list[int] = field(default_factory=list)
    start: list[int] = field(default_factory=list)
    width: list[int] = field(default_factory=list)
    anchor: list[int] = field(default_factory=list)
    level: list[float] = field(default_factory=list)  # seconds until it ends
    room: list[int] = field(default_factory=list)  # rows of fillers that it can still hold
    fillers: list[list[int]] = field(default_factory=list)

    def add(self, micro_batch: int, part: tuple[int, int], anchor: int, level: float, rows: int) -> None:
        """A cell with so many rows left on each slot."""
        self.micro_batch.append(micro_batch)
        self.start.append(part[0])
        self.width.append(part[1])
        self.anchor.append(anchor)
        self.level.append(level)
        self.room.append(rows * part[1])
        self.fillers.append([])


@dataclass(frozen=True, eq=False)
class Draft:
    """Where every item goes, before it is decided how the slots of a cell share its fillers."""

    problem: Problem
    durations: Floats  # (micro-batches,) when the last cell ends, without the launch, if fillers are shared evenly
    anchors: list[Anchor]
    cells: Cells

    @property
    def seconds(self) -> float:
        """The step's time in lockstep, launches included."""
        return self.step_seconds(self.durations.tolist())

    def step_seconds(self, ends: list[float]) -> float:
        """The step's time in lockstep if its micro-batches took so long (0: has no documents), with launches."""
        request = self.problem.request
        multiple = request.micro_batch_multiple
        count = -(-sum(end > 0.0 for end in ends) // multiple) * multiple
        return math.fsum(ends) + count * request.cost.micro_batch_seconds


def shelve(problem: Problem, degrees: Degrees, durations: Floats, anchor_share: float) -> Draft:
    """Place all items in micro-batches of about these durations, and in further ones where they do not fit.

    An item becomes an anchor if it has at least `anchor_share` of the work that a block does in a mean micro-batch, or
    does not fit a block at all.
    """
    shelves = _Shelves(problem, degrees, durations)
    least = anchor_share * problem.widest_block * float(durations.max() + durations.min()) / 2.0
    long = (problem.work >= least) | (problem.tokens > problem.widest_cell * problem.cap)
    anchors = np.flatnonzero(long & (degrees.item_class >= 0)).tolist()
    fillers = np.flatnonzero(~long | (degrees.item_class < 0)).tolist()
    shelves.place_anchors(anchors)
    shelves.place_fillers(sorted(shelves.homeless + fillers))
    return shelves.draft()


class _Shelves:
    """Micro-batches while they are being filled."""

    def __init__(self, problem: Problem, degrees: Degrees, durations: Floats) -> None:
        self.problem, self.degrees = problem, degrees
        self.durations: list[float] = durations.tolist()
        self.free = [FreeSlots(problem) for _ in self.durations]
        self.anchors: list[Anchor] = []
        self.homeless: list[int] = []  # anchors for which no slots were left, but which fit a cell
        self.cells = Cells()

    def place_anchors(self, items: list[int]) -> None:
        """Give each item the slots that waste least; longest first."""
        if not items:
            return
        width, waste = self.degrees.choices(np.array(self.durations))
        order = np.argsort(waste, axis=1, kind="stable").tolist()
        possible = np.isfinite(waste).sum(axis=1).tolist()
        widths, classes = width.tolist(), self.degrees.item_class[items]
        inside, across = (self._alone(items, width[classes], near).tolist() for near in (True, False))
        for i, (item, at) in enumerate(zip(items, classes.tolist(), strict=True)):
            for m in order[at][: possible[at]]:
                if self._anchor(item, m, widths[at][m], inside[i][m], across[i][m]):
                    break
            else:
                self._house(item)

    def _alone(self, items: list[int], width: Ints, near: bool) -> Floats:
        """Seconds of items at degrees (items, ...), within or across blocks."""
        tokens = self.problem.tokens[items].reshape(-1, *[1] * (width.ndim - 1))
        inside = near and self.problem.blocks_inside
        return self.problem.request.cost.group_seconds(tokens, tokens * tokens, width, inside)

    def _anchor(self, item: int, m: int, width: int, inside: float, across: float) -> bool:
        free = self.free[m]
        if width > free.total:
            return False
        seconds = inside if free.has_block(width) else across
        if seconds > self.durations[m]:
            return False
        self._take(item, m, width, seconds)
        return True

    def _take(self, item: int, m: int, width: int, seconds: float) -> None:
        parts = self.free[m].take(width)
        rows = -(-int(self.problem.tokens[item]) // width)
        for part in parts:
            self.cells.add(m, part, len(self.anchors), seconds, self.problem.cap - rows)
        self.anchors.append(Anchor(m, item, parts, rows, seconds))

    def _house(self, item: int) -> None:
        """A place for an anchor that no micro-batch has slots for: in a cell, or in a micro-batch of its own."""
        problem = self.problem
        if problem.tokens[item] <= problem.widest_cell * problem.cap:
            self.homeless.append(item)
            return
        width = self.degrees.quickest(item)
        seconds = float(self._alone([item], np.array([width]), width <= problem.widest_block)[0])
        self.durations.append(seconds)
        self.free.append(FreeSlots(problem))
        self._take(item, len(self.durations) - 1, width, seconds)

    def place_fillers(self, items: list[int]) -> None:
        """Give each item to the cell that ends earliest with it, measured against its micro-batch's duration."""
        for m in range(len(self.durations)):
            self._open(m)
        queue = CellQueue(self.cells, self.durations, self.problem)
        work: list[float] = self.problem.work.tolist()
        tokens: list[int] = self.problem.tokens.tolist()
        at = 0
        while (at := queue.place(items, at, tokens, work)) < len(items):
            self.durations.append(self.durations[-1])
            self.free.append(FreeSlots(self.problem))
            self._open(len(self.durations) - 1)
            queue = CellQueue(self.cells, self.durations, self.problem)

    def _open(self, m: int) -> None:
        """Make cells of the slots of a micro-batch that no anchor took."""
        for part in self.free[m].rest():
            self.cells.add(m, part, -1, 0.0, self.problem.cap)

    def draft(self) -> Draft:
        """What has been placed."""
        cells, step = self.cells, self.problem.request.cost.ring_step_seconds
        ends = [0.0] * len(self.durations)
        for m, level, width, fillers in zip(cells.micro_batch, cells.level, cells.width, cells.fillers, strict=True):
            shared = step * (width - 1) if fillers else 0.0
            ends[m] = max(ends[m], level + shared)
        return Draft(self.problem, np.array(ends), self.anchors, cells)


class CellQueue:
    """Cells by how late they end against the duration of their micro-batch, in one heap for each width.

    A cell that is too full for an item waits in another heap, by its room, until the items have become short enough.
    """

    def __init__(self, cells: Cells, durations: list[float], problem: Problem) -> None:
        self.cells = cells
        self.late = [level - durations[m] for level, m in zip(cells.level, cells.micro_batch, strict=True)]
        idle: list[list[tuple[float, int]]] = [[] for _ in range(problem.widest_block + 1)]
        for cell, (width, late) in enumerate(zip(cells.width, self.late, strict=True)):
            if width >= problem.min_cp:
                idle[width].append((late, cell))
        self.queues: list[tuple[int, list[tuple[float, int]], list[tuple[int, int]]]] = []
        for width, heap in enumerate(idle):
            if heap:
                heapify(heap)
                self.queues.append((width, heap, []))

    def place(self, items: list[int], at: int, tokens: list[int], work: list[float]) -> int:
        """Place items from `at` on until one fits no cell; the position of that one, or the number of items."""
        room, late, level, fillers = self.cells.room, self.late, self.cells.level, self.cells.fillers
        queues = self.queues
        for position in range(at, len(items)):
            item = items[position]
            rows, seconds, earliest, taken, chosen = tokens[item], work[item], np.inf, 0, None
            for width, idle, full in queues:
                while full and -full[0][0] >= rows:
                    cell = heappop(full)[1]
                    heappush(idle, (late[cell], cell))
                while idle and room[idle[0][1]] < rows:
                    cell = heappop(idle)[1]
                    heappush(full, (-room[cell], cell))
                if idle and (end := idle[0][0] + seconds / width) < earliest:
                    earliest, taken, chosen = end, width, idle
            if chosen is None:
                return position
            cell = chosen[0][1]
            heapreplace(chosen, (earliest, cell))
            late[cell] = earliest
            level[cell] += seconds / taken
            room[cell] -= rows
            fillers[cell].append(item)
        return len(items)
