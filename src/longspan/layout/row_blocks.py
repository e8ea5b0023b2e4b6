"""The rows of several partitions as numbered blocks: rows that stay together in every run of every member.

Members with long runs are then described by few numbers, whatever the number of rows. Which member sends which block
is decided in `row_moves.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from longspan.layout.partition import Partition
from longspan.layout.segments import Integers, expand_runs

PIECES = 4096  # into which all rows are cut at least, so that members can share them evenly
SPARSE = 4  # a table over all row ids is made unless they are more than this many times the cuts


@dataclass(frozen=True, eq=False)
class Blocks:
    """The blocks of each member's rows, in its order; block b is rows `start[b]` to `start[b] + size[b]`."""

    members: tuple[Integers, ...]
    start: Integers
    size: Integers

    def block_begins(self, member: int) -> Integers:
        """Return where each of the member's blocks begins in its order of rows."""
        sizes = self.size[self.members[member]]
        return np.cumsum(sizes) - sizes


def cut_into_blocks(*partitions: Partition) -> tuple[Blocks, ...]:
    """Cut the rows of partitions into blocks, numbered alike for all of them.

    Rows are cut wherever a run of any member begins or ends, and at every multiple of a step inside runs, so that
    several members that have a long run can each send a part of it. Here with a step of 4:

        row     0   1   2   3   4   5   6   7   8   9
        have    |------ member 0 -------|-- member 1 ---|
        need            |---- member 0 -----|
        cuts    0       2       4       6   7   8       10
        block   |   0   |   1   |   2   | 3 | 4 |   5   |

    Member 0 of `have` has blocks 0, 1 and 2; member 0 of `need` needs blocks 1, 2 and 3.
    """
    runs_by_member = [[partition.runs(member) for member in range(partition.degree)] for partition in partitions]
    all_runs = [runs for member_runs in runs_by_member for runs in member_runs]
    rows = sum(int((runs[:, 1] - runs[:, 0]).sum()) for runs in all_runs)
    step = max(1, rows // PIECES)
    cuts, cut_number = _number_cuts([*all_runs, *(_cuts_inside_runs(runs, step) for runs in all_runs)])
    start, size = cuts[:-1], np.diff(cuts)
    return tuple(
        Blocks(tuple(expand_runs(cut_number(runs[:, 0]), cut_number(runs[:, 1])) for runs in member_runs), start, size)
        for member_runs in runs_by_member
    )


def _cuts_inside_runs(runs: Integers, step: int) -> Integers:
    """Return the multiples of `step` inside runs (n, 2); a run of one row has no inside."""
    begin, end = runs[runs[:, 1] - runs[:, 0] > 1].T
    return expand_runs(begin // step + 1, -(-end // step)) * step


def _number_cuts(cuts: Sequence[Integers]) -> tuple[Integers, Callable[[Integers], Integers]]:
    """Number the distinct cuts, ascending; return them, and a function from cuts to their numbers.

    A cut is the id of the row before which it lies. The function looks numbers up in a table over all row ids, or, if
    the cuts are few among them, by bisection. Up to 65,536 ids the table is always small enough.
    """
    last = max(int(ids.max(initial=-1)) for ids in cuts)
    if last > SPARSE * sum(ids.size for ids in cuts) + (1 << 16):
        distinct = np.unique(np.concatenate([ids.ravel() for ids in cuts]))
        return distinct, lambda x: np.searchsorted(distinct, x)
    is_cut = np.zeros(last + 1, dtype=np.bool_)
    for ids in cuts:
        is_cut[ids] = True
    number = np.cumsum(is_cut) - 1
    return np.flatnonzero(is_cut), lambda x: number[x]
