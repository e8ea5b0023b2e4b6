"""The matrix of training: planners × tensor parallelism × stages × experts × FSDP2 × models × dtypes × processes.

Each combination takes three steps of SGD on three batches and is compared with the stock model in one process, which
sees the same documents one by one: losses, gradient norms, every gradient of the first step, and weights at the end.
"""

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from longspan.comm import World
from longspan.layout import Layout
from longspan.model import prepare
from longspan.model.experts.router import RouterCoefficients
from longspan.plan import Plan, plan_dynamic, plan_fixed
from longspan.testing import backend
from longspan.train import build_optimizer, run_step
from tests.model.deep import answer, deep
from tests.model.stock import error, gradients_of, own_error, prepare_untried, texts, weights_of

BATCHES = ((13, 1, 30, 7, 2), (31, 4, 1, 6), (5, 29, 1, 3))
DOCUMENTS = [texts(lengths, seed) for seed, lengths in enumerate(BATCHES)]
RATE, ROUTER = 0.1, RouterCoefficients(balance=0.5, z=0.1)
VOCABULARIES = {"qwen3": 62, "qwen3-moe": 62, "gpt-oss": 61}  # tp 2 splits embedding and head of even ones
# Of losses, gradients and weights. Gradients in float32 may also differ by twice the stock model's own error there
# (`own_error`): so far may two float32 computations be apart that are each that far from the truth. It depends on the
# processor's order of sums; gpt-oss, whose last query bias nearly cancels, comes to 9e-6 in one process alone.
LIMITS = {"float64": (1e-12, 1e-12, 1e-12), "float32": (1e-6, 1e-5, 1e-5)}

FAMILIES = ("qwen3", "qwen3-moe", "gpt-oss")
PLANNERS = ("fixed", "dynamic")
TP = ((1, False), (2, False), (2, True))  # tensor-parallel ranks, and whether norms and residuals hold parts of rows
STAGES = ((1, 1), (2, 1), (2, 2))  # pp, vpp
EP = (1, 2)
ZERO = (3, 2, 1)  # what is once a step: nothing, gathers of weights, sums of gradients too
DTYPES = ("float64", "float32")
RANKS = (4, 8)
AXES = (FAMILIES, PLANNERS, TP, STAGES, EP, ZERO, DTYPES, RANKS)


@dataclass(frozen=True)
class Combination:
    family: str
    planner: str
    tp: tuple[int, bool]
    stages: tuple[int, int]
    ep: int
    zero: int
    dtype: str
    ranks: int

    @property
    def home(self) -> Layout:
        return Layout(ranks=self.ranks, pp=self.stages[0], tp=self.tp[0], ep=self.ep)

    @property
    def slots(self) -> int:
        return self.ranks // self.tp[0] // self.stages[0]

    @property
    def fits(self) -> bool:
        """Whether ep divides the slots, and there are experts to deal out."""
        return not self.slots % self.ep and (self.ep == 1 or self.family != "qwen3")

    @property
    def layers(self) -> int:
        return max(2, self.stages[0] * self.stages[1])

    @property
    def key(self) -> tuple[str, str, int]:
        return self.family, self.dtype, self.layers

    def model(self) -> PreTrainedModel:
        return deep(self.family, getattr(torch, self.dtype), self.layers, VOCABULARIES[self.family])

    def plan(self, lengths: Sequence[int]) -> Plan:
        return _plan(self.planner, tuple(lengths), self.home, self.tp[0] if self.tp[1] else 1)


@cache
def _plan(planner: str, lengths: tuple[int, ...], home: Layout, row_multiple: int) -> Plan:
    """Several micro-batches, at most two slots to a document of a fixed plan; one slot alone takes whole ones."""
    many, rows = home.slots > 1, {"row_multiple": row_multiple}
    if planner == "dynamic":
        return plan_dynamic(lengths, home, max_tokens_per_slot=16 if many else 40, **rows)
    return plan_fixed(lengths, home, cp=min(2, home.slots), max_tokens_per_slot=20 if many else 40, **rows)


def every(ranks: int) -> list[Combination]:
    """The combinations for which so many processes are the least that make two slots, refused ones too."""
    combinations = (Combination(*values, ranks) for values in itertools.product(*AXES[:-1]))
    return [c for c in combinations if ranks == (8 if c.tp[0] * c.stages[0] > 2 else 4)]


def fits(values: tuple[Any, ...]) -> bool:
    return Combination(*values).fits


class Wanted(NamedTuple):
    """What the stock model says of three steps: losses, gradient norms, gradients of the first, weights at the end.

    `own_error` is that of its first gradients in float32, 0 in float64.
    """

    losses: list[float]
    norms: list[float]
    gradients: dict[str, Tensor]
    weights: dict[str, Tensor]
    own_error: float = 0.0


