"""The kernel of AdamW on a GPU: the bits of the reference on a CPU, also past 2^31 numbers; few launches, no wait."""

from importlib.util import find_spec
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from longspan.train.optim import one_pass_adamw
from longspan.train.optim.one_pass_adamw import Factors, Key, OnePassAdamW, Places, RoundingBits, Update, apply_by_torch
from tests.train.optim import update_cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available() or find_spec("triton") is None, reason="needs a CUDA device"),
]
PAST = 2**31 + 70_000


@pytest.mark.parametrize("scale", update_cases.SCALES)
def test_every_bit_is_the_references(scale: float | None) -> None:
    assert not update_cases.update_differences("cuda", scale)


@pytest.mark.parametrize("by_chance", [False, True])
def test_numbers_past_two_to_the_31_are_updated_alike(by_chance: bool) -> None:
    parameter, gradient, mean, square = (torch.empty(PAST, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    for tensor in (parameter, gradient, mean):
        tensor.normal_()
    square.uniform_()
    factors, key = Factors.of(update_cases.GROUP, 2), Key(5**13, 3**20) if by_chance else None
    whole = Places.of((PAST,), (slice(0, PAST),)) if by_chance else None
    places = (0, 2**30, 2**31 - 5000, 2**31, PAST - 10_001)
    expected = list[Update]()
    for first in places:
        part = [tensor[first : first + 10_001].cpu() for tensor in (parameter, gradient, mean, square)]
        expected.append(Update(*part, factors, key, whole._replace(start=first) if whole else None))
        apply_by_torch(expected[-1])
    one_pass_adamw.launch_updates([Update(parameter, gradient, mean, square, factors, key, whole)], None)
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
