"""Computing in bfloat16 over parameters in float32: gradients are summed in float32, wherever they are summed.

A document's gradient, computed alone, is one of bfloat16. That of many documents over slots, replicas, stages and
micro-batches must be their sum in float32: a sum in bfloat16 would be a thousand times farther from it than the bound.
"""

from dataclasses import dataclass, field
from typing import Any

import pytest
import torch

from longspan.comm import World
from longspan.errors import ModelError
from longspan.layout import Layout
from longspan.model import prepare
from longspan.model.experts.router import RouterCoefficients
from longspan.plan import plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import run_step
from tests.model.deep import deep
from tests.model.experts.moe_models import moe_model
from tests.model.stock import gradients_of, prepare_untried, stock_answer, texts, tiny, worst

LENGTH = 17  # 16 targets of each document: dividing by targets is exact in every dtype
SUMMED, DENSE = 2e-6, 0.05  # bounds of errors, relative to a parameter's largest gradient
NO_BALANCE = RouterCoefficients(balance=0.0, z=0.0)  # its gradient is no sum over documents


@dataclass(frozen=True)
class Case:
    home: Layout
    prepared: dict[str, Any] = field(default_factory=dict[str, Any])
    mode: str = "lockstep"
    family: str = "qwen3"
    documents: int = 8


CASES = {
    "fsdp": Case(Layout(4)),
    "copies of the parameters": Case(Layout(2, dp_replicate=2), documents=4),
    "tp": Case(Layout(2, tp=2), {"sequence_parallel": True}, documents=2),
    "pp": Case(Layout(4, pp=2)),
    "pp, zero bubble": Case(Layout(4, pp=2), {"pipeline_schedule": "zero_bubble"}),
    "pp, interleaved": Case(Layout(2, pp=2), {"virtual_stages": 2}, "lockstep", "deep", 2),
    "ep": Case(Layout(2, ep=2), family="qwen3-moe", documents=4),
    # torch 2.15 adds the two gradients of a tied weight in bfloat16 or in float32, pass by pass: llama's is not tied
    "free": Case(Layout(2), mode="free", family="llama", documents=4),
    "recomputed": Case(Layout(4), {"activation_checkpointing": "full"}),
    "attention kept": Case(Layout(4), {"activation_checkpointing": "selective"}),
}


def _model(family: str) -> Any:
    if family == "deep":
        return deep("qwen3", torch.float32)
    return tiny(family) if family in ("qwen3", "llama") else moe_model(family, torch.float32)


def _gradients(case: Case, model: Any, world: World, documents: list[Any]) -> tuple[float, dict[str, torch.Tensor]]:
    model.zero_grad()
    rows = world.home.tp if case.prepared.get("sequence_parallel") else 1
    cap = -(-LENGTH // rows) * rows
    lengths = [len(document) for document in documents]
    plan = plan_fixed(lengths, world.home, cp=1, max_tokens_per_slot=cap, mode=case.mode, row_multiple=rows)
    assert len(plan.micro_batches) == -(-len(documents) // world.home.slots)
    result = run_step(model, plan, documents, world, router=NO_BALANCE)
    return result.loss, gradients_of(model)


def _errors(rank: int, names: tuple[str, ...]) -> dict[str, tuple[float, float]]:
    errors = {}
    for name in names:
        with World(CASES[name].home, backend=backend(), timeout=60) as world:
            errors[name] = _of_case(CASES[name], world)
    with World(Layout(CASES[names[0]].home.ranks), backend=backend(), timeout=60) as world:
        said = r"compute_dtype is torch.float64 \(53 significant bits\) over parameters of torch.float32 \(24\)"
        with pytest.raises(ModelError, match=said):
            prepare(tiny("qwen3"), world, compute_dtype=torch.float64)
    return errors


def _of_case(case: Case, world: World) -> tuple[float, float]:
    """The largest error of gradients against the sum of those of single documents, and the loss's against float32's."""
    documents = texts([LENGTH] * case.documents)
    model = prepare_untried(_model(case.family), world, compute_dtype=torch.bfloat16, **case.prepared)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    loss, together = _gradients(case, model, world, documents)
    ep = case.home.ep  # slots whose documents' rows meet in one product of an expert
    alone = [_gradients(case, model, world, documents[i : i + ep])[1] for i in range(0, case.documents, ep)]
    sums = {name: sum(part[name].double() for part in alone).div(len(alone)).float() for name in together}
    dense = stock_answer("qwen3", torch.float32, documents).loss if case.family == "qwen3" else loss
    return worst(together, sums), abs(loss / dense - 1)


DAILY = ("copies of the parameters", "pp, interleaved", "ep", "free")
REST = ("fsdp", "pp", "pp, zero bubble", "recomputed", "attention kept")


@pytest.mark.parametrize("names", [DAILY, *(pytest.param(names, marks=pytest.mark.whole) for names in (("tp",), REST))])
def test_gradients_are_summed_in_float32_under_every_home(names: tuple[str, ...]) -> None:
    of_ranks = run_ranks(_errors, len(CASES[names[0]].home.ranks), names)
    for name in names:
        summed, loss = (max(errors[name][i] for errors in of_ranks) for i in (0, 1))
        assert summed < SUMMED, (name, summed)
        assert 0 < loss < DENSE or CASES[name].family != "qwen3", (name, loss)
