"""What waits on the host comes back as it was, in any order of passes, one layer ahead; on GPUs too."""

import gc
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from longspan.model.activations.host_offload import (
    ON_DEVICE,
    HostArena,
    HostOffload,
    ParkedLayer,
)
from tests.model.activations.test_host_arena import CPU, DEVICES, open_arena


def test_a_tensor_keeps_its_shape_type_and_order_in_memory() -> None:
    offload = HostOffload(HostArena(CPU))
    tensors = [
        torch.arange(12.0).view(3, 4).t(),
        torch.arange(6, dtype=torch.int16)[::2],
        torch.ones(1).expand(3, 2),
        torch.ones(0, 5),
        torch.randn(2, 3, dtype=torch.bfloat16),
        torch.tensor(True),
    ]
    park = offload.open_layer(first=True)
    for x, fetch in [(x, park(x)) for x in tensors]:
        y = fetch()
        assert torch.equal(x, y) and x.dtype == y.dtype
        assert not x.numel() or x.stride() == y.stride() or not x.is_contiguous()


class Block(nn.Module):
    """A layer that saves several tensors, of which the third is parked by hand as attention's outputs are."""

    def __init__(self, device: torch.device, rows: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, rows, dtype=torch.float64, device=device) / rows)

    def forward(self, x: Tensor) -> Tensor:
        return x + (x @ self.weight).tanh() * x.sin()


def _run(blocks: list[Block], x: Tensor, offload: HostOffload | None) -> Tensor:
    """A pass through all layers, each under a checkpoint whose input and two copies of it wait on the host."""
    for number, block in enumerate(blocks):
        if offload is None:
            x = block(x)
            continue
        park = offload.open_layer(first=number == 0)
        with saved_tensors_hooks(park, lambda fetch: fetch()):
            x = checkpoint(_Keeping(park, block), x, use_reentrant=False)
    return x


class _Keeping:
    """Runs a layer and keeps two more tensors on the host, which recomputation compares."""

    def __init__(self, park: ParkedLayer, block: Block) -> None:
        self._park, self._block, self._fetch = park, block, list[Any]()

    def __call__(self, x: Tensor) -> Tensor:
        if not self._fetch:
            self._fetch = [self._park(x.detach() + 1), self._park(x.detach()[:1] * 2)]
        else:
            assert torch.equal(self._fetch[0](), x + 1) and torch.equal(self._fetch[1](), x[:1] * 2)
        return self._block(x)


