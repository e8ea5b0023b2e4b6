"""Repeated calls are recorded and replayed: on CPUs they run again in a recording's memory, over NCCL graphs do."""

from collections.abc import Callable
from contextlib import nullcontext
from importlib import import_module
from typing import Any

import pytest
import torch
from torch import Tensor

from longspan import Layout, World, attend, bind
from longspan.attention.saved_outputs import Recording
from longspan.comm import SequenceShard, cuda_graphs
from longspan.comm.cuda_graphs import Replay, forget_replays
from longspan.comm.watch import Watch
from longspan.testing import backend, run_ranks
from tests.attention.cases import micro_batch
from tests.attention.test_attend import TYPES
from tests.launch.rank_pool import most_ranks
from tests.reference import relative_error

module: Any = import_module("longspan.attention.attend")
LAYERS = 4
KERNELS = {"cpu": "cpu_flash", "cuda": "torch_flash"}


class RunAgain:
    """What a graph does to memory: a replay reads where the inputs lay, and writes where the results lay."""

    def __init__(self, run: Callable[[], list[Any]]) -> None:
        self.run, self.results, self.count = run, run(), 0

    def replay(self) -> None:
        self.count += 1
        for into, x in zip(self.results, self.run(), strict=True):
            if isinstance(into, Tensor) and into is not x:
                into.copy_(x)


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[RunAgain]:
    made = list[RunAgain]()
    monkeypatch.setattr(
        cuda_graphs, "record_graph", lambda run: (made.append(RunAgain(run)) or made[-1], made[-1].results)
    )
    return made


def two_micro_batches(world: World, kind: str) -> list[Tensor]:
    """Outputs and gradients of layers, half of them as recomputed layers keep them: of one group of all slots, then of
    several groups, with sinks. Backward begins with the last.
    """
    whole = micro_batch(((0, 1, 2, 3), (34, 1, 13), kind))
    parts = micro_batch(((0, 1), (15, 9), "p2p"), ((2, 3), (12,), kind), ((3,), (7, 8)), ((0, 1, 2, 3), (20, 9), kind))
    generator, calls = torch.Generator(world.device).manual_seed(world.rank), list[Any]()
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float64
    for shard, sinks in ((bind(whole, world), []), (bind(parts, world), [8])):
        for layer in range(LAYERS):
            shapes = [*((shard.local_rows, heads, 16) for heads in (8, 8, 4, 4)), *sinks]
            dout, *inputs = (torch.randn(x, device=world.device, generator=generator).to(dtype) for x in shapes)
            options = {"sinks": inputs[3]} if sinks else {}
            for x in inputs:
                x.requires_grad_()
            with Recording().record_outputs() if layer < LAYERS / 2 else nullcontext():
                calls.append((attend(*inputs[:3], shard, kernel=KERNELS[world.device.type], **options), inputs, dout))
    results = [(out.detach(), *torch.autograd.grad(out, inputs, dout)) for out, inputs, dout in reversed(calls)]
    return [x for result in results for x in result]


def errors_of_replays(rank: int) -> tuple[dict[str, float], int]:
    """By type, how far replayed calls are from launched ones; and how many recordings were made."""
    with World(Layout(ranks=4)) as world, pytest.MonkeyPatch.context() as patch:
        record, recordings, errors = cuda_graphs.record_graph, list[Any](), dict[str, float]()
        if world.device.type == "cpu":
            patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
            record = lambda run: (again := RunAgain(run), again.results)  # noqa: E731
        patch.setattr(cuda_graphs, "record_graph", lambda run: recordings.append(record(run)) or recordings[-1])
        for kind in TYPES:
            patch.setattr(module, "REPLAYED_KERNELS", ())
            launched = two_micro_batches(world, kind)
            patch.setattr(module, "REPLAYED_KERNELS", tuple(KERNELS.values()))
            replayed = two_micro_batches(world, kind)
            errors[kind] = max(relative_error(a.double(), b.double()) for a, b in zip(replayed, launched, strict=True))
        shard, count = bind(micro_batch(((0, 1, 2, 3), (34, 13))), world), len(recordings)
        dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float64
        q = torch.randn(shard.local_rows, 4, 16, device=world.device).to(dtype)
        for is_inference in (True, True, True, False, False, False):
            with torch.inference_mode(is_inference):
                attend(q, q, q, shard, kernel=KERNELS[world.device.type])
        assert len(recordings) == count + 2, "tensors of inference are not written outside of it"
        world.node_size = 2
        shard = bind(micro_batch(((0, 1, 2, 3), (34, 13))), world)
        for _ in range(3):
            attend(q, q, q, shard, kernel=KERNELS[world.device.type])
        assert len(recordings) == count + 2, "groups of two hosts are launched each time"
        recordings.clear()
    assert not cuda_graphs._recorded, "a world that was left keeps recordings"
    return errors, count


