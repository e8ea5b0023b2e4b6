"""Sums over blocks in one pass over memory: the arithmetic of `merge.py` as Triton kernels, for GPUs.

Triton comes with torch's CUDA builds. Where it is missing, or on a CPU, `available` is False and torch's own operations
do the same in several passes.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

_PAIRS = 16  # (row, head) pairs that one program takes


def available(x: Tensor) -> bool:
    """Whether the kernels can take totals like this one."""
    return x.is_cuda and x.dtype == torch.float32 and _has_triton()


@cache
def _has_triton() -> bool:
    return find_spec("triton") is not None


def merge_(total_out: Tensor, total_lse: Tensor, rows: slice | Tensor, out: Tensor, lse: Tensor) -> None:
    """Merge out (R, N, Hv) and lse (R, N) into some rows of total_out (T, N, Hv) and total_lse (T, N), in place."""
    merge: Any = import_module("longspan.attention.triton_kernels").merge
    count, heads, size = out.shape
    if count == 0:
        return
    if isinstance(rows, slice):
        total_out, total_lse = total_out[rows], total_lse[rows]
    merge[(-(-count * heads // _PAIRS),)](
        total_out,
        total_lse,
        out,
        lse,
        rows if isinstance(rows, Tensor) else None,
        count * heads,
        heads,
        size,
        *total_out.stride()[:2],
        *total_lse.stride(),
        *out.stride()[:2],
        *lse.stride(),
        HAS_INDEX=isinstance(rows, Tensor),
        PAIRS=_PAIRS,
        WIDTH=1 << (size - 1).bit_length(),
    )
