"""Attention around a ring (`p2p`): key/value blocks travel, queries stay.

While a block is computed the next is in flight; two or three blocks are held at a time, whatever the degree. Backward
walks the ring again instead of keeping the blocks, and each block's gradient travels with it, home to its owner.

What no query sees is not computed. Under a window that is narrow against the documents it is not sent either, and
there is no ring: see `halo.py`.
"""

from torch import Tensor

from longspan.attention.block import Rule, add_block, add_block_gradients
from longspan.attention.circle import Circle
from longspan.attention.halo import halo_backward, halo_forward, is_narrow
from longspan.attention.merge import Partial, RowSum, accumulation_dtype
from longspan.comm import GradientRing, RingBlocks


def ring_forward(q: Tensor, k: Tensor, v: Tensor, circle: Circle, rule: Rule) -> tuple[Tensor, Tensor]:
    """q (T, N, H), k (T, K, H), v (T, K, Hv) of this member's rows -> out (T, N, Hv), lse (T, N)."""
    if is_narrow(circle):
        return halo_forward(q, k, v, circle, rule)
    total = Partial(q.shape[0], q.shape[1], v.shape[2], like=q)
    if circle.degree == 1:
        add_block(total, q, k, v, circle.launches(0), rule)
        return rule.finish(total)
    for owner, (k_block, v_block) in RingBlocks(circle.channel(), (k, v), circle.counts, "attention ring forward"):
        add_block(total, q, k_block, v_block, circle.launches(owner), rule)
    return rule.finish(total)


def ring_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, circle: Circle, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v in the accumulation dtype; those of k and v are summed over the circle."""
    if is_narrow(circle):
        return halo_backward(dout, q, k, v, out, lse, circle, rule)
    saved, dq = (dout, q, out, lse), RowSum(tuple(q.shape), q)
    if circle.degree == 1:
        dk, dv = add_block_gradients(dq, saved, k, v, circle.launches(0), rule)
        return dq.result(), dk, dv
    channel, dtype = circle.channel(), accumulation_dtype(q.dtype)
    home = GradientRing(channel, (k, v), circle.counts, "attention ring backward, gradients", dtype=dtype)
    for owner, (k_block, v_block) in RingBlocks(channel, (k, v), circle.counts, "attention ring backward"):
        home.add(owner, add_block_gradients(dq, saved, k_block, v_block, circle.launches(owner), rule))
    dk, dv = home.finish()
    return dq.result(), dk, dv
