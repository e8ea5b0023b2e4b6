"""Scans of linear recurrences over a sharded sequence: states pass from rank to rank, rows stay where they are.

A run of rows is an affine map of the state that enters it, S_out = M S_in + B. Each member scans its runs for B and M
(`kernels/`), gathers those of its group, folds the states that enter its own runs, and scans once more from them.
Backward needs no gradient through B or M: with dS the gradient of a run's outputs to its entering state, the gradient
at its final state is G_i = M_{i+1}ᵀ G_{i+1} + dS_{i+1}; the members gather dS and M, fold, and each runs one ordinary
backward of its local scan. What travels depends only on the heads, not on the rows. Sources: Yang et al., "Gated Delta
Networks" (arXiv 2412.06464); Dao and Gu, "Transformers are SSMs" (arXiv 2405.21060) §8.2, for one scalar a head.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.comm.autograd import break_graphs_around
from longspan.comm.shard import SequenceShard, check_is_shard
from longspan.errors import LayoutError
from longspan.layout.segments import Integers
from longspan.ssm.chains import Chains, Passing, shard_chains
from longspan.ssm.kernels import TORCH, Inputs, ScanKernel, scan_kernel
from longspan.ssm.kernels.fla import fla_function, fla_unsupported_call_reason
from longspan.ssm.kernels.interface import SavedScan, ScanForward, map_states, state_dtype
from longspan.ssm.kernels.local_runs import index_on_device, pick_rows, put_rows


class ForwardFold:
    """Sends the summaries of one part's runs to the members, and folds the states that enter this member's runs.

    Entered by all members; sending starts as it is made. `transitions` (m, H, K, K) or (m, H, 1, 1) are those that this
    member sent; backward sends them again. Nothing is sent where no run of the group passes a state on.
    """

    def __init__(self, chains: Chains, inputs: Inputs, scan: ScanForward) -> None:
        self.chains: Chains = chains
        self.inputs: Inputs = inputs
        self.transitions = inputs.k.new_zeros(0)
        self._passing = chains.forward_passing
        if not self._passing.any:
            return
        states, transitions = scan.summaries(self._passing.leaving, self._passing.carrying)
        self.transitions: Tensor = transitions
        self._gathered = _GatheredSummaries(chains, self._passing, states, transitions, "states of runs")

    def entering_states(self) -> Tensor:
        """Fold the state (R, H, K, V) that enters each run of this member.

        Chains are followed place by place: the state that enters a run is the transition of the run before, applied to
        the state that entered that, plus the state that its rows made. At place 1 only the made state counts: zero
        entered before.
        """
        v = self.inputs.v
        shape = (len(self.chains.local_indices), *self.inputs.state_shape)
        entering = v.new_zeros(shape, dtype=state_dtype(v.dtype))
        if not self._passing.any:
            return entering
        table = self.chains.local_chains
        local_number_of_run = self.chains.local_number_of_run
        gathered = self._gathered.wait()
        state = entering[:0]
        # The fold goes up to this member's last run in any chain.
        for place in range(1, self.chains.local_places.stop):
            runs_before = table[:, place - 1]
            runs = table[:, place]
            count = int((runs >= 0).sum())  # chains that go on, which come first
            states = gathered.states(runs_before[:count])
            state = (
                states
                if place == 1
                else map_states(gathered.transitions(runs_before[:count]), state[:count], states)
            )
            _put_local_runs(entering, state, local_number_of_run[runs[:count]])
        return entering


class BackwardFold:
    """Sends gradients at the states that enter runs, and folds those at the final states of this member's runs."""

    def __init__(
        self,
        chains: Chains,
        states: Tensor,
        transitions: Tensor,
        initial_state_gradients: Callable[[Integers], Tensor],
    ) -> None:
        self._chains = chains
        self._states = states
        if chains.backward_passing.any:
            runs = chains.backward_passing.leaving
            local = initial_state_gradients(runs) if len(runs) else states[:0]
            label = "gradients of states of runs"
            self._gathered = _GatheredSummaries(chains, chains.backward_passing, local, transitions, label)

    def leaving_gradients(self) -> Tensor:
        """Fold the gradient (R, H, K, V) at the final state of each run of this member.

        Chains are followed place by place from their ends. The gradient at the state that enters a run, which is the
        final state of the run before, is that of the run's outputs, plus the gradient at its own final state through
        the transposed transition. A chain's last run has none at its final state.
        """
        passing = self._chains.backward_passing
        leaving = torch.zeros_like(self._states)
        if not passing.any:
            return leaving
        gathered = self._gathered.wait()
        table = self._chains.local_chains
        if self._chains.part.group.parents is not None:
            return self._sum_over_branches(table, gathered)
        local_number_of_run = self._chains.local_number_of_run
        final = leaving[:0]  # gradients at the final states of the runs at a place
        first_place = self._chains.local_places.start
        # The fold goes down to the run after this member's first.
        for place in range(table.shape[1] - 1, first_place, -1):
            runs = table[:, place]
            count = int((runs >= 0).sum())
            continuing = len(final)  # chains with a run after this one, which come first
            # These are the gradients of the outputs alone.
            entering = gathered.states(runs[:count])
            if continuing:
                whole = map_states(gathered.transitions(runs[:continuing]).mT, final, entering[:continuing])
                entering = whole if continuing == count else torch.cat([whole, entering[continuing:]])
            # The loop goes on with the runs at the place before.
            final = entering
            _put_local_runs(leaving, final, local_number_of_run[table[:count, place - 1]])
        return leaving

    def _sum_over_branches(self, table: Integers, gathered: "_GatheredSummaries") -> Tensor:
        """The final state of a run may enter several runs: their gradients are summed."""
        runs = self._chains.runs
        device = self._states.device
        # These are the final gradients of all members' runs.
        final = self._states.new_zeros((len(runs.member), *self._states.shape[1:]))
        for place in range(table.shape[1] - 1, 0, -1):
            runs_here = np.unique(table[:, place])
            runs_here = runs_here[runs_here >= 0]
            # These are the gradients of the outputs alone.
            entering = gathered.states(runs_here).clone()
            goes_on = np.flatnonzero(~runs.last[runs_here])
            if len(goes_on):
                index = index_on_device(goes_on, device)
                later = final.index_select(0, index_on_device(runs_here[goes_on], device))
                transitions = gathered.transitions(runs_here[goes_on]).mT
                entering[index] = map_states(transitions, later, entering[index])
            final.index_add_(0, index_on_device(runs.before[runs_here], device), entering)
        return final.index_select(0, index_on_device(self._chains.local_indices, device))


