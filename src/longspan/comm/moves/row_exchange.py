"""Move arbitrary rows to the ranks that need them, and their gradients back to the ranks that have them.

Who sends what is an Exchange, computed on the host; no sizes are exchanged. The way back is planned on its own, not the
way there reversed: a row that several ranks need has several gradients, and a row that several ranks have must reach
them all. If only the sender has the number of rows that go to each member, as those of experts, counts travel first
(`exchange_counts`), then the rows (`all_to_all_rows`).
"""

from collections import OrderedDict
from collections.abc import Sequence
from threading import Lock
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.comm.groups.channel import Channel
from longspan.comm.moves.carry_rows import DeviceMoves, carry_rows, moves_on_device
from longspan.errors import CommError, LayoutError
from longspan.layout import Exchange
from longspan.layout.row_moves import Blocks, Groups, plan_moves

RowGradient = Literal["partial", "partial_over_slots", "identical", "none"]

REMEMBERED = 32  # exchanges of a channel whose moves stay at hand, on the device
_Moves = tuple[DeviceMoves, DeviceMoves | None]  # there and back
_moves_by_channel: WeakKeyDictionary[Channel, OrderedDict[Any, _Moves]] = WeakKeyDictionary()
_moves_lock = Lock()  # exchanges of a coming step are made ready in a thread of its own


class RowExchange:
    """An exchange made ready on a channel: call it with this member's rows of `have` to get its rows of `need`.

    >>> move = RowExchange(Exchange(have, need), world.channels.everyone, gradient="partial")
    >>> y = move(x)                     # (rows of have here, …) -> (rows of need here, …)

    The exchange's ranks are the channel's members. `gradient` is what the copies of a row on the need side carry:
    *partial*, each the gradient of its own use, which are summed; *identical*, all the same gradient, of which one is
    taken; *partial_over_slots*, the same gradient on the members of each of `slots`, of which one is taken, and those
    of different slots are summed; *none*: nothing flows back, as for a frozen encoder. A member that needs a row
    several times has a partial gradient for each. In backward every rank that has a row gets its whole gradient; rows
    that nobody needs get zeros. Sums are taken in the order of members or slots, those of half precision in float32.

    Every member enters forward, and backward too, with no rows if need be; one that neither sends nor receives sends
    no message. Trailing shape and dtype are the same on all members.

    Raises LayoutError where sizes do not fit, CommError for an unknown gradient.
    """

    def __init__(
        self,
        exchange: Exchange,
        channel: Channel,
        *,
        gradient: RowGradient = "partial",
        slots: Sequence[Sequence[int]] = (),
    ) -> None:
        """Plan the moves of rows there, and of their gradients back.

        Back, gradients of copies of a row are summed: over members ("partial"), over slots whose members have the same
        ("partial_over_slots"), or not at all where all have the same already ("identical").
        """
        if gradient not in get_args(RowGradient):
            raise CommError(f"gradient {gradient!r} is not known; use one of {', '.join(get_args(RowGradient))}")
        if exchange.have.degree != channel.degree:
            raise LayoutError(
                f"the exchange is among {exchange.have.degree} ranks, the channel has {channel.degree}; give one list "
                f"of rows, which may be empty, for each rank"
            )
        self.exchange: Exchange = exchange
        self.channel: Channel = channel
        self.gradient = gradient
        self._rows = exchange.have.counts[channel.index]
        groups: dict[str, Groups | None] = {
            "partial": [[member] for member in range(channel.degree)],
            "partial_over_slots": [tuple(members) for members in slots],
            "identical": None,
        }
        self._moves_there, self._moves_back = _find_moves(exchange, channel, gradient != "none", groups.get(gradient))

    def __call__(self, x: Tensor) -> Tensor:
        """Exchange x, this member's rows of `have`, for its rows of `need`; entered by all members."""
        if x.shape[0] != self._rows:
            raise LayoutError(
                f"{x.shape[0]} rows were given, this member has {self._rows}; pass them in the order of `have`"
            )
        if self._moves_back is None or not x.is_floating_point() or not torch.is_grad_enabled():
            return carry_rows(x.detach(), self._moves_there, self.channel, "row exchange")
        # The anchor makes every member enter backward, also one whose own rows need no gradient.
        anchor = x.new_empty(0, requires_grad=True)
        return _ExchangeRows.apply(x, anchor, self)  # pyright: ignore[reportReturnType]

    @property
    def received_rows(self) -> tuple[int, int]:
        """Return how many rows arrive here from other members, forward and backward (0 where nothing flows back)."""
        return sum(self._moves_there.receives), sum(self._moves_back.receives) if self._moves_back is not None else 0

    def back(self, gradient: Tensor) -> Tensor:
        """Return the gradient of this member's rows of `have` from that of its rows of `need`."""
        assert self._moves_back is not None
        return carry_rows(gradient.detach(), self._moves_back, self.channel, "row gradients")


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, move: RowExchange) -> Tensor:
        ctx.move, ctx.anchor_shape = move, anchor.shape
        return carry_rows(x.detach(), move._moves_there, move.channel, "row exchange")

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        """Return the gradient of x, carried back to the ranks that have its rows, and the anchor's, of no elements."""
        gradient = ctx.move.back(gradients[0])
        return gradient, gradient.new_zeros(ctx.anchor_shape), None


def forget_moves() -> None:
    """Plan every exchange anew from now on."""
    _moves_by_channel.clear()


def _find_moves(exchange: Exchange, channel: Channel, back: bool, groups: Groups | None) -> _Moves:
    """Return the moves of an exchange's rows and, with `back`, those of their gradients; planned at the first call.

    Gradients of a row are the same on the members of each of `groups`, of which one is taken, and are summed over
    groups. None: they are the same on all members, or there is no `back`.

    The moves that a channel used last are kept, REMEMBERED at most: moves in use are taken out of the dict and put in
    again as the newest.
    """
    key = exchange, back, None if groups is None else tuple(map(tuple, groups))
    with _moves_lock:
        moves = _moves_by_channel.setdefault(channel, OrderedDict()).pop(key, None)
    if moves is None:
        have, need = exchange.blocks
        moves = (
            _plan_device_moves(have, need, channel, None),
            _plan_device_moves(need, have, channel, groups) if back else None,
        )
    with _moves_lock:
        recent = _moves_by_channel.setdefault(channel, OrderedDict())
        recent[key] = moves
        if len(recent) > REMEMBERED:
            recent.popitem(last=False)
    return moves


def _plan_device_moves(source: Blocks, target: Blocks, channel: Channel, groups: Groups | None) -> DeviceMoves:
    return moves_on_device(plan_moves(source, target, channel.index, groups), channel.device)


def exchange_counts(counts: Tensor, channel: Channel) -> list[list[int]]:
    """Return all members' counts (E,), in member order, on each member's host: one gather, and one device wait."""
    parts = channel.all_gather(counts[None].contiguous(), [1] * channel.degree, "token counts of experts").wait()
    return torch.cat(parts).tolist()


def all_to_all_rows(x: Tensor, sends: Sequence[int], receives: Sequence[int], channel: Channel) -> Tensor:
    """Send the first `sends[0]` rows of x to member 0, the next `sends[1]` to member 1, …; return what arrives.

    x (sum of sends, …) to (sum of receives, …): `receives[m]` rows from each member m in turn. Differentiable: a row
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
        gradient = ctx.channel.all_to_all_rows(gradients[0], ctx.receives, ctx.sends, "gradients of experts' rows")
        return gradient.wait(), None, None, None
