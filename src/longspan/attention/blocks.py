"""What every pattern does with a block of keys: run the kernel on its launches, and add up outputs and gradients.

Attention of disjoint sets of keys is merged by its log-sum-exp; gradients are added by rows (`rows.py`). Sums are
float32 (float64 for float64 inputs), so that the error does not grow with the number of blocks; a sum of one addend
stays in the addend's dtype.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from longspan.attention.call import AttendCall, Saved
from longspan.attention.rows import (
    RowIndex,
    accumulation_dtype,
    add_rows,
    are_all_rows,
    cast_rows,
    merge_rows_,
    sum_rows,
    take_rows,
)
from longspan.attention.tiles import Launch
from longspan.comm import Addend
from longspan.plan.messages import count_head_groups


class HeadSlice(NamedTuple):
    """Key/value heads that are computed together, and the query heads that use them."""

    kv: slice
    q: slice


def cut_heads(heads: int, kv_heads: int, at_once: int) -> list[HeadSlice]:
    """Cut heads into slices of `at_once` key/value heads; the last may have fewer.

    >>> [(part.kv.start, part.q.start) for part in cut_heads(8, 4, 3)]
    [(0, 0), (3, 6)]
    """
    per_kv_head = heads // kv_heads
    bounds = [(start, min(start + at_once, kv_heads)) for start in range(0, kv_heads, at_once)]
    return [HeadSlice(slice(start, stop), slice(start * per_kv_head, stop * per_kv_head)) for start, stop in bounds]


def backward_head_groups(rows: int, q: Tensor, kv_heads: int) -> list[HeadSlice]:
    """Return the groups of heads that backward computes one after another, to hold one group's float32 sums at a time.

    `rows` is how many rows the member with the most has, so that all members cut alike; q (T, N, H) are this member's
    queries.
    """
    count = count_head_groups(rows * q.shape[1] * q.shape[2] * 4, kv_heads)  # 4 bytes a number
    return cut_heads(q.shape[1], kv_heads, -(-kv_heads // count))


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
    """The sum of tensors that each cover some rows of a tensor shaped like `_like`; rows that none covers are zero."""

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
        (self._total,) = cast_rows((self.result(),), accumulation_dtype(self._like.dtype))
        return self._total

    def result(self) -> Tensor:
        """Return the sum in the accumulation dtype; a single addend that covers all rows keeps its own dtype."""
        if self._total is None:
            self._total = self._like.new_zeros(self._like.shape, dtype=accumulation_dtype(self._like.dtype))
        return self._total


def add_block(
    total: Partial, q: Tensor, k: Tensor, v: Tensor, launches: tuple[Launch, ...], call: AttendCall
) -> None:
    """Attend from q (T, N, H) to a block's k (Tk, K, H) and v (Tk, K, Hv), and merge the result into `total`, in place.

    The kernel runs once a launch. The tensors hold all rows of this member and of the block; each launch takes its own
    rows of them.
    """
    assert call.kernel is not None
    for launch in launches:
        rows, keys = launch.q_rows, launch.k_rows
        block_call = call.for_rows(rows)
        out, lse = call.kernel.forward(
            take_rows(q, rows), take_rows(k, keys), take_rows(v, keys), launch, block_call
        )
        total.add(rows, out, lse)


def block_gradients(
    dq: RowSum, dout: Tensor, saved: Saved, launches: tuple[Launch, ...], call: AttendCall
) -> list[Addend]:
    """Add a block's part of the queries' gradient to `dq`; return the gradients of its keys and values by launch.

    The k and v of `saved` are the block's, and its out (or deltas) and lse are over the keys of all blocks.
    """
    assert call.kernel is not None
    addends = list[Addend]()
    q, k, v, out, lse = saved
    for launch in launches:
        rows, keys = launch.q_rows, launch.k_rows
        launch_saved = Saved(
            take_rows(q, rows), take_rows(k, keys), take_rows(v, keys), take_rows(out, rows), take_rows(lse, rows)
        )
        gradient, *key_gradients = call.kernel.backward(
            take_rows(dout, rows), launch_saved, launch, call.for_rows(rows)
        )
        dq.add(rows, gradient)
        if launch.key_copies:
            key_gradients = [_sum_copies(x, launch.key_copies) for x in key_gradients]
        addends.append(Addend(launch.gradient_rows, key_gradients))
    return addends


def _sum_copies(gradient: Tensor, copies: Sequence[Tensor]) -> Tensor:
    """Sum in the order of `copies`: every sum gives the same bits again."""
    columns = gradient.flatten(1).contiguous()
    total = columns.new_empty((len(copies[0]), columns.shape[1]), dtype=accumulation_dtype(gradient.dtype))
    sum_rows(total, [(columns, index) for index in copies])
    return total.unflatten(1, gradient.shape[1:])


def sum_addends(addends: list[Addend], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Return dk and dv, shaped like k and v, as sums of a block's addends in their order; rows without an
    addend are 0.
    """
    dk, dv = RowSum(k), RowSum(v)
    for rows, (k_addend, v_addend) in addends:
        dk.add(rows, k_addend)
        dv.add(rows, v_addend)
    return dk.result(), dv.result()


def sink_gradient(dout: Tensor, saved: Saved, sinks: Tensor | None) -> Tensor | None:
    """Return the gradient of the sinks (N,): −Σ rows w · (dout · out), with w = exp(sink − lse) the sink's weight.

    A logit's gradient in softmax is w · (dout · value − dout · out), and a sink has the value 0.
    """
    if sinks is None:
        return None
    weight = (sinks.to(saved.lse.dtype) - saved.lse).exp_()
    return -weight.mul_(saved.deltas(dout)).sum(0)
