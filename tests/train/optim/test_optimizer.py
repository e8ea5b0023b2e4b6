"""Optimizers by name, their arguments and learning rates, what weight decay applies to, and trials on shards."""

import math
import re
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from longspan.checkpoint.checkpoint import setting_names_by_parameter
from longspan.comm import World
from longspan.config.sections import OptimizerSection
from longspan.errors import ConfigError
from longspan.layout import Layout
from longspan.model import load_model, prepare
from longspan.testing import backend, run_ranks
from longspan.train.optim.optimizer import OptimizerChoice, build_optimizer
from longspan.train.optim.optimizer_classes import optimizer_class
from longspan.train.optim.parameter_groups import has_weight_decay, parameter_groups
from longspan.train.optim.schedule import Schedule
from longspan.train.optim.sharded_trial import check_sharded_update
from tests.model.deep import deep


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Embedding(5, 4), nn.LayerNorm(4), nn.Linear(4, 3))


def test_decay_is_for_matrices_alone() -> None:
    model = small()
    optimizer = build_optimizer(model, "adamw", lr=0.1, weight_decay=0.5, betas=(0.8, 0.9))
    decayed = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    assert decayed == {id(p): 0.5 if p.ndim == 2 else 0.0 for p in model.parameters()}
    assert all(group["betas"] == (0.8, 0.9) and group["lr"] == 0.1 for group in optimizer.param_groups)
    experts = deep("gpt-oss", torch.float32, layers=1)
    optimizer = build_optimizer(experts, "adamw", weight_decay=0.5)
    decayed = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    spared = {name.removeprefix("model.") for name, p in experts.named_parameters() if decayed[id(p)] == 0}
    layer = {"self_attn.sinks", "input_layernorm.weight", "post_attention_layernorm.weight", "mlp.router.bias"}
    layer |= {f"self_attn.{name}_proj.bias" for name in "qkvo"}
    layer |= {"mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias"}
    assert spared == {f"layers.0.{name}" for name in layer} | {"norm.weight"}


def test_decay_by_name_and_shape() -> None:
    for name, shape, decayed in (
        ("model.layers.3.self_attn.q_norm.weight", (32, 128), False),
        ("transformer.h.3.ln_1.weight", (32, 128), False),
        ("encoder.norm1.weight", (2, 128), False),
        ("model.layers.3.norm.linear.weight", (256, 128), True),
        ("model.layers.3.mamba.conv1d.weight", (64, 1, 4), True),
        ("model.layers.3.mlp.experts.down_proj", (8, 64, 64), True),
        ("model.layers.3.mlp.shared_expert_gate.weight", (1, 64), True),
    ):
        assert has_weight_decay(name, torch.zeros(shape)) == decayed, name


def test_frozen_parameters_stay_out() -> None:
    model = small()
    model[0].requires_grad_(False)
    optimizer = build_optimizer(model, "sgd", lr=0.5)
    assert {p for group in optimizer.param_groups for p in group["params"]} == {*model[1:].parameters()}
    for name in ("adamw", "sgd"):  # a model with nothing to train
        build_optimizer(model.requires_grad_(False), name).step()


