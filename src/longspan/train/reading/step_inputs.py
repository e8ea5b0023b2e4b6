"""What a step runs over: a model, a plan, the plan's documents, and what every rank counts of these before it reads.

Items and targets are counted once a step, from lengths, spans and numbers of labels; no token is read here. The rows
that a rank reads are in `local_batch.py`.
"""

from collections.abc import Mapping, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

from torch import nn

from longspan.comm import World
from longspan.data.document import LabelledPack, target_count
from longspan.errors import DataError, ModelError, PlanError, plural
from longspan.model.multimodal.multimodal_model import MultimodalModel
from longspan.plan import Plan

if TYPE_CHECKING:
    from longspan.plan.items import ItemTable


@runtime_checkable
class MovingDocuments(Protocol):
    """Documents whose rows move, under a plan, from the ranks that read them to those that compute them."""

    world: World

    @property
    def targets(self) -> int:
        """How many tokens they predict."""
        ...

    def rows_under(self, plan: Plan, depths: int = 0) -> Any:
        """Return these documents with the rows of this rank under a plan; entered by all ranks."""
        ...


class StepDocuments:
    """The documents of one plan: indexed by document, with the facts about them that all ranks count once.

    `items` are the places that encoders fill; None for a model without encoders. Raises DataError for documents without
    items under a model with encoders and for items that do not fit their documents, ModelError for items that no
    encoder takes.
    """

    def __init__(self, model: nn.Module, documents: Any, lengths: Sequence[int]) -> None:
        """Take the documents of a step, with their items if the model encodes any.

        Raises DataError for documents without items under a model with encoders, ModelError for the opposite.
        """
        self.documents: Any = documents
        self.lengths: tuple[int, ...] = tuple(lengths)
        items = getattr(documents, "items", None)
        items = None if callable(items) else items  # a dict of documents has a method of this name
        self.items: ItemTable | None = None
        if isinstance(model, MultimodalModel):
            from longspan.bridge.item_documents import find_item_table

            self.items = find_item_table(documents, lengths)
            if self.items is None:
                raise DataError(
                    f"the documents ({type(documents).__name__}) have no items; a MultimodalModel takes ItemDocuments, "
                    "with an empty list of items where there are none"
                )
        elif items is not None and len(items):
            raise ModelError(
                f"the documents have {len(items)} items, {type(model).__name__} has no encoder; run a "
                "MultimodalModel(encoders, language_model, world)"
            )

    def __getitem__(self, document: int) -> Any:
        """Return a document as the caller gave it."""
        return self.documents[document]

    @cached_property
    def targets(self) -> tuple[int, ...]:
        """Return how many tokens each document predicts.

        Raises PlanError for a document that is missing, is no sequence of token ids, or has another length.
        """
        counts = tuple(self._count_targets(document, length) for document, length in enumerate(self.lengths))
        if self.items is None:
            return counts
        from longspan.bridge.item_documents import count_text_targets

        return count_text_targets(self.documents, self.items)

    def check_targets(self, plan: Plan) -> None:
        """Raise PlanError where the plan divides the loss by another number of targets."""
        if plan.targets == (targets := sum(self.targets)):
            return
        clause = "" if self.items is None else f" that are not placeholders of {len(self.items)} items"
        raise PlanError(
            f"the plan divides the loss by {plan.targets} targets, its {len(plan.lengths)} documents predict "
            f"{plural(targets, 'token')}{clause}; plan with targets={targets}, or without targets= where every token "
            "is predicted"
        )

    def move_rows(self, plan: Plan, world: World, depths: int = 0) -> Self:
        """Return the same documents; if their rows move between ranks, with this rank's rows; entered by all ranks.

        Raises DataError for documents of another world.
        """
        if not isinstance(self.documents, MovingDocuments):
            return self
        if self.documents.world is not world:
            raise DataError(
                "the documents were gathered in another world; call gather_documents(local, world) with this"
            )
        moved = copy(self)
        moved.documents = self.documents.rows_under(plan, depths)
        return moved

    def _count_targets(self, document: int, length: int) -> int:
        """Check that one document is a sequence of the planned length, and count its targets."""
        try:
            value = self.documents[document]
        except (IndexError, KeyError) as error:
            raise PlanError(f"the plan has {len(self.lengths)} documents, document {document} was not given") from error
        if isinstance(value, Mapping):
            raise PlanError(
                f"document {document} is a {type(value).__name__} of {', '.join(map(str, value))}; give its token ids, "
                "or longspan.Document(ids, labels=…) where not every token is a target"
            )
        if len(value) != length:
            raise PlanError(
                f"document {document} has {plural(len(value), 'token')}, the plan laid out {length}; plan from the "
                "lengths of the documents that the step is given"
            )
        return target_count(value)


@dataclass(frozen=True, eq=False)
class StepInputs:
    """What a step runs over, once `check_step` has found that the parts belong together.

    `model` is the caller's; of a MultimodalModel the passes run the `language_model` inside.
    """

    model: nn.Module
    language_model: nn.Module
    plan: Plan
    documents: StepDocuments
    world: World
    backward: bool


def count_pack_targets(documents: Any, plan: Plan) -> Plan:
    """Return the plan with the number of targets of its documents, if some are packs with labels.

    Planners do not read the labels of packs, so their targets are counted here; without such packs the plan stays as it
    is. A label on a placeholder of an item is no target. Gathered documents know their number of targets.
    """
    if isinstance(documents, MovingDocuments):
        return replace(plan, targets=documents.targets)
    if not any(isinstance(document, LabelledPack) for document in documents):
        return plan
    from longspan.bridge.item_documents import count_text_targets, find_item_table

    items = find_item_table(documents, plan.lengths)
    if items is not None:
        return replace(plan, targets=sum(count_text_targets(documents, items)))
    return replace(plan, targets=sum(target_count(documents[document]) for document in range(len(plan.lengths))))
