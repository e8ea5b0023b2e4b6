"""Copies and sums of rows between tensors that lie differently: to heads and back, to document order and back.

On GPUs each is one pass over memory (`fused.py`).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan.attention import fused

Move = tuple[Tensor, Tensor]


def copy_rows(moves: Sequence[Move], index: Tensor | None = None) -> None:
    """into[r] ← source[index[r]] (source[r] without an index), for pairs (source, into) of (rows, members, width)."""
    if fused.available(moves[0][1]):
        fused.copy_rows(moves, index)
        return
    for source, into in moves:
        into.copy_(source if index is None else source.index_select(0, index))


def matrix_of(tensors: Sequence[Tensor], index: Tensor | None = None, dtype: torch.dtype | None = None) -> Tensor:
    """Rows of tensors (rows, …) of one dtype side by side, those of `index` in its order: (rows, columns)."""
    rows = tensors[0].shape[0] if index is None else index.shape[0]
    widths = [x.shape[1:].numel() for x in tensors]
    matrix = tensors[0].new_empty((rows, sum(widths)), dtype=dtype)
    parts = zip(tensors, matrix.split(widths, 1), strict=True)
    copy_rows([(x.flatten(1)[:, None], into[:, None]) for x, into in parts], index)
    return matrix


def joined_heads(parts: Sequence[Tensor]) -> Tensor:
    """Slices of the heads (rows, some heads, …) as (rows, heads, …); a copy unless there is one alone."""
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 1)


def sum_rows(total: Tensor, addends: Sequence[tuple[Tensor, Tensor]]) -> None:
    """total[r] ← sum of x[index[r]] over addends (x, index), for total (R, W); an index of −1 adds nothing."""
    if addends and fused.available(total) and total.dtype == torch.float32:
        fused.sum_rows(total, addends)
        return
    total.zero_()
    for x, index in addends:
        rows = (index >= 0).nonzero().squeeze(1)
        total.index_add_(0, rows, x.index_select(0, index.index_select(0, rows)).to(total.dtype))
