"""Attention under a narrow window (`p2p`): every member gets the rows that its own see, straight from their owners.

A member's runs of rows need at most window − 1 rows before each: the halo. It arrives in one exchange and is laid with
the own rows in document order, so that a run sees one band and nothing is merged; its gradients go straight back. A
ring could not leave out much, for in zigzag order one of the two neighbours whose rows are seen comes last in it.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor

from longspan.attention.block import Attended, Gradients, Rule, Saved, add_block, block_gradients, summed
from longspan.attention.geometry.launch import Launch
from longspan.attention.geometry.members import Circle
from longspan.attention.geometry.tiles import Rows
from longspan.attention.sums.merge import Partial, RowSum, accumulation_dtype
from longspan.attention.sums.rows import join_columns
from longspan.comm import split_columns, to_device
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
    return narrow(circle.part.group.lengths, circle.degree, circle.mask.window)


def narrow(lengths: Sequence[int], degree: int, window: int | None) -> bool:
    """The same for any lengths (rows), degree and window (positions)."""
    if window is None or degree == 1:
        return False
    rows = np.asarray(lengths, dtype=np.int64)
    before = min(window - 1, int(rows.max()))
    halos = int(np.minimum(2 * degree * before, (degree - 1) * rows).sum())
    return halos <= min((degree - 1) / 2, 2) * int(rows.sum())


def halo_forward(q: Tensor, k: Tensor, v: Tensor, circle: Circle, rule: Rule) -> Attended:
    """q (T, N, H), k (T, K, H), v (T, K, Hv) of this member's rows."""
    halo = Halo.of(circle)
    total = Partial(q.shape[0], q.shape[1], v.shape[2], like=q)
    seen_k, seen_v = halo.fetch(circle, (k, v), "attention halo forward")
    add_block(total, q, seen_k, seen_v, halo.launches, rule)
    out, lse = rule.finish(total)
    return Attended(out, (q, k, v, None, lse))


def halo_backward(saved: Saved, k: Tensor, v: Tensor, circle: Circle, rule: Rule) -> Gradients:
    """Gradients of this member's rows."""
    halo, dq = Halo.of(circle), RowSum(tuple(saved.q.shape), saved.q)
    seen_k, seen_v = halo.fetch(circle, (k, v), "attention halo backward")
    gradients = summed(block_gradients(dq, saved, seen_k, seen_v, halo.launches, rule), seen_k, seen_v)
    dk, dv = halo.bring_home(circle, gradients, "attention halo backward, gradients")
    return Gradients(dq.result(), dk, dv, rule.sink_gradient(saved))


@dataclass(frozen=True)
class Halo:
    """The rows that one member's rows see, its own among them, in document order.

    `sends[m]` are the rows of this member that member m sees, none for itself, and `sent` all of those; from member m
    come `receives[m]` rows, and what arrives, member after member, goes to `places`. The own rows `own` go to
    `own_places`.
    """

    launches: tuple[Launch, ...]
    sends: tuple[Tensor, ...]
    sent: Tensor
    receives: tuple[int, ...]
    places: Tensor
    own: Tensor
    own_places: Tensor
    seen: int

    @classmethod
    def of(cls, circle: Circle) -> "Halo":
        """The halo of this rank's rows, made once."""
        return circle.once("halo", lambda: cls._made(circle))

    @classmethod
    def _made(cls, circle: Circle) -> "Halo":
        me, members, none = circle.member, range(circle.degree), np.empty(0, dtype=np.int64)
        keys = seen_by(circle, me)
        found = [_among(circle, owner, keys) for owner in members]
        sends = [none if m == me else _among(circle, me, seen_by(circle, m))[0] for m in members]

        def on(rows: Rows) -> Tensor:
            return to_device(rows, circle.device)

        return cls(
            circle.launches_on(keys, lambda: keys.positions),
            sends=tuple(on(rows) for rows in sends),
            sent=on(np.concatenate(sends)),
            receives=tuple(0 if m == me else len(rows) for m, (rows, _) in enumerate(found)),
            places=on(np.concatenate([none if m == me else places for m, (_, places) in enumerate(found)])),
            own=on(found[me][0]),
            own_places=on(found[me][1]),
            seen=keys.rows,
        )

    def fetch(self, circle: Circle, tensors: tuple[Tensor, Tensor], what: str) -> tuple[Tensor, ...]:
        """The members' tensors (T, …) to the rows seen here."""
        counts = [len(sent) for sent in self.sends]
        sent = join_columns(tensors, self.sent)
        handle = circle.channel().all_to_all_rows(sent, counts, self.receives, what)
        seen = sent.new_empty((self.seen, sent.shape[1]))
        seen.index_copy_(0, self.own_places, join_columns(tensors, self.own))
        seen.index_copy_(0, self.places, handle.wait())
        return split_columns(seen, [x.shape[1:] for x in tensors])

    def bring_home(self, circle: Circle, gradients: tuple[Tensor, Tensor], what: str) -> tuple[Tensor, ...]:
        """Gradients of the rows seen here to the sums over members of those of the own rows; summed in member order."""
        dtype, counts = accumulation_dtype(gradients[0].dtype), [len(sent) for sent in self.sends]
        away = join_columns(gradients, self.places, dtype)
        handle = circle.channel().all_to_all_rows(away, self.receives, counts, what)
        total = join_columns(gradients, self.own_places, dtype)
        rows = circle.counts[circle.member]
        if len(total) < rows:  # rows that pad documents out see nothing, and nothing sees them
            total = total.new_zeros((rows, total.shape[1])).index_copy_(0, self.own, total)
        for sent, arrived in zip(self.sends, handle.wait().split(counts), strict=True):
            if len(sent):
                total.index_add_(0, sent, arrived)
        return split_columns(total, [x.shape[1:] for x in gradients])


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
