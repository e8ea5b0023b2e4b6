"""How the items of a step are encoded and where their rows go: waves, each with who has and who needs which rows.

Both follow from plans only: every rank computes them for all ranks, and nothing is exchanged to learn them. The homes
may be any over the same ranks.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

import numpy as np

from longspan.errors import PlanError
from longspan.layout import Layout, Partition
from longspan.layout.segments import Integers, expand_runs
from longspan.plan.cost.cost import DEFAULT_COST, Cost
from longspan.plan.dynamic.planner import plan_dynamic
from longspan.plan.items.item_table import ItemRows, ItemTable, ModalityRows
from longspan.plan.micro_batch import MicroBatch
from longspan.plan.plan import Plan

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


@dataclass(frozen=True, kw_only=True)
class EncoderPlanning:
    """How the items of one modality are dealt to the slots of an encoder's home; see `Encoder`."""

    home: Layout
    max_rows_per_slot: int | None = None
    max_cp: int = 1
    cost: Cost = DEFAULT_COST


@dataclass(frozen=True, eq=False)
class Wave:
    """One pass of an encoder on all its slots, and the exchange after it.

    The documents of `micro_batch` are items of the modality. `have` and `need` are rows of this wave, for every rank of
    the language model's home in its order.
    """

    micro_batch: MicroBatch
    have: Partition
    need: Partition


@dataclass(frozen=True, eq=False)
class ModalityPlan:
    """The waves of one modality; `needed[rank][i]` are the rows of micro-batch i that a rank needs, of all waves.

    `ahead` are the same for each depth of multi-token prediction. Of a micro-batch rows arrive depth after depth.
    `split_over_tp`: whether tensor-parallel ranks of a slot need parts of its rows each. `plan` is that of the items,
    as documents of their rows over the encoder's slots.
    """

    plan: Plan
    rows: ModalityRows
    waves: tuple[Wave, ...]
    wave_of_row: Integers
    needed: dict[int, list[ItemRows]] = field(repr=False)
    ahead: tuple[dict[int, list[ItemRows]], ...] = field(default=(), repr=False)
    split_over_tp: bool = False

    def item_rows_at(self, rank: int, micro_batch: int) -> tuple[ItemRows, ...]:
        """Return what a rank needs of a micro-batch, for its own tokens and for those further on, depth by depth."""
        return tuple(needed[rank][micro_batch] for needed in (self.needed, *self.ahead))

    @property
    def balance(self) -> float:
        """The predicted work of the busiest slot over the mean of all slots; 1 where nothing is encoded."""
        work = self.plan.timeline().busy.sum(0)
        return float(work.max() / work.mean()) if work.any() else 1.0


@lru_cache(maxsize=8)
def _plan_encoding(counts: tuple[int, ...], planning: EncoderPlanning) -> Plan:
    """Every row of an item sees all rows of it, so that contiguous shares have equal attention, as zigzag ones do."""
    return plan_dynamic(
        counts,
        planning.home,
        max_tokens_per_slot=planning.max_rows_per_slot,
        max_cp=planning.max_cp,
        cost=planning.cost,
        partition="contiguous",
        effort="fast",
    )


def plan_items(
    table: ItemTable, needed_by: NeededBy, encoders: Mapping[str, EncoderPlanning]
) -> dict[str, ModalityPlan]:
    """Plan the waves of every modality. Raises PlanError for items without an encoder, or too large for its slots."""
    if unknown := [modality for modality in table.modalities if modality not in encoders]:
        count = sum(item.modality == unknown[0] for item in table.items)
        raise PlanError(
            f"{count} of {len(table)} items are of modality {unknown[0]!r}, for which the model has no encoder; it has "
            f"encoders for {', '.join(map(repr, encoders)) or 'none'}"
        )
    return {modality: _plan_modality(table, modality, needed_by, encoders[modality]) for modality in table.modalities}


@lru_cache(maxsize=8)
def _plan_modality(table: ItemTable, modality: str, needed_by: NeededBy, planning: EncoderPlanning) -> ModalityPlan:
    """Plan the waves in which the items of a modality are encoded, and which rank needs which of their rows."""
    rows, home = table.of(modality), needed_by.home
    _check_largest_item(table, rows, planning)
    plan = _plan_encoding(rows.counts, planning)
    micro_batches = plan.micro_batches
    needed = find_needed_rows(rows, needed_by)
    wave_of_row = _wave_of_row(rows, micro_batches)
    ahead = tuple(find_needed_rows(rows, needed_by, depth) for depth in range(1, needed_by.depths + 1))
    ids = {
        rank: _order_rows([needed[rank], *(needed_at_depth[rank] for needed_at_depth in ahead)]) for rank in home.ranks
    }
    waves: list[Wave] = []
    for index, micro_batch in enumerate(micro_batches):
        rows_by_rank = find_encoded_rows(rows, micro_batch, planning.home)
        needed_rows = [ids[rank][wave_of_row[ids[rank]] == index] for rank in home.ranks]
        encoded_rows = Partition.from_rows([rows_by_rank[rank] for rank in home.ranks])
        waves.append(Wave(micro_batch, encoded_rows, Partition.from_rows(needed_rows)))
    return ModalityPlan(plan, rows, tuple(waves), wave_of_row, needed, ahead, needed_by.split_over_tp)


