"""Steps of a model under a home beside the same model in one process: losses, the gradient norm, every gradient.

Tables stay data: a test says what a row stands for as a `Case`, and `check` runs the rows on local ranks.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from itertools import groupby
from operator import attrgetter
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from longspan import Layout, Plan, World, bind, prepare, run_step
from longspan.data.shared_prefixes import find_prefix_trees
from longspan.doctor.stock import compute_in_float64
from longspan.testing import backend, run_ranks
from longspan.train import StepResult
from tests.model.stock import error, gradients_of, prepare_untried, worst

WIDE, SINGLE = (1e-12, 1e-12), (1e-6, 1e-5)  # bounds of losses, and of gradients, their norm and logits


class Exact(Protocol):
    """What one process says. Every rank has every gradient, but those of other stages of a pipeline."""

    @property
    def loss(self) -> float: ...
    @property
    def gradients(self) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class Case:
    """A model, made anew on every rank, the plans of its steps, and what must come of each; `options` are those of
    `prepare`, `step` those of `run_step`, and `more` the other losses, by their names in the result.

    A model that is `tried` takes as long as two steps more. Its plans go one after another through one model.
    """

    model: Callable[[], Any]
    home: Layout
    plans: Mapping[str, Plan]
    documents: Sequence[Any]
    exact: Exact
    bounds: tuple[float, float] = WIDE
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    step: Mapping[str, Any] = field(default_factory=dict[str, Any])
    more: Mapping[str, float] = field(default_factory=dict[str, float])
    evaluation: Plan | None = None  # after each step
    tried: bool = False
    in_float64: bool = False  # also what stock models always compute in float32
    logits: Sequence[Tensor] = ()  # of every document too
    compare: Callable[[dict[str, Tensor], dict[str, Tensor]], float] = worst

    def prepared(self, world: World) -> nn.Module:
        return (prepare if self.tried else prepare_untried)(self.model(), world, **self.options)


class Errors(NamedTuple):
    """The largest relative ones of a step; of gradients they are infinite where one is missing."""

    losses: float
    norm: float
    gradients: float
    logits: float = 0.0

    def within(self, bounds: tuple[float, float]) -> bool:
        return self.losses < bounds[0] and max(self[1:]) < bounds[1]


def errors_of(
    result: StepResult,
    gradients: dict[str, Tensor],
    exact: Exact,
    *,
    stages: nn.Module | None = None,
    more: Mapping[str, float] = MappingProxyType({}),
    compare: Callable[[dict[str, Tensor], dict[str, Tensor]], float] = worst,
) -> Errors:
    """Those of a step's result, and of the gradients that it left, of these `stages` of a pipeline alone."""
    norm = torch.cat([gradient.flatten() for gradient in exact.gradients.values()]).double().norm().item()
    here = exact.gradients.keys() if stages is None else {name for name, _ in stages.named_parameters()}
    losses = [result.loss / exact.loss - 1, *(attrgetter(name)(result) / value - 1 for name, value in more.items())]
    assert result.grad_norm is not None
    expected = {name: gradient for name, gradient in exact.gradients.items() if name in here}
    return Errors(max(map(abs, losses)), abs(result.grad_norm / norm - 1), compare(gradients, expected))


def step_errors(case: Case, model: nn.Module, plan: Plan, world: World) -> tuple[Errors, set[str]]:
    """Those of one step of a prepared model, and the names of the gradients that are here, which are zeroed."""
    logits = logit_error(model, plan, case.documents, world, case.logits) if case.logits else 0.0
    result = run_step(model, plan, case.documents, world, **case.step)
    gradients, stages = gradients_of(model), model if world.home.pp > 1 else None
    errors = errors_of(result, gradients, case.exact, stages=stages, more=case.more, compare=case.compare)
    model.zero_grad()
    if case.evaluation is not None:
        rows = case.step.get("loss_chunk_rows", 0)
        evaluation = run_step(model, case.evaluation, case.documents, world, backward=False, loss_chunk_rows=rows)
        errors = errors._replace(losses=max(errors.losses, abs(evaluation.loss / case.exact.loss - 1)))
    return errors._replace(logits=logits), {*gradients}


