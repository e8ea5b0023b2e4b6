"""Runs of rows of a group's members in the order of their documents, decided in integers.

A *chain* is a document's runs by position, whoever holds them; a run's *place* is its number in its chain. What a run
needs of those before it and what it owes to those after it follow only from places. Where documents share a prefix,
a chain has the runs of all that its document continues before its own. This module moves no tensors.
"""

from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch

from longspan.comm import SequenceShard, ShardPart, world_of
from longspan.comm.channel import Channel
from longspan.layout.rows_before import sort_runs
from longspan.layout.segments import Flags, Integers
from longspan.ssm.kernels.local_runs import LocalRuns


class Runs(NamedTuple):
    """Runs of all members, chain after chain, each in the order of its positions: arrays of equal length.

    A run is rows `start` to `stop` (half open) of `document`, at `place` in its chain; `last` are the last of a chain.
    `before` is the run whose final state enters each, −1 for none.
    """

    member: Integers
    document: Integers
    start: Integers
    stop: Integers
    offset: Integers  # first row among the member's
    place: Integers
    last: Flags
    before: Integers

    def member_runs(self, member: int) -> Integers:
        """Return the indices of a member's runs, in the order in which the member holds them."""
        runs = np.flatnonzero(self.member == member)
        return runs[np.argsort(self.offset[runs], kind="stable")]


class Chains:
    """The chains of one group, and which of their runs this member holds. Made once per shard, for all layers."""

    def __init__(self, part: ShardPart, device: torch.device) -> None:
        self.part: ShardPart = part
        self.device: torch.device = device
        self.member: int = part.member
        self.degree: int = part.degree
        # What `conv.cached_reads` makes, by width.
        self.convolution_reads: dict[int, Any] = {}

    @property
    def channel(self) -> Channel:
        """The channel of the group's slots. Raises CommError where the world has been left."""
        return world_of(self.part.world_key).channels.find_channel(self.part.group.slots)

    @cached_property
    def runs(self) -> Runs:
        """Every run of every member, sorted by document and position."""
        runs = sort_runs([self.part.segments(member) for member in range(self.degree)])
        number = np.arange(len(runs.document))
        is_first = np.diff(runs.document, prepend=-1) != 0
        place = number - np.maximum.accumulate(np.where(is_first, number, 0))
        is_last = np.append(is_first[1:], np.ones(min(1, len(is_first)), dtype=bool))
        before = np.where(is_first, -1, number - 1)
        if self.part.group.parents is not None:  # a document's first run comes after its parent's last one
            first_runs = np.flatnonzero(is_first)
            last_runs = np.flatnonzero(is_last)
            for index, parent in enumerate(self.part.group.parents):  # parents come first
                if parent >= 0:
                    before[first_runs[index]] = last_runs[parent]
                    place[first_runs[index] : last_runs[index] + 1] += place[last_runs[parent]] + 1
            is_last = ~np.isin(number, before)
        return Runs(*runs, place, is_last, before)

    @cached_property
    def local_indices(self) -> Integers:
        """Indices into `runs` of this member's runs, in the order in which it holds them."""
        return self.runs.member_runs(self.member)

    @cached_property
    def lengths(self) -> Integers:
        """How many rows each run of this member has: (R,), in the order in which it holds them."""
        return (self.runs.stop - self.runs.start)[self.local_indices]

    @cached_property
    def local_runs(self) -> LocalRuns:
        """This member's runs as kernels take them; shared are those whose document has further runs."""
        shared = (self.runs.place > 0) | ~self.runs.last
        return LocalRuns(self.lengths, self.device, shared[self.local_indices])

    @cached_property
    def local_chains(self) -> Integers:
        """The chains of two runs or more in which this member has a run: a table (chains, most runs) of indices of
        runs, with a column for each place.

        There is a chain for each run that is the last of one; chains of documents with one prefix begin with the same
        runs. −1 stands past a chain's end. Longer chains come first: those with a run at a place are the first few.
        """
        runs = self.runs
        last = np.flatnonzero(runs.last & (runs.place > 0))
        last = last[np.argsort(-runs.place[last], kind="stable")]
        table = np.full((len(last), int(runs.place.max(initial=0)) + 1), -1)
        # All chains are followed at once, from their last runs back to their first.
        chain = np.arange(len(last))
        run = last
        while len(chain):
            table[chain, runs.place[run]] = run
            run = runs.before[run]
            chain = chain[run >= 0]
            run = run[run >= 0]
        is_local = (table >= 0) & (self.local_number_of_run[table] >= 0)
        table = table[is_local.any(1)]
        return table[:, (table >= 0).any(0)]

    @cached_property
    def local_places(self) -> range:
        """From the first to the last place at which this member has a run in `local_chains`."""
        table = self.local_chains
        places = np.flatnonzero(((table >= 0) & (self.local_number_of_run[table] >= 0)).any(0))
        return range(int(places[0]), int(places[-1]) + 1) if len(places) else range(0)

    @cached_property
    def local_number_of_run(self) -> Integers:
        """For each run of all members its number among this member's; −1 for another member's."""
        number = np.full(len(self.runs.member), -1)
        number[self.local_indices] = np.arange(len(self.local_indices))
        return number

    @cached_property
    def forward_passing(self) -> "Passing":
        """All runs but the last of a chain pass their final state on.

        The first of a chain sends no transition, for the state that enters it is zero.
        """
        return Passing(self, leaves=~self.runs.last, carries=(self.runs.place > 0) & ~self.runs.last)

    @cached_property
    def backward_passing(self) -> "Passing":
        """All runs but the first of a chain pass the gradient at their entering state back.

        The last of a chain sends no transition, for no gradient comes from behind it.
        """
        return Passing(self, leaves=self.runs.place > 0, carries=(self.runs.place > 0) & ~self.runs.last)


