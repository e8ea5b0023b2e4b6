"""Moments on the host: the same bits of parameters and states as on the device, whatever the optimizer and the cut."""

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.optim import Optimizer

from longspan.train.optim.offload_states import OffloadedStates
from longspan.train.optim.optimizer import OptimizerChoice
from longspan.train.optim.state_parts import StateSizes, cut_into_buckets
from longspan.train.optim.stochastic_rounding import StochasticRounding

BUCKET = 16 << 10
CPU = torch.device("cpu")
SHAPES = {"wide": (3, 4100), "small": (7,), "matrix": (60, 70), "last": (5, 3), "never": (9,), "later": (6, 2)}


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> None:
        super().__init__()
        draws = torch.Generator().manual_seed(0)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=draws).to(dtype)))


def _make(model: nn.Module, kind: Any, arguments: Mapping[str, Any]) -> Optimizer:
    """The optimizer over two groups; `kind` may be a choice that is rounded by chance."""
    if isinstance(kind, OptimizerChoice):
        world: Any = SimpleNamespace(seed=3, step=0)
        return StochasticRounding(kind, model, world)
    parameters = [*model.parameters()]
    return kind([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.02}], lr=0.01, **arguments)


def _take_steps(model: nn.Module, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        draws = torch.Generator().manual_seed(step)
        for name, parameter in model.named_parameters():
            gradient = torch.randn(parameter.shape, generator=draws).to(parameter.dtype)
            skipped = name == "never" or (name == "later" and step < 2) or (name == "small" and step == 2)
            parameter.grad = None if skipped else gradient
        optimizer.step()


def _differences(a: Any, b: Any, path: str = "") -> list[str]:
    """Paths at which two nested values are not the same bits of the same kind."""
    if isinstance(a, Mapping):
        keys = [] if [*a] == [*b] else [f"{path}: {[*a]} {[*b]}"]
        return keys + [line for key in a for line in _differences(a[key], b[key], f"{path}.{key}")]
    if isinstance(a, list):
        return [line for i, pair in enumerate(zip(a, b, strict=True)) for line in _differences(*pair, f"{path}.{i}")]
    if isinstance(a, Tensor):
        same = (a.dtype, a.shape, a.stride()) == (b.dtype, b.shape, b.stride()) and torch.equal(a, b)
        return [] if same else [path]
    return [] if a == b else [path]


def _everything(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    return {"weights": model.state_dict(), **optimizer.state_dict()}


ADAMW = OptimizerChoice("adamw", 1e-2, 0.1, (("betas", (0.9, 0.95)),))
KINDS: dict[str, tuple[Any, dict[str, Any]]] = {
    "adamw": (optim.AdamW, {"fused": True, "weight_decay": 0.1}),
    "amsgrad": (optim.AdamW, {"amsgrad": True}),
    "adam": (optim.Adam, {"foreach": True, "maximize": True}),
    "sgd": (optim.SGD, {"momentum": 0.9, "nesterov": True}),
    "nadam": (optim.NAdam, {"weight_decay": 0.1}),
    "radam": (optim.RAdam, {}),
    "adamax": (optim.Adamax, {}),
    "adadelta": (optim.Adadelta, {}),
    "adagrad": (optim.Adagrad, {}),  # has states before its first step
    "rmsprop": (optim.RMSprop, {"centered": True, "momentum": 0.5}),
    "rprop": (optim.Rprop, {}),
    "asgd": (optim.ASGD, {}),
    "adafactor": (optim.Adafactor, {}),  # sums of rows and columns: not updated in parts
    "adamw by chance": (ADAMW, {}),
    "sgd by chance": (OptimizerChoice("sgd", 1e-2, 0.0, (("momentum", 0.9),)), {}),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_parameters_and_states_are_the_same_bits(kind: str, dtype: torch.dtype) -> None:
    models = [Model(dtype) for _ in range(2)]
    plain, inner = (_make(model, *KINDS[kind]) for model in models)
    offloaded = OffloadedStates(inner, CPU, bucket_bytes=BUCKET)
    for steps in (range(1), range(1, 4)):
        for model, optimizer in zip(models, (plain, offloaded), strict=True):
            _take_steps(model, optimizer, steps)
        expected, result = _everything(models[0], plain), _everything(models[1], offloaded)
        assert not _differences(expected, result)
    assert not inner.state


@pytest.mark.parametrize("kind", ["adamw", "sgd", "adagrad", "adafactor", "adamw by chance"])
def test_states_are_loaded_from_either_place(kind: str) -> None:
    models = [Model(torch.bfloat16) for _ in range(2)]
    optimizers = [_make(model, *KINDS[kind]) for model in models]
    optimizers[1] = OffloadedStates(optimizers[1], CPU, bucket_bytes=BUCKET)
    for model, optimizer in zip(models, optimizers, strict=True):
        _take_steps(model, optimizer, range(3))
    expected = _everything(models[0], optimizers[0])
    again = [Model(torch.bfloat16) for _ in range(2)]
    resumed = [OffloadedStates(_make(again[0], *KINDS[kind]), CPU, bucket_bytes=BUCKET), _make(again[1], *KINDS[kind])]
    for model, optimizer, saved in zip(again, resumed, optimizers, strict=True):
        model.load_state_dict(models[0].state_dict())
        copied = torch.utils._pytree.tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, saved.state_dict())
        optimizer.load_state_dict(copied)
        assert not _differences(expected, _everything(model, optimizer))
    for model, optimizer in zip([*models, *again], [*optimizers, *resumed], strict=True):
        _take_steps(model, optimizer, range(3, 5))
    expected = _everything(models[0], optimizers[0])
    for model, optimizer in zip([models[1], *again], [optimizers[1], *resumed], strict=True):
        assert not _differences(expected, _everything(model, optimizer))


def test_host_and_device_hold_what_they_say(monkeypatch: pytest.MonkeyPatch) -> None:
    """Exact bytes of the host, before the first step and after a load; on the device two buckets and no more."""
    model = Model(torch.float32, {"wide": (3, 41000), "matrix": (200, 70), "small": (7,), "empty": (0, 4)})
    optimizer = OffloadedStates(_make(model, optim.AdamW, {"amsgrad": True}), CPU, bucket_bytes=BUCKET)
    numbers = (3 * 41000, 200 * 70, 7, 0)
    expected = 3 * sum(max(-(-4 * count // 256), 1) * 256 for count in numbers)
    here, most = set[int](), 0

    def empty_like(like: Tensor, **options: Any) -> Tensor:
        nonlocal most
        x = make(like, **options)
        if options["device"] != "meta":
            size = x.untyped_storage().nbytes()
            here.add(key := x.untyped_storage()._cdata)
            sizes[key] = size
            weakref.finalize(x.untyped_storage(), here.discard, key)
            most = max(most, sum(sizes[key] for key in here))
        return x

    make, sizes = torch.empty_like, dict[int, int]()
    for steps in (range(1), range(1, 4)):
        assert optimizer.host_bytes == expected
        _take_steps(model, optimizer, steps)
        assert optimizer.host_bytes == expected
        optimizer.load_state_dict(optimizer.state_dict())
        monkeypatch.setattr(torch, "empty_like", empty_like)
    assert optimizer.device_bytes <= 2 * BUCKET
    assert 1.5 * BUCKET < most <= optimizer.device_bytes


def test_parts_hold_every_number_once() -> None:
    model = Model(torch.float32)
    optimizer = _make(model, optim.AdamW, {})
    buckets = [*cut_into_buckets(optimizer, StateSizes(optimizer), BUCKET, every=True)]
    assert len(buckets) > 8 and all(bucket.bytes <= BUCKET for bucket in buckets)
    for parameter in model.parameters():
        parts = [part for bucket in buckets for part in bucket.parts if part.parameter is parameter]
        seen = torch.cat([part.numbers(torch.arange(parameter.numel())) for part in parts])
        assert torch.equal(seen, torch.arange(parameter.numel()))
        assert [part.last for part in parts] == [False] * (len(parts) - 1) + [True]
