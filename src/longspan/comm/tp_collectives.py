"""Collectives of a slot's tensor-parallel ranks, with a stated gradient.

Every tensor-parallel rank of a slot enters each of them, in forward and in backward, in one order. A gradient is
*identical* where every rank holds the same gradient of the shared result, and *partial* where each holds the gradient
of its own part of the loss, to be summed. The pairs are those of Korthikanti et al., "Reducing Activation
Recomputation in Large Transformer Models" (2022), figures 4 to 6. `world_key` names a world (`world_of`). Dims before
`dim` must be of size 1 where tensors are split or summed in parts, as for packed rows (1, T, …).
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from longspan.comm.autograd import apply_with_gradient, break_graphs_around
from longspan.comm.channel import EVENT_BYTES, Channel, all_gather_single, widen_half_precision
from longspan.comm.world import world_of

Gradient = Literal["identical", "partial"]

GATHER_GRADIENTS = "gather of gradients over tp"

# torch 2.13 renamed reduce_scatter_tensor.
_reduce_scatter_single: Callable[..., Any] = (
    getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
)


@break_graphs_around
def tp_copy(x: Tensor, world_key: int) -> Tensor:
    """Return x, which all ranks hold and each uses for its part of a computation; backward sums their gradients."""
    if not torch.is_grad_enabled():
        return x
    return apply_with_gradient(
        x, lambda x: x.view_as(x), lambda gradient: _all_reduce(gradient, world_key, "sum of gradients over tp")
    )


@break_graphs_around
def tp_copy_parameter(x: Tensor, world_key: int) -> Tensor:
    """Return a parameter as `tp_copy` does; its gradient in half precision is summed in float32 and rounded once."""
    if not torch.is_grad_enabled():
        return x

    def backward(gradient: Tensor) -> Tensor:
        return _all_reduce(widen_half_precision(gradient), world_key, "sum of parameters' gradients over tp").to(
            gradient.dtype
        )

    return apply_with_gradient(x, lambda x: x.view_as(x), backward)


@break_graphs_around
def tp_sum(x: Tensor, world_key: int) -> Tensor:
    """Return the sum of every rank's tensor; the gradient is identical and passes as it is."""
    return apply_with_gradient(x, lambda x: _all_reduce(x, world_key, "sum over tp"), lambda gradient: gradient)


@break_graphs_around
def tp_gather(x: Tensor, world_key: int, dim: int, *, gradient: Gradient) -> Tensor:
    """Join every rank's tensor end to end along `dim`.

    Backward gives each rank its slice of an identical gradient, or of the sum of a partial one.
    """
    dim = dim % x.ndim

    def backward(gathered: Tensor) -> Tensor:
        if gradient == "identical":
            return _slice_of_this_rank(gathered, world_key, dim)
        return _reduce_scatter(gathered, world_key, dim, "sum of row gradients over tp")

    return apply_with_gradient(x, lambda x: _all_gather(x, world_key, dim, "gather over tp"), backward)


@break_graphs_around
def tp_gather_parameter(x: Tensor, world_key: int) -> Tensor:
    """Join every rank's rows of a parameter; a partial gradient is summed as in `tp_copy_parameter`."""

    def backward(gradient: Tensor) -> Tensor:
        rows_gradient = _reduce_scatter(
            widen_half_precision(gradient), world_key, 0, "sum of parameters' gradients over tp"
        )
        return rows_gradient.to(gradient.dtype)

    return apply_with_gradient(x, lambda x: _all_gather(x, world_key, 0, "gather of parameters over tp"), backward)


@break_graphs_around
def tp_split(x: Tensor, world_key: int, dim: int) -> Tensor:
    """Return this rank's slice of a tensor that every rank holds; backward gathers the slices' gradients."""
    dim = dim % x.ndim
    return apply_with_gradient(
        x,
        lambda x: _slice_of_this_rank(x, world_key, dim),
        lambda part: _all_gather(part, world_key, dim, GATHER_GRADIENTS),
    )


@break_graphs_around
def tp_reduce_scatter(x: Tensor, world_key: int, dim: int) -> Tensor:
    """Return this rank's slice of the sum of every rank's tensor; backward gathers the slices' gradients."""
    dim = dim % x.ndim
    return apply_with_gradient(
        x,
        lambda x: _reduce_scatter(x, world_key, dim, "sum of rows over tp"),
        lambda part: _all_gather(part, world_key, dim, GATHER_GRADIENTS),
    )


def tp_index_and_degree(world_key: int) -> tuple[int, int]:
    """Return (this rank's index, number of ranks) among its slot's tensor-parallel ranks."""
    world = world_of(world_key)
    return world.coordinates.tp, world.home.tp


def _run_collective(channel: Channel, label: str, start: Callable[[ProcessGroup], Any], received: Tensor) -> None:
    """`start(group)` fills `received`; what is launched next waits for it on the device."""
    with channel.watch.enter_operation(label, channel.ranks) as operation:
        work = start(channel.group)
        work.wait()
        # a work keeps what it receives in memory; an event does not, but takes the host as long as a small collective
        if received.nbytes < EVENT_BYTES:
            channel.watch.watch_works(operation, (work,))
        else:
            channel.watch.watch_stream(operation)


def _all_reduce(x: Tensor, world_key: int, label: str) -> Tensor:
    """Entered by the slot's tensor-parallel ranks; the sum is a new tensor."""
    total = x.detach().clone(memory_format=torch.contiguous_format)
    tp = world_of(world_key).channels.tp
    _run_collective(tp, label, lambda group: dist.all_reduce(total, group=group, async_op=True), total)
    return total


def _all_gather(x: Tensor, world_key: int, dim: int, label: str) -> Tensor:
    """Entered by the slot's tensor-parallel ranks; without a copy if no dim before `dim` is larger than 1."""
    tp = world_of(world_key).channels.tp
    x = x.detach().contiguous()
    in_place = x.shape[:dim].numel() == 1  # then ranks' tensors lie one after another in the joined one, too
    gathered = x.new_empty(
        (*x.shape[:dim], tp.degree * x.shape[dim], *x.shape[dim + 1 :]) if in_place else (tp.degree, *x.shape)
    )
    into = gathered.view(-1)
    flat = x.view(-1)
    _run_collective(tp, label, lambda group: all_gather_single(into, flat, group=group, async_op=True), into)
    return gathered if in_place else torch.cat(gathered.unbind(), dim)


def _reduce_scatter(x: Tensor, world_key: int, dim: int, label: str) -> Tensor:
    """Entered by the slot's tensor-parallel ranks; dims before `dim` must be of size 1."""
    tp = world_of(world_key).channels.tp
    x = x.detach().contiguous()
    assert x.shape[:dim].numel() == 1 and x.shape[dim] % tp.degree == 0, (label, x.shape, dim, tp.degree)
    sum_slice = x.new_empty((*x.shape[:dim], x.shape[dim] // tp.degree, *x.shape[dim + 1 :]))
    flat = x.view(-1)
    into = sum_slice.view(-1)
    _run_collective(tp, label, lambda group: _reduce_scatter_single(into, flat, group=group, async_op=True), into)
    return sum_slice


def _slice_of_this_rank(x: Tensor, world_key: int, dim: int) -> Tensor:
    index, degree = tp_index_and_degree(world_key)
    assert x.shape[dim] % degree == 0, (x.shape, dim, degree)
    return x.detach().chunk(degree, dim)[index].clone(memory_format=torch.contiguous_format)
