"""`run_step` through a pipeline: loss, every gradient and steps of SGD equal one process, for any schedule and plan."""

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
from longspan.model import prepare
from longspan.model.experts.router import RouterCoefficients
from longspan.model.pipeline.pipeline import PipelineModel
from longspan.plan import Group, MicroBatch, Plan, plan_dynamic, plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer, run_step
from tests.model.deep import Answer, answer, deep, weights_after
from tests.model.stock import error, gradients_of, own_error, prepare_untried, texts, weights_of
from tests.mutation import mutated

LENGTHS = (13, 1, 30, 7, 2, 18, 5, 9)
HOME = Layout(ranks=4, pp=2)
ROUTER = RouterCoefficients(balance=0.5, z=0.1)
TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
LOSS = {torch.float64: 1e-12, torch.float32: 1e-6}


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
    dtype: torch.dtype = torch.float64

    def prepared(self, world: World, layers: int = 4, *, try_rows: bool = True) -> PipelineModel:
        model = (prepare if try_rows else prepare_untried)(
            deep(self.family, self.dtype, layers),
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
    Case("qwen3", "zero_bubble", 1, "copies"),
    Case("qwen3", "zbv", 2, "sharded"),
    Case("llama", "gpipe", 2, "recomputed"),
    Case("llama", "1f1b", 2, "sharded", torch.float32),
    Case("llama", "zero_bubble", 2, "sharded"),
    Case("llama", "zbv", 2, "recomputed", torch.float32),
    Case("gpt-oss", "zero_bubble", 1, "sharded"),
    Case("gpt-oss", "zbv", 2, "copies", torch.float32),
    Case("qwen3-moe", "1f1b", 2, "sharded"),  # loads of routers are counted first; the embedding is tied
]
FEW = CASES[:4]  # every schedule, whole plans; the others run with make test-all


def plans_of(case: Case, home: Layout) -> tuple[str, ...]:
    """Every plan for the first model of some schedules; for others that with idle slots and, in turn, one more."""
    names = tuple(name for name in PLANS if home.slots > 1 or not name.startswith("by hand"))
    alike = [other for other in CASES if (other.schedule, other.vpp) == (case.schedule, case.vpp)]
    if case not in alike[1:] and (home != HOME or case.schedule in ("1f1b", "zbv")):
        return names
    return "by hand, idle slots", tuple(PLANS)[alike.index(case) % 2]


@cache
def _stock(family: str, dtype: torch.dtype, device: torch.device) -> Answer:
    routed = family in ("gpt-oss", "qwen3-moe")
    losses = {"balance": ROUTER.balance, "z": ROUTER.z} if routed else {}
    return answer(deep(family, dtype), texts(LENGTHS), device, **losses)


def _tolerance(case: Case) -> float:
    """Of gradients: in float32 also twice the stock model's own error, of which each of two computations has one."""
    if case.dtype == torch.float64:
        return TOLERANCE[case.dtype]
    device = torch.device("cuda" if backend() == "nccl" else "cpu")
    single, exact = (_stock(case.family, dtype, device).gradients for dtype in (case.dtype, torch.float64))
    return max(TOLERANCE[case.dtype], 2 * own_error(single, exact))


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


def _compare(rank: int, home: Layout, cases: list[Case]) -> dict[tuple[Case, str], dict[str, float]]:
    """Each plan, with an evaluation at another degree, on the same stages, before the next."""
    found, tried = {}, set[str]()
    with World(home, backend=backend(), timeout=60) as world:
        for case in cases:
            wanted = _stock(case.family, case.dtype, world.device)
            model = case.prepared(world, try_rows=not tried)
            tried.add(case.family)
            for name in plans_of(case, home):
                errors = _errors(model, PLANS[name](home), wanted, world)
                degree = home.slots if "cp 1" in name else 1
                wide = plan_fixed(LENGTHS, home, cp=degree, max_tokens_per_slot=32)
                evaluated = run_step(model, wide, texts(LENGTHS), world, backward=False)
                found[case, name] = errors | {"evaluation": abs(evaluated.loss / wanted.loss - 1)}
    return found


FOUR = [Case("qwen3", "1f1b", 1, "sharded"), Case("llama", "zero_bubble", 1, "copies")]


@cache
def _results(few: bool) -> list[dict[tuple[Case, str], dict[str, float]]]:
    return run_ranks(_compare, 4, HOME, [case for case in CASES if (case in FEW) == few], timeout=240)


@pytest.mark.parametrize(
    "case", [pytest.param(case, id=str(case), marks=[pytest.mark.whole] * (case not in FEW)) for case in CASES]
)
def test_equals_one_process(case: Case) -> None:
    for results in _results(case in FEW):
        found = {plan: errors for (tested, plan), errors in results.items() if tested == case}
        assert found.keys() == set(plans_of(case, HOME)) and len(found) >= 2
        for plan, errors in found.items():
            assert max(errors["gradients"], errors["norm"]) < _tolerance(case), (plan, errors)
            assert max(errors["loss"], errors["evaluation"]) < LOSS[case.dtype], (plan, errors)


