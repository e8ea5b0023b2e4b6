"""Summaries of runs on their way between the members of a group, and what each member folds from them.

Forward: the state that enters each of this member's runs. Backward: the gradient at each one's final state. See
`state_pass.py` for the mathematics.
"""

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from longspan.layout.segments import Integers
from longspan.ssm.chains import Chains, Passing
from longspan.ssm.kernels import Inputs
from longspan.ssm.kernels.call import Forward, state_dtype
from longspan.ssm.kernels.runs import apply_maps, index_on_device, pick_rows, put_runs


class ForwardFold:
    """Sends the summaries of one part's runs to the members, and folds the states that enter this member's runs.

    `transitions` (m, H, K, K) or (m, H, 1, 1) are those that this member sent; backward sends them again.
    """

    def __init__(self, chains: Chains, inputs: Inputs, scan: Forward) -> None:
        """Compute the summaries and begin to send them; nothing where no run of the group passes a state on."""
        self.chains: Chains = chains
        self.inputs: Inputs = inputs
        self.transitions = inputs.k.new_zeros(0)
        self._passing = chains.forward
        if not self._passing.any:
            return
        states, transitions = scan.summaries(self._passing.leaving, self._passing.carrying)
        self.transitions: Tensor = transitions
        self._gathered = _GatheredSummaries(chains, self._passing, states, transitions, "states of runs")

    def entering_states(self) -> Tensor:
        """Fold the state (R, H, K, V) that enters each run of this member.

        Chains are followed place by place: the state that enters a run is the transition of the run before, applied to
        the state that entered the run before, plus the state that the rows of the run before made. At place 1 only the
        made state counts, since zero entered the run before.
        """
        v = self.inputs.v
        shape = (len(self.chains.local_indices), *self.inputs.state_shape)
        entering = v.new_zeros(shape, dtype=state_dtype(v.dtype))
        if not self._passing.any:
            return entering
        table, local_numbers = self.chains.local_chains, self.chains.local_numbers
        gathered = self._gathered.wait()
        state = entering[:0]
        for place in range(1, self.chains.local_places.stop):  # up to this member's last run in any chain
            runs_before, runs = table[:, place - 1], table[:, place]
            count = int((runs >= 0).sum())  # chains that go on, which come first
            states = gathered.states(runs_before[:count])
            state = (
                states if place == 1 else apply_maps(gathered.transitions(runs_before[:count]), state[:count], states)
            )
            _put_local_runs(entering, state, local_numbers[runs[:count]])
        return entering


class BackwardFold:
    """Sends gradients at the states that enter runs, and folds those at the final states of this member's runs."""

    def __init__(
        self, chains: Chains, states: Tensor, transitions: Tensor, entry_gradients: Callable[[Integers], Tensor]
    ) -> None:
        """Begin to send the gradients of the outputs by the states that entered runs, with the forward transitions."""
        self._chains, self._states = chains, states
        if chains.backward.any:
            runs = chains.backward.leaving
            local = entry_gradients(runs) if len(runs) else states[:0]
            label = "gradients of states of runs"
            self._gathered = _GatheredSummaries(chains, chains.backward, local, transitions, label)

    def leaving_gradients(self) -> Tensor:
        """Fold the gradient (R, H, K, V) at the final state of each run of this member.

        Chains are followed from their ends. The gradient at the state that enters a run (the final state of the run
        before) is that of the run's outputs, plus the gradient at the run's own final state through the transposed
        transition. A chain's last run has no gradient at its final state.
        """
        passing, leaving = self._chains.backward, torch.zeros_like(self._states)
        if not passing.any:
            return leaving
        gathered = self._gathered.wait()
        table, local_numbers = self._chains.local_chains, self._chains.local_numbers
        gradient, first_place = leaving[:0], self._chains.local_places.start
        for place in range(table.shape[1] - 1, first_place, -1):  # down to the run after this member's first
            runs = table[:, place]
            count = int((runs >= 0).sum())
            continuing = len(gradient)  # chains with a run after this one, which come first
            gradients = gathered.states(runs[:count])
            if continuing:
                later = apply_maps(gathered.transitions(runs[:continuing]).mT, gradient, gradients[:continuing])
                gradients = later if continuing == count else torch.cat([later, gradients[continuing:]])
            gradient = gradients
            _put_local_runs(leaving, gradient, local_numbers[table[:count, place - 1]])
        return leaving


class _GatheredSummaries:
    """States and transitions of a group's runs on their way, as rows of H numbers.

    A state (H, K, V) is K · V such rows, a transition (H, K, K) is K · K, a transition (H, 1, 1) one.
    """

    def __init__(self, chains: Chains, passing: Passing, states: Tensor, transitions: Tensor, label: str) -> None:
        """Lay this member's states and then its transitions out as rows, and begin to gather those of all members."""
        heads, self._shapes = states.shape[1], (states.shape[1:], transitions.shape[1:])
        self._sizes = self._shapes[0][1:].numel(), self._shapes[1][1:].numel()
        counts = passing.count_rows(*self._sizes)
        rows = states.new_empty((counts[chains.member], heads))
        state_count = len(states) * self._sizes[0]
        rows[:state_count].view(states.shape).copy_(states)
        rows[state_count:].view(transitions.shape).copy_(transitions)
        channel = chains.channel
        self._places = passing.first_rows(*self._sizes, channel.starts(counts))
        self._rows, self._handle = rows, channel.all_gather_rows(rows, counts, label)

    def wait(self) -> "_GatheredSummaries":
        self._rows = self._handle.wait()
        return self

    def states(self, runs: Integers) -> Tensor:
        return self._select_runs(runs, 0)

    def transitions(self, runs: Integers) -> Tensor:
        return self._select_runs(runs, 1)

    def _select_runs(self, runs: Integers, which: int) -> Tensor:
        """Select the gathered states (`which` 0) or transitions (1) of these runs; a view if they are consecutive.

        Others are picked from windows of `size` rows, one of which begins at every gathered row.
        """
        first_rows, size, shape = self._places[which][runs], self._sizes[which], (len(runs), *self._shapes[which])
        if len(first_rows) and (np.diff(first_rows) == size).all():
            return self._rows[int(first_rows[0]) : int(first_rows[-1]) + size].view(shape)
        windows = self._rows.view(-1).unfold(0, size * self._rows.shape[1], self._rows.shape[1])
        return windows.index_select(0, index_on_device(first_rows, self._rows.device)).view(shape)


def _put_local_runs(into: Tensor, values: Tensor, local_numbers: Integers) -> None:
    """Put each value into the row of its run, by the run's number among this member's (−1: not here, left out)."""
    local = (local_numbers >= 0).nonzero()[0]
    if len(local):
        put_runs(into, local_numbers[local], pick_rows(values, local))
