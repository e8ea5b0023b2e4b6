"""Mixture-of-experts models under a home equal the stock model document by document, losses of routers included."""

from collections.abc import Callable
from functools import cache

import pytest
import torch

from longspan.comm import World
from longspan.layout import Layout
from longspan.model import prepare
from longspan.model.router import RouterCoefficients
from longspan.plan import Group, MicroBatch, Plan, plan_dynamic, plan_fixed, plan_padded
from longspan.testing import backend, run_ranks
from longspan.train import run_step
from tests.model.moe_models import moe_answer, moe_model
from tests.model.stock import gradients_of, texts, worst

LENGTHS = (13, 1, 30, 7, 2, 18)
WEIGHTS = RouterCoefficients(balance=0.5, z=0.1)
NONE = RouterCoefficients(balance=0.0)
FAMILIES = ("qwen3-moe", "gpt-oss", "mixtral", "olmoe", "deepseek-v3")
MODELS = [(family, dtype) for family in FAMILIES for dtype in (torch.float64, torch.float32)]
MODELS.remove(("deepseek-v3", torch.float64))  # its router computes in float32 always
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}


def idle_slots(home: Layout) -> Plan:
    """Slot 1 has nothing in the first micro-batch, the last one is a dummy for all."""
    everyone = tuple(range(home.slots))
    first = MicroBatch((Group((0,), (0, 1), (13, 1)),))
    second = MicroBatch((Group(everyone, (2, 3), (30, 7)), Group((0,), (4,), (2,)), Group((1,), (5,), (18,))))
    return Plan(home.slots, LENGTHS, (first, second, MicroBatch()), targets=sum(LENGTHS) - len(LENGTHS))


PLANS: dict[str, Callable[[Layout], Plan]] = {
    "cp 1": lambda home: plan_fixed(LENGTHS, home, cp=1),
    "cp 2, a few rows at a time": lambda home: plan_fixed(LENGTHS, home, cp=2, max_tokens_per_slot=16),
    "dynamic": lambda home: plan_dynamic(LENGTHS, home, max_tokens_per_slot=20),
    "padded": lambda home: plan_padded(LENGTHS, home, cp=2, max_tokens_per_slot=32),
    "idle slots": idle_slots,
}
Errors = tuple[float, float]


def _compare(rank: int, home: Layout, models: list[tuple[str, torch.dtype]]) -> dict[tuple[object, ...], Errors]:
    """Worst error of the losses, and of gradients, by family, dtype, kind and plan."""
    found = {}
    documents = texts(LENGTHS)
    with World(home, backend=backend()) as world:
        for family, dtype in models:
            weights = NONE if family == "deepseek-v3" else WEIGHTS
            wanted = moe_answer(moe_model(family, dtype), documents, weights, world.device)
            for kind in ("copies", "recomputed") if home.ep == 1 else ("sharded", "recomputed"):
                model = prepare(
                    moe_model(family, dtype),
                    world,
                    shard_parameters=kind != "copies",
                    activation_checkpointing=kind == "recomputed",
                )
                for name, make in PLANS.items():
                    result = run_step(model, make(home), documents, world, router=weights)
                    losses = [abs(result.loss / wanted.loss - 1)]
                    if result.router is not None:
                        losses.append(abs(result.router.balance / wanted.balance - 1))
                        losses.append(abs(result.router.z / wanted.z - 1))
                    found[family, dtype, kind, name] = (max(losses), worst(gradients_of(model), wanted.gradients))
                    model.zero_grad()
    return found


@cache
def _results(home: Layout) -> list[dict[tuple[object, ...], Errors]]:
    return run_ranks(_compare, len(home.ranks), home, MODELS)


@pytest.mark.parametrize(("family", "dtype"), MODELS)
def test_equals_the_stock_model_with_all_experts_on_every_rank(family: str, dtype: torch.dtype) -> None:
    for answer in _results(Layout(ranks=2)):
        cases = {key: errors for key, errors in answer.items() if key[:2] == (family, dtype)}
        assert len(cases) == 2 * len(PLANS)
        for key, (losses, gradients) in cases.items():
            assert gradients < TOLERANCE[dtype] and losses < (1e-12 if dtype == torch.float64 else 1e-6), (
                key,
                cases[key],
            )
