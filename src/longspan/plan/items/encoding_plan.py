"""Items of documents, such as images: which rows they take, and how they are encoded: waves, each with who has and who
needs which rows.

All follows from plans only: every rank computes it for all ranks. A row id counts the rows of one modality.
"""

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from longspan.errors import DataError, PlanError, plural
from longspan.layout import Layout, Partition
from longspan.layout.partition import join_runs
from longspan.layout.segments import Integers, Segments, Spans, expand_runs, is_integer_type, make_read_only
from longspan.plain_text import excerpt
from longspan.plan.cost.cost import DEFAULT_COST, Cost
from longspan.plan.dynamic.planner import plan_dynamic
from longspan.plan.micro_batch import MicroBatch
from longspan.plan.plan import Plan


class MediaItem(NamedTuple):
    """One image, clip, … of a document, by the positions that its encoded rows take.

    `document` is one of the plan; `spans` are the half-open runs of its positions, ascending and disjoint.

    >>> MediaItem(document=3, spans=((5, 9), (10, 14))).rows
    8
    """

    document: int
    spans: tuple[tuple[int, int], ...]
    modality: str = "image"

    @property
    def rows(self) -> int:
        """How many rows of the language model's width its encoder makes."""
        return sum(stop - start for start, stop in self.spans)


class ItemRows(NamedTuple):
    """Rows of items among a slot's local rows: `local` indices among these, and the ids of the `row`s that go there."""

    local: Integers
    row: Integers


class _Spans(NamedTuple):
    """Arrays over spans, ordered by document and position."""

    document: Integers
    start: Integers
    stop: Integers
    first: Integers  # id of the span's first row among those of its modality
    modality: Integers


@dataclass(frozen=True, eq=False)
class ModalityRows:
    """The rows of one modality. `items` are indices into the table's items; row ids of item i begin at `base[i]`."""

    items: Integers
    base: Integers  # (items + 1,)
    spans: _Spans

    @property
    def counts(self) -> tuple[int, ...]:
        return tuple(np.diff(self.base).tolist())

    def find_rows(self, documents: Sequence[int], segments: Segments) -> ItemRows:
        """Find which of its rows a member of a group must take from items, as indices among its rows and row ids."""
        document = np.asarray(documents, dtype=np.int64)[segments.document]
        inside = Spans(*self.spans[:3]).find_rows(replace(segments, document=document))
        row = self.spans.first[inside.document] + inside.start - self.spans.start[inside.document]
        size = inside.stop - inside.start
        return ItemRows(expand_runs(inside.offset, inside.offset + size), expand_runs(row, row + size))


class ItemTable:
    """The items of the documents of a plan, checked.

    >>> table = ItemTable([10, 6], [MediaItem(0, ((2, 5),)), MediaItem(1, ((0, 4),), "audio")])
    >>> table.targets, table.modalities
    ((6, 2), ('image', 'audio'))

    `targets` counts what each document predicts: every position whose next token is not a placeholder. Raises
    DataError, naming item, document and modality, for spans that overlap, lie outside their document or are empty.
    `numbers` are the items' indices in a longer list that they are a part of, for error messages.
    """

    def __init__(
        self, lengths: Iterable[int], items: Iterable[MediaItem], numbers: Iterable[int] | None = None
    ) -> None:
        self.lengths: tuple[int, ...] = tuple(lengths)
        self.items: tuple[MediaItem, ...] = tuple(items)
        self.numbers: tuple[int, ...] = tuple(range(len(self.items)) if numbers is None else numbers)
        for index, item in enumerate(self.items):
            _check_item_types(index, item)
        self.modalities: tuple[str, ...] = tuple(dict.fromkeys(item.modality for item in self.items))
        self._spans = self._sort_spans()

    def __len__(self) -> int:
        return len(self.items)

    def __eq__(self, other: object) -> bool:
        """All else but the words of messages follows from lengths and items."""
        return isinstance(other, ItemTable) and (self.lengths, self.items) == (other.lengths, other.items)

    def __hash__(self) -> int:
        return hash((self.lengths, self.items))

    def placeholder_mask(self, document: int, start: int, stop: int) -> NDArray[np.bool_]:
        """Return whether each position from start to stop of a document is a placeholder: (stop - start,) bool."""
        mask = np.zeros(stop - start, dtype=np.bool_)
        for first, end in self.runs(document, self.modalities):
            mask[max(first - start, 0) : max(end - start, 0)] = True
        return mask

    def placeholders(self, document: int) -> Integers:
        """Return the positions of a document that items take, ascending."""
        start, stop = np.array(self.runs(document, self.modalities), dtype=np.int64).reshape(-1, 2).T
        return expand_runs(start, stop)

    def runs(self, document: int, modalities: Sequence[str]) -> list[tuple[int, int]]:
        """Return the runs (start, stop) of positions that items of these modalities take, joined where spans touch."""
        first_span, end_span = np.searchsorted(self._spans.document, (document, document + 1))
        numbers = [self.modalities.index(modality) for modality in modalities if modality in self.modalities]
        indices = first_span + np.flatnonzero(np.isin(self._spans.modality[first_span:end_span], numbers))
        runs = join_runs(np.stack([self._spans.start[indices], self._spans.stop[indices]], axis=1))
        return [(start, stop) for start, stop in runs.tolist()]

    @cached_property
    def targets(self) -> tuple[int, ...]:
        """How many tokens each document predicts: all but placeholders and the first, which nothing predicts."""
        spans = self._spans
        masked = np.zeros(len(self.lengths), dtype=np.int64)
        np.add.at(masked, spans.document, spans.stop - np.maximum(spans.start, 1))
        return tuple((np.maximum(np.asarray(self.lengths, dtype=np.int64) - 1, 0) - masked).tolist())

    def rows_of_modality(self, modality: str) -> ModalityRows:
        index = self.modalities.index(modality)
        numbers_and_rows = [(i, item.rows) for i, item in enumerate(self.items) if item.modality == modality]
        items = np.array([i for i, _ in numbers_and_rows], dtype=np.int64)
        base = np.cumsum(np.array([0, *(rows for _, rows in numbers_and_rows)], dtype=np.int64))
        spans = _Spans(*(values[self._spans.modality == index] for values in self._spans))
        return ModalityRows(make_read_only(items), make_read_only(base), spans)

    def digest(self) -> str:
        return hashlib.sha256(repr((self.lengths, self.items)).encode()).hexdigest()[:16]

    def item_text(self, item: int) -> str:
        return f"item {self.numbers[item]} ({self.items[item].modality} of document {self.items[item].document})"

    def _sort_spans(self) -> _Spans:
        """A row of the table has the fields of `_Spans`, and last the number of its item, for the check of overlaps."""
        rows = list[tuple[int, ...]]()
        next_row = dict.fromkeys(self.modalities, 0)
        numbers = {modality: number for number, modality in enumerate(self.modalities)}
        for index, item in enumerate(self.items):
            self._check_item(index, item)
            for start, stop in item.spans:
                row = next_row[item.modality]
                rows.append((item.document, start, stop, row, numbers[item.modality], index))
                next_row[item.modality] = row + stop - start
        table = np.array(sorted(rows), dtype=np.int64).reshape(-1, 6)
        self._check_overlaps(table)
        return _Spans(*(make_read_only(np.ascontiguousarray(table[:, column])) for column in range(5)))

    def _check_item(self, index: int, item: MediaItem) -> None:
        if not 0 <= item.document < len(self.lengths):
            raise DataError(
                f"item {index} ({item.modality}) is of document {item.document}; there are "
                f"{plural(len(self.lengths), 'document')}"
            )
        length = self.lengths[item.document]
        end = 0
        for start, stop in item.spans:
            if not end <= start < stop <= length:
                raise DataError(
                    f"{self.item_text(index)} has the spans {excerpt(item.spans)}; the document has positions 0 to "
                    f"{length - 1}: spans are (start, stop), not empty, ascending and disjoint"
                )
            end = stop
        if not item.spans:
            raise DataError(f"{self.item_text(index)} takes no position; give its spans, or leave it out")

    def _check_overlaps(self, table: Integers) -> None:
        document, start, stop, _, _, index = table.T
        overlaps = np.flatnonzero((start[1:] < stop[:-1]) & (document[1:] == document[:-1]))
        if len(overlaps):
            later = int(overlaps[0]) + 1
            earlier_item, later_item = map(self.item_text, index[later - 1 : later + 1].tolist())
            raise DataError(
                f"{earlier_item} and {later_item} both take position {start[later]}; every position is one item's"
            )


