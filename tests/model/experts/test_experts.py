"""Experts over the slots of a home equal the stock model: losses, gradients, weights after steps, saved weights."""

from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import AutoModelForCausalLM

from longspan.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from longspan.checkpoint.files import checkpoint_path
from longspan.comm import World
from longspan.comm.channel import Channel, Handle
from longspan.errors import ModelError, PlanError
from longspan.evaluation.evaluate import evaluate
from longspan.layout import Layout
from longspan.model import prepare, save_model
from longspan.plan import Group, MicroBatch, Plan, plan_dynamic, plan_fixed
from longspan.plan.shape.model_shape import ModelShape
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer, run_step
from tests.model.experts.moe_models import moe_answer, moe_config, moe_model
from tests.model.experts.test_moe import LENGTHS, PLANS, WEIGHTS, Case, Errors, compare, errors_of, gradients_of
from tests.model.stock import prepare_untried, texts, tiny, weights_of, worst

CASES: dict[Layout, list[Case]] = {
    Layout(ranks=2, ep=2): [
        ("gpt-oss", torch.float64, "sharded"),
        ("gpt-oss", torch.float32, "recomputed"),
        ("mixtral", torch.float64, "recomputed"),
        ("deepseek-v3", torch.float32, "recomputed"),
    ],
    Layout(ranks=4, ep=2): [("qwen3-moe", torch.float64, "recomputed"), ("gpt-oss", torch.float64, "recomputed")],
    Layout(ranks=4, ep=4): [("qwen3-moe", torch.float32, "sharded"), ("gpt-oss", torch.float64, "recomputed")],
    Layout(ranks=4, ep=2, dp_replicate=2): [("qwen3-moe", torch.float64, "selective")],
    Layout(ranks=4, ep=2, tp=2): [
        ("qwen3-moe", torch.float64, "sequence-parallel"),
        ("gpt-oss", torch.float64, "recomputed"),
    ],
    Layout(ranks=4, tp=2): [("qwen3-moe", torch.float64, "sequence-parallel"), ("gpt-oss", torch.float64, "copies")],
}

FEW = [  # the others run with make test-all
    (home, case)
    for home, cases in CASES.items()
    for case in (cases[::3] if len(home.ranks) == 2 else cases[:1])
    if home.ep > 1 and home.dp_replicate == 1
]
FAMILIES = ("qwen3-moe", "gpt-oss")
SEEDS = 2


def _plans(home: Layout, case: Case) -> tuple[str, ...]:
    """Three plans for the first case of four ranks; for the others that with idle slots and, in turn, one more."""
    crew = [(h, c) for h, cases in CASES.items() for c in cases if len(h.ranks) == len(home.ranks)]
    index, names = crew.index((home, case)), tuple(PLANS)
    return ("idle slots", names[index % 4]) if index or len(home.ranks) == 2 else names[1:3] + names[4:]


@cache
def _results(ranks: int, few: bool) -> list[dict[Layout, dict[tuple[Case, str], Errors]]]:
    homes = {home: [case for case in cases if ((home, case) in FEW) == few] for home, cases in CASES.items()}
    return run_ranks(_compare, ranks, {h: c for h, c in homes.items() if len(h.ranks) == ranks}, timeout=240)


def _compare(rank: int, homes: dict[Layout, list[Case]]) -> dict[Layout, dict[tuple[Case, str], Errors]]:
    """One crew of ranks goes through all its homes."""
    return {home: compare(rank, home, {case: _plans(home, case) for case in cases}) for home, cases in homes.items()}


ROWS = [
    pytest.param(home, case, id=f"{home}-{case}", marks=[pytest.mark.whole] * ((home, case) not in FEW))
    for home, cases in CASES.items()
    for case in cases
]


@pytest.mark.parametrize(("home", "case"), ROWS)
def test_equals_the_stock_model_with_experts_dealt_out(home: Layout, case: Case) -> None:
    for answer in _results(len(home.ranks), (home, case) in FEW):
        of_plans = {plan: errors for (of, plan), errors in answer[home].items() if of == case}
        assert of_plans.keys() == set(_plans(home, case)) and len(of_plans) >= 2
        assert all(errors.within(case[1]) for errors in of_plans.values()), of_plans


