"""Move arbitrary rows to the ranks that need them, and their gradients back to the ranks that have them.

Who sends what is an Exchange, computed on the host; no sizes are exchanged. The way back is planned on its own: a row
that several ranks need has several gradients, and a row that several ranks have must reach them all. If only the sender
has the number of rows that go to each member, counts travel first (`exchange_counts`), then rows (`all_to_all_rows`).
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from threading import Lock
from typing import Any, Literal, get_args
from weakref import WeakKeyDictionary

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.comm.channel import Channel, wide
from longspan.comm.shard import to_device
from longspan.errors import CommError, LayoutError
from longspan.layout import Exchange
from longspan.layout.exchange import Groups, RowMoves, plan_moves
from longspan.layout.segments import Integers

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class DeviceMoves:
    """RowMoves with their indices on a device, some runs of indices as slices; fields named as there mean the same.

    Rows reach the result in one of three ways, and indices that a way does not use are empty. Nothing arrives: x itself
    is the pool. Each arriving row goes to one place, and no row is a sum: the pool has arriving rows alone; `local` are
    the rows of x for all places (any row of x where another row arrives), and `arrived` the places of arriving rows, in
    the order of arrival. All other moves: through a pool of arriving and staying rows, with `arrived` None.
    """

    sends: tuple[int, ...]
    receives: tuple[int, ...]
    leaves: Tensor | slice
    stays: Tensor
    places: Tensor | slice
    absent: Tensor  # rows of the result that nobody has
    summed_rows: Tensor
    first: Tensor  # places of the first addends of `summed_rows`
    local: Tensor
    arrived: Tensor | None
    folds: tuple[Pair, ...]
    further_addends: tuple[Pair, ...]
    widened: bool
    rows: int  # of the result
    direct: bool  # the result is the pool as it is
    zeros: bool  # nothing is in the pool


def moves_on_device(moves: RowMoves, device: torch.device) -> DeviceMoves:
    """Return the same moves, ready to be carried out on a device; their indices go there in one copy.

    Indices that follow each other become slices. `direct`: arriving rows and then those that stay are the result, in
    this order. The tensors of all indices come in one list: those of the fields, then source and target of each pair.
    """
    arriving = sum(moves.receives)
    pool_rows = arriving + len(moves.stays)
    direct = arriving > 0 and np.array_equal(moves.places, np.arange(pool_rows))
    rows = _rows_by_name(moves, arriving, direct)
    further_pairs = [(_pool_places(source, moves, arriving), target) for source, target in moves.further_addends]
    pairs = [*moves.folds, *further_pairs]
    arrays = [*rows.values(), *chain.from_iterable(pairs)]
    tensors = to_device(np.concatenate(arrays), device).split([len(array) for array in arrays])
    index = dict(zip(rows, tensors, strict=False))
    pairs_there = list(zip(tensors[len(rows) :: 2], tensors[len(rows) + 1 :: 2], strict=True))
    return DeviceMoves(
        sends=moves.sends,
        receives=moves.receives,
        leaves=_as_slice(rows["leaves"]) or index["leaves"],
        stays=index["stays"],
        places=_as_slice(rows["places"]) or index["places"],
        absent=index["absent"],
        summed_rows=index["summed_rows"],
        first=index["first"],
        local=index["local"],
        arrived=index["arrived"] if len(rows["arrived"]) else None,
        folds=tuple(pairs_there[: len(moves.folds)]),
        further_addends=tuple(pairs_there[len(moves.folds) :]),
        widened=moves.widened,
        rows=len(moves.places),
        direct=direct,
        zeros=not pool_rows,
    )


def _rows_by_name(moves: RowMoves, arriving: int, direct: bool) -> dict[str, Integers]:
    """`arriving` is how many rows arrive. Indices that are not used, as with `direct` those of the pool, are empty."""
    none = moves.places[:0]
    local, arrived = (none, none) if direct else _direct_indices(moves, arriving)
    from_pool = not direct and not len(arrived) and arriving + len(moves.stays) > 0
    places = np.maximum(moves.places, 0) if from_pool else none  # any row for absent ones, which are set to 0 later
    return {
        "leaves": moves.leaves,
        "stays": moves.stays if arriving and not len(arrived) else none,
        "places": _pool_places(places, moves, arriving),
        "absent": np.flatnonzero(moves.places < 0),
        "summed_rows": moves.summed_rows,
        "first": _pool_places(moves.places[moves.summed_rows], moves, arriving),
        "local": local,
        "arrived": arrived,
    }


def _pool_places(places: Integers, moves: RowMoves, arriving: int) -> Integers:
    """Where nothing arrives, x itself is the pool, so places become its rows."""
    return places if arriving else moves.stays[places]


def _direct_indices(moves: RowMoves, arriving: int) -> tuple[Integers, Integers]:
    """Return `local` and `arrived` of DeviceMoves, by which rows go to their places without the pool.

    Both are empty where the pool is needed: rows arrive in another order than the target's, go to several places or
    are summed, or none arrives.
    """
    arrived = np.flatnonzero((moves.places >= 0) & (moves.places < arriving))
    in_order = arrived[np.argsort(moves.places[arrived], kind="stable")]
    none = moves.places[:0]
    if not arriving or moves.further_addends or not np.array_equal(moves.places[in_order], np.arange(arriving)):
        return none, none
    if not len(moves.stays):
        return none, in_order
    # rows of x by place in the pool, any row where another arrives
    stays = np.concatenate([np.zeros(arriving, dtype=np.int64), moves.stays])
    return stays[np.maximum(moves.places, 0)], in_order


def _as_slice(rows: Integers) -> slice | None:
    if not len(rows):
        return slice(0, 0)
    run = slice(int(rows[0]), int(rows[0]) + len(rows))
    return run if np.array_equal(rows, np.arange(run.start, run.stop)) else None


def carry_rows(x: Tensor, moves: DeviceMoves, channel: Channel, what: str) -> Tensor:
    """Return this member's rows of the target, from x, its rows of the source; entered by all that send or receive.

    What leaves is packed by one indexing kernel, one message for each pair of members. Rows that stay are copied
    meanwhile. Several smaller messages, packed and unpacked while others travel, take longer on H200s over NVLink.
    Nothing waits for the device.
    """
    dtype = x.dtype
    if moves.widened:
        x = wide(x)
    if moves.folds:
        x = x.clone()
        for source, target in moves.folds:
            x.index_add_(0, target, x[source])
    packed, arriving = x[moves.leaves], sum(moves.receives)
    result = x.new_empty((moves.rows, *x.shape[1:]))
    pool = x
    if arriving:
        staying = len(moves.stays) if moves.arrived is None else 0
        pool = result if moves.direct else x.new_empty((arriving + staying, *x.shape[1:]))
    handle = channel.exchange_runs(packed, moves.sends, pool[:arriving], moves.receives, what)
    if moves.arrived is not None:  # staying rows go directly into the result, before arriving rows are written
        if len(moves.local):
            torch.ops.aten.index.Tensor_out(x, [moves.local], out=result)
        _zero_absent_rows(result, moves)
    elif arriving and len(moves.stays):  # a pool that is x itself needs no copy
        torch.ops.aten.index.Tensor_out(x, [moves.stays], out=pool[arriving:])
    handle.wait()
    _unpack_pool(pool, moves, result)
    return result.to(dtype)


def _zero_absent_rows(result: Tensor, moves: DeviceMoves) -> None:
    if len(moves.absent):
        result.index_fill_(0, moves.absent, 0)


def _set_rows(result: Tensor, places: Tensor, rows: Tensor) -> None:
    """Where a row has a whole number of 16-byte elements, it is copied as complex128, whose elements have 16 bytes:
    torch's kernel copies element by element (on an H200 1.4 TB/s in bfloat16, 4.1 TB/s in elements of 16 bytes).
    """
    width = rows.shape[1:].numel()
    flat, source = result.view(len(result), width), rows.view(len(rows), width)
    aligned = all(x.data_ptr() % 16 == 0 for x in (flat, source))
    if aligned and width and width * flat.element_size() % 16 == 0:
        flat, source = flat.view(torch.complex128), source.view(torch.complex128)
    flat.index_copy_(0, places, source)


def _unpack_pool(pool: Tensor, moves: DeviceMoves, result: Tensor) -> None:
    """With `arrived` the pool has only arriving rows; with `direct` the pool is the result already; with `zeros` the
    pool is empty. Rows `summed_rows` of the result are sums: of the pool's rows `first`, and of those that each pair
    of `further_addends` adds.
    """
    if moves.arrived is not None:
        _set_rows(result, moves.arrived, pool)
    elif moves.zeros:
        result.zero_()
    elif not moves.direct:
        if isinstance(moves.places, slice):
            result.copy_(pool[moves.places])
        else:
            torch.ops.aten.index.Tensor_out(pool, [moves.places], out=result)
        _zero_absent_rows(result, moves)
    if moves.further_addends:
        total = wide(pool[moves.first])
        for source, target in moves.further_addends:
            total.index_add_(0, target, wide(pool[source]))
        result.index_copy_(0, moves.summed_rows, total.to(result.dtype))


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
        """How many rows arrive here from other members, forward and backward (0 where nothing flows back)."""
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
        gradient = ctx.move.back(gradients[0])
        return gradient, gradient.new_zeros(ctx.anchor_shape), None


def _find_moves(exchange: Exchange, channel: Channel, back: bool, groups: Groups | None) -> _Moves:
    """Return the moves of an exchange's rows and, with `back`, those of their gradients; planned at the first call.

    Gradients of a row are the same on the members of each of `groups`, of which one is taken, and are summed over
    groups. None: they are the same on all members, or there is no `back`. The moves that a channel used last are kept.
    """
    key = exchange, back, None if groups is None else tuple(map(tuple, groups))
    with _moves_lock:
        moves = _moves_by_channel.setdefault(channel, OrderedDict()).pop(key, None)
    if moves is None:
        have, need = exchange.blocks
        there = plan_moves(have, need, channel.index, None)
        moves_back = plan_moves(need, have, channel.index, groups) if back else None
        moves = moves_on_device(there, channel.device), moves_back and moves_on_device(moves_back, channel.device)
    with _moves_lock:
        recent = _moves_by_channel.setdefault(channel, OrderedDict())
        recent[key] = moves
        if len(recent) > REMEMBERED:
            recent.popitem(last=False)
    return moves


def exchange_counts(counts: Tensor, channel: Channel) -> list[list[int]]:
    """Return all members' counts (E,), in member order, on each member's host: one gather, and one device wait."""
    parts = channel.all_gather(counts[None].contiguous(), [1] * channel.degree, "token counts of experts").wait()
    return torch.cat(parts).tolist()


def all_to_all_rows(x: Tensor, sends: Sequence[int], receives: Sequence[int], channel: Channel) -> Tensor:
    """Send the first `sends[0]` rows of x to member 0, the next `sends[1]` to member 1, …; return what arrives.

    x (sum of sends, …) to (sum of receives, …): `receives[m]` rows from each member m in turn. Differentiable: a row
    is at one member before and at one after, so its gradient is whole where it is, and travels back as it came.
    Every member enters, forward and backward, with no rows if need be. Raises CommError where counts do not fit.
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