class _GatheredSummaries:
    """States and transitions of a group's runs on their way, as rows of H numbers; sending starts as it is made.

    A state (H, K, V) is K · V such rows, a transition (H, K, K) is K · K, a transition (H, 1, 1) one. `_shapes` and
    `_sizes`, which count rows, are those of a state and of a transition.
    """

    def __init__(self, chains: Chains, passing: Passing, states: Tensor, transitions: Tensor, label: str) -> None:
        heads = states.shape[1]
        self._shapes = (states.shape[1:], transitions.shape[1:])
        self._sizes = self._shapes[0][1:].numel(), self._shapes[1][1:].numel()
        counts = passing.count_rows(*self._sizes)
        rows = states.new_empty((counts[chains.member], heads))
        state_count = len(states) * self._sizes[0]
        rows[:state_count].view(states.shape).copy_(states)
        rows[state_count:].view(transitions.shape).copy_(transitions)
        channel = chains.channel
        self._places = passing.first_rows(*self._sizes, channel.row_starts(counts))
        self._rows = rows
        self._handle = channel.all_gather_rows(rows, counts, label)

    def wait(self) -> "_GatheredSummaries":
        """Wait until all summaries are here; only then `states` and `transitions` may be called."""
        self._rows = self._handle.wait()
        return self

    def states(self, runs: Integers) -> Tensor:
        """Return the gathered states (n, H, K, V) of these runs, which must be among those that sent one."""
        return self._select_runs(runs, 0)

    def transitions(self, runs: Integers) -> Tensor:
        """Return the gathered transitions (n, H, K, K) or (n, H, 1, 1) of these runs, which must be among those that
        sent one.
        """
        return self._select_runs(runs, 1)

    def _select_runs(self, runs: Integers, which: int) -> Tensor:
        """A view if the runs are consecutive; others are picked from windows of `size` rows, one of which begins at
        every gathered row."""
        first_rows = self._places[which][runs]
        size = self._sizes[which]
        shape = (len(runs), *self._shapes[which])
        if len(first_rows) and (np.diff(first_rows) == size).all():
            return self._rows[int(first_rows[0]) : int(first_rows[-1]) + size].view(shape)
        windows = self._rows.view(-1).unfold(0, size * self._rows.shape[1], self._rows.shape[1])
        return windows.index_select(0, index_on_device(first_rows, self._rows.device)).view(shape)