@torch.no_grad()
def logit_error(
    model: nn.Module, plan: Plan, documents: Sequence[Any], world: World, expected: Sequence[Tensor]
) -> float:
    """That of any document's logits, which are put together from all ranks."""
    errors = list[float]()
    for micro_batch in plan.micro_batches:
        shard = bind(micro_batch, world).with_padding()
        ids = torch.cat([torch.from_numpy(documents[d]) for d in micro_batch.documents]).to(world.device)
        inputs = {"input_ids": shard.scatter(ids)[None], "position_ids": shard.position_ids[None], "shard": shard}
        logits = shard.gather(model(**inputs).logits[0]).cpu().split(list(micro_batch.lengths))
        errors += [error(x, expected[d]) for x, d in zip(logits, micro_batch.documents, strict=True)]
    return max(errors)


Found = dict[tuple[Any, str], tuple[Errors, set[str]]]  # by case and plan


def run(rank: int, cases: Mapping[Any, Case]) -> Found:
    """Every plan of every case on this rank; neighbours of one home share a world."""
    found = Found()
    for home, rows in groupby(cases.items(), key=lambda row: row[1].home):
        with World(home, backend=backend(), timeout=60) as world:
            for name, case in rows:
                with compute_in_float64() if case.in_float64 else nullcontext():
                    model = case.prepared(world)
                    for of_plan, plan in case.plans.items():
                        found[name, of_plan] = step_errors(case, model, plan, world)
    return found


def check(cases: Mapping[Any, Case], timeout: float = 240) -> None:
    """Assert of every case and plan, each on as many fresh ranks as its home has, that all ranks are within bounds and
    have every gradient together.
    """
    wrong, count = list[Any](), 0
    for ranks in sorted({len(case.home.ranks) for case in cases.values()}):
        of_ranks = run_ranks(
            run, ranks, {n: c for n, c in cases.items() if len(c.home.ranks) == ranks}, timeout=timeout
        )
        for (name, plan), _ in of_ranks[0].items():
            errors, names = zip(*(found[name, plan] for found in of_ranks), strict=True)
            right = set[str]().union(*names) == cases[name].exact.gradients.keys()
            wrong += [] if right and all(x.within(cases[name].bounds) for x in errors) else [(name, plan, errors)]
            count += 1
    assert not wrong, wrong
    assert count == sum(len(case.plans) for case in cases.values()) > 0


def by_ranks(tables: Mapping[str, Mapping[Layout, Any]]) -> list[Any]:
    """Parameters for a test: the rows of each table whose homes have one number of ranks. The first table is daily, the
    others are `whole`.
    """
    first, *_ = tables
    return [
        pytest.param(
            {home: rows for home, rows in table.items() if len(home.ranks) == ranks},
            id=f"{name} {ranks}",
            marks=[pytest.mark.whole] * (name != first),
        )
        for name, table in tables.items()
        for ranks in sorted({len(home.ranks) for home in table})
    ]


@contextmanager
def shared_at_any_price(least_rows: int = 3) -> Iterator[list[int]]:
    """Share prefixes of so many rows whatever plans are predicted to take; yields how many each search found."""
    found = list[int]()

    def find(documents: Any, **keywords: Any) -> Any:
        families = find_prefix_trees(documents, least_rows=least_rows, **keywords)
        found.append(len(families.lengths) - len(documents))
        return families

    def plan_prefix_trees(plan: Any, lengths: Any, families: Any, home: Layout, *, targets: int | None = None) -> Plan:
        if families is None or max(families.parents) < 0:
            return plan(lengths, home, targets=targets)
        return plan(families.lengths, home, targets=targets, parents=families.parents)

    with (
        patch("longspan.resolve.planner_config.find_prefix_trees", find),
        patch("longspan.train.prefix_sharing.plan_prefix_trees", plan_prefix_trees),
    ):
        yield found
