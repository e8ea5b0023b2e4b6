"""Carry out the moves of rows that `layout/row_moves.py` plans: pack, send, receive, unpack.

What leaves is packed by one indexing kernel and sent in one batch of messages among the members that have something to
send each other; rows that stay are copied meanwhile, and one indexing kernel makes the result. Only rows that are sums
of several take more. Nothing waits for the device, and no sizes are exchanged.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from longspan.comm.groups.channel import Channel, wide
from longspan.comm.host_arrays import to_device
from longspan.layout.row_moves import RowMoves
from longspan.layout.segments import Rows

Pair = tuple[Tensor, Tensor]


@dataclass(frozen=True, eq=False)
class DeviceMoves:
    """RowMoves with their indices on a device.

    Where nothing arrives, x itself is the pool. `places` is None where the result is the pool as it is. Of a result
    that is `zeros` rows, nothing else is known.
    """

    folds: tuple[Pair, ...]
    leaves: Tensor | slice
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    stays: Tensor
    places: Tensor | None
    absent: Tensor  # rows of the result that nobody has
    several: Tensor
    first: Tensor  # places of the first addends of `several`
    more: tuple[Pair, ...]
    widened: bool
    zeros: int


def moves_on_device(moves: RowMoves, device: torch.device) -> DeviceMoves:
    """The same moves, ready to be carried out on a device."""
    arriving = sum(moves.receives)

    def index(rows: Rows) -> Tensor:
        return to_device(np.array(rows, dtype=np.int64), device)

    def in_pool(places: Rows) -> Tensor:
        return index(places if arriving else moves.stays[places])

    pool_rows, absent = arriving + len(moves.stays), np.flatnonzero(moves.places < 0)
    whole = arriving and not len(absent) and np.array_equal(moves.places, np.arange(pool_rows))
    places = np.maximum(moves.places, 0) if pool_rows else moves.places[:0]
    return DeviceMoves(
        folds=tuple((index(source), index(target)) for source, target in moves.folds),
        leaves=_run(moves.leaves) or index(moves.leaves),
        sends=moves.sends,
        receives=moves.receives,
        stays=index(moves.stays),
        places=None if whole else in_pool(places),
        absent=index(absent),
        several=index(moves.several),
        first=in_pool(moves.places[moves.several]),
        more=tuple((in_pool(source), index(target)) for source, target in moves.more),
        widened=moves.widened,
        zeros=0 if pool_rows else len(absent),
    )


def _run(rows: Rows) -> slice | None:
    """Rows that follow each other as a slice."""
    if len(rows) and np.array_equal(rows, np.arange(rows[0], rows[0] + len(rows))):
        return slice(int(rows[0]), int(rows[-1]) + 1)
    return None


def carry(x: Tensor, moves: DeviceMoves, channel: Channel, what: str) -> Tensor:
    """This member's rows of the target from x, its rows of the source; entered by all members that send or receive."""
    dtype, x = x.dtype, _folded(x, moves)
    packed, pool, arriving = x[moves.leaves], x, sum(moves.receives)
    if arriving:
        pool = x.new_empty((arriving + len(moves.stays), *x.shape[1:]))
    sends = list(enumerate(packed.split(moves.sends)))
    receives = list(enumerate(pool[:arriving].split(moves.receives)))
    handle = channel.exchange(sends, receives, what)
    if arriving and len(moves.stays):
        torch.ops.aten.index.Tensor_out(x, [moves.stays], out=pool[arriving:])
    handle.wait()
    return _unpacked(pool, moves).to(dtype)


def _folded(x: Tensor, moves: DeviceMoves) -> Tensor:
    """x with the gradients of a row's second, third, … use here added to that of its first."""
    if moves.widened:
        x = wide(x)
    if moves.folds:
        x = x.clone()
        for source, target in moves.folds:
            x.index_add_(0, target, x[source])
    return x


def _unpacked(pool: Tensor, moves: DeviceMoves) -> Tensor:
    """The result from rows that arrived and rows that stayed."""
    if moves.zeros:
        return pool.new_zeros((moves.zeros, *pool.shape[1:]))
    if moves.places is None:
        return pool
    result = pool[moves.places]
    if len(moves.absent):
        result.index_fill_(0, moves.absent, 0)
    if moves.more:
        total = wide(pool[moves.first])
        for source, target in moves.more:
            total.index_add_(0, target, wide(pool[source]))
        result.index_copy_(0, moves.several, total.to(result.dtype))
    return result
