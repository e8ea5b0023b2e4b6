"""`run_step` through a pipeline: loss and every gradient equal one process in float64, for any schedule and plan."""

import os
import re
import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
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
from tests import parity
from tests.model.deep import answer, deep
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


Row = tuple[str, str, int, str]  # a family, a schedule, virtual stages; copies, sharded, or recomputed (both)
CASES: list[Row] = [
    ("qwen3", "1f1b", 2, "recomputed"),
    ("llama", "zero_bubble", 2, "recomputed"),
    ("llama", "1f1b", 2, "sharded"),
    ("llama", "zero_bubble", 2, "sharded"),
    ("gpt-oss", "zero_bubble", 1, "sharded"),
    ("gpt-oss", "1f1b", 2, "copies"),
    ("qwen3-moe", "1f1b", 2, "sharded"),  # loads of routers are counted first; the embedding is tied
]
FEW = CASES[:2]  # both schedules; the others run with make test-all
FOUR: list[Row] = [("qwen3", "1f1b", 1, "sharded"), ("llama", "zero_bubble", 1, "copies")]


def _plans(row: Row, home: Layout) -> tuple[str, ...]:
    """That with idle slots and, in turn, one more; without slots to choose from, the others."""
    if home.slots == 1:
        return "some of cp 2", "dynamic", "one of cp 1"
    return "by hand, idle slots", ("dynamic", "some of cp 2")[CASES.index(row) % 2]


def case_of(row: Row, home: Layout = HOME) -> parity.Case:
    """Each plan on the same stages, with an evaluation at degree 1 after it."""
    family, schedule, vpp, kind = row
    with_routers = family in ("gpt-oss", "qwen3-moe")
    losses = {"balance": ROUTER.balance, "z": ROUTER.z} if with_routers else {}
    return parity.Case(
        partial(deep, family, torch.float64),
        home,
        {name: PLANS[name](home) for name in _plans(row, home)},
        texts(LENGTHS),
        answer(deep(family, torch.float64), texts(LENGTHS), **losses),
        options={
            "shard_parameters": kind != "copies",
            "activation_checkpointing": kind == "recomputed",
            "virtual_stages": vpp,
            "pipeline_schedule": schedule,
        },
        step={"router": ROUTER} if with_routers else {},
        evaluation=plan_fixed(LENGTHS, home, cp=1, max_tokens_per_slot=32),
    )


@pytest.mark.whole
@pytest.mark.parametrize("family", dict.fromkeys(row[0] for row in CASES if row not in FEW))
def test_equals_one_process(family: str) -> None:
    parity.check({row: case_of(row) for row in CASES if row not in FEW and row[0] == family})


@pytest.mark.whole
def test_four_stages() -> None:
    parity.check({row: case_of(row, Layout(ranks=4, pp=4)) for row in FOUR})


# ---- of one start: several steps, a shared layer, a plan that nobody chose, and what must not go unnoticed


def _gradients_add_up(case: parity.Case, model: PipelineModel, world: World) -> None:
    """Steps of one and five micro-batches without an optimizer, and an evaluation of another number after each, leave
    twice the gradients, of tied copies too. Every number of micro-batches has a schedule of its own."""
    documents, wanted, errors = case.documents, case.exact, list[float]()
    norm = torch.cat([gradient.flatten() for gradient in wanted.gradients.values()]).norm().item()
    for steps, (name, rows) in enumerate((("one of cp 1", 80), ("by hand, idle slots", 22)), start=1):
        result = run_step(model, PLANS[name](HOME), documents, world)
        wide = plan_fixed(LENGTHS, HOME, cp=2, max_tokens_per_slot=rows)
        evaluated = run_step(model, wide, documents, world, backward=False)
        assert result.grad_norm is not None
        errors += [x.loss / wanted.loss - 1 for x in (result, evaluated)] + [result.grad_norm / norm / steps - 1]
    gradients, names = gradients_of(model), {name for name, _ in model.named_parameters()}
    errors += [error(gradient, 2 * wanted.gradients[name]) for name, gradient in gradients.items()]
    assert gradients.keys() == names and max(map(abs, errors)) < 1e-12, errors


def _shared() -> Any:
    """Three layers, of both stages, have one MLP, whose gradient is a sum over all."""
    model = deep("qwen3", torch.float64)
    model.model.layers[3].mlp = model.model.layers[2].mlp = model.model.layers[0].mlp
    return model


def _check_plans(case: parity.Case, model: Any, world: World) -> None:
    for name, plan in case.plans.items():
        errors, _ = parity.step_errors(case, model, plan, world)
        assert errors.within(parity.WIDE), (name, errors)


def _random_plan(draw: np.random.Generator) -> Plan:
    """Documents dealt over micro-batches, and in each to both slots in either order, or to one."""
    order, batches = draw.permutation(len(LENGTHS)), list[MicroBatch]()
    for part in np.array_split(order, draw.integers(1, 6)):
        groups = [
            Group(tuple(draw.permutation(2)[: draw.integers(1, 3)].tolist()), (int(d),), (LENGTHS[d],)) for d in part
        ]
        batches += [MicroBatch(tuple(groups))] + [MicroBatch()] * int(draw.random() < 0.2)
    return Plan(2, LENGTHS, tuple(batches), targets=sum(LENGTHS) - len(LENGTHS)).check()


def _random_plan_and_layers_that_reshard(case: parity.Case, model: PipelineModel, world: World) -> None:
    """A plan that nobody chose; then layers free their parameters after forward, as `prepare` leaves none under zero
    bubble, and their stage gathers them again before a backward pass in two parts. Without that, torch gives no error
    and the right loss, but loses gradients.
    """
    _check_plans(replace(case, plans={"random": _random_plan(np.random.default_rng(0))}), model, world)
    again = replace(case, plans={"some of cp 2": PLANS["some of cp 2"](HOME)}, evaluation=None)
    for name, module in model.named_modules():
        if isinstance(module, FSDPModule) and ".layers." in name:
            module.set_reshard_after_forward(True)
    _check_plans(again, model, world)
    with mutated(("model.pipeline.schedules", "unshard(self.submod)", "pass")):
        errors, _ = parity.step_errors(again, model, again.plans["some of cp 2"], world)
    assert max(world.control.gather_objects(max(errors))) > 1e-2


def _few_and_more(rank: int, shared: parity.Case, cases: Sequence[parity.Case]) -> None:
    with World(HOME, backend=backend(), timeout=60) as world:
        _check_plans(shared, shared.prepared(world), world)
        for case, check_more in zip(cases, (_gradients_add_up, _random_plan_and_layers_that_reshard), strict=True):
            model: Any = case.prepared(world)
            _check_plans(case, model, world)
            check_more(case, model, world)


def test_few_of_them_sums_of_steps_shared_layers_random_plans_and_layers_that_reshard() -> None:
    plans = {"by hand, idle slots": by_hand()}
    exact = answer(_shared(), texts(LENGTHS))
    options = {"shard_parameters": False, "pipeline_schedule": "zero_bubble"}
    shared = parity.Case(_shared, HOME, plans, texts(LENGTHS), exact, options=options)
    run_ranks(_few_and_more, 4, shared, [case_of(row) for row in FEW], timeout=240)


# ---- a stage that dies


def _dies(rank: int) -> None:
    documents = texts(LENGTHS)
    with World(HOME, backend=backend(), timeout=30) as world:
        model = prepare_untried(deep("llama", torch.float64), world)
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
