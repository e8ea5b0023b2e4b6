"""`run_step` through a pipeline: loss and every gradient equal one process in float64, for any schedule and plan."""

import os
import re
import signal
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from torch.distributed.fsdp import FSDPModule

from longspan.comm import World
from longspan.errors import CommError
from longspan.layout import Layout
from longspan.model.experts.router import RouterCoefficients
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.plan import Group, MicroBatch, Plan, plan_dynamic, plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import run_step
from tests.model.deep import Answer, answer, deep
from tests.model.stock import error, gradients_of, prepare_untried, texts
from tests.mutation import mutated

LENGTHS = (13, 1, 30, 7, 2, 18, 5, 9)
HOME = Layout(ranks=4, pp=2)
ROUTER = RouterCoefficients(balance=0.5, z=0.1)


def by_hand() -> Plan:
    """Slot 0 has a document of its own and a slice of another; then slot 0 has nothing; then neither has. Five
    micro-batches are one too few for two interleaved stages."""
    first = MicroBatch((Group((0,), (0,), (13,)), Group((1, 0), (2, 1), (30, 1)), Group((1,), (3,), (7,))))
    second = MicroBatch((Group((1,), (5, 4), (18, 2)),))
    third = MicroBatch((Group((0, 1), (6, 7), (5, 9), cp_comm_type=("p2p", "all_gather", "a2a", "p2p")),))
    return Plan(2, LENGTHS, (first, second, MicroBatch(), third, MicroBatch()), targets=sum(LENGTHS) - len(LENGTHS))


