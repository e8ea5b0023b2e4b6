"""Attention to a window of rows and to entries, keys that are each made of a window of rows, under one softmax.

Rows of the window come as in a ring, entries are gathered: their outputs are joined by log-sum-exp, and backward goes
through both with the joint one. A key is its value too. Which entry is made where is in `layout/entries.py`.
"""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor, are_deterministic_algorithms_enabled

from longspan.attention.all_gather import all_gather_backward, all_gather_forward
from longspan.attention.attend import cached_members, run_call
from longspan.attention.blocks import Partial
from longspan.attention.call import AttendCall, CallPart, Gradients, Saved, cache_of
from longspan.attention.kernels import choose_kernel
from longspan.attention.masks import Mask, entry_tilings
from longspan.attention.members import Members
from longspan.attention.ring import ring_backward, ring_forward
from longspan.attention.rows import NO_KEY
from longspan.attention.tiles import Launch, RowIdentities
from longspan.comm import SequenceShard, ShardPart, to_device
from longspan.comm.row_fetch import RowFetch
from longspan.errors import AttentionError
from longspan.layout.entries import Entries, find_entries
from longspan.layout.segments import Integers, expand_runs

# The name by which a part finds its two functions, as it does those of a communication type.
_PATTERN = f"{__name__}.JOINED"


class EntryMembers(Members):
    """The members of a group that share entries; the window of rows beside them is among the members `rows`.

    `chosen`: rows choose among the entries that they may see.
    """

    def __init__(self, part: ShardPart, rows: Members, stride: int, windows_before: int, *, chosen: bool) -> None:
        super().__init__(part, Mask(), rows.device)
        self.rows: Members = rows
        self.chosen: bool = chosen
        segments = [part.segments(member) for member in range(part.degree)]
        self.entries: Entries = find_entries(
            segments, part.member, part.group.lengths, stride, windows_before=windows_before
        )
        self.counts = tuple(map(len, self.entries.made))
        self._fetch = RowFetch(part, self.entries.before, self.device)
        self._windows: Tensor = to_device(self.entries.windows.reshape(-1), self.device)
        self._own: Tensor = to_device(self.entries.own, self.device)
        self.positions: Tensor = to_device(self.entries.positions, self.device)

    def lay_out_windows(self, x: Tensor, none: Tensor) -> Tensor:
        """Return the rows of the windows that this member lays out, one after another: (W · stride, C), of x (T, C).

        `none` (1, C) stands where a document has no row. Differentiable; entered by all members.
        """
        arrived = self._fetch.fetch(x, "rows before a run, entries")
        return torch.cat([x, arrived, none]).index_select(0, self._windows)

    def own_entries(self, made: Tensor) -> Tensor:
        """Return the entries that this member makes, of one for each window that it lays out (W, D)."""
        return made.index_select(0, self._own)

    def gather(self, own: Tensor) -> Tensor:
        """Gather something of every entry, without a gradient: (own, D) to (entries of the group, D)."""
        if self.degree == 1:
            return own[self.document_order((0,))]
        gathered = self.gather_channel.all_gather_rows(own.contiguous(), self.counts, "entries").wait()
        return gathered[self.document_order(self.gather_channel.row_starts(self.counts))]

    def key_numbers(self, member: int) -> Integers:
        """Return the numbers of the entries that a member makes."""
        return self.entries.made[member]

    def launches(self, owner: int | None) -> tuple[Launch, ...]:
        """Return the launches of this member's rows against all entries of the group."""
        assert owner is None, "entries are gathered"
        if owner not in self._launches:
            queries = self.real_segments(self.member)
            counts = self.entries.counts
            tilings = entry_tilings(queries, counts, self.entries.stride, chosen=self.chosen)
            document_ids = np.asarray(self.part.group.documents, dtype=np.int64)
            segments = self.segments(self.member)

            # As in `Members`, this refers to no object that holds the launches.
            def identities() -> RowIdentities:
                document = np.repeat(document_ids[segments.document], segments.stop - segments.start)
                return RowIdentities(document, segments.positions, expand_runs(np.zeros_like(counts), counts))

            self._launches[owner] = tuple(Launch(tiling, self.device, identities) for tiling in tilings)
        return self._launches[owner]


def shard_entries(
    shard: SequenceShard,
    *,
    stride: int,
    windows_before: int = 0,
    window: int | None = None,
    most: int | None = None,
) -> tuple[EntryMembers, ...]:
    """Return who makes and shares the entries of each part of a shard; made at the first call, for all layers.

    An entry is made of a window of `stride` rows and of `windows_before` windows before it; rows see `window` rows
    beside entries (None: all), and choose `most` of these where a document of the micro-batch has more.
    """
    cache = cache_of(shard).entries
    key = stride, windows_before, window, most
    if key not in cache:
        longest = max(shard.micro_batch.lengths, default=0) // stride
        chosen = most is not None and longest > most
        cache[key] = tuple(
            EntryMembers(
                part, cached_members(part, shard, Mask(window=window)), stride, windows_before, chosen=chosen
            )
            for part in shard.parts
        )
    return cache[key]