def _put_local_runs(into: Tensor, values: Tensor, local_numbers: Integers) -> None:
    """`local_numbers` (n,) are the runs' numbers among this member's R runs, −1 for another member's."""
    local = (local_numbers >= 0).nonzero()[0]
    if len(local):
        put_rows(into, local_numbers[local], pick_rows(values, local))


@break_graphs_around
def linear_scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, shard: SequenceShard, scale: float = 1.0
) -> Tensor:
    """Compute o_t = scale · q_tᵀ S_t of S_t = (I − β_t k_t k_tᵀ) Diag(exp g_t) S_{t−1} + β_t k_t v_tᵀ in each document.

    q, k (T, G, K), v (T, H, V), g (T, H, K) or (T, H, 1) of log-decays, beta (T, H) -> (T, H, V), in the dtype of v;
    head h reads head h // (H // G) of q and k; S is 0 before the first row of a document. Without beta the term −β k kᵀ
    is absent and β is 1: Mamba 2, where g has one number a head. Half precision on a GPU runs by flash-linear-
    attention's kernels where they can; all else in torch's operations, in float32 (float64 for float64). Every member
    of a group that has a part here makes the same call, and enters backward. Raises LayoutError for tensors that do not
    fit the shard or each other, before any communication.
    """
    check_is_shard("linear_scan", shard)
    for name, x in (("k", k), ("v", v), ("g", g)):
        if x.ndim != 3:
            raise LayoutError(
                f"linear_scan got {name} of {tuple(x.shape)}; it has rows, heads and numbers of a head"
            )
    rows = shard.local_rows
    groups, size = k.shape[1:]
    heads = v.shape[1]
    expected: list[tuple[str, Tensor | None, tuple[int, ...]]] = [
        ("q", q, (rows, groups, size)),
        ("k", k, (rows, groups, size)),
        ("v", v, (rows, heads, v.shape[-1])),
        ("g", g, (rows, heads, 1 if beta is None else g.shape[-1])),
        ("beta", beta, (rows, heads)),
    ]
    for name, x, shape in expected:
        if x is not None and tuple(x.shape) != shape:
            raise LayoutError(
                f"linear_scan got {name} of {tuple(x.shape)}, wanted {shape}; the shard holds {rows} rows"
            )
    if heads % groups:
        raise LayoutError(
            f"linear_scan got {groups} heads of keys for {heads} heads of values; they have to divide them"
        )
    if g.shape[-1] not in (1, size):
        raise LayoutError(
            f"linear_scan got {g.shape[-1]} decays a head; give 1, or {size}, one for each key number"
        )
    kernel = scan_kernel(v, k.shape[-1], delta=beta is not None, by_channel=g.shape[-1] > 1)
    wide_dtype = state_dtype(v.dtype)
    row_dtype = v.dtype if kernel.half else wide_dtype
    dtypes = (row_dtype, row_dtype, row_dtype, wide_dtype, wide_dtype)
    tensors = [
        None if x is None else x.to(dtype).contiguous() for x, dtype in zip((q, k, v, g, beta), dtypes, strict=True)
    ]
    return _StatePass.apply(shard_chains(shard), kernel, scale, *tensors).to(v.dtype)  # pyright: ignore[reportOptionalMemberAccess]


