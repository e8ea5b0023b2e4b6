"""For every rank, which rows of items it encodes, and which it needs: two partitions of row ids.

Both come from plans alone, so that every rank computes them for all ranks, and nothing is exchanged to know them. The
homes may be any over the same ranks: slots of the encoder and of the language model need not align.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from longspan.layout import Layout
from longspan.layout.segments import Integers, expand
from longspan.plan.items.item_table import ItemRows, ModalityRows
from longspan.plan.micro_batch import MicroBatch

_NONE = np.zeros(0, dtype=np.int64)


@dataclass(frozen=True, kw_only=True)
class NeededBy:
    """Micro-batches of the language model's plan, its home, and how the rows of a slot are laid out.

    The slots' rows are padded to a multiple of `row_multiple`; with `split_over_tp` the tensor-parallel ranks of a slot
    hold parts of its rows (sequence parallelism). Each of `depths` of multi-token prediction needs the rows of tokens
    further on, in the pipeline stage at place `depths_at`.
    """

    micro_batches: tuple[MicroBatch, ...]
    home: Layout
    row_multiple: int = 1
    split_over_tp: bool = False
    depths: int = 0
    depths_at: int = 0


def rows_needed(rows: ModalityRows, needed_by: NeededBy, depth: int = 0) -> dict[int, list[ItemRows]]:
    """For every rank, which rows it needs in each micro-batch of the language model's plan, in the order of its rows.

    Ranks of the first pipeline stage need rows, each tensor-parallel rank of a slot all those of the slot, or where
    rows are split over these ranks those among its own part of the slot's rows, by index in that part. At a `depth` of
    multi-token prediction local row t needs the row of the token `depth` further on in its document.
    """
    pp = needed_by.depths_at if depth else 0
    home, multiple = needed_by.home, needed_by.row_multiple
    needed: dict[int, list[ItemRows]] = {rank: [] for rank in home.ranks}
    for micro_batch in needed_by.micro_batches:
        by_slot = _rows_of_slots(rows, micro_batch, home.slots, depth)
        for slot, (of_slot, count) in enumerate(by_slot):
            size = -(-max(count, 1) // multiple) * multiple // home.tp
            for tp in range(home.tp):
                part = _of_part(of_slot, size, tp) if needed_by.split_over_tp else of_slot
                needed[home.rank_at(slot, tp=tp, pp=pp)].append(part)
    for rank in home.ranks:
        needed[rank] = needed[rank] or [ItemRows(_NONE, _NONE)] * len(needed_by.micro_batches)
    return needed


def rows_encoded(rows: ModalityRows, wave: MicroBatch, home: Layout) -> dict[int, Integers]:
    """For every rank, which rows it has once a wave is encoded; a wave's documents are items of the modality."""
    encoded: dict[int, Integers] = {}
    for slot in range(home.slots):
        parts = [_NONE]
        for _, group in wave.groups_of(slot):
            segments = group.shares.segments(group.slots.index(slot))
            first = rows.base[np.asarray(group.documents, dtype=np.int64)[segments.document]]
            parts.append(expand(first + segments.start, first + segments.stop))
        encoded |= {home.rank_at(slot, tp=tp): np.concatenate(parts) for tp in range(home.tp)}
    return encoded


def _rows_of_slots(rows: ModalityRows, micro_batch: MicroBatch, slots: int, depth: int) -> list[tuple[ItemRows, int]]:
    """Of every slot: its rows of items, by local row, and how many local rows it has in all."""
    parts: list[list[ItemRows]] = [[] for _ in range(slots)]
    counts = [0] * slots
    for group in micro_batch.groups:
        for member, slot in enumerate(group.slots):
            segments = group.shares.segments(member)
            later = replace(segments, start=segments.start + depth, stop=segments.stop + depth)
            local, row = rows.among(group.documents, later)
            parts[slot].append(ItemRows(local + counts[slot], row))
            counts[slot] += group.shares.counts[member]
    return [(_joined(parts[slot]), counts[slot]) for slot in range(slots)]


def _joined(parts: Sequence[ItemRows]) -> ItemRows:
    return ItemRows(
        np.concatenate([_NONE, *(part.local for part in parts)]), np.concatenate([_NONE, *(part.row for part in parts)])
    )


def _of_part(of_slot: ItemRows, size: int, tp: int) -> ItemRows:
    mine = of_slot.local // size == tp
    return ItemRows(of_slot.local[mine] - tp * size, of_slot.row[mine])
