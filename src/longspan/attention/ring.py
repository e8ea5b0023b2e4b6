"""Attention around a ring (`p2p`): key/value blocks travel, queries stay.

While a block is computed the next is in flight; two or three blocks are held at a time, whatever the degree. Backward
walks the ring again instead of keeping the blocks, and each block's gradient travels with it, home to its owner.

What no query sees is not computed. Under a window that is narrow against the documents it is not sent either, and
there is no ring: see `halo.py`.
"""

from torch import Tensor

from longspan.attention.block import Attended, Gradients, Kept, Rule, Saved, add_block, block_gradients, summed
from longspan.attention.circle import Circle
from longspan.attention.halo import halo_backward, halo_forward, is_narrow
from longspan.attention.merge import Partial, RowSum, accumulation_dtype
from longspan.comm import GradientRing, RingBlocks


def ring_forward(q: Tensor, k: Tensor, v: Tensor, circle: Circle, rule: Rule) -> Attended:
    """q (T, N, H), k (T, K, H), v (T, K, Hv) of this member's rows."""
    if is_narrow(circle):
        return halo_forward(q, k, v, circle, rule)
    total = Partial(q.shape[0], q.shape[1], v.shape[2], like=q)
    if circle.degree == 1:
        add_block(total, q, k, v, circle.launches(0), rule)
    else:
        for owner, (k_block, v_block) in RingBlocks(circle.channel(), (k, v), circle.counts, "attention ring forward"):
            add_block(total, q, k_block, v_block, circle.launches(owner), rule)
    out, lse = rule.finish(total)
    return Attended(out, (q, k, v, None, lse))


def ring_backward(dout: Tensor, kept: Kept, circle: Circle, rule: Rule) -> Gradients:
    """Gradients of this member's rows."""
    q, k, v, out, lse = kept
    saved = Saved(dout, q, out, lse)
    if is_narrow(circle):
        return halo_backward(saved, k, v, circle, rule)
    dq = RowSum(tuple(q.shape), q)
    if circle.degree == 1:
        dk, dv = summed(block_gradients(dq, saved, k, v, circle.launches(0), rule), k, v)
    else:
        channel, dtype = circle.channel(), accumulation_dtype(q.dtype)
        home = GradientRing(channel, (k, v), circle.counts, "attention ring backward, gradients", dtype=dtype)
        for owner, (k_block, v_block) in RingBlocks(channel, (k, v), circle.counts, "attention ring backward"):
            home.add(owner, block_gradients(dq, saved, k_block, v_block, circle.launches(owner), rule))
        dk, dv = home.finish()
    return Gradients(dq.result(), dk, dv, rule.sink_gradient(saved))
