"""Optimizers of any class are tried on sharded parameters before a run begins."""

import re
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from longspan.comm import World
from longspan.errors import ConfigError
from longspan.layout import Layout
from longspan.model import load_model, prepare
from longspan.testing import backend, run_ranks
from longspan.train.optim.optimizer import (
    OptimizerChoice,
    check_sharded_update,
    optimizer_class,
    parameter_groups,
    parse_arguments,
)


class _PerParameter(Optimizer):
    def __init__(self, params: Any, lr: float = 1e-3) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                self.update(parameter, group["lr"])

    def update(self, parameter: Any, lr: float) -> None:
        raise NotImplementedError


class NormOfShard(_PerParameter):
    """Takes a shard for the whole: a wrong update without an error."""

    def update(self, parameter: Any, lr: float) -> None:
        local = [x.to_local() if isinstance(x, DTensor) else x for x in (parameter, parameter.grad)]
        local[0].sub_(lr * local[1] / local[1].norm())


class StateOfShard(_PerParameter):
    """Right updates, with a state that a checkpoint would take for a whole one."""

    def update(self, parameter: Any, lr: float) -> None:
        local = [x.to_local() if isinstance(x, DTensor) else x for x in (parameter, parameter.grad)]
        state = self.state[parameter].setdefault("sum", torch.zeros_like(local[0]))
        local[0].sub_(lr * state.add_(local[1]))


HERE = "tests.train.optim.test_on_shards"
FITTING = ("torch.optim.NAdam", "torch.optim.Adagrad", "torch.optim.Adam foreach=true")
REFUSED = {
    f"{HERE}.NormOfShard": r"updates of [\d.e-]+ differ by [\d.e-]+ from those of whole parameters",
    f"{HERE}.StateOfShard": r"a state \(\d+, \d+\) is this rank's alone \(no DTensor\)",
    "torch.optim.Adafactor": "on rank 0: RuntimeError: ",
    "torch.optim.Muon": "Muon only supports 2D parameters",
}


def _tried(rank: int, home: Layout) -> dict[str, str]:
    said = {}
    with World(home, backend=backend(), timeout=60) as world:
        model = prepare(load_model(None, "qwen3-tiny", vocab_size=300), world, probe=False)
        before = [p.detach().clone() for p in model.parameters()]
        for text in (*FITTING, *REFUSED):
            name, *arguments = text.split()
            choice = OptimizerChoice(name, 1e-2, 0.0, tuple(parse_arguments(name, arguments).items()))
            try:
                check_sharded_update(choice, model, world)
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


NAMES = [
    ("adam", r"train.optimizer is 'adam'; use adamw or sgd, or the dotted name of a class, such as torch.optim"),
    ("torch.optim.Lion", r"'torch.optim.Lion' cannot be imported: .*install its package, or correct the name"),
    ("lion.Lion", r"'lion.Lion' cannot be imported: ModuleNotFoundError: No module named 'lion'"),
    ("..x", r"'..x' cannot be imported: TypeError"),
    ("..torch.optim.Adam", r"'..torch.optim.Adam' cannot be imported: TypeError"),
    ("torch.nn.Linear", r"no class of torch.optim.Optimizer"),
    ("torch.optim.LBFGS", r"'torch.optim.LBFGS' cannot train here: it evaluates the loss several times in a step"),
    ("torch.optim.SparseAdam", r"it updates sparse gradients"),
]


@pytest.mark.parametrize(("name", "message"), NAMES)
def test_classes_that_are_refused_by_name(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        optimizer_class(name)


ARGUMENTS = [
    ("sgd", ["momentum"], r"has 'momentum'; write name=value"),
    ("sgd", ["momentom=0.9"], r"'sgd' has no argument 'momentom'; known: momentum, dampening, nesterov, "),
    ("sgd", ["lr=1"], r"has lr, which is train.lr"),
    ("adamw", ["betas=[0.8, 0.9]"], r"has betas, which is train.betas"),
    ("adamw", ["amsgrad=maybe"], r"'adamw' is given amsgrad='maybe', which is true or false"),
    ("adamw", ["foreach=1"], r"'adamw' is given foreach=1, which is true or false"),
    ("sgd", ["params=1"], r"'sgd' has no argument 'params'; known: momentum"),
]


@pytest.mark.parametrize(("name", "texts", "message"), ARGUMENTS)
def test_arguments_that_are_refused(name: str, texts: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_arguments(name, texts)


def test_arguments_are_read_as_json_and_reach_the_class() -> None:
    texts = ["momentum=0.9", "nesterov=true"]
    assert parse_arguments("sgd", texts) == {"momentum": 0.9, "nesterov": True}
    assert parse_arguments("torch.optim.Adam", ["betas=[0.8, 0.9]"]) == {"betas": (0.8, 0.9)}
    model = torch.nn.Linear(2, 2)
    choice = OptimizerChoice("sgd", 0.1, 0.0, tuple(parse_arguments("sgd", texts).items()))
    (group,) = choice.build(model.parameters()).param_groups
    assert (group["momentum"], group["nesterov"], group["lr"]) == (0.9, True, 0.1)
    with pytest.raises(ConfigError, match=r"'sgd' refuses its parameters or arguments .*Nesterov momentum requires"):
        OptimizerChoice("sgd", 0.1, 0.0, (("nesterov", True),)).build(model.parameters())
    with pytest.raises(ConfigError, match=r"knows no weight decay; set train.weight_decay to 0"):
        parameter_groups(model, "torch.optim.Rprop", 0.1)
