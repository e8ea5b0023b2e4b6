"""Who shares keys and values with whom, and what their rows see of each other: one group's geometry, in integers.

A `Circle` is what a ring goes round, or what gathers. Its members are those of a plan's group, or, under `a2a` and
`a2a+p2p`, runs of `inner` neighbouring members that act as one: inside such a run heads are exchanged for rows, so that
each holds all rows of the run for some heads. Moves no tensors.
"""

from collections.abc import Callable, Hashable, Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from longspan.attention.geometry.launch import Launch, Tokens
from longspan.attention.geometry.tiles import Rows, tiles_between
from longspan.comm import Channel, ShardPart, to_device, world_of
from longspan.layout import Segments
from longspan.layout.segments import expand, segments_of

T = TypeVar("T")


class Mask(NamedTuple):
    """What a query sees of its document: all keys, those up to its own position, or the last `window` of those."""

    causal: bool = True
    window: int | None = None

    def within(self, lengths: Sequence[int]) -> "Mask":
        """The same over documents of these lengths: a window as long as the longest, or longer, hides nothing: none."""
        hides = self.window is not None and self.window < max(lengths, default=0)
        return self if hides else Mask(self.causal)


class Circle:
    """The members of one group that share keys and values, `inner` of the group's acting as one.

    `degree` members, of which this rank is (part of) number `member`; `counts[m]` rows are held by member m, in
    document order where `inner` > 1. Made once per shard and kept in its memo, so that layers share what it derives.
    """

    def __init__(self, part: ShardPart, mask: Mask, device: torch.device, inner: int = 1) -> None:
        assert part.degree % inner == 0, (part.degree, inner)
        self.part, self.mask, self.device, self.inner = part, mask, device, inner
        self.degree, self.member = part.degree // inner, part.member // inner
        blocks = np.asarray(part.counts, dtype=np.int64).reshape(self.degree, inner)
        self.counts: tuple[int, ...] = tuple(blocks.sum(1).tolist())
        self.inside_counts: tuple[int, ...] = tuple(blocks[self.member].tolist())
        self._kept: dict[Hashable, object] = {}

    # ---- who talks

    def channel(self) -> Channel:
        """Around the circle: every `inner`-th member of the group. Raises CommError where the world has been left."""
        return self._channel(self.part.group.slots[self.part.member % self.inner :: self.inner])

    def inside(self) -> Channel:
        """The neighbours that act as one with this rank."""
        first = self.member * self.inner
        return self._channel(self.part.group.slots[first : first + self.inner])

    def _channel(self, slots: Sequence[int]) -> Channel:
        return world_of(self.part.world_key).channels.between(tuple(slots))

    # ---- who holds which rows

    def held(self, member: int) -> Segments:
        """The rows of one member as its tensors hold them, padding included."""
        if self.inner == 1:
            return self.part.segments(member)
        document, start, stop = self._runs_inside(member)
        order = np.lexsort((start, document))
        return segments_of(document[order], start[order], stop[order])

    def _runs_inside(self, member: int) -> tuple[Rows, Rows, Rows]:
        found = [self.part.segments(member * self.inner + i) for i in range(self.inner)]
        columns = ((s.document, s.start, s.stop) for s in found)
        document, start, stop = (np.concatenate(column) for column in zip(*columns, strict=True))
        return document, start, stop

    @cached_property
    def orders(self) -> tuple[Tensor, Tensor] | None:
        """Where rows that arrive one inside member's after another lie in document order; None where they do.

        Two of (R,): which arriving row each row in document order is, and the inverse.
        """
        document, start, stop = self._runs_inside(self.member)
        order, sizes = np.lexsort((start, document)), stop - start
        at = np.empty_like(start)
        at[order] = np.cumsum(sizes[order]) - sizes[order]
        places = expand(at, at + sizes)
        if (np.diff(places) == 1).all():
            return None
        inverse = np.empty_like(places)
        inverse[places] = np.arange(len(places))
        return to_device(inverse, self.device), to_device(places, self.device)

    def order_of_gathered(self, starts: tuple[int, ...]) -> Tensor:
        """Which gathered row each of the group's rows is, in document order; member m's begin at `starts[m]`: (S,)."""
        assert self.inner == 1, "only members of the group itself gather"

        def find() -> Tensor:
            order = np.empty(sum(self.counts), dtype=np.int64)
            for member, start in enumerate(starts):
                order[self.part.group.shares.rows(member)] = np.arange(start, start + self.counts[member])
            return to_device(order, self.device)

        return self.once(("order of gathered", starts), find)

    def keys_by_member(self) -> list[Tensor]:
        """For each launch on all rows, which of its keys each row of the group is, one member's after another: (S,).

        −1 where the launch does not have the row.
        """

        def find() -> list[Tensor]:
            by_member = np.concatenate([self.part.group.shares.rows(member) for member in range(self.degree)])
            found = (_places(launch.tiling.k_rows(), len(by_member))[by_member] for launch in self.launches(None))
            return [to_device(places, self.device) for places in found]

        return self.once("keys by member", find)

    # ---- what they see

    def launches(self, owner: int | None) -> tuple[Launch, ...]:
        """The launches of this member's rows against the block of `owner`, or against all rows (None)."""

        def find() -> tuple[Launch, ...]:
            if owner is None:
                laid_out = np.asarray(self.part.group.laid_out, dtype=np.int64)
                return self.launches_on(self._all_rows(), lambda: expand(0 * laid_out, laid_out))
            held = self.held(owner)
            return self.launches_on(self.real(owner), lambda: held.positions)

        return self.once(("launches", owner), find)

    def launches_on(self, keys: Segments, positions: Callable[[], Rows]) -> tuple[Launch, ...]:
        """The launches of this member's rows against other rows; `positions` are those of all rows of their tensor."""
        ids, held = np.asarray(self.part.group.documents, dtype=np.int64), self.held(self.member)

        # Kept by the launches, which the circle keeps: it refers to no circle, for a cycle would outlive the shard.
        def tokens() -> Tokens:
            return Tokens(np.repeat(ids[held.document], held.stop - held.start), held.positions, positions())

        mine = self.real(self.member)
        tilings = tiles_between(mine, keys, causal=self.mask.causal, window=self.mask.window)
        return tuple(Launch(tiling, self.device, tokens) for tiling in tilings)

    def real(self, member: int) -> Segments:
        """The rows of one member without those that pad documents out: padding takes no part in attention."""
        held, group = self.held(member), self.part.group
        if group.pad_to is None:
            return held
        stop = np.minimum(held.stop, np.asarray(group.lengths)[held.document])
        keep = held.start < stop
        return Segments(held.document[keep], held.start[keep], stop[keep], held.offset[keep])

    def _all_rows(self) -> Segments:
        """Every document whole, where it lies among the group's rows in document order; without its padding."""
        laid_out = np.asarray(self.part.group.laid_out, dtype=np.int64)
        lengths = np.asarray(self.part.group.lengths, dtype=np.int64)
        return Segments(np.arange(len(lengths)), np.zeros_like(lengths), lengths, np.cumsum(laid_out) - laid_out)

    def once(self, key: Hashable, make: Callable[[], T]) -> T:
        """What `make` returns, kept as long as the shard."""
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]  # pyright: ignore[reportReturnType]


def _places(rows: slice | Rows, count: int) -> Rows:
    """Which of `rows` each of `count` rows is, −1 for none of them."""
    found = np.full(count, -1, dtype=np.int64)
    found[rows] = np.arange(len(found[rows]))
    return found
