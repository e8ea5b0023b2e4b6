"""Ranges of the host's arena are exact and free with what holds them; what waits there comes back as it was, one layer
ahead, in any order of passes, on GPUs too."""

import gc
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from longspan import host
from longspan.comm import World
from longspan.errors import ModelError
from longspan.host import free_host_bytes
from longspan.layout import Layout
from longspan.model import host_arena, prepare
from longspan.model.activations.host_offload import HOST_OFFLOAD, ON_DEVICE, HostOffload, ParkedLayer
from longspan.model.host_arena import HostArena, HostRange, check_free_host_memory
from longspan.plan import plan_fixed
from longspan.testing import run_ranks
from longspan.train import run_step
from tests.model.deep import deep
from tests.model.stock import texts

CPU = torch.device("cpu")
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@contextmanager
def open_arena(device: str, bytes: int = 0) -> Iterator[HostArena]:
    if device == "cuda" and not torch.cuda.is_available():
        pytest.skip("no GPU here")
    arena = HostArena(torch.device(device, 0) if device == "cuda" else CPU, bytes)
    yield arena
    arena.close()


def bytes_in_use(arena: HostArena) -> int:
    with arena._lock:
        arena._reclaim_freed_ranges()
        return arena._used


@pytest.mark.parametrize("device", DEVICES)
def test_an_arena_takes_what_is_in_use_at_once_and_takes_it_once(device: str) -> None:
    with open_arena(device) as arena:
        for sizes in ((100, 1000, 256), (1000, 100, 256), (1536,), (1, 0, 1000)):  # the first needs the most
            ranges = [arena.take_range(size) for size in sizes]
            assert bytes_in_use(arena) == sum(max(256, -(-size // 256) * 256) for size in sizes)
            addresses = sorted((place.memory.data_ptr(), place.memory.numel()) for place in ranges)
            assert all(a + size <= b for (a, size), (b, _) in pairwise(addresses))
            if device == "cuda":
                assert all(place.memory.is_pinned() for place in ranges if place.memory.numel())
            ranges.clear()
            assert arena.bytes == 1536 and bytes_in_use(arena) == 0
        assert arena.parts == 1, "what it grew by is one registration now"
        ranges = [arena.take_range(1536), arena.take_range(5)]
        assert (arena.bytes, arena.parts) == (1792, 2)
        arena.close()
        assert arena.bytes == 0 and ranges[0].memory.fill_(3).sum() == 3 * 1536, "what is in use stays"


def find_host_arena(model: nn.Module) -> HostArena | None:
    offloads = (getattr(module, HOST_OFFLOAD, None) for module in model.modules())
    return next((offload.arena for offload in offloads if isinstance(offload, HostOffload)), None)


def _held(model: nn.Module, plan: Any, documents: Any, world: World) -> tuple[int, int, int]:
    arena = find_host_arena(model)
    assert arena is not None
    for _ in range(2):
        run_step(model, plan, documents, world)
        model.zero_grad()
    return arena.bytes, arena.parts, bytes_in_use(arena)


def test_a_step_takes_the_bytes_of_its_layers_and_the_world_gives_them_back(monkeypatch: pytest.MonkeyPatch) -> None:
    documents, passed = texts((32, 32)), list[int]()
    monkeypatch.setattr(HostOffload, "count_empty_layer", lambda _: passed.append(1))
    with World(Layout(ranks=1), backend="gloo") as world:
        plan = plan_fixed((32, 32), world.home, cp=1, max_tokens_per_slot=64)
        a_layer = 64 * 32 * 4  # rows, hidden size, float32
        kept = a_layer + 64 * 4 * (8 + 1) * 4  # and outputs and log-sum-exp of four heads
        for words, bytes in (
            ("full+host", 4 * a_layer),
            (("selective+host", "none", "full+host", "full"), a_layer + kept),
        ):
            model = prepare(deep("llama", torch.float32), world, checkpoint_policies=words)
            passed.clear()
            assert _held(model, plan, documents, world) == (bytes, 1, 0), words
            assert bool(passed) == (words != "full+host"), "layers that stay let those on the host leave the device"
        model = prepare(deep("llama", torch.float32), world, checkpoint_policies="full+host", offload_bytes=4 * a_layer)
        assert _held(model, plan, documents, world) == (4 * a_layer, 1, 0)
        gone = weakref.ref(find_host_arena(model))
        assert gone() is not None
        model = prepare(deep("llama", torch.float32), world, checkpoint_policies="full+host", offload_bytes=4 * a_layer)
        gc.collect()
        assert gone() is None, "a model that is gone holds no memory of the host"
        arena = find_host_arena(model)
        assert arena is not None and arena.bytes == 4 * a_layer
    assert arena.bytes == 0


def test_an_arena_larger_than_what_is_free_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_arena, "free_host_bytes", lambda: 5000)
    arena = HostArena(CPU, 4096)
    places: list[HostRange] = [arena.take_range(4096)]
    with pytest.raises(
        ModelError, match=r"needs 5,120 bytes more .* next to the 4,096 that it has, and 5,000 are free"
    ):
        arena.take_range(5001)
    assert arena.take_range(300).memory.numel() == 300 and places


def _refused(rank: int) -> str:
    with World(Layout(ranks=2), backend="gloo") as world:
        check_free_host_memory(1 << 20, world, "this run keeps")
        try:
            check_free_host_memory((1 << 60) * rank + 1, world, "this run keeps")
        except ModelError as error:
            assert error.on_all_ranks
            return str(error)
    return ""


def test_all_ranks_of_a_host_are_counted_together() -> None:
    for message in run_ranks(_refused, 2):
        assert "1,152,921,504,606,846,978 bytes" in message and "for 2 ranks of host" in message, message


def test_free_memory_is_the_least_of_linux_and_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "_ROOT", tmp_path)
    assert free_host_bytes() is None
    _write(tmp_path / "proc/meminfo", "MemTotal: 900 kB\nMemAvailable:     800 kB\nSwapFree: 24 kB\n")
    assert (free_host_bytes(), free_host_bytes(swap=True)) == (800 * 1024, 824 * 1024)
    group = tmp_path / "sys/fs/cgroup"
    _write(group / "memory.max", "max\n")
    _write(group / "memory.current", "100000\n")
    _write(group / "memory.stat", "anon 5\ninactive_file 30000\n")
    assert free_host_bytes() == 800 * 1024
    _write(group / "memory.max", "500000\n")
    assert free_host_bytes() == free_host_bytes(swap=True) == 430000
    _write(group / "memory/memory.limit_in_bytes", "90\n")
    _write(group / "memory/memory.usage_in_bytes", "80\n")
    _write(group / "memory/memory.stat", "total_inactive_file 7\n")
    assert free_host_bytes() == 17


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)


