"""Plans in lockstep: search for the durations of micro-batches, and place documents in micro-batches so long.

Long documents want long micro-batches: their ring hides its traffic there, and the cap limits rows, not seconds. Short
documents want short ones. So `search` starts from durations between two extremes, all equal, and those of the sorted
documents cut into equal parts, and then changes the best a little at a time. On many slots it first searches on a
sample of the documents. It counts drafts, not seconds, so that every host ends with the same plan.

`make_draft` places documents for chosen durations. Long ones (*anchors*) take slots of their own, each in the
micro-batch and at the degree that waste least. That cuts every micro-batch into *bins*: runs of slots inside a block
that are equally busy. The others, the *fillers*, go to the bin that ends earliest with them against the duration of its
micro-batch, longest first; the slots of a bin are taken to share its fillers evenly (`division.py` decides how).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

import numpy as np

from longspan.plan.dynamic.degrees import Anchoring, DegreeTable
from longspan.plan.dynamic.draft import Anchor, Bins, Draft, LeastLoaded
from longspan.plan.dynamic.problem import MORE_MICRO_BATCHES, Floats, FreeSlots, Ints, Problem

ANCHORINGS = (Anchoring(0.15, 0.8), Anchoring(0.5, 0.4))
ANCHORINGS_OF_FEW = (Anchoring(0.0, 0.0), Anchoring(0.15, 0.4))
REACHES = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)
SHARES = (0.0, 0.05, 0.1, 0.15, 0.25, 0.5, 0.8)
STEEPNESS = (0.0, 0.4, 0.7, 1.0)
SLACK = (1.005, 1.03)
SLACK_OF_FEW = (1.07, 1.15, 1.3, 1.6)  # as well, if there are few documents for each block


@dataclass(frozen=True, eq=False)
class DraftSettings:
    """What a draft is made by: intended durations in units of the mean work of a slot, and what makes an anchor."""

    durations: Floats
    anchoring: Anchoring


@dataclass(frozen=True)
class Effort:
    """How many drafts the search makes, in addition to those that it always begins with."""

    drafts: int  # of the settings that were best on a sample, where there is one
    steps: int  # from the best draft
    sample_steps: int  # from the best draft of the sample


class Search:
    """The best draft so far of one problem, and the settings that made it."""

    def __init__(self, problem: Problem) -> None:
        """Make the table of degrees, which all drafts use."""
        self.problem = problem
        self.degrees: DegreeTable = DegreeTable.of(problem)
        self.trial_seconds: list[float] = []
        self.best: Draft | None = None

    def try_settings(self, settings: DraftSettings) -> None:
        """Make a draft by these settings; keep it if it is the best so far."""
        durations = settings.durations * self.problem.mean_seconds
        draft = make_draft(self.problem, self.degrees, durations, settings.anchoring)
        self.trial_seconds.append(draft.seconds)
        if self.best is None or draft.seconds < self.best.seconds:
            self.settings: DraftSettings = settings
            self.best = draft

    def improve_settings(self, steps: int, seed: int = 0) -> None:
        """Change the best settings a little, `steps` times, and keep what is better."""
        random = Random(seed)
        for _ in range(steps):
            assert self.best is not None
            self.try_settings(_change_settings(self.best, self.settings, random))

    def rank_settings(self) -> list[int]:
        """Return the settings tried so far, best first, by the number of the trial (from 0)."""
        return sorted(range(len(self.trial_seconds)), key=lambda i: (self.trial_seconds[i], i))


def search_draft(problem: Problem, effort: Effort) -> Draft:
    """Try initial settings, or on many slots those that a sample finds, then change the best `effort.steps` times."""
    full = Search(problem)
    if problem.sample_factor == 1:
        candidates = list(initial_settings(problem, full.degrees))[:: problem.stride]
    else:
        candidates = _search_sample(problem, full.degrees, effort)
    for settings in candidates:
        full.try_settings(settings)
    full.improve_settings(effort.steps)
    assert full.best is not None
    return full.best


def _search_sample(problem: Problem, degrees: DegreeTable, effort: Effort) -> list[DraftSettings]:
    """Search on a sample; returns settings for the whole problem: the sample's best, and initial ones that did well."""
    sample, settings_of_problem = Search(problem.make_sample()), list(initial_settings(problem, degrees))
    for settings in initial_settings(sample.problem, sample.degrees, whole=problem):  # as many, which correspond
        sample.try_settings(settings)
    ranked = sample.rank_settings()
    sample.improve_settings(effort.sample_steps)
    return [sample.settings, *[settings_of_problem[i] for i in ranked[: effort.drafts]]]


