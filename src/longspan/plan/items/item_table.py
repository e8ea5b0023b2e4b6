"""Which positions of documents the rows of images, clips and other items take, as integers that every rank has.

A row id counts the rows of one modality: item after item as listed, inside an item in the order of its spans.
"""

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from longspan.errors import DataError, plural
from longspan.layout.layout import excerpt
from longspan.layout.segments import Integers, Segments, expand_runs, is_integer, make_read_only


class Item(NamedTuple):
    """One image, clip, … of a document, by the positions that its encoded rows take.

    `document` is one of the plan; `spans` are the half-open runs of its positions, ascending and disjoint.

    >>> Item(document=3, spans=((5, 9), (10, 14))).rows
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
    """Arrays over spans, ordered by document and position. A key is document · stride + position."""

    start: Integers  # keys
    stop: Integers
    first: Integers  # id of the span's first row among those of its modality
    modality: Integers
    document: Integers


@dataclass(frozen=True, eq=False)
class ModalityRows:
    """The rows of one modality. `items` are indices into the table's items; row ids of item i begin at `base[i]`."""

    items: Integers
    base: Integers  # (items + 1,)
    stride: int
    spans: _Spans

    @property
    def counts(self) -> tuple[int, ...]:
        """How many rows each item has."""
        return tuple(np.diff(self.base).tolist())

    def find_rows(self, documents: Sequence[int], segments: Segments) -> ItemRows:
        """Find which of its rows a member of a group must take from items; the group has these documents of the plan.

        Positions of all documents are keys on one line, `document · stride + position`, so that two sorted searches
        give the spans of items that each segment meets. Returned are, for each row of an item, its index among the
        member's rows and its row id.
        """
        document = np.asarray(documents, dtype=np.int64)[segments.document]
        end = (document + 1) * self.stride  # where the keys of the next document begin: a padded one may reach further
        start, stop = (np.minimum(document * self.stride + at, end) for at in (segments.start, segments.stop))
        first_span = np.searchsorted(self.spans.stop, start, side="right")
        end_span = np.searchsorted(self.spans.start, stop, side="left")
        segment, span = np.repeat(np.arange(len(start)), end_span - first_span), expand_runs(first_span, end_span)
        begin = np.maximum(start[segment], self.spans.start[span])
        size = np.minimum(stop[segment], self.spans.stop[span]) - begin
        local = segments.offset[segment] + begin - start[segment]
        row = self.spans.first[span] + begin - self.spans.start[span]
        return ItemRows(expand_runs(local, local + size), expand_runs(row, row + size))