def _check_item_types(index: int, item: object) -> None:
    if not isinstance(item, MediaItem):
        raise DataError(f"item {index} is {item!r}; give MediaItem(document, spans, modality)")
    try:
        numbers = [item.document, *(number for start, stop in item.spans for number in (start, stop))]
    except TypeError:
        numbers = [None]
    if not all(is_integer_type(type(number)) for number in numbers):
        raise DataError(
            f"item {index} is {item!r}; its document is an integer and its spans pairs of them, as in "
            "MediaItem(0, ((2, 6), (7, 9)))"
        )


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
    """The waves of one modality; `needed[rank][i]` are the rows of micro-batch i that a rank needs, of all waves.
    `ahead` are the same for each depth of multi-token prediction: of a micro-batch rows arrive depth after depth.
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
    return {
        modality: _plan_modality(table, modality, needed_by, encoders[modality]) for modality in table.modalities
    }


@lru_cache(maxsize=8)
def _plan_modality(table: ItemTable, modality: str, needed_by: NeededBy, planning: EncoderPlanning) -> ModalityPlan:
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
    ids = dict[int, Integers]()
    for rank in home.ranks:  # micro-batch by micro-batch, in each its own tokens, then depth after depth
        of_micro_batches = zip(needed[rank], *(of_depth[rank] for of_depth in ahead), strict=True)
        ids[rank] = np.concatenate([_NONE, *(part.row for parts in of_micro_batches for part in parts)])
    waves: list[Wave] = []
    for index, micro_batch in enumerate(plan.micro_batches):
        rows_by_rank = find_encoded_rows(rows, micro_batch, planning.home)
        needed_rows = [ids[rank][wave_of_row[ids[rank]] == index] for rank in home.ranks]
        encoded_rows = Partition.from_rows([rows_by_rank[rank] for rank in home.ranks])
        waves.append(Wave(micro_batch, encoded_rows, Partition.from_rows(needed_rows)))
    return ModalityPlan(plan, rows, tuple(waves), wave_of_row, needed, tuple(ahead), needed_by.split_over_tp)


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
        by_slot = _item_rows_of_slots(rows, micro_batch, home.slots, depth)
        for slot, (slot_rows, count) in enumerate(by_slot):
            size = -(-max(count, 1) // multiple) * multiple // home.tp
            for tp in range(home.tp):
                rank_rows = slot_rows
                if needed_by.split_over_tp:
                    in_part = slot_rows.local // size == tp
                    rank_rows = ItemRows(slot_rows.local[in_part] - tp * size, slot_rows.row[in_part])
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
    """For every slot its rows of items, by local row, and the number of its local rows; a local row gets the row of the
    token that is `depth` further on in its document.
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
    joined = (map(np.concatenate, zip(ItemRows(_NONE, _NONE), *of_slot, strict=True)) for of_slot in parts)
    return [(ItemRows(*columns), count) for columns, count in zip(joined, counts, strict=True)]
