"""Optimizers by name, their arguments, and what weight decay applies to."""

import pytest
import torch
from torch import nn

from longspan.checkpoint.checkpoint import settings_by_parameter
from longspan.errors import ConfigError
from longspan.train.optim.optimizer import build_optimizer, has_weight_decay
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


def test_sgd_is_plain_and_frozen_parameters_stay_out() -> None:
    model = small()
    model[0].requires_grad_(False)
    before = [p.clone() for p in model.parameters()]
    optimizer = build_optimizer(model, "sgd", lr=0.5)
    model(torch.tensor([1, 2])).square().sum().backward()
    gradients = [p.grad for p in model.parameters()]
    optimizer.step()
    for parameter, old, gradient in zip(model.parameters(), before, gradients, strict=True):
        torch.testing.assert_close(parameter, old if gradient is None else old - 0.5 * gradient)


def test_unknown_optimizer() -> None:
    with pytest.raises(ConfigError, match=r"train.optimizer is 'adam'; use adamw or sgd, or the dotted name"):
        build_optimizer(small(), "adam")


def test_decay_of_experts_is_for_their_matrices_alone() -> None:
    model = deep("gpt-oss", torch.float32, layers=1)
    optimizer = build_optimizer(model, "adamw", weight_decay=0.5)
    decayed = {id(p): group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    spared = {name.removeprefix("model.") for name, p in model.named_parameters() if decayed[id(p)] == 0}
    layer = {"self_attn.sinks", "input_layernorm.weight", "post_attention_layernorm.weight", "mlp.router.bias"}
    layer |= {f"self_attn.{name}_proj.bias" for name in "qkvo"}
    layer |= {"mlp.experts.gate_up_proj_bias", "mlp.experts.down_proj_bias"}
    assert spared == {f"layers.0.{name}" for name in layer} | {"norm.weight"}


@pytest.mark.parametrize(
    ("name", "shape", "decayed"),
    [
        ("model.layers.3.self_attn.q_norm.weight", (32, 128), False),
        ("transformer.h.3.ln_1.weight", (32, 128), False),
        ("encoder.norm1.weight", (2, 128), False),
        ("model.layers.3.norm.linear.weight", (256, 128), True),
        ("model.layers.3.mamba.conv1d.weight", (64, 1, 4), True),
        ("model.layers.3.mlp.experts.down_proj", (8, 64, 64), True),
        ("model.layers.3.mlp.shared_expert_gate.weight", (1, 64), True),
    ],
)
def test_decay_by_name_and_shape(name: str, shape: tuple[int, ...], decayed: bool) -> None:
    assert has_weight_decay(name, torch.zeros(shape)) == decayed


def test_a_model_with_nothing_to_train_has_an_optimizer() -> None:
    model = small().requires_grad_(False)
    before = [p.clone() for p in model.parameters()]
    for name in ("adamw", "sgd"):
        build_optimizer(model, name).step()
    assert all(torch.equal(p, old) for p, old in zip(model.parameters(), before, strict=True))


def test_modules_have_rates_of_their_own() -> None:
    model = nn.ModuleDict({"encoder": small(), "head": nn.Linear(4, 2)})
    optimizer = build_optimizer(model, "adamw", lr={"encoder": 0.1, "encoder.2": 0.2, "": 0.3}, weight_decay=0.5)
    settings = {id(p): (g["lr"], g["weight_decay"]) for g in optimizer.param_groups for p in g["params"]}
    for name, parameter in model.named_parameters():
        rate = 0.3 if name.startswith("head") else 0.2 if name.startswith("encoder.2") else 0.1
        assert settings.pop(id(parameter)) == (rate, 0.5 if parameter.ndim == 2 else 0.0), name
    assert not settings and len(optimizer.param_groups) == 6


REFUSED_RATES = [
    ({"encodr": 0.1}, r"lr has a rate for 'encodr', which is no module of this ModuleDict; it has encoder, head, and"),
    ({"encoder": 0.1}, r"lr has rates for encoder, but head.weight is in none of them; name its module too, freeze it"),
    ({}, r"lr has rates for no module, but encoder.0.weight is in none"),
]


@pytest.mark.parametrize(("rates", "message"), REFUSED_RATES)
def test_rates_that_do_not_fit_the_model(rates: dict[str, float], message: str) -> None:
    model = nn.ModuleDict({"encoder": small(), "head": nn.Linear(4, 2)})
    with pytest.raises(ConfigError, match=message):
        build_optimizer(model, lr=rates)
    model["head"].requires_grad_(False)
    if rates == {"encoder": 0.1}:
        assert build_optimizer(model, lr=rates).param_groups[0]["lr"] == 0.1


def test_what_a_scheduler_adds_is_no_setting_of_an_optimizer() -> None:
    names = ("param_groups.head.weight.lr", "param_groups.head.weight.initial_lr", "param_groups.head.weight.eps")
    assert settings_by_parameter(names) == {"head.weight": ["eps", "lr"]}