class LateCopies:
    """Stands for a CUDA stream on a CPU: copies on it are made when somebody waits for them, and not before."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._copies, self._entered, copy = deque[Any](), False, Tensor.copy_

        def copy_later(x: Tensor, source: Tensor, non_blocking: bool = False) -> Tensor:
            if not (self._entered and non_blocking):
                return copy(x, source)
            self._copies.append(partial(copy, x, source))
            return x

        self.registered = dict[int, int]()
        cudart = SimpleNamespace(cudaHostRegister=self._register, cudaHostUnregister=self.registered.pop)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: cudart)
        monkeypatch.setattr(Tensor, "copy_", copy_later)
        monkeypatch.setattr(torch.cuda, "stream", self._enter)
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device: self)
        monkeypatch.setattr(torch.cuda, "Event", lambda: SimpleNamespace(record=lambda stream: None))

    @contextmanager
    def _enter(self, stream: Any) -> Iterator[None]:
        assert stream is self
        self._entered = True
        yield
        self._entered = False

    def _register(self, address: int, size: int, flags: int) -> int:
        assert address not in self.registered and not address % 4096
        self.registered[address] = size
        return 0

    def wait_stream(self, stream: Any) -> None:
        """What is computed here has been computed."""

    def wait_event(self, event: Any) -> None:
        self.synchronize()

    def synchronize(self) -> None:
        while self._copies:
            self._copies.popleft()()


@pytest.mark.parametrize("device", DEVICES)
def test_passes_in_any_order_kept_graphs_and_dropped_ones(device: str) -> None:
    with open_arena(device) as arena:
        _try_orders(arena, 512 if device == "cuda" else 32)


def test_copies_are_waited_for_and_memory_is_registered_once(monkeypatch: pytest.MonkeyPatch) -> None:
    late = LateCopies(monkeypatch)
    with open_arena("cpu") as arena:
        arena.copies = late  # pyright: ignore[reportAttributeAccessIssue]
        _try_orders(arena, 32)
        assert [*late.registered.values()] == [arena.bytes]
    assert not late.registered


def _try_orders(arena: HostArena, rows: int) -> None:
    """Backward passes of three graphs in several orders, one of them twice, one dropped."""
    torch.manual_seed(0)
    blocks = [Block(arena.device, rows) for _ in range(6)]
    inputs = [torch.randn(rows, rows, dtype=torch.float64, device=arena.device).requires_grad_() for _ in range(3)]
    weights = [block.weight for block in blocks]
    expected = [torch.autograd.grad(_run(blocks, x, None).sum(), (x, *weights)) for x in inputs]
    offload, bytes = HostOffload(arena), list[int]()
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0), (1, 0, 2)):
        outs: list[Tensor | None] = [_run(blocks, x, offload) for x in inputs]
        a_layer = rows * rows * 8 * 2 + rows * 8
        assert arena.bytes_in_use == 3 * len(blocks) * a_layer
        bytes.append(arena.bytes)
        for number in order:
            out, leaves = outs[number], (inputs[number], *weights)
            assert out is not None
            if number == 0:
                torch.autograd.grad(out.sum(), leaves, retain_graph=True)
            if number == 2 and order[0] == 1:
                out = outs[number] = None  # dropped without a backward pass
                gc.collect()
                continue
            gradients = torch.autograd.grad(out.sum(), leaves)
            assert all(torch.equal(a, b) for a, b in zip(gradients, expected[number], strict=True))
            outs[number] = None
        out = None
        outs.clear()
        assert arena.bytes_in_use == 0
    assert len(set(bytes)) == 1 and arena.parts == 1


@pytest.mark.gpu
@pytest.mark.parametrize("late", ["copies", "kernels"])
def test_a_gpu_holds_two_layers_at_most_and_waits_for_copies(late: str) -> None:
    """With either stream far behind the other; the host runs ahead of both."""
    with open_arena("cuda") as arena:
        rows, layers = 1024, 8
        blocks = [Block(arena.device, rows) for _ in range(layers)]
        x = torch.randn(rows, rows, dtype=torch.float64, device=arena.device).requires_grad_()
        leaves = (x, *(block.weight for block in blocks))
        expected = torch.autograd.grad(_run(blocks, x, None).sum(), leaves)
        offload, a_layer = HostOffload(arena), rows * rows * 8 * 2 + rows * 8
        for _ in range(2):
            before = torch.cuda.memory_allocated(arena.device)
            _delay(arena, late)
            out = _run(blocks, x, offload)
            held = torch.cuda.memory_allocated(arena.device) - before
            # The output, and what the last two layers parked; their inputs are the outputs of the layers before.
            assert held <= rows * rows * 8 + ON_DEVICE * a_layer + (1 << 20), held
            _delay(arena, late)
            gradients = torch.autograd.grad(out.sum(), leaves)
            assert all(torch.equal(a, b) for a, b in zip(gradients, expected, strict=True))
            del out, gradients
        assert arena.bytes == layers * a_layer and arena.parts == 1


def _delay(arena: HostArena, late: str) -> None:
    stream = arena.copies if late == "copies" else torch.cuda.current_stream(arena.device)
    with torch.cuda.stream(stream):
        torch.cuda._sleep(200_000_000)  # clock cycles: a tenth of a second


@pytest.mark.gpu
def test_a_tensor_that_is_modified_before_it_is_copied_is_an_error() -> None:
    with open_arena("cuda") as arena:
        offload, x = HostOffload(arena), torch.ones(4, device=arena.device)
        fetch = offload.open_layer(first=True)(x)
        x.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            fetch()


@pytest.mark.parametrize("tensors", [1, 2, 7])
def test_one_whole_layer_is_fetched_ahead_and_no_more(tensors: int) -> None:
    """By the tensors that are on the device whenever one is asked for."""
    offload = HostOffload(HostArena(CPU))
    layers, fetches = list[ParkedLayer](), list[list[Any]]()
    for number in range(5):
        park = offload.open_layer(first=number == 0)
        fetches.append([park(torch.full((3,), float(number))) for _ in range(tensors)])
        layers.append(park)
    for number in reversed(range(5)):
        for index, fetch in enumerate(fetches[number]):
            assert fetch().tolist() == [number] * 3
            here = [len(layer._on_device) for layer in layers]
            assert here == [tensors * (i == number - 1) + (tensors - 1 - index) * (i == number) for i in range(5)]
    assert fetches[4][0]().tolist() == [4] * 3, "once more"
    for layer in layers:
        layer.free_device_tensors()
    assert fetches[3][0](ahead=False).tolist() == [3] * 3 and not layers[2]._on_device, "as a segment does"
    assert sum(bool(layer._on_device) for layer in layers) <= ON_DEVICE
    other = offload.open_layer(first=True)(torch.zeros(1))
    other()
    assert sum(bool(layer._on_device) for layer in layers) <= 1, "another pass fetches nothing of this one"


def test_an_error_in_a_layer_frees_what_was_kept() -> None:
    class Failing(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise ValueError("a layer failed")

    offload, x = HostOffload(HostArena(CPU)), torch.randn(4, 4, dtype=torch.float64, requires_grad=True)
    blocks: Any = [Block(CPU, 4), Block(CPU, 4), Failing()]
    with pytest.raises(ValueError, match="a layer failed"):
        _run(blocks, x, offload)
    gc.collect()
    assert offload.arena.bytes_in_use == 0
    out = _run(blocks[:2], x, offload)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.autograd.grad(_run(blocks[:2], x, None).sum(), x)[0])
