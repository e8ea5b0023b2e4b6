"""What every pattern does with a block of keys: run the kernel on its launches, and add up outputs and gradients.

Attention of disjoint sets of keys is merged by its log-sum-exp; gradients are added by rows (`rows.py`).
"""

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor

from longspan.attention.call import AttendCall, Saved
from longspan.attention.rows import accumulation_dtype, sum_rows, take_rows
from longspan.attention.sums import Partial, RowSum
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
    return [HeadSlice(slice(a, b), slice(a * per_kv_head, b * per_kv_head)) for a, b in bounds]


def backward_head_groups(rows: int, q: Tensor, kv_heads: int) -> list[HeadSlice]:
    """Return the groups of heads that backward computes one after another, to hold one group's float32 sums at a time.

    `rows` is how many the largest member has, so that all members cut alike; q (T, N, H) are one member's queries.
    """
    count = count_head_groups(rows * q.shape[1] * q.shape[2] * 4, kv_heads)  # 4 bytes a number
    return cut_heads(q.shape[1], kv_heads, -(-kv_heads // count))


def add_block(
    total: Partial, q: Tensor, k: Tensor, v: Tensor, launches: tuple[Launch, ...], call: AttendCall
) -> None:
    """Run the kernel on every launch of a block, and merge into `total`: q (T, N, H) to the block's k (Tk, K, H), v
    (Tk, K, Hv).

    The tensors hold all rows of this member and of the block; each launch takes its own rows of them.
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

    The k and v of `saved` are the block's.
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
    """Sum the gradients (rows that a kernel received, K, H) of each key row's copies, which `copies` lists
    (`find_copies`), in their order: every sum gives the same bits again.
    """
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
