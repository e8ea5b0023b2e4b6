"""Mixtures of experts under every home equal the stock model document by document: losses, those of routers too,
gradients, weights after steps, and what is saved."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from transformers import AutoModelForCausalLM

from longspan.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from longspan.checkpoint.files import checkpoint_path
from longspan.comm import World, bind
from longspan.comm.channel import Channel, Handle
from longspan.errors import ModelError, PlanError
from longspan.evaluation.live import evaluate
from longspan.layout import Layout
from longspan.model import prepare, save_model
from longspan.model.experts.expert_products import ExpertLoads, run_experts
from longspan.model.experts.moe import IMPLEMENTATION, ExpertFeature
from longspan.model.experts.router import RouterCoefficients
from longspan.model.experts.visits import Visits
from longspan.model.feature import Call
from longspan.model.options import PrepareOptions
from longspan.plan import Group, MicroBatch, Plan, plan_dynamic, plan_fixed, plan_padded
from longspan.plan.shape.model_shape import ModelShape
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer, run_step
from tests import parity
from tests.model.experts.moe_models import moe_answer, moe_config, moe_model
from tests.model.stock import gradients_of, prepare_untried, texts, tiny, weights_of, worst

LENGTHS = (13, 1, 30, 7, 2, 18)
WEIGHTS = RouterCoefficients(balance=0.5, z=0.1)
NONE = RouterCoefficients(balance=0.0)


def idle_slots(home: Layout) -> Plan:
    """Slot 1 has nothing in the first micro-batch, the last one is a dummy for all."""
    everyone = tuple(range(home.slots))
    first = MicroBatch((Group((0,), (0, 1), (13, 1)),))
    second = MicroBatch((Group(everyone[::-1], (2, 3), (30, 7)), Group((0,), (4,), (2,)), Group((1,), (5,), (18,))))
    return Plan(home.slots, LENGTHS, (first, second, MicroBatch()), targets=sum(LENGTHS) - len(LENGTHS))


PLANS: dict[str, Callable[[Layout], Plan]] = {
    "cp 1": lambda home: plan_fixed(LENGTHS, home, cp=1),
    "cp 2, a few rows at a time": lambda home: plan_fixed(LENGTHS, home, cp=2, max_tokens_per_slot=16),
    "dynamic": lambda home: plan_dynamic(LENGTHS, home, max_tokens_per_slot=20),
    "padded": lambda home: plan_padded(LENGTHS, home, cp=2, max_tokens_per_slot=32),
    "idle slots": idle_slots,
}
Case = tuple[str, torch.dtype, str]  # family, dtype, and what becomes of parameters and activations
IN_CI: dict[Layout, dict[Case, tuple[str, ...]]] = {  # DeepSeek-V3's router computes in float32 always
    Layout(ranks=2): {("qwen3-moe", torch.float64, "recomputed"): ("idle slots",)},
    Layout(ranks=2, ep=2): {
        ("gpt-oss", torch.float64, "sharded"): ("idle slots",),
        ("deepseek-v3", torch.float32, "recomputed"): ("dynamic",),
    },
}
OTHERS: dict[Layout, dict[Case, tuple[str, ...]]] = {  # with make test-all
    Layout(ranks=2): {("gpt-oss", torch.float64, "selective"): ("cp 2, a few rows at a time",)},
    Layout(ranks=4, ep=2): {("qwen3-moe", torch.float64, "recomputed"): ("idle slots",)},
    Layout(ranks=4, ep=2, dp_replicate=2): {("qwen3-moe", torch.float64, "selective"): ("idle slots", "cp 1")},
    Layout(ranks=4, ep=2, tp=2): {("gpt-oss", torch.float64, "recomputed"): ("idle slots", "dynamic")},
    Layout(ranks=4, tp=2): {
        ("qwen3-moe", torch.float64, "sequence-parallel"): ("idle slots", "dynamic"),
        ("gpt-oss", torch.float64, "copies"): ("idle slots", "padded"),
    },
}


def _case(home: Layout, case: Case, plans: tuple[str, ...]) -> parity.Case:
    family, dtype, kind = case
    weights = NONE if family == "deepseek-v3" else WEIGHTS  # the losses of its routers are not known
    exact = moe_answer(moe_model(family, dtype), texts(LENGTHS), weights)
    return parity.Case(
        partial(moe_model, family, dtype),
        home,
        {name: replace(PLANS[name](home), row_multiple=home.tp) for name in plans},
        texts(LENGTHS),
        exact,
        parity.WIDE if dtype == torch.float64 else parity.SINGLE,
        {
            "shard_parameters": kind != "copies",
            "activation_checkpointing": "selective" if kind == "selective" else kind == "recomputed",
            "sequence_parallel": kind == "sequence-parallel",
        },
        {"router": weights},
        {} if weights is NONE else exact.more,
        tried=home == Layout(ranks=2) and family == "qwen3-moe",
    )


@pytest.mark.parametrize("homes", parity.by_ranks({"few": IN_CI, "others": OTHERS}))
def test_equals_the_stock_model(homes: dict[Layout, dict[Case, tuple[str, ...]]]) -> None:
    rows = [(home, case, plans) for home, cases in homes.items() for case, plans in cases.items()]
    parity.check({(home, case): _case(home, case, plans) for home, case, plans in rows})


# ---- weights after steps, and what is saved


class Trained(NamedTuple):
    """The worst weight after a step of SGD beside the stock model; what was saved; a second step in each home."""

    error: float
    saved: dict[str, dict[str, Tensor]]
    second_steps: list[dict[str, Tensor]]


def _trained(rank: int, folder: Path) -> Trained:
    with World(Layout(ranks=2, ep=2), backend=backend()) as world:
        model, stock = (moe_model("qwen3-moe", torch.float64) for _ in range(2))
        model = prepare_untried(model, world)
        optimizer, plain = build_optimizer(model, "sgd", lr=0.1), build_optimizer(stock, "sgd", lr=0.1)
        moe_answer(stock, texts(LENGTHS), WEIGHTS, world.device)
        plain.step()
        plan = plan_dynamic(LENGTHS, world.home, max_tokens_per_slot=20)
        run_step(model, plan, texts(LENGTHS), world, optimizer, router=WEIGHTS)
        saved = {"qwen3-moe": weights_of(model)}
        save_model(model, folder / "qwen3-moe", world)
        error = worst(saved["qwen3-moe"], weights_of(stock))
        model, optimizer = _job(world)
        _step(model, optimizer, world, 0, cp=2)
        save_checkpoint(folder / "checkpoints", model, optimizer, world, step=1, state={}, keep=0)
        save_model(model, folder / "gpt-oss", world)
        saved["gpt-oss"] = weights_of(model)
        _step(model, optimizer, world, 1, cp=2)
        second_steps = [weights_of(model)]
    with World(Layout(ranks=2, dp_replicate=2), backend=backend()) as world:
        model, optimizer = _job(world)
        load_checkpoint(checkpoint_path(folder / "checkpoints", 1), model, optimizer, world)
        _step(model, optimizer, world, 1, cp=1)
        second_steps.append(weights_of(model))
    return Trained(error, saved, second_steps)


def _job(world: World) -> tuple[nn.Module, Optimizer]:
    model = prepare_untried(moe_model("gpt-oss", torch.float64), world)
    return model, build_optimizer(model, "adamw", lr=1e-2, weight_decay=0.1)


def _step(model: nn.Module, optimizer: Optimizer, world: World, step: int, cp: int) -> None:
    plan = plan_fixed(LENGTHS, world.home, cp=cp)
    run_step(model, plan, texts(LENGTHS, seed=step), world, optimizer, max_grad_norm=0.5, router=WEIGHTS)


def test_weights_after_steps_are_saved_whole_and_go_on_in_homes_with_other_ep(tmp_path: Path) -> None:
    error, saved, (second_step, other) = run_ranks(_trained, 2, tmp_path, timeout=240)[0]
    assert error < 1e-12
    for family, gathered in saved.items():
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / family, dtype=torch.float64)
        assert worst(weights_of(loaded), gathered) == 0, family
    assert worst(other, second_step) < 1e-12


# ---- losses of routers by default, what is refused, and what is sent


def test_losses_of_routers_come_from_the_configuration(world: World) -> None:
    documents, plan, losses = texts(LENGTHS), plan_fixed(LENGTHS, Layout(ranks=1), cp=1), []
    shard = bind(plan.micro_batches[0], world)
    for with_logits, weight in ((False, 0.0), (True, 0.25)):
        stock = moe_model("qwen3-moe", torch.float64)
        stock.config.output_router_logits, stock.config.router_aux_loss_coef = with_logits, 0.25
        coefficients = replace(NONE, balance=weight)
        expected = moe_answer(moe_model("qwen3-moe", torch.float64), documents, coefficients, world.device)
        model = prepare(stock, world, shard_parameters=False)
        result = run_step(model, plan, documents, world)
        errors = parity.errors_of(result, gradients_of(model), expected, more=expected.more)
        assert errors.within(parity.WIDE), errors
        losses += [result.router, run_step(model, plan, documents, world, backward=False).router]
        with pytest.raises(ModelError, match="got output_router_logits=: a loss of the local rows"):
            ids = torch.zeros_like(shard.position_ids)
            model(input_ids=ids, position_ids=shard.position_ids, shard=shard, output_router_logits=True)
    assert losses[0] is not None and losses[0].balance > 1 and losses == losses[:1] * 4
    for other in (prepare(tiny("qwen3"), world), prepare(moe_model("deepseek-v3", torch.float32), world)):
        assert run_step(other, plan, documents, world).router is None
        with pytest.raises(ModelError, match="has no routers whose losses are known; set the balance and z"):
            run_step(other, plan, documents, world, router=WEIGHTS)


NOT_DEALT = [
    ("gpt-oss", True, "ep 3 does not divide the 8 experts of model.layers.0.mlp.experts; over 3 slots use ep 1"),
    ("gpt-oss", False, "ep 3, which needs sharded parameters"),
    ("", True, "Qwen3ForCausalLM has no experts"),
]


def test_homes_and_calls_that_do_not_suit_the_experts() -> None:
    world: Any = SimpleNamespace(home=Layout(ranks=3, ep=3))
    for family, sharded, message in NOT_DEALT:
        model = moe_model(family, torch.float32) if family else tiny("qwen3")
        feature = ExpertFeature(Call(model, model, world, PrepareOptions(shard_parameters=sharded)))
        with pytest.raises(ModelError, match=message):
            feature.refuse(model)
    with pytest.raises(
        PlanError, match="the home has ep 2: slots that share experts or a pipeline wait for each other"
    ):
        plan_fixed(LENGTHS, Layout(ranks=4, ep=2), cp=2, mode="free")
    model = moe_model("qwen3-moe", torch.float32)
    model.set_experts_implementation(IMPLEMENTATION)
    with pytest.raises(ModelError, match=r"Qwen3MoeExperts got no shard.*call model\(..., shard=shard\)"):
        model(input_ids=torch.zeros(1, 2, dtype=torch.long))


@pytest.mark.parametrize("family", ("qwen3-moe", "gpt-oss"))  # the latter has biases
def test_experts_without_rows_read_no_counts_and_give_zeros(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    experts = next(m for m in moe_model(family, torch.float32).modules() if hasattr(m, "gate_up_proj"))
    x = torch.zeros(0, moe_config(family).hidden_size, requires_grad=True)
    monkeypatch.setattr(ExpertLoads, "host_counts", None)
    loads = ExpertLoads(torch.zeros(int(experts.num_experts), dtype=torch.int64))
    visits = Visits.from_order(torch.zeros(0, dtype=torch.int64), 1)
    with torch.autocast("cpu", torch.bfloat16):
        assert run_experts(experts, x, loads, visits).dtype == torch.bfloat16, "as the rows of other members have it"
    out = run_experts(experts, x, loads, visits)
    out.sum().backward()
    assert out.shape == x.shape and x.grad is not None and x.grad.shape == x.shape
    gradients = {name: weight.grad for name, weight in experts.named_parameters()}
    assert len(gradients) == (4 if family == "gpt-oss" else 2)
    assert all(gradient is not None and not gradient.any() for gradient in gradients.values()), gradients


def _numbers_to_experts(rank: int) -> dict[str, tuple[int, int]]:
    """The numbers that this rank sends to experts and back in a step and in an evaluation of documents of 8 rows."""
    sent, numbers = list[int](), dict[str, tuple[int, int]]()
    original = Channel.all_to_all_rows

    def count_and_send(channel: Channel, x: Tensor, *arguments: Any) -> Handle:
        sent.append(x.numel())
        return original(channel, x, *arguments)

    with World(Layout(ranks=2, ep=2), backend=backend()) as world, pytest.MonkeyPatch.context() as patch:
        patch.setattr(Channel, "all_to_all_rows", count_and_send)
        plan = plan_fixed([8] * 4, world.home, cp=1, max_tokens_per_slot=16)
        for checkpointing in ("none", "selective"):
            model = moe_model("qwen3-moe", torch.float32)
            model = prepare_untried(model, world, activation_checkpointing=checkpointing)
            sent.clear()
            run_step(model, plan, texts([8] * 4), world)
            in_step = sum(sent)
            evaluate(model, texts([8] * 4), plan, world)
            numbers[checkpointing] = in_step, sum(sent) - in_step
    return numbers


def test_as_many_rows_travel_to_experts_as_are_priced() -> None:
    routed, of_ranks = ModelShape.of(moe_config("qwen3-moe")).routed_numbers, run_ranks(_numbers_to_experts, 2)
    for checkpointing, again in (("none", 0), ("selective", 2)):
        in_steps, in_evaluations = zip(*(numbers[checkpointing] for numbers in of_ranks), strict=True)
        assert sum(in_steps) == 32 * routed * (4 + again) and sum(in_evaluations) == 32 * routed * 2, checkpointing
