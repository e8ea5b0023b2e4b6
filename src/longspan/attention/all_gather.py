"""Attention over gathered keys and values (`all_gather`): every member receives all rows of its group at once.

Gathered rows are laid in document order, so that a local run of query rows sees one prefix of its document. Backward
gathers again instead of keeping the rows, and sums the gradients of keys and values with a reduce-scatter.
Not covered: working in head slices under a memory budget.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan.attention.block import Rule, add_block, add_block_gradients
from longspan.attention.merge import Partial, RowSum
from longspan.comm import ShardPart


def all_gather_forward(q: Tensor, k: Tensor, v: Tensor, part: ShardPart, rule: Rule) -> tuple[Tensor, Tensor]:
    """q (T, N, H), k (T, K, H), v (T, K, Hv) of one group's local rows -> out (T, N, Hv), lse (T, N)."""
    all_k, all_v = _gather((k, v), part, rule, "attention all-gather forward")
    total = Partial(q.shape[0], q.shape[1], v.shape[2], like=q)
    add_block(total, q, all_k, all_v, rule.launches(part, None, q.device), rule)
    return total.result()


def all_gather_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: ShardPart, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v in the accumulation dtype; those of k and v are summed over the group."""
    all_k, all_v = _gather((k, v), part, rule, "attention all-gather backward")
    dq = RowSum(tuple(q.shape), q)
    launches = rule.launches(part, None, q.device)
    gradients = add_block_gradients(dq, (dout, q, out, lse), all_k, all_v, launches, rule)
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
            full.index_copy_(0, rows, shares)
        gathered.append(full)
    return gathered


def _rows(part: ShardPart, device: torch.device, rule: Rule) -> list[Tensor]:
    """Per member, where its rows go among the group's rows in document order."""
    key = ("rows", part.index, device)
    if key not in rule.memo:
        held = (part.group.shares.rows(member) for member in range(part.degree))
        rule.memo[key] = [torch.tensor(rows, dtype=torch.int64, device=device) for rows in held]
    return rule.memo[key]  # pyright: ignore[reportReturnType]
