"""Plans in lockstep: choose how long micro-batches should take, place documents in them, and change that at random.

Top down: `search_candidate` tries durations, and `place_items` fills micro-batches of these durations: long documents
first, each on slots of its own at the degree that wastes least (`DegreeTable`), then short ones in the *bins* that are
left: runs of equally busy slots in a block. `divide_bins` decides how the slots of a bin share its short documents, and
`make_micro_batches` makes the groups. Constants without a reason beside them were chosen by the step over its bound in
the cases of bench/plans/planner.py. Others around them change it by less than 0.2 % (`--sweep NAME` shows it, and
bench/records/planner-sweep.md), but no LITTLE_MORE costs 3 %.
"""

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from heapq import heapify, heappop, heappush, heapreplace
from itertools import accumulate, product
from random import Random
from typing import NamedTuple

import numpy as np

from longspan.layout import Flags, Floats, Integers
from longspan.plan.dynamic.problem import MORE_MICRO_BATCHES, FreeSlots, Parts, Problem, slots_in_parts
from longspan.plan.micro_batch import Group, MicroBatch

# What is tried first. Durations between all equal (steepness 0) and those of the sorted documents (1), a little longer
# than the work needs; with few documents more slack, as each micro-batch waits for one of them.
STEEPNESS = (0.0, 0.4, 0.7, 1.0)
SLACK = (1.005, 1.03)
SLACK_OF_FEW = (*SLACK, 1.07, 1.15, 1.3, 1.6)
# What was placed is known by its durations, which items are long, and the reach.
Known = set[tuple[bytes, bytes, float]]
LIMITS = ((0.15, 0.8), (0.5, 0.4))  # share and reach: see `Settings`
LIMITS_OF_FEW = ((0.0, 0.0), (0.15, 0.4))
# What random changes choose from.
SHARES = (0.0, 0.05, 0.1, 0.15, 0.25, 0.5, 0.8)
REACHES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
# What random changes multiply durations by: the least factor, and how far it goes above that.
AS_THEY_CAME = (0.985, 0.02)  # durations as bins ended: mostly a little less, so that the next search packs tighter
ONE_DURATION = (0.9, 0.2)
# This share of a duration goes to another micro-batch.
MOVED_SHARE = (-0.05, 0.1)
ALL_DURATIONS = (0.98, 0.04)  # where other documents become long ones
JUST_FITS = 1.0005  # times a document's seconds: its micro-batch must hold it although sums are rounded
# The duration is a share of the mean work of a slot.
LEAST_DURATION = 1e-6
SHOWN_LATENCY = 0.5  # share of a short group's latency in a gap: some gaps have groups, and others single slots
# From this share of the items on, longest first, documents are as dense as those that fill gaps.
SHORT_FROM = (3, 4)

LARGE = 2500  # items and bins, from which on fewer settings are tried first
CLASSES = 192  # different lengths, above which nearly equal ones share their degrees
LITTLE_MORE = 1.03  # slot seconds of a document at a high degree, against those at its best
GAP_LOST = 0.3  # share of a gap that is taken for lost although short documents could fill it
# short documents that a bin's slots may share
SHARE_COUNTS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)


class Settings(NamedTuple):
    """What a candidate is made by.

    `durations` of micro-batches are in units of the mean work of a slot. A document is long from `share` of the work of
    the widest block in a middle micro-batch on. `reach` is how much a long document gains by taking slots that short
    ones could not keep busy by themselves as the cap is full before: 0 nothing, 1 all that these slots would lose.
    """

    durations: Floats
    share: float
    reach: float


@dataclass(frozen=True)
class LongDocument:
    """A document with slots of its own, which it shares only with the short documents of the bins on them."""

    micro_batch: int
    item: int
    parts: Parts
    rows: int  # a slot
    seconds: float


