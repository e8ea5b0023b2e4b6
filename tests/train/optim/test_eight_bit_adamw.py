"""Moments in eight bits: what codes keep, the loss that they cost, and the same bits over ranks and after a resume."""

from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from longspan.checkpoint.checkpoint import load_checkpoint, save_checkpoint
from longspan.comm import World
from longspan.config.file import load_config
from longspan.config.memory_keys import fixed_memory_keys
from longspan.errors import ConfigError, ModelError
from longspan.layout import Layout
from longspan.model.weights.local_tensors import local_block, local_tensor
from longspan.resolve.run_cost import memory_settings_of_run
from longspan.run.checks import check_keys_needed_by_keys, check_optimizer
from longspan.testing import backend, run_ranks
from longspan.train import build_optimizer
from longspan.train.optim.eight_bit_adamw import EightBitAdamW
from longspan.train.optim.moment_codes import (
    NEAREST,
    SIZE,
    decode_mean,
    decode_square,
    encode_mean,
    encode_square,
)
from longspan.train.optim.one_pass_adamw import OnePassAdamW
from longspan.train.optim.optimizer import allocate_adam_states
from longspan.train.optim.state_numbers import optimizer_state_numbers


def _noise(count: int, draws: torch.Generator) -> Tensor:
    return torch.randint(0, 1 << 16, (count,), generator=draws, dtype=torch.int32)


def _numbers(count: int, draws: torch.Generator) -> tuple[Tensor, Tensor]:
    """Means over three orders of magnitude, and squares of which they are shares from −1 to 1."""
    powers = 10.0 ** torch.empty(count).uniform_(-3, 0, generator=draws)
    square = (torch.randn(count, generator=draws) * powers).square()
    return square.sqrt() * torch.empty(count).uniform_(-1, 1, generator=draws), square


def test_codes_keep_signs_zeros_and_extremes_and_are_right_in_the_mean() -> None:
    draws = torch.Generator().manual_seed(0)
    count = 5 * SIZE - 37  # the last block is short
    means, squares = _numbers(count, draws)
    means[SIZE : 2 * SIZE] = squares[SIZE : 2 * SIZE] = 0
    means[7] = 1e-30
    largest = (means.abs() / squares.sqrt()).nan_to_num().max() * squares.sqrt()
    tiny = torch.full((count,), 3e-41)  # all alike, and smaller than float32's least
    # a step is 1 to 2 of 127 parts of the root of largest and number: 2 √xy + 1 of 127² parts
    step = (2 * (means.abs() / largest).sqrt() / 127 + 1 / 127**2) * largest
    for x, step_size in ((means, step.nan_to_num()), (squares, squares / 8), (tiny, torch.zeros(count))):
        total = torch.zeros_like(x, dtype=torch.float64)
        large = x.abs() >= (0 if x is means else 1e-5 * x.max())
        for _ in range(400):
            noise = _noise(count, draws)
            if x is means:
                codes, scales = encode_mean(x, squares, noise)
                y = decode_mean(codes, scales, squares)
                assert not y[squares == 0].any() and ((y * x)[y != 0] > 0).all()
            else:
                codes, scales = encode_square(x, noise)
                y = decode_square(codes, scales)
                assert (y[x > 0] > 0).all() and not y[x == 0].any(), "a square above zero stays above it"
                assert y.max() == x.max()
            assert codes.dtype == torch.uint8 and len(scales) == 5
            assert ((y - x).abs() <= 1.01 * step_size)[large].all()
            total += y.double()
        assert ((total / 400 - x).abs() <= 0.25 * step_size)[large].all()


def test_means_are_kept_beside_numbers_a_million_times_as_large() -> None:
    """As rows of an embedding are in one block, of tokens that come often and of others that come hardly ever."""
    draws = torch.Generator().manual_seed(0)
    shares = torch.empty(SIZE).uniform_(-0.3, 0.3, generator=draws)
    roots = torch.ones(SIZE)
    roots[100:] = 1e-6
    square = roots.square()
    total = torch.zeros(SIZE)
    for _ in range(100):
        codes, scales = encode_mean(shares * roots, square, _noise(SIZE, draws))
        square_codes, bounds = encode_square(square, _noise(SIZE, draws))
        rounded = decode_square(square_codes, bounds)
        total += decode_mean(codes, scales, rounded) / rounded.sqrt() / 100
    assert (total - shares).abs().max() < 2e-3  # an update is such a share, whatever the square is rounded to


