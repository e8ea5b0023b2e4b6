"""Outputs and gradients of blocks that arrive one after another, summed by rows.

Sums are float32 (float64 for float64 inputs), so that the error does not grow with the number of blocks; a sum of one
addend stays in the addend's dtype.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from longspan.attention.rows import RowIndex, accumulation_dtype, add_rows, are_all_rows, cast_rows, merge_rows_


@dataclass(eq=False)
class Partial:
    """Attention of queries (T, N, H) to the keys added so far: out (T, N, Hv) and lse (T, N).

    A row that has seen no key has out 0 and lse −inf.
    """

    _q: Tensor
    _value_dim: int
    _total: tuple[Tensor, Tensor] | None = None

    def add(self, rows: RowIndex, out: Tensor, lse: Tensor) -> None:
        """Merge the attention of some rows to further keys: out (rows, N, Hv) and a finite lse (rows, N). A first one
        of all rows becomes the total itself, without a copy.
        """
        if self._total is None and are_all_rows(rows, len(self._q)):
            self._total = out, lse
            return
        total_out, total_lse = self.result()
        dtype = accumulation_dtype(self._q.dtype)
        if total_out.dtype != dtype:
            (total_out,) = cast_rows((total_out,), dtype)
            self._total = total_out, total_lse
        merge_rows_(total_out, total_lse, rows, out, lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """Return out and lse so far, in the accumulation dtype; out keeps the kernel's dtype where one launch gave all
        rows and nothing was merged. They are not copies: a later `add` may write into them.
        """
        if self._total is None:
            dtype = accumulation_dtype(self._q.dtype)
            rows_and_heads = self._q.shape[:2]
            out = self._q.new_zeros((*rows_and_heads, self._value_dim), dtype=dtype)
            self._total = out, self._q.new_full(rows_and_heads, -torch.inf, dtype=dtype)
        return self._total

    def result_with_sinks(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return out (T, N, Hv) and lse (T, N), in which the `sinks` (N,) are counted as keys (None: there are none).

        A sink is one more key with value 0: it joins the log-sum-exp of each row, and the output shrinks by its weight.
        A row that sees no key and whose sink is −inf gets a finite lse, so that its weights are 0 and not NaN.
        """
        out, lse = self.result()
        if sinks is None:
            return out, lse
        lse_with_sinks = torch.logaddexp(lse, sinks.to(lse.dtype)).clamp_(min=torch.finfo(lse.dtype).min)
        return out.mul_(torch.exp(lse - lse_with_sinks).unsqueeze(-1)), lse_with_sinks


@dataclass(eq=False)
class RowSum:
    """A sum of tensors that each cover some of the rows of one `like` it; rows that none covers are zero."""

    _like: Tensor
    _total: Tensor | None = None

    def add(self, rows: RowIndex, x: Tensor) -> None:
        """Add x (rows, …) to distinct rows; a first x of all rows becomes the sum, without a copy."""
        if self._total is None and are_all_rows(rows, len(self._like)):
            self._total = x
            return
        add_rows([(x, self._full_sum())], rows)

    def add_heads(self, heads: slice, x: Tensor) -> None:
        """Add x (T, heads, …) to some heads of all rows."""
        all_rows = slice(0, len(self._like))
        if heads == slice(0, self._like.shape[1]):
            self.add(all_rows, x)
        else:
            add_rows([(x, self._full_sum()[:, heads])], all_rows)

    def _full_sum(self) -> Tensor:
        """Return the sum as a tensor of all rows in the accumulation dtype, which may be added to in place."""
        (self._total,) = cast_rows((self.result(),), accumulation_dtype(self._like.dtype))
        return self._total

    def result(self) -> Tensor:
        """Return the sum in the accumulation dtype; a single addend that covers all rows keeps its own dtype."""
        if self._total is None:
            self._total = self._like.new_zeros(self._like.shape, dtype=accumulation_dtype(self._like.dtype))
        return self._total
