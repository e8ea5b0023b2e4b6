"""Who shares keys and values with whom, and what their rows see of each other: one group's geometry, in integers.

`Members` are those who pass blocks round a ring, or who gather: the members of a plan's group, or, under `a2a` and
`a2a+p2p`, runs of `inner` neighbouring members that act as one: inside such a run heads are exchanged for rows, so that
each holds all rows of the run for some heads. Moves no tensors.
"""

from collections.abc import Callable
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longspan.attention.tiles import Launch, Mask, Tokens, span_tiles, tiles_between
from longspan.comm import Channel, ShardPart, to_device, world_of
from longspan.layout import Segments
from longspan.layout.segments import Integers, expand_runs, segments_from_runs
from longspan.layout.spans import NO_SPANS, Spans
from longspan.plan.cost.type_price import fetched_share
from longspan.plan.memory.bytes import count_head_groups

_NO_ROWS = np.empty(0, dtype=np.int64)


class WindowRows(NamedTuple):
    """The rows that one member's rows see under a narrow window or chunks, its own among them, in document order.

    `rows_to_send[m]` are the rows of this member that member m sees, none for itself, and `all_rows_to_send` all of
    those. From member m come `receive_counts[m]` rows, and what arrives, member after member, goes to
    `received_places`. Of the member's own rows those in `own_rows` are seen; they go to `own_places`. `row_count` rows
    are seen in all.
    """

    launches: tuple[Launch, ...]
    rows_to_send: tuple[Tensor, ...]
    all_rows_to_send: Tensor
    receive_counts: tuple[int, ...]
    received_places: Tensor
    own_rows: Tensor
    own_places: Tensor
    row_count: int


