"""Carry out the moves of rows that `layout/row_moves.py` plans: pack, send, receive, unpack.

What leaves is packed by one indexing kernel and sent in one batch of messages among the members that have something to
send each other; rows that stay are copied meanwhile, and one indexing kernel makes the result. Only rows that are sums
of several take more. Nothing waits for the device, and no sizes are exchanged.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

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
    """RowMoves with their indices on a device, some runs of indices as slices.

    Where nothing arrives, x itself is the pool. Where the pool is empty, the result is `zeros` rows of zeros.
    """

    sends: tuple[int, ...]
    receives: tuple[int, ...]
    leaves: Tensor | slice
    stays: Tensor
    places: Tensor | slice
    absent: Tensor  # rows of the result that nobody has
    several: Tensor
    first: Tensor  # places of the first addends of `several`
    folds: tuple[Pair, ...]
    more: tuple[Pair, ...]
    widened: bool
    zeros: int


def moves_on_device(moves: RowMoves, device: torch.device) -> DeviceMoves:
    """The same moves, ready to be carried out on a device; their indices go there in one copy."""
    arriving, absent = sum(moves.receives), np.flatnonzero(moves.places < 0)
    zeros = len(absent) if arriving + len(moves.stays) == 0 else 0
    places = moves.places[:0] if zeros else np.maximum(moves.places, 0)

    def in_pool(places: Rows) -> Rows:
        return places if arriving else moves.stays[places]

    pairs = [*moves.folds, *((in_pool(source), target) for source, target in moves.more)]
    singles = [moves.leaves, moves.stays, in_pool(places), absent, moves.several, in_pool(moves.places[moves.several])]
    index = _on_device([*singles, *chain.from_iterable(pairs)], device)
    leaves, stays, taken, absent_rows, several, first = index[: len(singles)]
    pairs_there = list(zip(index[len(singles) :: 2], index[len(singles) + 1 :: 2], strict=True))
    whole = not len(places) or (arriving and not len(absent))  # else a run of the result would be a part of x
    return DeviceMoves(
        sends=moves.sends,
        receives=moves.receives,
        leaves=_run(moves.leaves) or leaves,
        stays=stays,
        places=(_run(places) if whole else None) or taken,
        absent=absent_rows,
        several=several,
        first=first,
        folds=tuple(pairs_there[: len(moves.folds)]),
        more=tuple(pairs_there[len(moves.folds) :]),
        widened=moves.widened,
        zeros=zeros,
    )


def _on_device(arrays: Sequence[Rows], device: torch.device) -> list[Tensor]:
    joined = to_device(np.concatenate(arrays), device)
    return list(joined.split([len(array) for array in arrays]))


def _run(rows: Rows) -> slice | None:
    """Rows that follow each other, or none, as a slice."""
    if not len(rows):
        return slice(0, 0)
    run = slice(int(rows[0]), int(rows[0]) + len(rows))
    return run if np.array_equal(rows, np.arange(run.start, run.stop)) else None


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
    result = pool[moves.places]
    if len(moves.absent):
        result.index_fill_(0, moves.absent, 0)
    if moves.more:
        total = wide(pool[moves.first])
        for source, target in moves.more:
            total.index_add_(0, target, wide(pool[source]))
        result.index_copy_(0, moves.several, total.to(result.dtype))
    return result
