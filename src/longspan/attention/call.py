"""A call of `attend` as one value: who shares keys and values with whom, what is computed, and by which kernel.

`Members` is one group's geometry. A block is the local query rows against one set of key rows; the patterns (`ring.py`,
`all_gather.py`, `all_to_all.py`) decide which key rows there are and when. Attention of disjoint key sets is merged by
its log-sum-exp, gradients are added by rows (`rows.py`).

Whether dropout keeps a weight is a hash of (seed, query head, document, query position, key position), all as in the
whole micro-batch: the same for every degree, type, rank and recomputation, and nothing of it is stored. The hash is
splitmix64's finaliser (Steele, Lea, Flood 2014), in 64-bit integers that wrap, which CPUs and GPUs do alike.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor

from longspan.attention.rows import Partial, RowIndex, RowSum, accumulation_dtype, deltas, sum_rows, take_rows
from longspan.attention.tiles import Launch, Mask, RowIdentities, Tile, branch_tilings, span_tiles, tiles_between
from longspan.comm import Addend, Channel, SequenceShard, ShardPart, to_device, world_of
from longspan.comm.replays import Replay
from longspan.layout import Segments
from longspan.layout.segments import NO_SPANS, Integers, Spans, expand_runs, segments_from_runs
from longspan.plan import AttentionCall
from longspan.plan.messages import count_head_groups, fetched_share

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
        self.spans: Spans = spans if mask.causal else NO_SPANS
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
            kind = "a2a+p2p" if self.inner > 1 and self.degree > 1 else level.replace("ring", "p2p")
            channels.attended.add((kind, self.part.degree, level, channel.ranks))
        return channel

    def segments(self, member: int) -> Segments:
        """Return the rows of one member as its tensors hold them, padding included."""
        if self.inner == 1:
            return self.part.group.shares.segments(member)
        document, start, stop = self._list_runs(member)
        order = np.lexsort((start, document))
        return segments_from_runs(document[order], start[order], stop[order])

    def _list_runs(self, member: int) -> tuple[Integers, Integers, Integers]:
        """Document, start and stop of every run, rank after rank."""
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
        """Which gathered row each row in document order is: (S,). Member m's rows begin at `starts[m]`."""
        assert self.inner == 1, "only members of the group itself gather"
        if starts not in self._gathered_orders:
            order = np.empty(sum(self.counts), dtype=np.int64)
            for member, start in enumerate(starts):
                order[self.part.group.shares.rows(member)] = np.arange(start, start + self.counts[member])
            self._gathered_orders[starts] = to_device(order, self.device)
        return self._gathered_orders[starts]

    @cached_property
    def key_indices_by_launch(self) -> list[Tensor]:
        """For each launch on all rows an index (S,): which of its keys each row of the group is, −1 for none.

        The rows are listed member after member.
        """
        by_member = np.concatenate([self.part.group.shares.rows(member) for member in range(self.degree)])
        indices = list[Tensor]()
        for launch in self.launches(None):
            rows = launch.key_rows
            places = np.full(len(by_member), -1, dtype=np.int64)
            places[rows] = np.arange(len(places[rows]))
            indices.append(to_device(places[by_member], self.device))
        return indices

    def launches(self, owner: int | None) -> tuple[Launch, ...]:
        """Return the launches of this member's rows against the block of `owner`, or against all rows (None)."""
        if owner not in self._launches:
            if owner is None:  # every document's positions count from 0
                laid_out, starts = self._document_extents()
                lengths = np.asarray(self.part.group.lengths, dtype=np.int64)
                keys = Segments(np.arange(len(lengths)), np.zeros_like(lengths), lengths, starts)
                self._launches[owner] = self._make_launches(keys, lambda: expand_runs(0 * laid_out, laid_out))
            else:  # rows that pad documents out are no keys, but have positions in the block
                segments = self.segments(owner)
                self._launches[owner] = self._make_launches(self.real_segments(owner), lambda: segments.positions)
        return self._launches[owner]

    def _document_extents(self) -> tuple[Integers, Integers]:
        """The rows of each document, padding included, and where each starts among the group's rows."""
        laid_out = np.asarray(self.part.group.laid_out, dtype=np.int64)
        return laid_out, np.cumsum(laid_out) - laid_out

    def _make_launches(self, keys: Segments, positions: Callable[[], Integers]) -> tuple[Launch, ...]:
        """`positions` returns the position in its document of every row of the key tensor; only dropout and indices
        call it."""
        document_ids = np.asarray(self.part.group.documents, dtype=np.int64)
        segments = self.segments(self.member)

        # `Members` holds the launches, and they hold this function. It must not refer to `Members`: in a reference
        # cycle the launches' tensors would stay on the device until Python's garbage collector runs.
        def identities() -> RowIdentities:
            document = np.repeat(document_ids[segments.document], segments.stop - segments.start)
            return RowIdentities(document, segments.positions, positions())

        queries = self.real_segments(self.member)
        tilings = tiles_between(queries, keys, **self.mask._asdict()) + span_tiles(queries, keys, self.spans)
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
        """Members send each other just the rows that are seen, instead of blocks around a ring."""
        return fetched_share(self.part.group.path_lengths, self.degree, self.mask.window, self.mask.chunk) < 1

    @cached_property
    def window_rows(self) -> WindowRows:
        keys = self.visible_rows(self.member)
        all_members = range(self.degree)
        seen = [self._find_rows_among_keys(keys, owner) for owner in all_members]
        to_send = [self._find_rows_among_keys(self.visible_rows(reader), self.member)[0] for reader in all_members]
        own_rows, own_places = seen[self.member]
        to_send[self.member] = _NO_ROWS
        seen[self.member] = (_NO_ROWS, _NO_ROWS)  # own rows are copied, not sent
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
        same_document = runs.document[1:] == runs.document[:-1]
        stop = self.spans.run_ends(runs)
        # What a run sees begins where that of the run before ends, at the earliest: so no row is in two.
        start[1:] = np.where(same_document, np.maximum(start[1:], stop[:-1]), start[1:])
        if self.part.group.parents is not None:
            return self._with_prefix_ends(runs, start, stop)
        return segments_from_runs(runs.document, start, stop)

    def _with_prefix_ends(self, runs: Segments, start: Integers, stop: Integers) -> Segments:
        """Add what branches among the runs see of their prefixes: of each one run, up to its end."""
        group = self.part.group
        window = self.mask.window
        assert window is not None
        bases = np.asarray(group.bases, dtype=np.int64)
        lengths = np.asarray(group.lengths, dtype=np.int64)
        first_seen = lengths.copy()  # row of each document
        for ancestors in group.ancestors():
            prefix = np.asarray(ancestors, dtype=np.int64)[runs.document]
            run = np.flatnonzero(prefix >= 0)
            first_position = runs.start[run] + bases[runs.document[run]] - window + 1
            np.minimum.at(first_seen, prefix[run], np.maximum(first_position - bases[prefix[run]], 0))
        prefixes = np.flatnonzero(first_seen < lengths)
        document = np.append(runs.document, prefixes)
        start = np.append(start, first_seen[prefixes])
        stop = np.append(np.minimum(stop, first_seen[runs.document]), lengths[prefixes])
        order = np.lexsort((start, document))
        return segments_from_runs(document[order], start[order], stop[order])

    def _find_rows_among_keys(self, keys: Segments, owner: int) -> tuple[Integers, Integers]:
        """Return which rows of `owner` are among `keys`, and where in the keys' tensor each of them is.

        Rows are compared by their number among the group's rows in document order. A row before all runs of keys gets
        run −1, whose stop is the 0 that is appended, so that the row is in no run.
        """
        _, document_starts = self._document_extents()
        segments = self.segments(owner)
        rows = expand_runs(
            segments.start + document_starts[segments.document], segments.stop + document_starts[segments.document]
        )
        starts = keys.start + document_starts[keys.document]
        stops = keys.stop + document_starts[keys.document]
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


