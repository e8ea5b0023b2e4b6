"""AdamW in one pass: torch's formulas; the same bits however a parameter is sharded; scales that leave all as it is."""

import math
from itertools import combinations
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

from longspan.errors import ModelError
from longspan.train.optim.adamw_updates import Factors, Update, apply_update_by_torch, apply_updates
from longspan.train.optim.offload_states import OffloadedStates
from longspan.train.optim.one_pass_adamw import OnePassAdamW
from longspan.train.optim.optimizer import build_optimizer
from longspan.train.optim.stochastic_rounding import (
    STREAMS,
    Places,
    RandomKey,
    RoundingBits,
    random_words,
    rounding_noise,
)

SETTINGS: dict[str, Any] = {"lr": 1e-2, "betas": (0.8, 0.95), "eps": 1e-6, "weight_decay": 0.3}
GROUP: dict[str, Any] = {"lr": 1e-2, "betas": (0.9, 0.95), "weight_decay": 0.1, "eps": 1e-8, "maximize": False}
SHAPES = [(7, 5), (64,), (3, 4, 5), ()]


def _parameters(dtype: torch.dtype) -> list[nn.Parameter]:
    draws = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=draws, dtype=torch.float64).to(dtype)) for shape in SHAPES]


def _train(optimizer: optim.Optimizer, steps: int, scale: float = 1.0) -> None:
    draws = torch.Generator().manual_seed(1)
    for step in range(steps):
        for index, parameter in enumerate(optimizer.param_groups[0]["params"]):
            gradient = torch.randn(parameter.shape, generator=draws, dtype=torch.float64).to(parameter)
            parameter.grad = None if index == 1 and step == 0 else scale * gradient
        optimizer.step()


@pytest.mark.parametrize("maximize", [False, True])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-14), (torch.float32, 2e-6)], ids=str)
def test_it_is_torchs_adamw(dtype: torch.dtype, bound: float, maximize: bool) -> None:
    """Of a formula with a dropped term the first step would differ by a hundredth."""
    exact = optim.AdamW(_parameters(torch.float64), **SETTINGS, maximize=maximize, foreach=False)
    optimizer = OnePassAdamW(_parameters(dtype), **SETTINGS, maximize=maximize)
    for each in (exact, optimizer):
        _train(each, 4)
    pairs = zip(exact.param_groups[0]["params"], optimizer.param_groups[0]["params"], strict=True)
    for a, b in pairs:
        assert torch.allclose(b.double(), a, rtol=bound, atol=bound)
        for name, value in exact.state[a].items():
            assert torch.allclose(optimizer.state[b][name].double(), value.double(), rtol=bound, atol=bound), name


def test_a_scale_multiplies_gradients_and_leaves_them_as_they_are() -> None:
    scaled, exact = (OnePassAdamW(_parameters(torch.float32), **SETTINGS) for _ in range(2))
    scaled.gradient_scale = torch.tensor(0.25)
    _train(scaled, 3)
    _train(exact, 3, scale=0.25)
    for a, b in zip(*(each.param_groups[0]["params"] for each in (scaled, exact)), strict=True):
        assert torch.equal(a, b) and torch.equal(a.grad * 0.25, b.grad)


@pytest.mark.parametrize("offloaded", [False, True])
def test_a_scale_that_is_no_number_takes_no_step(offloaded: bool) -> None:
    after = list[list[Tensor]]()
    for fails in (False, True):
        model: Any = nn.ParameterList([nn.Parameter(torch.randn(40, 30).bfloat16())])
        nn.init.constant_(model[0], 1.0)
        inner = OnePassAdamW(model.parameters(), lr=1e-3, rounding=RoundingBits(model, _world(5)))
        optimizer = OffloadedStates(inner, CPU, bucket_bytes=1 << 11) if offloaded else inner
        model[0].grad = torch.linspace(-1, 1, 1200).view(40, 30).bfloat16()
        optimizer.step()
        if fails:
            before = [model[0].clone(), *(x.clone() for x in optimizer.state[model[0]].values())]
            inner.gradient_scale = torch.tensor(math.nan)
            optimizer.step()
            inner.gradient_scale = None
            inner.undo_step_counts(optimizer.state)
            assert all(map(torch.equal, before, [model[0], *optimizer.state[model[0]].values()]))
        optimizer.step()
        after.append([model[0].detach(), *optimizer.state[model[0]].values()])
    assert all(map(torch.equal, *after))


def test_what_it_takes() -> None:
    whole, turned = (nn.Parameter(x) for x in (torch.ones(6, 4), torch.ones(4, 6).t()))
    for parameter in (whole, turned):
        parameter.grad = torch.arange(24.0).view(6, 4)
        OnePassAdamW([parameter], lr=0.1).step()
    assert torch.equal(whole, turned) and not (whole == 1).any()
    table = nn.Embedding(5, 4, sparse=True)
    table(torch.tensor([1])).sum().backward()
    with pytest.raises(ModelError, match=r"gradient of layout torch.sparse_coo; it takes dense real ones"):
        OnePassAdamW(table.parameters()).step()
    for only_torchs in ({"amsgrad": True}, {"fused": True}):
        assert type(build_optimizer(nn.Linear(3, 2), **only_torchs)) is optim.AdamW
    assert type(build_optimizer(nn.Linear(3, 2), maximize=True, eps=1e-6)) is OnePassAdamW


