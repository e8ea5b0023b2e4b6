"""Who shares keys and values with whom, and what their rows see of each other: one group's geometry, in integers.

A `Circle` is what a ring goes round, or what gathers. Its members are those of a plan's group, or, under `a2a` and
`a2a+p2p`, runs of `inner` neighbouring members that act as one: inside such a run heads are exchanged for rows, so that
each holds all rows of the run for some heads. Moves no tensors.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from longspan.attention.kernels.launch import Launch, Tokens
from longspan.attention.tiles import Rows, Tile, Tiling, tiles_between
from longspan.comm import Channel, ShardPart, world_of
from longspan.layout import Segments
from longspan.layout.segments import expand, segments_of

T = TypeVar("T")


class Mask(NamedTuple):
    """What a query sees of its document: all keys, those up to its own position, or the last `window` of those."""

    causal: bool = True
    window: int | None = None


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
        self._kept: dict[object, object] = {}

    # ---- who talks

    def channel(self) -> Channel:
        """Around the circle: every `inner`-th member of the group. Raises CommError where the world has been left."""
        return self._channel(self.part.group.slots[self.part.member % self.inner :: self.inner])

    def inside(self) -> Channel:
        """The neighbours that act as one with this rank."""
        first = self.member * self.inner
        return self._channel(self.part.group.slots[first : first + self.inner])

    def _channel(self, slots: Sequence[int]) -> Channel:
        return world_of(self.part.world_key).channel(tuple(slots))

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
    def places(self) -> Tensor | None:
        """Where the rows go that arrive one inside member after another: (R,), or None where they are in order."""
        document, start, stop = self._runs_inside(self.member)
        order, sizes = np.lexsort((start, document)), stop - start
        at = np.empty_like(start)
        at[order] = np.cumsum(sizes[order]) - sizes[order]
        places = expand(at, at + sizes)
        return None if (np.diff(places) == 1).all() else torch.from_numpy(places).to(self.device)

    def places_of_members(self) -> list[Tensor]:
        """Per member, where its rows go among all rows of the circle in document order."""
        assert self.inner == 1, "only members of the group itself gather"

        def find() -> list[Tensor]:
            held = (self.part.group.shares.rows(member) for member in range(self.degree))
            return [torch.tensor(rows, dtype=torch.int64, device=self.device) for rows in held]

        return self._once("places of members", find)

    def index(self, values: Sequence[int]) -> Tensor:
        """These integers on the device, kept: copying them there each time would make the host wait."""
        return self._once(("index", *values), lambda: torch.tensor(values, device=self.device))

    # ---- what they see

    def launches(self, owner: int | None) -> tuple[Launch, ...]:
        """The launches of this member's rows against the block of `owner`, or against all rows (None).

        On a narrow circle the block of another member is the rows that are read here, `reads(self.member, owner)`.
        """
        return self._once(("launches", owner), lambda: self._launches(owner))

    def _launches(self, owner: int | None) -> tuple[Launch, ...]:
        def tokens() -> Tokens:
            mine, theirs = self._tokens(self.member), self._tokens(owner)
            return Tokens(*mine, theirs[1] if rows is None else theirs[1][rows])

        tilings, rows = self._tilings(self.member, owner), None
        if self.is_narrow and owner is not None and owner != self.member:
            rows = self.reads(self.member, owner)
            tilings = tuple(_compacted(tiling, rows) for tiling in tilings)
        return tuple(Launch(tiling, self.device, tokens) for tiling in tilings)

    def _tilings(self, reader: int, owner: int | None) -> tuple[Tiling, ...]:
        def find() -> tuple[Tiling, ...]:
            keys = self._all_rows() if owner is None else self._real(owner)
            return tiles_between(self._real(reader), keys, causal=self.mask.causal, window=self.mask.window)

        return self._once(("tilings", reader, owner), find)

    def _real(self, member: int) -> Segments:
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

    def _tokens(self, member: int | None) -> tuple[Rows, Rows]:
        """(document id, position) of each row of a member's tensors, or of all rows in document order (None)."""
        ids, laid_out = (np.asarray(x, dtype=np.int64) for x in (self.part.group.documents, self.part.group.laid_out))
        if member is None:
            return np.repeat(ids, laid_out), expand(np.zeros_like(laid_out), laid_out)
        held = self.held(member)
        return np.repeat(ids[held.document], held.stop - held.start), held.positions

    # ---- narrow windows

    @cached_property
    def is_narrow(self) -> bool:
        """Whether a window leaves so little to be seen of other members' rows that each sends what is read, directly.

        A bound from lengths alone, and so the same on every member: a document lies in at most 2 · degree runs, each of
        which sees at most window − 1 rows before it. Narrow: at most half of the rows that would go round a ring.
        """
        if self.mask.window is None or self.degree == 1:
            return False
        lengths = np.asarray(self.part.group.lengths, dtype=np.int64)
        before = min(self.mask.window - 1, int(lengths.max()))
        around = (self.degree - 1) * lengths
        return 2 * int(np.minimum(2 * self.degree * before, around).sum()) <= int(around.sum())

    def reads(self, reader: int, owner: int) -> Rows:
        """Which rows of `owner` the rows of `reader` see, ascending."""

        def find() -> Rows:
            change = np.zeros(self.counts[owner] + 1, dtype=np.int64)
            for tile in (tile for tiling in self._tilings(reader, owner) for tile in tiling.tiles):
                change[tile.k_start] += 1
                change[tile.k_stop] -= 1
            return np.flatnonzero(np.cumsum(change)[:-1])

        return self._once(("reads", reader, owner), find)

    @cached_property
    def sends(self) -> list[Tensor]:
        """Per member, which of this rank's rows it reads."""
        return [torch.from_numpy(self.reads(m, self.member)).to(self.device) for m in range(self.degree)]

    @cached_property
    def receives(self) -> list[int]:
        """Per member, how many of its rows are read here."""
        return [len(self.reads(self.member, m)) for m in range(self.degree)]

    def _once(self, key: object, make: Callable[[], T]) -> T:
        if key not in self._kept:
            self._kept[key] = make()
        return self._kept[key]  # pyright: ignore[reportReturnType]


def _compacted(tiling: Tiling, rows: Rows) -> Tiling:
    """The same tiles where the keys are only these rows, which hold every tile's keys without a gap."""
    first = np.searchsorted(rows, [tile.k_start for tile in tiling.tiles]).tolist()
    moved = (
        Tile(tile.q_start, tile.q_stop, at, at + tile.keys, tile.left, tile.right)
        for tile, at in zip(tiling.tiles, first, strict=True)
    )
    return Tiling(tuple(moved))
