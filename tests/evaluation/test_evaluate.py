"""Losses and metrics of an evaluation against the stock model, document by document, at any degree and home."""

import math
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from longspan import Layout, World, evaluate
from longspan.comm.watch import Watch
from longspan.errors import EvaluationError
from longspan.evaluation import EvaluationOptions, TargetTokens
from longspan.evaluation.metrics import Mean
from longspan.evaluation.result import Evaluation
from longspan.evaluation.row_sums import bucket_edges
from longspan.testing import backend, run_ranks
from longspan.train import DocumentLoss, PlannerConfig
from tests.model.deep import deep
from tests.model.stock import prepare_untried, texts

LENGTHS = (130, 1, 257, 30, 7, 2, 18, 5, 90)
DOCUMENTS = texts(LENGTHS)
VOCABULARY = 62
TOKEN_BYTES = np.arange(VOCABULARY) % 5


class Dense(NamedTuple):
    """Of the stock model in one process: losses and hits (n - 1,) of every document, and its logits."""

    losses: list[Tensor]
    hits: list[Tensor]
    logits: list[Tensor]


def dense(family: str = "qwen3") -> Dense:
    """On the device of the ranks: transformers makes rotary factors in float32, whose last bit a GPU may round else."""
    device = "cuda" if backend() == "nccl" else "cpu"
    model = deep(family, torch.float64, 2, vocabulary=VOCABULARY).eval()
    torch.nn.Module.to(model, device)
    losses, hits, logits = list[Tensor](), list[Tensor](), list[Tensor]()
    for document in DOCUMENTS:
        ids = torch.from_numpy(document)
        with torch.no_grad():
            logits.append(model(input_ids=ids[None].to(device), use_cache=False).logits[0][:-1].cpu())
        losses.append(F.cross_entropy(logits[-1], ids[1:], reduction="none"))
        hits.append(logits[-1].argmax(-1) == ids[1:])
    return Dense(losses, hits, logits)


def entropy(rows: TargetTokens) -> tuple[Tensor, int]:
    log = rows.logits.double().log_softmax(-1)
    return -(log.exp() * log).sum(), len(rows.logits)


def confident(rows: TargetTokens) -> tuple[Tensor, Tensor]:
    some = (rows.positions >= 100) & (rows.positions < 300)
    return rows.losses[some].sum(), some.sum()


def nothing(rows: TargetTokens) -> tuple[float, int]:
    return 0.0, 0


OPTIONS = EvaluationOptions(
    step=3,
    name="small",
    loss_chunk_rows=37,
    metrics={"entropy": entropy, "confident": confident, "nothing": nothing},
    token_bytes=TOKEN_BYTES,
)


class Case(NamedTuple):
    home: dict[str, int]
    family: str
    choices: tuple[PlannerConfig, ...]
    sequence_parallel: bool = False