def _shared_layer(rank: int) -> dict[str, float]:
    """Three layers, of both stages, have one MLP, whose gradient is a sum over all."""

    def shared() -> Any:
        model = deep("llama", torch.float64)
        model.model.layers[3].mlp = model.model.layers[2].mlp = model.model.layers[0].mlp
        return model

    with World(Layout(ranks=2, pp=2), backend=backend()) as world:
        wanted = answer(shared(), texts(LENGTHS), world.device)
        model = prepare(shared(), world, shard_parameters=False, pipeline_schedule="zero_bubble")
        assert isinstance(model, PipelineModel)
        return _errors(model, plan_fixed(LENGTHS, world.home, cp=1, max_tokens_per_slot=40), wanted, world)


def test_a_weight_used_twice_on_a_stage_and_on_two() -> None:
    for errors in run_ranks(_shared_layer, 2):
        assert max(errors.values()) < 1e-12, errors


# ---- training


def _train(rank: int, cases: list[Case]) -> list[float]:
    """Three clipped steps of SGD on three batches, with an evaluation after each; the worst error of a weight."""
    batches = [texts(LENGTHS, seed) for seed in range(3)]
    found = []
    with World(HOME, backend=backend(), timeout=60) as world:
        for case in cases:
            wanted = weights_after(deep(case.family, case.dtype), batches, world.device, lr=0.5, max_norm=0.5)
            model = case.prepared(world)
            optimizer = build_optimizer(model, "sgd", 0.5)
            for i, documents in enumerate(batches):
                plan = list(PLANS.values())[i](HOME)
                run_step(model, plan, documents, world, optimizer, max_grad_norm=0.5)
                run_step(model, plan_fixed(LENGTHS, HOME, cp=2), documents, world, backward=False)
            own = weights_of(model)
            found.append(max(error(weight, wanted[name]) for name, weight in own.items()))
    return found


TRAINED = [Case("qwen3", "1f1b", 1, "sharded"), Case("qwen3", "zbv", 2, "copies"), Case("llama", "1f1b", 2, "sharded")]


SCHEDULES = [
    Case("qwen3", "1f1b", 2, "sharded"),
    Case("qwen3", "zbv", 2, "copies"),  # this and those that follow run with make test-all
    Case("qwen3", "gpipe", 1, "sharded"),
    Case("qwen3", "1f1b", 1, "sharded"),
    Case("qwen3", "zero_bubble", 2, "copies"),
    Case("qwen3", "zbv", 2, "sharded"),
]


def _gradients_add_up(rank: int, cases: list[Case]) -> dict[Case, float]:
    """Steps of one, five and three micro-batches without an optimizer, and an evaluation of another number after each,
    leave three times the gradients, of tied copies too. Every number of micro-batches has a schedule of its own."""
    found = {}
    documents = texts(LENGTHS)
    with World(HOME, backend=backend(), timeout=60) as world:
        for case in cases:
            wanted, model = (
                _stock(case.family, case.dtype, world.device).gradients,
                case.prepared(world, try_rows=False),
            )
            for name, rows in (("one of cp 1", 80), ("by hand, idle slots", 22), ("some of cp 2", 16)):
                run_step(model, PLANS[name](HOME), documents, world)
                wide = plan_fixed(LENGTHS, HOME, cp=2, max_tokens_per_slot=rows)
                run_step(model, wide, documents, world, backward=False)
            gradients, names = gradients_of(model), {name for name, _ in model.named_parameters()}
            errors = [error(gradient, 3 * wanted[name]) for name, gradient in gradients.items()]
            found[case] = max(errors) if gradients.keys() == names else np.inf
    return found


# ---- plans that nobody chose


def _random_plan(draw: np.random.Generator) -> Plan:
    """Documents dealt over micro-batches, and in each to both slots in either order, or to one."""
    order, batches = draw.permutation(len(LENGTHS)), list[MicroBatch]()
    for part in np.array_split(order, draw.integers(1, 6)):
        groups = [
            Group(tuple(draw.permutation(2)[: draw.integers(1, 3)].tolist()), (int(d),), (LENGTHS[d],)) for d in part
        ]
        batches += [MicroBatch(tuple(groups))] + [MicroBatch()] * int(draw.random() < 0.2)
    return Plan(2, LENGTHS, tuple(batches), targets=sum(LENGTHS) - len(LENGTHS)).check()


def _random_plans() -> list[float]:
    found, draw = [], np.random.default_rng(0)
    with World(HOME, backend=backend(), timeout=60) as world:
        wanted = _stock("qwen3", torch.float64, world.device)
        for schedule, vpp in (("zero_bubble", 2), ("zbv", 2)):
            model = Case("qwen3", schedule, vpp, "sharded").prepared(world, try_rows=False)
            found += list(_errors(model, _random_plan(draw), wanted, world).values())
    return found


