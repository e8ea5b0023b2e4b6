"""Losses of one's own under any plan and home equal one process in float64: loss, every gradient, log-probabilities."""

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch

from longspan import DocumentLoss, Layout, World, plan_dynamic, plan_fixed, token_log_probs
from longspan.model.adapted_modules import unwrap_peft_model
from longspan.plan import Plan
from longspan.testing import backend, run_ranks
from longspan.train import MicroBatchLoss
from tests.model.deep import deep
from tests.model.lora.adapted import adapted
from tests.model.stock import REFERENCE, prepare_untried
from tests.train.own_loss.dense import (
    LENGTHS,
    Answer,
    answer,
    by_document,
    documents_of,
    loss_errors,
    micro_batch_loss,
    of_sets,
    own,
    pair_loss,
    policy_loss,
    rows_of,
    targets_of,
    token_error,
    values_of_tokens,
    weighted,
)

TARGETS, VOCABULARY = targets_of(documents_of()), 62
GROUPS = ((0, 3, 7), (2, 5), (1, 4), (2, 6), (6, 7))  # two of them share a document


def fixed(cp: int, rows: int, **options: Any) -> Callable[[Layout], Plan]:
    return lambda home: plan_fixed(LENGTHS, home, cp=cp, max_tokens_per_slot=rows, targets=TARGETS, **options)


def dynamic(rows: int, mode: Any = "lockstep") -> Callable[[Layout], Plan]:
    return lambda home: plan_dynamic(LENGTHS, home, max_tokens_per_slot=rows, targets=TARGETS, mode=mode)


@dataclass(frozen=True)
class Case:
    name: str
    home: Layout
    plan: Callable[[Layout], Plan] = field(compare=False)
    family: str = "qwen3"
    chunk: int = 0
    options: tuple[tuple[str, Any], ...] = ()
    whole: bool = False  # of the whole table
    temperature: float = 1.0

    @property
    def layers(self) -> int:
        return 4 if self.options == SPLIT_BACKWARD else 2


SPLIT_ROWS = (("sequence_parallel", True),)
SPLIT_BACKWARD = (("pipeline_schedule", "zero_bubble"), ("virtual_stages", 2))
CASES = [
    Case("cp 2, one micro-batch", Layout(2), fixed(2, 50), temperature=0.7),
    Case("cp 2, chunks of two rows", Layout(2), fixed(2, 16), chunk=2, whole=True),
    Case("free", Layout(2), dynamic(24, "free"), whole=True),
    Case("free, copies", Layout(2), dynamic(24, "free"), options=(("shard_parameters", False),)),
    Case("tp 2, parts of rows", Layout(2, tp=2), fixed(1, 40, row_multiple=2), options=SPLIT_ROWS, whole=True),
    Case("pp 2", Layout(2, pp=2), fixed(1, 40), temperature=0.7, whole=True),
    Case("experts", Layout(2), fixed(2, 24), "qwen3-moe", whole=True),
    Case("an adapter, recomputed", Layout(2), dynamic(24), "adapter", options=(("activation_checkpointing", True),)),
    Case("an adapter, tp 2", Layout(2, tp=2), fixed(1, 40), "adapter", whole=True),
    Case("an adapter, pp 2", Layout(2, pp=2), fixed(1, 40), "adapter", whole=True),
    Case("cp 2, pp 2", Layout(4, pp=2), fixed(2, 24), chunk=3, whole=True),
    Case("dynamic, split backward", Layout(4, pp=2), dynamic(24), options=SPLIT_BACKWARD, whole=True),
    Case("dynamic, replicas", Layout(4, dp_replicate=2), dynamic(16), whole=True),
    Case("experts, ep 2, tp 2", Layout(4, tp=2, ep=2), dynamic(24), "qwen3-moe", chunk=3, temperature=0.7),
]  # fmt: skip
LOSSES: dict[str, Any] = {
    "weights": (weighted, None, TARGETS, None),
    "tokens": (own, policy_loss, 3.5, 3.5),
    "micro-batches": (by_document, MicroBatchLoss(micro_batch_loss, also=["entropy"]), 2.5, 2.5),
    "groups": (of_sets(GROUPS), DocumentLoss(pair_loss, GROUPS), len(GROUPS), None),
    "all documents": (of_sets([range(8)]), DocumentLoss(pair_loss), 8, 8),
}


def cases_of(ranks: int, whole: bool) -> list[Case]:
    return [case for case in CASES if (len(case.home.ranks), case.whole) == (ranks, whole)]


def model_of(family: str, layers: int) -> Any:
    if family == "adapter":
        return adapted("llama", "every linear")
    return deep(family, torch.float64, layers, VOCABULARY)


ALSO = ("entropy", "top1", "mean_logits", "log_sum_sq_probs")


Dense = tuple[dict[str, Answer], list[np.ndarray]]


def dense(case: Case) -> Dense:
    """What one process says of each loss, and of each document's tokens the log-probabilities and ALSO (5, n)."""
    model, documents = model_of(case.family, case.layers).to(REFERENCE), documents_of()
    rows, model = rows_of(model, documents, case.temperature), unwrap_peft_model(model)
    losses = {name: (loss, by) for name, (loss, _, by, _) in LOSSES.items() if name in losses_of(case)}
    tokens = values_of_tokens(rows, documents, ALSO)
    return {name: answer(model, rows, *how) for name, how in losses.items()}, tokens


def losses_of(case: Case) -> tuple[str, ...]:
    names = tuple(LOSSES) if case.whole or case == CASES[0] else ("micro-batches", "groups")
    return tuple(name for name in names if name != "micro-batches" or not case.name.startswith("free"))


def compare(rank: int, ranks: int, whole: bool, wanted: list[Dense]) -> dict[str, dict[str, float]]:
    found = dict[str, dict[str, float]]()
    for case, of_case in zip(cases_of(ranks, whole), wanted, strict=True):
        with World(case.home, backend=backend(), timeout=60) as world:
            found[case.name] = _errors(case, world, *of_case)
    return found


def _errors(case: Case, world: World, answers: dict[str, Answer], tokens: list[np.ndarray]) -> dict[str, float]:
    model = prepare_untried(model_of(case.family, case.layers), world, **dict(case.options))
    documents, plan, step = documents_of(), case.plan(case.home), {"temperature": case.temperature}
    found = loss_errors(model, plan, documents, world, answers, LOSSES, loss_chunk_rows=case.chunk, **step)
    log_probs = token_log_probs(model, plan, documents, world, case.chunk, also=ALSO, **step)
    return found | {"log-probabilities": token_error(log_probs, tokens, documents, ALSO)}


@cache
def results(ranks: int, whole: bool) -> list[dict[str, dict[str, float]]]:
    return run_ranks(compare, ranks, ranks, whole, [dense(case) for case in cases_of(ranks, whole)], timeout=240)


ROWS = [pytest.param(case, id=case.name, marks=[pytest.mark.whole] * case.whole) for case in CASES]


@pytest.mark.parametrize("case", ROWS)
def test_equals_one_process(case: Case) -> None:
    for found in results(len(case.home.ranks), case.whole):
        assert max(found[case.name].values()) < 1e-12, found[case.name]
