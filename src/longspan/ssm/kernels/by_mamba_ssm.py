"""Recurrences of one decay a head without a delta term by the Triton kernels of mamba_ssm, if they are named.

Its chunks, forward and backward; states from chunk to chunk by our own sums (`decay.py`), since its own take one
initial state for each row of a batch. Runs are laid out in whole chunks, so that no chunk has rows of two.
Source: github.com/state-spaces/mamba, `mamba_ssm.ops.triton.ssd_*` of 2.3, whose names begin with an underscore.
"""

import math
from collections.abc import Callable
from functools import cache
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from longspan.layout.segments import Integers
from longspan.ssm.kernels.call import Inputs, Recurrence, SavedScan
from longspan.ssm.kernels.decay import scan_chunks
from longspan.ssm.kernels.packages import package_lack
from longspan.ssm.kernels.runs import LocalRuns, pick_rows

NAME = "mamba_ssm"
_NEEDED = (2, 3)  # version
_CHUNK = 128  # rows
_DTYPES = (torch.bfloat16, torch.float16)


def mamba_lack(recurrence: Recurrence) -> str:
    """Return what a recurrence would need to be run by these kernels, for an error; "" if they can run it."""
    if recurrence.delta:
        return "a recurrence without a delta term"
    if recurrence.dtype not in _DTYPES:
        return f"bfloat16 or float16, got {str(recurrence.dtype).removeprefix('torch.')}"
    return package_lack(NAME, _NEEDED, recurrence.device)


class _MambaChunks:
    """Inputs in whole chunks: b, c (1, L, G, K), x (1, L, H, V), sums of log-decays inside chunks (1, H, N, C)."""

    def __init__(self, inputs: Inputs, runs: LocalRuns, scale: float) -> None:
        """Lay the inputs out; mamba_ssm names queries c, keys b and values x, and c takes the scale."""
        self.runs = runs.cut_chunks(_CHUNK)
        self.c = self.lay_out(inputs.q if scale == 1.0 else inputs.q * scale)
        self.b, self.x = self.lay_out(inputs.k), self.lay_out(inputs.v)
        log_decays = self.lay_out(inputs.g).view(self.runs.chunks, _CHUNK, -1)
        self.sums = log_decays.cumsum(1).permute(2, 0, 1).contiguous().unsqueeze(0)
        self.whole = self.sums[0, :, :, -1].t().contiguous()  # (N, H): log-decays of whole chunks
        self.base_two = self.whole / math.log(2)  # as `scan_chunks` takes them
        self.steps = self.sums.new_ones(1).expand(self.sums.shape)  # dt: values come multiplied by it

    def lay_out(self, rows: Tensor) -> Tensor:
        """Lay rows (T, ·, ·) out in full chunks (1, L, ·, ·), zero where a run's last chunk has no row."""
        # The row of each place; the number of rows, where the appended zeros lie, for a place without a row.
        places = self.runs.padded_rows
        if places is not None:
            rows = torch.cat([rows, rows.new_zeros((1, *rows.shape[1:]))]).index_select(0, places)
        return rows.contiguous().unsqueeze(0)

    def restore_rows(self, x: Tensor) -> Tensor:
        """Take the rows (T, …) out of chunks (1, L, …)."""
        rows = x.squeeze(0)
        return rows if self.runs.padded_rows is None else rows.index_select(0, self.runs.padded_places)

    def entering_states(self, states: Tensor) -> Tensor:
        """Return the state (1, N, H, V, K) that enters each chunk, from those (R, H, K, V) that enter runs."""
        h = self.x.new_empty((1, self.runs.chunks, *states.shape[1:]))
        scan_chunks(self.additions(), self.base_two, states, self.runs, into=h)
        return h

    def additions(self) -> Tensor:
        """Return what each chunk adds to the state: (N, H, V, K) float32."""
        arguments = (self.b, self.x, self.steps, self.sums)
        return _mamba_function("ssd_chunk_state", "_chunk_state_fwd")(*arguments, states_in_fp32=True).squeeze(0)

    def products(self) -> Tensor:
        """Return c_i · b_j of the pairs of rows of each chunk: (1, N, G, C, C) float32."""
        return _mamba_function("ssd_bmm", "_bmm_chunk_fwd")(self.c, self.b, _CHUNK, output_dtype=torch.float32)


class MambaForward:
    """A forward pass; see `Forward`."""

    def __init__(self, inputs: Inputs, runs: LocalRuns, scale: float) -> None:
        """Lay the inputs out in chunks."""
        self._inputs, self._chunks = inputs, _MambaChunks(inputs, runs, scale)
        self.activations: tuple[()] = ()

    def summaries(self, leaving: Integers, carrying: Integers) -> tuple[Tensor, Tensor]:
        """Return what runs `leaving` add to the state, and the decays over runs `carrying`, as `Forward.summaries`."""
        chunks, (heads, size, width) = self._chunks, self._inputs.state_shape
        # States of mamba_ssm are (V, K), transposed to ours.
        zero = chunks.sums.new_zeros((len(chunks.runs.lengths), heads, width, size))
        states = scan_chunks(chunks.additions(), chunks.base_two, zero, chunks.runs)
        total = zero.new_zeros((len(zero), heads)).index_add_(0, chunks.runs.run_of_chunk, chunks.whole)
        return pick_rows(states, leaving).mT, pick_rows(total, carrying).exp()[:, :, None, None]

    def outputs(self, states: Tensor) -> Tensor:
        """Return the outputs (T, H, V) from the states (R, H, K, V) that enter the runs."""
        chunks = self._chunks
        h = chunks.entering_states(states.mT.contiguous())
        out, _ = _mamba_function("ssd_chunk_scan", "_chunk_scan_fwd")(
            chunks.products(), chunks.x, chunks.steps, chunks.sums, chunks.c, h
        )
        return chunks.restore_rows(out)