class Bins:
    """Runs of equally busy slots inside a block, as columns."""

    def __init__(self) -> None:
        self.micro_batch: list[int] = []
        self.start: list[int] = []
        self.width: list[int] = []
        self.long: list[int] = []  # index of the long document on these slots, or −1
        # A bin ends after so many seconds.
        self.seconds: list[float] = []
        self.room: list[int] = []  # tokens that it can still hold
        self.short: list[list[int]] = []  # items, longest first

    def add_bin(self, micro_batch: int, part: tuple[int, int], long: int, seconds: float, rows: int) -> None:
        """Add a bin of a `part` (first slot, slots) that is busy for `seconds` already and has `rows` left a slot."""
        self.micro_batch.append(micro_batch)
        self.start.append(part[0])
        self.width.append(part[1])
        self.long.append(long)
        self.seconds.append(seconds)
        self.room.append(rows * part[1])
        self.short.append([])


@dataclass(frozen=True, eq=False)
class Candidate:
    """Where every item goes, before it is decided how the slots of a bin share its short documents."""

    problem: Problem
    durations: Floats  # (micro-batches,) when the last bin ends, without the launch, if bins are shared evenly
    long: list[LongDocument]
    bins: Bins

    @property
    def seconds(self) -> float:
        """Seconds of the step, without the update, by the ends of its bins."""
        return lockstep_seconds(self.problem, self.durations.tolist())


def lockstep_seconds(problem: Problem, durations: list[float]) -> float:
    """Return the seconds of a step, without the update, whose micro-batches last so long. Those of duration 0 have no
    documents and are left out; dummy ones fill the number up to the request's multiple.
    """
    busy = [duration for duration in durations if duration > 0.0]
    return problem.request.cost.lockstep_seconds(busy + [0.0] * (-len(busy) % problem.request.micro_batch_multiple))


_Trial = tuple[Candidate, Settings, tuple[int, float, float]]  # the last: count, steepness and slack


def plan_lockstep(problem: Problem, steps: int) -> list[MicroBatch]:
    """Plan a step in lockstep: the best candidate of a search of so many `steps`, whose bins share as few documents as
    their micro-batch leaves time for.
    """
    candidate = search_candidate(problem, steps)
    return make_micro_batches(candidate, divide_bins(candidate, level=True)[1])


def search_candidate(problem: Problem, steps: int) -> Candidate:
    """Try first settings, then change the best ones `steps` times; steps are counted so that all hosts agree."""
    table = DegreeTable(problem)
    random = Random(0)
    known = Known()
    best, settings = _best_first_candidate(problem, table, known)
    for _ in range(steps):
        changed = _change_settings(best, settings, random)
        candidate = place_items(problem, table, changed, known)
        if candidate is not None and candidate.seconds < best.seconds:
            best = candidate
            settings = changed
    return best