def test_modules_have_rates_of_their_own() -> None:
    model = nn.ModuleDict({"encoder": small(), "head": nn.Linear(4, 2)})
    optimizer = build_optimizer(model, "adamw", lr={"encoder": 0.1, "encoder.2": 0.2, "": 0.3}, weight_decay=0.5)
    settings = {id(p): (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    for name, parameter in model.named_parameters():
        rate = 0.3 if name.startswith("head") else 0.2 if name.startswith("encoder.2") else 0.1
        assert settings.pop(id(parameter)) == (rate, 0.5 if parameter.ndim == 2 else 0.0), name
    assert not settings and len(optimizer.param_groups) == 6
    for rates, message in (
        (
            {"encodr": 0.1},
            "lr has a rate for 'encodr', which is no module of this ModuleDict; it has encoder, head, and",
        ),
        ({"encoder": 0.1}, "lr has rates for encoder, but head.weight is in none of them; name its module too, freeze"),
        ({}, "lr has rates for no module, but encoder.0.weight is in none"),
    ):
        with pytest.raises(ConfigError, match=message):
            build_optimizer(model, lr=rates)
    model["head"].requires_grad_(False)
    assert build_optimizer(model, lr={"encoder": 0.1}).param_groups[0]["lr"] == 0.1
    # what a scheduler adds is no setting of an optimizer
    names = ("param_groups.head.weight.lr", "param_groups.head.weight.initial_lr", "param_groups.head.weight.eps")
    assert setting_names_by_parameter(names) == {"head.weight": ["eps", "lr"]}


# ---- learning rates

HALF = math.sqrt(2) / 4
RATES: list[tuple[dict[str, Any], list[float]]] = [
    ({"steps": 10, "warmup": 4, "min_ratio": 0.1}, [0.25, 0.5, 0.75, 1.0, 0.55 + 0.45 * math.cos(math.pi / 6)]),
    ({"steps": 6, "warmup": 2, "min_ratio": 0.0, "shape": "cosine"}, [0.5, 1.0, 0.5 + HALF, 0.5, 0.5 - HALF, 0.0]),
    ({"steps": 6, "warmup": 2, "min_ratio": 0.0, "shape": "linear"}, [0.5, 1.0, 0.75, 0.5, 0.25, 0.0]),
    ({"steps": 6, "warmup": 2, "min_ratio": 0.0, "shape": "constant"}, [0.5, 1.0, 1.0, 1.0, 1.0, 1.0]),
    ({"steps": 6, "warmup": 2, "min_ratio": 0.0, "shape": "wsd", "decay": 2}, [0.5, 1.0, 1.0, 1.0, 0.5, 0.0]),
    ({"steps": 1, "min_ratio": 0.5}, [0.5]),
    ({"steps": 1, "warmup": 1}, [1.0]),
]


@pytest.mark.parametrize(("keys", "rates"), RATES, ids=str)
def test_rates_of_every_shape(keys: dict[str, Any], rates: list[float]) -> None:
    schedule = Schedule(lr=1.0, **keys)
    assert [schedule.lr_at(step) for step in range(len(rates))] == pytest.approx(rates, abs=1e-12)
    assert schedule.lr_at(20) == pytest.approx(1.0 if schedule.shape == "constant" else schedule.min_ratio)


def test_the_decay_of_wsd_is_a_tenth_unless_given_and_longer_runs_share_what_comes_before() -> None:
    short, long = (Schedule(steps=steps, lr=2.0, warmup=3, min_ratio=0.1, shape="wsd") for steps in (40, 400))
    assert (short.decay_steps, long.decay_steps) == (4, 40)
    assert [short.lr_at(step) for step in range(36)] == [long.lr_at(step) for step in range(36)]
    assert short.lr_at(39) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({"lr_schedule": "wsd:6", "warmup_steps": 15}, "15 and 6 steps of decay .* than the 20"),
        ({"lr_schedule": "wsd", "warmup_steps": 19}, "19 and 2 steps of decay"),
    ],
)
def test_decays_that_have_no_place(keys: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Schedule.of(OptimizerSection(**keys), 20)


# ---- names and arguments

NAMES = [
    ("adam", r"optimizer.class is 'adam'; use adamw, muon, sgd, or the dotted name of a class, such as torch.optim"),
    ("torch.optim.Lion", r"'torch.optim.Lion' cannot be imported: .*install its package, or correct the name"),
    ("lion.Lion", r"'lion.Lion' cannot be imported: ModuleNotFoundError: No module named 'lion'"),
    ("..torch.optim.Adam", r"'..torch.optim.Adam' cannot be imported: TypeError"),
    ("torch.nn.Linear", r"no class of torch.optim.Optimizer"),
    ("torch.optim.LBFGS", r"'torch.optim.LBFGS' cannot train here: it evaluates the loss several times in a step"),
    ("torch.optim.SparseAdam", r"it updates sparse gradients, and those of a run are dense; use adamw"),
    ("torch.optim.Muon", r"'torch.optim.Muon' cannot train here: it takes nothing but whole matrices; use muon, which"),
]
ARGUMENTS = [
    ("sgd", "momentum", r"has 'momentum'; write name=value"),
    ("sgd", "momentom=0.9", r"'sgd' has no argument 'momentom'; known: momentum, dampening, nesterov, "),
    ("sgd", "lr=1", r"has lr, which is optimizer.lr"),
    ("adamw", "amsgrad=maybe", r"'adamw' is given amsgrad='maybe', which is true or false"),
    ("muon", "nesterov=1", r"'muon' is given nesterov=1, which is true or false"),
    ("adamw", "foreach=1", r"'adamw' is given foreach=1, which is true or false"),
    ("sgd", "params=1", r"'sgd' has no argument 'params'; known: momentum"),
]


def choice_of(name: str, *arguments: str) -> OptimizerChoice:
    return OptimizerChoice.from_section(OptimizerSection(class_=name, lr=1e-2, weight_decay=0.0, arguments=arguments))


def test_names_and_arguments_that_are_refused() -> None:
    for name, message in NAMES:
        with pytest.raises(ConfigError, match=message):
            optimizer_class(name)
    for name, text, message in ARGUMENTS:
        with pytest.raises(ConfigError, match=message):
            choice_of(name, text)


def test_arguments_are_read_as_json_and_reach_the_class() -> None:
    choice = choice_of("sgd", "momentum=0.9", "nesterov=true")
    assert dict(choice.arguments) == {"momentum": 0.9, "nesterov": True}
    assert dict(choice_of("torch.optim.Adam", "betas=[0.8, 0.9]").arguments) == {"betas": (0.8, 0.9)}
    model = torch.nn.Linear(2, 2)
    (group,) = choice.build(model.parameters()).param_groups
    assert (group["momentum"], group["nesterov"], group["lr"]) == (0.9, True, 1e-2)
    with pytest.raises(ConfigError, match=r"'sgd' refuses its parameters or arguments .*Nesterov momentum requires"):
        OptimizerChoice("sgd", 0.1, 0.0, (("nesterov", True),)).build(model.parameters())
    with pytest.raises(ConfigError, match=r"knows no weight decay; set optimizer.weight_decay to 0"):
        parameter_groups(model, "torch.optim.Rprop", 0.1)


# ---- optimizers of any class are tried on sharded parameters before a run begins


class _PerParameter(Optimizer):
    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                local = [x.to_local() if isinstance(x, DTensor) else x for x in (parameter, parameter.grad)]
                self.update(parameter, *local, group["lr"])

    def update(self, parameter: Any, weights: Any, gradient: Any, lr: float) -> None:
        raise NotImplementedError


class NormOfShard(_PerParameter):
    """Takes a shard for the whole: a wrong update without an error."""

    def update(self, parameter: Any, weights: Any, gradient: Any, lr: float) -> None:
        weights.sub_(lr * gradient / gradient.norm())


class StateOfShard(_PerParameter):
    """Right updates, with a state that a checkpoint would take for a whole one."""

    def update(self, parameter: Any, weights: Any, gradient: Any, lr: float) -> None:
        state = self.state[parameter].setdefault("sum", torch.zeros_like(weights))
        weights.sub_(lr * state.add_(gradient))


HERE = "tests.train.optim.test_optimizer"
FITTING = ("torch.optim.NAdam", "torch.optim.Adagrad", "torch.optim.Adam foreach=true")
REFUSED = {
    f"{HERE}.NormOfShard": r"updates of [\d.e-]+ differ by [\d.e-]+ from those of whole parameters",
    f"{HERE}.StateOfShard": r"a state \(\d+, \d+\) is this rank's alone \(no DTensor\)",
    "torch.optim.Adafactor": "on rank 0: RuntimeError: ",
}


def _tried(rank: int, home: Layout) -> dict[str, str]:
    said = {}
    with World(home, backend=backend(), timeout=60) as world:
        model = prepare(load_model(None, "qwen3-tiny", vocab_size=300), world)
        before = [p.detach().clone() for p in model.parameters()]
        for text in (*FITTING, *REFUSED):
            try:
                check_sharded_update(choice_of(*text.split()), model, world)
            except ConfigError as error:
                said[text] = str(error)
        assert all(map(torch.equal, before, (p.detach() for p in model.parameters())))
    return said


@pytest.mark.parametrize("home", [Layout(2), pytest.param(Layout(4, tp=2), marks=pytest.mark.whole)])
def test_a_class_is_tried_on_every_way_of_sharding(home: Layout) -> None:
    for said in run_ranks(_tried, len(home.ranks), home):
        assert said.keys() == REFUSED.keys(), said
        for name, message in REFUSED.items():
            assert re.search(message, said[name]), (name, said[name])
