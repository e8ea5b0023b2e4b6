"""Evaluations of documents that share prefixes equal those of separate documents, document by document, in float64."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from longspan import Document, Layout, World
from longspan.evaluation.live import evaluate
from longspan.evaluation.metrics import EvaluationOptions, TargetTokens
from longspan.evaluation.result import Evaluation
from longspan.resolve.planner_config import PlannerConfig
from longspan.testing import backend, run_ranks
from tests.model.stock import prepare_untried, tiny
from tests.mutation import Change, mutated
from tests.train.own_loss.test_families import casts_in_float64

VOCABULARY = 61


def questions() -> list[Document]:
    """Questions on two texts, and a document of which every token is a target."""
    draw = np.random.default_rng(0)
    documents = list[Document]()
    for text in (draw.integers(0, VOCABULARY, 260), draw.integers(0, VOCABULARY, 300)):
        for n in (9, 30, 4):
            ids = np.append(text, draw.integers(0, VOCABULARY, n))
            documents.append(Document(ids, loss_mask=np.arange(len(ids)) >= len(text), weights=draw.random(len(ids))))
    return [*documents, Document(draw.integers(0, VOCABULARY, 140))]


def sum_of_positions(rows: TargetTokens) -> tuple[float, float]:
    return float(rows.positions.sum()), float(len(rows.positions))


def evaluations(rank: int, ranks: int, choice: PlannerConfig, change: Change | None) -> tuple[Evaluation, Evaluation]:
    """What is shared, and what is separate; two questions on one text are separate where each has a slot."""
    with World(Layout(ranks), backend=backend(), timeout=60) as world:
        model = prepare_untried(tiny("qwen3", torch.float64, vocabulary=VOCABULARY), world)
        with casts_in_float64():
            options: dict[str, Any] = {"metrics": {"positions": sum_of_positions}}
            separate = evaluate(model, questions(), choice, world, EvaluationOptions(share_prefixes=False, **options))
            with mutated(change):
                shared = evaluate(model, questions(), choice, world, EvaluationOptions(**options))
            if choice.degree == ranks:
                few = evaluate(model, questions()[:2], replace(choice, degree=1), world)
                assert (few.plan.parents is None) == (ranks > 1)
    return shared, separate


def farthest(shared: Evaluation, separate: Evaluation) -> float:
    assert shared.plan.parents is not None and separate.plan.parents is None
    assert (shared.documents, shared.tokens, shared.targets) == (7, separate.tokens, separate.targets)
    assert [bucket[:2] for bucket in shared.by_position] == [bucket[:2] for bucket in separate.by_position]
    pairs = [(shared.loss, separate.loss)]
    for name in ("document_losses", "by_position", "by_length"):
        both = (getattr(shared, name), getattr(separate, name))
        for one, other in zip(*both, strict=True):
            one, other = (getattr(x, "loss", x) for x in (one, other))
            assert one.count == other.count
            pairs.append((one.sum, other.sum))
    assert shared.metrics["positions"] == separate.metrics["positions"]
    return max(abs(a / b - 1) for a, b in pairs)


MUTANTS: dict[str, Change] = {
    "positions of branches alone": (
        "train.terms.loss_tokens",
        "np.array([bases[document] for",
        "0 * np.array([bases[document] for",
    ),
    "prefixes count as documents": (
        "plan.plan",
        "prefixes = set(self.parents or ())",
        "prefixes = set(self.parents or ()) - {7}",
    ),
}


def test_losses_of_documents_on_one_rank() -> None:
    choice = PlannerConfig.fixed(1, max_tokens_per_slot=700)
    assert farthest(*evaluations(0, 1, choice, None)) <= 1e-12
    for change in MUTANTS.values():
        with pytest.raises(AssertionError):
            farthest(*evaluations(0, 1, choice, change))


@pytest.mark.parametrize(
    "choice",
    [
        PlannerConfig.fixed(2, max_tokens_per_slot=400),
        pytest.param(
            PlannerConfig("dynamic", None, 1, None, PlannerConfig.fixed(1, max_tokens_per_slot=400).options, ""),
            marks=pytest.mark.whole,
        ),
    ],
)
def test_losses_of_documents_over_two_ranks(choice: PlannerConfig) -> None:
    for shared, separate in run_ranks(evaluations, 2, 2, choice, None):
        assert farthest(shared, separate) <= 1e-12
