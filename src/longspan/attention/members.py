"""The members of a group that share keys and values: which rows each holds, and which launches its own rows need.

A block is this member's query rows against one set of key rows; the patterns (`ring.py`, `all_gather.py`,
`all_to_all.py`) decide which key rows there are and when.
"""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from longspan.attention.masks import Mask, branch_tilings, span_tiles, tilings_between
from longspan.attention.tiles import Launch, RowIdentities
from longspan.comm import Channel, ShardPart, to_device, world_of
from longspan.errors import CommError
from longspan.layout import Segments
from longspan.layout.segments import NO_SPANS, Integers, Spans, expand_runs, segments_from_runs
from longspan.plan.messages import fetched_share

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
        assert part.degree % inner == 0, (part.degree, inner)
        self.part: ShardPart = part
        self.mask: Mask = mask
        self.device: torch.device = device
        self.inner: int = inner
        self.spans: Spans = spans if mask.causal and mask.spans != "none" else NO_SPANS
        self.degree: int = part.degree // inner
        self.member: int = part.member // inner
        slot_counts = np.asarray(part.counts, dtype=np.int64).reshape(self.degree, inner)
        self.counts: tuple[int, ...] = tuple(slot_counts.sum(1).tolist())
        self.inner_counts: tuple[int, ...] = tuple(slot_counts[self.member].tolist())
        self._launches: dict[int | None, tuple[Launch, ...]] = {}
        self._gathered_orders: dict[tuple[int, ...], Tensor] = {}

    @cached_property
    def channel(self) -> Channel:
        """The ring: every `inner`-th slot of the group. Raises CommError where the world has been left."""
        return self._bind_channel("ring", self.part.group.slots[self.part.member % self.inner :: self.inner])

    @cached_property
    def gather_channel(self) -> Channel:
        """All members, which gather from each other."""
        return self._bind_channel("all_gather", self.part.group.slots)

    @cached_property
    def inner_channel(self) -> Channel:
        """The neighbours that act as one member with this rank."""
        slots = self.part.group.slots[self.member * self.inner : (self.member + 1) * self.inner]
        return self._bind_channel("a2a", slots)

    def _bind_channel(self, level: str, slots: Sequence[int]) -> Channel:
        channels = world_of(self.part.world_key).channels
        channel = channels.find_channel(slots)
        if len(slots) > 1:
            has_both_levels = self.inner > 1 and self.degree > 1
            comm_type = "a2a+p2p" if has_both_levels else level.replace("ring", "p2p")
            channels.attended.add((comm_type, self.part.degree, level, channel.ranks))
        return channel

    def segments(self, member: int) -> Segments:
        """Return the rows of one member as its tensors hold them, padding included."""
        if self.inner == 1:
            return self.part.group.shares.segments(member)
        document, start, stop = self._list_runs(member)
        order = np.lexsort((start, document))
        return segments_from_runs(document[order], start[order], stop[order])

    def _list_runs(self, member: int) -> tuple[Integers, Integers, Integers]:
        """Runs follow rank after rank, each rank's in the order of its tensor."""
        neighbours = range(member * self.inner, (member + 1) * self.inner)
        runs = [(s.document, s.start, s.stop) for s in map(self.part.group.shares.segments, neighbours)]
        document, start, stop = (np.concatenate(column) for column in zip(*runs, strict=True))
        return document, start, stop

    def real_segments(self, member: int) -> Segments:
        """The rows of one member without those that pad documents out: padding takes no part in attention."""
        segments = self.segments(member)
        group = self.part.group
        if group.pad_to is None:
            return segments
        stop = np.minimum(segments.stop, np.asarray(group.lengths)[segments.document])
        real = segments.start < stop
        return Segments(segments.document[real], segments.start[real], stop[real], segments.offset[real])

    @cached_property
    def arrival_orders(self) -> tuple[Tensor, Tensor] | None:
        """How rows from the neighbours are put in document order, and back; None where they arrive in it.

        Two indices (R,), first and second: `arrived[first]` is in document order if `arrived` is in order of arrival,
        rank after rank, and `in_order[second]` is in order of arrival if `in_order` is in document order.
        """
        document, start, stop = self._list_runs(self.member)
        order = np.lexsort((start, document))
        sizes = stop - start
        begins = np.empty_like(start)
        # where each run that arrives begins in document order
        begins[order] = np.cumsum(sizes[order]) - sizes[order]
        places = expand_runs(begins, begins + sizes)  # the place of each row that arrives, in document order
        if (np.diff(places) == 1).all():
            return None
        inverse = np.empty_like(places)
        inverse[places] = np.arange(len(places))
        return to_device(inverse, self.device), to_device(places, self.device)

    def document_order(self, starts: tuple[int, ...]) -> Tensor:
        """Return the index (S,) that lays gathered rows in document order. Member m's rows begin at `starts[m]`, among
        the gathered rows; the index is kept for all layers.
        """
        if self.inner != 1:
            raise CommError(
                f"rows are gathered by members that are {self.inner} ranks each; gather among the ranks of the group"
            )
        if starts not in self._gathered_orders:
            order = np.empty(sum(self.counts), dtype=np.int64)
            for member, start in enumerate(starts):
                order[self.key_numbers(member)] = np.arange(start, start + self.counts[member])
            self._gathered_orders[starts] = to_device(order, self.device)
        return self._gathered_orders[starts]

    def key_numbers(self, member: int) -> Integers:
        """Return the numbers of the keys that a member brings to a gather, among the group's in document order."""
        return self.part.group.shares.rows(member)

    @cached_property
    def key_indices_by_launch(self) -> list[Tensor]:
        """For each launch on all rows (`launches(None)`) an index (S,): which of its keys each row of the group is, −1
        for none.

        The rows are listed member after member, as a reduce-scatter sends them.
        """
        by_member = np.concatenate([self.key_numbers(member) for member in range(self.degree)])
        indices = list[Tensor]()
        for launch in self.launches(None):
            rows = launch.distinct_key_rows
            places = np.full(len(by_member), -1, dtype=np.int64)
            places[rows] = np.arange(len(places[rows]))
            indices.append(to_device(places[by_member], self.device))
        return indices

    def launches(self, owner: int | None) -> tuple[Launch, ...]:
        """Return the launches of this member's rows against the block of `owner`, or against all rows (None)."""
        if owner not in self._launches:
            if owner is None:  # every document's positions count from 0
                laid_out, starts = self._rows_and_starts_of_documents()
                lengths = np.asarray(self.part.group.lengths, dtype=np.int64)
                keys = Segments(np.arange(len(lengths)), np.zeros_like(lengths), lengths, starts)
                self._launches[owner] = self._make_launches(
                    keys, lambda: expand_runs(np.zeros_like(laid_out), laid_out)
                )
            else:  # rows that pad documents out are no keys, but have positions in the block
                segments = self.segments(owner)
                self._launches[owner] = self._make_launches(self.real_segments(owner), lambda: segments.positions)
        return self._launches[owner]

    def _rows_and_starts_of_documents(self) -> tuple[Integers, Integers]:
        """Rows include padding; the starts are among the group's rows in document order."""
        laid_out = np.asarray(self.part.group.laid_out, dtype=np.int64)
        return laid_out, np.cumsum(laid_out) - laid_out

    def _make_launches(self, keys: Segments, positions: Callable[[], Integers]) -> tuple[Launch, ...]:
        """Only dropout and indices call `positions`."""
        document_ids = np.asarray(self.part.group.documents, dtype=np.int64)
        segments = self.segments(self.member)

        # `Members` holds the launches, and they hold this function. It must not refer to `Members`: in a reference
        # cycle the launches' tensors would stay on the device until Python's garbage collector runs.
        def identities() -> RowIdentities:
            document = np.repeat(document_ids[segments.document], segments.stop - segments.start)
            return RowIdentities(document, segments.positions, positions())

        queries = self.real_segments(self.member)
        causal, window, chunk, spans = self.mask
        before = window if spans == "whole" else None
        tilings = tilings_between(queries, keys, causal=causal, window=window, chunk=chunk)
        tilings += span_tiles(queries, keys, self.spans, before)
        group = self.part.group
        if group.parents is not None:
            bases = np.asarray(group.bases, dtype=np.int64)
            for ancestors in group.ancestors():
                prefix = np.asarray(ancestors, dtype=np.int64)
                tilings += branch_tilings(queries, keys, prefix, bases, self.mask.window)
        return tuple(Launch(tiling, self.device, identities) for tiling in tilings)

    @property
    def turns(self) -> int:
        """In how many blocks the rows that this member sees arrive, the own block included."""
        return 1 if self.has_narrow_window else self.degree

    @cached_property
    def has_narrow_window(self) -> bool:
        """Whether members send each other just the rows that are seen, because they are fewer than the blocks of a
        ring.
        """
        return fetched_share(self.part.group.path_lengths, self.degree, self.mask.window, self.mask.chunk) < 1

    @cached_property
    def window_rows(self) -> WindowRows:
        """The rows that members fetch from each other under a narrow window; every member works out the same, and asks
        nobody.
        """
        keys = self.visible_rows(self.member)
        all_members = range(self.degree)
        seen_by_owner = [self._find_rows_among_keys(keys, owner) for owner in all_members]
        to_send = [self._find_rows_among_keys(self.visible_rows(reader), self.member)[0] for reader in all_members]
        own_rows, own_places = seen_by_owner[self.member]
        to_send[self.member] = _NO_ROWS
        seen_by_owner[self.member] = (_NO_ROWS, _NO_ROWS)  # own rows are copied, not sent
        return WindowRows(
            self._make_launches(keys, lambda: keys.positions),
            rows_to_send=tuple(to_device(rows, self.device) for rows in to_send),
            all_rows_to_send=to_device(np.concatenate(to_send), self.device),
            receive_counts=tuple(len(rows) for rows, _ in seen_by_owner),
            received_places=to_device(np.concatenate([places for _, places in seen_by_owner]), self.device),
            own_rows=to_device(own_rows, self.device),
            own_places=to_device(own_places, self.device),
            row_count=keys.rows,
        )

    def visible_rows(self, reader: int) -> Segments:
        """Return the rows that one member's rows see under a window or chunks and in their spans, in document order.

        A run of rows sees from the first row of its window (or chunk), or of the first span in it that is seen whole,
        on to the end of the run, or of the last span in it. Rows that several runs see are returned once.
        """
        _, window, chunk, spans = self.mask
        assert window is not None or chunk is not None
        runs = self.real_segments(reader)
        start = np.zeros_like(runs.start) if window is None else np.maximum(runs.start - window + 1, 0)
        if chunk is not None:
            start = np.maximum(start, runs.start - runs.start % chunk)
        if spans == "whole":
            start = np.minimum(start, self.spans.run_starts(runs))
        same_document = runs.document[1:] == runs.document[:-1]
        stop = self.spans.run_ends(runs)
        # What a run sees begins where that of the run before ends, at the earliest: so no row is in two.
        start[1:] = np.where(same_document, np.maximum(start[1:], stop[:-1]), start[1:])
        if self.part.group.parents is not None:
            return self._join_prefix_ends(runs, start, stop)
        return segments_from_runs(runs.document, start, stop)

    def _join_prefix_ends(self, runs: Segments, start: Integers, stop: Integers) -> Segments:
        """Of each prefix that is one run: from the first row that any of its branches here sees to the prefix's end."""
        group = self.part.group
        window = self.mask.window
        assert window is not None
        bases = np.asarray(group.bases, dtype=np.int64)
        lengths = np.asarray(group.lengths, dtype=np.int64)
        # This is the first row of each document that branches see; the document's length stands for none.
        first_seen = lengths.copy()
        for ancestors in group.ancestors():
            prefix = np.asarray(ancestors, dtype=np.int64)[runs.document]
            run = np.flatnonzero(prefix >= 0)
            first_position = runs.start[run] + bases[runs.document[run]] - window + 1
            np.minimum.at(first_seen, prefix[run], np.maximum(first_position - bases[prefix[run]], 0))
        prefixes = np.flatnonzero(first_seen < lengths)
        document = np.append(runs.document, prefixes)
        all_starts = np.append(start, first_seen[prefixes])
        # A prefix's own runs stop where what its branches see begins: so no row is in two.
        all_stops = np.append(np.minimum(stop, first_seen[runs.document]), lengths[prefixes])
        order = np.lexsort((all_starts, document))
        return segments_from_runs(document[order], all_starts[order], all_stops[order])

    def _find_rows_among_keys(self, keys: Segments, owner: int) -> tuple[Integers, Integers]:
        """Rows are compared by their number among the group's rows in document order. A row before all runs of keys
        gets run −1, whose stop is the 0 that is appended, so that the row is in no run."""
        _, document_starts = self._rows_and_starts_of_documents()
        segments = self.segments(owner)
        rows = expand_runs(
            segments.start + document_starts[segments.document], segments.stop + document_starts[segments.document]
        )
        starts = keys.start + document_starts[keys.document]
        stops = keys.stop + document_starts[keys.document]
        run = np.searchsorted(starts, rows, side="right") - 1
        is_among = np.flatnonzero(rows < np.append(stops, 0)[run])
        return is_among, keys.offset[run[is_among]] + rows[is_among] - starts[run[is_among]]
