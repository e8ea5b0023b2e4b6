"""Which degree suits a long document in a micro-batch of a given duration.

A document on c slots takes them all for a while; what is left of the micro-batch on these slots is filled with shorter
documents as far as the cap on rows lets them in. The degree that wastes the fewest slot seconds is taken.
"""

from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from longspan.plan.dynamic.problem import Floats, Ints, Problem

CLASSES = 192  # different lengths, above which nearly equal ones share their degrees
EXACT_DEGREES = 40  # every degree up to this is considered, then multiples of the node size ever farther apart
LITTLE_MORE = 1.03  # slot seconds of a document at a high degree, against those at its best
GAP_LOST = 0.3  # share of a gap that is taken for lost although short documents could fill it


class Anchoring(NamedTuple):
    """Which documents get slots of their own, and how many.

    `share` is the least work of an anchor, in units of what a block does in a mean micro-batch. `reach` is how much an
    anchor gains by taking slots that short documents could not keep busy by themselves, because the cap is full before:
    0 nothing, 1 all that these slots would lose.
    """

    share: float
    reach: float


@dataclass(frozen=True, eq=False)
class DegreeTable:
    """Seconds and rows of a document in its own group, for classes of lengths and all degrees worth considering."""

    problem: Problem
    item_class: Ints  # (items,) class of each item that may be an anchor; −1 for others
    longest: Ints  # (classes,) rows of the longest document of the class
    degrees: Ints  # (degrees,) worth considering, rising
    seconds: Floats  # (classes, degrees)
    rows: Ints  # (classes, degrees) a slot
    fits: NDArray[np.bool_]  # (classes, degrees) within the cap
    filler_density: float  # seconds a row of documents that fill gaps

    @classmethod
    def of(cls, problem: Problem) -> "DegreeTable":
        """Make the table of a problem, which does not depend on durations.

        Items that may be anchors, single documents of enough work, are classed by length; of each class the longest one
        is priced at every degree: seconds, rows of a slot, and whether these fit the cap. The fillers' density is the
        work a row of one short item: the first of the last quarter, in falling order of length.
        """
        may_anchor = (problem.squares == problem.tokens**2) & (problem.work >= problem.least_anchor_work)
        lengths = np.unique(problem.tokens[may_anchor])
        longest = _longest_by_class(lengths)
        item_class = np.where(may_anchor, np.searchsorted(longest, problem.tokens), -1)
        degrees = _degrees_to_try(problem)
        cost, squares = problem.request.cost, (longest * longest)[:, None]
        seconds = cost.group_seconds(longest[:, None], squares, degrees, degrees <= problem.widest_in_node)
        rows = -(-longest[:, None] // degrees)
        short = len(problem.tokens) * 3 // 4
        density = float(problem.work[short] / problem.tokens[short])
        return cls(problem, item_class, longest, degrees, seconds, rows, rows <= problem.cap, density)

    @cached_property
    def item_seconds(self) -> Floats:
        """Seconds of each item in a group of its own (across blocks or within one, items, degrees); NaN if no anchor.

        Hundreds of drafts of a step look them up: pricing them in each draft took most of a plan's time.
        """
        problem, is_anchor = self.problem, self.item_class >= 0
        tokens = problem.tokens[is_anchor][:, None]
        inside = np.array([False, True])[:, None, None] & (self.degrees <= problem.widest_in_node)
        seconds = np.full((2, len(is_anchor), len(self.degrees)), np.nan)
        seconds[:, is_anchor] = problem.request.cost.group_seconds(tokens, tokens * tokens, self.degrees, inside)
        return seconds

    def choose_degrees(self, durations: Floats, reach: float) -> tuple[Ints, Floats]:
        """Choose the best degree for each class in each micro-batch; returns degrees and the slot seconds they waste.

        Both are (classes, micro-batches); seconds are inf where no degree fits. A document on c slots for a micro-batch
        of T seconds wastes c · (T − fillable) slot seconds less its work. It leaves T − `seconds` free on each slot,
        less half the latency of a group of fillers, which is no wider than a block: some gaps have shared fillers, and
        others none. Fillers take of these seconds what their rows under the cap allow, and `GAP_LOST` of that counts as
        lost. With short documents alone a slot may be full before T seconds are over; the share `reach` of those idle
        seconds is taken off its waste.
        """
        problem, cost = self.problem, self.problem.request.cost
        room = durations[None, :, None] - self.seconds[:, None, :]  # (classes, micro-batches, degrees)
        latency = cost.latency_seconds(np.minimum(self.degrees, problem.widest_block))
        gap = np.maximum(room - 0.5 * latency, 0.0)
        fillable = np.minimum(gap, (self.filler_density * (problem.cap - self.rows))[:, None, :])
        work = cost.work_seconds(self.longest, self.longest**2)[:, None, None]
        waste = self.degrees * (durations[None, :, None] - (1.0 - GAP_LOST) * fillable) - work
        idle_of_short = np.maximum(durations - problem.light_density * problem.cap, 0.0)
        waste = waste - reach * self.degrees * idle_of_short[:, None]
        waste = np.where((room >= 0.0) & self.fits[:, None, :], waste, np.inf)
        best = waste.argmin(axis=2)
        return self.degrees[best], np.take_along_axis(waste, best[:, :, None], axis=2)[:, :, 0]

    def price_stretch(self, item: int, duration: float, free: int) -> tuple[float, int, float]:
        """Price an item that makes a micro-batch with `free` slots longer, at the degree at which that costs least.

        Returns the cost in slot seconds (inf if the item does not fit), the degree, and the item's seconds at that
        degree. The item takes its slots for the whole micro-batch, and all slots wait as long as it makes that longer.
        """
        item_class = int(self.item_class[item])
        seconds = self.seconds[item_class]
        cost = self.degrees * np.maximum(seconds, duration)
        cost = cost + self.problem.request.slots * np.maximum(seconds - duration, 0.0)
        cost = np.where(self.fits[item_class] & (self.degrees <= free), cost, np.inf)
        best = int(cost.argmin())
        return float(cost[best]), int(self.degrees[best]), float(seconds[best])

    def longest_document_seconds(self) -> float:
        """Return the least seconds of the longest document at up to `LITTLE_MORE` times its least slot seconds."""
        seconds = np.where(self.fits[-1], self.seconds[-1], np.inf)
        cost = seconds * self.degrees
        return float(seconds[cost <= LITTLE_MORE * cost.min()].min())


def _longest_by_class(lengths: Ints) -> Ints:
    """Return the longest length of each class of sorted, distinct lengths, so that the table stays small.

    The lengths of a class have equally many bits and the same first seven, so that they differ by less than 1 / 64. Up
    to CLASSES lengths are each a class of their own.
    """
    if not len(lengths):  # no item may be an anchor: a class without items, since the table has at least one
        return np.ones(1, dtype=np.int64)
    if len(lengths) <= CLASSES:
        return lengths
    dropped_bits = np.maximum(np.frexp(lengths)[1] - 7, 0)
    leading = lengths >> dropped_bits
    last = np.append((np.diff(leading) != 0) | (np.diff(dropped_bits) != 0), True)
    return lengths[last]


def _degrees_to_try(problem: Problem) -> Ints:
    """Choose the degrees of the table: all low ones, then each a sixth or a node higher, in whole nodes if possible."""
    degrees, least, most = problem.degrees, problem.min_cp, problem.max_cp
    choices = list(degrees[: bisect_right(degrees, max(EXACT_DEGREES, 2 * least))])
    last, node = choices[-1], problem.request.node_size
    while last < most:
        whole_nodes = (last + max(node, last // 6)) // node * node
        higher = min(most, max(last + 1, whole_nodes))
        last = degrees[bisect_left(degrees, higher)]  # the next degree that a group may have
        choices.append(last)
    return np.array(choices, dtype=np.int64)
