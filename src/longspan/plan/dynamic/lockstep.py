"""Documents into micro-batches of wanted durations: long ones side by side, the others into the gaps that they leave.

Long documents (*anchors*) take slots of their own, each in the micro-batch and at the degree that waste least. That
cuts every micro-batch into *cells*: runs of slots inside a block that are equally busy. All other documents, the
*fillers*, longest first, go to the cell that ends earliest with it, measured against the wanted duration of its
micro-batch; the slots of a cell are taken to share its fillers evenly (`division.py` decides how).
"""

import numpy as np

from longspan.plan.dynamic.cell_queue import CellQueue
from longspan.plan.dynamic.degrees import Anchoring, Degrees
from longspan.plan.dynamic.draft import Anchor, Cells, Draft
from longspan.plan.dynamic.free_slots import FreeSlots
from longspan.plan.dynamic.problem import Floats, Ints, Problem


def shelve(problem: Problem, degrees: Degrees, durations: Floats, anchoring: Anchoring) -> Draft:
    """Place all items in micro-batches of about these durations, and in further ones where they do not fit.

    An item becomes an anchor if it has work enough, or does not fit a block at all.
    """
    shelves = _Shelves(problem, degrees, durations)
    least = anchoring.share * problem.widest_block * float(durations.max() + durations.min()) / 2.0
    long = (problem.work >= least) | (problem.tokens > problem.widest_cell * problem.cap)
    anchors = np.flatnonzero(long & (degrees.item_class >= 0)).tolist()
    fillers = np.flatnonzero(~long | (degrees.item_class < 0)).tolist()
    shelves.place_anchors(anchors, anchoring.reach)
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

    def place_anchors(self, items: list[int], reach: float) -> None:
        """Give each item the slots that waste least; longest first."""
        if not items:
            return
        width, waste = self.degrees.choices(np.array(self.durations), reach)
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
        for piece in (piece for part in parts for piece in self.problem.divided(part)):
            self.cells.add(m, piece, len(self.anchors), seconds, self.problem.cap - rows)
        self.anchors.append(Anchor(m, item, parts, rows, seconds))

    def _house(self, item: int) -> None:
        """A place for an anchor that no micro-batch has time and slots for: a cell, or a micro-batch made longer."""
        if self.problem.tokens[item] <= self.problem.widest_cell * self.problem.cap:
            self.homeless.append(item)
            return
        least, chosen, width, seconds = np.inf, 0, 0, 0.0
        for m, duration in enumerate([*self.durations, 0.0]):
            free = self.free[m].total if m < len(self.free) else self.problem.request.slots
            loss, degree, end = self.degrees.stretch(item, duration, free)
            if loss < least:
                least, chosen, width, seconds = loss, m, degree, end
        if chosen == len(self.durations):
            self._add_micro_batch(seconds)
        self.durations[chosen] = max(self.durations[chosen], seconds)
        self._take(item, chosen, width, seconds)

    def _add_micro_batch(self, duration: float) -> None:
        self.durations.append(duration)
        self.free.append(FreeSlots(self.problem))

    def place_fillers(self, items: list[int]) -> None:
        """Give each item to the cell that ends earliest with it, measured against its micro-batch's duration."""
        for m in range(len(self.durations)):
            self._open(m)
        queue = CellQueue(self.cells, self.durations, self.problem)
        work: list[float] = self.problem.work.tolist()
        tokens: list[int] = self.problem.tokens.tolist()
        at = 0
        while (at := queue.place(items, at, tokens, work)) < len(items):
            self._add_micro_batch(self.durations[-1])
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
