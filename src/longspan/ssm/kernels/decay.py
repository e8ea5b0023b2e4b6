"""Recurrences of one decay a head without a delta term (Mamba 2): chunks by flash-linear-attention, states here.

What a chunk adds to the state is one product for all heads that share keys (kᵀ times the faded values), worked out
once: the sums over chunks that follow are cheap, so that a run's summary costs little next to its scan. Source of the
chunks: Dao and Gu, "Transformers are SSMs" (arXiv 2405.21060) §6.
"""

from typing import Any

import torch
from torch import Tensor

from longspan.layout.segments import Integers
from longspan.ssm.kernels.fla import (
    add_batch_dim,
    chunk_arguments,
    chunk_cumsum,
    fla_function,
    gradients_like_inputs,
    triton_kernel,
)
from longspan.ssm.kernels.interface import Inputs, SavedScan
from longspan.ssm.kernels.local_runs import CHUNK, LocalRuns, pick_rows

_BLOCK = 1024  # numbers of a head's state that one program scans


def scan_chunks(
    chunk_additions: Tensor,
    decays: Tensor,
    states: Tensor,
    runs: LocalRuns,
    *,
    into: Tensor | None = None,
    backwards: bool = False,
) -> Tensor:
    """Scan the chunks of each run from `states` (R, H, K, V); return their final states, float32.

    Each chunk multiplies the state by 2^decay, decays (N, H), and adds its addition (N, G, K, H / G · V), float32.
    `into` (1, N, H, K, V) gets the state before each chunk. `backwards` goes through chunks in reverse, for gradients:
    `into` then gets the gradient at the state after each chunk.
    """
    final = torch.empty_like(states)
    heads, size, width = states.shape[1:]
    grid = (-(-size * width // _BLOCK), heads, len(states))
    triton_kernel("scan_chunks_kernel")[grid](
        chunk_additions,
        decays,
        states.contiguous(),
        final,
        # The kernel does not write this tensor without KEEP.
        chunk_additions if into is None else into,
        runs.chunk_ends,
        HEADS=heads,
        SHARED=heads // chunk_additions.shape[1],
        SIZE=size,
        WIDTH=width,
        BLOCK=_BLOCK,
        KEEP=into is not None,
        BACKWARDS=backwards,
    )
    return final


class _Decays:
    """Log-decays (base 2): `g` (1, T, H) summed from each chunk's start, and `whole` (N, H) over whole chunks."""

    def __init__(self, g: Tensor, runs: LocalRuns) -> None:
        self.g = g
        self.whole = g.squeeze(0).index_select(0, runs.last_rows)  # (N, H)
        self._chunk_of_row = runs.chunk_of_row

    def decay_to_end(self) -> Tensor:
        """Return the factor (T, H, 1) by which what each row adds to the state has decayed at its chunk's end."""
        return torch.exp2(self.whole.index_select(0, self._chunk_of_row) - self.g.squeeze(0)).unsqueeze(-1)


class DecayForward:
    """A forward pass; see `ScanForward`. What each chunk adds to the state does not depend on the entering states."""

    def __init__(self, inputs: Inputs, runs: LocalRuns, scale: float) -> None:
        self._inputs = inputs
        self._runs = runs
        self._scale = scale
        self._decays = _Decays(chunk_cumsum(inputs.g.squeeze(-1), runs), runs)
        self._additions = additions_by_chunk(inputs.k, inputs.v, self._decays.decay_to_end(), runs)
        self.activations: tuple[Tensor] = (self._decays.g,)

    def summaries(self, leaving: Integers, carrying: Integers) -> tuple[Tensor, Tensor]:
        """Return B of the runs `leaving` and M of the runs `carrying`: one number a head, the run's whole decay."""
        heads, size, width = self._inputs.state_shape
        zero = self._inputs.k.new_zeros((len(self._runs.lengths), heads, size, width), dtype=torch.float32)
        states = scan_chunks(self._additions, self._decays.whole, zero, self._runs)
        total = zero.new_zeros((len(zero), heads)).index_add_(
            0, self._runs.run_of_chunk, self._decays.whole.float()
        )
        return pick_rows(states, leaving), torch.exp2(pick_rows(total, carrying))[:, :, None, None]

    def outputs(self, states: Tensor) -> Tensor:
        """Scan again from the entering states for the state before each chunk, and let fla's kernel compute the outputs
        (T, H, V).
        """
        q, k, v, _ = add_batch_dim(self._inputs)
        h = v.new_empty((1, self._runs.chunks, *self._inputs.state_shape))  # states that enter chunks
        scan_chunks(self._additions, self._decays.whole, states, self._runs, into=h)
        compute_outputs = fla_function("ops.common.chunk_o", "chunk_fwd_o")
        arguments = {"q": q, "k": k, "v": v, "h": h, "g": self._decays.g}
        return compute_outputs(**arguments, scale=self._scale, **chunk_arguments(self._runs)).squeeze(0)


class DecayBackward:
    """A backward pass; see `ScanBackward`."""

    def __init__(self, inputs: Inputs, runs: LocalRuns, scale: float, saved: SavedScan) -> None:
        """Compute what the outputs of each chunk's rows add to the gradient at the state that enters the chunk: this
        needs nothing of other runs.
        """
        self._inputs = inputs
        self._runs = runs
        self._scale = scale
        self._saved = saved
        self._decays = _Decays(saved.activations[0], runs)
        self._do = saved.dout.to(inputs.v.dtype).contiguous()
        # (T, H, 1): the factor by which the state that entered the chunk has decayed at each row
        decay_from_start = torch.exp2(self._decays.g.squeeze(0)).unsqueeze(-1)
        self._added_gradients = additions_by_chunk(inputs.q, self._do, scale * decay_from_start, runs)
        self._h = inputs.v[:0]  # the states that enter chunks, once `prepare_chunks` has run

    def initial_state_gradients(self, runs: Integers) -> Tensor:
        """Return gradients at the entering states, by a scan of chunks from the last to the first.

        The gradient that comes from the chunk behind fades by a chunk's decay, and the gradient of the chunk's own
        outputs is added.
        """
        zero = torch.zeros_like(self._saved.states)
        gradients = scan_chunks(self._added_gradients, self._decays.whole, zero, self._runs, backwards=True)
        return pick_rows(gradients, runs)

    def prepare_chunks(self) -> None:
        """Compute the states that enter chunks once more: forward did not keep them."""
        _, k, v, _, _ = self._inputs
        self._h = v.new_empty((1, self._runs.chunks, *self._inputs.state_shape))
        additions = additions_by_chunk(k, v, self._decays.decay_to_end(), self._runs)
        scan_chunks(additions, self._decays.whole, self._saved.states, self._runs, into=self._h)

    def gradients(self, leaving: Tensor) -> tuple[Tensor, ...]:
        """Scan the gradients from the final states of runs back through chunks, and let fla's kernels compute those of
        the inputs.
        """
        q, k, v, _ = add_batch_dim(self._inputs)
        dh = torch.empty_like(self._h)
        scan_chunks(self._added_gradients, self._decays.whole, leaving, self._runs, into=dh, backwards=True)
        arguments: dict[str, Any] = {"q": q, "k": k, "g": self._decays.g, "do": self._do.unsqueeze(0), "dh": dh}
        arguments |= {"scale": self._scale, **chunk_arguments(self._runs)}
        compute_read_gradients = fla_function("ops.common.chunk_o", "chunk_bwd_dqkwg")
        dq, dk, _, dg = compute_read_gradients(**arguments, v=v, h=self._h)
        dv = fla_function("ops.common.chunk_o", "chunk_bwd_dv")(**arguments)
        dg = chunk_cumsum(dg.squeeze(0), self._runs, reverse=True).unsqueeze(-1)
        return gradients_like_inputs((dq, dk, dv, dg), self._inputs)


def additions_by_chunk(keys: Tensor, values: Tensor, weight: Tensor, runs: LocalRuns) -> Tensor:
    """Sum key ⊗ weight · value over each chunk: (T, G, K), (T, H, V), (T, H, 1) -> (N, G, K, H / G · V), float32.

    Heads that share keys lie side by side, so that there is one product for them.
    """
    groups, size = keys.shape[1:]
    weighted_values = (values * weight).to(values.dtype)
    rows = []
    for x in (keys, weighted_values):
        # Zeros take the places of the missing rows of short chunks.
        if runs.padded_rows is not None:
            x = torch.cat([x, x.new_zeros((1, *x.shape[1:]))]).index_select(0, runs.padded_rows)
        rows.append(x.reshape(runs.chunks, CHUNK, groups, -1).transpose(1, 2).flatten(0, 1))  # (N · G, C, ·)
    sums = torch.bmm(rows[0].mT, rows[1], out_dtype=torch.float32)
    return sums.view(runs.chunks, groups, size, -1)