class _StatePass(torch.autograd.Function):
    """The scan of all parts of a shard, in which states and their gradients pass between members."""

    @staticmethod
    def forward(ctx: Any, chains: tuple[Chains, ...], kernel: ScanKernel, scale: float, *tensors: Tensor) -> Tensor:
        """Each run's summary leaves first, then outputs are computed from the state that entered each run."""
        inputs = Inputs(*tensors)
        parts = [inputs.rows(part_chains.part.start, part_chains.part.stop) for part_chains in chains]
        scans = [
            _kernel_or_torch(kernel, part_chains).forward(part, part_chains.local_runs, scale)
            for part, part_chains in zip(parts, chains, strict=True)
        ]
        folds = [
            ForwardFold(part_chains, part, scan)
            for part_chains, part, scan in zip(chains, parts, scans, strict=True)
        ]
        outs = list[Tensor]()
        activations = list[tuple[Tensor, ...]]()
        for fold, scan in zip(folds, scans, strict=True):
            states = fold.entering_states()
            outs.append(scan.outputs(states))
            activations.append((fold.transitions, states, *scan.activations))
        ctx.save_for_backward(*tensors, *(x for saved in activations for x in saved))
        ctx.chains = chains
        ctx.kernel = kernel
        ctx.scale = scale
        ctx.counts = [len(saved) for saved in activations]
        return join_part_rows(outs, inputs.v)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Parts go from the last to the first: as the states went, their gradients come back."""
        tensors = ctx.saved_tensors  # read once: under activation checkpointing a second read fails
        inputs = Inputs(*tensors[:5])
        activations_and_states = list(tensors[5:])
        dout = gradients[0]
        parts = list[tuple[Tensor, ...]]()
        for chains, count in reversed(list(zip(ctx.chains, ctx.counts, strict=True))):
            transitions, states, *activations = activations_and_states[len(activations_and_states) - count :]
            del activations_and_states[len(activations_and_states) - count :]
            start, stop = chains.part.start, chains.part.stop
            saved = SavedScan(states, tuple(activations), dout[start:stop])
            local = _kernel_or_torch(ctx.kernel, chains).backward(
                inputs.rows(start, stop), chains.local_runs, ctx.scale, saved
            )
            fold = BackwardFold(chains, states, transitions, local.initial_state_gradients)
            local.prepare_chunks()  # while gradients of states travel
            parts.insert(0, local.gradients(fold.leaving_gradients()))
        present = [x for x in inputs if x is not None]
        results = [join_part_rows([part[i] for part in parts], x) for i, x in enumerate(present)]
        return None, None, None, *results, *([None] if inputs.beta is None else [])


def _kernel_or_torch(kernel: ScanKernel, chains: Chains) -> ScanKernel:
    """Kernels other than torch's operations need one row."""
    return kernel if len(chains.lengths) else TORCH


def join_part_rows(parts: Sequence[Tensor], like: Tensor) -> Tensor:
    """Join the results of a shard's parts by rows; a single part is not copied, and without a part there are zeros like
    `like`.
    """
    if len(parts) == 1:
        return parts[0]
    return torch.cat(list(parts)) if parts else torch.zeros_like(like)


def unit_vectors(x: Tensor, epsilon: float) -> Tensor:
    """Compute x / √(Σ x² + epsilon) over the last dimension: vectors of length 1, as delta rules want queries and keys.

    fla's kernel, where it can be used, leaves half precision as it is; torch's operations make it float32.
    """
    if not fla_unsupported_call_reason(x.dtype, x.device):
        return fla_function("modules.norm.l2norm", "l2norm")(x, epsilon)
    x = x if x.dtype == torch.float64 else x.float()
    return x * torch.rsqrt((x * x).sum(-1, keepdim=True) + epsilon)
