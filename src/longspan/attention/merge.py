"""Sums over blocks: attention of disjoint key sets by their log-sum-exp, gradients by rows.

Both accumulate in float32 (float64 for float64 inputs), so that the error does not grow with the number of blocks.
"""

import torch
from torch import Tensor

Rows = slice | Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, else float32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


class Partial:
    """Attention of T query rows to the keys added so far: out (T, N, Hv) and lse (T, N).

    A row that has seen no key has out 0 and lse −inf.
    """

    def __init__(self, rows: int, heads: int, head_size: int, like: Tensor) -> None:
        self._shape, self._like = (rows, heads, head_size), like
        self._dtype = accumulation_dtype(like.dtype)
        self._held: tuple[Tensor, Tensor] | None = None

    def add(self, rows: Rows, out: Tensor, lse: Tensor) -> None:
        """Merge the attention of some rows to further keys: out (rows, N, Hv), lse (rows, N), which is finite."""
        if self._held is None and _covers(rows, self._shape[0]):
            self._held = out.to(self._dtype), lse
            return
        total_out, total_lse = self.result()
        merge_(total_out, total_lse, rows, out, lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """out (T, N, Hv) and lse (T, N), both in the accumulation dtype."""
        if self._held is None:
            out = self._like.new_zeros(self._shape, dtype=self._dtype)
            self._held = out, self._like.new_full(self._shape[:2], -torch.inf, dtype=self._dtype)
        return self._held


def merge_(total_out: Tensor, total_lse: Tensor, rows: Rows, out: Tensor, lse: Tensor) -> None:
    """Merge (out, lse) into some rows of the totals, in place.

    out ← (e^L · total + e^l · out) / (e^L + e^l), written as a step of size σ(l − L) from one to the other: exact at
    L = −inf, and without an exponential that could overflow.
    """
    held_out, held_lse = total_out[rows], total_lse[rows]
    step = torch.sigmoid(lse - held_lse)
    held_out = held_out.lerp_(out.to(held_out.dtype), step.unsqueeze(-1))
    held_lse = torch.logaddexp(held_lse, lse)
    if isinstance(rows, slice):
        total_lse[rows] = held_lse
    else:
        total_out.index_copy_(0, rows, held_out)
        total_lse.index_copy_(0, rows, held_lse)


class RowSum:
    """A sum of tensors that each cover some of the rows; rows that none covers are zero."""

    def __init__(self, shape: tuple[int, ...], like: Tensor) -> None:
        self._shape, self._like = shape, like
        self._dtype = accumulation_dtype(like.dtype)
        self._held: Tensor | None = None

    def add(self, rows: Rows, x: Tensor) -> None:
        """Add x (rows, …) to distinct rows."""
        if self._held is None and _covers(rows, self._shape[0]):
            self._held = x.to(self._dtype)
        elif isinstance(rows, Tensor):
            self.result().index_add_(0, rows, x.to(self._dtype))
        else:
            self.result()[rows] += x

    def result(self) -> Tensor:
        """The sum, in the accumulation dtype."""
        if self._held is None:
            self._held = self._like.new_zeros(self._shape, dtype=self._dtype)
        return self._held


def _covers(rows: Rows, count: int) -> bool:
    return isinstance(rows, slice) and rows.start == 0 and rows.stop == count
