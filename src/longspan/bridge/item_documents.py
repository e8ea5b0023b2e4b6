"""Documents with items, such as images: token ids with placeholders, and what an encoder is given for each item."""

from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any

from longspan.plan.items import Item, ItemTable


class ItemDocuments:
    """Token ids of documents, and the items that take some of their positions.

    >>> documents = ItemDocuments([ids], [Item(0, ((2, 6),))], [pixels])
    >>> plan = plan_dynamic(documents.lengths, home, targets=documents.targets, max_tokens_per_slot=1024)
    >>> run_step(model, plan, documents, world)                 # model is a MultimodalModel

    `tokens[d]` has a length and is indexed by an int64 array of positions; `read(i)`, or `read[i]`, is what the encoder
    is given for `items[i]`, asked of the ranks that encode it, whereas `items` are known to every rank. What stands at
    the positions of an item is neither embedded nor predicted. Raises DataError for items that do not fit.
    """

    def __init__(
        self, tokens: Sequence[Any], items: Sequence[Item], read: Callable[[int], Any] | Sequence[Any]
    ) -> None:
        self.tokens, self.items, self._read = tokens, tuple(items), read
        self.lengths = tuple(len(tokens[document]) for document in range(len(tokens)))
        _ = self.item_table

    @cached_property
    def item_table(self) -> ItemTable:
        """The items, checked and in arrays."""
        return ItemTable(self.lengths, self.items)

    @property
    def targets(self) -> int:
        """How many tokens the documents predict, for the planners' `targets=`."""
        return sum(self.item_table.targets)

    def read(self, item: int) -> Any:
        """What the encoder is given for an item."""
        return self._read(item) if callable(self._read) else self._read[item]

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, document: int) -> Any:
        return self.tokens[document]


def item_table_of(documents: Any, lengths: Sequence[int]) -> ItemTable | None:
    """The items of any object with `items`; None where it has none to speak of."""
    items = getattr(documents, "items", None)
    if items is None or callable(items):  # a mapping's
        return None
    table = getattr(documents, "item_table", None)
    return table if isinstance(table, ItemTable) and table.lengths == tuple(lengths) else ItemTable(lengths, items)