Answers = dict[tuple[str, str, int], Wanted]


class Errors(NamedTuple):
    """The largest relative errors of losses, of gradients and their norms, and of weights."""

    loss: float
    gradients: float
    weights: float

    def over_limit(self, dtype: str, own_error: float) -> float:
        loss, gradients, weights = LIMITS[dtype]
        limits = (loss, max(gradients, 2 * own_error), weights)
        return max(x / limit for x, limit in zip(self, limits, strict=True))


def wanted_of(combinations: Iterable[Combination]) -> Answers:
    answers = Answers()
    for key, c in {c.key: c for c in combinations}.items():
        answers[key] = _stock(c)
        if c.dtype == "float32":
            exact = _stock(replace(c, dtype="float64"), steps=1).gradients
            answers[key] = answers[key]._replace(own_error=own_error(answers[key].gradients, exact))
    return answers


def errors_of_stock(combination: Combination) -> Errors:
    """How far the stock model is from itself in float64."""
    single, exact = _stock(combination), _stock(replace(combination, dtype="float64"))
    losses, norms = (
        [abs(x / y - 1) for x, y in zip(*pair, strict=True)]
        for pair in ((single.losses, exact.losses), (single.norms, exact.norms))
    )
    gradients, weights = own_error(single.gradients, exact.gradients), own_error(single.weights, exact.weights)
    return Errors(max(losses), max(*norms, gradients), weights)


def _stock(combination: Combination, steps: int = len(BATCHES)) -> Wanted:
    model, device = combination.model(), "cuda" if backend() == "nccl" else "cpu"
    losses = {} if combination.family == "qwen3" else {"balance": ROUTER.balance, "z": ROUTER.z}
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    answers = []
    for documents in DOCUMENTS[:steps]:
        optimizer.zero_grad()
        answers.append(answer(model, documents, device, **losses))
        optimizer.step()
    return Wanted([a.loss for a in answers], [a.norm for a in answers], answers[0].gradients, weights_of(model))


def run(
    rank: int, combinations: Sequence[Combination], wanted: Answers, steps: Sequence[int] | None = None
) -> list[Errors]:
    """This rank's errors of each combination after its `steps`, those of one home after each other in one world."""
    homes, found = dict[Layout, list[int]](), dict[int, Errors]()
    for number, combination in enumerate(combinations):
        homes.setdefault(combination.home, []).append(number)
    for home, chosen in homes.items():
        with World(home, backend=backend(), timeout=60) as world:
            for number in chosen:
                c, count = combinations[number], len(BATCHES) if steps is None else steps[number]
                found[number] = _errors(c, wanted[c.key], world, count, rows_tried=number > 0)
    return [found[number] for number in range(len(combinations))]


def _errors(combination: Combination, wanted: Wanted, world: World, steps: int, rows_tried: bool) -> Errors:
    prepare_model = prepare_untried if rows_tried else prepare
    model = prepare_model(
        combination.model(),
        world,
        reshard_after_forward=combination.zero == 3,
        sync_each_batch=combination.zero > 1,
        virtual_stages=combination.stages[1],
        sequence_parallel=combination.tp[1],
    )
    optimizer = build_optimizer(model, "sgd", lr=RATE) if steps > 1 else None  # one update is not looked at
    router = None if combination.family == "qwen3" else ROUTER
    losses, far = list[float](), list[float]()
    for step, documents in enumerate(DOCUMENTS[:steps]):
        plan = combination.plan(BATCHES[step])
        result = run_step(model, plan, documents, world, optimizer, step=step, router=router)
        losses.append(abs(result.loss / wanted.losses[step] - 1))
        assert result.grad_norm is not None
        far.append(abs(result.grad_norm / wanted.norms[step] - 1))
        if step == 0:
            far.append(_worst(gradients_of(model), wanted.gradients, model))
    weights = _worst(weights_of(model), wanted.weights, model) if steps == len(BATCHES) else 0.0
    return Errors(max(losses), max(far), weights)


def _worst(found: dict[str, Tensor], wanted: dict[str, Tensor], model: torch.nn.Module) -> float:
    """The largest error of any parameter that is here; infinite where one is missing, or is none of the model's."""
    names = {name for name, _ in model.named_parameters()}
    if found.keys() != names or not names <= wanted.keys():
        return np.inf
    return max(error(found[name], wanted[name]) for name in names)


def worst_of_ranks(answers: Sequence[Sequence[Errors]]) -> list[Errors]:
    return [Errors(*map(max, zip(*each, strict=True))) for each in zip(*answers, strict=True)]
