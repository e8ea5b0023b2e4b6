"""Rows that routers send to experts of other members: counts travel first, then rows, and their gradients back."""

from collections.abc import Sequence

from torch import Tensor

from longspan.comm.autograd import apply_with_gradient
from longspan.comm.channel import Channel
from longspan.errors import CommError


def exchange_counts(counts: Tensor, channel: Channel) -> list[list[int]]:
    """Return all members' counts (E,), in member order, on each member's host: one gather, and one device wait."""
    handle = channel.all_gather_rows(counts[None].contiguous(), [1] * channel.degree, "token counts of experts")
    return handle.wait().tolist()


def send_routed_rows(x: Tensor, sends: Sequence[int], receives: Sequence[int], channel: Channel) -> Tensor:
    """Send the first `sends[0]` rows of x to member 0, the next `sends[1]` to member 1, …; return what arrives.

    x (sum of sends, …) to (sum of receives, …): `receives[m]` rows from each member m in turn. Differentiable: a row
    is at one member before and at one after, so its gradient is whole where it is, and travels back as it came.
    Every member enters, forward and backward, with no rows if need be. Raises CommError where counts do not fit.
    """
    if len(sends) != channel.degree or len(receives) != channel.degree or x.shape[0] != sum(sends):
        raise CommError(
            f"send_routed_rows got {x.shape[0]} rows to send as {tuple(sends)} and to receive as {tuple(receives)} "
            f"among {channel.degree} members; give one count for each member, and that many rows"
        )

    def forward(x: Tensor) -> Tensor:
        return channel.all_to_all_rows(x.detach(), sends, receives, "rows to their experts").wait()

    def backward(gradient: Tensor) -> Tensor:
        return channel.all_to_all_rows(gradient, receives, sends, "gradients of experts' rows").wait()

    return apply_with_gradient(x, forward, backward)