PLANS: dict[str, Callable[[Layout], Plan]] = {
    "some of cp 2": lambda home: plan_fixed(LENGTHS, home, cp=min(2, home.slots), max_tokens_per_slot=32 // home.slots),
    "dynamic": lambda home: plan_dynamic(LENGTHS, home, max_tokens_per_slot=40 // home.slots),
    "by hand, idle slots": lambda home: by_hand(),
    "one of cp 1": lambda home: plan_fixed(LENGTHS, home, cp=1),
}


@dataclass(frozen=True)
class Case:
    """A model in a pipeline: `kind` is copies, sharded (FSDP2), or recomputed (FSDP2 and activation checkpointing)."""

    family: str
    schedule: str
    vpp: int
    kind: str

    def prepared(self, world: World) -> PipelineModel:
        model = prepare_untried(
            deep(self.family, torch.float64),
            world,
            shard_parameters=self.kind != "copies",
            activation_checkpointing=self.kind == "recomputed",
            virtual_stages=self.vpp,
            pipeline_schedule=self.schedule,
        )
        assert isinstance(model, PipelineModel)
        return model


CASES = [
    Case("qwen3", "1f1b", 2, "recomputed"),
    Case("llama", "zero_bubble", 2, "recomputed"),
    Case("llama", "1f1b", 2, "sharded"),
    Case("llama", "zero_bubble", 2, "sharded"),
    Case("gpt-oss", "zero_bubble", 1, "sharded"),
    Case("gpt-oss", "1f1b", 2, "copies"),
    Case("qwen3-moe", "1f1b", 2, "sharded"),  # loads of routers are counted first; the embedding is tied
]
FEW = CASES[:2]  # both schedules; the others run with make test-all


def plans_of(case: Case, home: Layout) -> tuple[str, ...]:
    """That with idle slots and, in turn, one more; without slots to choose from, the others."""
    if home.slots == 1:
        return "some of cp 2", "dynamic", "one of cp 1"
    return "by hand, idle slots", ("dynamic", "some of cp 2")[CASES.index(case) % 2]


def _stock(cases: list[Case]) -> dict[str, Answer]:
    """What stock models of these cases' families say."""
    losses = {"balance": ROUTER.balance, "z": ROUTER.z}
    return {
        f: answer(deep(f, torch.float64), texts(LENGTHS), **losses if f in ("gpt-oss", "qwen3-moe") else {})
        for f in {case.family for case in cases}
    }


def _errors(model: PipelineModel, plan: Plan, wanted: Answer, world: World) -> dict[str, float]:
    """Of one step's loss, gradient norm and gradients of this rank's stages; infinite where one is missing."""
    documents = texts(LENGTHS)
    router = ROUTER if model.routers else None
    result = run_step(model, plan, documents, world, router=router)
    found, names = gradients_of(model), {name for name, _ in model.named_parameters()}
    worst = max(error(found[name], wanted.gradients[name]) for name in found) if found.keys() == names else np.inf
    assert result.grad_norm is not None
    model.zero_grad()
    return {
        "loss": abs(result.loss / wanted.loss - 1),
        "norm": abs(result.grad_norm / wanted.norm - 1),
        "gradients": worst,
    }


Found = dict[tuple[Case, str], dict[str, float]]


def _compare_plans(case: Case, model: PipelineModel, wanted: Answer, world: World) -> Found:
    """Each plan on the same stages, with an evaluation at degree 1 between the first and the others."""
    found, home = Found(), world.home
    for name in plans_of(case, home):
        found[case, name] = _errors(model, PLANS[name](home), wanted, world)
        if name == plans_of(case, home)[0]:
            wide = plan_fixed(LENGTHS, home, cp=1, max_tokens_per_slot=32)
            evaluated = run_step(model, wide, texts(LENGTHS), world, backward=False)
            found[case, name]["evaluation"] = abs(evaluated.loss / wanted.loss - 1)
    return found


def _compare(rank: int, home: Layout, cases: list[Case], wanted: dict[str, Answer]) -> Found:
    found = Found()
    with World(home, backend=backend(), timeout=60) as world:
        for case in cases:
            found |= _compare_plans(case, case.prepared(world), wanted[case.family], world)
    return found


FOUR = [Case("qwen3", "1f1b", 1, "sharded"), Case("llama", "zero_bubble", 1, "copies")]


@cache
def _results(few: bool) -> list[Found]:
    if few:
        return run_ranks(_few_and_more, 4, _stock(FEW), answer(_shared(), texts(LENGTHS)), timeout=240)
    others = [case for case in CASES if case not in FEW]
    return run_ranks(_compare, 4, HOME, others, _stock(others), timeout=240)


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=[pytest.mark.whole] * (case not in FEW)) for case in CASES]
)
def test_equals_one_process(case: Case) -> None:
    for results in _results(few=case in FEW):
        found = {plan: errors for (tested, plan), errors in results.items() if tested == case}
        assert found.keys() == set(plans_of(case, HOME))
        for plan, errors in found.items():
            assert max(errors.values()) < 1e-12, (plan, errors)


# ---- of one start: several steps, a shared layer, a plan that nobody chose, and what must not go unnoticed


def _gradients_add_up(model: PipelineModel, wanted: Answer, world: World) -> None:
    """Steps of one and five micro-batches without an optimizer, and an evaluation of another number after each, leave
    twice the gradients, of tied copies too. Every number of micro-batches has a schedule of its own."""
    documents, errors = texts(LENGTHS), list[float]()
    for steps, (name, rows) in enumerate((("one of cp 1", 80), ("by hand, idle slots", 22)), start=1):
        result = run_step(model, PLANS[name](HOME), documents, world)
        wide = plan_fixed(LENGTHS, HOME, cp=2, max_tokens_per_slot=rows)
        evaluated = run_step(model, wide, documents, world, backward=False)
        assert result.grad_norm is not None
        errors += [x.loss / wanted.loss - 1 for x in (result, evaluated)] + [result.grad_norm / wanted.norm / steps - 1]
    gradients, names = gradients_of(model), {name for name, _ in model.named_parameters()}
    errors += [error(gradient, 2 * wanted.gradients[name]) for name, gradient in gradients.items()]
    assert gradients.keys() == names and max(map(abs, errors)) < 1e-12, errors


def _shared() -> Any:
    """Three layers, of both stages, have one MLP, whose gradient is a sum over all."""
    model = deep("qwen3", torch.float64)
    model.model.layers[3].mlp = model.model.layers[2].mlp = model.model.layers[0].mlp
    return model