def test_from_bfloat16_come_the_same_codes() -> None:
    """Those of means but for a few, which move by one: a share is that of two rounded numbers."""
    draws = torch.Generator().manual_seed(0)
    means, squares = _numbers(4000, draws)
    nearest = torch.full((4000,), NEAREST, dtype=torch.int32)
    codes, scales = encode_mean(means, squares, _noise(4000, draws))
    square_codes, bounds = encode_square(squares, _noise(4000, draws))
    square = decode_square(square_codes, bounds)
    saved = square.bfloat16().float()
    assert torch.equal(encode_square(saved, nearest)[0], square_codes)
    again, _ = encode_mean(decode_mean(codes, scales, square).bfloat16().float(), saved, nearest)
    moved = ((again & 127).int() - (codes & 127).int()).abs()  # a sign of zero is lost
    assert moved.max() <= 1 and moved.float().mean() < 0.05


def _losses(moments: Literal["", "8bit"], betas: tuple[float, float]) -> Tensor:
    """300 steps of a small model that learns which token follows two others."""
    torch.manual_seed(0)
    layers = nn.Linear(64, 96), nn.GELU(), nn.LayerNorm(96), nn.Linear(96, 64)
    model = nn.Sequential(nn.Embedding(64, 32), nn.Flatten(), *layers)
    optimizer = build_optimizer(model, "adamw", lr=3e-3, weight_decay=0.1, betas=betas, moments=moments)
    draws = torch.Generator().manual_seed(1)
    follows = torch.softmax(2.5 * torch.randn(64, 64, generator=draws), -1)
    losses = list[float]()
    for _ in range(300):
        first = torch.randint(0, 64, (256,), generator=draws)
        second = torch.multinomial(follows[first], 1, generator=draws)[:, 0]
        third = torch.multinomial(follows[first] + follows[second], 1, generator=draws)[:, 0]
        loss = nn.functional.cross_entropy(model(torch.stack([first, second], 1)), third)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


@pytest.mark.parametrize("betas", [(0.9, 0.95), pytest.param((0.9, 0.999), marks=pytest.mark.whole)])
def test_the_loss_over_300_steps_is_that_of_float32_moments(betas: tuple[float, float]) -> None:
    exact, packed = (_losses(moments, betas) for moments in ("", "8bit"))
    assert exact[0] == packed[0] and not torch.equal(exact, packed)
    assert exact[-50:].mean() < 0.9 * exact[:50].mean()
    for part in (slice(100, 200), slice(200, 300)):
        assert abs(packed[part].mean() / exact[part].mean() - 1) < 0.005


def test_what_it_takes_and_refuses() -> None:
    keys: dict[str, Any] = {"optimizer.moments": "8bit", "optimizer.lr": 1e-3, "train.steps": 9}
    config = load_config(None, keys)
    check_optimizer(config)
    check_optimizer(load_config(None, keys | {"train.offload_weights": True, "lora.rank": 4}))  # stays on the device
    assert optimizer_state_numbers(config.optimizer) * 4 == 2 + 12 / 256
    assert memory_settings_of_run(load_config(None, keys | {"model.dtype": "bfloat16"})).state_numbers == 1 + 6 / 256
    assert fixed_memory_keys(config).offload_optimizer_states is False
    for more, message in (
        ({"optimizer.arguments": ("amsgrad=true",)}, r"'8bit', which adamw with betas, eps and maximize alone has"),
        ({"optimizer.class": "sgd"}, r"optimizer.moments is '8bit', .* optimizer.class"),
        ({"model.dtype": "float64"}, r"optimizer.moments is '8bit', .* model.dtype"),
        ({"train.offload_optimizer_states": True}, r"optimizer.moments is '8bit', .* train.offload_optimizer_states"),
        ({"train.offload_weights": True}, r"train.offload_weights is true, and .* 'adamw' with .* '8bit' is not known"),
    ):
        with pytest.raises(ConfigError, match=message):
            refused = load_config(None, keys | more)
            check_keys_needed_by_keys(refused)
            check_optimizer(refused)
    with pytest.raises(ConfigError, match=r"which adamw .* alone has; the optimizer is 'sgd'"):
        build_optimizer(nn.Linear(3, 2), "sgd", moments="8bit")
    wide = nn.Linear(3, 2, dtype=torch.float64)
    wide(torch.ones(3, dtype=torch.float64)).sum().backward()
    with pytest.raises(ModelError, match=r"eight bits were given a parameter \(2, 3\) in torch.float64; use float32"):
        build_optimizer(wide, moments="8bit").step()
    model = nn.Linear(40, 30)
    optimizer = build_optimizer(model, moments="8bit")
    assert allocate_adam_states(optimizer)
    assert (
        optimizer.state[model.weight]["exp_avg"].nbytes == 1200 + 4 * 5 and optimizer.state[model.weight]["step"] == 0
    )