def random_plan(seed: int, slots: int) -> Plan:
    """Up to four micro-batches of groups of any slots, in any order, some slots in several groups, some in none."""
    draw = np.random.default_rng(seed)
    lengths = tuple(int(n) for n in draw.lognormal(2.0, 1.0, size=draw.integers(2, 12)).clip(1, 80))
    batches: list[list[Group]] = [[] for _ in range(draw.integers(1, 5))]
    for document, length in enumerate(lengths):
        members = tuple(draw.permutation(slots)[: draw.integers(1, slots + 1)].tolist())
        kind = str(draw.choice(["p2p", "all_gather"]))
        batches[draw.integers(len(batches))].append(Group(members, (document,), (length,), cp_comm_type=kind))
    return Plan(slots, lengths, tuple(MicroBatch(tuple(b)) for b in batches), targets=sum(lengths) - len(lengths))


def _random_plans(home: Layout) -> list[Errors]:
    results = []
    with World(home, backend=backend(), timeout=60) as world:
        model = prepare_untried(moe_model("gpt-oss", torch.float64), world, activation_checkpointing=True)
        for seed in range(SEEDS):
            plan = random_plan(seed, home.slots)
            documents = texts(plan.lengths, seed)
            stock = moe_answer(moe_model("gpt-oss", torch.float64), documents, WEIGHTS, world.device)
            results.append(
                errors_of(run_step(model, plan, documents, world, router=WEIGHTS), gradients_of(model), stock)
            )
            model.zero_grad()
    return results


def _trained(family: str) -> float:
    """Worst weight after three steps of SGD, against the stock model's."""
    with World(Layout(ranks=4, ep=2), backend=backend()) as world:
        model = prepare_untried(moe_model(family, torch.float64), world)
        stock = moe_model(family, torch.float64)
        optimizer, plain = build_optimizer(model, "sgd", lr=0.1), build_optimizer(stock, "sgd", lr=0.1)
        for step in range(3):
            documents = texts(LENGTHS, seed=step)
            plain.zero_grad()
            moe_answer(stock, documents, WEIGHTS, world.device)
            plain.step()
            plan = plan_dynamic(LENGTHS, world.home, max_tokens_per_slot=20)
            run_step(model, plan, documents, world, optimizer, router=WEIGHTS)
        return worst(weights_of(model), weights_of(stock))


def _saved(family: str, folder: Path) -> dict[str, torch.Tensor]:
    with World(Layout(ranks=4, ep=2), backend=backend()) as world:
        model = prepare_untried(moe_model(family, torch.float32), world)
        build_optimizer(model, "adamw", lr=0.1)
        save_model(model, folder / family, world)
        return weights_of(model)


def _saves(folder: Path) -> dict[str, torch.Tensor]:
    """Two steps of AdamW with experts dealt over 2 of 4 slots, saved; a third."""
    with World(Layout(ranks=4, ep=2), backend=backend()) as world:
        model, optimizer = _job(world)
        plan = plan_fixed(LENGTHS, world.home, cp=2)
        for step in range(2):
            run_step(model, plan, texts(LENGTHS, seed=step), world, optimizer, max_grad_norm=0.5, router=WEIGHTS)
        save_checkpoint(folder, model, optimizer, world, step=2, state={}, keep=0)
        run_step(model, plan, texts(LENGTHS, seed=2), world, optimizer, max_grad_norm=0.5, router=WEIGHTS)
        return weights_of(model)


def _goes_on(rank: int, folder: Path, home: Layout) -> dict[str, torch.Tensor]:
    """The third step in another home, from what was saved."""
    with World(home, backend=backend()) as world:
        model, optimizer = _job(world)
        load_checkpoint(checkpoint_path(folder, 2), model, optimizer, world)
        plan = plan_fixed(LENGTHS, world.home, cp=1)
        run_step(model, plan, texts(LENGTHS, seed=2), world, optimizer, max_grad_norm=0.5, router=WEIGHTS)
        return weights_of(model)


def _job(world: World) -> tuple[nn.Module, Optimizer]:
    model = prepare_untried(moe_model("gpt-oss", torch.float64), world)
    return model, build_optimizer(model, "adamw", lr=1e-2, weight_decay=0.1)


class Found(NamedTuple):
    """What one rank of a crew of four found; weights are the first rank's to tell."""

    random_plans: list[Errors]
    trained: float
    saved: dict[str, dict[str, torch.Tensor]]
    third_step: dict[str, torch.Tensor]


