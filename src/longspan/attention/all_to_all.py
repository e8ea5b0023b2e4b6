"""Heads for rows (`a2a`, Ulysses): neighbours exchange, so that each holds all their rows for some of the heads.

What is computed in between is a ring around the circle of such neighbourhoods: of one block under `a2a`, where the
neighbours are the whole group, and of `p2p` blocks under `a2a+p2p`, where they are the first level. Rows are laid in
document order, so that a neighbourhood's rows of a document are few runs, under zigzag two.

Query heads are dealt out in equal numbers (`heads.py`). With fewer key/value heads than neighbours, the same head goes
to several, and their gradients are summed.

Kept for backward are the local q, k, v, out and log-sum-exp alone; backward exchanges them again. That costs the wire
of q, k, v and out once more, and saves a second copy of out, which the output projection keeps anyway.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from longspan.attention.block import Rule
from longspan.attention.circle import Circle
from longspan.attention.heads import Deal
from longspan.attention.merge import accumulation_dtype
from longspan.attention.ring import ring_backward, ring_forward

Pieces = list[Tensor]


def a2a_forward(q: Tensor, k: Tensor, v: Tensor, circle: Circle, rule: Rule) -> tuple[Tensor, Tensor]:
    """q (T, N, H), k (T, K, H), v (T, K, Hv) of one group's local rows -> out (T, N, Hv), lse (T, N)."""
    if circle.inner == 1:
        return ring_forward(q, k, v, circle, rule)
    swap = _Swap(circle, Deal(q.shape[1], k.shape[1], circle.inner))
    q_all, k_all, v_all = swap.to_heads((q,), (k, v), "attention all-to-all forward")
    out, lse = ring_forward(q_all, k_all, v_all, circle, swap.rule_of(rule))
    what = "attention all-to-all forward, back"
    out, lse = swap.to_rows((out.to(q.dtype), lse), (), what)
    return out, lse