def backward_head_groups(rows: int, q: Tensor, kv_heads: int) -> list[HeadSlice]:
    """Return the groups of heads that backward computes one after another, to hold one group's float32 sums at a time.

    `rows` is how many the largest member has, so that all members cut alike; q (T, N, H) are one member's queries.
    """
    count = count_head_groups(rows * q.shape[1] * q.shape[2] * 4, kv_heads)  # 4 bytes a number
    return cut_heads(q.shape[1], kv_heads, -(-kv_heads // count))


_BITS = 31  # of the hash that are compared with the rate


def _to_signed_word(word: int) -> int:
    word &= (1 << 64) - 1
    return word - (1 << 64) if word >> 63 else word


# words of splitmix64, signed
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_FIRST = 0xBF58476D1CE4E5B9 - (1 << 64)
_SECOND = 0x94D049BB133111EB - (1 << 64)


@dataclass(frozen=True)
class Dropout:
    """Weights are zeroed with probability `rate`, in multiples of 2 ** −31, and the others divided by 1 − rate."""

    rate: float
    seed: int
    first_head: int = 0  # of the tensors at hand, among all query heads

    def factors(self, launch: Launch, tile: Tile, heads: int, dtype: torch.dtype) -> Tensor:
        """Return what each weight of a tile is multiplied by: (heads, query rows, key rows), 0 or 1 / (1 − rate)."""
        document, q_position, k_position = launch.row_identities
        rows, keys = slice(tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop)
        head = torch.arange(self.first_head, self.first_head + heads, device=launch.device)
        row = _absorb_word(
            _absorb_word(_absorb_word(_to_signed_word(self.seed), head)[:, None], document[rows]), q_position[rows]
        )
        word = _absorb_word(row.unsqueeze(-1), k_position[keys])  # (heads, query rows, key rows)
        is_kept = _shift_right(word, 64 - _BITS) >= round(self.rate * (1 << _BITS))
        return is_kept.to(dtype).div_(1.0 - self.rate)


def mix_seed(*words: int) -> int:
    state = torch.zeros((), dtype=torch.int64)
    for word in words:
        state = _absorb_word(state, torch.tensor(_to_signed_word(word)))
    return int(state)


def _absorb_word(state: Tensor | int, word: Tensor) -> Tensor:
    """splitmix64's finaliser of state + (word + 1) · golden ratio; with the 1 a word of 0 changes the state."""
    x = state + (word + 1) * _GOLDEN
    x.bitwise_xor_(_shift_right(x, 30)).mul_(_FIRST)
    x.bitwise_xor_(_shift_right(x, 27)).mul_(_SECOND)
    return x.bitwise_xor_(_shift_right(x, 31))


def _shift_right(x: Tensor, bits: int) -> Tensor:
    """x >> bits of unsigned words: the sign bit does not spread."""
    return (x >> bits).bitwise_and_((1 << (64 - bits)) - 1)


_CPU = torch.device("cpu")
_CAUSAL = Mask()


class Saved(NamedTuple):
    """What backward needs of forward: q (T, N, H), k (Tk, K, H), v (Tk, K, Hv), out (T, N, Hv) and lse (T, N).

    `out` and `lse` are over the keys of all blocks, whichever block k and v are. For kernels that take them, `out` may
    be the sums dout · out of each row and head instead (T, N).
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor

    def deltas(self, dout: Tensor) -> Tensor:
        """dout · out of each row and head (T, N), in the accumulation dtype."""
        return self.out if self.out.ndim == 2 else deltas(dout, self.out)


class CallPart(NamedTuple):
    """The local rows of one group, how the group communicates, and who its members are."""

    rows: slice
    cp_comm_type: str
    members: Members


@dataclass(frozen=True)
class AttendCall:
    """What `attend` does for q (T, N, H), k (T, K, H) and v (T, K, Hv) over a shard.

    N, K, H and Hv are `heads`, `kv_heads`, `head_dim` and `value_dim`. `scale` is above 0, as kernels
    find the largest score before they scale; the sign of a negative one is in `sign`, by which q is multiplied (0 for a
    scale of 0). `sinks` (N,) and `dropout` are those of the heads at hand. `one_document`: every group has one
    document, so that a launch has few tiles. `spans`: rows of some document see later ones too (`layout/segments.py`),
    under a causal mask. `indexed`: rows see chosen keys, those at the positions `indices` (rows at hand, k).
    `latents`: a key is the numbers of its value and then those of k. `replays` are
    recordings of the call's launches, where it may have any. `deterministic`: the same bits again; torch's own
    switch by default. A caller who only looks for a kernel or a communication type leaves out the rest:

    >>> choose_kernel(AttendCall(32, 8, 192, 128, torch.float32)).name
    'cpu_flash'
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int
    dtype: torch.dtype = torch.bfloat16
    device: torch.device = _CPU
    mask: Mask = _CAUSAL
    scale: float = 1.0
    sign: int = 1
    softcap: float | None = None
    dropout: Dropout | None = None
    one_document: bool = False
    spans: bool = False
    indexed: bool = False
    latents: bool = False
    deterministic: bool = field(default_factory=torch.are_deterministic_algorithms_enabled)
    kernel: "Kernel | None" = None
    parts: tuple[CallPart, ...] = ()
    sinks: Tensor | None = field(default=None, compare=False)
    indices: Tensor | None = field(default=None, compare=False)
    replays: dict[Any, Replay] | None = field(default=None, compare=False, repr=False)

    @property
    def sizes(self) -> AttentionCall:
        """The sizes by which `Machine` predicts the time of this call in a step with a backward pass."""
        return AttentionCall(
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            value_dim=self.value_dim,
            bytes_per_number=self.dtype.itemsize,
            causal=self.mask.causal,
            window=self.mask.window,
            chunk=self.mask.chunk,
        )

    @property
    def features(self) -> frozenset[str]:
        """Which of "window", "softcap", "dropout", "indices" and "latents" the call has; some kernels lack them."""
        values = {
            "window": self.mask.window or self.spans,  # later keys of a span are masked as by a window
            "softcap": self.softcap,
            "dropout": self.dropout,
            "indices": self.indexed,
            "latents": self.latents,
        }
        return frozenset(name for name, value in values.items() if value)

    def for_heads(self, start: int, stop: int) -> "AttendCall":
        """Return the same call for query heads start to stop of the tensors at hand: sinks and dropout go by head."""
        if self.sinks is None and self.dropout is None:
            return self
        sinks = None if self.sinks is None else self.sinks[start:stop]
        dropout = self.dropout and replace(self.dropout, first_head=self.dropout.first_head + start)
        return replace(self, sinks=sinks, dropout=dropout)

    def for_rows(self, rows: RowIndex) -> "AttendCall":
        """Return the same call for some of the rows at hand: indices go by row."""
        return self if self.indices is None else replace(self, indices=take_rows(self.indices, rows))


@dataclass(frozen=True)
class HeadSizes:
    """Head sizes of queries and values that a kernel takes, padded with zeros where it wants others.

    `largest` bounds both (None: no bound); `pairs` of (query, value) are taken beyond it.
    """

    largest: int | None = None
    pairs: tuple[tuple[int, int], ...] = ()

    def accepts(self, query: int, value: int) -> bool:
        return self.largest is None or max(query, value) <= self.largest or (query, value) in self.pairs

    def __str__(self) -> str:
        if self.largest is None:
            return "any"
        beyond = "".join(f", or {query} with values of {value}" for query, value in self.pairs)
        return f"at most {self.largest}{beyond}"


@dataclass(frozen=True)
class Kernel:
    """A row of the support table: what a kernel can do, and its two functions.

    `needs` is what it depends on; `unsupported_reason` returns what this installation or device lacks of that ("" where
    nothing). `required` are features that a call must have. `one_document_only`: by name it runs every launch, but
    without a name it is chosen only for calls with one document in each group. `takes_deltas` tells of a call whether
    backward takes dout · out of each row and head in place of the output.
    """

    name: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    forward: Callable[..., tuple[Tensor, Tensor]] = field(repr=False)
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = field(repr=False)
    features: frozenset[str] = frozenset()
    required: frozenset[str] = frozenset()
    head_sizes: HeadSizes = HeadSizes()
    deterministic: bool = True
    one_document_only: bool = False
    needs: str = ""
    unsupported_reason: Callable[[torch.device], str] = field(default=lambda device: "", repr=False)
    takes_deltas: Callable[[AttendCall], bool] = field(default=lambda call: False, repr=False)

    def unsupported_call_reason(self, call: AttendCall) -> str:
        """Return why this kernel cannot compute the call, as "needs …, got …"; "" where it can."""
        if call.device.type not in self.devices:
            return f"needs {' or '.join(self.devices)} tensors, got {call.device.type}"
        if call.dtype not in self.dtypes:
            return f"needs {' or '.join(dtype_name(d) for d in self.dtypes)}, got {dtype_name(call.dtype)}"
        if not self.head_sizes.accepts(call.head_dim, call.value_dim):
            got = str(call.head_dim)
            got += "" if call.value_dim == call.head_dim else f" with values of {call.value_dim}"
            return f"needs a head size of {self.head_sizes}, got {got}"
        if unsupported := call.features - self.features:
            only_spans = call.spans and call.mask.window is None  # kernels compute spans as windows
            extra = " and ".join(
                "spans" if only_spans and name == "window" else name for name in sorted(unsupported)
            )
            return f"needs a call without {extra}, got {extra}"
        if missing := self.required - call.features:
            needed = " and ".join(sorted(self.required))
            return f"needs a call with {needed}, got none of {' and '.join(sorted(missing))}"
        if call.deterministic and not self.deterministic:
            return "needs torch.use_deterministic_algorithms(False), got deterministic mode"
        return self.unsupported_reason(call.device)

    def suits(self, call: AttendCall) -> bool:
        """The kernel can compute the call and may be chosen without being named."""
        return (call.one_document or not self.one_document_only) and not self.unsupported_call_reason(call)


def unsupported_capability_reason(device: torch.device, capabilities: range, named: str) -> str:
    """Return that a kernel needs the compute capabilities `named`, where the major one of a GPU is none of these."""
    major, minor = torch.cuda.get_device_capability(device)
    return "" if major in capabilities else f"needs compute capability {named}, got {major}.{minor}"


def dtype_name(value: Any) -> str:
    return str(value).removeprefix("torch.")


class AttentionCache:
    """What attention derives from a shard, for all layers (`cache_of`).

    `calls` by their tensors' shapes and arguments; `members` by the group's index, the number of neighbours that act as
    one member, and the mask.
    """

    def __init__(self, listed_by_layer: bool) -> None:
        self.listed_by_layer = listed_by_layer  # whether a group's types are a list with one per layer
        self.calls: dict[Any, AttendCall] = {}
        self.members: dict[tuple[int, int, Mask], Members] = {}


_caches = WeakKeyDictionary[SequenceShard, AttentionCache]()  # freed with their shards


def cache_of(shard: SequenceShard) -> AttentionCache:
    cache = _caches.get(shard)
    if cache is None:
        has_lists = any(not isinstance(group.cp_comm_type, str) for group in shard.micro_batch.groups)
        cache = _caches[shard] = AttentionCache(listed_by_layer=has_lists)
    return cache


class Gradients(NamedTuple):
    """Gradients of the local q, k and v, those of k and v summed over the group; of the sinks, this rank's part."""

    q: Tensor
    k: Tensor
    v: Tensor
    sinks: Tensor | None


def add_block(
    total: Partial, q: Tensor, k: Tensor, v: Tensor, launches: tuple[Launch, ...], call: AttendCall
) -> None:
    """Add to `total` the attention of q (T, N, H) to this block's k (Tk, K, H), v (Tk, K, Hv)."""
    assert call.kernel is not None
    for launch in launches:
        rows, keys = launch.q_rows, launch.k_rows
        block_call = call.for_rows(rows)
        out, lse = call.kernel.forward(
            take_rows(q, rows), take_rows(k, keys), take_rows(v, keys), launch, block_call
        )
        total.add(rows, out, lse)


def block_gradients(
    dq: RowSum, dout: Tensor, saved: Saved, launches: tuple[Launch, ...], call: AttendCall
) -> list[Addend]:
    """Add a block's part of the queries' gradient to `dq`; return the gradients of its keys and values by launch.

    The k and v of `saved` are the block's.
    """
    assert call.kernel is not None
    addends = list[Addend]()
    q, k, v, out, lse = saved
    for launch in launches:
        rows, keys = launch.q_rows, launch.k_rows
        launch_saved = Saved(
            take_rows(q, rows), take_rows(k, keys), take_rows(v, keys), take_rows(out, rows), take_rows(lse, rows)
        )
        gradient, *key_gradients = call.kernel.backward(
            take_rows(dout, rows), launch_saved, launch, call.for_rows(rows)
        )
        dq.add(rows, gradient)
        if launch.key_copies:
            key_gradients = [_sum_copies(x, launch.key_copies) for x in key_gradients]
        addends.append(Addend(launch.gradient_rows, key_gradients))
    return addends


def _sum_copies(gradient: Tensor, copies: Sequence[Tensor]) -> Tensor:
    """Sum the gradients of a key row's copies, in their order: every sum gives the same bits again."""
    columns = gradient.flatten(1).contiguous()
    total = columns.new_empty((len(copies[0]), columns.shape[1]), dtype=accumulation_dtype(gradient.dtype))
    sum_rows(total, [(columns, index) for index in copies])
    return total.unflatten(1, gradient.shape[1:])


def sum_addends(addends: list[Addend], k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    dk, dv = RowSum(k), RowSum(v)
    for rows, (k_addend, v_addend) in addends:
        dk.add(rows, k_addend)
        dv.add(rows, v_addend)
    return dk.result(), dv.result()


def sink_gradient(dout: Tensor, saved: Saved, sinks: Tensor | None) -> Tensor | None:
    """Return the gradient of the sinks (N,): −Σ rows w · (dout · out), with w = exp(sink − lse) the sink's weight.

    A logit's gradient in softmax is w · (dout · value − dout · out), and a sink has the value 0.
    """
    if sinks is None:
        return None
    weight = (sinks.to(saved.lse.dtype) - saved.lse).exp_()
    return -weight.mul_(saved.deltas(dout)).sum(0)
