"""Move arbitrary rows to the ranks that need them, and their gradients back to the ranks that have them.

Who sends what is an Exchange, computed on the host; no sizes are exchanged. The way back is planned on its own, not the
way there reversed: a row that several ranks need has several gradients, and a row that several ranks have must reach
them all. Where only the sender knows how many rows go to whom, as those of experts, counts travel first
(`exchange_counts`), then the rows (`all_to_all_rows`).
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from longspan.comm.groups.channel import Channel
from longspan.comm.host_arrays import to_device
from longspan.errors import CommError, LayoutError
from longspan.layout import Exchange, Partition

RowGradient = Literal["partial", "identical", "none"]
Rows = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Moves:
    """One member's side of a movement of rows, as indices on its device.

    `folds`: within x first, round by round, `x[target] += x[source]`. Then `sends[m]` are the rows of x that go to
    member m, and `takes[m]` is (source, target) for the `arriving[m]` rows that come from m; for m the member itself
    the same without travelling. Targets within one pair are distinct.
    """

    folds: tuple[tuple[Tensor, Tensor], ...]
    sends: tuple[Tensor, ...]
    takes: tuple[tuple[Tensor, Tensor], ...]
    arriving: tuple[int, ...]
    rows: int  # of the result
    adds: bool = False  # what arrives for one place comes from several members and is summed; else it is copied


class RowExchange:
    """An exchange made ready on a channel: call it with this member's rows of `have` to get its rows of `need`.

    >>> move = RowExchange(Exchange(have, need), world.channels.everyone, gradient="partial")
    >>> y = move(x)                     # (rows of have here, …) -> (rows of need here, …)

    The exchange's ranks are the channel's members. `gradient` says what the copies of a row on the need side carry:
    *partial*, each the gradient of its own use, which are summed, or *identical*, all the same gradient, of which one
    is taken; *none*: nothing flows back, as for a frozen encoder. In backward every rank that has a row gets its whole
    gradient; rows that nobody needs get zeros. Every member enters forward, and backward too (with zero rows if need
    be: let `y.sum()` take part in the loss). Trailing shape and dtype are the same on all members.

    Raises LayoutError where sizes do not fit, CommError for an unknown gradient.
    """

    def __init__(self, exchange: Exchange, channel: Channel, *, gradient: RowGradient = "partial") -> None:
        if gradient not in ("partial", "identical", "none"):
            raise CommError(f"gradient {gradient!r} is not known; use 'partial', 'identical' or 'none'")
        if exchange.have.degree != channel.degree:
            raise LayoutError(
                f"the exchange is among {exchange.have.degree} ranks, the channel has {channel.degree}; give one list "
                f"of rows, which may be empty, for each rank"
            )
        self.exchange, self.channel, self.gradient = exchange, channel, gradient
        self._there = _moves_there(exchange, channel.index, channel.device)
        plan_back = {"partial": _moves_summed_back, "identical": _moves_one_back, "none": None}[gradient]
        self._back = None if plan_back is None else plan_back(exchange, channel.index, channel.device)

    def __call__(self, x: Tensor) -> Tensor:
        """(rows of have here, …) to (rows of need here, …)."""
        rows = self.exchange.have.counts[self.channel.index]
        if x.shape[0] != rows:
            raise LayoutError(f"{x.shape[0]} rows were given, this member has {rows}; pass them in the order of `have`")
        if self._back is None or not x.is_floating_point() or not torch.is_grad_enabled():
            return _move(x.detach(), self._there, self.channel, "row exchange")
        # The anchor makes every member enter backward, also one whose own rows need no gradient.
        anchor = x.new_empty(0, requires_grad=True)
        return _ExchangeRows.apply(x, anchor, self)  # pyright: ignore[reportReturnType]

    def back(self, gradient: Tensor) -> Tensor:
        """The gradient of this member's rows of `have` from that of its rows of `need`."""
        assert self._back is not None
        if self.gradient == "partial" and gradient.dtype.itemsize < 4:
            return _move(gradient.float(), self._back, self.channel, "row gradients").to(gradient.dtype)
        return _move(gradient, self._back, self.channel, "row gradients")


class _ExchangeRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, move: RowExchange) -> Tensor:
        ctx.move, ctx.shape = move, anchor.shape
        return _move(x.detach(), move._there, move.channel, "row exchange")

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None]:
        gradient = ctx.move.back(gradients[0])
        return gradient, gradient.new_zeros(ctx.shape), None


