"""Collectives of a slot's tensor-parallel ranks, with a stated gradient.

Every tensor-parallel rank of a slot enters each of them, in forward and in backward, in one order. A gradient is
*identical* where every rank holds the same gradient of the shared result, and *partial* where each holds the gradient
of its own part of the loss, to be summed. The pairs are those of Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models" (2022), figures 4 to 6. `key` is a world's; nothing here is kept.

Dims before `dim` must be of size 1 where tensors are split or summed in parts, as for packed rows (1, T, …).
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from longspan.comm.groups.channel import Channel, _all_gather_single
from longspan.comm.world import world_of

Gradient = Literal["identical", "partial"]

# torch 2.13 renamed reduce_scatter_tensor.
_reduce_scatter_single: Callable[..., Any] = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def tp_copy(x: Tensor, key: int) -> Tensor:
    """The same tensor, for a computation of which each rank does a part; the partial gradient is summed."""
    return _Copy.apply(x, key)  # pyright: ignore[reportReturnType]


def tp_sum(x: Tensor, key: int) -> Tensor:
    """The sum of every rank's tensor; the gradient is identical and passes as it is."""
    return _Sum.apply(x, key)  # pyright: ignore[reportReturnType]


def tp_gather(x: Tensor, key: int, dim: int, *, gradient: Gradient) -> Tensor:
    """Every rank's tensor end to end along `dim`.

    Backward gives each rank its slice of an identical gradient, or of the sum of a partial one.
    """
    return _Gather.apply(x, key, dim % x.ndim, gradient)  # pyright: ignore[reportReturnType]


def tp_split(x: Tensor, key: int, dim: int) -> Tensor:
    """This rank's slice of a tensor that every rank holds; backward gathers the slices' gradients."""
    return _Split.apply(x, key, dim % x.ndim)  # pyright: ignore[reportReturnType]


def tp_sum_split(x: Tensor, key: int, dim: int) -> Tensor:
    """This rank's slice of the sum of every rank's tensor; backward gathers the slices' gradients."""
    return _SumSplit.apply(x, key, dim % x.ndim)  # pyright: ignore[reportReturnType]


def tp_place(key: int) -> tuple[int, int]:
    """(this rank's index, number of ranks) among its slot's tensor-parallel ranks."""
    world = world_of(key)
    return world.coordinates.tp, world.home.tp


def _run(channel: Channel, what: str, start: Callable[[ProcessGroup], Any]) -> None:
    with channel.watch.during(what, channel.ranks) as operation:
        start(channel.group).wait()
        channel.watch.mark(operation)


def _summed(x: Tensor, key: int, what: str) -> Tensor:
    total = x.detach().clone(memory_format=torch.contiguous_format)
    _run(world_of(key).channels.tp, what, lambda group: dist.all_reduce(total, group=group, async_op=True))
    return total


def _gathered(x: Tensor, key: int, dim: int, what: str) -> Tensor:
    tp = world_of(key).channels.tp
    x = x.detach().contiguous()
    in_place = x.shape[:dim].numel() == 1
    found = x.new_empty(
        (*x.shape[:dim], tp.degree * x.shape[dim], *x.shape[dim + 1 :]) if in_place else (tp.degree, *x.shape)
    )
    flat, own = found.view(-1), x.view(-1)
    _run(tp, what, lambda group: _all_gather_single(flat, own, group=group, async_op=True))
    return found if in_place else torch.cat(found.unbind(), dim)


def _summed_slice(x: Tensor, key: int, dim: int, what: str) -> Tensor:
    tp = world_of(key).channels.tp
    x = x.detach().contiguous()
    assert x.shape[:dim].numel() == 1 and x.shape[dim] % tp.degree == 0, (what, x.shape, dim, tp.degree)
    found = x.new_empty((*x.shape[:dim], x.shape[dim] // tp.degree, *x.shape[dim + 1 :]))
    flat, own = x.view(-1), found.view(-1)
    _run(tp, what, lambda group: _reduce_scatter_single(own, flat, group=group, async_op=True))
    return found


def _slice(x: Tensor, key: int, dim: int) -> Tensor:
    index, degree = tp_place(key)
    assert x.shape[dim] % degree == 0, (x.shape, dim, degree)
    return x.detach().chunk(degree, dim)[index].clone(memory_format=torch.contiguous_format)


class _Copy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, key: int) -> Tensor:
        ctx.key = key
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return _summed(gradients[0], ctx.key, "sum of gradients over tp"), None


class _Sum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, key: int) -> Tensor:
        return _summed(x, key, "sum over tp")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        return gradients[0], None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, key: int, dim: int, gradient: Gradient) -> Tensor:
        ctx.key, ctx.dim, ctx.gradient = key, dim, gradient
        return _gathered(x, key, dim, "gather over tp")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.gradient == "identical":
            return _slice(gradients[0], ctx.key, ctx.dim), None, None, None
        return _summed_slice(gradients[0], ctx.key, ctx.dim, "sum of row gradients over tp"), None, None, None


class _Split(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, key: int, dim: int) -> Tensor:
        ctx.key, ctx.dim = key, dim
        return _slice(x, key, dim)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(gradients[0], ctx.key, ctx.dim, "gather of gradients over tp"), None, None


class _SumSplit(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, key: int, dim: int) -> Tensor:
        ctx.key, ctx.dim = key, dim
        return _summed_slice(x, key, dim, "sum of rows over tp")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        return _gathered(gradients[0], ctx.key, ctx.dim, "gather of gradients over tp"), None, None
