"""Runs of rows of a group's members in the order of their documents, decided in integers.

A *chain* is a document's runs by position, whoever holds them; a run's *place* is its number in its chain. What a run
needs of those before it (a state, a few rows) and what it owes to those after it follow from places alone. This module
moves no tensors (`state_pass.py`, `conv.py`).
"""

from functools import cached_property
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from longspan.comm import SequenceShard, ShardPart, to_device, world_of
from longspan.comm.groups.channel import Channel
from longspan.layout.segments import Rows, expand
from longspan.ssm.kernels.runs import LocalRuns

Flags = npt.NDArray[np.bool_]


class Runs(NamedTuple):
    """Runs of all members, chain after chain, each in the order of its positions: arrays of equal length."""

    member: Rows
    document: Rows
    start: Rows
    stop: Rows
    offset: Rows  # first row among the member's
    place: Rows
    last: Flags

    def held_by(self, member: int) -> Rows:
        """A member's runs among all, in the order in which it holds them."""
        own = np.flatnonzero(self.member == member)
        return own[np.argsort(self.offset[own], kind="stable")]


class Chains:
    """The chains of one group, and which of their runs this member holds. Made once per shard, for all layers."""

    def __init__(self, part: ShardPart, device: torch.device) -> None:
        self.part, self.device, self.member = part, device, part.member
        self.degree = part.degree
        self._halos: dict[int, Halo] = {}

    @property
    def channel(self) -> Channel:
        """Among the members. Raises CommError where the world has been left."""
        return world_of(self.part.world_key).channels.between(self.part.group.slots)

    @cached_property
    def runs(self) -> Runs:
        """Every run of every member; of padding rows and of a group with one member, those here."""
        segments = [self.part.segments(member) for member in range(self.degree)]
        columns = [
            (np.full(len(s), member), s.document, s.start, s.stop, s.offset) for member, s in enumerate(segments)
        ]
        member, document, start, stop, offset = (np.concatenate(column) for column in zip(*columns, strict=True))
        order = np.lexsort((start, document))
        member, document, start, stop, offset = (x[order] for x in (member, document, start, stop, offset))
        first = np.diff(document, prepend=-1) != 0
        place = np.arange(len(order)) - np.maximum.accumulate(np.where(first, np.arange(len(order)), 0))
        last = np.append(first[1:], np.ones(min(1, len(first)), dtype=bool))
        return Runs(member, document, start, stop, offset, place, last)

    @cached_property
    def mine(self) -> Rows:
        """This member's runs among all, in the order in which it holds them."""
        return self.runs.held_by(self.member)

    @cached_property
    def lengths(self) -> Rows:
        """Rows of each of this member's runs, in held order."""
        return (self.runs.stop - self.runs.start)[self.mine]

    @cached_property
    def local_runs(self) -> LocalRuns:
        """This member's runs, as kernels take them."""
        shared = (self.runs.place > 0) | ~self.runs.last
        return LocalRuns(self.lengths, self.device, shared[self.mine])

    @cached_property
    def forward(self) -> "Passing":
        """States that runs leave to those after them; the first of a chain needs no transition for that."""
        return Passing(self, leaves=~self.runs.last, carries=(self.runs.place > 0) & ~self.runs.last)

    @cached_property
    def backward(self) -> "Passing":
        """What runs owe to the state that entered them; a last one's transition moves nothing."""
        return Passing(self, leaves=self.runs.place > 0, carries=(self.runs.place > 0) & ~self.runs.last)

    def halo(self, width: int) -> "Halo":
        """The `width` rows before each run of this member."""
        if width not in self._halos:
            self._halos[width] = Halo(self, width)
        return self._halos[width]


