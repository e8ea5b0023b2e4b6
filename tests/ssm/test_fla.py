"""Kernels of flash-linear-attention on a GPU, beside the recurrence row by row and beside torch's operations."""

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from longspan import Layout, World, bind
from longspan.ssm import causal_conv, linear_scan, scan_kernel, unit_vectors
from longspan.ssm.kernels import TORCH, Inputs, LocalRuns, ScanKernel
from longspan.ssm.kernels.fla import fla_unsupported_call_reason
from longspan.ssm.kernels.interface import SavedScan, state_dtype
from longspan.testing import backend, run_ranks
from tests.reference import relative_error
from tests.ssm.parity import FIRST_ROWS, batches, by_rows, convolved, first_row_errors

CUDA = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or bool(fla_unsupported_call_reason(torch.bfloat16, CUDA)),
        reason="no kernels of fla here",
    ),
]
LENGTHS = (200, 1, 64, 3, 2321)
KINDS = {  # heads of keys and of values, key and value sizes; a decay for each key number, a delta term
    "qwen3-next": ((16, 32, 128, 128), False, True),
    "wide": ((2, 4, 192, 256), False, True),
    "kimi": ((32, 32, 128, 128), True, True),
    "mamba 2": ((1, 128, 128, 64), False, False),
}


def inputs(name: str, rows: int, seed: int = 0) -> list[torch.Tensor | None]:
    """bfloat16's values in float64: q, k, v, g, and beta where there is a delta term."""
    (groups, heads, size, width), by_channel, delta = KINDS[name]
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(rows, n, d, generator=generator) for n, d in ((groups, size), (groups, size), (heads, width))]
    draw[:2] = [F.normalize(x, dim=-1) for x in draw[:2]]
    g = -0.05 * torch.rand(rows, heads, size if by_channel else 1, generator=generator)
    beta = torch.rand(rows, heads, generator=generator).double().to(CUDA) if delta else None
    return [*(x.bfloat16().double().to(CUDA) for x in draw), g.double().to(CUDA), beta]


def in_half(given: Sequence[torch.Tensor | None]) -> Inputs:
    half = [x if x is None else x.bfloat16() if i < 3 else x.float() for i, x in enumerate(given)]
    return Inputs(*half, *[None] * (5 - len(half)))  # pyright: ignore


def passes(kernel: ScanKernel, given: Inputs, runs: LocalRuns, name: str) -> dict[str, torch.Tensor]:
    (_, heads, size, width), _, _ = KINDS[name]
    generator, every = torch.Generator().manual_seed(3), np.arange(len(runs.lengths))
    wide = state_dtype(given.v.dtype)
    shape = (len(runs.lengths), heads, size, width)
    states, leaving = (0.3 * torch.randn(shape, generator=generator).to(CUDA, wide) for _ in range(2))
    dout = torch.randn(given.v.shape, generator=generator).to(CUDA, given.v.dtype)
    forward = kernel.forward(given, runs, 0.7)
    found = dict(zip(("B", "M"), forward.summaries(every, every[1:]), strict=True))
    found["out"] = forward.outputs(states)
    backward = kernel.backward(given, runs, 0.7, SavedScan(states, forward.activations, dout))
    found["owed"] = backward.initial_state_gradients(every[1:])
    backward.prepare_chunks()
    gradients = backward.gradients(leaving)
    return found | dict(zip(("dq", "dk", "dv", "dg", "dbeta"), gradients, strict=False))


@pytest.mark.parametrize("name", KINDS)
def test_every_pass_is_that_of_torch_in_float64(name: str) -> None:
    given = inputs(name, sum(LENGTHS))
    runs = LocalRuns(np.array(LENGTHS), CUDA, np.array([True] * len(LENGTHS)))
    half = in_half(given)
    kernel = scan_kernel(half.v, half.k.shape[-1], delta=half.beta is not None, by_channel=half.g.shape[-1] > 1)
    assert kernel.name == "fla"
    found, wanted = passes(kernel, half, runs, name), passes(TORCH, Inputs(*given), runs, name)  # pyright: ignore
    errors = {key: relative_error(found[key].double(), exact) for key, exact in wanted.items()}
    assert max(errors.values()) <= 1e-2, errors


def measure(rank: int, slots: int, name: str) -> list[float]:
    given = [x for x in inputs(name, sum(LENGTHS)) if x is not None]
    dout = torch.randn(given[2].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(CUDA)
    worst = [0.0] * (len(given) + 1)
    with World(Layout(ranks=slots), backend=backend()) as world:
        wanted = exact(given, dout)
        for partition in ("contiguous", "zigzag"):
            for batch in batches(LENGTHS, slots, partition).values():
                shard = bind(batch, world).with_padding()
                order = [d for group in batch.groups for d in group.documents]
                at = torch.cat([torch.arange(sum(LENGTHS)).split(LENGTHS)[d] for d in order]).to(CUDA)
                half = in_half([shard.scatter(x[at]) for x in given])
                leaves = [x.requires_grad_() for x in half if x is not None]
                out = linear_scan(*leaves[:4], leaves[4] if len(leaves) > 4 else None, shard)  # pyright: ignore
                out.backward(shard.scatter(dout[at]).bfloat16())
                rows = shard.rows >= 0
                for i, (x, whole) in enumerate(zip([out, *(x.grad for x in leaves)], wanted, strict=True)):
                    assert x is not None
                    difference = (x.double() - shard.scatter(whole[at]))[rows]
                    worst[i] = max(worst[i], (difference.norm() / whole.norm()).item())
    return worst


def exact(given: list[torch.Tensor], dout: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in given]
    q, k, v, g, *beta = leaves
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    out = by_rows(q, k, v, g, beta[0] if beta else None, LENGTHS)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


@pytest.mark.parametrize("name", KINDS)
def test_scans_are_the_recurrence(name: str) -> None:
    slots = torch.cuda.device_count() if backend() == "nccl" else 1
    for worst in run_ranks(measure, slots, slots, name, timeout=600):
        assert max(worst) <= 1e-2, worst


def test_convolutions_and_norms() -> None:
    for worst in run_ranks(_convolution, 1):
        assert max(worst) <= 6e-3, worst


@pytest.mark.parametrize("case", FIRST_ROWS)
def test_first_rows_of_runs(case: tuple[str, int, bool]) -> None:
    worst = first_row_errors(*case, CUDA, torch.bfloat16)
    assert max(worst.values()) <= 6e-3, worst


def _convolution(rank: int) -> list[float]:
    generator = torch.Generator().manual_seed(0)
    shapes = ((sum(LENGTHS), 96), (96, 4), (96,))
    given = [torch.randn(s, generator=generator).bfloat16().to(CUDA) for s in shapes]
    dout = torch.randn(shapes[0], generator=generator).to(CUDA)
    with World(Layout(ranks=1), backend=backend()) as world:
        shard = bind(batches(LENGTHS, 1, "contiguous")["one group"], world)
        results = []
        for dtype in (torch.bfloat16, torch.float64):
            leaves = [x.to(dtype).requires_grad_() for x in given]
            out = (
                causal_conv(*leaves, shard, silu=True)
                if dtype == torch.bfloat16
                else F.silu(convolved(*leaves, LENGTHS))
            )
            results.append([out.detach(), *torch.autograd.grad(out, leaves, dout.to(dtype))])
    errors = [relative_error(*pair) for pair in zip(*results, strict=True)]
    return [*errors, relative_error(unit_vectors(given[0], 1e-6), unit_vectors(given[0].double(), 1e-6))]
