"""Attention over gathered keys and values (`all_gather`): every member receives all rows of its group at once.

Gathered rows are laid in document order, so that a local run of query rows sees one prefix of its document. Backward
gathers again instead of keeping the rows, and sums the gradients of keys and values with a reduce-scatter.
Not covered: working in head slices under a memory budget.
"""

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from longspan.attention.block import Rule, add_block, add_block_gradients, real_segments
from longspan.attention.kernels.launch import Launch
from longspan.attention.merge import Partial, RowSum
from longspan.comm import ShardPart
from longspan.layout import Segments

_ALL = -1  # owner of the block that holds every member's rows


def all_gather_forward(q: Tensor, k: Tensor, v: Tensor, part: ShardPart, rule: Rule) -> tuple[Tensor, Tensor]:
    """q (T, N, H), k (T, K, H), v (T, K, Hv) of one group's local rows -> out (T, N, Hv), lse (T, N)."""
    all_k, all_v = _gather((k, v), part, rule, "attention all-gather forward")
    total = Partial(q.shape[0], q.shape[1], v.shape[2], like=q)
    add_block(total, q, all_k, all_v, _launches(part, q, rule), rule)
    return total.result()


def all_gather_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: ShardPart, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v in the accumulation dtype; those of k and v are summed over the group."""
    all_k, all_v = _gather((k, v), part, rule, "attention all-gather backward")
    dq = RowSum(tuple(q.shape), q)
    gradients = add_block_gradients(dq, (dout, q, out, lse), all_k, all_v, _launches(part, q, rule), rule)
    channel, rows = part.channel(), _rows(part, q.device, rule)
    what = "attention all-gather backward, gradients"
    handles = [channel.reduce_scatter([x[member] for member in rows], what) for x in gradients]
    dk, dv = (handle.wait() for handle in handles)
    return dq.result(), dk, dv


def _gather(tensors: Sequence[Tensor], part: ShardPart, rule: Rule, what: str) -> list[Tensor]:
    """Each member's rows (T, …) to all rows (S, …) of the group in document order."""
    channel = part.channel()
    handles = [channel.all_gather(x.contiguous(), part.counts, what) for x in tensors]
    gathered: list[Tensor] = []
    for x, handle in zip(tensors, handles, strict=True):
        full = x.new_empty((sum(part.counts), *x.shape[1:]))
        for rows, shares in zip(_rows(part, x.device, rule), handle.wait(), strict=True):
            full[rows] = shares
        gathered.append(full)
    return gathered


def _rows(part: ShardPart, device: torch.device, rule: Rule) -> list[Tensor]:
    """Per member, where its rows go among the group's rows in document order."""
    key = ("rows", part.start, device)
    if key not in rule.memo:
        held = (part.group.shares.rows(member) for member in range(part.degree))
        rule.memo[key] = [torch.tensor(rows, dtype=torch.int64, device=device) for rows in held]
    return rule.memo[key]  # pyright: ignore[reportReturnType]


def _launches(part: ShardPart, q: Tensor, rule: Rule) -> tuple[Launch, ...]:
    return rule.launches(part, real_segments(part, part.member), _documents(part), q.device, _ALL)


def _documents(part: ShardPart) -> Segments:
    """Every document whole, where it lies among the group's rows; padding rows follow it and are left out."""
    laid_out = np.asarray(part.group.laid_out, dtype=np.int64)
    lengths = np.asarray(part.group.lengths, dtype=np.int64)
    return Segments(np.arange(len(lengths)), np.zeros_like(lengths), lengths, np.cumsum(laid_out) - laid_out)