class ItemTable:
    """The items of the documents of a plan, checked.

    >>> table = ItemTable([10, 6], [Item(0, ((2, 5),)), Item(1, ((0, 4),), "audio")])
    >>> table.targets, table.modalities
    ((6, 2), ('image', 'audio'))

    `targets` counts what each document predicts: every position whose next token is not a placeholder. Raises
    DataError, naming item, document and modality, for spans that overlap, lie outside their document or are empty.
    `numbers` are the items' indices in a longer list that they are a part of, for error messages.
    """

    def __init__(self, lengths: Iterable[int], items: Iterable[Item], numbers: Iterable[int] | None = None) -> None:
        """Check the items and sort their spans; `lengths` are the rows of the plan's documents."""
        self.lengths: tuple[int, ...] = tuple(lengths)
        self.items: tuple[Item, ...] = tuple(items)
        self.numbers: tuple[int, ...] = tuple(range(len(self.items)) if numbers is None else numbers)
        for index, item in enumerate(self.items):
            _check_types(index, item)
        self.modalities: tuple[str, ...] = tuple(dict.fromkeys(item.modality for item in self.items))
        # A position's key is document * stride + position: one integer that orders the positions of all documents.
        self._stride = max(self.lengths, default=0) + 1
        self._spans = self._sort_spans()

    def __len__(self) -> int:
        return len(self.items)

    def __eq__(self, other: object) -> bool:
        """Compare lengths and items, from which all else but the words of messages follows."""
        return isinstance(other, ItemTable) and (self.lengths, self.items) == (other.lengths, other.items)

    def __hash__(self) -> int:
        return hash((self.lengths, self.items))

    def placeholder_mask(self, document: int, start: int, stop: int) -> NDArray[np.bool_]:
        """Return whether each position from start to stop of a document is a placeholder: (stop - start,) bool."""
        keys = np.arange(start, stop) + document * self._stride
        span = np.searchsorted(self._spans.start, keys, side="right") - 1
        return (span >= 0) & (keys < np.append(self._spans.stop, -1)[span])  # −1: before all spans, looks up the last

    def placeholders(self, document: int) -> Integers:
        """Return the positions of a document that items take, ascending."""
        first, last = np.searchsorted(self._spans.document, (document, document + 1))
        start, stop = (keys[first:last] - document * self._stride for keys in (self._spans.start, self._spans.stop))
        return expand_runs(start, stop)

    def runs(self, document: int, modalities: Sequence[str]) -> list[tuple[int, int]]:
        """Return the runs (start, stop) of positions that items of these modalities take, joined where spans touch."""
        first_span, end_span = np.searchsorted(self._spans.document, (document, document + 1))
        numbers = [self.modalities.index(modality) for modality in modalities if modality in self.modalities]
        indices = first_span + np.flatnonzero(np.isin(self._spans.modality[first_span:end_span], numbers))
        start, stop = (keys[indices] - document * self._stride for keys in (self._spans.start, self._spans.stop))
        # A span opens a run if none ends where it starts. A run stops with the last span before the next opening one.
        opens = np.append(True, start[1:] != stop[:-1])[: len(start)]
        return list(zip(start[opens].tolist(), stop[np.roll(opens, -1)].tolist(), strict=True))

    @cached_property
    def targets(self) -> tuple[int, ...]:
        """Return how many tokens each document predicts: all but placeholders and the first, which nothing predicts."""
        spans, masked = self._spans, np.zeros(len(self.lengths), dtype=np.int64)
        start, stop = spans.start - spans.document * self._stride, spans.stop - spans.document * self._stride
        np.add.at(masked, spans.document, stop - np.maximum(start, 1))
        return tuple((np.maximum(np.asarray(self.lengths, dtype=np.int64) - 1, 0) - masked).tolist())

    def of(self, modality: str) -> ModalityRows:
        """Return the rows of one modality."""
        index = self.modalities.index(modality)
        numbers_and_rows = [(i, item.rows) for i, item in enumerate(self.items) if item.modality == modality]
        items = np.array([i for i, _ in numbers_and_rows], dtype=np.int64)
        base = np.cumsum(np.array([0, *(rows for _, rows in numbers_and_rows)], dtype=np.int64))
        spans = _Spans(*(values[self._spans.modality == index] for values in self._spans))
        return ModalityRows(make_read_only(items), make_read_only(base), self._stride, spans)

    def digest(self) -> str:
        """Return a digest of lengths and items, which ranks compare."""
        return self._digest

    @cached_property
    def _digest(self) -> str:
        """The digest, computed once: a table never changes."""
        return hashlib.sha256(repr((self.lengths, self.items)).encode()).hexdigest()[:16]

    def item_text(self, item: int) -> str:
        """Return an item in the words of an error message."""
        return f"item {self.numbers[item]} ({self.items[item].modality} of document {self.items[item].document})"

    def _sort_spans(self) -> _Spans:
        """A row of the table has the fields of `_Spans`, and last the number of its item, for the check of overlaps."""
        rows, next_row = list[tuple[int, ...]](), dict.fromkeys(self.modalities, 0)
        numbers = {modality: number for number, modality in enumerate(self.modalities)}
        for index, item in enumerate(self.items):
            self._check_item(index, item)
            for start, stop in item.spans:
                base, row = item.document * self._stride, next_row[item.modality]
                rows.append((base + start, base + stop, row, numbers[item.modality], item.document, index))
                next_row[item.modality] = row + stop - start
        table = np.array(sorted(rows), dtype=np.int64).reshape(-1, 6)
        self._check_overlaps(table)
        return _Spans(*(make_read_only(np.ascontiguousarray(table[:, column])) for column in range(5)))

    def _check_item(self, index: int, item: Item) -> None:
        """Raise DataError for an item whose document is not there, or whose spans do not ascend inside that one."""
        if not 0 <= item.document < len(self.lengths):
            raise DataError(
                f"item {index} ({item.modality}) is of document {item.document}; there are "
                f"{plural(len(self.lengths), 'document')}"
            )
        length, end = self.lengths[item.document], 0
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
        start, stop, _, _, document, index = table.T
        overlaps = np.flatnonzero(start[1:] < stop[:-1])
        if len(overlaps):
            earlier, later = int(overlaps[0]), int(overlaps[0]) + 1
            earlier_item, later_item = int(index[earlier]), int(index[later])
            position = int(start[later] - document[later] * self._stride)
            raise DataError(
                f"{self.item_text(earlier_item)} and {self.item_text(later_item)} both take position {position}; every "
                "position is one item's"
            )


def _check_types(index: int, item: object) -> None:
    """Raise DataError unless `item` is an Item whose document and spans are integers; `index` names it in the error."""
    if not isinstance(item, Item):
        raise DataError(f"item {index} is {item!r}; give Item(document, spans, modality)")
    try:
        numbers = [item.document, *(number for start, stop in item.spans for number in (start, stop))]
    except TypeError:
        numbers = [None]
    if not all(is_integer(type(number)) for number in numbers):
        raise DataError(
            f"item {index} is {item!r}; its document is an integer and its spans pairs of them, as in "
            "Item(0, ((2, 6), (7, 9)))"
        )
