"""The rows before each run that a convolution reads: who sends which to whom, decided in integers."""

import numpy as np

from longspan.comm import to_device
from longspan.layout.segments import Rows, expand
from longspan.ssm.chains import Chains
from longspan.ssm.kernels.convolutions import Before, FirstRows


class Halo:
    """The rows before each run of a member, `width` of them where its document has as many: who sends which to whom.

    `sends[m]` of this member's rows go to member m, those of `rows` one after another; `receives[m]` arrive. A row
    that this member needs and holds itself goes the same way. `before`: where the rows that arrive lie; `alone`: the
    same for rows that are convolved while they travel, with zeros in their place; `first`: what reads them.
    """

    def __init__(self, chains: Chains, width: int) -> None:
        self._runs, self._width, self._device = chains.runs, width, chains.device
        needs = [self._needs(member) for member in range(chains.degree)]
        me, runs = chains.member, self._runs
        owners = [runs.member[run] for run, _ in needs]
        leaving = [np.flatnonzero(owner == me) for owner in owners]
        self.sends = [len(index) for index in leaving]
        self.receives = np.bincount(owners[me], minlength=chains.degree).tolist()
        rows = [runs.offset[run[i]] + at[i] - runs.start[run[i]] for (run, at), i in zip(needs, leaving, strict=True)]
        self.rows = to_device(np.concatenate(rows), chains.device)
        self.travels = width > 0 and bool((runs.place > 0).any())  # whether any member sends any row
        arrived = self._arrived(chains, owners[me])
        self.before = self._placed(chains.lengths, arrived)
        self.alone = self._placed(chains.lengths, np.full_like(arrived, -1))
        self.first = self._first(chains.lengths, arrived)

    def _needs(self, member: int) -> tuple[Rows, Rows]:
        """The rows before a member's runs, in held order: the run that has each, and its position."""
        runs, own = self._runs, self._runs.held_by(member)
        first = np.maximum(runs.start[own] - self._width, 0)
        position = expand(first, runs.start[own])
        document = np.repeat(runs.document[own], runs.start[own] - first)
        stride = int(runs.stop.max(initial=0)) + 1
        at = np.searchsorted(runs.document * stride + runs.start, document * stride + position, side="right") - 1
        return at, position

    def _arrived(self, chains: Chains, owners: Rows) -> Rows:
        """(runs, width): which of the rows that arrive, member after member, lie before each run; −1 for none."""
        runs, mine, width = self._runs, chains.mine, self._width
        arrived = np.empty(len(owners), dtype=np.int64)
        arrived[np.argsort(owners, kind="stable")] = np.arange(len(owners))
        before = np.full((len(mine), width), -1, dtype=np.int64)
        sizes = np.minimum(runs.start[mine], width)
        before[np.arange(width) >= width - sizes[:, None]] = arrived
        return before

    def _placed(self, lengths: Rows, arrived: Rows) -> Before:
        """Runs of these lengths, one after another, behind the rows that arrive."""
        rows, ends, count = int(lengths.sum()), np.cumsum(lengths), int((arrived >= 0).sum())
        before = np.where(arrived >= 0, rows + arrived, rows + count)
        pieces = [x for i, end in enumerate(ends.tolist()) for x in (before[i], np.arange(end - lengths[i], end))]
        source = np.concatenate([np.zeros(0, dtype=np.int64), *pieces])
        here = np.flatnonzero(arrived >= 0)
        run, column = np.divmod(here[np.argsort(arrived.reshape(-1)[here])], max(self._width, 1))
        indices = source, np.flatnonzero(source < rows), run, column + 1
        return Before(self._width, *(to_device(x, self._device) for x in indices))

    def _first(self, lengths: Rows, arrived: Rows) -> FirstRows:
        """Of the runs that rows arrive for."""
        reading = np.flatnonzero((arrived >= 0).any(1))
        start, count = (np.cumsum(lengths) - lengths)[reading], np.minimum(lengths[reading], self._width)
        arrived = np.ascontiguousarray(arrived[reading])
        rows = to_device(expand(start, start + count), self._device)
        places = (to_device(x, self._device) for x in (start, count, arrived))
        return FirstRows(rows, self._placed(count, arrived), *places)


def halo_of(chains: Chains, width: int) -> Halo:
    """The `width` rows before each run of a member, worked out once."""
    if width not in chains.halos:
        chains.halos[width] = Halo(chains, width)
    return chains.halos[width]
