"""Moments on the host: the same bits of parameters and states as on the device, whatever the optimizer and the cut."""

from collections.abc import Callable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from bench.training.live_bytes import LiveBytes
from torch import Tensor, nn, optim
from torch.optim import Optimizer
from torch.utils._pytree import tree_leaves, tree_map

from longspan.comm import World
from longspan.errors import ConfigError, ModelError
from longspan.layout import Layout
from longspan.model import host_arena
from longspan.model.marks import HOST_STORE
from longspan.plan.memory.settings import UPDATES_PARTS
from longspan.testing import backend, run_ranks
from longspan.train.optim.offload_states import OffloadedStates, offload_optimizer_states
from longspan.train.optim.one_pass_adamw import OnePassAdamW
from longspan.train.optim.optimizer import OptimizerChoice
from longspan.train.optim.state_buckets import STATES, total_state_bytes
from longspan.train.optim.stochastic_rounding import RoundingBits

BUCKET = 16 << 10
CPU = torch.device("cpu")
SHAPES = {"wide": (3, 4100), "small": (7,), "matrix": (60, 70), "last": (5, 3), "never": (9,), "later": (6, 2)}


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype, shapes: Mapping[str, tuple[int, ...]] = SHAPES) -> None:
        super().__init__()
        self.world: Any = SimpleNamespace(seed=3, step=0)
        draws = torch.Generator().manual_seed(0)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=draws).to(dtype)))


def _make(model: Model, kind: Any, arguments: Mapping[str, Any]) -> Optimizer:
    if isinstance(kind, OptimizerChoice):
        return kind.build(model.parameters(), rounding=RoundingBits(model, model.world))
    parameters = [*model.parameters()]
    return kind([{"params": parameters[:2]}, {"params": parameters[2:], "lr": 0.02}], lr=0.01, **arguments)


def _take_steps(model: Model, optimizer: Optimizer, steps: range) -> None:
    for step in steps:
        model.world.step, draws = step, torch.Generator().manual_seed(step)
        for name, parameter in model.named_parameters():
            gradient = torch.randn(parameter.shape, generator=draws).to(parameter)
            skipped = name == "never" or (name == "later" and step < 2) or (name == "small" and step == 2)
            parameter.grad = None if skipped else gradient
        optimizer.step()


def late(method: Any, streams: Callable[[Any], Sequence[Any]] | None = None) -> Any:
    """A method whose work on a GPU, on these streams or the current one, begins some milliseconds after what it waits
    for.
    """

    def late_method(self: Any, *arguments: Any) -> Any:
        for stream in [torch.cuda.current_stream()] if streams is None else streams(self):
            with torch.cuda.stream(stream):
                torch.cuda._sleep(4_000_000)
        return method(self, *arguments)

    return late_method


def _differences(a: Any, b: Any, path: str = "") -> list[str]:
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
    "adamw": (OnePassAdamW, {"weight_decay": 0.1}),
    "fused adamw": (optim.AdamW, {"fused": True, "weight_decay": 0.1}),
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
    "adamw by chance": (ADAMW, {}),
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


@pytest.mark.parametrize("kind", ["adamw", "sgd", "adagrad", "adamw by chance"])
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
        copied = tree_map(lambda x: x.clone() if isinstance(x, Tensor) else x, saved.state_dict())
        optimizer.load_state_dict(copied)
        assert not _differences(expected, _everything(model, optimizer))
    results = list[dict[str, Any]]()
    for model, optimizer in zip([*models, *again], [*optimizers, *resumed], strict=True):
        _take_steps(model, optimizer, range(3, 5))
        results.append(_everything(model, optimizer))
    assert not any(_differences(results[0], result) for result in results[1:])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("kind", ["adamw", "fused adamw", "amsgrad", "sgd", "nadam", "adamw by chance", "no states"])
def test_parameters_and_gradients_on_the_host_come_with_their_moments(kind: str, dtype: torch.dtype) -> None:
    shapes = SHAPES | {"empty": (0, 4)}
    models = [Model(dtype, shapes) for _ in range(2)]
    plain, inner = (_make(model, *(KINDS | {"no states": (optim.SGD, {})})[kind]) for model in models)
    optimizer = OffloadedStates(inner, CPU, bucket_bytes=BUCKET)
    names = dict(zip(models[1].parameters(), shapes, strict=True))
    for parameter, name in names.items():
        if name in ("wide", "small", "later", "empty"):
            setattr(parameter, HOST_STORE, None)
    updated = list[Tensor]()
    with pytest.MonkeyPatch.context() as patched:
        step = type(inner).step
        patched.setattr(inner, "step", lambda: updated.extend(inner.param_groups[0]["params"]) or step(inner))
        for steps in (range(1), range(1, 4)):
            for model, other in zip(models, (plain, optimizer), strict=True):
                _take_steps(model, other, steps)
            assert not _differences(_everything(models[0], plain), _everything(models[1], optimizer))
    places = {parameter.untyped_storage().data_ptr(): name for parameter, name in names.items() if parameter.numel()}
    in_place = {places.get(x.untyped_storage().data_ptr()) for x in updated} - {None}
    assert in_place == {"matrix", "last"}, "others are updated in copies"
    assert len(updated) > 4 * (len(shapes) - 1), "wide comes in parts"


