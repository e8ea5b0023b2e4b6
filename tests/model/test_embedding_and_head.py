"""Embedding and head as groups of their own: one dense reference, FSDP2's bits, and whole only while they run."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

from longspan import Layout, World, bind, plan_dynamic, plan_fixed, run_step
from longspan.evaluation import evaluate
from longspan.model import add_mtp, sharding
from longspan.model.adapters.new_adapter import NewAdapter, add_lora
from longspan.model.fsdp_params import HookedParamGroup, fsdp_param_groups
from longspan.plan import Plan
from longspan.testing import backend, run_ranks
from longspan.train import summed_cross_entropy
from tests.model.stock import answer, gradients_of, prepare_untried, texts, tiny, worst
from tests.mutation import Change, mutated

LENGTHS = (13, 2, 30, 7, 2, 18)
EXACT = 1e-12


@dataclass(frozen=True)
class Case:
    """A family (Llama's head is its own, Qwen3's is tied), what is trained, a layout, and how a step is planned."""

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


def _bits(rank: int) -> dict[str, bool]:
    """Two ranks add in one order, however parameters are grouped."""
    equal = dict[str, bool]()
    cases = {name: case for name, case in CASES[2].items() if case.layout.slots == 2}
    for name, case in cases.items():
        with World(case.layout, backend=backend(), timeout=60) as world:
            split = take_step(case, world, torch.float32)
            with patch.object(sharding, "embedding_and_head", lambda model: []):
                together = take_step(case, world, torch.float32)
        assert split[1].keys() == together[1].keys()
        equal[name] = split[0] == together[0] and all(torch.equal(split[1][key], x) for key, x in together[1].items())
    return equal


@pytest.mark.whole
def test_bits_are_those_of_one_group_with_the_root() -> None:
    assert all(all(equal.values()) for equal in run_ranks(_bits, 2))


# ---- where the weights are, and how often they are gathered

# Gathers of a micro-batch, by group. A loss of several chunks gathers its head once.
PLACES: Mapping[str, tuple[Case, dict[str, int]]] = {
    "all": (Case(layout=Layout(ranks=2)), {"head": 1}),
    "tied, all": (Case("qwen3", Layout(ranks=2)), {}),
    "an adapter": (Case(layout=Layout(ranks=2), lora=LINEARS), {"embedding": 1, "head": 1}),
    "tied, an adapter": (Case("qwen3", Layout(ranks=2), LINEARS), {"both": 2}),
    "on the host": (
        Case(layout=Layout(ranks=2), lora=LINEARS, options={"offload_weights": True}),
        {"embedding": 1, "head": 1},
    ),
}


def _gathers(case: Case, world: World) -> tuple[dict[str, int], set[str], int]:
    """Gathers of a step by group, the groups that a layer found whole, and the micro-batches."""
    model = prepare_untried(case.model(), world, **case.options)
    ends = {"embedding": model.get_input_embeddings(), "head": model.get_output_embeddings()}
    if ends["embedding"].weight is ends["head"].weight:
        ends = {"both": ends["embedding"]}
    groups: dict[Any, str] = {
        group: name
        for name, module in ends.items()
        if isinstance(module, sharding.FSDPModule)
        for group in fsdp_param_groups([module])
    }
    gathers, found_whole = Counter[str](), set[str]()
    unshard = HookedParamGroup.unshard

    def note_gather(group: Any, async_op: bool = False) -> None:
        was_there = group.is_gathering or group.is_unsharded
        unshard(group, async_op)
        if group in groups and group.is_gathering and not was_there:
            gathers[groups[group]] += 1

    def note_whole(*_: Any) -> None:
        found_whole.update(name for group, name in groups.items() if group.is_unsharded)

    for layer in model.model.layers:
        layer.register_forward_hook(note_whole)
        layer.register_full_backward_pre_hook(note_whole)
    plan = case.plan()
    with (
        patch.object(HookedParamGroup, "unshard", note_gather),
        patch("longspan.train.loss.rows_per_chunk", lambda *_: 3),
    ):
        run_step(model, plan, texts(LENGTHS), world)
    note_whole()
    return dict(gathers), found_whole, len(plan.micro_batches)


def _places(rank: int) -> list[str]:
    wrong = list[str]()
    with World(Layout(ranks=2), backend=backend(), timeout=60) as world:
        for name, (case, expected) in PLACES.items():
            gathers, found_whole, passes = _gathers(case, world)
            assert passes > 1
            if found_whole or gathers != {key: count * passes for key, count in expected.items()}:
                wrong.append(f"{name}: {gathers} in {passes} passes, whole while layers run: {found_whole}")
    return wrong


def test_each_is_gathered_once_a_pass_and_is_not_there_while_layers_run() -> None:
    assert run_ranks(_places, 2) == [[], []]


# ---- further uses of embedding and head


def _logits_with_a_gradient(rank: int) -> list[float]:
    """A caller's loss of logits, whose backward pass needs the head again, before and after a step."""
    errors = list[float]()
    documents = texts([16])
    (ids,) = map(torch.from_numpy, documents)
    for family, lora in (("llama", ()), ("llama", LINEARS), ("qwen3", LINEARS)):
        case = Case(family, Layout(ranks=2), lora)
        exact = answer(case.model(), documents)
        gradients = {name.removeprefix("base_model.model."): g for name, g in exact.gradients.items()}
        with World(case.layout, backend=backend(), timeout=60) as world:
            model = prepare_untried(case.model(), world)
            plan = plan_fixed([16], world.home, cp=2)
            for _ in range(2):
                shard = bind(plan.micro_batches[0], world)
                rows = shard.scatter(ids).to(world.device)
                labels = shard.scatter(torch.cat([ids[1:], torch.tensor([-100])]), fill=-100).to(world.device)
                logits = model(input_ids=rows[None], position_ids=shard.position_ids[None], shard=shard).logits[0]
                (summed_cross_entropy(logits, labels) / plan.targets).backward()
                errors.append(worst(gradients_of(model), gradients))
                model.zero_grad()
                run_step(model, plan, documents, world)
                errors.append(worst(gradients_of(model), gradients))
                model.zero_grad()
    return errors


