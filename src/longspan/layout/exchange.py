"""What has to move so that members who have some rows hold the rows that they need.

An Exchange is a value made from two partitions of the same members on the host. `comm/moves/row_exchange.py` carries it
out; nothing here communicates.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from longspan.errors import LayoutError
from longspan.layout.partition import GOLDEN, Partition
from longspan.layout.segments import Rows, sealed

_NOTHING = sealed(np.empty(0, dtype=np.int64))


class Placement(NamedTuple):
    """Where rows go: `y[target] = x[source]`, pair by pair; one source may go to several targets."""

    source: Rows
    target: Rows


@dataclass(frozen=True, repr=False)
class Exchange:
    """The rows to send and receive so that holders of `have` hold `need`.

    >>> have, need = Partition.from_rows([[0, 1], [2], []]), Partition.from_rows([[2], [2, 0], [1]])
    >>> exchange = Exchange(have, need)
    >>> exchange.received_rows(1), exchange.send(0, to=1).tolist(), exchange.keep(1)
    (1, [0], Placement(source=array([0]), target=array([0])))

    A rank that has a row keeps it locally; any other row arrives once, from one rank that has it, however often it is
    needed. Of several holders a fixed rule of the row id and the receiver picks one, spread evenly over them. Raises
    LayoutError where the partitions have different degrees or where nobody has a needed row.

    The backward of the movement sends the same rows the other way: the gradient of what `receive(rank, frm)` placed,
    summed per source row, goes from `rank` to `frm` and is added at `send(frm, to=rank)`.
    """

    have: Partition
    need: Partition

    def __post_init__(self) -> None:
        if self.have.degree != self.need.degree:
            raise LayoutError(
                f"rows of {self.have.degree} members cannot be exchanged for rows of {self.need.degree}; "
                f"describe both on the same members, with empty lists for those that hold nothing"
            )
        _ = self._travel  # refuses a row that nobody has

    def __reduce__(self) -> tuple[object, ...]:
        return Exchange, (self.have, self.need)

    @property
    def degree(self) -> int:
        """How many members take part."""
        return self.have.degree

    def received_rows(self, rank: int) -> int:
        """How many rows arrive at this rank from others."""
        self._check(rank)
        return int(self.counts[:, rank].sum())

    def sent_rows(self, rank: int) -> int:
        """How many rows leave this rank, a row counted once for each receiver."""
        self._check(rank)
        return int(self.counts[rank].sum())

    def lower_bound_rows(self, rank: int) -> int:
        """How many distinct rows this rank needs and does not have: no exchange can bring it fewer."""
        self._check(rank)
        return len(np.setdiff1d(self.need.rows(rank), self.have.rows(rank)))

    def send(self, rank: int, to: int) -> Rows:
        """Indices in `rank`'s order of `have` of the rows that go to `to`, in the order in which they travel."""
        if rank == to:
            return _NOTHING
        begin, end = self._entries(rank, to)
        return sealed(self._travel.source[begin:end])

    def receive(self, rank: int, frm: int) -> Placement:
        """Where the rows that arrive from `frm`, in the order in which they travel, go in `rank`'s order of `need`."""
        if rank == frm:
            return Placement(_NOTHING, _NOTHING)
        begin, end = self._entries(frm, rank)
        entry, target = self._placed(begin, end)
        return Placement(sealed(entry - begin), target)

    def keep(self, rank: int) -> Placement:
        """Rows that stay: indices in `rank`'s order of `have`, and where they go in its order of `need`."""
        entry, target = self._placed(*self._entries(rank, rank))
        return Placement(sealed(self._travel.source[entry]), target)

    @cached_property
    def counts(self) -> Rows:
        """How many rows travel: (sender, receiver), zero on the diagonal."""
        table = np.bincount(self._travel.block, minlength=self.degree**2).reshape(self.degree, self.degree).T.copy()
        np.fill_diagonal(table, 0)
        return sealed(table)

    @cached_property
    def _travel(self) -> "_Travel":
        return _travel(self.have, self.need)

    def reverse(self) -> "Exchange":
        """The exchange that brings the rows back. Raises LayoutError where a row of `have` was needed by nobody."""
        return Exchange(self.need, self.have)

    def _entries(self, sender: int, receiver: int) -> tuple[int, int]:
        """Where in `_travel` the rows from sender to receiver begin and end."""
        self._check(sender)
        self._check(receiver)
        block = receiver * self.degree + sender
        begin, end = np.searchsorted(self._travel.block, [block, block + 1])
        return int(begin), int(end)

    def _placed(self, begin: int, end: int) -> tuple[Rows, Rows]:
        first, last = np.searchsorted(self._travel.place_of, [begin, end])
        return self._travel.place_of[first:last], sealed(self._travel.target[first:last])

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.degree:
            raise LayoutError(f"rank {rank} is outside an exchange among {self.degree} (ranks 0 to {self.degree - 1})")

    def __repr__(self) -> str:
        return f"Exchange({self.degree} ranks, {int(self.counts.sum())} rows travel)"