def _fixed(*degrees: int, **options: Any) -> tuple[PlannerConfig, ...]:
    return tuple(PlannerConfig.fixed(degree, max_tokens_per_slot=272 // degree, **options) for degree in degrees)


CASES = (
    Case({"ranks": 4}, "qwen3", (*_fixed(4), *_fixed(2, cp_comm_type="a2a"), PlannerConfig.dynamic())),
    Case({"ranks": 4, "tp": 2, "pp": 2}, "qwen3", _fixed(1)),
    Case({"ranks": 4, "tp": 2}, "qwen3", _fixed(2), True),
    Case({"ranks": 4, "ep": 2}, "qwen3-moe", _fixed(1, 4)),
)


def _evaluations(rank: int) -> list[tuple[str, Evaluation]]:
    found = list[tuple[str, Evaluation]]()
    for case in CASES:
        with World(Layout(**case.home), backend=backend(), timeout=60) as world:
            model = deep(case.family, torch.float64, 2, vocabulary=VOCABULARY)
            model = prepare_untried(model, world, sequence_parallel=case.sequence_parallel)
            found += [(case.family, evaluate(model, DOCUMENTS, choice, world, OPTIONS)) for choice in case.choices]
    return found


def test_every_document_and_metric_equals_the_stock_model() -> None:
    wanted = {family: dense(family) for family in ("qwen3", "qwen3-moe")}
    first, *others = run_ranks(_evaluations, 4)
    for family, evaluation in first:
        _check(evaluation, wanted[family])
    rows = [[evaluation.row() | {"seconds": 0} for _, evaluation in of_rank] for of_rank in (first, *others)]
    assert len(rows[0]) == 7 and all(of_rank == rows[0] for of_rank in rows)


def _check(evaluation: Evaluation, wanted: Dense) -> None:
    losses, hits = torch.cat(wanted.losses), torch.cat(wanted.hits)
    positions = torch.cat([torch.arange(n - 1) for n in LENGTHS])
    targets = np.concatenate([document[1:] for document in DOCUMENTS])
    assert (evaluation.targets, evaluation.step, evaluation.name) == (len(losses), 3, "small")
    assert evaluation.loss == pytest.approx(losses.mean().item(), rel=1e-12)
    assert evaluation.perplexity == pytest.approx(math.exp(losses.mean().item()), rel=1e-12)
    for mean, document in zip(evaluation.document_losses, wanted.losses, strict=True):
        assert (mean.count, mean.sum) == (len(document), pytest.approx(document.sum().item(), rel=1e-12, abs=0))
    metrics = evaluation.metrics
    assert metrics["token_accuracy"] == Mean(int(hits.sum()), len(hits))
    assert metrics["bits_per_byte"].sum == pytest.approx(losses.sum().item() / math.log(2), rel=1e-12)
    assert metrics["bits_per_byte"].count == TOKEN_BYTES[targets].sum()
    log = torch.cat(wanted.logits).log_softmax(-1)
    assert metrics["entropy"].value == pytest.approx(-(log.exp() * log).sum(-1).mean().item(), rel=1e-11)
    far = losses[positions >= 100]
    assert metrics["confident"].count == len(far)
    assert metrics["confident"].sum == pytest.approx(far.sum().item(), rel=1e-12)
    assert metrics["nothing"].value is None
    assert [(b.first, b.last, b.documents) for b in evaluation.by_position] == [
        (0, 127, 8),
        (128, 255, 2),
        (256, 511, 1),
    ][: len(evaluation.by_position)]
    for bucket in evaluation.by_position:
        inside = losses[(positions >= bucket.first) & (positions <= bucket.last)]
        assert bucket.loss.count == len(inside)
        assert bucket.loss.sum == pytest.approx(inside.sum().item(), rel=1e-12)
    assert [(b.first, b.documents) for b in evaluation.by_length] == [(0, 7), (128, 1), (256, 1)]
    assert evaluation.by_length[1].loss == evaluation.document_losses[0]
    assert evaluation.by_length[2].loss == evaluation.document_losses[2]


def test_a_loss_of_sets_has_the_losses_of_its_documents_by_length() -> None:
    """Each document counts once with its set's loss, and one that is in no set is in no bucket."""
    sets = ((0, 3), (2, 4), (5, 6))
    loss = DocumentLoss(lambda sums, documents: sums[0] - sums[1], sets=sets)
    with World(Layout(1), backend=backend()) as world:
        model = prepare_untried(deep("qwen3", torch.float64, 2, vocabulary=VOCABULARY), world)
        evaluation = evaluate(model, DOCUMENTS, PlannerConfig.fixed(1), world, EvaluationOptions(loss=loss))
    assert evaluation.units is not None
    first, second, third = evaluation.units.figures["loss"]
    assert [(b.first, b.documents, b.loss.count) for b in evaluation.by_length] == [(0, 4, 4), (128, 1, 1), (256, 1, 1)]
    wanted = [(first + second + 2 * third) / 4, first, second]
    assert [bucket.loss.value for bucket in evaluation.by_length] == pytest.approx(wanted, rel=1e-12)
    assert evaluation.by_position == () and evaluation.loss == pytest.approx((first + second + third) / 3, rel=1e-12)


def test_edges() -> None:
    for longest in (1, 127, 128, 129, 256, 1000, 4096):
        edges = bucket_edges(longest).tolist()
        assert edges == [0, *(n for n in (128 << i for i in range(20)) if n <= longest)]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"mean": lambda rows: rows.losses.mean()}, r"'mean' gave a tensor of shape \(\); return \(sum, count\)"),
    ({"none": lambda rows: (rows.losses, 3)}, r"'none' gave .*; return \(sum, count\)"),
    ({"loss": nothing}, "a metric is called 'loss'"),
    ({"broken": lambda rows: 1 / 0}, "'broken' failed on rank 0: ZeroDivisionError"),
]


def test_metrics_that_are_refused() -> None:
    with World(Layout(ranks=1), backend="gloo", device="cpu") as world:
        model = prepare_untried(deep("qwen3", torch.float64, 2, vocabulary=VOCABULARY), world)
        for metrics, message in REFUSED:
            with pytest.raises(EvaluationError, match=message):
                evaluate(model, DOCUMENTS, PlannerConfig.fixed(1), world, EvaluationOptions(metrics=metrics))


def test_a_set_is_planned_once() -> None:
    choice = PlannerConfig.dynamic(max_tokens_per_slot=300, cp_comm_type=["p2p"] * 2)
    with World(Layout(1), backend="gloo", device="cpu") as world:
        model = prepare_untried(deep("qwen3", torch.float64, 2, vocabulary=VOCABULARY), world)
        first, again = (evaluate(model, DOCUMENTS, choice, world) for _ in range(2))
        fewer = evaluate(model, DOCUMENTS[:3], choice, world)
        smallest = evaluate(model, DOCUMENTS[:3], PlannerConfig.fixed(None, max_tokens_per_slot=300), world)
    assert (smallest.cp, smallest.loss) == (1, fewer.loss)
    assert again.plan is first.plan and again.loss == first.loss and fewer.plan.lengths == LENGTHS[:3]


def test_errors_inside_an_evaluation_name_its_step() -> None:
    watch = Watch(0, (0,), 60.0, None)
    watch.step = 3
    with watch.name_collectives("evaluation", (0,), step=77), watch.name_collectives("passes", (0,)):
        assert "of step 77" in str(watch.enter_operation("sum", (0,))) and "in step 77" in watch.activity().text
    assert "of step 3" in str(watch.enter_operation("sum", (0,))) and "in step 3" in watch.activity().text
