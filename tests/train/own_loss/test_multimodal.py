"""Losses of one's own of an encoder and a language model together, against one process in float64."""

from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from longspan import (
    Document,
    DocumentLoss,
    Encoder,
    ItemDocuments,
    Layout,
    MultimodalModel,
    World,
    plan_dynamic,
    prepare_encoder,
    run_step,
    token_log_probs,
)
from longspan.testing import backend, run_ranks
from longspan.train import LossRows
from tests.model.stock import prepare_untried
from tests.reference import relative_error
from tests.train.multimodal.test_step import documents, language_model, tower
from tests.train.own_loss.dense import Rows, pair_loss

SETS = ((0, 5), (1, 3), (2, 4))


def with_values() -> ItemDocuments:
    """The documents of the step's own test, with labels of some tokens, weights and advantages."""
    plain, random = documents(), np.random.default_rng(7)
    tokens = [
        Document(
            np.where(np.asarray(ids) < 50, ids, 0),
            loss_mask=random.random(len(ids)) < 0.7,
            weights=random.random(len(ids)),
            advantage=random.normal(),
        )
        for ids in plain.tokens
    ]
    return ItemDocuments(tokens, plain.items, plain.read)


def own(log_probs: Tensor, at: LossRows) -> Tensor:
    return at["weights"] * (log_probs.exp() * at["advantage"] - 0.01 * at.position * log_probs)


def dense(kind: str) -> tuple[float, dict[str, Tensor], list[float]]:
    """The loss and every gradient, one document at a time, and the sums of documents."""
    docs, model, encoder = with_values(), language_model(), tower()
    rows = [_rows(docs, number, model, encoder) for number in range(len(docs))]
    if kind == "tokens":
        loss = torch.stack([own(*row).sum() for row in rows]).sum() / 6
    else:
        sums = torch.stack([(row.log_probs * row.at["weights"]).sum() for row in rows])
        loss = torch.stack([pair_loss(sums[list(pair)], pair) for pair in SETS]).sum() / len(SETS)
    loss.backward()
    named = {f"language_model.{n}": p for n, p in model.named_parameters()}
    named |= {f"encoders.image.{n}": p for n, p in encoder.named_parameters()}
    sums = [(row.log_probs * row.at["weights"]).sum().item() for row in rows]
    return loss.item(), {name: p.grad for name, p in named.items() if p.grad is not None}, sums


def _rows(docs: ItemDocuments, number: int, model: Any, encoder: Any) -> Rows:
    length, document = docs.lengths[number], docs[number]
    positions = np.arange(length)
    covered = docs.item_table.placeholder_mask(number, 0, length).astype(bool)
    embeddings = model.get_input_embeddings()(torch.from_numpy(np.where(covered, 0, document[positions])))
    for index, item in enumerate(docs.items):
        if item.document == number:
            places = torch.tensor([p for start, stop in item.spans for p in range(start, stop)])
            embeddings = embeddings.index_copy(0, places, encoder([docs.read(index)]))
    labels = torch.from_numpy(np.where(covered, -100, document.labels(positions)))
    predicting = torch.nonzero(labels[1:] != -100).squeeze(1)
    out = model(inputs_embeds=embeddings[None]).logits[0].log_softmax(-1)
    targets = labels[predicting + 1]
    values = {n: torch.from_numpy(x)[predicting + 1] for n, x in document.token_values(positions).items()}
    at = LossRows(torch.full_like(targets, number), predicting, targets, values)
    return Rows(out[predicting].gather(1, targets[:, None]).squeeze(1), at)


def step(rank: int, home: Layout, settings: dict[str, Any], wanted: dict[str, Any]) -> list[int]:
    twice = list[int]()
    with World(home, backend=backend(), timeout=60) as world, World(Layout(2), backend=backend()) as beside:
        docs = with_values()
        module = prepare_encoder(tower(), beside)
        encoder = Encoder(module=module, world=beside, **settings)
        model = MultimodalModel({"image": encoder}, prepare_untried(language_model(), world), world)
        targets = sum(int(document.targets) for document in docs.tokens)
        covered = [np.flatnonzero(docs.item_table.placeholder_mask(d, 0, n)) for d, n in enumerate(docs.lengths)]
        targets -= sum(int((docs[d].labels(x[x > 0]) != -100).sum()) for d, x in enumerate(covered))
        plan = plan_dynamic(docs.lengths, home, targets=targets, max_tokens_per_slot=60)
        for kind, (value, gradients, sums) in wanted.items():
            loss, divisor = (own, 6) if kind == "tokens" else (DocumentLoss(pair_loss, SETS), None)
            result = run_step(model, plan, docs, world, loss=loss, divisor=divisor, loss_chunk_rows=7)
            assert result.loss == pytest.approx(value, rel=1e-12)
            for name, parameter in model.named_parameters():
                if (gradient := parameter.grad) is not None:
                    whole = gradient.full_tensor() if isinstance(gradient, DTensor) else gradient
                    assert relative_error(whole, gradients[name]) <= 1e-12, (kind, name)
            twice.append(result.forward_twice)
            model.zero_grad()
            assert token_log_probs(model, plan, docs, world).sums == pytest.approx(sums, rel=1e-12)
    return twice


@pytest.mark.parametrize(
    ("home", "settings"),
    [
        (Layout(2), {"max_rows_per_slot": 12}),
        pytest.param(Layout(2, tp=2), {"recompute": True}, marks=pytest.mark.whole),
        pytest.param(Layout(2, pp=2), {}, marks=pytest.mark.whole),
    ],
    ids=["cp", "tp 2", "pp 2"],
)
def test_equals_one_process(home: Layout, settings: dict[str, Any]) -> None:
    for twice in run_ranks(step, 2, home, settings, {kind: dense(kind) for kind in ("tokens", "sets")}):
        assert twice[0] == 0 < twice[1]
