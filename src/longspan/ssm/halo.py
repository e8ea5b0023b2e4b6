"""The rows before each run that a convolution reads: who sends which to whom, decided in integers."""

import numpy as np

from longspan.comm import to_device
from longspan.layout.segments import Rows, expand
from longspan.ssm.chains import Chains
from longspan.ssm.kernels.convolutions import Before


class Halo:
    """The rows before each run of a member, `width` of them where its document has as many: who sends which to whom.

    `sends[m]` of this member's rows go to member m, those of `rows` one after another; `receives[m]` arrive. A row
    that this member needs and holds itself goes the same way. `before`: where the rows that arrive lie.
    """

    def __init__(self, chains: Chains, width: int) -> None:
        self._runs, self._width = chains.runs, width
        needs = [self._needs(member) for member in range(chains.degree)]
        me, runs = chains.member, self._runs
        owners = [runs.member[run] for run, _ in needs]
        leaving = [np.flatnonzero(owner == me) for owner in owners]
        self.sends = [len(index) for index in leaving]
        self.receives = np.bincount(owners[me], minlength=chains.degree).tolist()
        rows = [runs.offset[run[i]] + at[i] - runs.start[run[i]] for (run, at), i in zip(needs, leaving, strict=True)]
        self.rows = to_device(np.concatenate(rows), chains.device)
        self.travels = width > 0 and bool((runs.place > 0).any())  # whether any member sends any row
        before = self._before(chains, needs[me], owners[me])
        self.before = Before(
            width, *(to_device(x, chains.device) for x in self._source(chains, before, sum(self.receives)))
        )

    def _needs(self, member: int) -> tuple[Rows, Rows]:
        """The rows before a member's runs, in held order: the run that has each, and its position."""
        runs, own = self._runs, self._runs.held_by(member)
        first = np.maximum(runs.start[own] - self._width, 0)
        position = expand(first, runs.start[own])
        document = np.repeat(runs.document[own], runs.start[own] - first)
        stride = int(runs.stop.max(initial=0)) + 1
        at = np.searchsorted(runs.document * stride + runs.start, document * stride + position, side="right") - 1
        return at, position

    def _before(self, chains: Chains, needs: tuple[Rows, Rows], owners: Rows) -> Rows:
        """(runs, width): rows of [local rows | arrived rows | one zero row] before each run."""
        runs, mine, width = self._runs, chains.mine, self._width
        rows = int(chains.lengths.sum())
        arrived = np.empty(len(owners), dtype=np.int64)  # rows arrive member after member
        arrived[np.argsort(owners, kind="stable")] = np.arange(len(owners))
        before = np.full((len(mine), width), rows + len(owners), dtype=np.int64)
        sizes = np.minimum(runs.start[mine], width)
        columns = np.concatenate([[0], np.cumsum(sizes)])
        for run, size in enumerate(sizes.tolist()):
            before[run, width - size :] = rows + arrived[columns[run] : columns[run] + size]
        return before

    def _source(self, chains: Chains, before: Rows, arriving: int) -> tuple[Rows, ...]:
        """As `Before` has them."""
        ends = np.cumsum(chains.lengths)
        pieces = [
            x for i, end in enumerate(ends.tolist()) for x in (before[i], np.arange(end - chains.lengths[i], end))
        ]
        source = np.concatenate([np.zeros(0, dtype=np.int64), *pieces])
        rows = int(chains.lengths.sum())
        arrived = np.flatnonzero((before >= rows) & (before < rows + arriving))
        run, column = np.divmod(arrived[np.argsort(before.reshape(-1)[arrived])], max(self._width, 1))
        return source, np.flatnonzero(source < rows), run, column + 1


def halo_of(chains: Chains, width: int) -> Halo:
    """The `width` rows before each run of a member, worked out once."""
    if width not in chains.halos:
        chains.halos[width] = Halo(chains, width)
    return chains.halos[width]
