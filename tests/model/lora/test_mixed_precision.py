"""A frozen base model in bfloat16, an adapter in float32: no farther from float64 than stock peft in one process."""

import copy
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor

from longspan.comm import World
from longspan.layout import Layout
from longspan.plan import plan_fixed
from longspan.testing import backend, run_ranks
from longspan.train import run_step
from tests.model.lora.adapted import LENGTHS, adapted, dense
from tests.model.stock import gradients_of, prepare_untried, texts

HOMES = {
    "cp 2": (Layout(ranks=2), {}),
    "cp 2, computed in bfloat16": (Layout(ranks=2), {"compute_dtype": torch.bfloat16}),
    "tp 2": (Layout(ranks=2, tp=2), {}),
    "tp 2, computed in bfloat16": (Layout(ranks=2, tp=2), {"compute_dtype": torch.bfloat16}),
}


def _model() -> Any:
    return adapted("llama", "every linear", torch.bfloat16)


def _distance(gradients: dict[str, Tensor], exact: dict[str, Tensor]) -> float:
    """The norm of the difference of all gradients, relative to that of the exact ones."""
    assert gradients.keys() == exact.keys()
    apart = torch.stack([(gradients[name].double() - exact[name]).norm() for name in exact]).norm()
    return float(apart / torch.stack([gradient.norm() for gradient in exact.values()]).norm())


def _errors(rank: int) -> dict[str, tuple[float, float]]:
    """Of each home the error of the loss and of the gradients, and those of stock peft."""
    errors, documents = dict[str, tuple[float, float]](), texts(LENGTHS)
    for name, (layout, options) in HOMES.items():
        with World(layout, backend=backend(), timeout=60) as world:
            exact, stock = copy.deepcopy(_model()).double().to(world.device), _model().to(world.device)
            exact_loss, stock_loss = dense(exact), dense(stock)
            wanted = gradients_of(exact.get_base_model())
            errors["stock"] = abs(stock_loss - exact_loss), _distance(gradients_of(stock.get_base_model()), wanted)
            model = prepare_untried(_model(), world, **options)
            kinds = {p.dtype for p in model.parameters() if p.requires_grad}
            assert kinds == {torch.float32} and model.dtype == torch.bfloat16
            plan = plan_fixed(LENGTHS, layout, cp=layout.slots, max_tokens_per_slot=80)
            result = run_step(model, plan, documents, world)
            errors[name] = abs(result.loss - exact_loss), _distance(gradients_of(model), wanted)
    return errors


@cache
def _results() -> list[dict[str, tuple[float, float]]]:
    return run_ranks(_errors, 2, timeout=100)


@pytest.mark.parametrize("name", HOMES)
def test_errors_are_those_of_stock_peft(name: str) -> None:
    for errors in _results():
        assert 1e-3 < errors["stock"][1] < 0.2, errors
        assert errors[name][1] <= 2 * errors["stock"][1], errors
        assert errors[name][0] <= 0.02, errors
