"""Sums and merges of blocks that arrive one after another, kept in float32 (float64 for float64 inputs)."""

import torch
from torch import Tensor

from longspan.attention.sums.rows import Rows, accumulation_dtype, add_rows, as_dtype, merge_
from longspan.comm.moves.ring import covers


class Partial:
    """Attention of T query rows to the keys added so far: out (T, N, Hv) and lse (T, N).

    A row that has seen no key has out 0 and lse −inf.
    """

    def __init__(self, rows: int, heads: int, head_size: int, like: Tensor) -> None:
        self._shape, self._like = (rows, heads, head_size), like
        self._total: tuple[Tensor, Tensor] | None = None

    def add(self, rows: Rows, out: Tensor, lse: Tensor) -> None:
        """Merge the attention of some rows to further keys: out (rows, N, Hv), lse (rows, N), which is finite."""
        if self._total is None and covers(rows, self._shape[0]):
            self._total = out, lse
            return
        total_out, total_lse = self.result()
        dtype = accumulation_dtype(self._like.dtype)
        if total_out.dtype != dtype:
            (total_out,) = as_dtype((total_out,), dtype)
            self._total = total_out, total_lse
        merge_(total_out, total_lse, rows, out, lse)

    def result(self) -> tuple[Tensor, Tensor]:
        """out (T, N, Hv) and lse (T, N), in the accumulation dtype; out in the kernel's where it gave all of it."""
        if self._total is None:
            dtype = accumulation_dtype(self._like.dtype)
            out = self._like.new_zeros(self._shape, dtype=dtype)
            self._total = out, self._like.new_full(self._shape[:2], -torch.inf, dtype=dtype)
        return self._total

    def with_sinks(self, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        """out (T, N, Hv) and lse (T, N) over all keys, and the sinks (N,).

        A sink is one more key with value 0: it joins the log-sum-exp of each row and thins the output. The lse of rows
        that see neither a key nor a sink (of −inf) is finite, so that their weights are 0.
        """
        out, lse = self.result()
        if sinks is None:
            return out, lse
        with_sinks = torch.logaddexp(lse, sinks.to(lse.dtype)).clamp_(min=torch.finfo(lse.dtype).min)
        return out.mul_(torch.exp(lse - with_sinks).unsqueeze(-1)), with_sinks


class RowSum:
    """A sum of tensors that each cover some of the rows; rows that none covers are zero."""

    def __init__(self, shape: tuple[int, ...], like: Tensor) -> None:
        self._shape, self._like = shape, like
        self._total: Tensor | None = None

    def add(self, rows: Rows, x: Tensor) -> None:
        """Add x (rows, …) to distinct rows."""
        if self._total is None and covers(rows, self._shape[0]):
            self._total = x
            return
        add_rows([(x, self._wide())], rows)

    def add_heads(self, heads: slice, x: Tensor) -> None:
        """Add x (T, heads, …) to some heads of all rows."""
        if heads == slice(0, self._shape[1]):
            self.add(slice(0, self._shape[0]), x)
        else:
            add_rows([(x, self._wide()[:, heads])], slice(0, self._shape[0]))

    def _wide(self) -> Tensor:
        (self._total,) = as_dtype((self.result(),), accumulation_dtype(self._like.dtype))
        return self._total

    def result(self) -> Tensor:
        """The sum, in the accumulation dtype; one addend that covers all rows, in its own."""
        if self._total is None:
            self._total = self._like.new_zeros(self._shape, dtype=accumulation_dtype(self._like.dtype))
        return self._total
