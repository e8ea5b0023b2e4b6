"""How the slots of a cell divide its fillers: the longest shared by all, the others whole on one slot each.

Whole documents need no communication, shared ones make all slots end together. In lockstep a cell may take as long as
the slowest cell of its micro-batch has to, so it shares as few documents as that allows; in free mode it shares what
makes it fastest.
"""

from dataclasses import dataclass

import numpy as np

from longspan.plan.dynamic.draft import Draft
from longspan.plan.dynamic.problem import Floats, Ints

TRIED = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128)  # numbers of shared fillers, besides all


@dataclass(frozen=True, eq=False)
class Division:
    """For every cell of a draft how many of its fillers, longest first, are shared, and where the others are."""

    shared: Ints  # (cells,)
    slot: Ints  # (cells, most fillers) position in the cell of each filler that is not shared; −1 for others
    seconds: Floats  # (cells,) when the cell ends, anchor included, without the launch


class _Table:
    """The cells of a draft that have fillers, as padded arrays; most fillers first, so that a step takes a prefix."""

    def __init__(self, draft: Draft) -> None:
        problem, cells = draft.problem, draft.cells
        counts = np.array([len(held) for held in cells.fillers], dtype=np.int64)
        self.cell = np.argsort(-counts, kind="stable")[: int((counts > 0).sum())]
        self.count = counts[self.cell]
        most = int(self.count.max(initial=0))
        order: list[int] = self.cell.tolist()
        flat = np.array([item for c in order for item in cells.fillers[c]], dtype=np.int64)
        column = np.arange(len(flat)) - np.repeat(np.cumsum(self.count) - self.count, self.count)
        row = np.repeat(np.arange(len(self.cell)), self.count)
        self.tokens, self.squares = np.zeros((2, len(self.cell), most), dtype=np.int64)
        self.tokens[row, column], self.squares[row, column] = problem.tokens[flat], problem.squares[flat]
        self.work = problem.request.cost.work_seconds(self.tokens, self.squares)
        self.width = np.array(cells.width, dtype=np.int64)[self.cell]
        self._anchors(draft)
        first = np.zeros((len(self.cell), 1), dtype=np.int64)
        self.head_tokens = np.concatenate((first, np.cumsum(self.tokens, axis=1)), axis=1)
        self.head_squares = np.concatenate((first, np.cumsum(self.squares, axis=1)), axis=1)
        self.problem = problem

    def _anchors(self, draft: Draft) -> None:
        """What an anchor adds: to the shared group where both have the same slots, else as seconds and rows before."""
        anchor = np.array(draft.cells.anchor, dtype=np.int64)[self.cell]
        parts = np.array([len(a.parts) for a in draft.anchors] or [0], dtype=np.int64)
        item = np.array([a.item for a in draft.anchors] or [0], dtype=np.int64)
        seconds = np.array([a.seconds for a in draft.anchors] or [0.0])
        rows = np.array([a.rows for a in draft.anchors] or [0], dtype=np.int64)
        there = anchor >= 0
        merged = there & (parts[anchor] == 1)
        apart = there & ~merged
        self.merged = merged
        self.own_tokens = np.where(merged, draft.problem.tokens[item[anchor]], 0)
        self.own_squares = np.where(merged, draft.problem.squares[item[anchor]], 0)
        self.base_seconds = np.where(apart, seconds[anchor], 0.0)
        self.base_rows = np.where(apart, rows[anchor], 0)

    def even_seconds(self) -> Floats:
        """When each cell would end if its work were divided evenly at no cost."""
        tokens, squares = self.head_tokens[:, -1] + self.own_tokens, self.head_squares[:, -1] + self.own_squares
        return self.base_seconds + self.problem.request.cost.work_seconds(tokens, squares) / self.width

    def try_sharing(self, rows: Ints, shared: int) -> tuple[Floats, Ints]:
        """Seconds of these cells (rising rows) if so many fillers are shared, inf where the cap forbids; and places."""
        problem, p = self.problem, np.minimum(shared, self.count[rows])
        tokens = self.head_tokens[rows, p] + self.own_tokens[rows]
        squares = self.head_squares[rows, p] + self.own_squares[rows]
        width = self.width[rows]
        group = problem.request.cost.group_seconds(tokens, squares, width, problem.blocks_inside)
        start = self.base_seconds[rows] + np.where(tokens > 0, group, 0.0)
        held = self.base_rows[rows] - (-tokens // width)
        outside = np.arange(int(self.width.max())) >= width[:, None]
        load = np.where(outside, np.inf, start[:, None])
        kept = np.repeat(held[:, None], load.shape[1], axis=1)
        slot = np.full((len(rows), self.tokens.shape[1]), -1, dtype=np.int64)
        for column in range(shared, int(self.count[rows[:1]].max(initial=0))):
            some = int((self.count[rows] > column).sum())
            here, index = rows[:some], np.arange(some)
            least = load[:some].argmin(axis=1)
            load[index, least] += self.work[here, column]
            kept[index, least] += self.tokens[here, column]
            slot[:some, column] = least
        seconds = np.where(outside, 0.0, load).max(axis=1)
        over = (kept > problem.cap).any(axis=1)
        return np.where(over, np.inf, seconds), slot


def divide(draft: Draft, *, level: bool) -> Division:
    """Divide the fillers of every cell; `level` says that all cells of a micro-batch end with the slowest."""
    cells = draft.cells
    seconds = np.array(cells.level)
    empty = np.array([not held for held in cells.fillers], dtype=np.bool_)
    table = _Table(draft)
    slot = np.full((len(seconds), table.tokens.shape[1]), -1, dtype=np.int64)
    division = Division(np.zeros(len(seconds), dtype=np.int64), slot, seconds)
    if not len(table.cell):
        return division
    every = np.arange(len(table.cell))
    all_shared, _ = table.try_sharing(every, int(table.count.max()))
    tried = [p for p in TRIED if p < int(table.count.max())] if draft.problem.min_cp == 1 else []
    micro_batch = np.array(cells.micro_batch, dtype=np.int64)
    enough = np.zeros(len(draft.durations))
    if level:
        np.maximum.at(enough, micro_batch[empty], seconds[empty])
        enough = _least_ends(table, all_shared, tried, micro_batch, enough)
    goal = enough[micro_batch[table.cell]]
    _settle(table, division, goal, all_shared, tried)
    return division


def _least_ends(table: _Table, all_shared: Floats, tried: list[int], micro_batch: Ints, ends: Floats) -> Floats:
    """When each micro-batch ends at the earliest: the slowest cell under the division that suits it best."""
    best, member = all_shared.copy(), micro_batch[table.cell]
    floor = ends.copy()
    np.maximum.at(floor, member, table.even_seconds())
    for p in tried:
        rows = np.flatnonzero((best > floor[member]) & (table.count > p))
        if len(rows):
            best[rows] = np.minimum(best[rows], table.try_sharing(rows, p)[0])
    np.maximum.at(ends, member, best)
    return ends


def _settle(table: _Table, division: Division, goal: Floats, all_shared: Floats, tried: list[int]) -> None:
    """Share as few fillers as the goal allows; where it cannot be met, what ends earliest."""
    open_rows = np.ones(len(table.cell), dtype=np.bool_)
    best = np.full(len(table.cell), np.inf)
    choices = [*tried, int(table.count.max())]
    for p in choices:
        rows = np.flatnonzero(open_rows & ((table.count > p) | (p == choices[-1])))
        if not len(rows):
            continue
        seconds, slot = table.try_sharing(rows, p) if p < choices[-1] else (all_shared[rows], None)
        better = seconds < best[rows]
        take, cell = rows[better], table.cell[rows[better]]
        best[take] = seconds[better]
        division.shared[cell] = np.minimum(p, table.count[take])
        division.slot[cell] = -1 if slot is None else slot[better]
        division.seconds[cell] = seconds[better]
        open_rows[rows] = best[rows] > goal[rows]
