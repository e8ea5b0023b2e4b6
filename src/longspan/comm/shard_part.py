"""This rank's share of each group of a micro-batch, and which rows the slots hold, in integers on the host.

Also the base of values that a micro-batch is bound to, and `to_device`, which copies integers of the host to a device.
"""

from collections.abc import Sequence
from typing import Any, NoReturn, Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longspan.errors import CommError
from longspan.layout import Segments
from longspan.layout.segments import Integers, expand_runs
from longspan.plan import Group, MicroBatch


class Immutable:
    """Attributes are set once, by `_set`. A plain class: FSDP2's mixed precision rebuilds dataclasses in keyword
    arguments and casts their tensors (torch 2.11 to 2.15)."""

    __slots__ = ("__weakref__",)

    def _set(self, **values: object) -> None:
        """Set attributes in spite of `__setattr__`, which refuses all."""
        for name, value in values.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"{type(self).__name__} is immutable: bind the micro-batch again, do not set {name}")

    def __copy__(self) -> Self:
        """Return this object itself: what never changes needs no copy."""
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return self

    def __reduce__(self) -> NoReturn:
        raise CommError(
            f"a {type(self).__name__} belongs to a world of this process and cannot be pickled; send its MicroBatch "
            "(or the plan) and call bind(micro_batch, world) where it arrives"
        )


class ShardPart(Immutable):
    """This rank's share of one group of a micro-batch.

    `group` and `index` (of the group in the micro-batch, −1 for padding rows), `member` (position in the group),
    `start:stop` (its rows among the shard's rows), `counts` (rows of every member).
    """

    __slots__ = ("counts", "group", "index", "member", "start", "stop", "world_key")

    group: Group
    index: int
    member: int
    start: int
    stop: int
    counts: tuple[int, ...]
    world_key: int

    def __init__(self, group: Group, index: int, slot: int, start: int, world_key: int) -> None:
        member, counts = group.slots.index(slot), group.shares.counts
        stop = start + counts[member]
        self._set(group=group, index=index, member=member, start=start, stop=stop, counts=counts, world_key=world_key)

    @property
    def degree(self) -> int:
        """Return the context-parallel degree of the group."""
        return self.group.degree

    def segments(self, member: int | None = None) -> Segments:
        """Return the rows of one member (default: this rank) as runs of positions inside documents."""
        return self.group.shares.segments(self.member if member is None else member)

    def __repr__(self) -> str:
        return f"ShardPart(group {self.index}, member {self.member} of {self.degree}, rows {self.start}:{self.stop})"


def parts_of_slot(micro_batch: MicroBatch, slot: int, world_key: int, padding: int) -> tuple[ShardPart, ...]:
    """Return a slot's parts of its groups, in plan order, and a last part (index −1) of `padding` rows, if any."""
    groups = [*micro_batch.groups_of(slot)]
    if padding:
        groups.append((-1, Group(slots=(slot,), documents=(-1,), lengths=(padding,))))
    parts: list[ShardPart] = []
    for index, group in groups:
        parts.append(ShardPart(group, index, slot, parts[-1].stop if parts else 0, world_key))
    return tuple(parts)


def to_device(x: npt.NDArray[np.generic], device: torch.device | str) -> Tensor:
    """Return an array as a tensor on `device`; on a CPU it shares the array's memory.

    To a GPU the array goes through page-locked memory, and the host does not wait. From ordinary memory CUDA would let
    all queued work end first, so that every micro-batch would begin with an empty queue.
    """
    tensor: Any = torch.from_numpy(x)
    if torch.device(device).type != "cuda":
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def lay_out(
    micro_batch: MicroBatch, parts: Sequence[ShardPart]
) -> tuple[Integers, Integers, Integers, npt.NDArray[np.int32]]:
    """Return the packed row and position of each local row, and the document and boundaries of each local segment."""
    bases = np.cumsum([0, *(group.tokens for group in micro_batch.groups)])  # that of padding (−1) is not used
    rows, positions = _concatenate_pairs([_part_rows(shard_part, int(bases[shard_part.index])) for shard_part in parts])
    documents, sizes = _concatenate_pairs([_rows_by_document(shard_part) for shard_part in parts])
    return rows, positions, documents, np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)


def _part_rows(part: ShardPart, base: int) -> tuple[Integers, Integers]:
    """Return the packed row and position of each local row of a part whose group begins at packed row `base`.

    Rows that pad documents out, and those of a part without a group, have the packed row −1.
    """
    segments = part.segments()
    sizes = segments.stop - segments.start
    # within a segment, position − local row is the same for all rows: start − offset
    positions = np.arange(int(sizes.sum())) + np.repeat(segments.start - segments.offset, sizes)
    lengths = np.asarray(part.group.lengths, dtype=np.int64)
    starts = np.cumsum(lengths) - lengths
    document = np.repeat(segments.document, sizes)
    real = (positions < lengths[document]) & (part.index >= 0)
    return np.where(real, base + starts[document] + positions, -1), positions


def _rows_by_document(part: ShardPart) -> tuple[Integers, Integers]:
    """Return the documents that this part has rows of, and how many rows of each."""
    segments = part.segments()
    per_document = np.bincount(
        segments.document, weights=segments.stop - segments.start, minlength=len(part.group.documents)
    ).astype(np.int64)
    present = np.flatnonzero(per_document)
    return np.asarray(part.group.documents, dtype=np.int64)[present], per_document[present]


def _concatenate_pairs(pairs: Sequence[tuple[Integers, Integers]]) -> tuple[Integers, Integers]:
    """Concatenate the first arrays of all pairs, and the second ones; empty int64 arrays where there is no pair."""
    none = np.zeros(0, dtype=np.int64)
    return np.concatenate([none, *(one for one, _ in pairs)]), np.concatenate([none, *(other for _, other in pairs)])


def counts_of_slots(micro_batch: MicroBatch, slots: int) -> list[int]:
    """Return how many rows each slot holds."""
    counts = [0] * slots
    for group in micro_batch.groups:
        for slot, rows in zip(group.slots, group.shares.counts, strict=True):
            counts[slot] += rows
    return counts


def packed_order(micro_batch: MicroBatch, starts: Sequence[int]) -> Integers:
    """Return where each packed row (S,) is among the rows of all slots; those of slot s begin at `starts[s]`.

    A slot's rows lie group after group; rows that pad a document out are no packed rows.
    """
    sources, next_row, base = np.empty(micro_batch.tokens, dtype=np.int64), list(starts), 0
    for group in micro_batch.groups:
        lengths, counts = np.asarray(group.lengths, dtype=np.int64), group.shares.counts
        first_rows = base + np.cumsum(lengths) - lengths
        for member, slot in enumerate(group.slots):
            segments = group.shares.segments(member)
            real = lengths[segments.document] - segments.start  # up to the document's end; padding follows
            sizes = np.clip(real, 0, segments.stop - segments.start)
            begin, local = first_rows[segments.document] + segments.start, next_row[slot] + segments.offset
            sources[expand_runs(begin, begin + sizes)] = expand_runs(local, local + sizes)
            next_row[slot] += counts[member]
        base += group.tokens
    return sources