def attend_with_entries(
    q: Tensor,
    rows: Tensor,
    entries: Tensor,
    members: Sequence[EntryMembers],
    shard: SequenceShard,
    *,
    window: int,
    scale: float,
    sinks: Tensor | None = None,
    indices: Tensor | None = None,
    kernel: str | None = None,
) -> Tensor:
    """Attend from q (T, N, H) to a window of `rows` (T, 1, H) and to entries, keys that are values too: (T, N, H).

    `entries` (E, 1, H) are those that this rank makes, part after part of `members` (`shard_entries`). `indices`
    (T, k): numbers of the entries that a row has chosen in its document, −1 for none; None where it sees all whose
    windows ended. Differentiable, with the gradients of entries from all ranks; every member of a group enters.
    """
    if any(group.parents is not None for group in shard.micro_batch.groups):
        raise AttentionError(
            "documents of the micro-batch share prefixes (Group.parents), and entries are made of the rows of one "
            "document; plan the documents without share_prefixes"
        )
    call = _pack_call(q, rows, members, shard, Mask(window=window), scale, kernel)
    return run_call(q, rows, entries, sinks, indices, call)[0]


def _pack_call(
    q: Tensor,
    rows: Tensor,
    members: Sequence[EntryMembers],
    shard: SequenceShard,
    mask: Mask,
    scale: float,
    kernel: str | None,
) -> AttendCall:
    calls = cache_of(shard).calls
    chosen = any(part_members.chosen for part_members in members)
    stride = max((part_members.entries.stride for part_members in members), default=1)
    key = (q.shape, q.dtype, *members, mask, scale, kernel, are_deterministic_algorithms_enabled())
    if key not in calls:
        heads, size = q.shape[1:]
        mask = mask.for_lengths(shard.micro_batch.path_lengths)
        window_call = AttendCall(heads, 1, size, size, q.dtype, q.device, mask, scale)
        window_call = replace(window_call, kernel=choose_kernel(window_call, kernel))
        call = entry_call(window_call, stride, chosen=chosen, kernel=kernel)
        ends = np.cumsum([0, *(part_members.counts[part_members.member] for part_members in members)]).tolist()
        parts = tuple(
            CallPart(slice(x.part.start, x.part.stop), _PATTERN, x, v_rows=slice(ends[i], ends[i + 1]))
            for i, x in enumerate(members)
        )
        calls[key] = replace(call, parts=parts)
    return calls[key]


def entry_call(window_call: AttendCall, stride: int, *, chosen: bool, kernel: str | None) -> AttendCall:
    """Return the call for entries beside that for a window of rows, with its kernel. Raises AttentionError for none.

    Chosen entries are gathered as latents, which are keys and values at once, but by the kernels that cannot.
    """
    latents = chosen and kernel != "triton_flash" and not are_deterministic_algorithms_enabled()
    call = replace(
        window_call,
        mask=Mask(),
        stride=1 if chosen else stride,
        indexed=chosen,
        latents=latents,
        window_call=window_call,
        kernel=None,
    )
    return replace(call, kernel=choose_kernel(call, kernel))


def _joined_forward(
    q: Tensor, rows: Tensor, entries: Tensor, members: EntryMembers, call: AttendCall
) -> tuple[Tensor, list[Saved]]:
    out, (of_rows,) = ring_forward(q, rows, rows, members.rows, _window_call(call))
    total = Partial(q, entries.shape[2])
    total.add(slice(0, len(q)), out, of_rows.lse)
    if sum(members.counts):
        entry_out, (of_entries,) = all_gather_forward(q, *_keys_and_values(entries, call), members, _bare(call))
        # A row that sees no entry has a log-sum-exp that is finite, as a merge takes it.
        total.add(slice(0, len(q)), entry_out, of_entries.lse.clamp(min=NO_KEY))
    out, lse = total.result()
    return out, [Saved(q, rows, entries, out, lse)]


def _joined_backward(
    dout: Tensor, saved_slices: Sequence[Saved], members: EntryMembers, call: AttendCall
) -> Gradients:
    """Each set of keys has the gradients of a block: by the joint output and log-sum-exp."""
    (saved,) = saved_slices
    q, rows, entries, out, lse = saved
    window = ring_backward(dout, [Saved(q, rows, rows, out, lse)], members.rows, _window_call(call))
    if not sum(members.counts):
        return Gradients(window.q, window.k + window.v, torch.zeros_like(entries), window.sinks)
    k, v = _keys_and_values(entries, call)
    chosen = all_gather_backward(dout, [Saved(q, k, v, out, lse)], members, _bare(call))
    dentries = chosen.v if call.latents else chosen.k + chosen.v
    return Gradients(window.q + chosen.q, window.k + window.v, dentries, window.sinks)


JOINED = (_joined_forward, _joined_backward)


def _window_call(call: AttendCall) -> AttendCall:
    """The sinks count once, with the rows."""
    assert call.window_call is not None
    return replace(call.window_call, sinks=call.sinks)


def _bare(call: AttendCall) -> AttendCall:
    return replace(call, sinks=None)


def _keys_and_values(entries: Tensor, call: AttendCall) -> tuple[Tensor, Tensor]:
    return (entries[..., :0], entries) if call.latents else (entries, entries)
