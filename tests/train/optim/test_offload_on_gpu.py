"""Moments on the host of a GPU: the same bits, also where copies are late; registered memory of exact size."""

from typing import Any

import pytest
import torch
from torch import Tensor, optim
from torch.utils._pytree import tree_leaves, tree_map

from longspan.model.marks import HOST_STORE
from longspan.train.optim import offload_states as module
from longspan.train.optim.offload_states import OffloadedStates
from tests.train.optim.test_offload_states import (
    ADAMW,
    KINDS,
    Model,
    _differences,
    _everything,
    _make,
    _take_steps,
    late,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]
BUCKET = 1 << 20
SHAPES = {"wide": (3, 410_000), "small": (7,), "matrix": (600, 700), "last": (5, 3), "never": (9,), "later": (600, 2)}
GPU = torch.device("cuda", 0)
COPIES = ((module._StateCopies, "fetch"), (module._StateCopies, "store"))
LATE: dict[str, Any] = {
    "none": ((), None),
    "copies": (COPIES, lambda copies: (copies._to_device, copies._to_host)),
    "stores": (COPIES[1:], lambda copies: (copies._to_device, copies._to_host)),
    "updates": (((module._OffloadedUpdate, "_update_bucket"),), None),
}


def _make_late(place: str, patched: pytest.MonkeyPatch) -> None:
    methods, streams = LATE[place]
    for owner, name in methods:
        patched.setattr(owner, name, late(getattr(owner, name), streams))


@pytest.mark.parametrize("place", LATE)
@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd", "nadam", "adagrad", "adamw by chance"])
def test_parameters_and_states_are_the_same_bits(kind: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _make_late(place, monkeypatch)
    models = [Model(torch.bfloat16 if KINDS[kind][0] is ADAMW else torch.float32, SHAPES).to(GPU) for _ in range(2)]
    plain, inner = (_make(model, *KINDS[kind]) for model in models)
    offloaded = OffloadedStates(inner, GPU, bucket_bytes=BUCKET)
    for steps in (range(1), range(1, 4)):
        for model, optimizer in zip(models, (plain, offloaded), strict=True):
            _take_steps(model, optimizer, steps)
        on_device, on_host = _everything(models[0], plain), _everything(models[1], offloaded)
        assert not _differences(*(_moved(state, "cpu") for state in (on_device, on_host)))
        large = [x for x in tree_leaves(on_host["state"]) if isinstance(x, Tensor) and x.ndim]
        assert large and all(x.device.type == "cpu" and x.is_pinned() for x in large)


def _moved(state: Any, device: str) -> Any:
    return tree_map(lambda x: x.to(device) if isinstance(x, Tensor) else x, state)


def test_states_are_loaded_and_two_buckets_are_on_the_device() -> None:
    model = Model(torch.float32, SHAPES).to(GPU)
    optimizer = OffloadedStates(_make(model, optim.AdamW, {"fused": True}), GPU, bucket_bytes=BUCKET)
    counts = [p.numel() for p in model.parameters()]
    assert optimizer.host_bytes == sum(2 * -(-4 * count // 256) * 256 for count in counts)
    _take_steps(model, optimizer, range(2))
    optimizer.load_state_dict(_moved(optimizer.state_dict(), "cuda"))  # as from an optimizer with states on the device
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    optimizer.step()
    added = torch.cuda.max_memory_allocated() - before
    assert 1.4 * BUCKET < added <= optimizer.device_bytes + (1 << 16) <= 2 * BUCKET + (1 << 16)
    assert torch.cuda.memory_allocated() - before < 1 << 16
    assert optimizer.host_bytes == sum(2 * -(-4 * count // 256) * 256 for count in counts)


@pytest.mark.parametrize("place", ["none", "copies", "updates"])
@pytest.mark.parametrize("kind", ["adamw", "adam", "sgd", "adamw by chance"])
def test_parameters_and_gradients_come_from_the_host(kind: str, place: str, monkeypatch: pytest.MonkeyPatch) -> None:
    _make_late(place, monkeypatch)
    dtype = torch.bfloat16 if KINDS[kind][0] is ADAMW else torch.float32
    on_device, on_host = Model(dtype, SHAPES).to(GPU), Model(dtype, SHAPES)
    for parameter in on_host.parameters():
        parameter.data = parameter.data.pin_memory()
        setattr(parameter, HOST_STORE, None)
    plain, inner = (_make(model, *KINDS[kind]) for model in (on_device, on_host))
    offloaded = OffloadedStates(inner, GPU, bucket_bytes=BUCKET)
    _take_steps(on_device, plain, range(4))
    _take_steps(on_host, offloaded, range(4))
    expected, result = _everything(on_device, plain), _everything(on_host, offloaded)
    assert not _differences(*(_moved(state, "cpu") for state in (expected, result)))
    assert all(parameter.is_pinned() for parameter in on_host.parameters())
