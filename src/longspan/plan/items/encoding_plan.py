"""How the items of a step are encoded and where their rows go: waves, each with who has and who needs which rows."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from longspan.errors import PlanError
from longspan.layout import Layout, Partition
from longspan.layout.segments import Integers
from longspan.plan.cost.cost import DEFAULT_COST, Cost
from longspan.plan.dynamic.planner import plan_dynamic
from longspan.plan.items.item_table import ItemRows, ItemTable, ModalityRows
from longspan.plan.items.row_owners import NeededBy, rows_encoded, rows_needed
from longspan.plan.micro_batch import MicroBatch
from longspan.plan.plan import Plan


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

    def needed_at(self, rank: int, micro_batch: int) -> tuple[ItemRows, ...]:
        """What a rank needs of a micro-batch, for its own tokens and for those further on, depth by depth."""
        return tuple(needed[rank][micro_batch] for needed in (self.needed, *self.ahead))

    @property
    def balance(self) -> float:
        """The predicted work of the busiest slot over the mean of all; 1 where all have as much."""
        work = self.plan.timeline().busy.sum(0)
        return float(work.max() / work.mean()) if work.any() else 1.0


@lru_cache(maxsize=8)
def _plan_of_items(counts: tuple[int, ...], planning: EncoderPlanning) -> Plan:
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
    """The waves of every modality. Raises PlanError for items without an encoder, or too large for its slots."""
    if unknown := [modality for modality in table.modalities if modality not in encoders]:
        count = sum(item.modality == unknown[0] for item in table.items)
        raise PlanError(
            f"{count} of {len(table)} items are of modality {unknown[0]!r}, for which the model has no encoder; it has "
            f"encoders for {', '.join(map(repr, encoders)) or 'none'}"
        )
    return {modality: _plan_modality(table, modality, needed_by, encoders[modality]) for modality in table.modalities}


@lru_cache(maxsize=8)
def _plan_modality(table: ItemTable, modality: str, needed_by: NeededBy, planning: EncoderPlanning) -> ModalityPlan:
    rows, home = table.of(modality), needed_by.home
    _check_largest(table, rows, planning)
    plan = _plan_of_items(rows.counts, planning)
    micro_batches = plan.micro_batches
    needed = rows_needed(rows, needed_by)
    wave_of_row = _wave_of_row(rows, micro_batches)
    ahead = tuple(rows_needed(rows, needed_by, depth) for depth in range(1, needed_by.depths + 1))
    ids = {rank: _in_order([needed[rank], *(deeper[rank] for deeper in ahead)]) for rank in home.ranks}
    waves: list[Wave] = []
    for index, micro_batch in enumerate(micro_batches):
        encoded = rows_encoded(rows, micro_batch, planning.home)
        need = [ids[rank][wave_of_row[ids[rank]] == index] for rank in home.ranks]
        have = Partition.from_rows([encoded[rank] for rank in home.ranks])
        waves.append(Wave(micro_batch, have, Partition.from_rows(need)))
    return ModalityPlan(plan, rows, tuple(waves), wave_of_row, needed, ahead, needed_by.split_over_tp)


def _in_order(depths: Sequence[Sequence[ItemRows]]) -> Integers:
    """The rows that a rank needs, micro-batch by micro-batch, and of each depth after depth."""
    parts = [part.row for of_micro_batch in zip(*depths, strict=True) for part in of_micro_batch]
    return np.concatenate([np.zeros(0, dtype=np.int64), *parts])


def _check_largest(table: ItemTable, rows: ModalityRows, planning: EncoderPlanning) -> None:
    cap, largest = planning.max_rows_per_slot, int(np.argmax(rows.counts))
    if cap is not None and (count := rows.counts[largest]) > cap * planning.max_cp:
        raise PlanError(
            f"{table.name(int(rows.items[largest]))} has {count} rows, more than the {cap * planning.max_cp} that "
            f"max_rows_per_slot {cap} x max_cp {planning.max_cp} of its encoder hold; raise one of them"
        )


def _wave_of_row(rows: ModalityRows, micro_batches: Sequence[MicroBatch]) -> Integers:
    wave_of_item = np.zeros(len(rows.items), dtype=np.int64)
    for index, micro_batch in enumerate(micro_batches):
        for group in micro_batch.groups:
            wave_of_item[list(group.documents)] = index
    return np.repeat(wave_of_item, np.diff(rows.base))