class MambaBackward:
    """A backward pass; see `Backward`."""

    def __init__(self, inputs: Inputs, runs: LocalRuns, scale: float, saved: SavedScan) -> None:
        """Compute, for each chunk, the gradient of its outputs by the state that enters it: (N, H, V, K)."""
        self._inputs, self._scale, self._states = inputs, scale, saved.states.mT.contiguous()
        self._chunks = chunks = _MambaChunks(inputs, runs, scale)
        self._dout = chunks.lay_out(saved.dout.to(inputs.v.dtype))
        compute_gradients = _mamba_function("ssd_chunk_scan", "_chunk_scan_bwd_dstates")
        self._added_gradients = compute_gradients(chunks.c, chunks.sums, self._dout, dtype=torch.float32).squeeze(0)
        self._h = inputs.v[:0]  # the states that enter chunks, once `prepare_chunks` has run

    def entry_gradients(self, runs: Integers) -> Tensor:
        """Return gradients (n, H, K, V) of the outputs by the states that enter these runs, with 0 at final states."""
        zero = torch.zeros_like(self._states)
        return pick_rows(self._scan_backwards(zero), runs).mT

    def prepare_chunks(self) -> None:
        """Compute the states of chunks once more."""
        self._h = self._chunks.entering_states(self._states)

    def gradients(self, leaving: Tensor) -> tuple[Tensor, ...]:
        """Return the gradients of q, k, v and g, from those (R, H, K, V) at final states.

        dh are the gradients at the states that leave chunks. In mamba_ssm's names x are values, B keys and C queries:
        dx, dB and dC come from dh and from inside chunks (through the products C Bᵀ, whose gradient goes to both). A
        log-decay's gradient has three parts: of products inside the chunk, of its state at the end (`to_end`), and of
        the state that enters it (`from_start`), which is summed over its position and those behind it.
        """
        chunks, dh = self._chunks, torch.empty_like(self._h)
        self._scan_backwards(leaving.mT.contiguous(), into=dh)
        products, groups = chunks.products(), self._inputs.k.shape[1]
        inside = (chunks.x, chunks.steps, chunks.sums)
        dx, *_ = _mamba_function("ssd_combined", "_chunk_scan_chunk_state_bwd_dx")(
            *inside, chunks.b, products, self._dout, dh
        )
        db, to_end = _mamba_function("ssd_chunk_state", "_chunk_state_bwd_db")(*inside, dh, B=chunks.b, ngroups=groups)
        compute_dc = _mamba_function("ssd_chunk_scan", "_chunk_scan_bwd_dC")
        dc, from_start = compute_dc(self._h, chunks.sums, self._dout, C=chunks.c, ngroups=groups)
        pairs = _mamba_function("ssd_chunk_scan", "_chunk_scan_bwd_dcb")(*inside, self._dout, ngroups=groups)
        multiply_by_pairs = _mamba_function("ssd_bmm", "_bmm_chunk_bwd")
        dk = multiply_by_pairs(chunks.c, pairs, residual=db, out=torch.empty_like(chunks.b))
        dq = multiply_by_pairs(chunks.b, pairs.mT, residual=dc, out=torch.empty_like(chunks.c))
        from_start[..., -1] += self._whole_decay_gradients(dh)  # a chunk's whole decay ends at its last position
        compute_inside = _mamba_function("ssd_chunk_scan", "_chunk_scan_bwd_ddAcs_stable")
        dg = compute_inside(*inside, self._dout, products) + to_end + from_start.flip(-1).cumsum(-1).flip(-1)
        dg = dg[0].permute(1, 2, 0).flatten(0, 1).unsqueeze(0)
        dq, dk, dv, dg = (chunks.restore_rows(x) for x in (dq, dk, dx, dg))
        return (dq if self._scale == 1.0 else dq * self._scale), dk, dv, dg.unsqueeze(-1)

    def _whole_decay_gradients(self, dh: Tensor) -> Tensor:
        """Return the gradients of whole chunks' log-decays: decay · Σ entering state · gradient behind, (1, H, N)."""
        passed = torch.linalg.vecdot(self._h.float().flatten(3), dh.float().flatten(3))
        return (passed * self._chunks.whole.exp()).transpose(1, 2)

    def _scan_backwards(self, leaving: Tensor, into: Tensor | None = None) -> Tensor:
        """Scan each run's chunks backwards: from gradients (R, H, V, K) at final states to those at entering states.

        `into` gets the gradient at the state that leaves each chunk.
        """
        chunks = self._chunks
        return scan_chunks(self._added_gradients, chunks.base_two, leaving, chunks.runs, into=into, backwards=True)


@cache
def _mamba_function(module: str, name: str) -> Callable[..., Any]:
    """Return `mamba_ssm.ops.triton.MODULE.NAME`; imported on first use, since the package may not be installed."""
    return getattr(import_module(f"mamba_ssm.ops.triton.{module}"), name)
