"""Kernels of flash-linear-attention on a GPU, beside the recurrence row by row and beside torch's operations."""

import pytest
import torch
from torch.nn import functional as F

from longspan import Layout, World, bind
from longspan.ssm import causal_conv, kernel_of, linear_scan, unit
from longspan.ssm.kernels import fla
from longspan.testing import backend, run_ranks
from tests.reference import relative_error
from tests.ssm.parity import batches
from tests.ssm.recurrence import by_rows, convolved

CUDA = torch.device("cuda")
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or bool(fla.lacks(torch.bfloat16, CUDA, 2, 2)), reason="no kernels of fla here"
    ),
]
LENGTHS = (200, 1, 64, 3, 321)
SIZES = {  # heads of keys, heads of values, key and value sizes
    "qwen3-next": (2, 4, 128, 128),
    "mamba 2": (1, 4, 128, 64),
    "kimi": (3, 3, 128, 128),
    "small": (2, 2, 64, 32),
}
KINDS = {"delta": (False, True), "by channel": (True, True), "decay": (False, False)}


def inputs(kind: str, sizes: tuple[int, ...], rows: int, seed: int = 0) -> list[torch.Tensor]:
    """Leaves of bfloat16's values in float64: q, k, v, g and beta where there is a delta term."""
    by_channel, delta = KINDS[kind]
    groups, heads, size, width = sizes
    generator = torch.Generator().manual_seed(seed)
    draw = [torch.randn(rows, n, d, generator=generator) for n, d in ((groups, size), (groups, size), (heads, width))]
    draw[:2] = [F.normalize(x, dim=-1) for x in draw[:2]]
    g = -0.1 * torch.rand(rows, heads, size if by_channel else 1, generator=generator)
    beta = [torch.rand(rows, heads, generator=generator)] if delta else []
    return [*(x.bfloat16().double().to(CUDA) for x in draw), *(x.double().to(CUDA) for x in (g, *beta))]


def exact(given: list[torch.Tensor], dout: torch.Tensor) -> list[torch.Tensor]:
    leaves = [x.clone().requires_grad_() for x in given]
    q, k, v, g, *beta = leaves
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    out = by_rows(q, k, v, g, beta[0] if beta else None, LENGTHS)
    return [out.detach(), *torch.autograd.grad(out, leaves, dout)]


def measure(rank: int, slots: int, name: str, kind: str) -> list[float]:
    """Errors of the output and of every gradient, all rows of this rank."""
    given = inputs(kind, SIZES[name], sum(LENGTHS))
    dout = torch.randn(given[2].shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64).to(CUDA)
    wanted = exact(given, dout)
    worst = [0.0] * len(wanted)
    with World(Layout(ranks=slots), backend=backend()) as world:
        for partition in ("contiguous", "zigzag"):
            for batch in batches(LENGTHS, slots, partition).values():
                shard = bind(batch, world).with_padding()
                order = [d for group in batch.groups for d in group.documents]
                at = torch.cat([torch.arange(sum(LENGTHS)).split(LENGTHS)[d] for d in order])
                local = [shard.scatter(x[at]) for x in given]
                leaves = [(x.bfloat16() if i < 3 else x.float()).requires_grad_() for i, x in enumerate(local)]
                assert kernel_of(leaves[2], SIZES[name][2], delta=KINDS[kind][1], by_channel=KINDS[kind][0]).half
                out = linear_scan(*leaves[:4], leaves[4] if len(leaves) > 4 else None, shard)  # pyright: ignore
                out.backward(shard.scatter(dout[at]).bfloat16())
                rows = shard.rows >= 0
                for i, (x, whole) in enumerate(zip([out, *(x.grad for x in leaves)], wanted, strict=True)):
                    assert x is not None
                    difference = (x.double() - shard.scatter(whole[at]))[rows]
                    worst[i] = max(worst[i], (difference.norm() / whole.norm()).item())
    return worst


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", SIZES)
def test_scans_are_the_recurrence(name: str, kind: str) -> None:
    slots = torch.cuda.device_count() if backend() == "nccl" else 1
    for worst in run_ranks(measure, slots, slots, name, kind):
        assert max(worst) <= 1e-2, worst


def test_convolutions_and_norms() -> None:
    for worst in run_ranks(_convolution, 1):
        assert max(worst) <= 6e-3, worst


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
    return [*errors, relative_error(unit(given[0], 1e-6), unit(given[0].double(), 1e-6))]