def _move(x: Tensor, moves: Moves, channel: Channel, what: str) -> Tensor:
    """Fold, send, and add what arrives in member order, so that the result does not depend on timing."""
    if moves.folds:
        x = x.clone()
        for source, target in moves.folds:
            x.index_add_(0, target, x[source])
    me, tail = channel.index, x.shape[1:]
    buffers = [x.new_empty((0 if m == me else n, *tail)) for m, n in enumerate(moves.arriving)]
    sends = [(m, x[index]) for m, index in enumerate(moves.sends) if m != me]
    handle = channel.exchange(sends, [(m, buffer) for m, buffer in enumerate(buffers) if m != me], what)
    buffers[me] = x[moves.sends[me]]
    result = x.new_zeros((moves.rows, *tail))
    handle.wait()
    for buffer, (source, target) in zip(buffers, moves.takes, strict=True):
        if moves.adds:
            result.index_add_(0, target, buffer[source])
        else:
            result.index_copy_(0, target, buffer[source])
    return result


def _moves_there(exchange: Exchange, me: int, device: torch.device) -> Moves:
    """Forward: every needed row once from one rank that has it; own rows stay."""
    members = range(exchange.degree)
    local = exchange.keep(me)
    sends = [local.source if m == me else exchange.send(me, to=m) for m in members]
    takes = [(np.arange(len(local.source)), local.target) if m == me else exchange.receive(me, frm=m) for m in members]
    arriving = [int(n) for n in exchange.counts[:, me]]
    return _on_device(sends, takes, arriving, exchange.need.counts[me], device)


def _moves_one_back(exchange: Exchange, me: int, device: torch.device) -> Moves:
    """Backward of identical gradients: the rows that anybody needs, back to every rank that has them, one copy each."""
    members = range(exchange.degree)
    needed = np.unique(np.concatenate([exchange.need.rows(m) for m in members]))
    places = [np.flatnonzero(np.isin(exchange.have.rows(m), needed)) for m in members]
    returned = Partition.from_rows([exchange.have.rows(m)[places[m]].tolist() for m in members])
    back = _moves_there(Exchange(exchange.need, returned), me, device)
    mine = to_device(places[me], device)
    takes = tuple((source, mine[target]) for source, target in back.takes)
    return replace(back, takes=takes, rows=exchange.have.counts[me])


def _moves_summed_back(exchange: Exchange, me: int, device: torch.device) -> Moves:
    """Backward of partial gradients: every rank sums its own uses of a row and sends it to every rank that has it."""
    members = range(exchange.degree)
    have, need = exchange.have.rows(me), exchange.need.rows(me)
    ids, first = np.unique(need, return_index=True)
    sends = [first[np.isin(ids, exchange.have.rows(m))] for m in members]
    arrive = [np.intersect1d(exchange.need.rows(m), have) for m in members]  # in the order of row ids, as they are sent
    takes = [_places(rows, have) for rows in arrive]
    arriving = [0 if m == me else len(rows) for m, rows in enumerate(arrive)]
    folds = tuple(_pair(pair, device) for pair in _rounds(need, first))
    return replace(_on_device(sends, takes, arriving, len(have), device), folds=folds, adds=True)


def _places(arrived: Rows, have: Rows) -> tuple[Rows, Rows]:
    """(source, target): where each of the sorted arrived rows goes among `have`, which may hold a row several times."""
    places = np.flatnonzero(np.isin(have, arrived))
    return np.searchsorted(arrived, have[places]), places


def _rounds(need: Rows, first: Rows) -> list[tuple[Rows, Rows]]:
    """Second, third, … uses of a row, each round (source, target): to be added to the row's first use."""
    order = np.argsort(need, kind="stable")
    starts = np.flatnonzero(np.diff(need[order], prepend=-1))
    row = np.repeat(np.arange(len(starts)), np.diff(np.append(starts, len(order))))
    use = np.arange(len(order)) - starts[row]
    most = int(use.max()) if len(use) else 0
    return [(order[use == k], first[row[use == k]]) for k in range(1, most + 1)]


def _on_device(
    sends: Sequence[Rows], takes: Sequence[tuple[Rows, Rows]], arriving: Sequence[int], rows: int, device: torch.device
) -> Moves:
    return Moves(
        folds=(),
        sends=tuple(_index(send, device) for send in sends),
        takes=tuple(_pair(take, device) for take in takes),
        arriving=tuple(arriving),
        rows=rows,
    )


def _pair(pair: tuple[Rows, Rows], device: torch.device) -> tuple[Tensor, Tensor]:
    source, target = pair
    return _index(source, device), _index(target, device)


def _index(rows: Rows, device: torch.device) -> Tensor:
    return to_device(np.array(rows, dtype=np.int64), device)


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
