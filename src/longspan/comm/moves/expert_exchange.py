"""Rows to the member that works on them and back, where only the sender knows how many: expert parallelism's exchange.

Counts travel first, then rows. Where every rank can compute the counts on the host, `rows` moves them without asking.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from longspan.comm.groups.channel import Channel
from longspan.errors import CommError


def exchange_counts(counts: Tensor, channel: Channel) -> list[list[int]]:
    """Every member's counts (E,), in member order, on every member's host: a gather, and one wait for the device."""
    parts = channel.all_gather(counts[None].contiguous(), [1] * channel.degree, "token counts of experts").wait()
    return torch.cat(parts).tolist()


def all_to_all_rows(x: Tensor, sends: Sequence[int], receives: Sequence[int], channel: Channel) -> Tensor:
    """The first `sends[0]` rows of x to member 0, the next `sends[1]` to member 1, …; what arrives, in member order.

    x (sum of sends, …) to (sum of receives, …), where `receives[m]` is what member m sends here. Differentiable: a row
    is at one member before and at one after, so that its gradient is whole where it is, and travels back as it came.
    Every member enters, in forward and in backward, with no rows if need be. Raises CommError where counts do not fit.
    """
    if len(sends) != channel.degree or len(receives) != channel.degree or x.shape[0] != sum(sends):
        raise CommError(
            f"all_to_all_rows got {x.shape[0]} rows to send as {tuple(sends)} and to receive as {tuple(receives)} "
            f"among {channel.degree} members; give one count for each member, and that many rows"
        )
    return _AllToAllRows.apply(x, tuple(sends), tuple(receives), channel)  # pyright: ignore[reportReturnType]


class _AllToAllRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, sends: tuple[int, ...], receives: tuple[int, ...], channel: Channel) -> Tensor:
        ctx.sends, ctx.receives, ctx.channel = sends, receives, channel
        return channel.all_to_all_rows(x.detach(), sends, receives, "rows to their experts").wait()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None, None]:
        back = ctx.channel.all_to_all_rows(gradients[0], ctx.receives, ctx.sends, "gradients of experts' rows")
        return back.wait(), None, None, None
