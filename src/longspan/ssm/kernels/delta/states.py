"""States of delta rules by the kernels of flash-linear-attention: maps of runs, states of chunks, and backwards.

`rows` are what the kernels read, by their names (1, T, ·, ·): k, w, u and g (one decay a head) or gk (one for each key
number); backwards q, do and dv besides, without u.
"""

import numpy as np
from torch import Tensor

from longspan.layout.segments import Rows
from longspan.ssm.kernels import fla
from longspan.ssm.kernels.delta.maps import Named, maps_of, owed_of
from longspan.ssm.kernels.delta.pieces import Pieces
from longspan.ssm.kernels.fla_calls import indices
from longspan.ssm.kernels.runs import CHUNK, LocalRuns, taken

_MODULE = "ops.common.chunk_delta_h"


class DeltaStates:
    """Forward: maps of pieces, and the states that enter chunks. `transitions`: M of the pieces that have maps."""

    def __init__(self, rows: Named, pieces: Pieces) -> None:
        self._rows, self._pieces = rows, pieces
        some, inside = pieces.with_maps
        self._states, self.transitions = maps_of({name: x[:, inside] for name, x in rows.items()}, some)

    def summaries(self, leaving: Rows, carrying: Rows) -> tuple[Tensor, Tensor]:
        """See `Forward`."""
        either = np.union1d(leaving, carrying)
        states, transitions = self._pieces.maps_of_runs(self._states, self.transitions, either)
        return taken(states, np.searchsorted(either, leaving)), taken(transitions, np.searchsorted(either, carrying))

    def of_chunks(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """From the states that enter runs: those that enter chunks, values that rows add, states that enter pieces."""
        entering = self._pieces.entering(states, self._states, self.transitions)
        return *states_of_chunks(self._rows, entering, self._pieces.runs), entering


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
        scanning, runs = fla.function(_MODULE, "chunk_gated_delta_rule_bwd_dhu"), self._pieces.runs
        where = {"chunk_size": CHUNK, "chunk_offsets": runs.chunk_ends, **indices(runs)}
        dh, _, dv = scanning(**self._rows, h0=states, dht=leaving, scale=self._scale, **where)
        return dh, dv

    def _of_pieces(self) -> Tensor:
        if self._owed is None:
            some, inside = self._pieces.with_maps
            self._owed = owed_of({name: x[:, inside] for name, x in self._rows.items()}, some, self._scale)
        return self._owed
