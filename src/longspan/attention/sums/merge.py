"""Sums over blocks: attention of disjoint key sets by their log-sum-exp, gradients by rows.

Both accumulate in float32 (float64 for float64 inputs), so that the error does not grow with the number of blocks. What
has one addend alone stays in the dtype in which it came: nothing would be gained by widening it.
"""

import torch
from torch import Tensor

from longspan.attention.sums import fused
from longspan.attention.sums.rows import add_rows, as_dtype
from longspan.comm.moves.ring import covers

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
        if self._held is None and covers(rows, self._shape[0]):
            self._held = out, lse
            return
        total_out, total_lse = self.result()
        if total_out.dtype != self._dtype:
            (total_out,) = as_dtype((total_out,), self._dtype)
            self._held = total_out, total_lse
        merge_(total_out, total_lse, rows, out, lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """out (T, N, Hv) and lse (T, N), in the accumulation dtype; out in the kernel's where it gave all of it."""
        if self._held is None:
            out = self._like.new_zeros(self._shape, dtype=self._dtype)
            self._held = out, self._like.new_full(self._shape[:2], -torch.inf, dtype=self._dtype)
        return self._held


def merge_(total_out: Tensor, total_lse: Tensor, rows: Rows, out: Tensor, lse: Tensor) -> None:
    """Merge (out, lse) into some rows of the totals, in place.

    out ← (e^L · total + e^l · out) / (e^L + e^l), written as a step of size σ(l − L) from one to the other: exact at
    L = −inf, and without an exponential that could overflow.
    """
    if total_out.dtype == torch.float32 and fused.available(total_out):
        fused.merge_(total_out, total_lse, rows, out, lse)
        return
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
        if self._held is None and covers(rows, self._shape[0]):
            self._held = x
            return
        add_rows([(x, self._wide())], rows)

    def add_heads(self, heads: slice, x: Tensor) -> None:
        """Add x (T, heads, …) to some heads of all rows."""
        if heads == slice(0, self._shape[1]):
            self.add(slice(0, self._shape[0]), x)
        else:
            add_rows([(x, self._wide()[:, heads])], slice(0, self._shape[0]))

    def _wide(self) -> Tensor:
        (self._held,) = as_dtype((self.result(),), self._dtype)
        return self._held

    def result(self) -> Tensor:
        """The sum, in the accumulation dtype; one addend that covers all rows, in its own."""
        if self._held is None:
            self._held = self._like.new_zeros(self._shape, dtype=self._dtype)
        return self._held
