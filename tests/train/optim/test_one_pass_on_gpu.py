"""The kernel of AdamW on a GPU: the bits of the reference on a CPU, also past 2^31 numbers; few launches, no wait."""

import math
from collections.abc import Iterator
from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from longspan.train.optim import adamw_updates
from longspan.train.optim.adamw_updates import Factors, Update, apply_update_by_torch
from longspan.train.optim.eight_bit_adamw import EightBitAdamW
from longspan.train.optim.one_pass_adamw import OnePassAdamW
from longspan.train.optim.stochastic_rounding import Places, RandomKey, RoundingBits
from tests.train.optim.test_one_pass_adamw import GROUP

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or find_spec("triton") is None, reason="needs a CUDA device"),
]
PAST = 2**31 + 70_000
SINGLE, HALF = torch.float32, torch.bfloat16
DTYPES = [(SINGLE,) * 3, (HALF,) * 3, (SINGLE, SINGLE, HALF), (HALF, HALF, SINGLE), (HALF, SINGLE, HALF)]
SIZES = (1, 1023, 1024, 5003, 20_000)
BLOCKS = {  # of whole parameters: the place of a block, which is whole, of rows, of columns, of both, or a part
    "whole": Places.from_block((20_000,), (slice(0, 20_000),)),
    "far": Places.from_block((2**21, 2**13), (slice(2**20, 2**20 + 3), slice(0, 2**13))),
    "columns": Places.from_block((5000, 40), (slice(0, 5000), slice(7, 11))),
    "columns of some experts": Places.from_block((90, 1000, 40), (slice(3, 50), slice(100, 201), slice(7, 12))),
    "a part": Places.from_block((90, 1000, 40), (slice(3, 50), slice(100, 201), slice(7, 12)))._replace(start=1025),
    "wide columns": Places.from_block((40, 5000), (slice(0, 40), slice(2500, 5000))),
    "wide columns of some experts": Places.from_block((30, 5, 5000), (slice(3, 20), slice(1, 4), slice(2000, 3100))),
    "past 2^32, wide": Places.from_block((9, 2**21, 5000), (slice(1, 9), slice(1, 2**20), slice(7, 3007)))._replace(
        start=2**33
    ),
    "past 2^32, narrow": Places.from_block((2**31, 40), (slice(0, 2**31), slice(7, 11)))._replace(start=2**32 - 1500),
    "across 2^32": Places.from_block((2**21, 2**13), (slice(2**19 - 1, 2**19 + 2), slice(0, 2**13))),
}


def updates() -> Iterator[Update]:
    """Every mix of types, size and way to round, with numbers down to 10^−20."""
    draws = torch.Generator().manual_seed(0)

    def numbers(size: int, dtype: torch.dtype, powers: float) -> torch.Tensor:
        magnitudes = 10.0 ** torch.empty(size).uniform_(-powers, 0, generator=draws)
        return (torch.randn(size, generator=draws) * magnitudes).to(dtype)

    for size in SIZES:
        for dtypes in DTYPES:
            for key, places in ((None, None), *((RandomKey(3**20 + size, 5**13), block) for block in BLOCKS.values())):
                first = numbers(size, dtypes[2], 20)
                tensors = (numbers(size, dtypes[0], 3), numbers(size, dtypes[1], 20), first, first.float().square())
                factors = Factors.from_parameter_group(GROUP | {"maximize": size % 2 == 0}, 1 + size % 3)
                update = Update(*tensors[:3], tensors[3].to(dtypes[2]), factors, key, places)
                yield update
                if size == SIZES[-1]:  # addresses that no load of many numbers takes
                    yield update._replace(**{name: getattr(update, name)[1:] for name in Update._fields[:4]})


def _copy(x: torch.Tensor, device: str) -> torch.Tensor:
    """A copy on a device that begins as many numbers behind its memory's beginning."""
    first = x.storage_offset()
    return torch.empty(first + len(x), dtype=x.dtype, device=device)[first:].copy_(x)


def update_differences(device: str, scale: float | None) -> list[str]:
    """Say which results of the kernel on a device are not the bits of the reference on a CPU."""
    expected, results = list[Update](), list[Update]()
    for update in updates():
        for into, place in ((expected, "cpu"), (results, device)):
            into.append(update._replace(**{n: _copy(getattr(update, n), place) for n in Update._fields[:4]}))
    factor = None if scale is None else torch.tensor(scale)
    launches = adamw_updates.launch_update_kernels(results, None if factor is None else factor.to(device))
    assert launches <= 2 * 3 * len(DTYPES) < len(results) // 4, launches
    for update in expected:
        if factor is None or not factor.isnan():
            apply_update_by_torch(update, factor)
    return [
        f"{name} of {update.parameter.numel()} in {[str(x.dtype) for x in update[:3]]}, {update.places}"
        for update, result in zip(expected, results, strict=True)
        for name in ("parameter", "mean", "square")
        if not torch.equal(getattr(update, name), getattr(result, name).cpu())
    ]


