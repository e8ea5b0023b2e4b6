"""Every row of an encoder straight to the rank that needs it, and its whole gradient straight back.

Row ids identify these rows, never their order. Who sends what is an Exchange, computed on the host; no sizes are
exchanged. The way back is planned on its own: a row that several ranks need has several gradients, and a row that
several ranks have must reach them all.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import chain
from typing import Any, Literal, get_args

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.comm.channel import Channel, widen_half_precision
from longspan.comm.device import to_device
from longspan.comm.world import World
from longspan.errors import CommError, LayoutError
from longspan.layout import Exchange, Partition
from longspan.layout.exchange import Groups, RowMoves, plan_moves
from longspan.layout.segments import Integers

IndexPair = tuple[Tensor, Tensor]  # source and target rows


@dataclass(frozen=True, eq=False)
class DeviceMoves:
    """RowMoves with their indices on a device; fields mean what they mean in `longspan.layout.exchange.RowMoves`.

    What arrives takes the rows `arrivals` of a buffer, in one piece; rows `stays` of x lie around it. Where `places` is
    None the buffer is y. Else it is the pool, which ends with a row of zeros, to which `places` lead where nobody has
    the row.
    """

    sends: tuple[int, ...]
    receives: tuple[int, ...]
    leaves: Tensor | slice
    stays: Tensor
    arrivals: slice
    places: Tensor | None
    summed_rows: Tensor
    folds: tuple[IndexPair, ...]
    further_addends: tuple[IndexPair, ...]
    widened: bool


def copy_moves_to_device(moves: RowMoves, device: torch.device) -> DeviceMoves:
    """Return the moves with their indices on a device, where all of them go in one copy."""
    arriving = sum(moves.receives)
    stays = moves.stays
    # The pool's last row is zero.
    pool_places = np.where(moves.places < 0, arriving + len(stays), moves.places)
    arrivals = _find_arrivals_in_target(moves)
    if arrivals is not None:
        stays = stays[np.delete(moves.places, arrivals) - arriving]
        pool_places = pool_places[:0]
    arrays = [moves.leaves, stays, pool_places, moves.summed_rows]
    arrays += chain.from_iterable([*moves.folds, *moves.further_addends])
    leaves, stays, places, summed_rows, *pair_indices = to_device(np.concatenate(arrays), device).split(
        [len(array) for array in arrays]
    )
    pairs = tuple(zip(pair_indices[::2], pair_indices[1::2], strict=True))  # source and target of each
    return DeviceMoves(
        moves.sends,
        moves.receives,
        leaves=leaves if (run := _as_run(moves.leaves)) is None else run,
        stays=stays,
        arrivals=slice(0, arriving) if arrivals is None else arrivals,
        places=places if arrivals is None else None,
        summed_rows=summed_rows,
        folds=pairs[: len(moves.folds)],
        further_addends=pairs[len(moves.folds) :],
        widened=moves.widened,
    )


def _find_arrivals_in_target(moves: RowMoves) -> slice | None:
    """The rows of y that are what arrives, in its order; None where these are not one run, where y has sums, or rows
    that nobody has."""
    arriving = sum(moves.receives)
    if len(moves.summed_rows) or (moves.places < 0).any():
        return None
    run = _as_run(np.flatnonzero(moves.places < arriving))
    if run is None or not np.array_equal(moves.places[run], np.arange(arriving)):
        return None
    return run


def _as_run(rows: Integers) -> slice | None:
    start = int(rows[0]) if len(rows) else 0
    return slice(start, start + len(rows)) if np.array_equal(rows, np.arange(start, start + len(rows))) else None


def carry_rows(x: Tensor, moves: DeviceMoves, channel: Channel, what: str) -> Tensor:
    """Return this member's rows of the target, from x (rows of the source here, …), which is not changed; entered by
    all that send or receive.

    What leaves is one message for each pair of members, packed by one indexing kernel unless it lies in one piece.
    Rows that stay are copied meanwhile. Where what arrives is one run of the target it is received there, and rows that
    stay go straight there; else one more kernel puts both in order. Several smaller messages, packed and unpacked
    while others travel, take longer on H200s over NVLink. Nothing waits for the device. `what` names the exchange in
    errors.
    """
    dtype = x.dtype
    if moves.widened:
        x = widen_half_precision(x)
    if moves.folds:
        x = x.clone()
        for source, target in moves.folds:
            x.index_add_(0, target, x[source])
    start, stop = moves.arrivals.start, moves.arrivals.stop
    end = len(moves.stays) + stop - start
    buffer = x.new_empty((end if moves.places is None else end + 1, *x.shape[1:]))
    handle = channel.exchange_runs(x[moves.leaves], moves.sends, buffer[start:stop], moves.receives, what)
    for part, stays in ((buffer[:start], moves.stays[:start]), (buffer[stop:end], moves.stays[start:])):
        if len(stays):
            torch.ops.aten.index.Tensor_out(x, [stays], out=part)
    if moves.places is None:
        handle.wait()
        return buffer.to(dtype)
    buffer[-1:].zero_()
    handle.wait()
    rows = buffer[moves.places]
    if moves.further_addends:
        total = widen_half_precision(rows[moves.summed_rows])
        for source, target in moves.further_addends:
            total.index_add_(0, target, widen_half_precision(buffer[source]))
        rows.index_copy_(0, moves.summed_rows, total.to(rows.dtype))
    return rows.to(dtype)


RowGradient = Literal["partial", "partial_over_slots", "identical", "none"]


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
        """Plan both ways for this member, on the host. `slots` are lists of members, for partial_over_slots alone."""
        if gradient not in get_args(RowGradient):
            raise CommError(f"gradient {gradient!r} is not known; use one of {', '.join(get_args(RowGradient))}")
        if exchange.have.degree != channel.degree:
            raise LayoutError(
                f"the exchange is among {exchange.have.degree} ranks, the channel has {channel.degree}; give one list "
                f"of rows, which may be empty, for each rank"
            )
        self.exchange: Exchange = exchange
        self.channel: Channel = channel
        self._rows = exchange.have.counts[channel.index]
        groups: dict[str, Groups | None] = {
            "partial": [[member] for member in range(channel.degree)],
            "partial_over_slots": [tuple(members) for members in slots],
            "identical": None,
        }
        self._moves_there = copy_moves_to_device(exchange.moves(channel.index), channel.device)
        self._moves_back: DeviceMoves | None = None
        if gradient != "none":
            have, need = exchange.blocks
            moves_back = plan_moves(need, have, channel.index, groups[gradient])
            self._moves_back = copy_moves_to_device(moves_back, channel.device)

    def __call__(self, x: Tensor) -> Tensor:
        """Bring this rank's rows of `have`, in order, to its rows of `need`.

        Raises LayoutError for other numbers of rows.
        """
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
        """How many rows arrive at this rank from others, forward and backward (0 where nothing flows back)."""
        back = () if self._moves_back is None else self._moves_back.receives
        return sum(self._moves_there.receives), sum(back)

    def carry_back(self, gradient: Tensor) -> Tensor:
        """Bring the gradient of this rank's rows of `need` back to its rows of `have`; entered by all ranks.

        For a caller who runs backward passes himself, after a call under `torch.no_grad()`.
        """
        assert self._moves_back is not None
        return carry_rows(gradient.detach(), self._moves_back, self.channel, "row gradients")


class _ExchangeRows(torch.autograd.Function):
    """A RowExchange as a node of autograd; `anchor`, empty, requires a gradient where the rows do not."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, anchor: Tensor, move: RowExchange) -> Tensor:
        ctx.move = move
        ctx.anchor_shape = anchor.shape
        return carry_rows(x.detach(), move._moves_there, move.channel, "row exchange")

    @staticmethod
    @once_differentiable
    def backward(  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx: Any, *gradients: Tensor
    ) -> tuple[Tensor, Tensor, None]:
        """Bring the rows' gradients back; the anchor's is empty."""
        gradient = ctx.move.carry_back(gradients[0])
        return gradient, gradient.new_zeros(ctx.anchor_shape), None