class Members:
    """The members of one group that share keys and values; `inner` neighbouring ranks that exchange heads act as one.

    There are `degree` members; this rank is number `member`, or belongs to it. Member m holds `counts[m]` rows, in
    document order where `inner` > 1. Under a causal mask rows of `spans` see the later rows of their span as well. Made
    once per shard, so that layers share what it derives.
    """

    def __init__(
        self, part: ShardPart, mask: Mask, device: torch.device, inner: int = 1, spans: Spans = NO_SPANS
    ) -> None:
        """Number the members of the ring, and count the rows of each and those of each slot of this member.

        `inner` slots that exchange heads make one member. What is derived later is stored: `_launches` by the owner of
        the block (None: all rows), `_gathered_orders` by where each member's rows begin among gathered ones.
        """
        assert part.degree % inner == 0, (part.degree, inner)
        self.part: ShardPart = part
        self.mask: Mask = mask
        self.device: torch.device = device
        self.inner: int = inner
        self.spans: Spans = spans if mask.causal else NO_SPANS
        self.degree: int = part.degree // inner
        self.member: int = part.member // inner
        slot_counts = np.asarray(part.counts, dtype=np.int64).reshape(self.degree, inner)
        self.counts: tuple[int, ...] = tuple(slot_counts.sum(1).tolist())
        self.inner_counts: tuple[int, ...] = tuple(slot_counts[self.member].tolist())
        self._launches: dict[int | None, tuple[Launch, ...]] = {}
        self._gathered_orders: dict[tuple[int, ...], Tensor] = {}

    # ---- who talks

    @cached_property
    def channel(self) -> Channel:
        """Return the ring: every `inner`-th slot of the group. Raises CommError where the world has been left."""
        slots = self.part.group.slots[self.part.member % self.inner :: self.inner]
        return world_of(self.part.world_key).channels.find_channel(slots)

    @cached_property
    def inner_channel(self) -> Channel:
        """Return the channel of the neighbours that act as one member with this rank."""
        slots = self.part.group.slots[self.member * self.inner : (self.member + 1) * self.inner]
        return world_of(self.part.world_key).channels.find_channel(slots)

    # ---- who holds which rows

    def segments(self, member: int) -> Segments:
        """Return the rows of one member as its tensors hold them, padding included."""
        if self.inner == 1:
            return self.part.group.shares.segments(member)
        document, start, stop = self._list_runs(member)
        order = np.lexsort((start, document))
        return segments_from_runs(document[order], start[order], stop[order])

    def _list_runs(self, member: int) -> tuple[Integers, Integers, Integers]:
        """List document, start and stop of every run that the ranks of one member hold, rank after rank."""
        neighbours = range(member * self.inner, (member + 1) * self.inner)
        runs = [(s.document, s.start, s.stop) for s in map(self.part.group.shares.segments, neighbours)]
        document, start, stop = (np.concatenate(column) for column in zip(*runs, strict=True))
        return document, start, stop

    def real_segments(self, member: int) -> Segments:
        """Return the rows of one member without those that pad documents out: padding takes no part in attention."""
        segments, group = self.segments(member), self.part.group
        if group.pad_to is None:
            return segments
        stop = np.minimum(segments.stop, np.asarray(group.lengths)[segments.document])
        real = segments.start < stop
        return Segments(segments.document[real], segments.start[real], stop[real], segments.offset[real])

    @cached_property
    def arrival_orders(self) -> tuple[Tensor, Tensor] | None:
        """Return how rows from the neighbours are put in document order, and back; None where they arrive in it.

        Two indices (R,), first and second: `arrived[first]` is in document order if `arrived` is in order of arrival,
        rank after rank, and `in_order[second]` is in order of arrival if `in_order` is in document order.
        """
        document, start, stop = self._list_runs(self.member)
        order, sizes = np.lexsort((start, document)), stop - start
        begins = np.empty_like(start)
        begins[order] = np.cumsum(sizes[order]) - sizes[order]  # where each run that arrives begins in document order
        places = expand_runs(begins, begins + sizes)  # the place of each row that arrives, in document order
        if (np.diff(places) == 1).all():
            return None
        inverse = np.empty_like(places)
        inverse[places] = np.arange(len(places))
        return to_device(inverse, self.device), to_device(places, self.device)

    def document_order(self, starts: tuple[int, ...]) -> Tensor:
        """Return for each of the group's rows in document order which gathered row it is: (S,).

        Member m's rows begin at `starts[m]`.
        """
        assert self.inner == 1, "only members of the group itself gather"
        if starts not in self._gathered_orders:
            order = np.empty(sum(self.counts), dtype=np.int64)
            for member, start in enumerate(starts):
                order[self.part.group.shares.rows(member)] = np.arange(start, start + self.counts[member])
            self._gathered_orders[starts] = to_device(order, self.device)
        return self._gathered_orders[starts]

    @cached_property
    def keys_by_member(self) -> list[Tensor]:
        """Return for each launch on all rows an index (S,): which of its keys each row of the group is, −1 for none.

        The rows are listed member after member.
        """
        by_member = np.concatenate([self.part.group.shares.rows(member) for member in range(self.degree)])
        places = (_find_places(launch.tiling.k_rows(), len(by_member))[by_member] for launch in self.launches(None))
        return [to_device(x, self.device) for x in places]

    # ---- what they see

    def launches(self, owner: int | None) -> tuple[Launch, ...]:
        """Return the launches of this member's rows against the block of `owner`, or against all rows (None)."""
        if owner not in self._launches:
            self._launches[owner] = self._launches_on_all() if owner is None else self._launches_on_block(owner)
        return self._launches[owner]

    def _launches_on_block(self, owner: int) -> tuple[Launch, ...]:
        """Make the launches on a member's block; rows that pad documents out are no keys, but have positions in it."""
        segments = self.segments(owner)
        return self._make_launches(self.real_segments(owner), lambda: segments.positions)

    def _launches_on_all(self) -> tuple[Launch, ...]:
        """Every document's positions count from 0."""
        laid_out, starts = self._document_extents()
        lengths = np.asarray(self.part.group.lengths, dtype=np.int64)
        keys = Segments(np.arange(len(lengths)), np.zeros_like(lengths), lengths, starts)
        return self._make_launches(keys, lambda: expand_runs(0 * laid_out, laid_out))

    def _document_extents(self) -> tuple[Integers, Integers]:
        """Return the rows of each document, padding included, and where each starts among the group's rows."""
        laid_out = np.asarray(self.part.group.laid_out, dtype=np.int64)
        return laid_out, np.cumsum(laid_out) - laid_out

    def _make_launches(self, keys: Segments, positions: Callable[[], Integers]) -> tuple[Launch, ...]:
        """Make the launches of this member's rows against `keys`, which are some of the rows of one key tensor.

        `positions` returns the position in its document of every row of that tensor; only dropout calls it.
        """
        document_ids, segments = np.asarray(self.part.group.documents, dtype=np.int64), self.segments(self.member)

        # `Members` holds the launches, and they hold this function. It must not refer to `Members`: in a reference
        # cycle the launches' tensors would stay on the device until Python's garbage collector runs.
        def tokens() -> Tokens:
            document = np.repeat(document_ids[segments.document], segments.stop - segments.start)
            return Tokens(document, segments.positions, positions())

        queries = self.real_segments(self.member)
        tilings = tiles_between(queries, keys, **self.mask._asdict()) + span_tiles(queries, keys, self.spans)
        return tuple(Launch(tiling, self.device, tokens) for tiling in tilings)

    # ---- what they see under a narrow window or chunks

    @property
    def turns(self) -> int:
        """Return in how many blocks the rows that this member sees arrive, the own block included."""
        return 1 if self.has_narrow_window else self.degree

    @cached_property
    def has_narrow_window(self) -> bool:
        """Return whether members send each other just the rows that are seen, instead of blocks around a ring."""
        return fetched_share(self.part.group.lengths, self.degree, self.mask.window, self.mask.chunk) < 1

    @cached_property
    def window_rows(self) -> WindowRows:
        """Return the rows that this member's rows see, and who sends them."""
        keys, all_members = self.visible_rows(self.member), range(self.degree)
        seen = [self._find_rows(keys, owner) for owner in all_members]
        to_send = [self._find_rows(self.visible_rows(reader), self.member)[0] for reader in all_members]
        own_rows, own_places = seen[self.member]
        to_send[self.member], seen[self.member] = _NO_ROWS, (_NO_ROWS, _NO_ROWS)  # own rows are copied, not sent
        return WindowRows(
            self._make_launches(keys, lambda: keys.positions),
            rows_to_send=tuple(to_device(rows, self.device) for rows in to_send),
            all_rows_to_send=to_device(np.concatenate(to_send), self.device),
            receive_counts=tuple(len(rows) for rows, _ in seen),
            received_places=to_device(np.concatenate([places for _, places in seen]), self.device),
            own_rows=to_device(own_rows, self.device),
            own_places=to_device(own_places, self.device),
            row_count=keys.rows,
        )

    def visible_rows(self, reader: int) -> Segments:
        """Return the rows that one member's rows see under a window or chunks and in their spans, in document order.

        A run of rows sees from the first row of its window (or chunk) on to the end of the run, or of the last span in
        it. Rows that several runs see are returned once.
        """
        _, window, chunk = self.mask
        assert window is not None or chunk is not None
        runs = self.real_segments(reader)
        start = np.zeros_like(runs.start) if window is None else np.maximum(runs.start - window + 1, 0)
        if chunk is not None:
            start = np.maximum(start, runs.start - runs.start % chunk)
        same_document, stop = runs.document[1:] == runs.document[:-1], self.spans.run_ends(runs)
        # What a run sees begins where that of the run before ends, at the earliest: so no row is in two.
        start[1:] = np.where(same_document, np.maximum(start[1:], stop[:-1]), start[1:])
        return segments_from_runs(runs.document, start, stop)

    def _find_rows(self, keys: Segments, owner: int) -> tuple[Integers, Integers]:
        """Rows are compared by their number among the group's rows in document order. A row before all runs of keys
        gets run −1, whose stop is the 0 that is appended, so that the row is in no run.
        """
        _, document_starts = self._document_extents()
        segments = self.segments(owner)
        rows = expand_runs(
            segments.start + document_starts[segments.document], segments.stop + document_starts[segments.document]
        )
        starts, stops = keys.start + document_starts[keys.document], keys.stop + document_starts[keys.document]
        run = np.searchsorted(starts, rows, side="right") - 1
        is_among = np.flatnonzero(rows < np.append(stops, 0)[run])
        return is_among, keys.offset[run[is_among]] + rows[is_among] - starts[run[is_among]]


