"""One block: local query rows against one set of key rows, through the kernel of a call, and sums over blocks.

The communication patterns (`ring.py`, `all_gather.py`, `all_to_all.py`) decide which key rows there are and when; what
is computed with them is here, and is the same for all patterns. Attention of disjoint key sets is merged by its
log-sum-exp, gradients are added by rows. Both accumulate in float32 (float64 for float64 inputs), so that the error
does not grow with the number of blocks. What has one addend alone stays in the dtype in which it came: nothing would be
gained by widening it.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from longspan.attention.call import AttentionCall, Saved
from longspan.attention.geometry.launch import Launch
from longspan.attention.sums.rows import Rows, accumulation_dtype, add_rows, as_dtype, merge_, taken
from longspan.comm import Addend
from longspan.comm.moves.ring import covers

NUMBERS_AT_ONCE = 1 << 23  # of (rows, heads, head size) whose products with the gradient are held: 32 MiB in float32


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


class Gradients(NamedTuple):
    """Gradients of the local q, k and v, those of k and v summed over the group; of the sinks, this rank's part."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None


def add_block(
    total: Partial, q: Tensor, k: Tensor, v: Tensor, launches: tuple[Launch, ...], call: AttentionCall
) -> None:
    """Add to `total` the attention of q (T, N, H) to this block's k (Tk, K, H), v (Tk, K, Hv)."""
    assert call.kernel is not None
    for launch in launches:
        rows, keys = launch.q_rows, launch.k_rows
        out, lse = call.kernel.forward(taken(q, rows), taken(k, keys), taken(v, keys), launch, call)
        total.add(rows, out, lse)


def block_gradients(
    dq: RowSum, dout: Tensor, saved: Saved, launches: tuple[Launch, ...], call: AttentionCall
) -> list[Addend]:
    """Add a block's part of the query's gradient to `dq`; return those of its keys and values, in parts.

    The k and v of `saved` are the block's.
    """
    assert call.kernel is not None
    addends, (q, k, v, out, lse) = list[Addend](), saved
    for launch in launches:
        rows, keys = launch.q_rows, launch.k_rows
        of_launch = Saved(taken(q, rows), taken(k, keys), taken(v, keys), taken(out, rows), taken(lse, rows))
        gradient, *of_keys = call.kernel.backward(taken(dout, rows), of_launch, launch, call)
        dq.add(rows, gradient)
        addends.append(Addend(keys, of_keys))
    return addends


def summed(addends: list[Addend], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """The sums dk (Tk, K, H) and dv (Tk, K, Hv) of a block's parts."""
    dk, dv = RowSum(tuple(k.shape), k), RowSum(tuple(v.shape), v)
    for rows, (of_k, of_v) in addends:
        dk.add(rows, of_k)
        dv.add(rows, of_v)
    return dk.result(), dv.result()


def sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor | None) -> Tensor | None:
    """−Σ rows weight of the sink · (dout · out): with lse over keys and sink, softmax's gradient at value 0.

    Some rows after others: products of all rows at once would take several times the memory of the queries.
    """
    if sinks is None:
        return None
    total = sinks.new_zeros(sinks.shape, dtype=lse.dtype)
    at_once = max(1, NUMBERS_AT_ONCE // out.shape[1:].numel())
    for dout_rows, out_rows, lse_rows in zip(*(x.split(at_once) for x in (dout, out, lse)), strict=True):
        weight = torch.exp(sinks.to(lse.dtype) - lse_rows)
        total -= (weight * (dout_rows * out_rows.to(lse.dtype)).sum(-1)).sum(0)
    return total