_planned_exchange = lru_cache(maxsize=32)(Exchange)  # planned once for a layout that comes again


class Bridge(RowExchange):
    """Moves rows from the ranks that have them to the ranks that need them, differentiably.

    >>> have = Partition.from_rows([[0, 1], [2], []])          # per rank of the home, row ids in order
    >>> need = Partition.from_rows([[2], [2, 0], [1]])
    >>> bridge = Bridge(have, need, world, gradient="partial")
    >>> y_local = bridge(x_local)                              # (rows here of have, …) -> (rows here of need, …)

    Layouts may differ in any way: rows may be split, replicated or reordered on either side, and ranks may have or need
    none. `gradient` is what the copies of a row on the need side carry: *partial*, each rank the gradient of its own
    use, to be summed; *identical*, all the same one, of which one is taken (replicas of one computation);
    *partial_over_slots*, the same one on the tensor-parallel ranks of a slot of the world's home, of which one is
    taken, and those of different slots are summed; *none*, no gradient flows back (a frozen encoder). In backward
    every rank that has a row gets its whole gradient, and zeros for rows that nobody needs. A rank receives no row
    twice and none that it has.

    Entered by all ranks, forward and backward, with zero rows where a rank has or needs none; a rank that neither sends
    nor receives sends no message. Autograd enters backward only where `y_local` takes part in the loss: splice it by
    `index_copy`, with which zero rows take part too. Making a bridge plans on the host, once for a layout that
    comes again, and in a home of several planes makes the group of all ranks once. Raises LayoutError for rows that
    nobody has, for partitions that do not have one list for each rank of the home, and where tensor-parallel ranks of a
    slot that carry the same gradient need a row differently often.
    """

    def __init__(self, have: Partition, need: Partition, world: World, gradient: RowGradient = "partial") -> None:
        """Plan the exchange among all ranks of the world; see the class."""
        everyone = world.channels.everyone
        slots = [[everyone.ranks.index(rank) for rank in ranks] for ranks in world.home.tp_groups()]
        super().__init__(_planned_exchange(have, need), everyone, gradient=gradient, slots=slots)
