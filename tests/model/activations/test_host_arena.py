"""Ranges of the host's arena are exact and free with what holds them; an arena that does not fit is refused."""

import gc
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from longspan.comm import World
from longspan.errors import ModelError
from longspan.host_memory import free_host_bytes
from longspan.layout import Layout
from longspan.model import prepare
from longspan.model.activations import host_offload
from longspan.model.activations.host_offload import HOST_OFFLOAD, HostArena, HostOffload, HostRange, check_host_room
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


@pytest.mark.parametrize("device", DEVICES)
def test_an_arena_takes_what_is_in_use_at_once_and_takes_it_once(device: str) -> None:
    with open_arena(device) as arena:
        for sizes in ((100, 1000, 256), (1000, 100, 256), (1536,), (1, 0, 1000)):  # the first needs the most
            ranges = [arena.take(size) for size in sizes]
            assert arena.bytes_in_use == sum(max(256, -(-size // 256) * 256) for size in sizes)
            addresses = sorted((place.memory.data_ptr(), place.memory.numel()) for place in ranges)
            assert all(a + size <= b for (a, size), (b, _) in pairwise(addresses))
            if device == "cuda":
                assert all(place.memory.is_pinned() for place in ranges if place.memory.numel())
            ranges.clear()
            assert arena.bytes == 1536 and arena.bytes_in_use == 0
        assert arena.parts == 1, "what it grew by is one registration now"
        ranges = [arena.take(1536), arena.take(5)]
        assert (arena.bytes, arena.parts) == (1792, 2)
        arena.close()
        assert arena.bytes == 0 and ranges[0].memory.fill_(3).sum() == 3 * 1536, "what is in use stays"


def test_free_ranges_become_one_again_in_any_order() -> None:
    arena = HostArena(CPU, 256 * 24)
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        ranges = [arena.take(256 * (1 + i % 3)) for i in range(12)]
        for index in torch.randperm(12, generator=generator).tolist():
            ranges[index] = arena.take(1) if index % 4 == 0 else ranges[0]
        ranges.clear()
        whole = arena.take(arena.bytes)
        assert whole.memory.numel() == arena.bytes and arena.parts == 1
        del whole


def find_host_arena(model: nn.Module) -> HostArena | None:
    offloads = (getattr(module, HOST_OFFLOAD, None) for module in model.modules())
    return next((offload.arena for offload in offloads if isinstance(offload, HostOffload)), None)


def _held(model: nn.Module, plan: Any, documents: Any, world: World) -> tuple[int, int, int]:
    """What a step takes on the host, in how many parts, after a first one."""
    arena = find_host_arena(model)
    assert arena is not None
    for _ in range(2):
        run_step(model, plan, documents, world)
        model.zero_grad()
    return arena.bytes, arena.parts, arena.bytes_in_use


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
            model = prepare(deep("llama", torch.float32), world, measures=words)
            passed.clear()
            assert _held(model, plan, documents, world) == (bytes, 1, 0), words
            assert bool(passed) == (words != "full+host"), "layers that stay let those on the host leave the device"
        model = prepare(deep("llama", torch.float32), world, measures="full+host", host_bytes=4 * a_layer)
        assert _held(model, plan, documents, world) == (4 * a_layer, 1, 0)
        gone = weakref.ref(find_host_arena(model))
        assert gone() is not None
        model = prepare(deep("llama", torch.float32), world, measures="full+host", host_bytes=4 * a_layer)
        gc.collect()
        assert gone() is None, "a model that is gone holds no memory of the host"
        arena = find_host_arena(model)
        assert arena is not None and arena.bytes == 4 * a_layer
    assert arena.bytes == 0


def test_an_arena_larger_than_what_is_free_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_offload, "free_host_bytes", lambda: 5000)
    arena = HostArena(CPU, 4096)
    places: list[HostRange] = [arena.take(4096)]
    with pytest.raises(
        ModelError, match=r"needs 5,120 bytes more .* next to the 4,096 that it has, and 5,000 are free"
    ):
        arena.take(5001)
    assert arena.take(300).memory.numel() == 300 and places


def _refused(rank: int) -> str:
    with World(Layout(ranks=2), backend="gloo") as world:
        check_host_room(1 << 20, world)
        try:
            check_host_room((1 << 60) * rank + 1, world)
        except ModelError as error:
            assert error.on_all_ranks
            return str(error)
    return ""


def test_all_ranks_of_a_host_are_counted_together() -> None:
    for message in run_ranks(_refused, 2):
        assert "1,152,921,504,606,846,978 bytes" in message and "for 2 ranks of host" in message, message


def test_free_memory_is_the_least_of_linux_and_control_groups(tmp_path: Path) -> None:
    assert free_host_bytes(tmp_path) is None
    _write(tmp_path / "proc/meminfo", "MemTotal: 900 kB\nMemAvailable:     800 kB\nSwapFree: 24 kB\n")
    assert (free_host_bytes(tmp_path), free_host_bytes(tmp_path, swap=True)) == (800 * 1024, 824 * 1024)
    group = tmp_path / "sys/fs/cgroup"
    _write(group / "memory.max", "max\n")
    _write(group / "memory.current", "100000\n")
    _write(group / "memory.stat", "anon 5\ninactive_file 30000\n")
    assert free_host_bytes(tmp_path) == 800 * 1024
    _write(group / "memory.max", "500000\n")
    assert free_host_bytes(tmp_path) == free_host_bytes(tmp_path, swap=True) == 430000
    _write(group / "memory/memory.limit_in_bytes", "90\n")
    _write(group / "memory/memory.usage_in_bytes", "80\n")
    _write(group / "memory/memory.stat", "total_inactive_file 7\n")
    assert free_host_bytes(tmp_path) == 17


def _write(file: Path, text: str) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
