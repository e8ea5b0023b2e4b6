"""The items of a plan's documents, such as images: which positions they take, and the rows of each modality.

A row id counts the rows of one modality. How they are encoded `encoding_plan.py` plans.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from longspan.errors import DataError, plural
from longspan.layout.segments import (
    Integers,
    Segments,
    Spans,
    expand_runs,
    is_integer_type,
    join_runs,
    make_read_only,
)
from longspan.plain_text import excerpt


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
        """Find which of its rows a member of a group must take from items, as indices among its rows and row ids.
        `segments` are the member's runs of the group's `documents`, which they name by index.
        """
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
        # placeholders but for one at position 0, counted below
        masked = np.zeros(len(self.lengths), dtype=np.int64)
        np.add.at(masked, spans.document, spans.stop - np.maximum(spans.start, 1))
        return tuple((np.maximum(np.asarray(self.lengths, dtype=np.int64) - 1, 0) - masked).tolist())

    def rows_of_modality(self, modality: str) -> ModalityRows:
        """Return the rows of one of `modalities`, numbered through its items in their order."""
        index = self.modalities.index(modality)
        numbers_and_rows = [(i, item.rows) for i, item in enumerate(self.items) if item.modality == modality]
        items = np.array([i for i, _ in numbers_and_rows], dtype=np.int64)
        base = np.cumsum(np.array([0, *(rows for _, rows in numbers_and_rows)], dtype=np.int64))
        spans = _Spans(*(values[self._spans.modality == index] for values in self._spans))
        return ModalityRows(make_read_only(items), make_read_only(base), spans)

    def digest(self) -> str:
        """Return 16 hex digits of SHA-256 by which ranks compare their lengths and items."""
        return hashlib.sha256(repr((self.lengths, self.items)).encode()).hexdigest()[:16]

    def item_text(self, item: int) -> str:
        return f"item {self.numbers[item]} ({self.items[item].modality} of document {self.items[item].document})"

    def _sort_spans(self) -> _Spans:
        """A row of the table has the fields of `_Spans`, and last the number of its item, for the check of overlaps."""
        rows = list[tuple[int, ...]]()
        next_row = dict.fromkeys(self.modalities, 0)
        numbers = {modality: number for number, modality in enumerate(self.modalities)}
        for index, item in enumerate(self.items):
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
                row = next_row[item.modality]
                rows.append((item.document, start, stop, row, numbers[item.modality], index))
                next_row[item.modality] = row + stop - start
            if not item.spans:
                raise DataError(f"{self.item_text(index)} takes no position; give its spans, or leave it out")
        table = np.array(sorted(rows), dtype=np.int64).reshape(-1, 6)  # (0, 6) without items
        documents, starts, stops, _, _, indices = table.T
        overlaps = np.flatnonzero((starts[1:] < stops[:-1]) & (documents[1:] == documents[:-1]))
        if len(overlaps):
            later = int(overlaps[0]) + 1
            earlier_text, later_text = map(self.item_text, indices[later - 1 : later + 1].tolist())
            raise DataError(
                f"{earlier_text} and {later_text} both take position {starts[later]}; every position is one item's"
            )
        return _Spans(*(make_read_only(np.ascontiguousarray(table[:, column])) for column in range(5)))


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
