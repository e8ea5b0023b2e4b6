"""How many tokens the documents of a plan predict: what the loss is divided by, counted from what every rank knows."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from longspan.bridge.item_documents import targets_beside_items
from longspan.data.document import LabelledPack, target_count
from longspan.plan import Plan
from longspan.plan.items import ItemTable


def targets_of_documents(documents: Any, lengths: Sequence[int], items: ItemTable | None = None) -> tuple[int, ...]:
    """The targets of each document: its tokens but the first, those with a label where it has labels.

    Placeholders of `items` are none. No token is read, but for the labels of placeholders.

    >>> targets_of_documents([[3, 1, 4]], [3])
    (2,)
    """
    if items is not None:
        return targets_beside_items(documents, items)
    return tuple(target_count(documents[document]) for document in range(len(lengths)))


def with_targets_of(documents: Any, plan: Plan) -> Plan:
    """The plan with the targets of packs that have labels, which no planner reads; of other documents it has them."""
    if not any(isinstance(document, LabelledPack) for document in documents):
        return plan
    return replace(plan, targets=sum(targets_of_documents(documents, plan.lengths)))
