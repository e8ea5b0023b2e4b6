"""`attend` captured in a CUDA graph, forward and backward, and replayed on other inputs: pytest --backend nccl."""

import pytest
import torch
from torch import Tensor

from longspan import Layout, World, attend, bind
from longspan.comm import SequenceShard
from longspan.testing import backend, run_ranks
from tests.attention.cases import micro_batch
from tests.attention.test_attend import TYPES
from tests.launch.rank_pool import most_ranks
from tests.reference import relative_error

LENGTHS = (130, 1, 61, 64)


def replayed(rank: int, window: int | None) -> list[float]:
    with World(Layout(ranks=4)) as world:
        shard = bind(micro_batch((tuple(range(4)), LENGTHS)), world)
        return [_error_of_replay(shard, kind, window) for kind in TYPES]


def _error_of_replay(shard: SequenceShard, kind: str, window: int | None) -> float:
    sizes = (2, 2) if kind == "a2a+p2p" else None
    q, k, v, dout = _tensors(shard.local_rows, seed=1)
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
        for x, new in zip((q, k, v, dout), _tensors(shard.local_rows, seed=2), strict=True):
            x.copy_(new)
    for _ in range(2):
        graph.replay()
    error = max(relative_error(a.float(), b.float()) for a, b in zip(replayed, run(), strict=True))
    torch.cuda.synchronize()
    graph.reset()
    return error


def _tensors(rows: int, seed: int) -> list[Tensor]:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return [torch.randn(rows, n, 64, device="cuda", generator=generator).to(torch.bfloat16) for n in (8, 4, 4, 8)]


@pytest.mark.parametrize("window", (None, 40))
def test_a_captured_call_replays_on_other_inputs(window: int | None) -> None:
    if backend() != "nccl" or most_ranks() < 4:
        pytest.skip("needs --backend nccl and 4 GPUs")
    for errors in run_ranks(replayed, 4, window):
        assert max(errors) <= 1e-2, dict(zip(TYPES, errors, strict=True))
