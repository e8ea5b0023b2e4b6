"""Scans of linear recurrences over a sharded sequence: states pass from rank to rank, rows stay where they are.

A run of rows is an affine map of the state that enters it, S_out = M S_in + B. Each member scans its runs for B and M
(`scan.py`), gathers those of its group, folds the states that enter its own runs, and scans once more from them.
Backward needs no gradient through B or M: with dS the gradient of a run's outputs to its entering state, the gradient
at its final state is G_i = M_{i+1}ᵀ G_{i+1} + dS_{i+1}; the members gather dS and M, fold, and each runs one ordinary
backward of its local scan. What travels depends on the heads alone, not on the rows. Sources: Yang et al., "Gated Delta
Networks" (arXiv 2412.06464); Dao and Gu, "Transformers are SSMs" (arXiv 2405.21060) §8.2, for one scalar a head.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.comm import SequenceShard
from longspan.comm.graphs import outside_graphs
from longspan.errors import LayoutError
from longspan.layout.segments import Rows
from longspan.ssm.chains import Chains, Passing, chains_of, on_device
from longspan.ssm.scan import scan, summaries


class _Inputs(NamedTuple):
    """q, k (T, H, K), v (T, H, V), g (T, H, K or 1), beta (T, H) or None."""

    q: Tensor
    k: Tensor
    v: Tensor
    g: Tensor
    beta: Tensor | None

    def rows(self, start: int, stop: int) -> "_Inputs":
        return _Inputs(*(None if x is None else x[start:stop] for x in self))  # pyright: ignore[reportArgumentType]


@outside_graphs
def linear_scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, shard: SequenceShard) -> Tensor:
    """o_t = q_tᵀ S_t of S_t = (I − β_t k_t k_tᵀ) Diag(exp g_t) S_{t−1} + β_t k_t v_tᵀ, from S = 0 in each document.

    q, k (T, H, K), v (T, H, V), g (T, H, K) or (T, H, 1) of log-decays, beta (T, H) -> (T, H, V), in the dtype of v.
    Without beta the term −β k kᵀ is absent and β is 1: Mamba 2, where g has one number a head. Computed in float32
    (float64 for float64). Every member of a group that has a part here makes the same call, and enters backward.
    Raises LayoutError for tensors that do not fit the shard or each other, before any communication.
    """
    _check(q, k, v, g, beta, shard)
    dtype = torch.float64 if v.dtype == torch.float64 else torch.float32
    given = [None if x is None else x.to(dtype) for x in (q, k, v, g, beta)]
    return _StatePass.apply(chains_of(shard), *given).to(v.dtype)  # pyright: ignore[reportOptionalMemberAccess]


def _check(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, shard: SequenceShard) -> None:
    rows, (heads, size) = shard.local_rows, k.shape[1:]
    wanted: dict[str, tuple[tuple[int, ...], Tensor]] = {
        "q": ((rows, heads, size), q),
        "k": ((rows, heads, size), k),
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
    if g.shape[-1] not in (1, size):
        raise LayoutError(f"linear_scan got {g.shape[-1]} decays a head; give 1, or {size}, one for each key number")


class _StatePass(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, chains: tuple[Chains, ...], *given: Tensor) -> Tensor:
        inputs = _Inputs(*given)
        sent = [_Sent(c, inputs.rows(c.part.start, c.part.stop)) for c in chains]
        outs, entering = [inputs.v[:0]], []
        for part in sent:
            states = part.entering()
            entering.append(states)
            outs.append(scan(*part.inputs, states, part.chains.lengths)[0])
        ctx.save_for_backward(*given)
        ctx.sent, ctx.states = [(part.chains, part.transitions) for part in sent], entering
        return torch.cat(outs)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        inputs, dout = _Inputs(*ctx.saved_tensors), gradients[0]
        totals = [None if x is None else torch.zeros_like(x) for x in inputs]
        parts = zip(ctx.sent, ctx.states, strict=True)
        for (chains, transitions), states in reversed(list(parts)):
            start, stop = chains.part.start, chains.part.stop
            local = _Local(inputs.rows(start, stop), states, chains, dout[start:stop])
            leaving = _gathered_gradients(chains, local.owed, transitions)
            for total, part in zip((x for x in totals if x is not None), local.gradients(leaving), strict=True):
                total[start:stop] = part
        return None, *totals


class _Sent:
    """The summaries of one part's runs, on their way to the members."""

    def __init__(self, chains: Chains, inputs: _Inputs) -> None:
        self.chains, self.inputs, self.transitions = chains, inputs, inputs.k.new_zeros(0)
        self._passing, self._handle = chains.forward, None
        if not self._passing.any:
            return
        _, k, v, g, beta = inputs
        passing = self._passing
        states, transitions = summaries(k, v, g, beta, chains.lengths, passing.leaving, passing.carrying)
        self.transitions = transitions  # backward gives them once more
        self._gathered = _Gathered(chains, passing, states, transitions, "states of runs")

    def entering(self) -> Tensor:
        """The state (R, H, K, V) that enters each run of this member."""
        k, v = self.inputs.k, self.inputs.v
        entering = v.new_zeros((len(self.chains.mine), *k.shape[1:], v.shape[2]))
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


class _Local:
    """The scan of one part's runs, once more, with gradients; `owed` is what its outputs owe to entering states."""

    def __init__(self, inputs: _Inputs, states: Tensor, chains: Chains, dout: Tensor) -> None:
        self._dout = dout
        with torch.enable_grad():
            self._leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
            start = states.detach().requires_grad_()
            self._out, self._final = scan(*_Inputs(*self._leaves), start, chains.lengths)  # pyright: ignore
        self.owed = states[:0]
        if chains.backward.any:
            (owed,) = torch.autograd.grad(self._out, start, dout, retain_graph=True, allow_unused=True)
            self.owed = torch.zeros_like(states) if owed is None else owed

    def gradients(self, leaving: Tensor) -> tuple[Tensor, ...]:
        """Of the inputs, with the gradient (R, H, K, V) at each run's final state."""
        leaves = [x for x in self._leaves if x is not None]
        if not len(self._dout):
            return tuple(torch.zeros_like(x) for x in leaves)
        return torch.autograd.grad((self._out, self._final), leaves, (self._dout, leaving))


def _gathered_gradients(chains: Chains, owed: Tensor, transitions: Tensor) -> Tensor:
    """The gradient (R, H, K, V) at the final state of each run of this member."""
    passing = chains.backward
    leaving = owed.new_zeros((len(chains.mine), *owed.shape[1:]))
    if not passing.any:
        return leaving
    own = owed.index_select(0, on_device(passing.leaving, owed.device))
    state_of, transition_of = _Gathered(chains, passing, own, transitions, "gradients of states of runs").wait()
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
            index = (places[runs][:, None] + torch.arange(columns).numpy()).reshape(-1)
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
