"""The recurrence on runs of local rows, chunk by chunk in torch's own operations; differentiable, any device.

With G the cumulative log-decay inside a chunk and P_ij = exp(G_i − G_j): T = (I + tril₋₁(β k_i · P_ij k_j))⁻¹,
u = T β v, w = T β k e^G, new = u − w S, o = (q e^G) S + tril(q_i · P_ij k_j) new, S ← e^{G_last} S +
(k e^{G_last − G})ᵀ new. Everything but the last two steps is computed for all chunks of all runs at once; those go
through chunks in order, with all runs that have another chunk side by side.
"""

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longspan.comm import to_device
from longspan.layout.segments import Integers, expand_runs
from longspan.ssm.kernels.interface import Inputs, SavedScan, state_dtype
from longspan.ssm.kernels.local_runs import LocalRuns, pick_rows

_ROWS_OF_CHUNK = 32
# rows where each key number has a decay of its own: pairs of rows times key numbers are held
_ROWS_OF_CHUNK_BY_CHANNEL = 16


class _Chunks(NamedTuple):
    """Runs cut into chunks, first chunks of all runs first: which local rows they hold, and how to come back.

    `rows` (N · C,) are indices into [local rows | a zero row], `back` (T,) indices into the N · C rows. `sizes[j]` runs
    have a chunk j, and these come first in `order` (R,), the runs from the longest to the shortest; `inverse` (R,) puts
    runs back in their own order.
    """

    rows: Tensor
    back: Tensor
    sizes: list[int]
    order: Tensor
    inverse: Tensor


