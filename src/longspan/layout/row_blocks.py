"""The rows of several partitions as numbered blocks: runs of rows that are together wherever they are.

Members that hold long runs are then described by few numbers, whatever the number of rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from longspan.layout.partition import Partition
from longspan.layout.segments import Integers, expand

PIECES = 4096  # into which all rows are cut at least, so that members can share them evenly
SPARSE = 4  # a table over all row ids is made unless these are more than so many times the ends of runs


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of each member's rows, in its order; block b is rows `start[b]` to `start[b] + size[b]`."""

    members: tuple[Integers, ...]
    start: Integers
    size: Integers

    def places(self, member: int) -> Integers:
        """Where each of the member's blocks begins in its order of rows."""
        sizes = self.size[self.members[member]]
        return np.cumsum(sizes) - sizes


def cut_into_blocks(*partitions: Partition) -> tuple[Blocks, ...]:
    """The blocks of partitions, numbered alike for all of them."""
    runs = [[partition.runs(member) for member in range(partition.degree)] for partition in partitions]
    ends = [rows for members in runs for rows in members]
    step = max(1, sum(int((rows[:, 1] - rows[:, 0]).sum()) for rows in ends) // PIECES)
    bounds, number = _number_bounds([*ends, *(_step_bounds(rows, step) for rows in ends)])
    start, size = bounds[:-1], np.diff(bounds)
    return tuple(
        Blocks(tuple(expand(number(rows[:, 0]), number(rows[:, 1])) for rows in members), start, size)
        for members in runs
    )


def _step_bounds(runs: Integers, step: int) -> Integers:
    """The multiples of `step` inside runs."""
    begin, end = runs[runs[:, 1] - runs[:, 0] > 1].T
    return expand(begin // step + 1, -(-end // step)) * step


def _number_bounds(ends: Sequence[Integers]) -> tuple[Integers, Callable[[Integers], Integers]]:
    """The distinct ends, ascending, and the function from ends to their places among them."""
    last = max(int(rows.max(initial=-1)) for rows in ends)
    if last > SPARSE * sum(rows.size for rows in ends) + (1 << 16):
        bounds = np.unique(np.concatenate([rows.ravel() for rows in ends]))
        return bounds, lambda x: np.searchsorted(bounds, x)
    marks = np.zeros(last + 1, dtype=np.bool_)
    for rows in ends:
        marks[rows] = True
    place = np.cumsum(marks) - 1
    return np.flatnonzero(marks), lambda x: place[x]
