"""The matrix of evaluation: models × homes × degrees of training and of evaluation × plans × placements × dtypes.

A run trains at one degree and evaluates after every step, each time at another degree and in another way. The loss of
every held-out document is compared with the stock model in one process, which is trained on the same batches and sees
the same documents one by one. That training is the same as without evaluations is in test_no_trace.py.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedModel

from longspan.comm import World
from longspan.evaluation.live import evaluate
from longspan.evaluation.metrics import EvaluationOptions
from longspan.layout import Layout
from longspan.model import prepare
from longspan.plan import Plan, plan_dynamic, plan_fixed
from longspan.resolve.planner_config import PlannerConfig
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer, run_step
from tests.model.deep import deep
from tests.model.stock import texts
from tests.pairs import every_pair

RANKS = 8
DEGREES = (1, 2, 4, 8)
BATCHES = ((13, 1, 30, 7, 2, 18), (31, 2, 4, 1, 6, 3, 11), (5, 29, 8, 1, 1, 17))
TRAINING = [texts(lengths, seed) for seed, lengths in enumerate(BATCHES)]
HELD_OUT_LENGTHS = (37, 1, 64, 9, 2, 23, 50, 5, 30)
HELD_OUT = texts(HELD_OUT_LENGTHS, 99)
RATE = 0.005
LIMITS = {"float64": 1e-12, "float32": 1e-6}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 16}


class Home(NamedTuple):
    """Where weights live: a layout of eight ranks, and what `prepare` is told beside it."""

    layout: Layout
    vpp: int = 1
    sequence_parallel: bool = False

    @property
    def row_multiple(self) -> int:
        return self.layout.tp if self.sequence_parallel else 1


HOMES = {
    "8 slots": Home(Layout(ranks=RANKS)),
    "dp_replicate 2": Home(Layout(ranks=RANKS, dp_replicate=2)),
    "ep 2": Home(Layout(ranks=RANKS, ep=2)),
    "tp 2": Home(Layout(ranks=RANKS, tp=2)),
    "tp 2, sequence parallel": Home(Layout(ranks=RANKS, tp=2), sequence_parallel=True),
    "pp 2, tp 2": Home(Layout(ranks=RANKS, pp=2, tp=2)),
    "pp 2, tp 2, vpp 2": Home(Layout(ranks=RANKS, pp=2, tp=2), vpp=2),
}
WAYS = ("p2p", "all_gather", "a2a", "a2a+p2p", "contiguous", "small cap", "padded", "dynamic")


class Step(NamedTuple):
    """A step of training at one degree, and the evaluation after it: at which degree and in which way."""

    degree: int
    evaluation: int
    way: str


@dataclass(frozen=True)
class Run:
    """Training with an evaluation after each step; prints as what makes it again."""

    family: str
    home: str
    placement: str
    dtype: str
    steps: tuple[Step, ...] = ()

    @property
    def layers(self) -> int:
        return 4 if HOMES[self.home].layout.pp > 1 else 2

    @property
    def key(self) -> tuple[str, str, int]:
        return self.family, self.dtype, self.layers

    def training_plan(self, number: int) -> Plan:
        home, lengths, degree = HOMES[self.home], BATCHES[number % len(BATCHES)], self.steps[number].degree
        options: dict[str, Any] = {"micro_batch_multiple": home.layout.pp, "row_multiple": home.row_multiple}
        if self.placement == "free":
            return plan_dynamic(lengths, home.layout, max_tokens_per_slot=32, max_cp=degree, mode="free", **options)
        return plan_fixed(lengths, home.layout, cp=degree, max_tokens_per_slot=32, **options)


@cache
def choice_of(home: str, degree: int, way: str) -> PlannerConfig:
    """How an evaluation is planned: at this degree in one of WAYS, under a cap that makes several micro-batches."""
    longest = max(HELD_OUT_LENGTHS)
    cap = -(-longest // degree) + (2 if way == "small cap" else 24)
    options: dict[str, Any] = {"max_tokens_per_slot": cap, "row_multiple": HOMES[home].row_multiple}
    if way in ("all_gather", "a2a", "a2a+p2p"):
        options["cp_comm_type"] = way
    if way == "a2a+p2p":
        options["hierarchical_context_parallel_sizes"] = (min(2, degree), max(1, degree // 2))
    if way == "contiguous":
        options |= {"partition": "contiguous", "cp_comm_type": "a2a"}
    if way == "dynamic":
        return PlannerConfig.dynamic(1, degree, **options)
    choice = PlannerConfig.fixed(degree, **options)
    return replace(choice, planner="padded") if way == "padded" else choice


def model_of(family: str, dtype: str, layers: int) -> PreTrainedModel:
    changes: dict[str, Any] = {"num_attention_heads": 8}  # which a2a deals to eight slots
    if family == "qwen3 with YaRN":  # the documents go beyond its 16 original positions
        changes |= {"rope_parameters": YARN, "max_position_embeddings": 64}
    return deep(family.partition(" ")[0], getattr(torch, dtype), layers, 62, **changes)


class Stock(NamedTuple):
    losses: list[float]
    documents: list[list[float]]


def stock_answers(runs: Iterable[Run]) -> dict[tuple[str, str, int], Stock]:
    steps = dict[tuple[str, str, int], int]()
    for run in runs:
        steps[run.key] = max(steps.get(run.key, 0), len(run.steps))
    return {key: _stock(key, count) for key, count in steps.items()}


def _stock(key: tuple[str, str, int], steps: int) -> Stock:
    model = model_of(*key).to("cuda" if backend() == "nccl" else "cpu")  # pyright: ignore[reportArgumentType]
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    answer = Stock([], [])
    for step in range(steps):
        documents = TRAINING[step % len(TRAINING)]
        optimizer.zero_grad()
        sums = [loss_of(model, document) for document in documents]
        loss = torch.stack(sums).sum() / sum(len(document) - 1 for document in documents)
        loss.backward()
        optimizer.step()
        answer.losses.append(loss.item())
        with torch.no_grad():
            answer.documents.append([loss_of(model, document).item() for document in HELD_OUT])
    return answer


def loss_of(model: PreTrainedModel, document: Any) -> Tensor:
    ids = torch.from_numpy(document).to(model.device)
    logits = model(input_ids=ids[None], use_cache=False).logits[0]
    return F.cross_entropy(logits[:-1], ids[1:], reduction="none").sum(dtype=torch.float64)


def take(rank: int, runs: Sequence[Run], stock: dict[tuple[str, str, int], Stock]) -> list[float]:
    """This rank's largest relative error of each run, of a training loss or a document's; those of one home after each
    other in one world.
    """
    errors = dict[Run, float]()
    for home in dict.fromkeys(run.home for run in runs):
        with World(HOMES[home].layout, backend=backend(), timeout=120) as world:
            errors |= {run: _error_of(run, stock[run.key], world) for run in runs if run.home == home}
    return [errors[run] for run in runs]


def _error_of(run: Run, stock: Stock, world: World) -> float:
    home = HOMES[run.home]
    model = prepare(
        model_of(*run.key),
        world,
        reshard_after_forward=run.placement != "kept gathered",
        activation_checkpointing=run.placement == "recomputed",
        virtual_stages=home.vpp,
        sequence_parallel=home.sequence_parallel,
    )
    optimizer = build_optimizer(model, "sgd", lr=RATE)
    errors = list[float]()
    for number, (_, degree, way) in enumerate(run.steps):
        batch = TRAINING[number % len(TRAINING)]
        loss = run_step(model, run.training_plan(number), batch, world, optimizer, step=number).loss
        errors.append(abs(loss / stock.losses[number] - 1))
        options = EvaluationOptions(step=number)
        evaluation = evaluate(model, HELD_OUT, choice_of(run.home, degree, way), world, options)
        errors += [
            abs(loss.sum - exact) / max(exact, 1e-9)  # a document of one token has no loss
            for loss, exact in zip(evaluation.document_losses, stock.documents[number], strict=True)
        ]
    return max(errors)


# Runs of a few steps each: every home, family, placement and dtype.
FEW = (
    Run("qwen3", "8 slots", "sharded", "float32"),
    Run("gpt-oss", "8 slots", "kept gathered", "float64"),
    Run("qwen3 with YaRN", "dp_replicate 2", "sharded", "float32"),
    Run("qwen3-moe", "ep 2", "kept gathered", "float64"),
    Run("qwen3", "tp 2", "free", "float64"),
    Run("gpt-oss", "tp 2, sequence parallel", "recomputed", "float32"),
    Run("qwen3-moe", "pp 2, tp 2", "sharded", "float64"),
    Run("qwen3 with YaRN", "pp 2, tp 2, vpp 2", "recomputed", "float32"),
)


def few() -> list[Run]:
    """Every pair of a degree of training, a degree of evaluation and a way of it, dealt out to the runs of FEW."""
    steps = dict[Run, list[Step]]((run, []) for run in FEW)
    for step in sorted(itertools.starmap(Step, every_pair((DEGREES, DEGREES, WAYS), 0)), key=max_degree, reverse=True):
        fitting = [run for run in FEW if max_degree(step) <= HOMES[run.home].layout.slots]
        steps[min(fitting, key=lambda run: len(steps[run]))].append(step)
    return [replace(run, steps=tuple(steps[run])) for run in FEW]


def max_degree(step: Step) -> int:
    return max(step.degree, step.evaluation)


@pytest.mark.whole
def test_every_pair_of_degrees_and_ways_is_exact() -> None:
    runs = few()
    found = run_ranks(take, RANKS, runs, stock_answers(runs), timeout=280)
    worst = [max(of_run) for of_run in zip(*found, strict=True)]
    wrong = [(run, error) for run, error in zip(runs, worst, strict=True) if not error <= LIMITS[run.dtype]]
    assert not wrong, f"{len(wrong)} of {len(runs)}:\n" + "\n".join(f"{error} {run}" for run, error in wrong)