def test_replays_give_what_calls_give() -> None:
    """A call is recorded forward and backward for both micro-batches and both ways of keeping results; backward of both
    ways is one where no heads are exchanged.
    """
    if backend() == "nccl" and most_ranks() < 4:
        pytest.skip("needs 4 GPUs")
    allowed = 1e-4 if backend() == "nccl" else 0  # gradients of GPUs are summed in any order
    for errors, recordings in run_ranks(errors_of_replays, 4):
        assert max(errors.values()) <= allowed and recordings == 6 + 6 + 8 + 8, (errors, recordings)


def test_results_lie_apart_but_for_inputs_and_numbers(recorded: list[RunAgain]) -> None:
    replay, kept = Replay(Watch(0, (0,), 1.0, None), "test"), list[Any]()
    for step in range(5):
        x = torch.full((3,), float(step))
        kept.append(replay(lambda x: [x * 2, None, x, [7]], [x]))
        assert kept[-1][2] is x
    assert [result[0].tolist() for result in kept] == [[2.0 * step] * 3 for step in range(5)]
    assert all(result[1] is None and result[3] == [7] for result in kept)
    assert len(recorded) == 1 and recorded[0].count == 4


def test_the_last_recordings_are_kept_and_others_made_again(recorded: list[RunAgain]) -> None:
    watch, x = Watch(0, (0,), 1.0, None), torch.ones(2)
    several = [Replay(watch, "test") for _ in range(cuda_graphs.MOST_RECORDINGS + 1)]
    for replay in several * 2:
        assert replay(lambda x: [x + 1], [x])[0].tolist() == [2, 2]
    assert len(recorded) == len(several) and several[0]._graph is None and several[1]._graph is not None
    for count in (len(several), len(several) + 1):
        assert several[0](lambda x: [x + 2], [x])[0].tolist() == [3, 3]
        assert len(recorded) == count
    forget_replays()
    assert all(replay._graph is None for replay in several)


# ---- a CUDA graph of the caller: `attend` captured, forward and backward, and replayed on other inputs


def errors_of_captured_calls(rank: int, window: int | None) -> list[float]:
    with World(Layout(ranks=4)) as world:
        shard = bind(micro_batch((tuple(range(4)), (130, 1, 61, 64))), world)
        return [error_of_captured_call(shard, kind, window) for kind in TYPES]


def error_of_captured_call(shard: SequenceShard, kind: str, window: int | None) -> float:
    sizes = (2, 2) if kind == "a2a+p2p" else None
    q, k, v, dout = drawn(shard.local_rows, seed=1)
    inputs = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())

    def run() -> tuple[Tensor, ...]:
        # FlashAttention-4 would compile for a minute; `attention_types.py --cuda-graph` checks it.
        options = {"cp_comm_type": kind, "hierarchical_context_parallel_sizes": sizes, "kernel": "torch_flash"}
        out = attend(*inputs, shard, window=window, **options)
        return out.detach(), *torch.autograd.grad(out, inputs, dout)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        replayed = run()
    with torch.no_grad():
        for x, new in zip((q, k, v, dout), drawn(shard.local_rows, seed=2), strict=True):
            x.copy_(new)
    for _ in range(2):
        graph.replay()
    error = max(relative_error(a.float(), b.float()) for a, b in zip(replayed, run(), strict=True))
    torch.cuda.synchronize()
    graph.reset()
    return error


def drawn(rows: int, seed: int) -> list[Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return [torch.randn(rows, n, 64, device="cuda", generator=generator).to(torch.bfloat16) for n in (8, 4, 4, 8)]


@pytest.mark.parametrize("window", (None, 40))
def test_a_captured_call_replays_on_other_inputs(window: int | None) -> None:
    if backend() != "nccl" or most_ranks() < 4:
        pytest.skip("needs --backend nccl and 4 GPUs")
    for errors in run_ranks(errors_of_captured_calls, 4, window):
        assert max(errors) <= 1e-2, dict(zip(TYPES, errors, strict=True))