@pytest.mark.parametrize("scale", [None, 0.37, math.nan])
def test_every_bit_is_the_references(scale: float | None) -> None:
    assert not update_differences("cuda", scale)


@pytest.mark.parametrize("by_chance", [False, True])
def test_numbers_past_two_to_the_31_are_updated_alike(by_chance: bool) -> None:
    parameter, gradient, mean, square = (torch.empty(PAST, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    for tensor in (parameter, gradient, mean):
        tensor.normal_()
    square.uniform_()
    factors, key = Factors.from_parameter_group(GROUP, 2), RandomKey(5**13, 3**20) if by_chance else None
    whole = Places.from_block((PAST,), (slice(0, PAST),)) if by_chance else None
    places = (0, 2**30, 2**31 - 5000, 2**31, PAST - 10_001)
    expected = list[Update]()
    for first in places:
        part = [tensor[first : first + 10_001].cpu() for tensor in (parameter, gradient, mean, square)]
        expected.append(Update(*part, factors, key, whole._replace(start=first) if whole else None))
        apply_update_by_torch(expected[-1])
    adamw_updates.launch_update_kernels([Update(parameter, gradient, mean, square, factors, key, whole)], None)
    for first, update in zip(places, expected, strict=True):
        for name, result in (("parameter", parameter), ("mean", mean), ("square", square)):
            assert torch.equal(result[first : first + 10_001].cpu(), getattr(update, name)), (name, first)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_step_is_that_of_a_cpu_in_one_launch_and_waits_for_nothing(dtype: torch.dtype) -> None:
    results = list[list[torch.Tensor]]()
    for device in ("cpu", "cuda"):
        draws, world = torch.Generator().manual_seed(0), SimpleNamespace(seed=3, step=0)
        model: Any = nn.ParameterList(torch.randn(40 + i, 64, generator=draws) for i in range(30)).to(device, dtype)
        optimizer = OnePassAdamW(model.parameters(), lr=1e-2, rounding=RoundingBits(model, world))  # pyright: ignore
        optimizer.gradient_scale = torch.tensor(0.7, dtype=torch.float64, device=device)  # as the sums of a step are
        for step in range(3):
            world.step = step
            for parameter in model.parameters():
                parameter.grad = torch.randn(parameter.shape, generator=draws).to(parameter)
            if step == 2 and device == "cuda":  # compiled, and states are there
                torch.cuda.set_sync_debug_mode("error")
            try:
                optimizer.step()
            finally:
                torch.cuda.set_sync_debug_mode("default")
        states = [x for p in model.parameters() for x in (p.detach(), *optimizer.state[p].values())]
        results.append([x.cpu() for x in states])
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("dtype", [SINGLE, HALF])
def test_moments_in_eight_bits_have_the_bits_of_the_reference(dtype: torch.dtype) -> None:
    """Of every size, with zeros, over four orders of magnitude, and with parameters that are rounded by chance."""
    models = list[nn.ParameterList]()
    optimizers = list[EightBitAdamW]()
    for device in ("cpu", "cuda"):
        draws = torch.Generator().manual_seed(0)
        weights = [torch.randn(size, generator=draws).to(device, dtype) for size in (*SIZES, 255, 256, 257)]
        model = nn.ParameterList([nn.Parameter(x) for x in weights])
        world: Any = SimpleNamespace(seed=3, step=1)
        models.append(model)
        optimizers.append(EightBitAdamW(model.parameters(), lr=1e-2, rounding=RoundingBits(model, world)))
    draws = torch.Generator().manual_seed(1)
    for step in range(4):
        for parameters in zip(*(model.parameters() for model in models), strict=True):
            size = parameters[0].numel()
            gradient = torch.randn(size, generator=draws) * 10.0 ** torch.empty(size).uniform_(-4, 0, generator=draws)
            gradient[size // 2 : size // 2 + 300] *= step > 1
            for parameter in parameters:
                parameter.grad = gradient.to(parameter)
        for optimizer in optimizers:
            optimizer.gradient_scale = torch.tensor(0.5, device=next(iter(optimizer.param_groups[0]["params"])).device)
            optimizer.step()
        for a, b in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(a, b.cpu()), (step, a.shape)
            for name, state in optimizers[0].state[a].items():
                assert torch.equal(state, optimizers[1].state[b][name].cpu()), (step, a.shape, name)
