"""Collectives of tensor-parallel ranks: what arrives, and the gradient that each states."""

from collections.abc import Callable
from unittest import mock

import torch
from torch import Tensor

from longspan.comm import World
from longspan.comm.tp_collectives import (
    Gradient,
    tp_copy,
    tp_copy_parameter,
    tp_gather,
    tp_index_and_degree,
    tp_reduce_scatter,
    tp_split,
    tp_sum,
)
from longspan.layout import Layout
from longspan.testing import backend, run_ranks

HOMES = (Layout(ranks=6, tp=2), Layout(ranks=6, pp=2, tp=3))
ROWS, WIDTH = 6, 4
Through = Callable[[Tensor, int], Tensor]


def _numbers(*shape: int, seed: int) -> Tensor:
    return torch.randint(-9, 10, shape, generator=torch.Generator().manual_seed(seed)).double()


def _gathers(dim: int, gradient: Gradient) -> Through:
    return lambda x, key: tp_gather(x, key, dim, gradient=gradient)


def _apply(fn: Through, world: World, part: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    x = part.to(world.device, copy=True).requires_grad_()
    out = fn(x, world.key)
    assert out._base is None, "FSDP2 hooks what modules return, which must be no view"
    (out * weight.to(world.device)).sum().backward()
    assert x.grad is not None
    return out.detach().cpu(), x.grad.cpu()


def _check(home: Layout, world: World) -> None:
    (me, tp), slot = tp_index_and_degree(world.key), world.slot + 10 * world.coordinates.pp
    assert (me, tp) == (world.coordinates.tp, home.tp)
    parts = [_numbers(1, ROWS, WIDTH, seed=100 * slot + member) for member in range(tp)]
    part, total = parts[me], torch.stack(parts).sum(0)
    for dim in (1, -1):
        joined = torch.cat(parts, dim)
        same = _numbers(*joined.shape, seed=1)
        out, gradient = _apply(_gathers(dim, "identical"), world, part, same)
        assert torch.equal(out, joined) and torch.equal(gradient, same.chunk(tp, dim)[me])
    gradients = [_numbers(1, tp * ROWS, WIDTH, seed=20 + member) for member in range(tp)]
    _, gradient = _apply(_gathers(1, "partial"), world, part, gradients[me])
    assert torch.equal(gradient, torch.stack(gradients).sum(0).chunk(tp, 1)[me])
    rows = [_numbers(1, ROWS // tp, WIDTH, seed=40 + member) for member in range(tp)]
    out, gradient = _apply(lambda x, key: tp_split(x, key, 1), world, total, rows[me])
    assert torch.equal(out, total.chunk(tp, 1)[me]) and torch.equal(gradient, torch.cat(rows, 1))
    out, gradient = _apply(lambda x, key: tp_reduce_scatter(x, key, 1), world, part, rows[me])
    assert torch.equal(out, total.chunk(tp, 1)[me]) and torch.equal(gradient, torch.cat(rows, 1))
    whole_rows = [_numbers(1, ROWS, WIDTH, seed=60 + member) for member in range(tp)]
    out, gradient = _apply(tp_sum, world, part, whole_rows[0])
    assert torch.equal(out, total) and torch.equal(gradient, whole_rows[0])
    x = part.to(world.device, copy=True).requires_grad_()
    with mock.patch.object(Layout, "rank_at", side_effect=AssertionError("who is in the group is known by now")):
        (tp_copy(x, world.key) * whole_rows[me].to(world.device)).sum().backward()
    assert world.channels.tp.ranks == tuple(home.rank_at(world.slot, pp=world.coordinates.pp, tp=i) for i in range(tp))
    assert x.grad is not None and torch.equal(x.grad.cpu(), torch.stack(whole_rows).sum(0))
    # 256 + 1 is 256 in bfloat16
    low = torch.where(torch.arange(tp) == me, 256, 1).to(torch.bfloat16)
    x = torch.zeros(tp, dtype=torch.bfloat16, device=world.device, requires_grad=True)
    (tp_copy_parameter(x, world.key) * low.to(world.device)).sum().backward()
    assert x.grad is not None and x.grad.dtype == torch.bfloat16
    assert x.grad.tolist() == [256.0 if tp == 2 else 258.0] * tp


def _check_all(rank: int) -> None:
    for home in HOMES:
        with World(home, backend=backend(), timeout=60) as world:
            _check(home, world)


def test_sums_slices_and_their_gradients() -> None:
    run_ranks(_check_all, 6)
