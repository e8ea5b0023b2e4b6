"""Stochastic rounding: right in the mean, the same on every replica of a weight, and repeated by a resumed run."""

import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from longspan.comm import World
from longspan.config.file import load_config
from longspan.layout import Layout
from longspan.model import prepare
from longspan.model.multimodal.multimodal_model import Encoder, MultimodalModel
from longspan.model.multimodal.prepare_encoder import prepare_encoder
from longspan.model.weights.local_tensors import local_tensor
from longspan.testing import backend
from longspan.train.optim.optimizer import OptimizerChoice
from longspan.train.optim.stochastic_rounding import (
    STREAMS,
    RandomKey,
    RoundingBits,
    random_words,
    round_stochastically,
    rounding_noise,
)
from longspan.train.training import build_run_optimizer
from tests.train.multimodal.encoders import encoder_of
from tests.train.multimodal.reference import HIDDEN, language_model_of

DRAWS = 21_000


def _rounded(x: Tensor, seed: int) -> Tensor:
    """Rounded by the bits of as many places in a row."""
    words = random_words(RandomKey(seed, 2**32 - 1 - seed), torch.arange(x.numel()).view(x.shape))
    return torch.stack([round_stochastically(x, rounding_noise(words, stream)) for stream in range(STREAMS)])


def test_the_mean_of_many_draws_is_the_number() -> None:
    exact = torch.cat(
        [torch.randn(40, generator=torch.Generator().manual_seed(0)) * 10.0**power for power in (-30, -3, 0, 5)]
    )
    drawn = _rounded(exact.expand(DRAWS // STREAMS, -1).contiguous(), 1).flatten(0, 1)
    assert drawn.dtype == torch.bfloat16
    below = (exact.view(torch.int32) & -(1 << 16)).view(torch.float32).double()  # toward zero
    above = ((exact.view(torch.int32) & -(1 << 16)) + (1 << 16)).view(torch.float32).double()
    assert ((drawn == below) | (drawn == above)).all()
    share = (exact.double() - below) / (above - below)
    deviation = (share * (1 - share) / DRAWS).sqrt().clamp(min=1e-9)
    far = ((drawn == above).double().mean(0) - share).abs() / deviation
    assert far.max() < 4.5, far.max()  # of 160 numbers; a bias of a hundredth of the spacing would be 3 more
    assert (share - share.round()).abs().max() > 0.4


def test_numbers_of_bfloat16_and_what_is_not_finite_stay() -> None:
    exact = torch.tensor([0.0, -0.0, 1.0, -0.0078125, 3.0e38, math.inf, -math.inf]).bfloat16().float()
    for seed in range(20):
        assert (_rounded(exact, seed).float() == exact).all()
    assert _rounded(torch.tensor([math.nan]), 0).isnan().all()


def _trained(kind: str, choice: OptimizerChoice, steps: int) -> Tensor:
    torch.manual_seed(0)
    model: Any = nn.Linear(64, 64, bias=False)
    nn.init.normal_(model.weight, 1.0, 0.1)
    gradient = torch.randn(64, 64)
    model = model.to(torch.float32 if kind == "float32" else torch.bfloat16)
    before = model.weight.detach().float().clone()
    world: Any = SimpleNamespace(seed=3, step=0)
    optimizer = choice.build(model.parameters(), rounding=RoundingBits(model, world) if kind == "by chance" else None)
    for step in range(steps):
        world.step = step + 1
        model.weight.grad = gradient.to(model.weight)
        optimizer.step()
    return model.weight.detach().float() - before


def test_small_updates_add_up() -> None:
    choice = OptimizerChoice("adamw", 2e-5, 0.0, (("betas", (0.9, 0.999)),))
    exact, nearest, by_chance = (_trained(kind, choice, 60) for kind in ("float32", "nearest", "by chance"))
    assert not nearest.any()  # each is below half the spacing of bfloat16 around 1
    slope = (by_chance * exact).sum() / exact.square().sum()
    assert slope == pytest.approx(1.0, abs=0.1)


def test_bits_follow_seed_step_and_name_and_differ_between_updates_of_one_step() -> None:
    def after(world: dict[str, int], updates: int) -> Tensor:
        torch.manual_seed(0)
        model = nn.Linear(32, 32, bias=False, dtype=torch.bfloat16)
        given: Any = SimpleNamespace(**world)
        optimizer = OptimizerChoice("adamw", 1e-4).build(model.parameters(), rounding=RoundingBits(model, given))
        for _ in range(updates):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
        return model.weight.detach()

    at = {"seed": 1, "step": 5}
    start, one, two = (after(at, updates) for updates in (0, 1, 2))
    assert torch.equal(one, after(at, 1))
    assert not any(torch.equal(one, after(at | other, 1)) for other in ({"step": 6}, {"seed": 2}))
    assert not torch.equal(one != start, two != start)  # the second update rounds others up


def test_an_encoder_has_its_own_learning_rate() -> None:
    with World(Layout(1), backend=backend()) as world:
        language_model = prepare(language_model_of("qwen3", torch.bfloat16), world)
        encoder = Encoder(module=prepare_encoder(encoder_of("image", HIDDEN, torch.bfloat16), world), world=world)
        model = MultimodalModel({"image": encoder}, language_model, world)
        keys = {"optimizer.lr": 2.0**-6, "encoder.lr": 2.0**-9, "optimizer.class": "sgd", "optimizer.weight_decay": 0.0}
        optimizer = build_run_optimizer(load_config(None, keys), world, model)
        assert {group["initial_lr"] for group in optimizer.param_groups} == {2.0**-9, 2.0**-6}
        for parameter in model.parameters():
            local_tensor(parameter.detach()).zero_()
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        for name, parameter in model.named_parameters():
            rate = 2.0**-9 if name.startswith("encoders.") else 2.0**-6
            assert (local_tensor(parameter.detach()) == -rate).all(), name
