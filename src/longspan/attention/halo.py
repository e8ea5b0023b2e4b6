"""Attention under a narrow window (`p2p`): every member gets the rows that its own see, straight from their owners.

A member's runs of rows need at most window − 1 rows before each: the halo. It arrives in one exchange and is laid with
the own rows in document order, so that a run sees one band and nothing is merged; its gradients go straight back. A
ring could not leave out much, for in zigzag order one of the two neighbours whose rows are seen comes last in it.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from longspan.attention.block import Rule, add_block, add_block_gradients
from longspan.attention.circle import Circle
from longspan.attention.kernels.launch import Launch
from longspan.attention.merge import Partial, RowSum
from longspan.attention.tiles import Rows
from longspan.comm import all_to_all
from longspan.layout import Segments
from longspan.layout.segments import expand, segments_of


def is_narrow(circle: Circle) -> bool:
    """Whether so little is seen of other members' rows that a halo is cheaper than a ring.

    A bound from lengths alone, and so the same on every member: a document lies in at most 2 · degree runs, each of
    which sees at most window − 1 rows before it. Narrow: at most half of the rows that would go round a ring, and at
    most twice the own rows, which is what a ring holds of others.
    """
    return circle.once("is narrow", lambda: _is_narrow(circle))


def _is_narrow(circle: Circle) -> bool:
    if circle.mask.window is None or circle.degree == 1:
        return False
    lengths = np.asarray(circle.part.group.lengths, dtype=np.int64)
    before = min(circle.mask.window - 1, int(lengths.max()))
    halos = int(np.minimum(2 * circle.degree * before, (circle.degree - 1) * lengths).sum())
    return halos <= min((circle.degree - 1) / 2, 2) * int(lengths.sum())


def halo_forward(q: Tensor, k: Tensor, v: Tensor, circle: Circle, rule: Rule) -> tuple[Tensor, Tensor]:
    """q (T, N, H), k (T, K, H), v (T, K, Hv) of this member's rows -> out (T, N, Hv), lse (T, N)."""
    halo = Halo.of(circle)
    total = Partial(q.shape[0], q.shape[1], v.shape[2], like=q)
    seen_k, seen_v = halo.fetch((k, v), "attention halo forward")
    add_block(total, q, seen_k, seen_v, halo.launches, rule)
    return rule.finish(total)


def halo_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, circle: Circle, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v in the accumulation dtype; those of k and v are summed over the circle."""
    halo, dq = Halo.of(circle), RowSum(tuple(q.shape), q)
    seen_k, seen_v = halo.fetch((k, v), "attention halo backward")
    gradients = add_block_gradients(dq, (dout, q, out, lse), seen_k, seen_v, halo.launches, rule)
    dk, dv = halo.bring_home(gradients, "attention halo backward, gradients")
    return dq.result(), dk, dv


@dataclass(frozen=True)
class Halo:
    """The rows that one member's rows see, its own among them, in document order.

    `sends[m]` are the rows of this member that member m sees; what arrives, member after member, goes to `places`.
    """

    circle: Circle
    launches: tuple[Launch, ...]
    sends: tuple[Tensor, ...]
    receives: tuple[int, ...]
    places: Tensor

    @classmethod
    def of(cls, circle: Circle) -> "Halo":
        """The halo of this rank's rows, made once."""
        return circle.once("halo", lambda: cls._made(circle))

    @classmethod
    def _made(cls, circle: Circle) -> "Halo":
        me, members = circle.member, range(circle.degree)
        keys = seen_by(circle, me)
        found = [_among(circle, owner, keys) for owner in members]
        sends = (_among(circle, me, seen_by(circle, reader))[0] for reader in members)
        return cls(
            circle,
            circle.launches_on(keys, lambda: keys.positions),
            tuple(torch.from_numpy(rows).to(circle.device) for rows in sends),
            tuple(len(rows) for rows, _ in found),
            torch.from_numpy(np.concatenate([places for _, places in found])).to(circle.device),
        )

    def fetch(self, tensors: tuple[Tensor, Tensor], what: str) -> tuple[Tensor, ...]:
        """The members' tensors (T, …) to the rows seen here."""
        channel = self.circle.channel()
        handles = [
            all_to_all(channel, [x.index_select(0, rows) for rows in self.sends], self._shapes(x), what)
            for x in tensors
        ]
        arrived = (torch.cat(handle.wait()) for handle in handles)
        return tuple(torch.empty_like(x).index_copy_(0, self.places, x) for x in arrived)

    def bring_home(self, gradients: tuple[Tensor, Tensor], what: str) -> tuple[Tensor, ...]:
        """Gradients of the rows seen here to the sums over members of those of the own rows; summed in member order."""
        channel, rows = self.circle.channel(), self.circle.counts[self.circle.member]
        shapes = [len(sent) for sent in self.sends]
        handles = [
            all_to_all(
                channel,
                x.index_select(0, self.places).split(self.receives),
                [(n, *x.shape[1:]) for n in shapes],
                what,
            )
            for x in gradients
        ]
        totals = tuple(x.new_zeros((rows, *x.shape[1:])) for x in gradients)
        for total, handle in zip(totals, handles, strict=True):
            for sent, arrived in zip(self.sends, handle.wait(), strict=True):
                total.index_add_(0, sent, arrived)
        return totals

    def _shapes(self, x: Tensor) -> list[tuple[int, ...]]:
        return [(rows, *x.shape[1:]) for rows in self.receives]


def seen_by(circle: Circle, reader: int) -> Segments:
    """The rows that one member's rows see, in document order."""
    assert circle.mask.window is not None
    real = circle.real(reader)
    start = np.maximum(real.start - circle.mask.window + 1, 0)
    same = real.document[1:] == real.document[:-1]
    start[1:] = np.where(same, np.maximum(start[1:], real.stop[:-1]), start[1:])  # a run begins where the last ended
    return segments_of(real.document, start, real.stop)


def _among(circle: Circle, owner: int, keys: Segments) -> tuple[Rows, Rows]:
    """Which rows of `owner` are among `keys`, ascending, and where there."""
    laid_out = np.asarray(circle.part.group.laid_out, dtype=np.int64)
    first = np.cumsum(laid_out) - laid_out  # of each document, among the group's rows
    held = circle.held(owner)
    rows = expand(held.start + first[held.document], held.stop + first[held.document])
    starts, stops = keys.start + first[keys.document], keys.stop + first[keys.document]
    run = np.searchsorted(starts, rows, side="right") - 1
    among = np.flatnonzero((run >= 0) & (rows < np.append(stops, 0)[run]))
    return among, keys.offset[run[among]] + rows[among] - starts[run[among]]
