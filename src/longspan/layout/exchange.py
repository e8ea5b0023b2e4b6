"""What has to move so that members who have some rows hold the rows that they need.

An Exchange is a value made from two partitions of the same members on the host. `comm/moves/row_exchange.py` carries it
out; nothing here communicates.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from longspan.errors import LayoutError
from longspan.layout.partition import Partition
from longspan.layout.row_moves import Blocks, Placement, RowMoves, cut_into_blocks, plan_moves
from longspan.layout.segments import Integers, make_read_only


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
        """Raise LayoutError for partitions of different degrees, or for needed rows that nobody has."""
        if self.have.degree != self.need.degree:
            raise LayoutError(
                f"rows of {self.have.degree} members cannot be exchanged for rows of {self.need.degree}; "
                f"describe both on the same members, with empty lists for those that hold nothing"
            )
        self._check_supply()

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle only the two partitions, without the moves planned so far."""
        return Exchange, (self.have, self.need)

    @property
    def degree(self) -> int:
        """How many members take part."""
        return self.have.degree

    def received_rows(self, rank: int) -> int:
        """Return how many rows arrive at this rank from others."""
        self._check_rank(rank)
        return sum(self.moves(rank).receives)

    def sent_rows(self, rank: int) -> int:
        """Return how many rows leave this rank, a row counted once for each receiver."""
        self._check_rank(rank)
        return sum(self.moves(rank).sends)

    def lower_bound_rows(self, rank: int) -> int:
        """Return how many distinct rows this rank needs and does not have: no exchange can bring it fewer."""
        self._check_rank(rank)
        return len(np.setdiff1d(self.need.rows(rank), self.have.rows(rank)))

    def send(self, rank: int, to: int) -> Integers:
        """Return the rows that `rank` sends to `to`, in the order of travel: indices into its rows of `have`."""
        self._check_rank(to)
        moves = self.moves(rank)
        begin = sum(moves.sends[:to])
        return make_read_only(moves.leaves[begin : begin + moves.sends[to]])

    def receive(self, rank: int, frm: int) -> Placement:
        """Return where `rank` puts the rows that `frm` sends it.

        Sources number them in the order of travel, from 0 for this sender; targets are indices into `rank`'s rows of
        `need`. A row that is needed several times has several entries.
        """
        self._check_rank(frm)
        moves = self.moves(rank)
        return _find_placement(moves, sum(moves.receives[:frm]), moves.receives[frm])

    def keep(self, rank: int) -> Placement:
        """Return the rows that stay: indices into `rank`'s rows of `have`, and where they go in its rows of `need`."""
        moves = self.moves(rank)  # rows that stay lie in the pool behind those that arrive
        place, target = _find_placement(moves, sum(moves.receives), len(moves.stays))
        return Placement(make_read_only(moves.stays[place]), target)

    @cached_property
    def counts(self) -> Integers:
        """How many rows travel: (sender, receiver), zero on the diagonal."""
        return make_read_only(np.array([self.moves(rank).sends for rank in range(self.degree)]))

    def moves(self, rank: int) -> RowMoves:
        """Return the rows that one rank sends, receives and keeps."""
        self._check_rank(rank)
        if rank not in self._moves:
            have, need = self.blocks
            self._moves[rank] = plan_moves(have, need, rank)
        return self._moves[rank]

    @cached_property
    def blocks(self) -> tuple[Blocks, ...]:
        """The rows of `have` and `need` in blocks."""
        return cut_into_blocks(self.have, self.need)

    @cached_property
    def _moves(self) -> dict[int, RowMoves]:
        return {}

    def reverse(self) -> "Exchange":
        """Return the exchange that brings the rows back.

        Raises LayoutError where a row of `have` was needed by nobody.
        """
        return Exchange(self.need, self.have)

    def _check_supply(self) -> None:
        have, need = self.blocks
        supplied = np.zeros(len(have.size), dtype=np.bool_)
        for blocks in have.members:
            supplied[blocks] = True
        for rank, blocks in enumerate(need.members):
            if not supplied[blocks].all():
                row = need.start[blocks[~supplied[blocks]][0]]
                missing = np.unique(np.concatenate([blocks[~supplied[blocks]] for blocks in need.members]))
                raise LayoutError(
                    f"row {row} is needed by rank {rank} and nobody has it ({need.size[missing].sum()} such rows in "
                    f"all); give it to a rank, or need it nowhere"
                )

    def _check_rank(self, rank: int) -> None:
        if not 0 <= rank < self.degree:
            raise LayoutError(f"rank {rank} is outside an exchange among {self.degree} (ranks 0 to {self.degree - 1})")

    def __repr__(self) -> str:
        return f"Exchange({self.degree} ranks, {int(self.counts.sum())} rows travel)"


def _find_placement(moves: RowMoves, begin: int, count: int) -> Placement:
    """Find where rows `begin` to `begin + count` of the pool of `RowMoves` go; sources ascend, from 0 for `begin`."""
    target = np.flatnonzero((moves.places >= begin) & (moves.places < begin + count))
    order = np.argsort(moves.places[target], kind="stable")
    return Placement(make_read_only(moves.places[target][order] - begin), make_read_only(target[order]))
