"""How the slots of a bin share its fillers.

A *bin* is a run of slots in one micro-batch that are equally busy, a *filler* a document without slots of its own that
was given to a bin, and an *anchor* a document that takes the slots of one bin or more (`draft.py`). Of the fillers the
longest are shared by all slots of the bin, which makes all end together, and each slot takes others whole, which
needs no communication. In lockstep a bin may take as long as the slowest bin of its micro-batch, so it shares as few
documents as that allows; in free mode it shares what makes it fastest.
"""

from typing import cast

import numpy as np

from longspan.plan.dynamic.draft import Bins, Division, Draft
from longspan.plan.dynamic.problem import Floats, Ints

SHARE_COUNTS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # numbers of shared fillers, as well as all


class _FilledBins:
    """The bins of a draft that have fillers, as arrays: `index` are their numbers, `count` their fillers.

    Bins with most fillers come first, and rows of `tokens`, `squares` and `work` (bins, most fillers) are padded with
    zeros, so that the bins which have a filler in some column are a prefix. Columns p of `first_tokens`,
    `first_squares` and `first_documents` (bins, most fillers + 1) are the sums over the first p fillers. `merged` is
    whether the bin's anchor is in one group with its shared fillers, to which it adds `anchor_tokens` rows and
    `anchor_squares`; any other anchor takes `base_seconds` before that group, and `base_rows` of every slot.
    """

    def __init__(self, draft: Draft) -> None:
        """Take what is needed of the bins, of their fillers and of the anchors on their slots."""
        bins, self.problem = draft.bins, draft.problem
        counts = np.array([len(fillers) for fillers in bins.fillers], dtype=np.int64)
        self.index = np.argsort(-counts, kind="stable")[: int((counts > 0).sum())]
        self.count = counts[self.index]
        self.width = np.array(bins.width, dtype=np.int64)[self.index]
        node, start = self.problem.request.node_size, np.array(bins.start, dtype=np.int64)[self.index]
        self.shares_node = start // node == (start + self.width - 1) // node
        self._sum_fillers(bins)
        self._note_anchors(draft)

    def _sum_fillers(self, bins: Bins) -> None:
        """Fill the arrays of fillers, row by row, and sum them up."""
        problem, order = self.problem, cast(list[int], self.index.tolist())
        items = np.array([item for b in order for item in bins.fillers[b]], dtype=np.int64)
        row = np.repeat(np.arange(len(self.index)), self.count)
        column = np.arange(len(items)) - np.repeat(np.cumsum(self.count) - self.count, self.count)
        shape = (3, len(self.index), int(self.count.max(initial=0)))
        self.tokens, self.squares, documents = np.zeros(shape, dtype=np.int64)
        self.tokens[row, column], self.squares[row, column] = problem.tokens[items], problem.squares[items]
        documents[row, column] = problem.counts[items]
        self.work = problem.request.cost.work_seconds(self.tokens, self.squares)
        self.first_tokens, self.first_squares = _sums_of_first(self.tokens), _sums_of_first(self.squares)
        self.first_documents = _sums_of_first(documents)

    def _note_anchors(self, draft: Draft) -> None:
        """Note what an anchor adds to its bin: documents to the shared group, or seconds and rows before that group.

        An anchor of one part takes all slots of its bin, as the shared group does, and so joins it. An anchor of
        several parts runs before the fillers. A bin without an anchor (index −1) gets zeros; the tables have one entry
        at least, so that −1 can be looked up.
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
        """Return when each bin would end, in seconds, if its slots divided all its work evenly without messages."""
        tokens = self.first_tokens[:, -1] + self.anchor_tokens
        squares = self.first_squares[:, -1] + self.anchor_squares
        return self.base_seconds + self.problem.request.cost.work_seconds(tokens, squares) / self.width

    def try_sharing(self, chosen: Ints, shared: int) -> tuple[Floats, Ints]:
        """Price bins whose first `shared` fillers go to all slots, and the others to the least loaded slot each.

        Returns the seconds of each bin, inf where the cap forbids it, and the slot of each filler, −1 if it is shared.
        `chosen` are bins, as indices into these arrays, by falling numbers of fillers. All slots of a bin begin with
        the shared group, then take the other fillers, longest first, in all bins at the same time: one column of the
        arrays after the other.
        """
        start, shared_rows = self._price_shared_groups(chosen, shared)
        outside = np.arange(int(self.width.max())) >= self.width[chosen][:, None]  # of the bin: (bins, widest)
        slot_end = np.where(outside, np.inf, start[:, None])
        slot_rows = np.repeat(shared_rows[:, None], slot_end.shape[1], axis=1)
        slot = np.full((len(chosen), self.tokens.shape[1]), -1, dtype=np.int64)
        for column in range(shared, int(self.count[chosen[:1]].max(initial=0))):
            with_filler = int((self.count[chosen] > column).sum())
            bins, index = chosen[:with_filler], np.arange(with_filler)
            least = slot_end[:with_filler].argmin(axis=1)
            slot_end[index, least] += self.work[bins, column]
            slot_rows[index, least] += self.tokens[bins, column]
            slot[:with_filler, column] = least
        seconds = np.where(outside, 0.0, slot_end).max(axis=1)
        over = (slot_rows > self.problem.cap).any(axis=1)
        return np.where(over, np.inf, seconds), slot

    def _price_shared_groups(self, chosen: Ints, shared: int) -> tuple[Floats, Ints]:
        """Return when the group of the first `shared` fillers and the anchor ends, and its rows a slot, of each bin."""
        count, width = np.minimum(shared, self.count[chosen]), self.width[chosen]
        tokens = self.first_tokens[chosen, count] + self.anchor_tokens[chosen]
        squares = self.first_squares[chosen, count] + self.anchor_squares[chosen]
        documents = np.maximum(self.first_documents[chosen, count] + self.merged[chosen], 1)
        cost = self.problem.request.cost
        seconds = cost.group_seconds(tokens, squares, width, self.shares_node[chosen], documents)
        slot_rows = self.base_rows[chosen] + -(-tokens // width)
        return self.base_seconds[chosen] + np.where(tokens > 0, seconds, 0.0), slot_rows


def _sums_of_first(values: Ints) -> Ints:
    """Return the sums of the first 0, 1, 2 and more values of each row: (rows, columns + 1)."""
    return np.concatenate((np.zeros((len(values), 1), dtype=np.int64), np.cumsum(values, axis=1)), axis=1)


def divide_bins(draft: Draft, *, level: bool) -> Division:
    """Decide for every bin which fillers all its slots share; with `level` all bins of a micro-batch end together.

    With `level` a bin may take as long as the slowest of its micro-batch, and shares no more than that needs. Otherwise
    a bin has the goal 0, which none meets, so that it shares what makes it fastest. All fillers are shared if a group
    must have more than one slot.
    """
    bins = draft.bins
    seconds = np.array(bins.seconds)
    empty = np.array([not fillers for fillers in bins.fillers], dtype=np.bool_)
    filled = _FilledBins(draft)
    slot = np.full((len(seconds), filled.tokens.shape[1]), -1, dtype=np.int64)
    division = Division(np.zeros(len(seconds), dtype=np.int64), slot, seconds)
    if not len(filled.index):
        return division
    most = int(filled.count.max())
    all_shared, _ = filled.try_sharing(np.arange(len(filled.index)), most)
    share_counts = [count for count in SHARE_COUNTS if count < most] if draft.problem.min_cp == 1 else []
    micro_batch = np.array(bins.micro_batch, dtype=np.int64)
    goals = np.zeros(len(draft.durations))  # of each micro-batch
    if level:
        np.maximum.at(goals, micro_batch[empty], seconds[empty])
        goals = _earliest_ends(filled, all_shared, share_counts, micro_batch, goals)
    goal = goals[micro_batch[filled.index]]  # of each bin with fillers
    _choose_sharing(filled, division, goal, all_shared, share_counts)
    return division


def _earliest_ends(
    filled: _FilledBins, all_shared: Floats, share_counts: list[int], micro_batch: Ints, ends: Floats
) -> Floats:
    """Return when each micro-batch can end at the earliest: the end of its slowest bin, divided as suits that best.

    `ends` (micro-batches,) begin as the ends of bins without fillers. No micro-batch ends before `floor`: its latest
    bin if all work were divided evenly at no cost. A bin that ends by then as divided so far is not tried further.
    """
    best, member = all_shared.copy(), micro_batch[filled.index]
    floor = ends.copy()
    np.maximum.at(floor, member, filled.even_seconds())
    for shared in share_counts:
        chosen = np.flatnonzero((best > floor[member]) & (filled.count > shared))
        if len(chosen):
            best[chosen] = np.minimum(best[chosen], filled.try_sharing(chosen, shared)[0])
    np.maximum.at(ends, member, best)
    return ends


def _choose_sharing(
    filled: _FilledBins, division: Division, goal: Floats, all_shared: Floats, share_counts: list[int]
) -> None:
    """Write to `division` the fewest shared fillers with which each bin ends by its goal.

    A bin that cannot is divided so that it ends earliest. `share_counts` rise; each is tried on the bins that are still
    late and have more fillers. Last all fillers are shared, whose seconds, `all_shared`, are known already and need no
    slots (−1).
    """
    is_late = np.ones(len(filled.index), dtype=np.bool_)  # after its goal, as divided so far
    best = np.full(len(filled.index), np.inf)
    most = int(filled.count.max())
    for shared in (*share_counts, most):
        chosen = np.flatnonzero(is_late & ((filled.count > shared) | (shared == most)))
        if not len(chosen):
            continue
        seconds, slot = filled.try_sharing(chosen, shared) if shared < most else (all_shared[chosen], None)
        is_better = seconds < best[chosen]
        better = chosen[is_better]
        bins = filled.index[better]
        best[better] = division.seconds[bins] = seconds[is_better]
        division.shared[bins] = np.minimum(shared, filled.count[better])
        division.slot[bins] = -1 if slot is None else slot[is_better]
        is_late[chosen] = best[chosen] > goal[chosen]
