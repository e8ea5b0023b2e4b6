"""Evaluations leave no trace: training goes on bit by bit as without, whatever home, optimizer and model keep."""

from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from longspan.comm import World
from longspan.evaluation.live import evaluate
from longspan.evaluation.metrics import EvaluationOptions
from longspan.layout import Layout
from longspan.model.experts.router import RouterCoefficients
from longspan.plan import plan_fixed
from longspan.resolve.planner_config import PlannerConfig
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer, run_step
from tests.evaluation.state import State, differences, state_of
from tests.model.deep import deep
from tests.model.stock import prepare_untried, texts

LENGTHS, HELD_OUT_LENGTHS = (13, 1, 30, 7, 2, 18), (31, 2, 17, 1, 9, 24)
ROUTER = RouterCoefficients(balance=0.5, z=0.1)


@dataclass(frozen=True)
class Case:
    layout: Layout
    family: str = "qwen3"
    settings: dict[str, Any] = field(default_factory=dict)
    optimizer: str = "adamw"
    dropout: float = 0.0

    def model(self, world: World) -> nn.Module:
        model = deep(self.family, torch.float32, 2 * self.layout.pp, 62, attention_dropout=self.dropout)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(".layers.1." not in name)
        prepared = prepare_untried(model, world, **self.settings)
        prepared.train()
        for name, module in prepared.named_modules():
            if ".layers.1" in name:
                module.train(False)
        return prepared


CASES = {
    "FSDP2, dropout": Case(Layout(ranks=4), dropout=0.3),
    "HSDP, recomputed": Case(Layout(ranks=4, dp_replicate=2), "qwen3-moe", {"activation_checkpointing": True}),
    "copies, momentum": Case(Layout(ranks=4), "gpt-oss", {"shard_parameters": False}, optimizer="sgd"),
    "TP, sequence parallel": Case(Layout(ranks=4, tp=2), settings={"sequence_parallel": True}, dropout=0.3),
    "EP, bfloat16": Case(Layout(ranks=4, ep=2), "qwen3-moe", {"compute_dtype": torch.bfloat16}),
    "PP": Case(Layout(ranks=4, pp=2), "qwen3-moe"),
    "VPP": Case(Layout(ranks=4, pp=2), settings={"virtual_stages": 2}, dropout=0.3),
    "zero bubbles": Case(Layout(ranks=4, pp=2), settings={"pipeline_schedule": "zero_bubble"}),
    "PP × TP": Case(Layout(ranks=4, pp=2, tp=2), settings={"virtual_stages": 2, "pipeline_schedule": "zero_bubble"}),
}
ALWAYS = ("TP, sequence parallel",)  # over FSDP2, with dropout


class Trained(NamedTuple):
    results: list[Any]
    states: list[State]
    changed: list[str]


def train(case: Case, world: World, *, evaluates: bool) -> Trained:
    """An update after two passes whose gradients add up, one after one; evaluations before, between and after them."""
    model = case.model(world)
    momentum: dict[str, Any] = {"momentum": 0.9} if case.optimizer == "sgd" else {}
    optimizer = build_optimizer(model, case.optimizer, lr=0.01, **momentum)
    trained = Trained([], [], [])
    for step in range(2):
        world.step = step
        optimizer.zero_grad()
        for half in range(2 - step):
            if evaluates:
                changed = changed_by_evaluation(model, optimizer, world, degree=1 << (step + half))
                first = not trained.results  # of all passes, which puts FSDP2's hooks in place
                trained.changed.extend(path for path in changed if not (first and path.startswith("/hooks")))
            trained.results.append(_pass(case, model, world, 2 * step + half))
        if evaluates and not step:
            trained.changed.extend(changed_by_evaluation(model, optimizer, world, degree=4))
        optimizer.step()
        trained.states.append(state_of(model, optimizer, world))
    return trained


def _pass(case: Case, model: nn.Module, world: World, seed: int) -> Any:
    home, multiple = world.home, world.home.tp if case.settings.get("sequence_parallel") else 1
    rows = {"max_tokens_per_slot": 32, "micro_batch_multiple": home.pp, "row_multiple": multiple}
    plan = plan_fixed(LENGTHS, home, cp=min(2, home.slots), **rows)  # pyright: ignore[reportArgumentType]
    router = ROUTER if case.family == "qwen3-moe" else None
    result = run_step(model, plan, texts(LENGTHS, seed), world, router=router)
    return result.loss, result.grad_norm, result.router


def changed_by_evaluation(model: nn.Module, optimizer: Optimizer, world: World, *, degree: int) -> list[str]:
    """What an evaluation at this degree, or the largest below it that there is, changes on this rank."""
    before, degree = state_of(model, optimizer, world), min(degree, world.home.slots)
    choice = PlannerConfig.fixed(degree, max_tokens_per_slot=34)
    evaluate(model, texts(HELD_OUT_LENGTHS, 5), choice, world, EvaluationOptions(step=77))
    return differences(before, state_of(model, optimizer, world))


def compare(rank: int, names: tuple[str, ...]) -> dict[str, list[str]]:
    differ = dict[str, list[str]]()
    for name in names:
        with World(CASES[name].layout, backend=backend(), timeout=60) as world:
            world.seed = 7
            without, trained = (train(CASES[name], world, evaluates=flag) for flag in (False, True))
            differ[name] = trained.changed + differences(without[:2], trained[:2])
    return differ


@pytest.mark.parametrize("names", [ALWAYS, pytest.param(tuple(CASES), marks=pytest.mark.whole)], ids=["few", "all"])
def test_evaluations_leave_no_trace(names: tuple[str, ...]) -> None:
    for rank, differ in enumerate(run_ranks(compare, 4, names)):
        assert differ == {name: [] for name in names}, rank
