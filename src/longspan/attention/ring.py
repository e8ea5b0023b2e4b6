"""Attention around a ring (`p2p`): key/value blocks travel, queries stay.

While a block is computed the next is in flight; two or three blocks are held at a time, whatever the degree. Backward
walks the ring again instead of keeping the blocks, and each block's gradient travels with it, home to its owner.

What no query sees is not computed. Under a window that is narrow against the documents (`Circle.is_narrow`) it is not
sent either: then every member gets just the rows that its queries see, straight from their owner, and sends their
gradients straight back. A ring could not do that, for in zigzag order one of the two neighbours whose rows are seen
comes last in it.
"""

from collections.abc import Iterable, Sequence

from torch import Tensor

from longspan.attention.block import Rule, add_block, add_block_gradients
from longspan.attention.circle import Circle
from longspan.attention.merge import Partial, RowSum, accumulation_dtype
from longspan.comm import GradientRing, PairBlocks, PairGradients, RingBlocks


def ring_forward(q: Tensor, k: Tensor, v: Tensor, circle: Circle, rule: Rule) -> tuple[Tensor, Tensor]:
    """q (T, N, H), k (T, K, H), v (T, K, Hv) of this member's rows -> out (T, N, Hv), lse (T, N)."""
    total = Partial(q.shape[0], q.shape[1], v.shape[2], like=q)
    for owner, (k_block, v_block) in _blocks(circle, (k, v), "attention ring forward"):
        add_block(total, q, k_block, v_block, circle.launches(owner), rule)
    return rule.finish(total)


def ring_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, circle: Circle, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v in the accumulation dtype; those of k and v are summed over the circle."""
    saved, dq = (dout, q, out, lse), RowSum(tuple(q.shape), q)
    if circle.degree == 1:
        dk, dv = add_block_gradients(dq, saved, k, v, circle.launches(0), rule)
        return dq.result(), dk, dv
    home = _home(circle, (k, v), "attention ring backward, gradients")
    for owner, (k_block, v_block) in _blocks(circle, (k, v), "attention ring backward"):
        home.add(owner, add_block_gradients(dq, saved, k_block, v_block, circle.launches(owner), rule))
    dk, dv = home.finish()
    return dq.result(), dk, dv


def _blocks(circle: Circle, tensors: Sequence[Tensor], what: str) -> Iterable[tuple[int, tuple[Tensor, ...]]]:
    """(owner, its rows that are computed with here), one's own first."""
    if circle.degree == 1:
        return [(0, tuple(tensors))]
    if circle.is_narrow:
        return PairBlocks(circle.channel(), tensors, circle.sends, circle.receives, what)
    return RingBlocks(circle.channel(), tensors, circle.counts, what)


def _home(circle: Circle, like: Sequence[Tensor], what: str) -> GradientRing | PairGradients:
    dtype = accumulation_dtype(like[0].dtype)
    if circle.is_narrow:
        return PairGradients(circle.channel(), circle.sends, what, dtype=dtype)
    return GradientRing(circle.channel(), like, circle.counts, what, dtype=dtype)