def a2a_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, circle: Circle, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v; those of k and v are summed over the group."""
    if circle.inner == 1:
        return ring_backward(dout, q, k, v, out, lse, circle, rule)
    swap = _Swap(circle, Deal(q.shape[1], k.shape[1], circle.inner))
    given = swap.to_heads((dout, q, out, lse), (k, v), "attention all-to-all backward")
    dout, q_all, out, lse, k_all, v_all = given
    dq, dk, dv = ring_backward(dout, q_all, k_all, v_all, out, lse, circle, swap.rule_of(rule))
    # Sums that are whole are as exact in the input's dtype; parts of a sum are not.
    kv_dtype = accumulation_dtype(q.dtype) if swap.deal.shares else q.dtype
    what = "attention all-to-all backward, gradients"
    dq, dk, dv = swap.to_rows((dq.to(q.dtype),), (dk.to(kv_dtype), dv.to(kv_dtype)), what)
    return dq, dk, dv


class _Swap:
    """The exchange inside one neighbourhood: (T, all heads) of the local rows for (R, some heads) of all its rows."""

    def __init__(self, circle: Circle, deal: Deal) -> None:
        self.deal, self._circle = deal, circle
        self._channel, self._counts, self._places = circle.inside(), circle.inside_counts, circle.places
        self._me = self._channel.index
        self._uses = deal.uses(self._me)

    def rule_of(self, rule: Rule) -> Rule:
        """The rule for the query heads that are computed here."""
        mine = self.deal.q(self._me)
        return rule.for_heads(mine.start, mine.stop)

    def to_heads(self, q_like: Sequence[Tensor], kv_like: Sequence[Tensor], what: str) -> Pieces:
        """Tensors (T, N, …) and (T, K, …) to (R, heads computed here, …), rows in document order."""
        dealt = [self._dealt(q_like, kv_like, member) for member in range(self.deal.members)]
        sends = [_packed(pieces) for pieces in dealt]
        arrived = [x.new_empty((sum(self._counts), x.shape[1])) for x in sends[self._me]]
        self._exchange(sends, [list(x) for x in zip(*(x.split(self._counts) for x in arrived), strict=True)], what)
        del sends
        if self._places is not None:
            arrived = [torch.empty_like(x).index_copy_(0, self._places, x) for x in arrived]
        found = _unpacked(arrived, dealt[self._me])
        return found[: len(q_like)] + [self._as_used(x) for x in found[len(q_like) :]]

    def to_rows(self, q_like: Sequence[Tensor], kv_like: Sequence[Tensor], what: str) -> Pieces:
        """Tensors (R, heads computed here, …) to (T, N, …) and (T, K, …), where a shared K head is summed."""
        own = [*q_like, *(self._as_dealt(x) for x in kv_like)]
        packed = [x if self._places is None else x.index_select(0, self._places) for x in _packed(own)]
        sends = [list(x) for x in zip(*(x.split(self._counts) for x in packed), strict=True)]
        rows = self._counts[self._me]
        whole = [x.new_zeros((rows, self.deal.heads, *x.shape[2:])) for x in q_like]
        whole += [x.new_zeros((rows, self.deal.kv_heads, *x.shape[2:])) for x in kv_like]
        parts = [self._dealt(whole[: len(q_like)], whole[len(q_like) :], m) for m in range(self.deal.members)]
        arrived = [[whole[0].new_empty((rows, w), dtype=t) for t, w in _widths(pieces).items()] for pieces in parts]
        self._exchange(sends, arrived, what)
        for pieces, matrices in zip(parts, arrived, strict=True):
            for into, x in zip(pieces, _unpacked(matrices, pieces), strict=True):
                into.add_(x)
        return whole

    def _dealt(self, q_like: Sequence[Tensor], kv_like: Sequence[Tensor], member: int) -> Pieces:
        """Views of the heads that one member computes."""
        return [x[:, self.deal.q(member)] for x in q_like] + [x[:, self.deal.kv(member)] for x in kv_like]

    def _as_used(self, x: Tensor) -> Tensor:
        """(R, dealt key/value heads, …) with one head for each run of query heads."""
        if self._uses == list(range(x.shape[1])):
            return x
        return x.index_select(1, self._circle.index(self._uses))

    def _as_dealt(self, x: Tensor) -> Tensor:
        """The transpose of `_as_used`: gradients of the runs that use one head are summed."""
        dealt = self.deal.kv(self._me)
        if self._uses == list(range(dealt.stop - dealt.start)):
            return x
        total = x.new_zeros((len(x), dealt.stop - dealt.start, *x.shape[2:]))
        return total.index_add_(1, self._circle.index(self._uses), x)

    def _exchange(self, sends: Sequence[Pieces], receives: Sequence[Pieces], what: str) -> None:
        """Every member's matrices to that member; one's own are copied."""
        for own, into in zip(sends[self._me], receives[self._me], strict=True):
            into.copy_(own)
        others = [member for member in range(self.deal.members) if member != self._me]
        sent = [(member, x) for member in others for x in sends[member]]
        self._channel.exchange(sent, [(member, x) for member in others for x in receives[member]], what).wait()


def _packed(pieces: Pieces) -> Pieces:
    """Tensors (rows, …) side by side: one matrix (rows, columns) for each dtype, so that a peer gets one message."""
    return [torch.cat([x.flatten(1) for x in pieces if x.dtype == dtype], 1) for dtype in _widths(pieces)]


def _widths(pieces: Pieces) -> dict[torch.dtype, int]:
    """Columns of those matrices."""
    widths: dict[torch.dtype, int] = {}
    for x in pieces:
        widths[x.dtype] = widths.get(x.dtype, 0) + x.shape[1:].numel()
    return widths


def _unpacked(matrices: Pieces, like: Pieces) -> Pieces:
    """Views of the columns of `_packed`, in the shapes of other rows of the same tensors."""
    at = dict.fromkeys(_widths(like), 0)
    by_dtype, found = {x.dtype: x for x in matrices}, list[Tensor]()
    for piece in like:
        start, width = at[piece.dtype], piece.shape[1:].numel()
        found.append(by_dtype[piece.dtype][:, start : start + width].unflatten(1, piece.shape[1:]))
        at[piece.dtype] += width
    return found
