"""Documents with items, such as images: token ids with placeholders, and the encoder's input for each item."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

import numpy as np

from longspan.data.document import Labelled
from longspan.errors import DataError, plural
from longspan.layout import Integers, Partition
from longspan.layout.partition import NO_TARGET
from longspan.plan.items.item_table import ItemTable, MediaItem


class MediaDocuments:
    """Token ids of documents, and the items that take some of their positions.

    >>> documents = MediaDocuments([np.arange(9)], [MediaItem(0, ((2, 6),))], ["pixels"])
    >>> plan = plan_dynamic(documents.lengths, Layout(2), targets=documents.targets, max_tokens_per_slot=1024)
    >>> run_step(model, plan, documents, world)  # model is a MultimodalModel  # doctest: +SKIP

    `tokens[d]` has a length and is indexed by an int64 array of positions; `read(i)`, or `read[i]`, is the encoder's
    input for `items[i]`, read by the ranks that encode it, whereas every rank has `items`. What stands at the positions
    of an item is neither embedded nor predicted. `positions(d)` gives a document's positions in several parts (M-RoPE),
    an int64 array (3 or 4, T), or None where they are plain. Raises DataError for items that do not fit.
    """

    def __init__(
        self,
        tokens: Sequence[Any],
        items: Sequence[MediaItem],
        read: Callable[[int], Any] | Sequence[Any],
        positions: Callable[[int], Integers | None] | None = None,
    ) -> None:
        self.tokens: Sequence[Any] = tokens
        self.items: tuple[MediaItem, ...] = tuple(items)
        self._read = read
        self._positions = positions
        self.lengths: tuple[int, ...] = tuple(len(tokens[document]) for document in range(len(tokens)))
        count = None if callable(read) else len(read)
        if count is not None and count != len(self.items):
            raise DataError(
                f"read has {plural(count, 'value')} for {plural(len(self.items), 'item')}; give what the "
                "encoder is given for each item, in their order"
            )
        # Made now rather than on first use, because it checks the items.
        _ = self.item_table

    @cached_property
    def item_table(self) -> ItemTable:
        """The items by document and position, checked."""
        return ItemTable(self.lengths, self.items)

    @cached_property
    def targets(self) -> int:
        """How many tokens the documents predict, for the planners' `targets=`."""
        return sum(count_text_targets(self.tokens, self.item_table))

    def read(self, item: int) -> Any:
        """Return the encoder's input for an item; it is read now."""
        return self._read(item) if callable(self._read) else self._read[item]

    def positions(self, document: int) -> Integers | None:
        """Return the positions of a document in several parts (3 or 4, T); None where they are plain."""
        return None if self._positions is None else self._positions(document)

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, document: int) -> Any:
        return self.tokens[document]


def items_at_placeholders(
    tokens: Sequence[Any], placeholder: int, rows: Sequence[Sequence[int]], modality: str = "image"
) -> list[MediaItem]:
    """Make the items whose rows stand, one after another, where documents have the id of a placeholder.

    `rows[d]` are the rows of each item of document d, in order; a run of placeholders may hold several items, and other
    tokens may stand between the rows of one. Raises DataError, naming document and modality, for other counts.

    >>> items_at_placeholders([[7, 0, 0, 7, 0, 7]], 0, [[2, 1]])
    [MediaItem(document=0, spans=((1, 3),), modality='image'), MediaItem(document=0, spans=((4, 5),), modality='image')]
    """
    if len(rows) != len(tokens):
        raise DataError(
            f"rows of items are given for {plural(len(rows), 'document')}, there are {len(tokens)}; give one list "
            "for each document, empty where it has no item"
        )
    items: list[MediaItem] = []
    for document, counts in enumerate(rows):
        places = np.flatnonzero(np.asarray(tokens[document]) == placeholder)
        if len(places) != sum(counts) or any(count < 1 for count in counts):
            raise DataError(
                f"document {document} has {plural(len(places), 'placeholder')} of {modality} (token id "
                f"{placeholder}), its {plural(len(counts), 'item')} have {sum(counts)} rows ({list(counts)}); the "
                "processor that made the token ids and the encoder must agree"
            )
        # Without items np.split would still return one part, an empty one.
        for item_places in np.split(places, np.cumsum(counts)[:-1]) if len(counts) else []:
            spans = Partition.from_rows([item_places]).runs(0).tolist()
            items.append(MediaItem(document, tuple((start, stop) for start, stop in spans), modality))
    return items


def count_text_targets(documents: Any, items: ItemTable) -> tuple[int, ...]:
    """Count the tokens that each document predicts: all but its first token and its placeholders.

    Of a document with labels they are read at placeholders only: `targets` is the number of labels beyond position 0.
    """
    targets = list(items.targets)
    for number in range(len(items.lengths)):
        document = documents[number]
        placeholders = items.placeholders(number)
        if isinstance(document, Labelled):
            labels = np.asarray(document.labels(placeholders[placeholders > 0]))
            targets[number] = document.targets - int((labels != NO_TARGET).sum())
    return tuple(targets)


def find_item_table(documents: Any, lengths: Sequence[int]) -> ItemTable | None:
    """Return the documents' own table of items if it is of these lengths, else a new one; None for documents without
    `items`. Raises DataError for items that do not fit the lengths.
    """
    items = getattr(documents, "items", None)
    if items is None or callable(items):  # callable: the method of a mapping
        return None
    table = getattr(documents, "item_table", None)
    if isinstance(table, ItemTable) and table.lengths == tuple(lengths):
        return table
    return ItemTable(lengths, items)