def initial_settings(
    problem: Problem, degrees: DegreeTable, *, whole: Problem | None = None
) -> Iterator[DraftSettings]:
    """Yield the settings that a search begins with: numbers of micro-batches, their durations, and anchors.

    Durations are between all equal (steepness 0) and the shares of the sorted documents (1), and a little longer than
    the work needs. The first micro-batch is long enough for the longest document. A sample takes the numbers of
    micro-batches and the anchors of the `whole` problem, so that its settings match those of that problem one by one.
    """
    whole = whole or problem
    few = whole.has_few_items
    for count in _micro_batch_counts(whole):
        steep = _steep_shares(problem, count)
        for steepness in STEEPNESS:
            shape = (1.0 - steepness) / count + steepness * steep
            shape[0] = max(shape[0], degrees.longest_document_seconds() / problem.mean_seconds)
            for slack in (*SLACK, *SLACK_OF_FEW) if few else SLACK:
                for anchoring in ANCHORINGS_OF_FEW if few else ANCHORINGS:
                    yield DraftSettings(slack * shape, anchoring)


def _micro_batch_counts(problem: Problem) -> list[int]:
    """List numbers of micro-batches to try: the fewest, some more, and multiples that are launched anyway."""
    least, multiple = problem.least_micro_batches, problem.request.micro_batch_multiple
    counts = range(least, least + MORE_MICRO_BATCHES + 1)
    return sorted({*counts, *(-(-count // multiple) * multiple for count in counts)})


def _steep_shares(problem: Problem, count: int) -> Floats:
    """Return the share of all work in each of `count` parts of equal rows, longest documents first; they sum to 1.

    A row of a long document is more work than one of a short document, so the shares fall: as durations they are
    steep. A document counts in the part that holds its middle row.
    """
    middle = np.cumsum(problem.tokens) - problem.tokens // 2
    part = np.minimum(middle * count // int(problem.tokens.sum()), count - 1)
    share = np.bincount(part, weights=problem.work, minlength=count)
    return share / (problem.mean_seconds * problem.request.slots)


def _change_settings(best: Draft, settings: DraftSettings, random: Random) -> DraftSettings:
    """Make settings near the best: other durations, an anchor at another degree, or other documents as anchors.

    With other documents as anchors all durations become up to 2 % longer or shorter; `_change_durations` makes the
    other changes. No duration falls to 0 or below.
    """
    change, micro_batch = int(5 * random.random()), int(len(settings.durations) * random.random())
    if change == 4:  # other documents as anchors
        share, reach = (values[int(len(values) * random.random())] for values in (SHARES, REACHES))
        durations = settings.durations * (0.98 + 0.04 * random.random())
        return DraftSettings(np.maximum(durations, 1e-6), Anchoring(share, reach))
    durations = _change_durations(best, settings.durations.copy(), change, micro_batch, random)
    return DraftSettings(np.maximum(durations, 1e-6), settings.anchoring)


def _change_durations(best: Draft, durations: Floats, change: int, micro_batch: int, random: Random) -> Floats:
    """Return other durations of micro-batches, in units of the mean work of a slot, for the search to try next.

    `change` chooses the kind. 0: all become what they came out as in `best`, times 0.985 to 1.005. 1: that of this
    micro-batch becomes up to a tenth longer or shorter. 2: up to a twentieth of it moves to another, or from that one
    to it. 3: it just holds one of its anchors at another degree, if it has any. 1 to 3 change `durations` in place.
    """
    mean = best.problem.mean_seconds
    if change == 0:
        return best.durations / mean * (0.985 + 0.02 * random.random())
    if change == 1:
        durations[micro_batch] *= 0.9 + 0.2 * random.random()
    elif change == 2:
        moved = (0.1 * random.random() - 0.05) * durations[micro_batch]
        durations[micro_batch] -= moved
        durations[int(len(durations) * random.random())] += moved
    else:
        anchors = [anchor for anchor in best.anchors if anchor.micro_batch == micro_batch]
        if anchors:
            durations[micro_batch] = 1.0005 * _seconds_at_other_degree(best.problem, anchors, random) / mean
    return durations


def _seconds_at_other_degree(problem: Problem, anchors: list[Anchor], random: Random) -> float:
    """Return the seconds that one of these anchors takes at a degree close to the one that it has.

    The degree goes down or up at random, by at most a quarter and 2, and then down to a degree that groups may have.
    """
    anchor = anchors[int(len(anchors) * random.random())]
    degree = sum(count for _, count in anchor.parts)
    degree += int((5 + degree // 2) * random.random()) - 2 - degree // 4
    degree = problem.widest_degree(max(degree, problem.min_cp))
    tokens = int(problem.tokens[anchor.item])
    inside_node = degree <= problem.widest_in_node
    return float(problem.request.cost.group_seconds(tokens, tokens * tokens, degree, inside_node))


def make_draft(problem: Problem, degrees: DegreeTable, durations: Floats, anchoring: Anchoring) -> Draft:
    """Place all items in micro-batches of about these durations, and in further ones where they do not fit.

    An anchor has at least `anchoring.share` of the work of the widest block in a micro-batch of middle duration, or
    more rows than the widest bin holds. Items that the table of degrees lacks are never anchors.
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
        """Begin with all slots free in micro-batches of these durations."""
        self.problem, self.degrees = problem, degrees
        self.durations: list[float] = durations.tolist()
        self.free = [FreeSlots(problem.blocks, problem.degrees) for _ in self.durations]
        self.anchors: list[Anchor] = []
        self.unplaced: list[int] = []  # anchors for which no slots were left, but which fit a bin
        self.bins = Bins()

    def place_anchors(self, items: list[int], reach: float) -> None:
        """Give each item the slots that waste least, in the first micro-batch that has them; longest first.

        Micro-batches in which some degree fits are tried in the order of what the item's class wastes in them.
        """
        if not items:
            return
        width, waste = self.degrees.choose_degrees(np.array(self.durations), reach)  # (classes, micro-batches)
        order = np.argsort(waste, axis=1, kind="stable").tolist()
        possible = np.isfinite(waste).sum(axis=1).tolist()
        widths, classes = width.tolist(), self.degrees.item_class[items]
        in_block, across = (self._anchor_seconds(items, width[classes], inside).tolist() for inside in (True, False))
        for row, (item, item_class) in enumerate(zip(items, classes.tolist(), strict=True)):
            for m in order[item_class][: possible[item_class]]:
                if self._try_anchor(item, m, widths[item_class][m], in_block[row][m], across[row][m]):
                    break
            else:
                self._place_late_anchor(item)

    def _anchor_seconds(self, items: list[int], width: Ints, in_block: bool) -> Floats:
        """Return the seconds of items at degrees, within or across blocks: (items, …), of the shape of `width`."""
        rows = np.array(items).reshape(-1, *[1] * (width.ndim - 1))
        return self.degrees.item_seconds[int(in_block), rows, np.searchsorted(self.degrees.degrees, width)]

    def _try_anchor(self, item: int, micro_batch: int, width: int, in_block: float, across: float) -> bool:
        """Place an anchor if slots are free and it ends in time, in one block or several; returns whether it did."""
        free = self.free[micro_batch]
        if width > free.total:
            return False
        seconds = in_block if free.has_block(width) else across
        if seconds > self.durations[micro_batch]:
            return False
        self._place_anchor(item, micro_batch, width, seconds)
        return True

    def _place_anchor(self, item: int, micro_batch: int, width: int, seconds: float) -> None:
        """Place an anchor on free slots of a micro-batch; the rows that it leaves on them become bins.

        `seconds` take a block for a part of one node. A last block that has taken in a smaller last node has two: if
        the slots are in both, the anchor takes the seconds of a group across nodes.
        """
        parts, problem = self.free[micro_batch].take_slots(width), self.problem
        if len(parts) == 1 and width <= problem.widest_in_node and not problem.shares_node(*parts[0]):
            seconds = float(self._anchor_seconds([item], np.array([width]), in_block=False)[0])
        rows = -(-int(problem.tokens[item]) // width)
        for run in (run for part in parts for run in problem.split_into_runs(part)):
            self.bins.add_bin(micro_batch, run, len(self.anchors), seconds, problem.cap - rows)
        self.anchors.append(Anchor(micro_batch, item, parts, rows, seconds))

    def _place_late_anchor(self, item: int) -> None:
        """Place an anchor that no micro-batch has time and slots for.

        An anchor that fits a bin is placed with the fillers later. Any other makes a micro-batch longer, or a new one,
        whichever wastes least.
        """
        if self.problem.tokens[item] <= self.problem.widest_run * self.problem.cap:
            self.unplaced.append(item)
            return
        free = [*(slots.total for slots in self.free), self.problem.request.slots]  # the last is a new micro-batch
        choices = zip([*self.durations, 0.0], free, strict=True)
        stretches = [self.degrees.price_stretch(item, duration, slots) for duration, slots in choices]
        micro_batch = min(range(len(stretches)), key=lambda m: stretches[m][0])
        _, width, seconds = stretches[micro_batch]
        if micro_batch == len(self.durations):
            self._add_micro_batch(seconds)
        self.durations[micro_batch] = max(self.durations[micro_batch], seconds)
        self._place_anchor(item, micro_batch, width, seconds)

    def _add_micro_batch(self, duration: float) -> None:
        """Add a micro-batch of this duration, all of whose slots are free."""
        self.durations.append(duration)
        self.free.append(FreeSlots(self.problem.blocks, self.problem.degrees))

    def place_fillers(self, items: list[int]) -> None:
        """Give each item to the bin that ends earliest with it, measured against its micro-batch's duration.

        For an item that fits no bin a micro-batch as long as the last is added.
        """
        for m in range(len(self.durations)):
            self._add_bins(m)
        least_loaded = LeastLoaded(self.bins, self.durations, self.problem)
        work: list[float] = self.problem.work.tolist()
        tokens: list[int] = self.problem.tokens.tolist()
        position = 0
        while (position := least_loaded.place_items(items, position, tokens, work)) < len(items):
            self._add_micro_batch(self.durations[-1])
            self._add_bins(len(self.durations) - 1)
            least_loaded = LeastLoaded(self.bins, self.durations, self.problem)

    def _add_bins(self, micro_batch: int) -> None:
        """Make bins of the slots of a micro-batch that no anchor took."""
        for part in self.free[micro_batch].remaining_runs():
            self.bins.add_bin(micro_batch, part, anchor=-1, seconds=0.0, rows=self.problem.cap)

    def draft(self) -> Draft:
        """Return the draft of what has been placed, with the ends of micro-batches as durations.

        The slots of a bin also wait for messages of the fillers that they share, which its seconds lack so far.
        """
        bins = self.bins
        latency = self.problem.request.cost.latency_seconds(np.arange(1, self.problem.widest_block + 1)).tolist()
        ends = [0.0] * len(self.durations)
        for m, seconds, width, fillers in zip(bins.micro_batch, bins.seconds, bins.width, bins.fillers, strict=True):
            wait = latency[width - 1] if fillers else 0.0
            ends[m] = max(ends[m], seconds + wait)
        return Draft(self.problem, np.array(ends), self.anchors, bins)