# ---- what must not go unnoticed


def _reshards() -> tuple[float, float]:
    """Errors of a zero-bubble schedule over layers that free their parameters after forward, as `prepare` leaves none.

    And where their stage does not gather them again before a backward pass in two parts.
    """
    case = Case("llama", "zero_bubble", 2, "sharded")
    with World(HOME, backend=backend(), timeout=60) as world:
        wanted, model = _stock(case.family, case.dtype, world.device), case.prepared(world)
        plan = PLANS["some of cp 2"](HOME)
        for name, module in model.named_modules():
            if isinstance(module, FSDPModule) and ".layers." in name:
                module.set_reshard_after_forward(True)
        exact = max(_errors(model, plan, wanted, world).values())
        with mutated(("model.pipeline.schedules", "unshard(self.submod)", "pass")):
            return exact, max(_errors(model, plan, wanted, world).values())


Found = tuple[dict[Case, float], list[float], tuple[float, float]]  # of the next three


def _look(rank: int) -> Found:
    return (_gradients_add_up(rank, SCHEDULES[:1]), _random_plans(), _reshards())


@cache
def _found() -> list[Found]:
    return run_ranks(_look, 4, timeout=240)


@pytest.mark.whole
def test_four_stages() -> None:
    for found in run_ranks(_compare, 4, Layout(ranks=4, pp=4), FOUR, timeout=240):
        assert len(found) == len(FOUR) * 3
        for (case, plan), errors in found.items():
            assert max(errors.values()) < TOLERANCE[case.dtype], (case, plan, errors)


@pytest.mark.whole
def test_three_steps_of_sgd() -> None:
    for errors in run_ranks(_train, 4, TRAINED, timeout=240):
        assert max(errors) < 1e-12, errors


def test_gradients_add_up() -> None:
    for added_up, _, _ in _found():
        assert max(added_up.values()) < 1e-12, added_up


@pytest.mark.whole
def test_gradients_of_other_schedules_add_up() -> None:
    for added_up in run_ranks(_gradients_add_up, 4, SCHEDULES[1:], timeout=240):
        assert max(added_up.values()) < 1e-12, added_up


def test_random_plans_neither_hang_nor_differ() -> None:
    assert all(max(random_plans) < 1e-12 for _, random_plans, _ in _found())


def test_layers_that_reshard_lose_no_gradients() -> None:
    """Without a stage's own gathering, torch gives no error and the right loss, and loses gradients."""
    assert all(exact < 1e-12 for _, _, (exact, _) in _found())
    assert max(lost for _, _, (_, lost) in _found()) > 1e-2


# ---- stages that die or fail


def _dies(rank: int) -> None:
    documents = texts(LENGTHS)
    with World(HOME, backend=backend(), timeout=30) as world:
        model = Case("llama", "1f1b", 1, "sharded").prepared(world)
        plan = PLANS["some of cp 2"](HOME)
        run_step(model, plan, documents, world, step=1)
        if rank == 3:
            original = model.run

            def run(*args: Any, **kwargs: Any) -> None:
                os.kill(os.getpid(), signal.SIGKILL)
                original(*args, **kwargs)

            model.run = run  # pyright: ignore[reportAttributeAccessIssue]
        run_step(model, plan, documents, world, step=2)


@pytest.mark.skipif(backend() != "gloo", reason="NCCL ends a stuck process instead of raising in it")
def test_a_dead_stage_is_named_on_all_ranks() -> None:
    with pytest.raises(CommError, match="rank 3 of 4 was killed by signal 9") as raised:
        run_ranks(_dies, 4)
    said = [note for note in raised.value.__notes__ if re.search(r"of step 2 .*rank 3 does not answer", note)]
    assert len(said) == 3, raised.value.__notes__
    assert any("'pipeline of micro-batches' of step 2 between ranks (1, 3)" in note for note in said)


class _Broken(torch.nn.Module):
    def forward(self, *_: Any, **__: Any) -> Any:
        raise ValueError("boom")


def _fails(rank: int) -> None:
    with World(Layout(ranks=2, pp=2), backend=backend(), timeout=30) as world:
        model = Case("llama", "1f1b", 1, "sharded").prepared(world)
        if rank == 1:
            model.stages[0].model.base_model.norm = _Broken()
        run_step(model, plan_fixed(LENGTHS, world.home, cp=1), texts(LENGTHS), world)


@pytest.mark.skipif(backend() != "gloo", reason="NCCL ends a stuck process instead of raising in it")
def test_an_error_of_a_stage_is_raised_as_it_was_and_the_others_hear_of_it() -> None:
    with pytest.raises(ValueError, match="boom") as raised:
        run_ranks(_fails, 2)
    assert any("rank 1 left with ValueError: boom" in note for note in raised.value.__notes__), raised.value.__notes__
