"""Collectives over a channel, with a stated gradient.

Each function says what it takes the incoming gradient to be. *identical*: every member holds the same gradient of the
shared result, because every member computes the same from it; backward then takes one copy. *partial*: each member
holds the gradient of its own part of the loss; backward sums over the members. Sums are taken in member order, so that
results do not depend on timing. Rings are in `ring`, arbitrary rows in `rows`.
"""

from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from longspan.comm.groups.channel import Channel, summed
from longspan.errors import CommError

Gradient = Literal["identical", "partial"]


def gather_rows(x: Tensor, counts: Sequence[int], channel: Channel, *, gradient: Gradient) -> Tensor:
    """Every member's rows end to end: (counts[index], …) to (sum of counts, …).

    Backward gives each member the gradient of its own rows: its slice of an identical gradient, or the members' sum of
    a partial one. Raises CommError where x does not have counts[index] rows.
    """
    _check_rows(x, counts, channel, "gather_rows")
    return _GatherRows.apply(x, tuple(counts), channel, _known(gradient))  # pyright: ignore[reportReturnType]


def scatter_rows(x: Tensor, counts: Sequence[int], channel: Channel, *, gradient: Gradient) -> Tensor:
    """The own rows of a tensor that every member holds: (sum of counts, …) to (counts[index], …). Local in forward.

    Here `gradient` says what backward leaves: identical, the whole gradient on every member (it is gathered), or
    partial, zero outside the own rows (to be summed over members by the caller, without communication here).
    """
    if x.shape[0] != sum(counts):
        raise CommError(f"scatter_rows got {x.shape[0]} rows, the members take {sum(counts)} together")
    return _ScatterRows.apply(x, tuple(counts), channel, _known(gradient))  # pyright: ignore[reportReturnType]


def all_reduce_sum(x: Tensor, channel: Channel, *, gradient: Gradient) -> Tensor:
    """The sum of every member's tensor, the same bits on every member. For small tensors: each travels whole.

    Backward passes an identical gradient on as it is, and sums a partial one over the members.
    """
    return _AllReduceSum.apply(x, channel, _known(gradient))  # pyright: ignore[reportReturnType]


class _GatherRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: tuple[int, ...], channel: Channel, gradient: Gradient) -> Tensor:
        ctx.counts, ctx.channel, ctx.gradient = counts, channel, gradient
        return torch.cat(channel.all_gather(x.detach(), counts, "gather of rows").wait())

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        if ctx.gradient == "identical":
            return gradients[0].split(list(ctx.counts))[ctx.channel.index], None, None, None
        return ctx.channel.reduce_scatter(gradients[0], ctx.counts, "sum of row gradients").wait(), None, None, None


class _ScatterRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counts: tuple[int, ...], channel: Channel, gradient: Gradient) -> Tensor:
        ctx.counts, ctx.channel, ctx.gradient = counts, channel, gradient
        return x.split(list(counts))[channel.index].clone()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        own, channel = gradients[0], ctx.channel
        if ctx.gradient == "identical":
            parts = channel.all_gather(own, ctx.counts, "gather of row gradients").wait()
            return torch.cat(parts), None, None, None
        whole = own.new_zeros((sum(ctx.counts), *own.shape[1:]))
        whole.split(list(ctx.counts))[channel.index].copy_(own)
        return whole, None, None, None


class _AllReduceSum(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, channel: Channel, gradient: Gradient) -> Tensor:
        ctx.channel, ctx.gradient = channel, gradient
        return _sum(x.detach(), channel, "sum over members")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        if ctx.gradient == "identical":
            return gradients[0], None, None
        return _sum(gradients[0], ctx.channel, "sum of gradients"), None, None


def _sum(x: Tensor, channel: Channel, what: str) -> Tensor:
    return summed(channel.all_gather(x[None], [1] * channel.degree, what).wait())[0]


def _check_rows(x: Tensor, counts: Sequence[int], channel: Channel, what: str) -> None:
    if len(counts) != channel.degree or x.shape[0] != counts[channel.index]:
        raise CommError(
            f"{what} got {x.shape[0]} rows from member {channel.index} of {channel.degree}, whose counts are "
            f"{tuple(counts)}; pass one count per member, and that many rows"
        )


def _known(gradient: str) -> Gradient:
    if gradient not in ("identical", "partial"):
        raise CommError(f"gradient {gradient!r} is not known; use 'identical' or 'partial'")
    return gradient