class HeadSlice(NamedTuple):
    """Key/value heads that are computed together, and the query heads that use them."""

    kv: slice
    q: slice


def cut_heads(heads: int, kv_heads: int, at_once: int) -> list[HeadSlice]:
    """Cut heads into slices of `at_once` key/value heads; the last may have fewer.

    >>> [(part.kv.start, part.q.start) for part in cut_heads(8, 4, 3)]
    [(0, 0), (3, 6)]
    """
    per_kv_head = heads // kv_heads
    bounds = [(start, min(start + at_once, kv_heads)) for start in range(0, kv_heads, at_once)]
    return [HeadSlice(slice(a, b), slice(a * per_kv_head, b * per_kv_head)) for a, b in bounds]


def backward_groups(rows: int, q: Tensor, kv_heads: int) -> list[HeadSlice]:
    """Return the groups of heads that backward computes one after another, to hold one group's float32 sums at a time.

    `rows` is how many the largest member has, so that all members cut alike; q (T, N, H) are one member's queries.
    """
    count = count_head_groups(rows * q.shape[1] * q.shape[2] * 4, kv_heads)  # 4 bytes a number
    return cut_heads(q.shape[1], kv_heads, -(-kv_heads // count))


def _find_places(rows: slice | Integers, count: int) -> Integers:
    """Return the index in `rows` of each of `count` rows, −1 for one that is not among them."""
    places = np.full(count, -1, dtype=np.int64)
    places[rows] = np.arange(len(places[rows]))
    return places
