"""Adapters of peft under every home equal the dense PeftModel: loss, every gradient, and the base model alone."""

from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal

import pytest
import torch

from longspan.comm import World
from longspan.layout import Layout
from longspan.model import prepare, without_adapter
from longspan.plan import Plan, plan_dynamic, plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer, run_step, token_log_probs
from tests.model.lora.adapted import LENGTHS, adapted, dense_answer
from tests.model.stock import error, gradients_of, prepare_untried, texts

TIED = (("qwen3", "embedding and head"),)


@dataclass(frozen=True)
class Home:
    """A layout with arguments of prepare, and the (family, adapter) that run under it."""

    layout: Layout
    cases: tuple[tuple[str, str], ...]
    options: dict[str, Any] = field(default_factory=dict[str, Any])
    dynamic: bool = False
    mode: Literal["lockstep", "free"] = "lockstep"


def _llama(*adapters: str) -> tuple[tuple[str, str], ...]:
    return tuple(("llama", adapter) for adapter in adapters)


HOMES = {
    "cp 2": Home(Layout(ranks=2), (*_llama("every linear", "the first layer", "dora", "modules_to_save"), *TIED)),
    "tp 2": Home(Layout(ranks=2, tp=2), (*_llama("row-wise alone"), *TIED)),
    "tp 2, sequence parallel": Home(
        Layout(ranks=2, tp=2),
        (*_llama("the last layer"), ("biased", "every linear")),
        {"sequence_parallel": True, "activation_checkpointing": "full"},
    ),
    "pp 2": Home(Layout(ranks=2, pp=2), (*_llama("embedding and head"), ("qwen3", "every linear"))),
    "pp 2, zero bubble": Home(
        Layout(ranks=2, pp=2),
        _llama("the first layer"),
        {"pipeline_schedule": "zero_bubble", "activation_checkpointing": "selective"},
    ),
    "ep 2": Home(Layout(ranks=2, ep=2), (("qwen3-moe", "attention"),)),
}


OTHERS = {
    "dynamic": Home(Layout(ranks=2), _llama("every linear"), dynamic=True),
    "tp 2, biased": Home(Layout(ranks=2, tp=2), (("biased", "every linear"),)),
    "tp 2, sequence parallel, tied": Home(Layout(ranks=2, tp=2), TIED, {"sequence_parallel": True}),
    "pp 2, the last layer": Home(Layout(ranks=2, pp=2), _llama("the last layer")),
    "pp 2, zero bubble, every linear": Home(
        Layout(ranks=2, pp=2), _llama("every linear"), {"pipeline_schedule": "zero_bubble"}
    ),
    "pp 2, interleaved": Home(Layout(ranks=2, pp=2), (("deep", "the last layer"),), {"virtual_stages": 2}),
    "dynamic, copies": Home(Layout(ranks=2), _llama("every linear"), {"shard_parameters": False}, dynamic=True),
    "pp 2, folded": Home(
        Layout(ranks=2, pp=2), (("deep", "every linear"),), {"virtual_stages": 2, "pipeline_schedule": "zbv"}
    ),
    "tp 2, experts": Home(Layout(ranks=2, tp=2), (("qwen3-moe", "attention"),)),
    "tp 2 of 4": Home(Layout(ranks=4, tp=2), (("biased", "every linear"),), {"sequence_parallel": True}),
    "free": Home(Layout(ranks=4), _llama("every linear", "the last layer"), dynamic=True, mode="free"),
    "pp 2 of 4": Home(Layout(ranks=4, pp=2), _llama("every linear")),
    "pp 2, tp 2": Home(Layout(ranks=4, pp=2, tp=2), _llama("every linear")),
    "replicas": Home(Layout(ranks=4, dp_replicate=2), _llama("every linear")),
}


def _plan(home: Home) -> Plan:
    if home.dynamic:
        return plan_dynamic(LENGTHS, home.layout, max_tokens_per_slot=22, mode=home.mode)
    rows = home.layout.tp if home.options.get("sequence_parallel") else 1
    return plan_fixed(LENGTHS, home.layout, cp=home.layout.slots, max_tokens_per_slot=40, row_multiple=rows)


def _compare(rank: int, names: tuple[str, ...]) -> dict[tuple[str, str, str], dict[str, float]]:
    found = dict[tuple[str, str, str], dict[str, float]]()
    for name in names:
        home = (HOMES | OTHERS)[name]
        with World(home.layout, backend=backend(), timeout=60) as world:
            for family, adapter in home.cases:
                found[name, family, adapter] = _errors(home, family, adapter, world, try_rows=not found)
    return found


def _errors(home: Home, family: str, adapter: str, world: World, *, try_rows: bool) -> dict[str, float]:
    loss, base_loss, gradients = dense_answer(family, adapter, world.device)
    norm = torch.stack([g.norm() for g in gradients.values()]).norm().item()
    peft_model, plan, documents = adapted(family, adapter), _plan(home), texts(LENGTHS)
    model = (prepare if try_rows else prepare_untried)(peft_model, world, **home.options)
    with without_adapter(model):
        reference = token_log_probs(model, plan, documents, world).sums.sum()
    result = run_step(model, plan, documents, world, loss_chunk_rows=7)
    assert result.grad_norm is not None
    local = gradients_of(model)
    here = gradients if home.layout.pp == 1 else {key: gradients[key] for key in local}
    assert local.keys() == here.keys()
    model.zero_grad()
    optimizer = build_optimizer(model, "adamw", lr=1e-3)
    run_step(model, plan, documents, world, optimizer=optimizer)
    with peft_model.disable_adapter():  # the adapter has changed, the base model has not
        later = run_step(model, plan, documents, world, backward=False).loss
    assert len(optimizer.state) == len(local)
    return {
        "loss": abs(result.loss / loss - 1),
        "norm": abs(result.grad_norm / norm - 1),
        "gradients": max((error(local[key], here[key]) for key in here), default=0.0),
        "base": max(abs(of_base / base_loss - 1) for of_base in (-reference / plan.targets, later)),
    }


@pytest.mark.whole  # those above show every term
@pytest.mark.timeout(320)
@pytest.mark.parametrize("ranks", [2, 4])
def test_other_homes_are_exact_too(ranks: int) -> None:
    names = tuple(name for name, home in OTHERS.items() if len(home.layout.ranks) == ranks)
    for found in run_ranks(_compare, ranks, names, timeout=300):
        assert {key[0] for key in found} == set(names)
        assert all(value <= 1e-12 for errors in found.values() for value in errors.values()), found


@cache
def _results() -> list[dict[tuple[str, str, str], dict[str, float]]]:
    return run_ranks(_compare, 2, tuple(HOMES), timeout=300)


@pytest.mark.timeout(320)
@pytest.mark.parametrize("name", HOMES)
def test_loss_gradients_and_the_base_model_are_those_of_one_process(name: str) -> None:
    for found in _results():
        of_home = {key: errors for key, errors in found.items() if key[0] == name}
        assert len(of_home) == len(HOMES[name].cases)
        assert all(value <= 1e-12 for errors in of_home.values() for value in errors.values()), of_home
