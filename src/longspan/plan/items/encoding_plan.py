"""How the items of documents are encoded: waves of an encoder, each with who has and who needs which rows.

All follows from plans only: every rank computes it for all ranks. A row id counts the rows of one modality.
"""

from collections.abc import Mapping
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
    """Micro-batches of the language model's plan, its home, and how the rows of a slot are laid out: padded to a
    multiple of `row_multiple`; with `split_over_tp` tensor-parallel ranks hold parts of them (sequence parallelism).
    Each of `depths` of multi-token prediction needs the rows of tokens further on, in the pipeline stage at place
    `depths_at`.
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
    """One pass of an encoder on all its slots, and the exchange after it. The documents of `micro_batch` are items of
    the modality. `have` and `need` are rows of this wave, for every rank of the language model's home in its order.
    """

    micro_batch: MicroBatch
    have: Partition
    need: Partition


@dataclass(frozen=True, eq=False)
class ModalityPlan:
    """The waves of one modality. `plan` deals the items, as documents of so many rows, to the encoder's slots.
    `needed[rank][i]` are the rows, of all waves, that a rank needs in micro-batch i of the language model; `ahead` has
    the same for each depth of multi-token prediction, whose rows arrive after those of `needed`, depth by depth.
    `split_over_tp`: whether each tensor-parallel rank of a slot needs only a part of its rows.
    """

    plan: Plan
    rows: ModalityRows
    waves: tuple[Wave, ...]
    wave_of_row: Integers
    needed: dict[int, list[ItemRows]] = field(repr=False)
    ahead: tuple[dict[int, list[ItemRows]], ...] = field(default=(), repr=False)
    split_over_tp: bool = False

    @property
    def balance(self) -> float:
        """The predicted work of the busiest slot over the mean of all slots; 1 where nothing is encoded."""
        work = self.plan.timeline().busy.sum(0)
        return float(work.max() / work.mean()) if work.any() else 1.0


@lru_cache(maxsize=8)
def _plan_encoding(counts: tuple[int, ...], planning: EncoderPlanning) -> Plan:
    """The cache keeps the last eight plans, which are made in few steps of search. Every row of an item sees all
    rows of it, so that contiguous shares have equal attention, as zigzag ones do."""
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
    return {
        modality: _plan_modality(table, modality, needed_by, encoders[modality]) for modality in table.modalities
    }


@lru_cache(maxsize=8)
def _plan_modality(table: ItemTable, modality: str, needed_by: NeededBy, planning: EncoderPlanning) -> ModalityPlan:
    """The last eight answers are kept."""
    rows = table.rows_of_modality(modality)
    home = needed_by.home
    cap = planning.max_rows_per_slot
    largest = int(np.argmax(rows.counts))
    if cap is not None and (count := rows.counts[largest]) > cap * planning.max_cp:
        raise PlanError(
            f"{table.item_text(int(rows.items[largest]))} has {count} rows, more than the {cap * planning.max_cp} that "
            f"max_rows_per_slot {cap} x max_cp {planning.max_cp} of its encoder hold; raise one of them"
        )
    plan = _plan_encoding(rows.counts, planning)
    wave_of_item = np.zeros(len(rows.items), dtype=np.int64)
    for index, micro_batch in enumerate(plan.micro_batches):
        wave_of_item[list(micro_batch.documents)] = index
    wave_of_row = np.repeat(wave_of_item, np.diff(rows.base))
    needed, *ahead = (find_needed_rows(rows, needed_by, depth) for depth in range(needed_by.depths + 1))
    # The ids of all micro-batches follow one after another.
    needed_ids = dict[int, Integers]()
    for rank in home.ranks:
        # the parts of a micro-batch: the rows of its own tokens, and those of each depth
        parts_by_micro_batch = zip(needed[rank], *(of_depth[rank] for of_depth in ahead), strict=True)
        needed_ids[rank] = np.concatenate([_NONE, *(part.row for parts in parts_by_micro_batch for part in parts)])
    waves: list[Wave] = []
    for index, micro_batch in enumerate(plan.micro_batches):
        encoded_ids = _encoded_rows(rows, planning.home, micro_batch)
        needed_in_wave = [ids[wave_of_row[ids] == index] for ids in needed_ids.values()]
        encoded_in_wave = [encoded_ids[rank] for rank in home.ranks]
        waves.append(Wave(micro_batch, Partition.from_rows(encoded_in_wave), Partition.from_rows(needed_in_wave)))
    return ModalityPlan(plan, rows, tuple(waves), wave_of_row, needed, tuple(ahead), needed_by.split_over_tp)


def _encoded_rows(rows: ModalityRows, home: Layout, micro_batch: MicroBatch) -> dict[int, Integers]:
    """The documents of the micro-batch are items. All tensor-parallel ranks of a slot have its rows."""
    encoded = dict[int, Integers]()
    for slot in range(home.slots):
        parts = [_NONE]
        for _, group in micro_batch.groups_of(slot):
            segments = group.shares.segments(group.slots.index(slot))
            first = rows.base[np.asarray(group.documents, dtype=np.int64)[segments.document]]
            parts.append(expand_runs(first + segments.start, first + segments.stop))
        for tp in range(home.tp):
            encoded[home.rank_at(slot, tp=tp)] = np.concatenate(parts)
    return encoded


def find_needed_rows(rows: ModalityRows, needed_by: NeededBy, depth: int = 0) -> dict[int, list[ItemRows]]:
    """Return for every rank the rows that it needs in each micro-batch of the language model's plan, in its row order.
    Only ranks of the first pipeline stage need rows, or at a `depth` of multi-token prediction those of the stage
    `needed_by.depths_at`, where local row t needs the row of the token `depth` further on. Where the tensor-parallel
    ranks split the rows of a slot, each needs those in its part, with indices from its beginning.
    """
    pp = needed_by.depths_at if depth else 0
    home = needed_by.home
    multiple = needed_by.row_multiple
    needed: dict[int, list[ItemRows]] = {rank: [] for rank in home.ranks}
    for micro_batch in needed_by.micro_batches:
        # Each slot needs these for each of its groups; the first, empty one is for a slot without groups.
        parts: list[list[ItemRows]] = [[ItemRows(_NONE, _NONE)] for _ in range(home.slots)]
        # These count local rows.
        counts = [0] * home.slots
        for group in micro_batch.groups:
            for member, slot in enumerate(group.slots):
                segments = group.shares.segments(member)
                segments_of_depth = replace(segments, start=segments.start + depth, stop=segments.stop + depth)
                local, row = rows.find_rows(group.documents, segments_of_depth)
                parts[slot].append(ItemRows(local + counts[slot], row))
                counts[slot] += group.shares.counts[member]
        for slot, count in enumerate(counts):
            slot_rows = ItemRows(*map(np.concatenate, zip(*parts[slot], strict=True)))
            size = -(-max(count, 1) // multiple) * multiple // home.tp  # rows of a tensor-parallel rank's part
            for tp in range(home.tp):
                rank_rows = slot_rows
                if needed_by.split_over_tp:
                    in_part = slot_rows.local // size == tp
                    rank_rows = ItemRows(slot_rows.local[in_part] - tp * size, slot_rows.row[in_part])
                needed[home.rank_at(slot, tp=tp, pp=pp)].append(rank_rows)
    for rank in home.ranks:
        needed[rank] = needed[rank] or [ItemRows(_NONE, _NONE)] * len(needed_by.micro_batches)
    return needed