class _Travel(NamedTuple):
    """One entry per row and receiver, kept rows too, ordered by receiver, sender and first target at the receiver."""

    block: Rows  # receiver * degree + sender
    source: Rows  # of the row in the sender's order of have
    place_of: Rows  # per needed row, in the same order: the entry that brings it
    target: Rows  # per needed row: its place in the receiver's order of need


class _MemberRows(NamedTuple):
    """Rows of all members end to end."""

    row: Rows
    member: Rows
    place: Rows  # in the member's order


def _member_rows(partition: Partition) -> _MemberRows:
    members = np.arange(partition.degree, dtype=np.int64)
    counts = np.array(partition.counts, dtype=np.int64)
    row = np.concatenate([partition.rows(member) for member in range(partition.degree)])
    place = np.arange(len(row), dtype=np.int64) - np.repeat(np.cumsum(counts) - counts, counts)
    return _MemberRows(row, np.repeat(members, counts), place)


def _travel(have: Partition, need: Partition) -> _Travel:
    degree, have_rows, need_rows = have.degree, _member_rows(have), _member_rows(need)
    ids = np.sort(have_rows.row)
    ids = ids[np.diff(ids, prepend=-1) != 0]
    row = np.searchsorted(ids, have_rows.row)
    want = _find(ids, need_rows)
    holding, first_held = np.unique(row * degree + have_rows.member, return_index=True)
    arrival, first_wanted, entry = np.unique(need_rows.member * len(ids) + want, return_index=True, return_inverse=True)
    receiver, row = np.divmod(arrival, max(len(ids), 1))
    holder = _holder(holding, ids, row, receiver, degree)
    block = receiver * degree + holding[holder] % degree
    order = np.lexsort((first_wanted, block))
    place_of = np.argsort(order)[entry]
    pairs = np.argsort(place_of, kind="stable")
    source = have_rows.place[first_held[holder[order]]]
    return _Travel(block[order], source, place_of[pairs], need_rows.place[pairs])


def _find(ids: Rows, need_rows: _MemberRows) -> Rows:
    """Place of each wanted row among the row ids that somebody has."""
    want = np.searchsorted(ids, need_rows.row)
    missing = want == len(ids)
    missing[~missing] = ids[want[~missing]] != need_rows.row[~missing]
    if missing.any():
        at = int(np.flatnonzero(missing)[0])
        raise LayoutError(
            f"row {need_rows.row[at]} is needed by rank {need_rows.member[at]} and nobody has it "
            f"({len(np.unique(need_rows.row[missing]))} such rows in all); give it to a rank, or need it nowhere"
        )
    return want


def _holder(holding: Rows, ids: Rows, row: Rows, receiver: Rows, degree: int) -> Rows:
    """Which entry of `holding` (row * degree + member, sorted) serves each row and receiver."""
    first = np.searchsorted(holding, row * degree)
    several = np.searchsorted(holding, (row + 1) * degree) - first
    spread = (ids[row].astype(np.uint64) * GOLDEN >> np.uint64(32)).astype(np.int64) * several >> 32
    picked = first + (spread + receiver) % np.maximum(several, 1)
    local = np.minimum(np.searchsorted(holding, row * degree + receiver), max(len(holding) - 1, 0))
    return np.where(holding[local] == row * degree + receiver, local, picked) if len(holding) else picked
