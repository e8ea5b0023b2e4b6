"""Sums over chunks with decays, S ← 2^a S + added, in Triton: states of chunks, or gradients at them."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from longspan.ssm.kernels.runs import LocalRuns

_BLOCK = 1024


def faded_sums(
    added: Tensor,
    decays: Tensor,
    states: Tensor,
    runs: LocalRuns,
    *,
    into: Tensor | None = None,
    backwards: bool = False,
) -> Tensor:
    """The final state (R, H, K, V) of each run, from `states` (R, H, K, V), float32.

    added (N, G, K, H / G · V) float32 and decays (N, H) in base 2 of each chunk. `into` (1, N, H, K, V) gets the state
    before each chunk. `backwards`: chunks in reverse, for gradients: what is kept for a chunk is its final state's.
    """
    final = torch.empty_like(states)
    heads, size, width = states.shape[1:]
    grid = (-(-size * width // _BLOCK), heads, len(states))
    _kernel()[grid](
        added,
        decays,
        states.contiguous(),
        final,
        added if into is None else into,
        runs.chunk_ends,
        HEADS=heads,
        SHARED=heads // added.shape[1],
        SIZE=size,
        WIDTH=width,
        BLOCK=_BLOCK,
        KEEP=into is not None,
        BACKWARDS=backwards,
    )
    return final


@cache
def _kernel() -> Any:
    from longspan.ssm.kernels.decay.faded_sums_kernel import faded_sums_kernel

    return faded_sums_kernel
