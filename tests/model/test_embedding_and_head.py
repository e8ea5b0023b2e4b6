"""Embedding and head as groups of their own: one dense reference, FSDP2's bits, and whole only while they run."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from longspan import Layout, World, plan_dynamic, plan_fixed, run_step
from longspan.evaluation import evaluate
from longspan.model import add_mtp, sharding
from longspan.model.adapters.new_adapter import NewAdapter, add_lora
from longspan.model.fsdp_params import HookedParamGroup, fsdp_param_groups
from longspan.plan import Plan
from longspan.testing import backend, run_ranks
from longspan.train.loss import CrossEntropy
from tests.model.stock import answer, error, gradients_of, prepare_untried, texts, tiny, worst
from tests.mutation import Change, mutated

LENGTHS = (13, 2, 30, 7, 2, 18)
EXACT = 1e-12


@dataclass(frozen=True)
class Case:
    """A family (Llama's head is its own, Qwen3's the embedding), what is trained, a layout, and how a step is planned.
    """

    family: str = "llama"
    layout: Layout = field(default_factory=lambda: Layout(ranks=1))
    lora: tuple[str, ...] = ()
    plans: str = "lockstep"
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])
    depths: int = 0

    def plan(self) -> Plan:
        if self.plans == "dynamic":
            return plan_dynamic(LENGTHS, self.layout, max_tokens_per_slot=32)
        multiple = self.layout.tp if "sequence_parallel" in self.options else 1
        rows = 40 // self.layout.slots + multiple
        mode: Any = self.plans
        return plan_fixed(
            LENGTHS, self.layout, cp=self.layout.slots, max_tokens_per_slot=rows, row_multiple=multiple, mode=mode
        )

    def model(self, dtype: torch.dtype = torch.float64) -> Any:
        model: Any = tiny(self.family, dtype)
        if self.depths:
            add_mtp(model, self.depths, seed=3)
        if self.lora:
            model = add_lora(model, NewAdapter(rank=4, targets=self.lora))
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(5)
                for name, parameter in model.named_parameters():
                    if "lora_B" in name:
                        parameter.data.normal_(std=0.1)
        return model


LINEARS = ("q_proj", "up_proj")
CASES: Mapping[int, Mapping[str, Case]] = {
    1: {
        "all": Case(),
        "tied, all": Case("qwen3"),
        "an adapter": Case(lora=LINEARS),
        "tied, an adapter": Case("qwen3", lora=LINEARS),
        "an adapter of the head": Case(lora=(*LINEARS, "lm_head")),
        "tied, an adapter of the head": Case("qwen3", lora=(*LINEARS, "lm_head")),
        "free": Case(plans="free"),
    },
    2: {
        "all": Case(layout=Layout(ranks=2)),
        "an adapter": Case(layout=Layout(ranks=2), lora=LINEARS, plans="dynamic"),
        "tied, an adapter": Case("qwen3", Layout(ranks=2), LINEARS),
        "tied, free, an adapter": Case("qwen3", Layout(ranks=2), LINEARS, "free"),
        "free": Case(layout=Layout(ranks=2), plans="free"),
        "tp 2": Case(layout=Layout(ranks=2, tp=2), options={"sequence_parallel": True}),
        "tp 2, an adapter": Case(layout=Layout(ranks=2, tp=2), lora=LINEARS),
        "pp 2": Case(layout=Layout(ranks=2, pp=2)),
        "copies": Case(layout=Layout(ranks=2, dp_replicate=2)),
        "kept gathered": Case(layout=Layout(ranks=2), options={"reshard_after_forward": False}),
        "on the host, an adapter": Case(layout=Layout(ranks=2), lora=LINEARS, options={"offload_weights": True}),
        "on the host": Case(layout=Layout(ranks=2), options={"offload_weights": True}),
        "on the host, tied": Case("qwen3", Layout(ranks=2), LINEARS, options={"offload_weights": True}),
    },
    4: {
        "all": Case(layout=Layout(ranks=4), plans="dynamic"),
        "tied, an adapter": Case("qwen3", Layout(ranks=4), LINEARS, "dynamic"),
        "tp 2, cp 2": Case(layout=Layout(ranks=4, tp=2)),
        "pp 2, cp 2": Case(layout=Layout(ranks=4, pp=2), lora=LINEARS),
        "copies": Case(layout=Layout(ranks=4, dp_replicate=2), lora=LINEARS),
    },
}


def take_step(case: Case, world: World, dtype: torch.dtype = torch.float64) -> tuple[list[float], dict[str, Tensor]]:
    """The loss of a step and that of an evaluation, and the gradients."""
    model = prepare_untried(case.model(dtype), world, **case.options)
    result = run_step(model, case.plan(), texts(LENGTHS), world)
    held_out = plan_fixed(LENGTHS, world.home, cp=1, max_tokens_per_slot=32, row_multiple=2)
    return [result.loss, evaluate(model, texts(LENGTHS), held_out, world).loss], gradients_of(model)


def dense(case: Case) -> tuple[float, dict[str, Tensor]]:
    model = case.model()
    exact = answer(model, texts(LENGTHS))
    return exact.loss, {name.removeprefix("base_model.model."): g for name, g in exact.gradients.items()}


def _errors(rank: int, cases: Mapping[str, Case]) -> dict[str, float]:
    errors = dict[str, float]()
    for name, case in cases.items():
        loss, exact = dense(case)
        with World(case.layout, backend=backend(), timeout=60) as world:
            losses, gradients = take_step(case, world)
        if case.layout.pp > 1:  # each rank has its own stages' gradients
            exact = {key: x for key, x in exact.items() if key in gradients}
        errors[name] = max(worst(gradients, exact), *(abs(x - loss) for x in losses))
    return errors


@pytest.mark.parametrize("ranks", [1, *(pytest.param(ranks, marks=pytest.mark.whole) for ranks in (2, 4))])
def test_steps_and_evaluations_are_those_of_one_dense_process(ranks: int) -> None:
    for errors in run_ranks(_errors, ranks, CASES[ranks]):
        assert errors.keys() == CASES[ranks].keys() and all(x <= EXACT for x in errors.values()), errors
