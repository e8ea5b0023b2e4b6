"""Attention around a ring (`p2p`): key/value blocks travel, queries stay.

While a block is computed the next is in flight; two or three blocks are held at a time, whatever the degree. Backward
walks the ring again instead of keeping the blocks, and each block's gradient travels behind it, home to its owner.

What no query sees is not computed. Under a window that is narrow against the documents it is not sent either, and
there is no ring: see `window_rows.py`.
"""

from torch import Tensor

from longspan.attention.block import Attended, Gradients, Kept, Rule, Saved, add_block, block_gradients, summed
from longspan.attention.geometry.members import Circle
from longspan.attention.sums.merge import Partial, RowSum, accumulation_dtype
from longspan.attention.sums.rows import add_addends, joined_heads
from longspan.attention.window_rows import halo_backward, halo_forward, is_narrow
from longspan.comm import Addend, GradientRing, RingBlocks

HALVES_BYTES = 48 << 20  # of a block's gradients: a message that is worth one more launch to hide (H200)


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
        dk, dv = _around(dq, saved, k, v, circle, rule)
    return Gradients(dq.result(), dk, dv, rule.sink_gradient(saved))


def _around(dq: RowSum, saved: Saved, k: Tensor, v: Tensor, circle: Circle, rule: Rule) -> tuple[Tensor, Tensor]:
    """dk and dv, summed over the circle. The own block waits for no one: its work hides the first and last message."""
    channel, dtype = circle.channel(), accumulation_dtype(k.dtype)
    what = "attention ring backward, gradients"
    home = GradientRing(channel, (k, v), circle.counts, what, add=add_addends, dtype=dtype)
    own = _OwnBlock(dq, saved, k, v, circle, rule)
    for owner, (k_block, v_block) in RingBlocks(channel, (k, v), circle.counts, "attention ring backward"):
        if owner == circle.member:
            own.some()
        else:
            home.add(owner, block_gradients(dq, saved, k_block, v_block, circle.launches(owner), rule))
    dk, dv = home.finish(own.rest())
    return dk, dv


class _OwnBlock:
    """The gradients of one's own block: of half of the heads first and of the others last, where messages are large."""

    def __init__(self, dq: RowSum, saved: Saved, k: Tensor, v: Tensor, circle: Circle, rule: Rule) -> None:
        self._dq, self._saved, self._k, self._v, self._circle, self._rule = dq, saved, k, v, circle, rule
        kv_heads, message = k.shape[1], len(k) * k.shape[1] * (k.shape[2] + v.shape[2]) * 4
        half = kv_heads // 2 if message >= HALVES_BYTES else 0
        self._left = [slice(0, half), slice(half, kv_heads)] if half else [slice(0, kv_heads)]
        self._found: list[tuple[Tensor, Tensor]] = []

    def some(self) -> None:
        """Compute those of the next heads."""
        heads, each = self._left.pop(0), self._saved.q.shape[1] // self._k.shape[1]
        q_heads = slice(heads.start * each, heads.stop * each)
        saved = Saved(*(x[:, q_heads] for x in self._saved))
        k, v, part = self._k[:, heads], self._v[:, heads], RowSum(tuple(saved.q.shape), saved.q)
        launches = self._circle.launches(self._circle.member)
        gradients = block_gradients(part, saved, k, v, launches, self._rule.for_heads(q_heads.start, q_heads.stop))
        self._found.append(summed(gradients, k, v))
        self._dq.add_heads(q_heads, part.result())

    def rest(self) -> list[Addend]:
        """Those of all heads."""
        while self._left:
            self.some()
        dk, dv = (list(parts) for parts in zip(*self._found, strict=True))
        return [Addend(slice(0, len(self._k)), (joined_heads(dk), joined_heads(dv)))]