# ---- over ranks

SHAPES = {"even": (32, 64), "odd": (30, 7), "few": (3, 50)}  # of 4 ranks each holds 512 numbers; 56 and 42; 50 or none
KINDS = {"8bit": EightBitAdamW, "": OnePassAdamW}
RESUMED = (("8bit", "8bit 4"), ("8bit", "8bit 2"), ("8bit", "float32 4"), ("", "8bit 4"))  # moments, and those saved


def _sharded(world: World, moments: str) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.ParameterDict({name: nn.Parameter(torch.randn(shape)) for name, shape in SHAPES.items()})
    model.to(world.device)
    fully_shard(model, mesh=world.meshes.fsdp)
    return model, KINDS[moments](model.parameters(), lr=1e-2)


def _step(model: nn.Module, optimizer: Any, step: int) -> None:
    for index, parameter in enumerate(model.parameters()):
        assert isinstance(parameter, DTensor)
        gradient = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(10 * step + index))
        parameter.grad = torch.zeros_like(parameter)
        block = local_block(parameter.shape, parameter.device_mesh, parameter.placements)
        local_tensor(parameter.grad).copy_(gradient[block])
    optimizer.step()


def _weights(model: nn.Module, text: str = "") -> dict[str, Tensor]:
    return {
        name + text: p.full_tensor().detach().cpu().clone()
        for name, p in model.named_parameters()
        if isinstance(p, DTensor)
    }


def _over_ranks(rank: int, root: Path, ranks: int) -> dict[str, Tensor]:
    """Weights after three steps; of two ranks also after a fourth, from checkpoints of each other too."""
    with World(Layout(ranks), backend=backend(), timeout=60) as world:
        pairs = {moments: _sharded(world, moments) for moments in KINDS}
        for name, pair in pairs.items():
            for step in range(3):
                _step(*pair, step)
            save_checkpoint(root / f"{name or 'float32'} {ranks}", *pair, world, step=3)
        model, optimizer = pairs["8bit"]
        weights = _weights(model)
        for moments, saved in RESUMED if ranks == 2 else ():
            other, its_optimizer = _sharded(world, moments)
            load_checkpoint(root / saved / "step-000003", other, its_optimizer, world)
            if (moments, saved) == ("8bit", "8bit 2"):
                for new, old in zip(its_optimizer.state.values(), optimizer.state.values(), strict=True):
                    assert new["step"] == old["step"] == 3
                    assert torch.equal(new["exp_avg_sq"][:42], old["exp_avg_sq"][:42]), "codes of the same shards"
            _step(other, its_optimizer, 3)
            weights |= _weights(other, f", {moments} from {saved}")
        for name, pair in pairs.items():
            _step(*pair, 3)
            weights |= _weights(pair[0], f", {name} on")
    return weights


def test_over_ranks_and_from_each_others_checkpoints(tmp_path: Path) -> None:
    four, *_ = run_ranks(_over_ranks, 4, tmp_path, 4)
    one, *_ = run_ranks(_over_ranks, 1, tmp_path, 1)
    two, *_ = run_ranks(_over_ranks, 2, tmp_path, 2)
    for other in (two, four):
        assert torch.equal(one["even"], other["even"]), "blocks that lie alike have the same bits"
        assert all((one[name] - other[name]).abs().max() < 4e-3 for name in SHAPES)  # of updates of 1e-2
    for name in SHAPES:
        for moments, saved in RESUMED:
            difference = (two[f"{name}, {moments} from {saved}"] - two[f"{name}, 8bit on"]).abs().max()
            assert difference < 4e-3, (name, moments, saved)
        assert (two[f"{name}, 8bit on"] - two[f"{name},  on"]).abs().max() > 1e-6