def test_host_and_device_hold_what_they_say() -> None:
    model = Model(torch.float32, {"wide": (3, 41000), "matrix": (200, 70), "small": (7,), "empty": (0, 4)})
    optimizer = OffloadedStates(_make(model, optim.AdamW, {"amsgrad": True, "fused": True}), CPU, bucket_bytes=BUCKET)
    numbers = (3 * 41000, 200 * 70, 7, 0)
    expected = 3 * sum(max(-(-4 * count // 256), 1) * 256 for count in numbers)
    assert optimizer.host_bytes == expected
    _take_steps(model, optimizer, range(3))
    optimizer.load_state_dict(optimizer.state_dict())
    optimizer.state.clear()
    _take_steps(model, optimizer, range(3))
    assert optimizer.host_bytes == expected
    with LiveBytes() as counted:
        for x in tree_leaves([(p, p.grad, optimizer.state[p]) for p in model.parameters() if p.grad is not None]):
            x.view_as(x)  # what is there before counts from here on
        before = counted.now
        optimizer.step()
    added = counted.peak - before
    assert 1.4 * BUCKET < added <= optimizer.device_bytes + 256 <= 2 * BUCKET + 256  # and counts of steps


# ---- what is refused


class OfOnesOwn(optim.SGD):
    """May update parameters together."""


def test_keys_and_classes_name_the_same_optimizers() -> None:
    assert {getattr(optim, name.rpartition(".")[2]) for name in UPDATES_PARTS[2:]} | {OnePassAdamW} == {*STATES}


def _refusals(rank: int) -> None:
    with World(Layout(2), backend=backend(), timeout=60) as world:
        for kind, text in (
            (
                optim.Adafactor,
                "Adafactor is not known to update each number by itself, as states on the host need; use adamw",
            ),
            (OfOnesOwn, "OfOnesOwn is not known to update each number by itself"),
            (optim.SGD, "SGD keeps no states with these arguments"),
        ):
            optimizer = kind([*Model(torch.float32).to(world.device).parameters()], lr=0.1)
            with pytest.raises(ConfigError, match=text):
                offload_optimizer_states(optimizer, world)
        adamw = optim.AdamW(Model(torch.float32).to(world.device).parameters())
        with pytest.MonkeyPatch.context() as patched, pytest.raises(ModelError) as caught:
            patched.setattr(host_arena, "free_host_bytes", lambda: 200_000 if rank else None)
            offload_optimizer_states(adamw, world)
        each, said = total_state_bytes(adamw), str(caught.value)
        assert f"{2 * each:,} bytes" in said and f"{each:,} for one, and 200,000 are free" in said
        offloaded = offload_optimizer_states(adamw, world)
        with pytest.raises(ConfigError, match="wait on the host already"):
            offload_optimizer_states(offloaded, world)


def test_what_cannot_wait_on_the_host_is_refused_on_every_rank() -> None:
    run_ranks(_refusals, 2)


def test_a_scheduler_and_a_closure_drive_it_as_any_optimizer() -> None:
    results = list[list[Any]]()
    for place in ("device", "host"):
        model = Model(torch.float32)
        optimizer: Any = _make(model, optim.SGD, {"momentum": 0.9})
        optimizer = OffloadedStates(optimizer, CPU, bucket_bytes=BUCKET) if place == "host" else optimizer
        scheduler = optim.lr_scheduler.StepLR(optimizer, 1, 0.5)

        def loss_of(model: Model = model, optimizer: Any = optimizer) -> Tensor:
            optimizer.zero_grad()
            loss = sum((p.square().sum() for p in model.parameters()), torch.zeros(()))
            loss.backward()
            return loss

        losses = list[Any]()
        for _ in range(3):
            losses.append(optimizer.step(loss_of).detach())
            scheduler.step()
        results.append([*losses, _everything(model, optimizer)])
    assert not _differences(*results)