def _look(rank: int, folder: Path) -> Found:
    random_plans, trained = _random_plans(Layout(ranks=4, ep=2)), _trained("qwen3-moe")
    saved, third_step = {family: _saved(family, folder) for family in FAMILIES}, _saves(folder / "checkpoints")
    return Found(random_plans, trained, saved if rank == 0 else {}, third_step if rank == 0 else {})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("experts")


@pytest.fixture(scope="module")
def of_ranks(folder: Path) -> list[Found]:
    return run_ranks(_look, 4, folder, timeout=240)


def test_groups_of_any_slots_neither_wait_for_each_other_nor_differ(of_ranks: list[Found]) -> None:
    for of_rank in of_ranks:
        errors = of_rank.random_plans
        assert len(errors) == SEEDS and all(error.within(torch.float64) for error in errors), errors


def test_weights_after_three_steps(of_ranks: list[Found]) -> None:
    assert max(of_rank.trained for of_rank in of_ranks) < 1e-12


@pytest.mark.parametrize("family", FAMILIES)
def test_a_saved_model_holds_all_experts(family: str, folder: Path, of_ranks: list[Found]) -> None:
    gathered = of_ranks[0].saved[family]
    loaded = AutoModelForCausalLM.from_pretrained(folder / family)
    assert worst(weights_of(loaded), gathered) == worst(weights_of(moe_model(family, torch.float32)), gathered) == 0


def test_a_checkpoint_goes_on_in_homes_with_other_ep(folder: Path, of_ranks: list[Found]) -> None:
    for home in (Layout(ranks=1), Layout(ranks=4, ep=4)):
        gone_on = run_ranks(_goes_on, len(home.ranks), folder / "checkpoints", home)[0]
        assert worst(gone_on, of_ranks[0].third_step) < 1e-12


def _refused(rank: int) -> list[str]:
    results = []
    with World(Layout(ranks=3, ep=3), backend=backend()) as world:
        for model, sharded in (
            (moe_model("gpt-oss", torch.float32), True),
            (moe_model("gpt-oss", torch.float32), False),
            (tiny("qwen3"), True),
        ):
            with pytest.raises(ModelError) as caught:
                prepare(model, world, shard_parameters=sharded)
            results.append(str(caught.value))
    return results


def test_homes_that_do_not_suit_the_experts() -> None:
    for sizes, copies, dense in run_ranks(_refused, 3):
        assert "ep 3 does not divide the 8 experts of model.layers.0.mlp.experts; over 3 slots use ep 1" in sizes
        assert "ep 3, which needs sharded parameters" in copies and "Qwen3ForCausalLM has no experts" in dense


def test_free_mode_is_refused() -> None:
    with pytest.raises(PlanError, match="the home has ep 2: slots that share experts wait for each other"):
        plan_fixed(LENGTHS, Layout(ranks=4, ep=2), cp=2, mode="free")


def _numbers_to_experts(rank: int, checkpointing: str) -> tuple[int, int]:
    """The numbers that this rank sends to experts and back in a step and in an evaluation of documents of 8 rows."""
    sent = list[int]()
    original = Channel.all_to_all_rows

    def count_and_send(channel: Channel, x: Tensor, *arguments: Any) -> Handle:
        sent.append(x.numel())
        return original(channel, x, *arguments)

    with World(Layout(ranks=2, ep=2), backend=backend()) as world, pytest.MonkeyPatch.context() as patch:
        model = prepare_untried(moe_model("qwen3-moe", torch.float32), world, activation_checkpointing=checkpointing)
        plan = plan_fixed([8] * 4, world.home, cp=1, max_tokens_per_slot=16)
        patch.setattr(Channel, "all_to_all_rows", count_and_send)
        run_step(model, plan, texts([8] * 4), world)
        in_step = sum(sent)
        evaluate(model, texts([8] * 4), plan, world)
        return in_step, sum(sent) - in_step


@pytest.mark.parametrize("checkpointing", ["none", "full", "selective"])
def test_as_many_rows_travel_to_experts_as_are_priced(checkpointing: str) -> None:
    routed = ModelShape.of(moe_config("qwen3-moe")).routed_numbers
    again = 0 if checkpointing == "none" else 2
    in_steps, in_evaluations = zip(*run_ranks(_numbers_to_experts, 2, checkpointing), strict=True)
    assert sum(in_steps) == 32 * routed * (4 + again) and sum(in_evaluations) == 32 * routed * 2
