"""Scans of linear recurrences over a sharded sequence: states pass from rank to rank, rows stay where they are.

A run of rows is an affine map of the state that enters it, S_out = M S_in + B. Each member scans its runs for B and M
(`scan.py`), gathers those of its group, folds the states that enter its own runs, and scans once more from them.
Backward needs no gradient through B or M: with dS the gradient of a run's outputs to its entering state, the gradient
at its final state is G_i = M_{i+1}ᵀ G_{i+1} + dS_{i+1}; the members gather dS and M, fold, and each runs one ordinary
backward of its local scan. What travels depends on the heads alone, not on the rows. Sources: Yang et al., "Gated Delta
Networks" (arXiv 2412.06464); Dao and Gu, "Transformers are SSMs" (arXiv 2405.21060) §8.2, for one scalar a head.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.comm import SequenceShard
from longspan.comm.graphs import outside_graphs
from longspan.errors import LayoutError
from longspan.layout.segments import Rows
from longspan.ssm.chains import Chains, Passing, chains_of
from longspan.ssm.kernels import TORCH, Inputs, Kernel, Recurrence, choose
from longspan.ssm.kernels.call import Forward, Saved, state_dtype
from longspan.ssm.kernels.runs import on_device


@outside_graphs
def linear_scan(
    q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, shard: SequenceShard, scale: float = 1.0
) -> Tensor:
    """o_t = scale · q_tᵀ S_t, S_t = (I − β_t k_t k_tᵀ) Diag(exp g_t) S_{t−1} + β_t k_t v_tᵀ, from S = 0 in a document.

    q, k (T, G, K), v (T, H, V), g (T, H, K) or (T, H, 1) of log-decays, beta (T, H) -> (T, H, V), in the dtype of v;
    head h reads head h // (H // G) of q and k. Without beta the term −β k kᵀ is absent and β is 1: Mamba 2, where g
    has one number a head. Half precision on a GPU runs by the kernels of flash-linear-attention where they can;
    everything else in torch's operations, in float32 (float64 for float64). Every member of a group that has a part
    here makes the same call, and enters backward. Raises LayoutError for tensors that do not fit the shard or each
    other, before any communication.
    """
    _check(q, k, v, g, beta, shard)
    kernel = kernel_of(v, k.shape[-1], delta=beta is not None, by_channel=g.shape[-1] > 1)
    wide = state_dtype(v.dtype)
    rows = v.dtype if kernel.half else wide
    dtypes = (rows, rows, rows, wide, wide)
    given = [
        None if x is None else x.to(dtype).contiguous() for x, dtype in zip((q, k, v, g, beta), dtypes, strict=True)
    ]
    return _StatePass.apply(chains_of(shard), kernel, scale, *given).to(v.dtype)  # pyright: ignore[reportOptionalMemberAccess]


def kernel_of(v: Tensor, key_size: int, *, delta: bool, by_channel: bool = False) -> Kernel:
    """The kernel that `linear_scan` takes for values like these, (T, H, V)."""
    return choose(Recurrence(v.dtype, v.device, key_size, v.shape[-1], delta=delta, by_channel=by_channel))


def _check(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, shard: SequenceShard) -> None:
    rows, (groups, size), heads = shard.local_rows, k.shape[1:], v.shape[1]
    wanted: dict[str, tuple[tuple[int, ...], Tensor]] = {
        "q": ((rows, groups, size), q),
        "k": ((rows, groups, size), k),
        "v": ((rows, heads, v.shape[-1]), v),
        "g": ((rows, heads, 1 if beta is None else g.shape[-1]), g),
    }
    if beta is not None:
        wanted["beta"] = ((rows, heads), beta)
    for name, (shape, x) in wanted.items():
        if tuple(x.shape) != shape:
            raise LayoutError(
                f"linear_scan got {name} of {tuple(x.shape)}, wanted {shape}; the shard holds {rows} rows"
            )
    if heads % groups:
        raise LayoutError(
            f"linear_scan got {groups} heads of keys for {heads} heads of values; they have to divide them"
        )
    if g.shape[-1] not in (1, size):
        raise LayoutError(f"linear_scan got {g.shape[-1]} decays a head; give 1, or {size}, one for each key number")


class _StatePass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chains: tuple[Chains, ...], kernel: Kernel, scale: float, *given: Tensor) -> Tensor:
        inputs = Inputs(*given)
        parts = [inputs.rows(c.part.start, c.part.stop) for c in chains]
        begun = [_of(kernel, c).forward(part, c.local_runs, scale) for part, c in zip(parts, chains, strict=True)]
        sent = [_Sent(c, part, scan) for c, part, scan in zip(chains, parts, begun, strict=True)]
        outs, kept = [inputs.v[:0]], list[tuple[Tensor, ...]]()
        for part, scan in zip(sent, begun, strict=True):
            states = part.entering()
            outs.append(scan.outputs(states))
            kept.append((part.transitions, states, *scan.kept))
        ctx.save_for_backward(*given, *(x for tensors in kept for x in tensors))
        ctx.chains, ctx.kernel, ctx.scale, ctx.counts = chains, kernel, scale, [len(tensors) for tensors in kept]
        return torch.cat(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        tensors = ctx.saved_tensors  # once: recomputation gives them no second time
        inputs, rest, dout = Inputs(*tensors[:5]), list(tensors[5:]), gradients[0]
        totals = [None if x is None else torch.zeros_like(x) for x in inputs]
        for chains, count in reversed(list(zip(ctx.chains, ctx.counts, strict=True))):
            transitions, states, *kept = rest[len(rest) - count :]
            del rest[len(rest) - count :]
            start, stop = chains.part.start, chains.part.stop
            saved = Saved(states, tuple(kept), dout[start:stop])
            local = _of(ctx.kernel, chains).backward(inputs.rows(start, stop), chains.local_runs, ctx.scale, saved)
            owed = _Owed(chains, states, transitions, local.owed)
            local.prepare()
            found = local.gradients(owed.leaving())
            for total, part in zip((x for x in totals if x is not None), found, strict=True):
                total[start:stop] = part
        return None, None, None, *totals


def _of(kernel: Kernel, chains: Chains) -> Kernel:
    """The kernel; torch's operations where this member has no rows."""
    return kernel if len(chains.lengths) else TORCH


