"""Attention around a ring (`p2p`): key/value blocks travel, queries stay.

While a block is computed the next is in flight; two or three blocks are held at a time, whatever the degree. Backward
walks the ring again instead of keeping the blocks, and each block's gradient travels with it, home to its owner.
"""

from torch import Tensor

from longspan.attention.block import Rule, add_block, add_block_gradients
from longspan.attention.merge import Partial, RowSum, accumulation_dtype
from longspan.comm import GradientRing, RingBlocks, ShardPart


def ring_forward(q: Tensor, k: Tensor, v: Tensor, part: ShardPart, rule: Rule) -> tuple[Tensor, Tensor]:
    """q (T, N, H), k (T, K, H), v (T, K, Hv) of one group's local rows -> out (T, N, Hv), lse (T, N)."""
    total = Partial(q.shape[0], q.shape[1], v.shape[2], like=q)
    for owner, (k_block, v_block) in RingBlocks(part.channel(), (k, v), part.counts, "attention ring forward"):
        add_block(total, q, k_block, v_block, rule.launches(part, owner, q.device), rule)
    return total.result()


def ring_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, part: ShardPart, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v in the accumulation dtype; those of k and v are summed over the group."""
    channel, saved = part.channel(), (dout, q, out, lse)
    dq = RowSum(tuple(q.shape), q)
    home = GradientRing(
        channel, (k, v), part.counts, "attention ring backward, gradients", dtype=accumulation_dtype(q.dtype)
    )
    for owner, (k_block, v_block) in RingBlocks(channel, (k, v), part.counts, "attention ring backward"):
        launches = rule.launches(part, owner, q.device)
        home.add(owner, add_block_gradients(dq, saved, k_block, v_block, launches, rule))
    dk, dv = home.finish()
    return dq.result(), dk, dv