# ---- what waits on the host


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
    """Runs a layer and parks two more tensors, which recomputation compares."""

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

    def record_event(self) -> object:
        return self

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
    torch.manual_seed(0)
    blocks = [Block(arena.device, rows) for _ in range(6)]
    inputs = [torch.randn(rows, rows, dtype=torch.float64, device=arena.device).requires_grad_() for _ in range(3)]
    weights = [block.weight for block in blocks]
    expected = [torch.autograd.grad(_run(blocks, x, None).sum(), (x, *weights)) for x in inputs]
    offload, bytes = HostOffload(arena), list[int]()
    for order in ((0, 1, 2), (2, 1, 0), (1, 2, 0), (1, 0, 2)):
        outs: list[Tensor | None] = [_run(blocks, x, offload) for x in inputs]
        a_layer = rows * rows * 8 * 2 + rows * 8
        assert bytes_in_use(arena) == 3 * len(blocks) * a_layer
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
        assert bytes_in_use(arena) == 0
    assert len(set(bytes)) == 1 and arena.parts == 1


@pytest.mark.parametrize("tensors", [1, 2, 7])
def test_one_whole_layer_is_fetched_ahead_and_no_more(tensors: int) -> None:
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
    assert bytes_in_use(offload.arena) == 0
    out = _run(blocks[:2], x, offload)
    assert torch.equal(torch.autograd.grad(out.sum(), x)[0], torch.autograd.grad(_run(blocks[:2], x, None).sum(), x)[0])
