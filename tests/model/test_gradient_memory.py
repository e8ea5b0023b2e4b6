"""Where gradients that FSDP2 sums over slots are: in memory of the stream that computes, which backward has freed."""

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter

from longspan import Layout, World
from longspan.model.fsdp_params import SumsInComputeMemory, fsdp_modules, sum_on_computing_stream, sums_become_gradients
from longspan.testing import run_ranks
from tests.model.stock import prepare_untried, tiny
from tests.model.test_compiled_layers import LENGTHS, take_step

GPU = torch.device("cuda", 0)


class FakeStreams:
    """By name; `made` has the stream and size of each tensor, and who may still use it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.current, self.made = "computing", list[tuple[str, int, list[str]]]()
        monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: self.current)
        monkeypatch.setattr(torch.cuda, "stream", self.enter)
        monkeypatch.setattr(torch, "empty", self.make)

    @contextmanager
    def enter(self, name: str) -> Iterator[None]:
        before, self.current = self.current, name
        yield
        self.current = before

    def make(self, size: int, **_: Any) -> Any:
        users = list[str]()
        self.made.append((self.current, size, users))
        return SimpleNamespace(record_stream=users.append)

    def allocate(self, comm: SumsInComputeMemory, size: int, stream: str) -> None:
        with self.enter(stream):
            comm.allocate((size,), dtype=torch.float32, device=GPU)


def test_a_sum_is_in_memory_of_the_stream_of_its_message_and_after_an_error_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    comm, streams = SumsInComputeMemory(), FakeStreams(monkeypatch)
    for _ in range(2):
        streams.allocate(comm, 8, "computing")
        streams.allocate(comm, 4, "sums")
    assert streams.made == [("computing", 8, []), ("computing", 4, ["sums"])] * 2
    assert streams.current == "computing"
    streams.made.clear()
    streams.allocate(comm, 8, "computing")  # copying into it failed
    streams.allocate(comm, 6, "computing")
    streams.allocate(comm, 3, "sums")
    assert streams.made == [("computing", 8, []), ("computing", 6, []), ("computing", 3, ["sums"])]


class Recorded(DefaultReduceScatter):
    def __init__(self) -> None:
        super().__init__()
        self.sizes = list[int]()

    def allocate(self, size: Any, **options: Any) -> torch.Tensor:
        self.sizes.append(size[0])
        return super().allocate(size, **options)


CASES: list[tuple[Layout, torch.dtype, torch.dtype | None, bool]] = [
    (Layout(2), torch.float32, torch.bfloat16, True),
    (Layout(2), torch.float32, None, True),
    (Layout(2), torch.bfloat16, None, False),  # cast to bfloat16 behind the sum
    (Layout(2, dp_replicate=2), torch.float32, torch.bfloat16, False),  # summed again, on one more stream
]


def look_at_sums(_: int) -> tuple[list[list[int]], list[set[bool]]]:
    """The sizes that FSDP2 asks for, by module, and whether its sums become gradients, by case."""
    with World(Layout(2)) as world:
        model, comms = prepare_untried(tiny("qwen3"), world), list[Recorded]()
        for module in fsdp_modules(model):
            comms.append(Recorded())
            module.set_custom_reduce_scatter(comms[-1])
        take_step(model, world, LENGTHS)
    stay = list[set[bool]]()
    for home, dtype, compute, _ in CASES:
        with World(home) as world:
            modules: list[Any] = [*fsdp_modules(prepare_untried(tiny("qwen3", dtype), world, compute_dtype=compute))]
            (reduced,) = {module._get_fsdp_state()._mp_policy.reduce_dtype for module in modules}
            policy: Any = SimpleNamespace(reduce_dtype=reduced)
            stay.append({sums_become_gradients(module, policy) for module in modules})
    return [comm.sizes for comm in comms if comm.sizes], stay


def test_fsdp2_asks_for_a_message_and_then_for_its_sum_which_stays_where_nothing_follows() -> None:
    for all_sizes, stay in run_ranks(look_at_sums, 2):
        assert len(all_sizes) > 1
        for sizes in all_sizes:
            assert len(sizes) % 2 == 0 and all(a == 2 * b for a, b in zip(sizes[::2], sizes[1::2], strict=True))
        assert stay == [{expected} for *_, expected in CASES]


def test_sums_that_are_cast_are_on_the_computing_stream_of_one_slot(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: f"computing on {device}")
    with World(Layout(ranks=1)) as world:
        model: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        for module in (*model, model):
            fully_shard(module, mesh=world.meshes.fsdp)
        for _ in range(2):
            sum_on_computing_stream(model)
        model(torch.ones(2, 4))
        contexts = [module._get_fsdp_state()._comm_ctx for module in (*model, model)]
        assert {context.reduce_scatter_stream for context in contexts} == {"computing on cpu"}
        assert all(isinstance(context.all_gather_stream, torch.cpu.Stream) for context in contexts)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_lie_in_memory_of_the_computing_stream(dtype: torch.dtype) -> None:
    with World(Layout(ranks=1)) as world:
        model: Any = prepare_untried(tiny("qwen3", dtype), world, compute_dtype=torch.bfloat16)
        take_step(model, world, LENGTHS)
        take_step(model, world, LENGTHS)
        computing, segments = torch.cuda.current_stream().cuda_stream, torch.cuda.memory_snapshot()
        for parameter in model.parameters():
            place = parameter.grad.to_local().data_ptr()
            (segment,) = [x for x in segments if x["address"] <= place < x["address"] + x["total_size"]]
            assert segment["stream"] == computing