# All layers have the same runs.
@lru_cache(maxsize=32)
def _cut_into_chunks(lengths: tuple[int, ...], chunk: int, device: torch.device) -> _Chunks:
    """First chunks of all runs come first, longest runs first: the runs that have an i-th chunk are the first few, and
    these chunks are scanned together. Where a short chunk has no row, `rows` has the index `total`, of the zero row."""
    size = np.array(lengths, dtype=np.int64)
    total = sum(lengths)
    counts = -(-size // chunk)
    starts = np.cumsum(size) - size
    order = np.argsort(-counts, kind="stable")
    run = np.repeat(order, counts[order])
    place = expand_runs(np.zeros_like(order), counts[order])
    place_order = np.argsort(place, kind="stable")  # first chunks of all runs, then second ones
    run = run[place_order, None]
    place = place[place_order]
    row_of_run = place[:, None] * chunk + np.arange(chunk)
    rows = np.where(row_of_run < size[run], starts[run] + row_of_run, total).reshape(-1)
    filled_places = np.flatnonzero(rows < total)
    back = np.empty(total, dtype=np.int64)
    back[rows[filled_places]] = filled_places
    inverse = np.argsort(order, kind="stable")
    rows, back, order, inverse = (to_device(x, device) for x in (rows, back, order, inverse))
    return _Chunks(rows, back, np.bincount(place).tolist(), order, inverse)


def scan(
    q: Tensor | None, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, initial: Tensor, lengths: Integers
) -> tuple[Tensor, Tensor]:
    """Scan all runs: the outputs (T, H, V), and the final state (R, H, K, V) of each, from `initial` (R, H, K, V).

    `lengths` (R,): rows of each run, one after another. Without q only the final states are computed, and the outputs
    are an empty tensor. Without rows the states stay; adding zero times the inputs keeps the inputs in the graph.
    """
    if not len(k):
        return v[:0] + 0 * k.sum() * g.sum(), initial + 0 * (k.sum() + g.sum())
    chunk = _ROWS_OF_CHUNK if g.shape[-1] == 1 else _ROWS_OF_CHUNK_BY_CHANNEL
    chunks = _cut_into_chunks(tuple(lengths.tolist()), chunk, k.device)

    def cut_rows(x: Tensor) -> Tensor:
        """Local rows (T, H, ·) to those of all chunks (N, H, C, ·); places without a row get zeros."""
        wide = torch.cat([x, x.new_zeros((1, *x.shape[1:]))]).index_select(0, chunks.rows)
        return wide.view(-1, chunk, *x.shape[1:]).transpose(1, 2)

    # All chunks of all runs at once; comments give the letters of the formulas at the head of the file.
    chunk_k, chunk_v, chunk_g = map(cut_rows, (k, v, g))
    decay = chunk_g.cumsum(2)  # G
    whole_decay = chunk_g.sum(2, keepdim=True)  # G_last: (N, H, 1, K or 1)
    # G_last − G, each a sum of its own
    later_decay = torch.cat([chunk_g[:, :, 1:], torch.zeros_like(whole_decay)], 2).flip(2).cumsum(2).flip(2)
    new_values = chunk_v  # u
    state_share = None  # w
    pair_decays = None if q is None and beta is None else _pair_decays(chunk_g)  # P
    if beta is not None and pair_decays is not None:
        weight = cut_rows(beta.unsqueeze(-1))
        system = _products_under_decay(weight * chunk_k, chunk_k, pair_decays).tril(-1) + torch.eye(
            chunk, dtype=k.dtype, device=k.device
        )  # T⁻¹
        right_side = torch.cat([weight * chunk_v, weight * chunk_k * decay.exp()], -1)
        solution = torch.linalg.solve_triangular(system, right_side, upper=False, unitriangular=True)
        new_values, state_share = solution.split([v.shape[-1], k.shape[-1]], -1)
    inner = None if q is None or pair_decays is None else _products_under_decay(cut_rows(q), chunk_k, pair_decays)
    decayed_q = None if q is None else cut_rows(q) * decay.exp()
    decayed_k = (chunk_k * later_decay.exp()).mT  # (N, H, K, C)
    fading = whole_decay.exp().mT  # (N, H, K or 1, 1)

    # Chunks in order: the first ones of all runs, then the second ones of the runs that have two, and so on.
    state = initial.index_select(0, chunks.order)
    outs = list[Tensor]()
    chunks_done = 0
    for size in chunks.sizes:
        chunk_range = slice(chunks_done, chunks_done + size)
        entering = state[:size]
        values = (
            new_values[chunk_range]
            if state_share is None
            else new_values[chunk_range] - state_share[chunk_range] @ entering
        )
        if decayed_q is not None and inner is not None:
            outs.append(decayed_q[chunk_range] @ entering + inner[chunk_range] @ values)
        leaving = fading[chunk_range] * entering + decayed_k[chunk_range] @ values
        state = torch.cat([leaving, state[size:]])
        chunks_done += size
    final = state.index_select(0, chunks.inverse)
    if q is None:
        return chunk_v[:0, 0, :, :], final
    laid_out = torch.cat(outs).transpose(1, 2).flatten(0, 1)
    return laid_out.index_select(0, chunks.back), final


def _pair_decays(g: Tensor) -> Tensor:
    """exp(g_{j+1} + … + g_i) of the pairs i ≥ j, (N, H, C, C, K or 1), and 1 elsewhere. Each sum is one of its own, as
    in Mamba 2's segsum (arXiv:2405.21060, listing 1): differences of sums from the chunk's first row on would leave
    their rounding, in the gradient of g above all."""
    chunk = g.shape[2]
    # i ≤ j: g_i is in no sum of column j
    left_out = torch.ones(chunk, chunk, dtype=torch.bool, device=g.device).triu()
    return g.unsqueeze(3).expand(*g.shape[:3], chunk, -1).masked_fill(left_out[..., None], 0).cumsum(2).exp()


def _products_under_decay(a: Tensor, b: Tensor, fades: Tensor) -> Tensor:
    """a_i · fades_ij b_j of the pairs i ≥ j: (N, H, C, C), 0 elsewhere."""
    if fades.shape[-1] == 1:
        return (a @ b.mT * fades.squeeze(-1)).tril()
    return torch.einsum("nhic,nhjc,nhijc->nhij", a, b, fades).tril()


class TorchForward:
    """A forward pass; see `ScanForward`. Nothing is saved for backward, which scans again."""

    def __init__(self, inputs: Inputs, runs: LocalRuns, scale: float) -> None:
        self._inputs = _repeat_heads(inputs, scale)
        self._runs = runs
        self.activations: tuple[()] = ()

    def summaries(self, leaving: Integers, carrying: Integers) -> tuple[Tensor, Tensor]:
        """Return B of the runs `leaving` and M of the runs `carrying`; only rows of runs in either list are scanned.

        Scanning the columns [v | 0] from the state [0 | I] gives [B | M] of the delta rule, at twice the cost or more,
        so the second half is left out where no run needs M. Without a delta term M is the product of a run's decays.
        """
        inputs = self._inputs
        device = inputs.k.device
        heads, size, width = inputs.state_shape
        summed_runs = np.union1d(leaving, carrying)
        starts = self._runs.starts[summed_runs]
        lengths = self._runs.lengths[summed_runs]
        rows = to_device(expand_runs(starts, starts + lengths), device)
        k, columns, g = (x.index_select(0, rows) for x in (inputs.k, inputs.v, inputs.g))
        beta = None if inputs.beta is None else inputs.beta.index_select(0, rows)
        leaving_at, carrying_at = (
            to_device(np.searchsorted(summed_runs, runs), device) for runs in (leaving, carrying)
        )
        initial = k.new_zeros((len(summed_runs), heads, size, width))
        transitions = k.new_zeros((0, heads, size, size))
        if beta is None:
            run_of_row = to_device(np.repeat(np.arange(len(summed_runs)), lengths), device)
            decays = g.new_zeros((len(summed_runs), heads, 1)).index_add_(0, run_of_row, g)
            transitions = decays.exp().unsqueeze(-1)
        elif len(carrying):
            unit = torch.eye(size, dtype=k.dtype, device=device).expand(len(summed_runs), heads, size, size)
            initial = torch.cat([initial, unit], -1)
            columns = torch.cat([columns, columns.new_zeros((len(columns), heads, size))], -1)
        state = scan(None, k, columns, g, beta, initial, lengths)[1]
        if beta is not None and len(carrying):
            transitions = state[..., width:]
        return state[..., :width].index_select(0, leaving_at), transitions.index_select(0, carrying_at)

    def outputs(self, states: Tensor) -> Tensor:
        return scan(*self._inputs, states, self._runs.lengths)[0]


class TorchBackward:
    """A backward pass that runs the scan once more, with a graph; see `ScanBackward`."""

    def __init__(self, inputs: Inputs, runs: LocalRuns, scale: float, saved: SavedScan) -> None:
        self._dout = saved.dout
        with torch.enable_grad():
            self._leaves = [None if x is None else x.detach().requires_grad_() for x in inputs]
            self._entering = saved.states.detach().requires_grad_()
            full_inputs = _repeat_heads(Inputs(*self._leaves), scale)  # pyright: ignore[reportArgumentType]
            self._out, self._final = scan(*full_inputs, self._entering, runs.lengths)

    def initial_state_gradients(self, runs: Integers) -> Tensor:
        """Return gradients at the entering states: zero where no output depends on a state, as without rows. The graph
        is kept for `gradients`.
        """
        (gradients,) = torch.autograd.grad(
            self._out, self._entering, self._dout, retain_graph=True, allow_unused=True
        )
        gradients = torch.zeros_like(self._entering) if gradients is None else gradients
        return pick_rows(gradients, runs)

    def prepare_chunks(self) -> None:
        """Do nothing: the scan has run."""

    def gradients(self, leaving: Tensor) -> tuple[Tensor, ...]:
        """Run autograd through the graph, which is freed; without rows all gradients are zero, as nothing
        was computed.
        """
        leaves = [x for x in self._leaves if x is not None]
        if not len(self._dout):
            return tuple(torch.zeros_like(x) for x in leaves)
        return torch.autograd.grad((self._out, self._final), leaves, (self._dout, leaving))


def _repeat_heads(inputs: Inputs, scale: float) -> Inputs:
    q, k, v, g, beta = (None if x is None else x.to(state_dtype(x.dtype)) for x in inputs)
    assert q is not None and k is not None and v is not None and g is not None
    heads_per_key = v.shape[1] // k.shape[1]
    q, k = (x if heads_per_key == 1 else x.repeat_interleave(heads_per_key, 1) for x in (q * scale, k))
    return Inputs(q, k, v, g, beta)