def _shared_layer(wanted: Answer, world: World) -> None:
    model = prepare_untried(_shared(), world, shard_parameters=False, pipeline_schedule="zero_bubble")
    for name in ("by hand, idle slots", "some of cp 2"):
        errors = _errors(model, PLANS[name](HOME), wanted, world)
        assert max(errors.values()) < 1e-12, (name, errors)


def _random_plan(draw: np.random.Generator) -> Plan:
    """Documents dealt over micro-batches, and in each to both slots in either order, or to one."""
    order, batches = draw.permutation(len(LENGTHS)), list[MicroBatch]()
    for part in np.array_split(order, draw.integers(1, 6)):
        groups = [
            Group(tuple(draw.permutation(2)[: draw.integers(1, 3)].tolist()), (int(d),), (LENGTHS[d],)) for d in part
        ]
        batches += [MicroBatch(tuple(groups))] + [MicroBatch()] * int(draw.random() < 0.2)
    return Plan(2, LENGTHS, tuple(batches), targets=sum(LENGTHS) - len(LENGTHS)).check()


def _random_plan_and_layers_that_reshard(model: PipelineModel, wanted: Answer, world: World) -> None:
    """A plan that nobody chose; then layers free their parameters after forward, as `prepare` leaves none under zero
    bubble, and their stage gathers them again before a backward pass in two parts. Without that, torch gives no error
    and the right loss, but loses gradients.
    """
    errors = _errors(model, _random_plan(np.random.default_rng(0)), wanted, world)
    assert max(errors.values()) < 1e-12, errors
    plan = PLANS["some of cp 2"](HOME)
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule) and ".layers." in name:
            module.set_reshard_after_forward(True)
    assert max(_errors(model, plan, wanted, world).values()) < 1e-12
    with mutated(("model.pipeline.schedules", "unshard(self.submod)", "pass")):
        errors = _errors(model, plan, wanted, world)
    assert max(world.control.gather_objects(max(errors.values()))) > 1e-2


def _few_and_more(rank: int, wanted: dict[str, Answer], of_shared: Answer) -> Found:
    found = Found()
    with World(HOME, backend=backend(), timeout=60) as world:
        _shared_layer(of_shared, world)
        for case, check_more in zip(FEW, (_gradients_add_up, _random_plan_and_layers_that_reshard), strict=True):
            model = case.prepared(world)
            found |= _compare_plans(case, model, wanted[case.family], world)
            check_more(model, wanted[case.family], world)
    return found


def test_sums_of_steps_shared_layers_random_plans_and_layers_that_reshard() -> None:
    _results(few=True)


@pytest.mark.whole
def test_four_stages() -> None:
    for found in run_ranks(_compare, 4, Layout(ranks=4, pp=4), FOUR, _stock(FOUR), timeout=240):
        assert len(found) == len(FOUR) * 3
        for (case, plan), errors in found.items():
            assert max(errors.values()) < 1e-12, (case, plan, errors)


# ---- a stage that dies


def _dies(rank: int) -> None:
    documents = texts(LENGTHS)
    with World(HOME, backend=backend(), timeout=30) as world:
        model = Case("llama", "1f1b", 1, "sharded").prepared(world)
        plan = PLANS["some of cp 2"](HOME)
        run_step(model, plan, documents, world, step=1)
        if rank == 3:
            model.run_micro_batches = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
        run_step(model, plan, documents, world, step=2)


@pytest.mark.skipif(backend() != "gloo", reason="NCCL ends a stuck process instead of raising in it")
def test_a_dead_stage_is_named_on_all_ranks() -> None:
    with pytest.raises(CommError, match="rank 3 of 4 was killed by signal 9") as raised:
        run_ranks(_dies, 4)
    said = [note for note in raised.value.__notes__ if re.search(r"of step 2 .*rank 3 does not answer", note)]
    assert len(said) == 3, raised.value.__notes__
    assert any("'pipeline of micro-batches' of step 2 between ranks (1, 3)" in note for note in said)
