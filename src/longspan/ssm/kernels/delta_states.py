"""States of delta rules by the kernels of flash-linear-attention: maps of runs, states of chunks, and backwards.

`rows` are what the kernels read, by their names (1, T, ·, ·): k, w, u and g (one decay a head) or gk (one for each key
number); backwards q, do and dv besides, without u.
"""

import numpy as np
import torch
from torch import Tensor

from longspan.layout.segments import Rows
from longspan.ssm.kernels import fla
from longspan.ssm.kernels.pieces import Pieces
from longspan.ssm.kernels.runs import CHUNK, LocalRuns, taken

_MODULE = "ops.common.chunk_delta_h"
Named = dict[str, Tensor]


class DeltaStates:
    """Forward: maps [B | M] of pieces, and the states that enter chunks."""

    def __init__(self, rows: Named, pieces: Pieces) -> None:
        self._rows, self._pieces = rows, pieces
        self._width = rows["u"].shape[-1]
        self.maps: Tensor | None = None
        if pieces.stop:
            self.maps = maps_of(rows, pieces)

    @property
    def transitions(self) -> Tensor:
        """M of the pieces that have maps."""
        return self._rows["u"].new_zeros(0) if self.maps is None else self.maps[..., self._width :].contiguous()

    def summaries(self, leaving: Rows, carrying: Rows) -> tuple[Tensor, Tensor]:
        """See `Forward`."""
        if self.maps is None:
            heads, size = self._rows["w"].shape[2:]
            none = self._rows["w"].new_zeros((0, heads, size, self._width + size), dtype=torch.float32)
            return none[..., : self._width], none[..., self._width :]
        either = np.union1d(leaving, carrying)
        maps = self._pieces.maps_of_runs(self.maps, either, self._width)
        states, transitions = (taken(maps, np.searchsorted(either, runs)) for runs in (leaving, carrying))
        return states[..., : self._width], transitions[..., self._width :]

    def of_chunks(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From the states that enter runs: those that enter chunks, values that rows add, states that enter pieces."""
        entering = self._pieces.entering(states, self.maps)
        return *states_of_chunks(self._rows, entering, self._pieces.runs), entering


def maps_of(rows: Named, pieces: Pieces) -> Tensor:
    """[B | M] (n, H, K, V + K) float32 of the pieces from `first` to `stop`: final states of [u | 0] from [0 | I]."""
    some, inside = pieces.with_maps
    here = {name: x[:, inside] for name, x in rows.items()}
    u, (heads, size) = here.pop("u"), rows["w"].shape[2:]
    width = u.shape[-1]
    wide = u.new_empty((*u.shape[:3], width + size))
    wide[..., :width].copy_(u)
    wide[..., width:].zero_()
    start = u.new_zeros((len(some.lengths), heads, size, width + size), dtype=torch.float32)
    start[..., width:].diagonal(dim1=-2, dim2=-1).fill_(1.0)
    _, _, final = fla.function(_MODULE, "chunk_gated_delta_rule_fwd_h")(
        **here,
        u=wide,
        initial_state=start,
        output_final_state=True,
        save_new_value=False,
        chunk_size=CHUNK,
        chunk_offsets=some.chunk_ends,
        **indices(some),
    )
    return final


def states_of_chunks(rows: Named, states: Tensor, runs: LocalRuns) -> tuple[Tensor, Tensor]:
    """The state that enters each chunk, and the values that its rows add to it."""
    scanning = fla.function(_MODULE, "chunk_gated_delta_rule_fwd_h")
    h, new, _ = scanning(**rows, initial_state=states, chunk_size=CHUNK, chunk_offsets=runs.chunk_ends, **indices(runs))
    return h, new


class DeltaGradients:
    """Backward: what outputs owe to the states that enter pieces, and gradients at the states of chunks."""

    def __init__(self, rows: Named, pieces: Pieces, transitions: Tensor, scale: float) -> None:
        self._rows, self._pieces, self._transitions, self._scale = rows, pieces, transitions, scale
        self._owed: Tensor | None = None

    def owed(self, runs: Rows) -> Tensor:
        """See `Backward`."""
        return self._pieces.owed_by_runs(self._of_pieces(), self._transitions, runs)

    def leaving(self, leaving: Tensor) -> Tensor:
        """The gradient at each piece's final state."""
        owed = self._of_pieces() if self._pieces.cut else None
        return self._pieces.leaving(leaving, owed, self._transitions)

    def of_chunks(self, states: Tensor, leaving: Tensor) -> tuple[Tensor, Tensor]:
        """Gradients at the states that leave chunks, and at the values that rows add, from those of pieces."""
        dh, _, dv = self._scanned(self._rows, states, leaving, self._pieces.runs)
        return dh, dv

    def _of_pieces(self) -> Tensor:
        if self._owed is None:
            some, inside = self._pieces.with_maps
            here = {name: x[:, inside] for name, x in self._rows.items()}
            (heads, size), width = self._rows["w"].shape[2:], self._rows["dv"].shape[-1]
            zero = self._transitions.new_zeros((len(some.lengths), heads, size, width))
            self._owed = self._scanned(here, zero, None, some)[1]
        return self._owed

    def _scanned(self, rows: Named, states: Tensor, leaving: Tensor | None, runs: LocalRuns) -> tuple[Tensor, ...]:
        scanning = fla.function(_MODULE, "chunk_gated_delta_rule_bwd_dhu")
        shared = {"chunk_size": CHUNK, "chunk_offsets": runs.chunk_ends, **indices(runs)}
        return scanning(**rows, h0=states, dht=leaving, scale=self._scale, **shared)


def cumulative(g: Tensor, runs: LocalRuns, *, reverse: bool = False) -> Tensor:
    """(1, T, H, …) of (T, H, …): sums inside chunks, in base 2; `reverse`: gradients of such sums."""
    sums = fla.function("ops.utils", "chunk_local_cumsum")
    base = {"reverse": True} if reverse else {"scale": fla.function("ops.utils.constant", "RCP_LN2")}
    return sums(g.unsqueeze(0).contiguous(), chunk_size=CHUNK, **base, **indices(runs))


def indices(runs: LocalRuns) -> Named:
    """Where runs and their chunks lie, as the kernels' arguments."""
    return {"cu_seqlens": runs.ends, "chunk_indices": runs.chunk_indices}