def _order_rows(depths: Sequence[Sequence[ItemRows]]) -> Integers:
    """Return the ids of the rows that a rank needs: micro-batch by micro-batch, in each micro-batch depth after depth.

    `depths` has a list for the rank's own tokens and one for each depth, with the rows of every micro-batch.
    """
    parts = [part.row for of_micro_batch in zip(*depths, strict=True) for part in of_micro_batch]
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


def _check_largest_item(table: ItemTable, rows: ModalityRows, planning: EncoderPlanning) -> None:
    cap, largest = planning.max_rows_per_slot, int(np.argmax(rows.counts))
    if cap is not None and (count := rows.counts[largest]) > cap * planning.max_cp:
        raise PlanError(
            f"{table.item_text(int(rows.items[largest]))} has {count} rows, more than the {cap * planning.max_cp} that "
            f"max_rows_per_slot {cap} x max_cp {planning.max_cp} of its encoder hold; raise one of them"
        )


def _wave_of_row(rows: ModalityRows, micro_batches: Sequence[MicroBatch]) -> Integers:
    wave_of_item = np.zeros(len(rows.items), dtype=np.int64)
    for index, micro_batch in enumerate(micro_batches):
        for group in micro_batch.groups:
            wave_of_item[list(group.documents)] = index
    return np.repeat(wave_of_item, np.diff(rows.base))


def find_needed_rows(rows: ModalityRows, needed_by: NeededBy, depth: int = 0) -> dict[int, list[ItemRows]]:
    """Return for every rank the rows that it needs in each micro-batch of the language model's plan, in its row order.

    Only ranks of the first pipeline stage need rows, or at a `depth` of multi-token prediction those of the stage
    `needed_by.depths_at`, where local row t needs the row of the token `depth` further on in its document. Each
    tensor-parallel rank needs all rows of its slot. Where these ranks split the rows of a slot, it needs only those in
    its part, with indices that count from the beginning of the part.
    """
    pp = needed_by.depths_at if depth else 0
    home, multiple = needed_by.home, needed_by.row_multiple
    needed: dict[int, list[ItemRows]] = {rank: [] for rank in home.ranks}
    for micro_batch in needed_by.micro_batches:
        by_slot = _item_rows_of_slots(rows, micro_batch, home.slots, depth)
        for slot, (slot_rows, count) in enumerate(by_slot):
            size = -(-max(count, 1) // multiple) * multiple // home.tp
            for tp in range(home.tp):
                rank_rows = _part_rows(slot_rows, size, tp) if needed_by.split_over_tp else slot_rows
                needed[home.rank_at(slot, tp=tp, pp=pp)].append(rank_rows)
    for rank in home.ranks:
        needed[rank] = needed[rank] or [ItemRows(_NONE, _NONE)] * len(needed_by.micro_batches)
    return needed


def find_encoded_rows(rows: ModalityRows, wave: MicroBatch, home: Layout) -> dict[int, Integers]:
    """Return for every rank the ids of the rows that it has once a wave is encoded; documents of a wave are items."""
    rows_by_rank: dict[int, Integers] = {}
    for slot in range(home.slots):
        parts = [_NONE]
        for _, group in wave.groups_of(slot):
            segments = group.shares.segments(group.slots.index(slot))
            first = rows.base[np.asarray(group.documents, dtype=np.int64)[segments.document]]
            parts.append(expand_runs(first + segments.start, first + segments.stop))
        rows_by_rank |= {home.rank_at(slot, tp=tp): np.concatenate(parts) for tp in range(home.tp)}
    return rows_by_rank


def _item_rows_of_slots(
    rows: ModalityRows, micro_batch: MicroBatch, slots: int, depth: int
) -> list[tuple[ItemRows, int]]:
    """Return for every slot its rows of items, by local row, and the number of its local rows.

    A local row gets the row of the token that is `depth` further on in its document.
    """
    parts: list[list[ItemRows]] = [[] for _ in range(slots)]
    counts = [0] * slots
    for group in micro_batch.groups:
        for member, slot in enumerate(group.slots):
            segments = group.shares.segments(member)
            segments_of_depth = replace(segments, start=segments.start + depth, stop=segments.stop + depth)
            local, row = rows.find_rows(group.documents, segments_of_depth)
            parts[slot].append(ItemRows(local + counts[slot], row))
            counts[slot] += group.shares.counts[member]
    return [(_join_rows(parts[slot]), counts[slot]) for slot in range(slots)]


def _join_rows(parts: Sequence[ItemRows]) -> ItemRows:
    return ItemRows(
        np.concatenate([_NONE, *(part.local for part in parts)]), np.concatenate([_NONE, *(part.row for part in parts)])
    )


def _part_rows(slot_rows: ItemRows, size: int, tp: int) -> ItemRows:
    """Return the item rows in the part of a slot's rows that its tensor-parallel rank `tp` holds, `size` rows long.

    Local indices count from the beginning of that part.
    """
    is_local = slot_rows.local // size == tp
    return ItemRows(slot_rows.local[is_local] - tp * size, slot_rows.row[is_local])
