"""Optimizers by name, the learning-rate schedule, and the gradient norm on plain tensors (on meshes: test_step.py)."""

import math

import pytest
import torch
from torch import nn

from longspan.errors import ConfigError
from longspan.train.optim import build_optimizer, clip_gradients, grad_norm, lr_at


@pytest.mark.parametrize(
    ("step", "wanted"),
    [(0, 0.25), (1, 0.5), (3, 1.0), (4, 0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi / 6))), (9, 0.1), (20, 0.1)],
)
def test_warm_up_then_cosine(step: int, wanted: float) -> None:
    assert lr_at(step, steps=10, warmup=4, lr=1.0, min_ratio=0.1) == pytest.approx(wanted, rel=1e-12)


def test_schedule_falls_after_the_warm_up_and_is_never_zero() -> None:
    rates = [lr_at(step, 300, 20, 6e-3, 0.1) for step in range(300)]
    assert rates[:20] == sorted(rates[:20]) and rates[19:] == sorted(rates[19:], reverse=True)
    assert min(rates) > 0 and max(rates) == 6e-3
    assert lr_at(0, 1, 0, 1.0, 0.5) == 0.5 and lr_at(0, 1, 1, 1.0) == 1.0


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
    with pytest.raises(ConfigError, match="unknown optimizer 'adam'; use adamw or sgd"):
        build_optimizer(small(), "adam")


@pytest.mark.parametrize("max_norm", [0.25, 1e6])
def test_norm_and_clipping(max_norm: float) -> None:
    model = small().double()
    model(torch.tensor([1, 2])).square().sum().backward()
    model[1].weight.grad = None
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    wanted = torch.cat([g.flatten() for g in gradients]).norm()
    before = [g.clone() for g in gradients]
    parameters = list(model.parameters())
    norm = grad_norm(parameters)
    torch.testing.assert_close(norm, wanted, rtol=1e-12, atol=0)
    clip_gradients(parameters, max_norm, norm)
    factor = min(1.0, max_norm / (wanted.item() + 1e-6))
    for gradient, old in zip(gradients, before, strict=True):
        torch.testing.assert_close(gradient, old * factor, rtol=1e-12, atol=0)


def test_no_gradients_have_norm_zero() -> None:
    assert grad_norm(small().parameters()).item() == 0.0
