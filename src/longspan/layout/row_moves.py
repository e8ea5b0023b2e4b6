"""What one member of a group sends, receives and adds up so that its rows, or their gradients, come together here.

One rule serves both directions. Members who have a row fall into groups whose copies are the same: of each group one
member sends the row to a receiver, and what comes from several groups is summed. Rows of a forward movement have one
group, all members; partial gradients have a group for each member. Work is a few array operations over the rows of all
members, and indices are made for one member alone. Not covered: carrying it out (`comm/moves/row_exchange.py`).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from longspan.errors import LayoutError
from longspan.layout.partition import GOLDEN, Partition
from longspan.layout.segments import Rows

Flags = NDArray[np.bool_]


class Placement(NamedTuple):
    """Where rows go: `y[target] = x[source]`, or `+=`, pair by pair; targets are distinct."""

    source: Rows
    target: Rows


@dataclass(frozen=True, eq=False)
class Holding:
    """The rows of each member, numbered from 0 to `size` with few gaps, so that tables over them are small."""

    rows: tuple[Rows, ...]
    size: int
    ids: Rows | None = None  # (size,), where rows are not numbered by their ids

    def id_of(self, row: int) -> int:
        """The id of a row, for messages."""
        return row if self.ids is None else int(self.ids[row])

    def flags(self, member: int) -> Flags:
        """Whether the member has each row: (size,)."""
        flags = np.zeros(self.size, dtype=np.bool_)
        flags[self.rows[member]] = True
        return flags

    def first_places(self, member: int) -> Rows:
        """Where each row first is in the member's order: (size,); undefined for rows that it does not have."""
        places = np.empty(self.size, dtype=np.int64)
        rows = self.rows[member]
        places[rows[::-1]] = np.arange(len(rows) - 1, -1, -1)
        return places


@dataclass(frozen=True, eq=False)
class RowMoves:
    """One member's side of a movement of rows from x, its rows of the source, to y, its rows of the target.

    First x[fold.target] += x[fold.source] for each of `folds`, in order. Rows `leaves` of x leave, `sends[m]` of them
    to member m, one member after another; what arrives, `receives[m]` rows from m, and behind it rows `stays` of x
    are the pool: y is pool[places], zero where `places` is -1. Row `several[i]` of y has more addends: of each of
    `more` in order, pool[source] is added at several[target]. Where `widened`, some member folds, and rows in half
    precision travel in float32, so that each sum is rounded once.
    """

    folds: tuple[Placement, ...]
    leaves: Rows
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    stays: Rows
    places: Rows
    several: Rows
    more: tuple[Placement, ...]
    widened: bool


def number_rows(*partitions: Partition) -> tuple[Holding, ...]:
    """The rows of partitions as holdings that number them alike."""
    rows = [[partition.rows(member) for member in range(partition.degree)] for partition in partitions]
    total = sum(len(ids) for members in rows for ids in members)
    size, known = 1 + max((int(ids.max()) for members in rows for ids in members if len(ids)), default=-1), None
    if size > 4 * total + 65536:
        known = np.unique(np.concatenate([ids for members in rows for ids in members]))
        rows = [[np.searchsorted(known, ids) for ids in members] for members in rows]
        size = len(known)
    return tuple(Holding(tuple(members), size, known) for members in rows)


def plan_moves(source: Holding, target: Holding, me: int, groups: Sequence[Sequence[int]] | None = None) -> RowMoves:
    """This member's side of bringing rows of `source` to where `target` has them.

    `groups` are members whose copies are the same; each member is in one. What comes from several groups, and what a
    member has several times, is summed, in the order of groups. Without groups a row comes from any one member that
    has it. Rows that nobody has come as zeros. Raises LayoutError where members of a group have a row differently
    often, for then their copies differ.
    """
    shared = [range(len(source.rows))] if groups is None else [sorted(group) for group in groups]
    wanted, use_of = _distinct(target.rows[me], target.size)
    holders = _holders(source, target, wanted, me, shared)
    if groups is not None and any(holders.repeats):
        _check_copies(source, shared)
    arriving = _arriving(holders, wanted, me, shared)
    leaving = _leaving(holders, me)
    places, several, more = _addends(arriving, me, shared, use_of)
    first = source.first_places(me)
    return RowMoves(
        folds=_folds(source.rows[me], first) if groups is not None and holders.repeats[me] else (),
        leaves=first[np.concatenate(leaving)],
        sends=tuple(len(rows) for rows in leaving),
        receives=tuple(0 if member == me else len(rows) for member, rows in enumerate(arriving)),
        stays=first[wanted[arriving[me]]],
        places=places,
        several=several,
        more=more,
        widened=groups is not None and any(holders.repeats),
    )


class _Holders(NamedTuple):
    """Who has which rows, as far as one member is concerned."""

    of_wanted: list[Flags]  # for each member, whether it has each row that is wanted here
    asked: list[Rows]  # for each member, the rows of here that it wants, each once, and its group has not itself
    several: Rows  # (size,): how many members of this one's group have a row
    before: Rows  # (size,): how many of them come before this one
    repeats: list[bool]  # for each member, whether it has a row several times


def _holders(source: Holding, target: Holding, wanted: Rows, me: int, groups: Sequence[Sequence[int]]) -> _Holders:
    degree, here = len(source.rows), source.flags(me)
    several, before = np.zeros(source.size, dtype=np.int64), np.zeros(source.size, dtype=np.int64)
    of_wanted, asked, repeats = [here[:0]] * degree, [wanted[:0]] * degree, [False] * degree
    for group in groups:
        for member in group:
            flags = here if member == me else source.flags(member)
            of_wanted[member] = flags[wanted]
            repeats[member] = int(np.count_nonzero(flags)) < len(source.rows[member])
            rows = target.rows[member]
            rows = rows[here[rows]] if member != me else rows[:0]
            if me in group:
                several += flags
                before += flags if member < me else 0
                rows = rows[~flags[rows]]
            asked[member] = _distinct(rows, source.size)[0]
    return _Holders(of_wanted, asked, several, before, repeats)