def test_a_callers_loss_of_logits_gathers_the_head_for_its_backward_pass() -> None:
    for errors in run_ranks(_logits_with_a_gradient, 2):
        assert len(errors) == 12 and max(errors) <= EXACT, errors


MUTATIONS: dict[str, Change] = {
    "a head that is not gathered": ("model.fsdp_params", "group.gather_for_loss()", "pass"),
    "a head that stays": ("model.fsdp_params", "group.free_after_loss()", "pass"),
    "an embedding that is gathered for backward": (
        "model.fsdp_params",
        "group.unshard_in_backward = False",
        "group.unshard_in_backward = True",
    ),
    "sums of a part of the gradients": (
        "model.fsdp_params",
        "if len(complete) == count and",
        "if len(complete) == 1 < count and",
    ),
    "a head that a caller's backward pass lacks": (
        "model.fsdp_params",
        "group.unshard_in_backward = state._training_state != TrainingState.PRE_BACKWARD",
        "pass",
    ),
}


def _mutated(rank: int, name: str) -> bool:
    """Whether a test notices; a pass over freed memory is an error of torch."""
    with mutated(MUTATIONS[name]):
        try:
            adapted_head = Case(layout=Layout(ranks=2), lora=(*LINEARS, "lm_head"))
            wrong = _places(rank) or _errors(rank, {"": adapted_head})[""] > EXACT
            return bool(wrong) or max(_logits_with_a_gradient(rank)) > EXACT
        except (AssertionError, RuntimeError):
            return True


@pytest.mark.whole
@pytest.mark.parametrize("name", MUTATIONS)
def test_other_times_of_gathers_are_noticed(name: str) -> None:
    assert all(run_ranks(_mutated, 2, name))
