"""Documents into micro-batches of wanted durations: long ones side by side, the others into the gaps that they leave.

Long documents (*anchors*) take slots of their own, each in the micro-batch and at the degree that waste least. That
cuts every micro-batch into *bins*: runs of slots inside a block that are equally busy. All other documents, the
*fillers*, longest first, go to the bin that ends earliest with it, measured against the wanted duration of its
micro-batch; the slots of a bin are taken to share its fillers evenly (`grouping.py` decides how).
"""

import numpy as np

from longspan.plan.dynamic.degrees import Anchoring, DegreeTable
from longspan.plan.dynamic.draft import Anchor, Bins, Draft, LeastLoaded
from longspan.plan.dynamic.problem import Floats, Ints, Problem
from longspan.plan.dynamic.slots import FreeSlots


def make_draft(problem: Problem, degrees: DegreeTable, durations: Floats, anchoring: Anchoring) -> Draft:
    """Place all items in micro-batches of about these durations, and in further ones where they do not fit.

    An item becomes an anchor if it has work enough, or does not fit a block at all.
    """
    drafting = _Drafting(problem, degrees, durations)
    least = anchoring.share * problem.widest_block * float(durations.max() + durations.min()) / 2.0
    long = (problem.work >= least) | (problem.tokens > problem.widest_run * problem.cap)
    anchors = np.flatnonzero(long & (degrees.item_class >= 0)).tolist()
    fillers = np.flatnonzero(~long | (degrees.item_class < 0)).tolist()
    drafting.place_anchors(anchors, anchoring.reach)
    drafting.place_fillers(sorted(drafting.unplaced + fillers))
    return drafting.draft()


class _Drafting:
    """Micro-batches while they are being filled."""

    def __init__(self, problem: Problem, degrees: DegreeTable, durations: Floats) -> None:
        self.problem, self.degrees = problem, degrees
        self.durations: list[float] = durations.tolist()
        self.free = [FreeSlots(problem.blocks, problem.degrees) for _ in self.durations]
        self.anchors: list[Anchor] = []
        self.unplaced: list[int] = []  # anchors for which no slots were left, but which fit a bin
        self.bins = Bins()

    def place_anchors(self, items: list[int], reach: float) -> None:
        """Give each item the slots that waste least; longest first."""
        if not items:
            return
        width, waste = self.degrees.choices(np.array(self.durations), reach)
        order = np.argsort(waste, axis=1, kind="stable").tolist()
        possible = np.isfinite(waste).sum(axis=1).tolist()
        widths, classes = width.tolist(), self.degrees.item_class[items]
        in_block, across = (self._seconds_alone(items, width[classes], inside).tolist() for inside in (True, False))
        for i, (item, at) in enumerate(zip(items, classes.tolist(), strict=True)):
            for m in order[at][: possible[at]]:
                if self._try_anchor(item, m, widths[at][m], in_block[i][m], across[i][m]):
                    break
            else:
                self._place_late(item)

    def _seconds_alone(self, items: list[int], width: Ints, in_block: bool) -> Floats:
        """Seconds of items at degrees (items, ...), within or across blocks; of the shape of `width`."""
        tokens = self.problem.tokens[items].reshape(-1, *[1] * (width.ndim - 1))
        inside_node = in_block & (width <= self.problem.widest_in_node)
        return self.problem.request.cost.group_seconds(tokens, tokens * tokens, width, inside_node)

    def _try_anchor(self, item: int, micro_batch: int, width: int, in_block: float, across: float) -> bool:
        """Place an anchor if so many slots are free and its seconds, in one block or across, are not too many."""
        free = self.free[micro_batch]
        if width > free.total:
            return False
        seconds = in_block if free.has_block(width) else across
        if seconds > self.durations[micro_batch]:
            return False
        self._take(item, micro_batch, width, seconds)
        return True

    def _take(self, item: int, micro_batch: int, width: int, seconds: float) -> None:
        parts, problem = self.free[micro_batch].take(width), self.problem
        if len(parts) == 1 and width <= problem.widest_in_node and not problem.in_one_node(*parts[0]):
            seconds = float(self._seconds_alone([item], np.array([width]), in_block=False)[0])
        rows = -(-int(self.problem.tokens[item]) // width)
        for piece in (piece for part in parts for piece in self.problem.divided(part)):
            self.bins.add(micro_batch, piece, len(self.anchors), seconds, self.problem.cap - rows)
        self.anchors.append(Anchor(micro_batch, item, parts, rows, seconds))

    def _place_late(self, item: int) -> None:
        """Place an anchor for which no micro-batch has time and slots: in a bin, or in a micro-batch made longer."""
        if self.problem.tokens[item] <= self.problem.widest_run * self.problem.cap:
            self.unplaced.append(item)
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
        self.free.append(FreeSlots(self.problem.blocks, self.problem.degrees))

    def place_fillers(self, items: list[int]) -> None:
        """Give each item to the bin that ends earliest with it, measured against its micro-batch's duration."""
        for m in range(len(self.durations)):
            self._add_bins(m)
        least_loaded = LeastLoaded(self.bins, self.durations, self.problem)
        work: list[float] = self.problem.work.tolist()
        tokens: list[int] = self.problem.tokens.tolist()
        at = 0
        while (at := least_loaded.place(items, at, tokens, work)) < len(items):
            self._add_micro_batch(self.durations[-1])
            self._add_bins(len(self.durations) - 1)
            least_loaded = LeastLoaded(self.bins, self.durations, self.problem)

    def _add_bins(self, micro_batch: int) -> None:
        """Make bins of the slots of a micro-batch that no anchor took."""
        for part in self.free[micro_batch].remaining_runs():
            self.bins.add(micro_batch, part, anchor=-1, seconds=0.0, rows=self.problem.cap)

    def draft(self) -> Draft:
        """What has been placed."""
        bins, step = self.bins, self.problem.request.cost.ring_step_seconds
        ends = [0.0] * len(self.durations)
        for m, seconds, width, fillers in zip(bins.micro_batch, bins.seconds, bins.width, bins.fillers, strict=True):
            shared = step * (width - 1) if fillers else 0.0
            ends[m] = max(ends[m], seconds + shared)
        return Draft(self.problem, np.array(ends), self.anchors, bins)
