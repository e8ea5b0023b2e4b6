"""Carry out the moves of rows that `layout/row_moves.py` plans: pack, send, receive, unpack.

What leaves is packed by one indexing kernel and sent in one batch of messages among the members that have something to
send each other. Meanwhile rows that stay are copied to their places in the result; when the others are here, one kernel
copies them to theirs. Only rows that are sums of several take more. Nothing waits for the device, and no sizes are
exchanged.
"""

from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from torch import Tensor

from longspan.comm.groups.channel import Channel, wide
from longspan.comm.shard import to_device
from longspan.layout.row_moves import RowMoves
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
    """Return the indices of DeviceMoves by the names of its fields, without the pairs.

    `arriving` is how many rows arrive. Indices that are not used, as with `direct` those of the pool, are empty.
    """
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
    """Return places in RowMoves' pool as they are; where nothing arrives, x itself is the pool, so its rows instead."""
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

    With `folds`, copies of a row in x are first summed into one. The rows go in one message for each pair of members.
    Several smaller messages, packed and unpacked while others travel, take longer on H200s over NVLink.
    """
    dtype, x = x.dtype, _fold_repeats(x, moves)
    packed, arriving = x[moves.leaves], sum(moves.receives)
    result = x.new_empty((moves.rows, *x.shape[1:]))
    pool = x
    if arriving:
        staying = len(moves.stays) if moves.arrived is None else 0
        pool = result if moves.direct else x.new_empty((arriving + staying, *x.shape[1:]))
    handle = channel.exchange_runs(packed, moves.sends, pool[:arriving], moves.receives, what)
    _copy_staying_rows(x, pool, moves, result)
    handle.wait()
    _unpack_pool(pool, moves, result)
    return result.to(dtype)


def _copy_staying_rows(x: Tensor, pool: Tensor, moves: DeviceMoves, result: Tensor) -> None:
    """With `arrived`, staying rows go directly into the result, and its absent rows are set to zero, before the
    arriving rows are written. A pool that is x itself needs no copy.
    """
    if moves.arrived is not None:
        if len(moves.local):
            torch.ops.aten.index.Tensor_out(x, [moves.local], out=result)
        _zero_absent_rows(result, moves)
    elif sum(moves.receives) and len(moves.stays):
        torch.ops.aten.index.Tensor_out(x, [moves.stays], out=pool[sum(moves.receives) :])


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


def _fold_repeats(x: Tensor, moves: DeviceMoves) -> Tensor:
    """With `widened`, half precision becomes float32 first, in which rows are summed."""
    if moves.widened:
        x = wide(x)
    if moves.folds:
        x = x.clone()
        for source, target in moves.folds:
            x.index_add_(0, target, x[source])
    return x


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
        _write_taken_rows(pool, moves.places, result)
        _zero_absent_rows(result, moves)
    if moves.further_addends:
        total = wide(pool[moves.first])
        for source, target in moves.further_addends:
            total.index_add_(0, target, wide(pool[source]))
        result.index_copy_(0, moves.summed_rows, total.to(result.dtype))


def _write_taken_rows(pool: Tensor, places: Tensor | slice, result: Tensor) -> None:
    if isinstance(places, slice):
        result.copy_(pool[places])
    else:
        torch.ops.aten.index.Tensor_out(pool, [places], out=result)
