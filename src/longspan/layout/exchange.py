"""What has to move so that members who have some rows hold the rows that they need, and its gradients back.

One rule serves both directions. Members who have a row fall into groups whose copies are the same: of each group one
member brings the row to a receiver, and what comes from several groups is summed. A forward movement has one group, all
members; partial gradients have a group for each member. Work is a few array operations over the blocks of all members,
and indices of rows are made for only one member. `bridge/bridge.py` carries it out.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property, partial
from typing import NamedTuple

import numpy as np

from longspan.errors import LayoutError
from longspan.layout.partition import GOLDEN, Partition
from longspan.layout.segments import Flags, Integers, expand_runs

# All rows are cut into at least this many pieces, so that members can share them evenly.
PIECES = 4096


@dataclass(frozen=True, eq=False)
class Blocks:
    """Which blocks of rows each member has; block b is rows `start[b]` to `start[b] + size[b]`.

    `members[m]` are the numbers of member m's blocks in the order of its rows, a number as often as it has the rows.
    """

    members: tuple[Integers, ...]
    start: Integers
    size: Integers

    def block_starts(self, member: int) -> Integers:
        """Where each of the member's blocks begins in its order of rows."""
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
    cut_ids = [runs.ravel() for runs in all_runs]  # a cut is the id of the row before which it lies
    for runs in all_runs:
        begin, end = runs[runs[:, 1] - runs[:, 0] > 1].T  # a run of one row has no inside
        cut_ids.append(expand_runs(begin // step + 1, -(-end // step)) * step)
    cuts = np.unique(np.concatenate(cut_ids))
    start = cuts[:-1]
    size = np.diff(cuts)
    return tuple(
        Blocks(tuple(expand_runs(*np.searchsorted(cuts, runs.T)) for runs in member_runs), start, size)
        for member_runs in runs_by_member
    )


Groups = Sequence[Sequence[int]]


class Placement(NamedTuple):
    """Where rows go: `y[target] = x[source]`, or `+=`, pair by pair."""

    source: Integers
    target: Integers


@dataclass(frozen=True, eq=False)
class RowMoves:
    """One member's side of a movement of rows from x, its rows of the source, to y, its rows of the target.

    First x[target] += x[source] for each of `folds` in order. Rows `leaves` of x leave, `sends[m]` of them to member m,
    one member after another; what arrives, `receives[m]` rows from m, and behind it rows `stays` of x are the pool:
    y is pool[places], zero where `places` is -1. Row `summed_rows[i]` of y has more addends: for each of
    `further_addends` in order, pool[source] is added at summed_rows[target]. Targets of one fold, and of one of
    `further_addends`, are distinct. Where `widened`, some member folds, and rows in half precision travel in float32,
    so that each sum is rounded once.
    """

    folds: tuple[Placement, ...]
    leaves: Integers
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    stays: Integers
    places: Integers
    summed_rows: Integers
    further_addends: tuple[Placement, ...]
    widened: bool


def plan_moves(source: Blocks, target: Blocks, me: int, groups: Groups | None = None) -> RowMoves:
    """Plan this member's side of bringing rows of `source` to where `target` has them.

    `groups` are members whose copies are the same; each member is in one. What comes from several groups, and what a
    member has several times, is summed, in the order of groups. Without groups a row comes from any one member that
    has it. Rows that nobody has come as zeros. A block that a member has several times is sent once. Raises LayoutError
    where members of a group have a row differently often, for then their copies differ.
    """
    summed = groups is not None
    groups = [range(len(source.members))] if groups is None else list(map(sorted, groups))
    distinct_blocks = [blocks[_first_occurrences(blocks, source)] for blocks in source.members]
    repeats = [
        len(distinct) < len(blocks) for distinct, blocks in zip(distinct_blocks, source.members, strict=True)
    ]
    # Without repeats no member has a row more often than another.
    if summed:
        _check_copies(source, [group for group in groups if len(group) > 1 and any(repeats[m] for m in group)])
    arriving = _arriving_blocks(target, distinct_blocks, me, groups)
    leaving = _leaving_blocks(target, distinct_blocks, me, next(group for group in groups if me in group))
    places, summed_rows, further_addends = _find_addends(arriving, target, me, groups)
    begin = np.empty(len(source.size), dtype=np.int64)  # where in x each block of this member begins; others: unset
    begin[distinct_blocks[me]] = source.block_starts(me)[_first_occurrences(source.members[me], source)]
    return RowMoves(
        folds=_list_folds(source, me, begin) if summed and repeats[me] else (),
        leaves=_block_rows(begin, np.concatenate(leaving), source.size),
        sends=tuple(int(source.size[blocks].sum()) for blocks in leaving),
        receives=tuple(int(source.size[blocks].sum()) if m != me else 0 for m, blocks in enumerate(arriving)),
        stays=_block_rows(begin, arriving[me], source.size),
        places=places,
        summed_rows=summed_rows,
        further_addends=further_addends,
        widened=summed and any(repeats),
    )


def _arriving_blocks(
    target: Blocks, distinct_blocks: Sequence[Integers], me: int, groups: Groups
) -> list[Integers]:
    """Blocks are in the order in which they are first needed. Of each group one member brings a block: this member
    itself if it has the block, else one that has it, chosen so that each sends as much."""
    needed = target.members[me][_first_occurrences(target.members[me], target)]
    order = np.full(len(target.size), -1, dtype=np.int64)
    order[needed] = np.arange(len(needed))
    arriving = [blocks[order[blocks] >= 0] for blocks in distinct_blocks]
    for group in groups:
        holder_counts, holder_numbers = _count_holders([arriving[member] for member in group], target)
        is_here = np.zeros(len(target.size), dtype=np.bool_)
        if me in group:
            is_here[arriving[me]] = True
        for member, number in zip(group, holder_numbers, strict=True):
            blocks = arriving[member]
            if member != me:
                blocks = blocks[(_choose_holder(blocks, holder_counts, me) == number) & ~is_here[blocks]]
            arriving[member] = blocks[np.argsort(order[blocks])]
    return arriving


def _leaving_blocks(
    target: Blocks, distinct_blocks: Sequence[Integers], me: int, group: Sequence[int]
) -> list[Integers]:
    """The counterpart of `_arriving_blocks`: a member of `group`, that of `me`, brings a block that it has
    to itself."""
    holder_counts, holder_numbers = _count_holders([distinct_blocks[member] for member in group], target)
    # Which of a block's holders in the group `me` is, counted from 0; −1 where `me` does not have the block.
    own_number = np.full(len(target.size), -1, dtype=np.int64)
    own_number[distinct_blocks[me]] = holder_numbers[group.index(me)]
    # Marks the blocks that the receiver has; marks of earlier receivers differ, so the array is not cleared.
    holder = np.full(len(target.size), -1, dtype=np.int64)
    leaving = list[Integers]()
    for member, blocks in enumerate(target.members):
        blocks = blocks[own_number[blocks] >= 0]
        if member in group:
            holder[distinct_blocks[member]] = member
            blocks = blocks[holder[blocks] != member]
        blocks = blocks[_first_occurrences(blocks, target)]
        leaving.append(blocks[_choose_holder(blocks, holder_counts, member) == own_number[blocks]])
    return leaving


def _count_holders(distinct_blocks: Sequence[Integers], blocks: Blocks) -> tuple[Integers, list[Integers]]:
    """Also count, for each of a member's blocks, the members before it that have the block."""
    holder_counts = np.zeros(len(blocks.size), dtype=np.int64)
    holders_before = list[Integers]()
    for numbers in distinct_blocks:
        holders_before.append(holder_counts[numbers])
        holder_counts[numbers] += 1
    return holder_counts, holders_before


def _choose_holder(blocks: Integers, holder_counts: Integers, receiver: int) -> Integers:
    """A hash of the block spreads blocks evenly over holders, and the receiver shifts it, so that receivers of one
    block ask different holders. A block without holders gets any number: no member sends it."""
    count = holder_counts[blocks]
    # The upper 32 bits of the hash, scaled from 2^32 to the count.
    spread = (blocks.astype(np.uint64) * GOLDEN >> np.uint64(32)).astype(np.int64) * count >> 32
    return (spread + receiver) % np.maximum(count, 1)


def _find_addends(
    arriving: Sequence[Integers], target: Blocks, me: int, groups: Groups
) -> tuple[Integers, Integers, tuple[Placement, ...]]:
    """The first addend of a block is copied, further ones are added, in the order of groups."""
    blocks, begins, numbers = _list_addends(arriving, target.size, me, groups)

    def pool_begins(number: int) -> Integers:
        """Where in the pool each block's addend of this number begins; −1 where the block has none."""
        begin = np.full(len(target.size), -1, dtype=np.int64)
        has_number = numbers == number
        begin[blocks[has_number]] = begins[has_number]
        return begin

    first = pool_begins(0)
    needed = target.members[me]
    places = _block_rows(first, needed, target.size)
    places[np.repeat(first[needed] < 0, target.size[needed])] = -1
    has_several = np.bincount(blocks, minlength=len(target.size))[needed] > 1
    summed_blocks = needed[has_several]
    sizes = target.size[summed_blocks]
    row_begins = target.block_starts(me)[has_several]
    summed_rows = expand_runs(row_begins, row_begins + sizes)
    # A target is an index into `summed_rows`, which lists the rows of these blocks one block after another.
    ends = np.cumsum(sizes)
    further_addends = list[Placement]()
    for number in range(1, int(numbers.max(initial=0)) + 1):
        begin = pool_begins(number)
        has_addend = begin[summed_blocks] >= 0
        rows = expand_runs((ends - sizes)[has_addend], ends[has_addend])
        further_addends.append(Placement(_block_rows(begin, summed_blocks[has_addend], target.size), rows))
    return places, summed_rows, tuple(further_addends)


def _list_addends(arriving: Sequence[Integers], size: Integers, me: int, groups: Groups) -> Integers:
    """(3, n) in the order of groups: a block's number, where in the pool it begins, and how often it is
    listed before."""
    pool_rows = np.array([int(size[blocks].sum()) for blocks in arriving], dtype=np.int64)
    pool_rows[me] = 0
    pool_begins = np.cumsum(pool_rows) - pool_rows
    pool_begins[me] = pool_rows.sum()  # rows that arrive come first, member after member, then those that stay
    count = np.zeros(len(size), dtype=np.int64)
    columns = [np.empty((3, 0), dtype=np.int64)]
    for member in (member for group in groups for member in group):
        blocks = arriving[member]
        sizes = size[blocks]
        begins = pool_begins[member] + np.cumsum(sizes) - sizes
        columns.append(np.stack([blocks, begins, count[blocks]]))
        count[blocks] += 1
    return np.concatenate(columns, axis=1)


def _list_folds(source: Blocks, me: int, begin: Integers) -> tuple[Placement, ...]:
    """One fold has the second occurrences of rows here, one the third, and so on, so that targets of one fold are
    distinct."""
    blocks = source.members[me]
    row_begins = source.block_starts(me)
    order = np.argsort(blocks, kind="stable")  # occurrences of one block follow each other
    firsts = np.flatnonzero(np.diff(blocks[order], prepend=-1))
    number = np.arange(len(order)) - np.repeat(firsts, np.diff(np.append(firsts, len(order))))
    occurrences = [order[number == k] for k in range(1, int(number.max(initial=0)) + 1)]
    return tuple(
        Placement(
            expand_runs(row_begins[repeats], row_begins[repeats] + source.size[blocks[repeats]]),
            _block_rows(begin, blocks[repeats], source.size),
        )
        for repeats in occurrences
    )


def _block_rows(begin: Integers, blocks: Integers, size: Integers) -> Integers:
    return expand_runs(begin[blocks], begin[blocks] + size[blocks])


def _first_occurrences(blocks: Integers, all_blocks: Blocks) -> Flags:
    place = np.empty(len(all_blocks.size), dtype=np.int64)
    # numpy keeps the last of several values that are assigned to one index
    place[blocks[::-1]] = np.arange(len(blocks) - 1, -1, -1)
    return place[blocks] == np.arange(len(blocks))


def _check_copies(source: Blocks, groups: Groups) -> None:
    """The rows of a group's members in `source` are copies."""
    for group in groups:
        counts = np.stack([np.bincount(source.members[member], minlength=len(source.size)) for member in group])
        most = counts.max(axis=0)
        are_fewer = (counts != most) & (counts > 0)
        if are_fewer.any():
            fewer, block = (int(axis[0]) for axis in np.nonzero(are_fewer))
            raise LayoutError(
                f"ranks {group[fewer]} and {group[int(counts[:, block].argmax())]} are of one slot, whose ranks carry "
                f"the same gradient, but need row {source.start[block]} {counts[fewer, block]} and {most[block]} "
                f"times; let them need it equally often, or not at all, or use gradient 'partial'"
            )


@dataclass(frozen=True, repr=False)
class Exchange:
    """The rows to send and receive so that holders of `have` hold `need`.

    >>> have, need = Partition.from_rows([[0, 1], [2], []]), Partition.from_rows([[2], [2, 0], [1]])
    >>> exchange = Exchange(have, need)
    >>> exchange.received_rows(1), exchange.moves(0).sends
    (1, (0, 1, 1))

    A rank that has a row keeps it locally; any other row arrives once, from one rank that has it, however often it is
    needed. Of several holders a fixed rule of the row id and the receiver picks one, spread evenly over them. Raises
    LayoutError where the partitions have different degrees or where nobody has a needed row.
    """

    have: Partition
    need: Partition

    def __post_init__(self) -> None:
        if self.have.degree != self.need.degree:
            raise LayoutError(
                f"rows of {self.have.degree} members cannot be exchanged for rows of {self.need.degree}; "
                f"describe both on the same members, with empty lists for those that hold nothing"
            )
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

    def __reduce__(self) -> tuple[object, ...]:
        """Moves planned so far are left out."""
        return Exchange, (self.have, self.need)

    @property
    def degree(self) -> int:
        return self.have.degree

    def received_rows(self, rank: int) -> int:
        """Return how many rows arrive at this rank from others."""
        return sum(self.moves(rank).receives)

    def sent_rows(self, rank: int) -> int:
        """Return how many rows leave this rank, a row counted once for each receiver."""
        return sum(self.moves(rank).sends)

    def lower_bound_rows(self, rank: int) -> int:
        """Return how many distinct rows this rank needs and does not have: no exchange can bring it fewer."""
        return len(np.setdiff1d(self.need.rows(rank), self.have.rows(rank)))

    def moves(self, rank: int) -> RowMoves:
        """Plan one rank's side of the exchange. Raises LayoutError for a rank that is not among its ranks."""
        if not 0 <= rank < self.degree:
            raise LayoutError(
                f"rank {rank} is outside an exchange among {self.degree} (ranks 0 to {self.degree - 1})"
            )
        return self._moves_of_rank(rank)

    @cached_property
    def blocks(self) -> tuple[Blocks, ...]:
        return cut_into_blocks(self.have, self.need)

    @cached_property
    def _moves_of_rank(self) -> Callable[[int], RowMoves]:
        return cache(partial(plan_moves, *self.blocks))

    def __repr__(self) -> str:
        return f"Exchange({self.degree} ranks, {sum(map(self.sent_rows, range(self.degree)))} rows travel)"
