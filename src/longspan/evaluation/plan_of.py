"""The plan of an evaluation: priced for forward passes alone, and made once for a set of documents."""

from dataclasses import replace
from functools import lru_cache
from typing import Any

from torch import nn

from longspan.bridge.item_documents import item_table_of
from longspan.data.documents import CorpusDocuments
from longspan.evaluation.passkey.documents import PasskeyDocuments
from longspan.layout import Layout
from longspan.model.seams.call_rules import call_rules
from longspan.plan import Plan
from longspan.train.plans import PlanChoice, degrees_to_compare
from longspan.train.reading.targets import targets_of_documents


def plan_of(choice: PlanChoice, model: nn.Module, documents: Any, home: Layout) -> Plan:
    """The plan that a choice makes of these documents for a prepared model."""
    return _planned(_fitted(choice, model, documents), _lengths(documents), home)


def choices_at_degrees(
    choice: PlanChoice, documents: CorpusDocuments | PasskeyDocuments, home: Layout
) -> list[PlanChoice]:
    """A choice at degree 1, 2, 4, … as far as they divide the slots, each under a cap that holds these documents.

    Degrees at which a2a cannot split the query heads evenly are left out.
    """
    longest = max(documents.lengths)
    return [choice.at_degree(degree, longest=longest) for degree in degrees_to_compare(home, choice)]


@lru_cache(maxsize=8)
def _planned(choice: PlanChoice, lengths: tuple[int, ...], home: Layout) -> Plan:
    """Planned once for a set of documents: a dynamic plan takes longer than the evaluation of a few."""
    return choice.plan(lengths, home)


def _fitted(choice: PlanChoice, model: nn.Module, documents: Any) -> PlanChoice:
    """The choice priced for forward passes alone, with what a prepared model asks of the rows of a slot.

    Documents say how many tokens they predict.
    """
    multiple, options = call_rules(model).row_multiple, choice.options
    rows = options.row_multiple if options.row_multiple % multiple == 0 else multiple
    lengths = _lengths(documents)
    targets = sum(targets_of_documents(documents, lengths, item_table_of(documents, lengths)))
    return replace(
        choice, options=replace(options, cost=options.cost.forward_only(), row_multiple=rows, targets=targets)
    )


def _lengths(documents: Any) -> tuple[int, ...]:
    lengths = getattr(documents, "lengths", None)
    return tuple(len(documents[d]) for d in range(len(documents))) if lengths is None else tuple(map(int, lengths))