class Passing:
    """Which runs give the others a state, and a transition besides, and how all of them lie in the gathered rows."""

    def __init__(self, chains: Chains, leaves: Flags, carries: Flags) -> None:
        self.chains, self._leaves, self._carries = chains, leaves, carries
        mine = chains.mine
        self.leaving = np.flatnonzero(leaves[mine])  # of this member's runs, in held order
        self.carrying = np.flatnonzero(carries[mine])

    @property
    def any(self) -> bool:
        """Whether the members have anything to give each other."""
        return bool(self._leaves.any())

    def counts(self, state_rows: int, transition_rows: int) -> list[int]:
        """Rows that each member gives: its states one after another, then its transitions."""
        runs, members = self.chains.runs, self.chains.degree
        states = np.bincount(runs.member[self._leaves], minlength=members) * state_rows
        return (states + np.bincount(runs.member[self._carries], minlength=members) * transition_rows).tolist()

    def places(self, state_rows: int, transition_rows: int, starts: tuple[int, ...]) -> tuple[Rows, Rows]:
        """The first gathered row of each run's state and of its transition; −1 for what is not given."""
        runs = self.chains.runs
        states, transitions = np.full(len(runs.member), -1), np.full(len(runs.member), -1)
        for member, start in enumerate(starts):
            held = runs.held_by(member)
            leaving, carrying = held[self._leaves[held]], held[self._carries[held]]
            states[leaving] = start + np.arange(len(leaving)) * state_rows
            transitions[carrying] = start + len(leaving) * state_rows + np.arange(len(carrying)) * transition_rows
        return states, transitions

    @cached_property
    def own_chains(self) -> Rows:
        """Chains of several runs of which this member has one: (chains, most runs) of runs, −1 past a chain's end.

        Longer chains come first, so that those with a run at some place are the first few.
        """
        runs = self.chains.runs
        heads = np.flatnonzero(runs.place == 0)
        sizes = np.diff(np.append(heads, len(runs.place)))
        held = np.zeros(len(heads), dtype=bool)
        held[np.searchsorted(heads, self.chains.mine, side="right") - 1] = True
        keep = np.flatnonzero(held & (sizes > 1))
        keep = keep[np.argsort(-sizes[keep], kind="stable")]
        table = np.full((len(keep), int(sizes[keep].max(initial=0))), -1, dtype=np.int64)
        table[np.repeat(np.arange(len(keep)), sizes[keep]), expand(np.zeros_like(keep), sizes[keep])] = expand(
            heads[keep], heads[keep] + sizes[keep]
        )
        return table

    @cached_property
    def held(self) -> Rows:
        """For each run of all, its number among this member's; −1 for another member's."""
        number = np.full(len(self.chains.runs.member), -1)
        number[self.chains.mine] = np.arange(len(self.chains.mine))
        return number


class Halo:
    """The rows before each run of a member, `width` of them where its document has as many: who sends which to whom.

    `sends[m]` of this member's rows go to member m, those of `rows` one after another; `receives[m]` arrive. A row
    that this member needs and holds itself goes the same way. `source` (T + runs · width,) is what a convolution
    reads: for each run the rows before it, then its own, as rows of [local rows | arrived rows | one zero row];
    `kept` (T,) are the places of the local rows in it, `before` (runs · width,) those before each run alone.
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
        before = self._before(chains, needs[me], owners[me])
        source, kept = self._source(chains, before)
        self.source, self.kept = to_device(source, chains.device), to_device(kept, chains.device)
        self.before = to_device(before.reshape(-1), chains.device)

    @property
    def travels(self) -> bool:
        """Whether any row is sent at all, by any member."""
        return bool((self._runs.place > 0).any())

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

    def _source(self, chains: Chains, before: Rows) -> tuple[Rows, Rows]:
        ends = np.cumsum(chains.lengths)
        pieces = [
            x for i, end in enumerate(ends.tolist()) for x in (before[i], np.arange(end - chains.lengths[i], end))
        ]
        source = np.concatenate([np.zeros(0, dtype=np.int64), *pieces])
        return source, np.flatnonzero(source < int(chains.lengths.sum()))


def chains_of(shard: SequenceShard) -> tuple[Chains, ...]:
    """The chains of each part of a shard, worked out once."""
    if shard.derived.chains is None:
        shard.derived.chains = tuple(Chains(part, shard.device) for part in shard.parts)
    return shard.derived.chains
