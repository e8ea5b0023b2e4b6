"""The plain way to encode images under context parallelism: every rank encodes all images of its group's documents.

It is the encoders' part of a step with another plan: no row travels, for each rank has its own copy of every row that
it needs, and the copies' gradients are sums over the rows of their own rank.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from longspan.layout import Layout, Partition
from longspan.plan import Cost, Group, MicroBatch
from longspan.plan.items import EncoderPlanning, ItemTable, ModalityPlan, NeededBy, Wave
from longspan.plan.items.encoding_plan import find_needed_rows
from longspan.plan.step_times import Timeline, timeline
from longspan.train.terms import encoders as encoding


@contextmanager
def replicated() -> Iterator[None]:
    """Steps inside encode images so. Homes without tensor parallelism."""
    planned: Any = encoding.plan_items
    encoding.plan_items = _plan_items
    try:
        yield
    finally:
        encoding.plan_items = planned


@dataclass(frozen=True)
class _ItemPlan:
    """What of a plan of items is asked for."""

    micro_batches: tuple[MicroBatch, ...]
    slots: int
    cost: Cost

    @property
    def predicted_seconds(self) -> float:
        return self.timeline().step_seconds

    def timeline(self) -> Timeline:
        return timeline(self.micro_batches, self.slots, self.cost)


def _plan_items(
    table: ItemTable, needed_by: NeededBy, encoders: Mapping[str, EncoderPlanning]
) -> dict[str, ModalityPlan]:
    return {m: _plan_modality(table, m, needed_by, encoders[m]) for m in table.modalities}


def _plan_modality(table: ItemTable, modality: str, needed_by: NeededBy, planning: EncoderPlanning) -> ModalityPlan:
    rows, home = table.of(modality), needed_by.home
    assert home.tp == planning.home.tp == 1
    needed, total = find_needed_rows(rows, needed_by), int(rows.base[-1])
    of_document: dict[int, list[int]] = {}
    for index, item in enumerate(rows.items.tolist()):
        of_document.setdefault(table.items[item].document, []).append(index)
    waves, wave_of_item = list[Wave](), np.zeros(len(rows.items), dtype=np.int64)
    for number, batch in enumerate(needed_by.micro_batches):
        items = {s: _items_of(batch, s, of_document) for s in range(home.slots)}
        if not any(items.values()):
            continue
        for each in items.values():
            wave_of_item[each] = len(waves)
        waves.append(_wave(items, rows.base, home, {r: needed[r][number].row for r in home.ranks}, total))
    plan: Any = _ItemPlan(tuple(wave.micro_batch for wave in waves), home.slots, planning.cost)
    return ModalityPlan(plan, rows, tuple(waves), np.repeat(wave_of_item, np.diff(rows.base)), needed)


def _items_of(batch: MicroBatch, slot: int, of_document: Mapping[int, list[int]]) -> list[int]:
    documents = dict.fromkeys(d for _, group in batch.groups_of(slot) for d in group.documents)
    return [item for document in documents for item in of_document.get(document, [])]


def _wave(
    items: Mapping[int, list[int]], base: np.ndarray, home: Layout, needed: Mapping[int, np.ndarray], total: int
) -> Wave:
    counts = np.diff(base)
    groups, have = list[Group](), list[np.ndarray]()
    need = [rank * total + needed[rank] for rank in home.ranks]  # ids of a rank's own copies
    for rank in home.ranks:
        mine = items[slot := home.ranks.index(rank)]
        if mine:
            groups.append(Group((slot,), tuple(mine), tuple(counts[mine].tolist()), partition="contiguous"))
        ids = [np.arange(base[i], base[i + 1]) for i in mine]
        have.append(rank * total + np.concatenate([np.zeros(0, dtype=np.int64), *ids]))
    return Wave(MicroBatch(tuple(groups)), Partition.from_rows(have), Partition.from_rows(need))