class Passing:
    """Which runs send a state (or its gradient), and which also a transition, and where each lies in the gathered rows.

    `leaves` and `carries` say of each run of all members whether it sends a state, and whether a transition. A member
    sends the states of its runs, one after another, and behind them the transitions. `leaving` and `carrying` number
    the senders among this member's runs; `any` says whether any member sends anything.
    """

    def __init__(self, chains: Chains, leaves: Flags, carries: Flags) -> None:
        self.chains: Chains = chains
        self._leaves = leaves
        self._carries = carries
        local_indices = chains.local_indices
        # These indices are in the order of `local_indices`.
        self.leaving: Integers = np.flatnonzero(leaves[local_indices])
        self.carrying: Integers = np.flatnonzero(carries[local_indices])
        self.any: bool = bool(leaves.any())
        self._places: dict[tuple[int, int, tuple[int, ...]], tuple[Integers, Integers]] = {}

    def count_rows(self, state_rows: int, transition_rows: int) -> list[int]:
        """Count the rows that each member sends, if a state is `state_rows` rows and a transition `transition_rows`."""
        members = (self.chains.runs.member[senders] for senders in (self._leaves, self._carries))
        states, transitions = (np.bincount(member, minlength=self.chains.degree) for member in members)
        return (states * state_rows + transitions * transition_rows).tolist()

    def first_rows(
        self, state_rows: int, transition_rows: int, starts: tuple[int, ...]
    ) -> tuple[Integers, Integers]:
        """Return the first gathered row of each run's state and of its transition; −1 for what a run does not send.

        `starts` are the first gathered rows of each member.
        """
        key = state_rows, transition_rows, starts
        if key in self._places:
            return self._places[key]
        runs = self.chains.runs
        states = np.full(len(runs.member), -1)
        transitions = np.full(len(runs.member), -1)
        for member, start in enumerate(starts):
            member_runs = runs.member_runs(member)
            leaving = member_runs[self._leaves[member_runs]]
            carrying = member_runs[self._carries[member_runs]]
            states[leaving] = start + np.arange(len(leaving)) * state_rows
            transitions[carrying] = start + len(leaving) * state_rows + np.arange(len(carrying)) * transition_rows
        self._places[key] = states, transitions
        return states, transitions


# freed with their shards
chains_by_shard: WeakKeyDictionary[SequenceShard, tuple[Chains, ...]] = WeakKeyDictionary()


def shard_chains(shard: SequenceShard) -> tuple[Chains, ...]:
    """Return the chains of each part of a shard, in the order of its parts; made at the first call, and freed with the
    shard.
    """
    if shard not in chains_by_shard:
        chains_by_shard[shard] = tuple(Chains(part, shard.device) for part in shard.parts)
    return chains_by_shard[shard]
