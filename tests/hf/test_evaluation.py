"""Evaluation and prediction over plans equal stock in one process: losses, metrics of logits, predictions, sets."""

from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import EvalPrediction

from tests.hf.stock import Ran, Run, compare, log_errors, ours, stock
from tests.hf.test_trainer import EXACT, Texts, make, pad


def metrics(predicted: EvalPrediction) -> dict[str, float]:
    """Of whole logits: the share of likeliest tokens, and a sum that sees every number."""
    logits, labels = predicted.predictions, predicted.label_ids
    here = labels[:, 1:] != -100
    chosen = logits[:, :-1].argmax(-1) == labels[:, 1:]
    return {"accuracy": float(chosen[here].mean()), "norm": float((logits[:, :-1][here] ** 2).sum())}


def reduced(predicted: EvalPrediction) -> dict[str, float]:
    """Of likeliest tokens."""
    here = predicted.label_ids[:, 1:] != -100
    return {"accuracy": float((predicted.predictions[:, :-1] == predicted.label_ids[:, 1:])[here].mean())}


def likeliest(logits: Tensor, labels: Tensor) -> Tensor:
    """What is kept of a batch's logits."""
    return logits.argmax(-1)


def with_metrics(run: Run) -> Any:
    """Two sets, metrics of whole logits, one evaluation before the first step, another degree; then predictions."""
    sets = {"short": Texts(5, seed=1), "long": Texts(7, seed=2)}
    trainer = make(run, rows=4, more={"compute_metrics": metrics}, max_steps=2, eval_steps=1, eval_on_start=True)
    trainer.eval_dataset = sets
    trainer.train()
    unlabelled = Texts(6, seed=3)
    told = trainer.predict(unlabelled)
    run.kept["metrics"] = {k: v for k, v in told.metrics.items() if "per_second" not in k and "time" not in k}
    run.kept["predictions"] = _at_labels(told)
    trainer.data_collator = lambda rows: {k: v for k, v in pad(rows).items() if k != "labels"}
    trainer.compute_metrics = None
    bare = trainer.predict(unlabelled)
    run.kept["without labels"] = _at_labels(bare, told.label_ids)
    assert bare.label_ids is None
    return trainer


def _at_labels(told: Any, labels: Any = None) -> np.ndarray:
    """Logits of rows that predict: at padding they mean nothing."""
    labels = told.label_ids if labels is None else labels
    return told.predictions[:, :-1][labels[:, 1:] != -100]


def with_reduced_logits(run: Run) -> Any:
    """Logits are reduced before they are kept; batches of two rows."""
    more = {"compute_metrics": reduced, "preprocess_logits_for_metrics": likeliest}
    trainer = make(run, rows=2, more=more, max_steps=2, eval_steps=1)
    trainer.train()
    return trainer


def token_loss(run: Run) -> Any:
    """An evaluation by itself, before any training."""
    trainer = make(run, rows=8)
    run.kept["evaluated"] = trainer.evaluate()
    if run.longspan is None:
        run.kept["dense"] = _dense_loss(trainer.model)
    return trainer


@cache
def one_process() -> Ran:
    return stock(with_metrics)


CP2 = {"context_parallel_size": 1, "eval_context_parallel_size": "2"}
DYNAMIC = {"context_parallel_size": 2, "eval_planner": "dynamic", "eval_max_tokens_per_slot": "40"}


@pytest.mark.parametrize(
    ("longspan", "ranks"),
    [
        pytest.param(CP2, 2, id="cp 2"),
        pytest.param(DYNAMIC, 4, id="dynamic", marks=pytest.mark.whole),
        pytest.param({"tp": 2, **CP2, "eval_context_parallel_size": "1"}, 2, id="tp 2", marks=pytest.mark.whole),
    ],
)
def test_metrics_and_predictions(longspan: dict[str, Any], ranks: int) -> None:
    found = ours(with_metrics, longspan, ranks)
    for name, error in log_errors(one_process().logs, found.logs).items():
        assert error < 1e-10, (name, error)
    expected = one_process().kept
    for name in ("predictions", "without labels"):
        assert found.kept[name].shape == expected[name].shape
        np.testing.assert_allclose(found.kept[name], expected[name], rtol=0, atol=1e-10)
    for name, value in expected["metrics"].items():
        assert abs(found.kept["metrics"][name] - value) <= 1e-10 * max(1, abs(value)), name


def test_reduced_logits() -> None:
    compare(with_reduced_logits, {"context_parallel_size": 2}, **EXACT)


def test_the_mean_over_tokens_stands_beside_the_trainers_own() -> None:
    logged = ours(token_loss, {"context_parallel_size": 2, "eval_context_parallel_size": "1"}, 2).kept["evaluated"]
    kept = stock(token_loss).kept
    assert abs(logged["eval_loss"] - kept["evaluated"]["eval_loss"]) < 1e-10
    assert abs(logged["eval_token_loss"] - kept["dense"]) < 1e-10
    assert abs(kept["dense"] - logged["eval_loss"]) > 1e-6, "batches have unequal counts of tokens"


def _dense_loss(model: Any) -> float:
    """The mean cross entropy over all tokens, row by row."""
    total, count = 0.0, 0
    with torch.no_grad():
        for number in range(11):
            row = Texts(11, seed=1)[number]
            ids, labels = torch.tensor([row["input_ids"]]), torch.tensor(row["labels"])
            scores = model.eval()(ids).logits[0].log_softmax(-1)
            here = labels[1:] != -100
            total -= scores[:-1].gather(1, labels[1:].clamp(min=0)[:, None])[:, 0][here].sum().item()
            count += int(here.sum())
    return total / count
