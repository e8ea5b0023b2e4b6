"""Losses of one's own of an encoder and a language model together, against one process in float64."""

from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from longspan import Document, DocumentLoss, World, plan_dynamic, run_step, token_log_probs
from longspan.multimodal import MediaDocuments
from longspan.testing import run_ranks
from longspan.train import LossTokens
from tests.model.stock import gradients_of
from tests.train.multimodal.cases import Case
from tests.train.multimodal.documents import documents_of
from tests.train.multimodal.oracle import LIMITS, in_worlds, model_of, worst_gradient
from tests.train.multimodal.reference import Dense
from tests.train.own_loss.dense import Rows, pair_loss

SETS = ((0, 5), (2, 7), (3, 4))


def with_values() -> MediaDocuments:
    plain, random = documents_of("mixed"), np.random.default_rng(7)
    tokens = [
        Document(ids, loss_mask=random.random(n) < 0.7, weights=random.random(n), advantage=random.normal())
        for ids, n in zip(plain.tokens, plain.lengths, strict=True)
    ]
    return MediaDocuments(tokens, plain.items, plain.read)


def own(log_probs: Tensor, at: LossTokens) -> Tensor:
    return at["weights"] * (log_probs.exp() * at["advantage"] - 0.01 * at.position * log_probs)


def dense(kind: str) -> tuple[float, dict[str, Tensor], list[float]]:
    docs, model = with_values(), Dense("qwen3", torch.float64)
    rows = [_rows(docs, number, model) for number in range(len(docs))]
    sums = torch.stack([(row.log_probs * row.at["weights"]).sum() for row in rows])
    if kind == "tokens":
        loss = torch.stack([own(*row).sum() for row in rows]).sum() / 6
    else:
        loss = torch.stack([pair_loss(sums[list(pair)], pair) for pair in SETS]).sum() / len(SETS)
    loss.backward()
    return loss.item(), gradients_of(model), sums.tolist()


def _rows(docs: MediaDocuments, number: int, model: Dense) -> Rows:
    document: Any = docs[number]
    logits, labels = model.predictions(docs, number)
    predicting = torch.nonzero(labels != -100).squeeze(1)
    values = document.token_values(np.arange(len(document)))
    values = {name: torch.from_numpy(x)[predicting + 1] for name, x in values.items()}
    at = LossTokens(torch.full_like(predicting, number), predicting, labels[predicting], values)
    return Rows(logits.log_softmax(-1)[predicting].gather(1, at.target[:, None]).squeeze(1), at)


def step(case: Case, world: World, encoder_world: World, wanted: dict[str, Any]) -> None:
    docs, model = with_values(), model_of(case, world, encoder_world)
    plan = plan_dynamic(docs.lengths, world.home, targets=docs.targets, max_tokens_per_slot=30)
    for kind, (value, gradients, sums) in wanted.items():
        loss, divisor = (own, 6) if kind == "tokens" else (DocumentLoss(pair_loss, SETS), None)
        result = run_step(model, plan, docs, world, loss=loss, divisor=divisor, loss_chunk_rows=7)
        assert result.loss == pytest.approx(value, rel=1e-12)
        assert worst_gradient(model, gradients) <= LIMITS["float64"], kind
        assert (result.forward_twice > 0) == (kind == "sets")
        model.zero_grad()
        assert token_log_probs(model, plan, docs, world).sums == pytest.approx(sums, rel=1e-12)


def run(rank: int, case: Case, wanted: dict[str, Any]) -> None:
    in_worlds([case], partial(step, wanted=wanted))


@pytest.mark.parametrize(
    "case",
    [
        Case("1·2→1·2·1", waves="several"),
        pytest.param(Case("1·2→2·1·1", waves="recomputed"), marks=pytest.mark.whole),
        pytest.param(Case("1·2→1·1·1, pp 2"), marks=pytest.mark.whole),
    ],
    ids=["cp", "tp 2", "pp 2"],
)
def test_equals_one_process(case: Case) -> None:
    run_ranks(run, 2, case, {kind: dense(kind) for kind in ("tokens", "sets")})
