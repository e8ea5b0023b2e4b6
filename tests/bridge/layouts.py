"""Layouts of an encoder and of a language model over the same ranks, as rows that each rank has and needs."""

from collections.abc import Callable
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from longspan import Layout, Partition
from longspan.comm.row_exchange import RowGradient

Lists = list[list[int]]
ITEMS = (5, 1, 7, 2, 4, 9, 3, 6)  # rows of each image


class Case(NamedTuple):
    """What ranks of a home have and need, by rank, and what the gradients of the copies of a row are."""

    home: Layout
    have: Lists
    need: Lists
    gradient: RowGradient

    def partition(self, rows: Lists) -> Partition:
        """Rows by rank in the order of the home."""
        return Partition.from_rows([rows[rank] for rank in self.home.ranks])

    @property
    def groups(self) -> Lists:
        """Ranks that carry the same gradient of a row; those of one rank are summed, and those of groups."""
        if self.gradient == "partial":
            return [[rank] for rank in self.home.ranks]
        if self.gradient == "partial_over_slots":
            return [sorted(ranks) for ranks in self.home.tp_groups()]
        return [sorted(self.home.ranks)]


def encoder_rows(layout: Layout, *, split: bool = False) -> Lists:
    """Image i is encoded by slot i mod slots; its rows are on all ranks of the slot, or split over them."""
    starts = np.cumsum((0, *ITEMS))
    have: Lists = [[] for _ in layout.ranks]
    for item, (start, stop) in enumerate(pairwise(starts)):
        for tp in range(layout.tp):
            rows = range(start, stop)[tp :: layout.tp] if split else range(start, stop)
            have[layout.rank_at(item % layout.slots, tp=tp)] += map(int, rows)
    return have


def zigzag(rows: list[int], cp: int) -> Lists:
    shares = Partition.zigzag([len(rows)], cp)
    return [[rows[i] for i in shares.rows(member)] for member in range(cp)]


def contiguous(rows: list[int], cp: int) -> Lists:
    return [part.tolist() for part in np.array_split(np.array(rows, dtype=np.int64), cp)]


def random(rows: list[int], cp: int) -> Lists:
    order = np.random.default_rng(len(rows)).permutation(rows)
    return [part.tolist() for part in np.array_split(order, cp)]


def language_model_rows(
    home: Layout,
    cp: int,
    owner: Callable[[list[int], int], Lists],
    *,
    split: bool = False,
    shared: int = 0,
    repeated: int = 0,
    stage: int = 0,
) -> Lists:
    """A replica of cp slots has the documents of every dp-th image, whose rows its slots own.

    `split`: each tensor-parallel rank needs its part of a slot's rows (sequence parallelism). So many rows are
    `shared` by all slots, and each slot needs so many rows of its own `repeated`.
    """
    dp, starts = home.slots // cp, np.cumsum((0, *ITEMS))
    need: Lists = [[] for _ in home.ranks]
    for replica in range(dp):
        items = range(replica, len(ITEMS), dp)
        rows = [row for item in items for row in range(int(starts[item]), int(starts[item + 1]))]
        for member, part in enumerate(owner(rows, cp)):
            part += [row for row in range(shared) if row not in part] + part[:repeated]
            for tp in range(home.tp):
                part_here = part[tp :: home.tp] if split else part
                need[home.rank_at(replica * cp + member, tp=tp, pp=stage)] = list(part_here)
    return need


ONE, TP2, TP3, TWO_STAGES = Layout(6), Layout(6, tp=2), Layout(6, tp=3), Layout(6, pp=3, tp=2)
BACKWARDS = Layout((5, 3, 1, 4, 2, 0), tp=2)
CASES = {
    "2·3 to 3·1·2, two slots use a row": Case(
        TP3, encoder_rows(TP2), language_model_rows(TP3, 1, contiguous, shared=4), "partial_over_slots"
    ),
    "3·2 to 2·1·3, a slot uses a row twice": Case(
        TP2, encoder_rows(TP3), language_model_rows(TP2, 1, random, repeated=3), "partial_over_slots"
    ),
    "1·6 to 2·3·1, sequence parallel": Case(
        TP2, encoder_rows(ONE), language_model_rows(TP2, 3, zigzag, split=True), "partial_over_slots"
    ),
    "3·2 split over its ranks to 3·2·1": Case(
        TP3, encoder_rows(TP3, split=True), language_model_rows(TP3, 2, zigzag), "partial_over_slots"
    ),
    "2·3 to 1·6·1": Case(ONE, encoder_rows(TP2), language_model_rows(ONE, 6, zigzag, shared=2), "partial"),
    "6·1 to 1·2·3, repeated": Case(
        ONE, encoder_rows(Layout(6, tp=6)), language_model_rows(ONE, 2, random, repeated=2, shared=3), "partial"
    ),
    "3·2 to copies of all rows": Case(ONE, encoder_rows(TP3), [list(range(20))] * 6, "identical"),
    "frozen, 2·3 to 3·2·1": Case(TP3, encoder_rows(TP2), language_model_rows(TP3, 2, contiguous), "none"),
    "1·6 to the second of three stages": Case(
        TWO_STAGES, encoder_rows(ONE), language_model_rows(TWO_STAGES, 1, zigzag, stage=1), "partial_over_slots"
    ),
    "ranks in another order": Case(
        BACKWARDS, encoder_rows(TP2), language_model_rows(BACKWARDS, 3, zigzag, shared=2), "partial_over_slots"
    ),
    "no image": Case(TP2, [[]] * 6, [[]] * 6, "partial_over_slots"),
    "one rank has, another needs": Case(
        TP2, [[], [4, 3, 9], [], [], [], []], [[], [], [], [], [9], [9]], "partial_over_slots"
    ),
}