def _best_first_candidate(problem: Problem, table: "DegreeTable", known: Known) -> tuple[Candidate, Settings]:
    """The numbers of micro-batches are the fewest, some more, and multiples that are launched anyway. A large
    problem is tried with two steepnesses of every number and slack, then with the others of the best number and
    slack, then with other limits."""
    multiple = problem.request.micro_batch_multiple
    few = problem.has_few_items
    counts = [problem.least_micro_batches + more for more in range(MORE_MICRO_BATCHES + 1)]
    counts = sorted({*counts, *(-(-count // multiple) * multiple for count in counts)})
    slacks, limits = (SLACK_OF_FEW, LIMITS_OF_FEW) if few else (SLACK, LIMITS)

    def fastest_trial(
        counts: Sequence[int],
        steepnesses: Sequence[float],
        slacks: Sequence[float],
        limits: Sequence[tuple[float, float]],
        *earlier: _Trial,
    ) -> _Trial:
        """Place all items under each combination, and return the fastest trial, `earlier` ones included; of equal ones
        the first.
        """
        trials = list(earlier)
        for count, steepness in product(counts, steepnesses):
            durations = _first_durations(problem, table, count, steepness)
            for slack, limit in product(slacks, limits):
                settings = Settings(slack * durations, *limit)
                if (candidate := place_items(problem, table, settings, known)) is not None:
                    trials.append((candidate, settings, (count, steepness, slack)))
        return min(trials, key=lambda trial: trial[0].seconds)

    if len(problem.tokens) + problem.least_micro_batches * len(problem.blocks) < LARGE:
        return fastest_trial(counts, STEEPNESS, slacks, limits)[:2]
    best = fastest_trial(counts, STEEPNESS[1::2], slacks, limits[-1:])
    count, _, slack = best[2]
    best = fastest_trial([count], STEEPNESS[::2], [slack], limits[-1:], best)
    count, steepness, slack = best[2]
    return fastest_trial([count], [steepness], [slack], limits[:-1], best)[:2]


def _first_durations(problem: Problem, table: "DegreeTable", count: int, steepness: float) -> Floats:
    """Durations are in units of the mean work of a slot; the first holds the longest document. The steep ones are
    the work of parts of equal tokens, longest documents first; a document counts in the part that holds its
    middle token."""
    middle = np.cumsum(problem.tokens) - problem.tokens // 2
    part = np.minimum(middle * count // int(problem.tokens.sum()), count - 1)
    steep = np.bincount(part, weights=problem.work, minlength=count) / (
        problem.mean_slot_seconds * problem.request.slots
    )
    durations = (1.0 - steepness) / count + steepness * steep
    # The longest document at up to LITTLE_MORE times its least slot seconds.
    seconds = np.where(table.fits[-1], table.seconds[-1], np.inf)
    slot_seconds = seconds * table.degrees
    longest = float(seconds[slot_seconds <= LITTLE_MORE * slot_seconds.min()].min())
    durations[0] = max(durations[0], longest / problem.mean_slot_seconds)
    return durations


def _change_settings(best: Candidate, settings: Settings, random: Random) -> Settings:
    """One of five kinds of change: durations as they came out, times 0.985 to 1.005; one up to a tenth longer or
    shorter; up to a twentieth of one moved to another; one as long as one of its long documents takes at another
    degree; other documents as long ones. On links of 25 GB/s some steps are 4 % slower with three kinds."""

    def draw(bounds: tuple[float, float]) -> float:
        return bounds[0] + bounds[1] * random.random()

    durations, share, reach = settings
    durations = durations.copy()
    mean = best.problem.mean_slot_seconds
    change = int(5 * random.random())
    micro_batch = int(len(durations) * random.random())
    if change == 0:
        # All durations are as they came out.
        durations = best.durations / mean * draw(AS_THEY_CAME)
    elif change == 1:
        # One duration becomes longer or shorter.
        durations[micro_batch] *= draw(ONE_DURATION)
    elif change == 2:  # a part of one to another
        moved = draw(MOVED_SHARE) * durations[micro_batch]
        durations[micro_batch] -= moved
        durations[int(len(durations) * random.random())] += moved
    elif change == 3:
        # One duration is as long as one of its long documents takes at another degree.
        long = [document for document in best.long if document.micro_batch == micro_batch]
        if long:
            # The degree differs by at most a quarter and 2.
            problem = best.problem
            document = long[int(len(long) * random.random())]
            degree = sum(count for _, count in document.parts)
            degree += int((5 + degree // 2) * random.random()) - 2 - degree // 4
            degree = problem.widest_degree(max(degree, problem.min_cp))
            tokens = int(problem.tokens[document.item])
            squares = int(problem.squares[document.item])
            inside = degree <= problem.widest_in_node
            seconds = float(problem.request.cost.group_seconds(tokens, squares, degree, inside))
            durations[micro_batch] = JUST_FITS * seconds / mean
    else:
        # Other documents become long ones.
        share, reach = (values[int(len(values) * random.random())] for values in (SHARES, REACHES))
        durations *= draw(ALL_DURATIONS)
    return Settings(np.maximum(durations, LEAST_DURATION), share, reach)


class DegreeTable:
    """Seconds and rows of a document in a group of its own, for classes of lengths and all degrees worth considering.

    Only single documents and prefix trees of enough work have a class: others are never long. A class has the longest
    of its lengths, and the most squares.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        too_long_for_bins = problem.trees & (problem.tokens > problem.widest_run * problem.cap)
        may_be_long = (problem.work >= problem.least_long_work) | too_long_for_bins
        may_be_long &= problem.trees | (problem.squares == problem.tokens**2)
        cost = problem.request.cost
        longest = _longest_by_class(np.unique(problem.tokens[may_be_long]))  # (classes,) tokens
        # (items,) −1: never long
        self.item_class: Integers = np.where(may_be_long, np.searchsorted(longest, problem.tokens), -1)
        squares = np.ones_like(longest)
        np.maximum.at(squares, self.item_class[may_be_long], problem.squares[may_be_long])
        self.degrees: Integers = problem.degrees_to_try()  # (degrees,) rising
        tokens_of_class = longest[:, None]
        inside = self.degrees <= problem.widest_in_node
        # Both are (classes, degrees); rows are those of a slot.
        self.seconds: Floats = cost.group_seconds(tokens_of_class, squares[:, None], self.degrees, inside)
        self.rows: Integers = -(-tokens_of_class // self.degrees)
        self.fits: Flags = self.rows <= problem.cap  # (classes, degrees)
        short_item = len(problem.tokens) * SHORT_FROM[0] // SHORT_FROM[1]
        # seconds a token of the items that fill gaps
        self.short_density: float = float(problem.work[short_item] / problem.tokens[short_item])
        light = 2 * np.cumsum(problem.tokens) > int(problem.tokens.sum())
        tokens, square_sum = (int(values[light].sum()) for values in (problem.tokens, problem.squares))
        # A slot full of the shortest items, which together hold half of all tokens, takes so long.
        self.full_seconds: float = float(cost.work_seconds(tokens, square_sum)) / tokens * problem.cap
        self.work: Floats = cost.work_seconds(longest, squares)  # (classes,)
        # Groups of 1, 2, … slots of the widest block wait so long, however few rows they have.
        self.latency: Floats = cost.latency_seconds(np.arange(1, problem.widest_block + 1))

    @cached_property
    def item_seconds(self) -> Floats:
        """Seconds of each item in a group of its own: (2, items, degrees), first across nodes, then inside one where a
        node holds the degree; NaN for an item that is never long, which nobody looks up. Priced once, as hundreds of
        candidates of a step look them up.
        """
        problem = self.problem
        may_be_long = self.item_class >= 0
        tokens = problem.tokens[may_be_long][:, None]
        squares = problem.squares[may_be_long][:, None]
        inside = np.array([False, True])[:, None, None] & (self.degrees <= problem.widest_in_node)
        seconds = np.full((2, len(may_be_long), len(self.degrees)), np.nan)
        seconds[:, may_be_long] = problem.request.cost.group_seconds(tokens, squares, self.degrees, inside)
        return seconds

    def choose_degrees(self, durations: Floats, reach: float) -> tuple[Integers, Floats]:
        """Choose the best degree for each class in each micro-batch; returns degrees and the slot seconds they waste.

        Both are (classes, micro-batches); seconds are inf where no degree fits. A document on c slots, in a micro-batch
        of T seconds, wastes c · (T − fillable) slot seconds less its work. Short documents can fill T − `seconds` of
        each slot, less half the latency of their group, which is no wider than a block: some gaps have shared ones, and
        others none. They fill no more than their rows under the cap allow, and `GAP_LOST` of what they fill counts as
        lost. Without the long document the slots would idle once the cap is full: `reach` of that is taken off its
        waste.
        """
        problem = self.problem
        room = durations[None, :, None] - self.seconds[:, None, :]  # (classes, micro-batches, degrees)
        latency = self.latency[np.minimum(self.degrees, problem.widest_block) - 1]
        gap = np.maximum(room - SHOWN_LATENCY * latency, 0.0)
        fillable = np.minimum(gap, (self.short_density * (problem.cap - self.rows))[:, None, :])
        waste = self.degrees * (durations[None, :, None] - (1.0 - GAP_LOST) * fillable) - self.work[:, None, None]
        idle_of_short = np.maximum(durations - self.full_seconds, 0.0)
        waste = waste - reach * self.degrees * idle_of_short[:, None]
        waste = np.where((room >= 0.0) & self.fits[:, None, :], waste, np.inf)
        best = waste.argmin(axis=2)
        return self.degrees[best], np.take_along_axis(waste, best[:, :, None], axis=2)[:, :, 0]

    def price_longer_micro_batch(self, item: int, duration: float, free: int) -> tuple[float, int, float]:
        """Price an item that makes a micro-batch with `free` slots longer, at the degree at which that costs least: the
        cost in slot seconds (inf if the item does not fit), the degree, and the item's seconds. The item takes its
        slots for the whole micro-batch, and all slots wait as long as it makes that longer.
        """
        item_class = int(self.item_class[item])
        seconds = self.seconds[item_class]
        taken = self.degrees * np.maximum(seconds, duration)
        # All slots wait for what exceeds the duration.
        taken = taken + self.problem.request.slots * np.maximum(seconds - duration, 0.0)
        slot_seconds = np.where(self.fits[item_class] & (self.degrees <= free), taken, np.inf)
        best = int(slot_seconds.argmin())
        return float(slot_seconds[best]), int(self.degrees[best]), float(seconds[best])


def _longest_by_class(lengths: Integers) -> Integers:
    """`lengths` are sorted and distinct. Those of one class have as many bits and the same first seven, so that they
    differ by less than 1 / 64. Up to CLASSES lengths are a class each."""
    if not len(lengths):  # no document may be long: a class that no item is in, since the table has at least one
        return np.ones(1, dtype=np.int64)
    if len(lengths) <= CLASSES:
        return lengths
    dropped_bits = np.maximum(np.frexp(lengths)[1] - 7, 0)
    leading = lengths >> dropped_bits
    return lengths[np.append((np.diff(leading) != 0) | (np.diff(dropped_bits) != 0), True)]


def place_items(problem: Problem, table: DegreeTable, settings: Settings, known: Known) -> Candidate | None:
    """Place all items in micro-batches of about these durations, and in further ones where they do not fit. None if
    they were placed so before, which would be no faster: settings often differ in a share that makes the same items
    long. `known` has what was placed; this placing is added to it.
    """
    durations = settings.durations * problem.mean_slot_seconds
    least = settings.share * problem.widest_block * float(durations.max() + durations.min()) / 2.0
    long = (problem.work >= least) | (problem.tokens > problem.widest_run * problem.cap)
    long &= table.item_class >= 0
    key = durations.tobytes(), long.tobytes(), settings.reach if long.any() else 0.0
    if key in known:
        return None
    known.add(key)
    placing = _Placing(problem, table, durations)
    placing.place_long(np.flatnonzero(long).tolist(), settings.reach)
    placing.place_short(sorted(placing.unplaced + np.flatnonzero(~long).tolist()))
    return placing.candidate()


class _Placing:
    """Micro-batches while their items are placed: first `place_long`, then `place_short`, then `candidate`. Durations
    are the seconds that each micro-batch should take, or as much more as an item needs; micro-batches are added where
    items do not fit.
    """

    def __init__(self, problem: Problem, table: DegreeTable, durations: Floats) -> None:
        self.problem = problem
        self.table = table
        self.durations: list[float] = durations.tolist()
        self.free: list[FreeSlots] = [FreeSlots(problem.blocks, problem.degrees) for _ in self.durations]
        self.long: list[LongDocument] = []
        self.unplaced: list[int] = []  # long documents for which no slots were left, but which fit a bin
        self.bins = Bins()

    def place_long(self, items: list[int], reach: float) -> None:
        """Give each item, longest first, slots in the micro-batch in which it wastes least, of those that have the time
        and the free slots; an item for which none has them goes to `_defer_or_lengthen`.
        """
        if not items:
            return
        width, waste = self.table.choose_degrees(np.array(self.durations), reach)  # (classes, micro-batches)
        order = np.argsort(waste, axis=1, kind="stable").tolist()
        possible = np.isfinite(waste).sum(axis=1).tolist()
        widths = width.tolist()
        classes = self.table.item_class[items]
        # Each item has its seconds in each micro-batch, at the class's degree there, across nodes and inside one.
        across, inside = (self._seconds_at_widths(items, width[classes], index).tolist() for index in (0, 1))
        for row, (item, item_class) in enumerate(zip(items, classes.tolist(), strict=True)):
            best_first: list[int] = order[item_class][: possible[item_class]]
            for m in best_first:
                free = self.free[m]
                degree = widths[item_class][m]
                if degree > free.total:
                    continue
                # a block has free slots for the whole group, or else the group takes those of several
                seconds = inside if free.smallest_fit(degree) else across
                if seconds[row][m] <= self.durations[m]:
                    self._place_item_in_slots(item, m, degree, (across[row][m], inside[row][m]))
                    break
            else:
                self._defer_or_lengthen(item)

    def _seconds_at_widths(self, items: list[int], width: Integers, inside: int) -> Floats:
        """One row of `width` (items, …) per item, in a group of its own: across nodes (`inside` 0) or inside one
        (1)."""
        rows = np.array(items).reshape(-1, *[1] * (width.ndim - 1))
        return self.table.item_seconds[inside, rows, np.searchsorted(self.table.degrees, width)]

    def _place_item_in_slots(self, item: int, micro_batch: int, width: int, prices: tuple[float, float]) -> None:
        """`prices` are the item's seconds across nodes and within one; a last block that has taken in a smaller last
        node has slots of both, which are across nodes."""
        parts = self.free[micro_batch].take_slots(width)
        problem = self.problem
        seconds = prices[len(parts) == 1 and problem.shares_node(*parts[0])]
        rows = -(-int(problem.tokens[item]) // width)
        for part in parts:
            for run in problem.split_into_runs(part):
                self.bins.add_bin(micro_batch, run, len(self.long), seconds, problem.cap - rows)
        self.long.append(LongDocument(micro_batch, item, parts, rows, seconds))

    def _defer_or_lengthen(self, item: int) -> None:
        """No micro-batch has time and slots for the item. One that fits a bin is left to `place_short`; any other
        makes a micro-batch longer, or a new one, whichever wastes least."""
        if self.problem.tokens[item] <= self.problem.widest_run * self.problem.cap:
            self.unplaced.append(item)
            return
        free = [*(slots.total for slots in self.free), self.problem.request.slots]  # the last is a new micro-batch
        choices = zip([*self.durations, 0.0], free, strict=True)
        stretches = [self.table.price_longer_micro_batch(item, duration, slots) for duration, slots in choices]
        micro_batch = min(range(len(stretches)), key=lambda m: stretches[m][0])
        _, width, seconds = stretches[micro_batch]
        if micro_batch == len(self.durations):
            self._add_micro_batch(seconds)
        self.durations[micro_batch] = max(self.durations[micro_batch], seconds)
        across = float(self._seconds_at_widths([item], np.array([width]), 0)[0])
        self._place_item_in_slots(item, micro_batch, width, (across, seconds))

    def _add_micro_batch(self, duration: float) -> None:
        self.durations.append(duration)
        self.free.append(FreeSlots(self.problem.blocks, self.problem.degrees))

    def place_short(self, items: list[int]) -> None:
        """Give each item to the bin that ends earliest with it; one that fits none starts another micro-batch."""
        work = self.problem.work.tolist()
        tokens = self.problem.tokens.tolist()
        position = 0  # items placed
        ready = 0  # micro-batches whose free slots are bins
        while True:
            for m in range(ready, len(self.durations)):
                for part in self.free[m].usable_runs_left():
                    self.bins.add_bin(m, part, long=-1, seconds=0.0, rows=self.problem.cap)
            ready = len(self.durations)
            position = LeastLoaded(self.bins, self.durations, self.problem).fill_bins(items, position, tokens, work)
            if position == len(items):
                return
            self._add_micro_batch(self.durations[-1])

    def candidate(self) -> Candidate:
        """Return what was placed, with the end of the last bin as each micro-batch's duration. To a bin's seconds is
        added what its slots wait for messages of the documents that they share.
        """
        bins = self.bins
        latency = self.table.latency.tolist()
        ends = [0.0] * len(self.durations)
        for m, seconds, width, short in zip(bins.micro_batch, bins.seconds, bins.width, bins.short, strict=True):
            ends[m] = max(ends[m], seconds + (latency[width - 1] if short else 0.0))
        return Candidate(self.problem, np.array(ends), self.long, bins)


class LeastLoaded:
    """Gives each item to the bin that ends earliest with it, measured against the duration of its micro-batch.

    Bins of one width are in a heap by how late they end. A bin that is too full for an item waits in another heap, by
    its room, until the items, longest first, have become short enough: so the first of each heap holds the next item.
    """

    def __init__(self, bins: Bins, durations: list[float], problem: Problem) -> None:
        self.bins = bins
        self.late: list[float] = [
            seconds - durations[m] for seconds, m in zip(bins.seconds, bins.micro_batch, strict=True)
        ]
        widths = sorted({width for width in bins.width if width in problem.degrees})
        idle: dict[int, list[tuple[float, int]]] = {width: [] for width in widths}
        for b, width in enumerate(bins.width):
            if width in idle:
                idle[width].append((self.late[b], b))
        for heap in idle.values():
            heapify(heap)
        # Each width has the bins that may hold the next item, (seconds late, bin), and those too full, (−room, bin).
        self.heaps: list[tuple[int, list[tuple[float, int]], list[tuple[int, int]]]] = [
            (width, heap, list[tuple[int, int]]()) for width, heap in idle.items()
        ]

    def fill_bins(self, items: list[int], first: int, tokens: list[int], work: list[float]) -> int:
        """Give items, from position `first` on, to bins; returns the position of the first that fits none, or their
        number. `tokens` must fall along `items`, and `work` is in seconds of one slot.

        The items, their seconds and the room that they leave are written into the bins.
        """
        room = self.bins.room
        late = self.late
        busy = self.bins.seconds
        short = self.bins.short
        waiting = 0  # room of the roomiest bin that waits
        # The first bins of these heaps may be too full.
        changed = self.heaps
        for position in range(first, len(items)):
            item = items[position]
            length = tokens[item]
            seconds = work[item]
            earliest = np.inf
            chosen = None
            if length <= waiting:
                waiting = 0
                changed = self.heaps
            for _, idle, full in changed:
                while full and -full[0][0] >= length:
                    b = heappop(full)[1]
                    heappush(idle, (late[b], b))
                while idle and room[idle[0][1]] < length:
                    b = heappop(idle)[1]
                    heappush(full, (-room[b], b))
                if full:
                    waiting = max(waiting, -full[0][0])
            for heaps in self.heaps:
                width, idle, _ = heaps
                if not idle:
                    continue
                late_before, _ = idle[0]
                if (end := late_before + seconds / width) < earliest:
                    earliest = end
                    chosen = heaps
            if chosen is None:
                return position
            width, idle, _ = chosen
            _, b = idle[0]
            changed = (chosen,)
            heapreplace(idle, (earliest, b))
            late[b] = earliest
            busy[b] += seconds / width
            room[b] -= length
            short[b].append(item)
        return len(items)


def divide_bins(candidate: Candidate, *, level: bool) -> tuple[Floats, list[list[int]]]:
    """Decide how the slots of each bin share its short documents; returns when each bin ends, and for each of its short
    documents the slot in the bin that takes it, −1 for all slots.

    The first few are shared by all slots of the bin, which makes all end together; the others go whole, longest first,
    to the slot of the bin that ends first, which needs no messages. With `level` a bin may take as long as the slowest
    of its micro-batch, and as few documents are shared as that allows; otherwise as many as make it fastest. All are
    shared if a group must have more than one slot.
    """
    problem = candidate.problem
    bins = candidate.bins
    tokens = problem.tokens.tolist()
    work = problem.work.tolist()
    # Each bin has pairs of when it ends, and of slots.
    ways = defaultdict[int, list[tuple[float, list[int]]]](list)
    for b, shared, seconds, rows in _price_sharing(candidate):
        width = bins.width[b]
        places = [-1] * shared
        slots = [(seconds, slot) for slot in range(width)]
        rows_of_slots = [rows] * width
        for item in bins.short[b][shared:]:
            end, slot = slots[0]
            heapreplace(slots, (end + work[item], slot))
            rows_of_slots[slot] += tokens[item]
            places.append(slot)
        ways[b].append((max(slots)[0] if max(rows_of_slots) <= problem.cap else np.inf, places))
    ends = np.array([min(ways[b])[0] if b in ways else seconds for b, seconds in enumerate(bins.seconds)])
    goal = ends.copy()
    if level:
        micro_batch = np.array(bins.micro_batch, dtype=np.int64)
        last = np.zeros(len(candidate.durations))
        np.maximum.at(last, micro_batch, ends)
        goal = last[micro_batch]
    division = [list[int]() for _ in ends]
    for b, ways_of_bin in ways.items():
        ends[b], division[b] = next(way for way in ways_of_bin if way[0] <= goal[b])
    return ends, division


def _price_sharing(candidate: Candidate) -> Iterator[tuple[int, int, float, int]]:
    """(bin, count, seconds, rows): when the slots have ended the long document and `count` shared ones, and the rows
    that a slot then holds. A long document of one part takes all slots of its bin, as the group of shared
    documents does, and so joins that. One of several parts runs before the short ones."""
    problem = candidate.problem
    bins = candidate.bins
    choices = list[tuple[int, int, float, int]]()
    groups = list[tuple[int, int, int]]()
    for b, short in enumerate(bins.short):
        if not short:
            continue
        joined = (0, 0, 0)  # tokens, squares and documents of the long document that joins the group
        base_seconds = 0.0
        base_rows = 0
        if (long := bins.long[b]) >= 0 and len(candidate.long[long].parts) == 1:
            item = candidate.long[long].item
            joined = int(problem.tokens[item]), int(problem.squares[item]), int(problem.document_counts[item])
        elif long >= 0:
            base_seconds = candidate.long[long].seconds
            base_rows = candidate.long[long].rows
        columns = (problem.tokens[short], problem.squares[short], problem.document_counts[short])
        sums = [
            list(accumulate(column.tolist(), initial=start)) for column, start in zip(columns, joined, strict=True)
        ]
        counts = [count for count in SHARE_COUNTS if count < len(short)] if problem.min_cp == 1 else []
        for count in (*counts, len(short)):
            choices.append((b, count, base_seconds, base_rows))
            groups.append((sums[0][count], sums[1][count], sums[2][count]))
    if not choices:
        return
    tokens, squares, documents = np.array(groups, dtype=np.int64).T
    index = np.array([choice[0] for choice in choices])
    start = np.array(bins.start)[index]
    width = np.array(bins.width)[index]
    node = problem.request.node_size
    shares_node = start // node == (start + width - 1) // node
    cost = problem.request.cost
    seconds = cost.group_seconds(tokens, squares, width, shares_node, np.maximum(documents, 1))
    seconds = np.where(tokens > 0, seconds, 0.0).tolist()
    rows = (-(-tokens // width)).tolist()
    for (b, count, base_seconds, base_rows), group_seconds, group_rows in zip(choices, seconds, rows, strict=True):
        yield b, count, base_seconds + group_seconds, base_rows + group_rows


def make_micro_batches(candidate: Candidate, division: list[list[int]]) -> list[MicroBatch]:
    """Make the groups of a candidate: of long documents on their slots, and of the short ones of each bin by
    `division`, the slot in the bin of each (−1: shared by all). Items with the same slots share a group. Micro-batches
    without items are left out.
    """
    batches: list[dict[tuple[int, ...], list[int]]] = [{} for _ in candidate.durations]
    for document in candidate.long:
        batches[document.micro_batch].setdefault(slots_in_parts(document.parts), []).append(document.item)
    bins = candidate.bins
    for m, start, width, short, places in zip(
        bins.micro_batch, bins.start, bins.width, bins.short, division, strict=True
    ):
        all_slots = tuple(range(start, start + width))
        for item, place in zip(short, places, strict=True):
            batches[m].setdefault(all_slots if place < 0 else (start + place,), []).append(item)
    return [make_micro_batch(candidate.problem, groups) for groups in batches if groups]


def make_micro_batch(problem: Problem, groups: Mapping[tuple[int, ...], list[int]]) -> MicroBatch:
    """Make a micro-batch of groups of items, by their slots. Every slot takes its narrow groups first, and a group its
    longest documents: items are numbered longest first.
    """
    ordered = sorted(groups.items(), key=lambda pair: (len(pair[0]), pair[0]))
    return MicroBatch(
        tuple[Group, ...](
            problem.request.make_group(slots, [d for item in sorted(items) for d in problem.documents[item]])
            for slots, items in ordered
        )
    )