# ---- random bits


def _world(step: int) -> Any:
    return SimpleNamespace(seed=3, step=step)


CPU = torch.device("cpu")
KEYS = [(3**20, 5**13), (11**9, 7**11 + 1)]
OTHER_KEY = (0x12345678, 0x9ABCDEF1)
BLOCKS = [
    ((5, 7), (slice(0, 5), slice(0, 7))),
    ((5, 7), (slice(2, 4), slice(0, 7))),
    ((5, 7), (slice(1, 5), slice(3, 6))),
    ((5, 7), (slice(4, 5), slice(6, 7))),
    ((6, 5, 4), (slice(2, 5), slice(1, 4), slice(0, 4))),
    ((6, 5, 4), (slice(2, 5), slice(0, 5), slice(1, 3))),
    ((6, 5, 4), (slice(2, 5), slice(1, 4), slice(1, 3))),
    ((6, 5, 4), (slice(2, 5), slice(1, 2), slice(1, 3))),
    ((6, 1, 4), (slice(0, 6), slice(0, 1), slice(3, 4))),
    ((9,), (slice(3, 8),)),
    ((), ()),
]


def test_places_are_those_in_the_whole() -> None:
    for shape, block in BLOCKS:
        expected, places = torch.arange(math.prod(shape)).view(shape)[block].flatten(), Places.from_block(shape, block)
        assert torch.equal(places.indices(0, len(expected), CPU), expected), (shape, block)
        later = places._replace(start=1)
        assert torch.equal(later.indices(0, len(expected) - 1, CPU), expected[1:]), (shape, block)


def test_words_are_fixed() -> None:
    """Runs go on with the same bits after an update of this package."""
    words = random_words(RandomKey(*KEYS[0]), torch.tensor([0, 1, 2**40]))
    assert words.tolist() == [2916905539, 1624711879, 257303690]
    assert len(torch.stack([rounding_noise(words, stream) for stream in range(STREAMS)]).unique()) == 3 * STREAMS


def _noise(key: RandomKey, places: Tensor) -> Tensor:
    """The numbers from 0 to 2^16 that round the three streams, (3, places)."""
    words = random_words(key, places)
    return torch.stack([rounding_noise(words, stream) for stream in range(STREAMS)])


@pytest.mark.parametrize("key", KEYS, ids=str)
def test_noise_fills_its_range_evenly(key: tuple[int, int]) -> None:
    """By chi-square: of each stream its 2^16 values; of pairs of streams, neighbours and steps their upper bits."""
    places = torch.arange(1 << 21)
    noise, after = (_noise(RandomKey(*each), places) for each in (key, OTHER_KEY))
    pairs = [(noise[0], noise[1]), (noise[0], noise[2]), (noise[1], noise[2])]
    pairs += [(stream[1:], stream[:-1]) for stream in noise]
    pairs += [(stream[4096:], stream[:-4096]) for stream in noise]
    pairs += list(zip(noise, after, strict=True))
    cells = [(stream, 1 << 16) for stream in noise] + [(a >> 9 << 7 | b >> 9, 1 << 14) for a, b in pairs]
    cells += [(noise[0] >> 11 << 10 | noise[1] >> 11 << 5 | noise[2] >> 11, 1 << 15)]
    for values, count in cells:
        expected = len(values) / count
        counts = torch.bincount(values, minlength=count).double()
        excess = ((counts - expected).square().sum() / expected - (count - 1)) / math.sqrt(2 * (count - 1))
        assert abs(excess) < 5, (count, excess)


def test_places_with_the_same_low_word_have_other_bits() -> None:
    """Numbers of a parameter past 2^32 do not repeat those before, in their order or any other."""
    places = torch.arange(1 << 16)
    words = [random_words(RandomKey(*KEYS[0]), places + high * 2**32) for high in (0, 1, 2)]
    assert all((a == b).sum() <= 5 for a, b in combinations(words, 2))


@pytest.mark.parametrize("down, across", [(6, 2), (3, 6), (3, 2)])
def test_shards_are_rounded_as_the_whole(down: int, across: int) -> None:
    draws = torch.Generator().manual_seed(0)
    shape, key = (6, 6), RandomKey(12345, 678)
    tensors = [torch.randn(shape, generator=draws).bfloat16() for _ in range(3)]
    tensors.append(tensors[2].square())
    factors = Factors.from_parameter_group(GROUP, 2)
    whole = [tensor.clone() for tensor in tensors]
    apply_update_by_torch(Update(*whole, factors, key, Places.from_block(shape, (slice(0, 6), slice(0, 6)))))
    for i in range(0, 6, down):
        for j in range(0, 6, across):
            block = slice(i, i + down), slice(j, j + across)
            shard = [tensor[block].clone() for tensor in tensors]
            apply_updates([Update(*shard, factors, key, Places.from_block(shape, block))], None)
            assert all(torch.equal(part, result[block]) for part, result in zip(shard, whole, strict=True))
    assert not torch.equal(whole[0], tensors[0])