def _check_copies(source: Holding, groups: Sequence[Sequence[int]]) -> None:
    for group in groups:
        if len(group) < 2:
            continue
        counts = np.stack([np.bincount(source.rows[member], minlength=source.size) for member in group])
        most = counts.max(axis=0)
        differ = (counts != most) & (counts > 0)
        if differ.any():
            place, row = (int(axis[0]) for axis in np.nonzero(differ))
            raise LayoutError(
                f"ranks {group[place]} and {group[int(counts[:, row].argmax())]} are of one slot, whose ranks carry "
                f"the same gradient, but need row {source.id_of(row)} {counts[place, row]} and {most[row]} times; let "
                f"them need it equally often, or not at all, or use gradient 'partial'"
            )


def _arriving(holders: _Holders, wanted: Rows, me: int, groups: Sequence[Sequence[int]]) -> list[Rows]:
    """For each member, the places in `wanted` of the rows that it brings: of each group one member, this one itself
    where it can."""
    arriving = [wanted[:0]] * len(holders.of_wanted)
    for group in groups:
        has = [holders.of_wanted[member] for member in group]
        several = np.stack(has).astype(np.int64).sum(axis=0)
        turn = _turn(wanted, several, me)
        absent = ~holders.of_wanted[me] if me in group else True
        before = np.zeros(len(wanted), dtype=np.int64)
        for member, flags in zip(group, has, strict=True):
            brings = flags if member == me else flags & (before == turn) & absent
            arriving[member] = np.flatnonzero(brings)
            before += flags
    return arriving


def _leaving(holders: _Holders, me: int) -> list[Rows]:
    """For each member, the rows that this one brings it, in the order in which that member wants them first."""
    return [
        rows[_turn(rows, holders.several[rows], member) == holders.before[rows]]
        for member, rows in enumerate(holders.asked)
    ]


def _turn(rows: Rows, several: Rows, receiver: int) -> Rows:
    """Which of the `several` members that have a row brings it to a receiver: they share rows evenly."""
    spread = (rows.astype(np.uint64) * GOLDEN >> np.uint64(32)).astype(np.int64) * several >> 32
    return (spread + receiver) % np.maximum(several, 1)


def _addends(
    arriving: Sequence[Rows], me: int, groups: Sequence[Sequence[int]], use_of: Rows
) -> tuple[Rows, Rows, tuple[Placement, ...]]:
    """`places`, `several` and `more` of RowMoves; row r of the result is wanted row `use_of[r]`."""
    begins = _begins(arriving, me)
    first = np.full(1 + int(use_of.max(initial=-1)), -1, dtype=np.int64)
    count = np.zeros(len(first), dtype=np.int64)
    later = list[tuple[Rows, Rows, Rows]]()
    for member in (member for group in groups for member in group):
        rows = arriving[member]
        places = begins[member] + np.arange(len(rows), dtype=np.int64)
        fresh = count[rows] == 0
        first[rows[fresh]] = places[fresh]
        if len(groups) > 1 and not fresh.all():
            later.append((rows[~fresh], places[~fresh], count[rows[~fresh]]))
        count[rows] += 1
    several = np.flatnonzero(count[use_of] > 1)
    return first[use_of], several, _rounds(later, use_of[several], len(first))


def _begins(arriving: Sequence[Rows], me: int) -> Rows:
    """Where in the pool the rows of each member begin: those that arrive, member after member, then those that stay."""
    counts = np.array([0 if member == me else len(rows) for member, rows in enumerate(arriving)], dtype=np.int64)
    begins = np.cumsum(counts) - counts
    begins[me] = counts.sum()
    return begins


def _rounds(later: Sequence[tuple[Rows, Rows, Rows]], several: Rows, wanted: int) -> tuple[Placement, ...]:
    """Second, third, … addends of the rows that have several, from (row, place, round)."""
    if not later:
        return ()
    row, place, number = (np.concatenate(column) for column in zip(*later, strict=True))
    rounds = list[Placement]()
    for round_number in range(1, int(number.max()) + 1):
        place_of = np.full(wanted, -1, dtype=np.int64)
        place_of[row[number == round_number]] = place[number == round_number]
        source = place_of[several]
        target = np.flatnonzero(source >= 0)
        rounds.append(Placement(source[target], target))
    return tuple(rounds)


def _folds(rows: Rows, first: Rows) -> tuple[Placement, ...]:
    """Second, third, … occurrences of each row, round by round, to be added to its first."""
    order = np.argsort(rows, kind="stable")
    begins = np.flatnonzero(np.diff(rows[order], prepend=-1))
    number = np.arange(len(order)) - np.repeat(begins, np.diff(np.append(begins, len(order))))
    rounds = [order[number == k] for k in range(1, int(number.max(initial=0)) + 1)]
    return tuple(Placement(source, first[rows[source]]) for source in rounds)


def _distinct(rows: Rows, size: int) -> tuple[Rows, Rows]:
    """Rows, each once, in the order in which they first occur, and for each given row its place among them."""
    first = np.empty(size, dtype=np.int64)
    first[rows[::-1]] = np.arange(len(rows) - 1, -1, -1)
    fresh = first[rows] == np.arange(len(rows))
    return rows[fresh], (np.cumsum(fresh) - 1)[first[rows]]