class _Sent:
    """The summaries of one part's runs, on their way to the members."""

    def __init__(self, chains: Chains, inputs: Inputs, scan: Forward) -> None:
        self.chains, self.inputs = chains, inputs
        self.transitions = inputs.k.new_zeros(0)
        self._passing = chains.forward
        if not self._passing.any:
            return
        states, transitions = scan.summaries(self._passing.leaving, self._passing.carrying)
        self.transitions = transitions  # backward gives them once more
        self._gathered = _Gathered(chains, self._passing, states, transitions, "states of runs")

    def entering(self) -> Tensor:
        """The state (R, H, K, V) that enters each run of this member."""
        v = self.inputs.v
        shape = (len(self.chains.mine), *self.inputs.state_shape)
        entering = v.new_zeros(shape, dtype=state_dtype(v.dtype))
        if not self._passing.any:
            return entering
        table, held = self._passing.own_chains, self._passing.held
        state_of, transition_of = self._gathered.wait()
        state = entering[:0]
        for place in range(1, table.shape[1]):
            before, runs = table[:, place - 1], table[:, place]
            count = int((runs >= 0).sum())  # chains that go on, which come first
            given = state_of(before[:count])
            state = given if place == 1 else _moved(transition_of(before[:count]), state[:count]) + given
            _keep(entering, state, held[runs[:count]])
        return entering


class _Owed:
    """What outputs owe to the states that entered runs, on its way to the members."""

    def __init__(self, chains: Chains, states: Tensor, transitions: Tensor, owed: Callable[[Rows], Tensor]) -> None:
        self._chains, self._zero = chains, states
        if chains.backward.any:
            runs = chains.backward.leaving
            own = owed(runs) if len(runs) else states[:0]
            what = "gradients of states of runs"
            self._gathered = _Gathered(chains, chains.backward, own, transitions, what)

    def leaving(self) -> Tensor:
        """The gradient (R, H, K, V) at the final state of each run of this member."""
        passing, leaving = self._chains.backward, torch.zeros_like(self._zero)
        if not passing.any:
            return leaving
        state_of, transition_of = self._gathered.wait()
        table, held = passing.own_chains, passing.held
        gradient = leaving[:0]
        for place in range(table.shape[1] - 1, 0, -1):
            runs = table[:, place]
            count = int((runs >= 0).sum())
            going_on = len(gradient)  # chains with a run after this one, which come first
            given = state_of(runs[:count])
            if going_on:
                given[:going_on] += _moved(transition_of(runs[:going_on]), gradient, transposed=True)
            gradient = given
            _keep(leaving, gradient, held[table[:count, place - 1]])
        return leaving


class _Gathered:
    """States and transitions of a group's runs on their way: rows of H · K numbers, as many for each as it has columns.

    A state (H, K, V) is V such rows, a transition (H, K, K) is K, and one of a number for each head one.
    """

    def __init__(self, chains: Chains, passing: Passing, states: Tensor, transitions: Tensor, what: str) -> None:
        self._heads, self._size, self._state_rows = states.shape[1:]
        self._transition_rows = transitions.shape[3]
        counts = passing.counts(self._state_rows, self._transition_rows)
        width = self._heads * self._size
        wide = transitions.expand(-1, -1, self._size, -1)
        rows = torch.cat([x.permute(0, 3, 1, 2).reshape(-1, width) for x in (states, wide)])
        channel = chains.channel
        self._places = passing.places(self._state_rows, self._transition_rows, channel.starts(counts))
        self._handle = channel.all_gather_rows(rows, counts, what)

    def wait(self) -> tuple[Callable[[Rows], Tensor], Callable[[Rows], Tensor]]:
        """Two functions that give the states and the transitions of some runs."""
        rows = self._handle.wait()

        def taken(runs: Rows, places: Rows, columns: int) -> Tensor:
            index = (places[runs][:, None] + np.arange(columns)).reshape(-1)
            picked = rows.index_select(0, on_device(index, rows.device))
            return picked.view(len(runs), columns, self._heads, self._size).permute(0, 2, 3, 1)

        states, transitions = self._places
        return (
            lambda runs: taken(runs, states, self._state_rows).clone(),
            lambda runs: taken(runs, transitions, self._transition_rows),
        )


def _moved(transition: Tensor, state: Tensor, *, transposed: bool = False) -> Tensor:
    """M S, or Mᵀ S; a transition (n, H, K, 1) is the same number for all of a head."""
    if transition.shape[3] == 1:
        return transition * state
    return (transition.mT if transposed else transition) @ state


def _keep(into: Tensor, values: Tensor, held: Rows) -> None:
    """into[held] ← values where this member has the run."""
    own = (held >= 0).nonzero()[0]
    if len(own):
        into[on_device(held[own], into.device)] = values[on_device(own, into.device)]
