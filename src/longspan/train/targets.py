"""How many tokens the documents of a plan predict: what the loss is divided by, counted from what every rank knows."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from longspan.plan.items import ItemTable
from longspan.train.document import NO_TARGET, Labelled, targets_of


def targets_of_documents(documents: Any, lengths: Sequence[int], items: ItemTable | None = None) -> tuple[int, ...]:
    """The targets of each document: its tokens but the first, those with a label where it has labels.

    Placeholders of `items` are none. No token is read, but for the labels of placeholders.

    >>> targets_of_documents([[3, 1, 4]], [3])
    (2,)
    """
    counts = range(len(lengths))
    if items is None:
        return tuple(targets_of(documents[document]) for document in counts)
    return tuple(_beside_items(documents[document], document, items) for document in counts)


def _beside_items(document: Any, number: int, items: ItemTable) -> int:
    if not isinstance(document, Labelled):
        return items.targets[number]
    spans = [span for item in items.items if item.document == number for span in item.spans]
    hidden = np.concatenate([np.arange(max(start, 1), stop) for start, stop in spans] or [np.arange(0)])
    return document.targets - int((np.asarray(document.labels(hidden)) != NO_TARGET).sum())
