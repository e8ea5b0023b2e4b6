"""States of delta rules by the kernels of flash-linear-attention: maps of runs, states of chunks, and backwards.

`rows` are what the kernels read, by their names (1, T, ·, ·): k, w, u and g (one decay a head) or gk (one for each key
number); backwards also q, do and dv, but not u. With S the state that enters a chunk, its rows add k (u − w S) to it.
"""

from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longspan.layout.segments import Integers
from longspan.ssm.kernels.packages import fla_function, run_indices
from longspan.ssm.kernels.pieces import Pieces
from longspan.ssm.kernels.runs import CHUNK, LocalRuns, pick_rows

NamedRows = dict[str, Tensor]
_COLUMNS = 64  # columns of a state that one program computes
_NARROW = 128  # key numbers up to which a program of four warps keeps a state in registers


def run_maps(rows: NamedRows, runs: LocalRuns) -> tuple[Tensor, Tensor]:
    """Compute B (R, H, K, V) and M (R, H, K, K) of each run, where S_out = M S_in + B, in float32."""
    heads, size, width, count = *rows["w"].shape[2:], rows["u"].shape[-1], len(runs.lengths)
    states, transitions = (_new_state(rows, count, heads, size, n) for n in (width, size))
    blocks = -(-width // _COLUMNS) + -(-size // _COLUMNS)
    arguments = [rows["k"], rows["w"], rows["u"], _decay_rows(rows), states, transitions, runs.ends]
    if count:  # without runs, as on a single rank, no kernel is compiled
        _state_kernel("maps_kernel")[blocks, heads, count](*arguments, **_kernel_sizes(rows, width, runs.chunk))
    return states, transitions


def compute_entry_gradients(rows: NamedRows, runs: LocalRuns, scale: float) -> Tensor:
    """Compute gradients (R, H, K, V), float32, of the outputs by the states that enter runs, at least one."""
    heads, size, width, count = *rows["w"].shape[2:], rows["dv"].shape[-1], len(runs.lengths)
    entry_gradients = _new_state(rows, count, heads, size, width)
    arguments = [rows[name] for name in ("q", "k", "w")] + [
        _decay_rows(rows),
        rows["do"],
        rows["dv"],
        entry_gradients,
        runs.ends,
        scale,
    ]
    shared = {"Q_SHARED": heads // rows["q"].shape[2], **_kernel_sizes(rows, width, runs.chunk)}
    _state_kernel("entry_gradients_kernel")[-(-width // _COLUMNS), heads, count](*arguments, **shared)
    return entry_gradients


def _kernel_sizes(rows: NamedRows, width: int, chunk: int) -> dict[str, Any]:
    """Return the kernel's compile-time sizes, and its warps and stages: fewer warps and more stages for narrow keys.

    KEYS is a power of two, as Triton's blocks are, and 16 at least, as its products need.
    """
    heads, size = rows["w"].shape[2:]
    keys = max(16, 1 << (size - 1).bit_length())
    sizes = {"HEADS": heads, "SHARED": heads // rows["k"].shape[2], "SIZE": size, "WIDTH": width, "CHUNK": chunk}
    blocks = {"KEYS": keys, "COLUMNS": _COLUMNS, "BY_CHANNEL": "gk" in rows}
    narrow = keys <= _NARROW
    return {**sizes, **blocks, "num_warps": 4 if narrow else 8, "num_stages": 3 if narrow else 1}


def _decay_rows(rows: NamedRows) -> Tensor:
    """Return the log-decays, of one number a head or of one for each key number."""
    return rows["gk"] if "gk" in rows else rows["g"]


def _new_state(rows: NamedRows, *shape: int) -> Tensor:
    """Return an empty float32 tensor of this shape on the rows' device."""
    return rows["w"].new_empty(shape, dtype=torch.float32)


@cache
def _state_kernel(name: str) -> Any:
    """Return the Triton kernel of this name; imported on first use, for Triton may not be installed."""
    from longspan.ssm.kernels import state_kernels

    return getattr(state_kernels, name)


_MODULE = "ops.common.chunk_delta_h"


class DeltaStates:
    """Forward: maps of pieces, and the states that enter chunks. `transitions`: M of the pieces that have maps."""

    def __init__(self, rows: NamedRows, pieces: Pieces) -> None:
        """Compute the map of each piece of a run that shares its document with others."""
        self._rows, self._pieces = rows, pieces
        map_runs, map_rows = pieces.pieces_with_maps
        self.transitions: Tensor
        self._states, self.transitions = run_maps({name: x[:, map_rows] for name, x in rows.items()}, map_runs)

    def summaries(self, leaving: Integers, carrying: Integers) -> tuple[Tensor, Tensor]:
        """Return what runs `leaving` add to the state, and M of runs `carrying`, as `Forward.summaries`."""
        summed_runs = np.union1d(leaving, carrying)
        states, transitions = self._pieces.compose_run_maps(self._states, self.transitions, summed_runs)
        leaving_at, carrying_at = (np.searchsorted(summed_runs, runs) for runs in (leaving, carrying))
        return pick_rows(states, leaving_at), pick_rows(transitions, carrying_at)

    def chunk_states(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute, from the states that enter runs, those that enter chunks, the values that rows add, and the states
        that enter pieces.
        """
        entering = self._pieces.entering_states(states, self._states, self.transitions)
        return *compute_chunk_states(self._rows, entering, self._pieces.runs), entering


def compute_chunk_states(rows: NamedRows, states: Tensor, runs: LocalRuns) -> tuple[Tensor, Tensor]:
    """Compute the state that enters each chunk, and the values that its rows add to it."""
    scan_states = fla_function(_MODULE, "chunk_gated_delta_rule_fwd_h")
    h, new_values, _ = scan_states(
        **rows, initial_state=states, chunk_size=CHUNK, chunk_offsets=runs.chunk_ends, **run_indices(runs)
    )
    return h, new_values


class DeltaGradients:
    """Backward: gradients of the outputs by the states that enter pieces, and gradients at the states of chunks."""

    def __init__(self, rows: NamedRows, pieces: Pieces, transitions: Tensor, scale: float) -> None:
        """Take what the kernels read; gradients by entering states are computed when they are first asked for."""
        self._rows, self._pieces, self._transitions, self._scale = rows, pieces, transitions, scale
        self._entry_gradients: Tensor | None = None

    def entry_gradients(self, runs: Integers) -> Tensor:
        """Return gradients of the outputs by the states that enter these runs."""
        return self._pieces.run_entry_gradients(self._map_gradients(), self._transitions, runs)

    def leaving_gradients(self, leaving: Tensor) -> Tensor:
        """Return the gradient at each piece's final state, from those (R, H, K, V) at final states of runs.

        Without cut runs pieces are runs, and the maps of pieces are not needed.
        """
        entry_gradients = self._map_gradients() if self._pieces.has_cuts else None
        return self._pieces.leaving_gradients(leaving, entry_gradients, self._transitions)

    def chunk_gradients(self, states: Tensor, leaving: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients at the states that leave chunks, and at the values that rows add.

        `states` are those that enter pieces, `leaving` the gradients at their final states.
        """
        scan_gradients, runs = fla_function(_MODULE, "chunk_gated_delta_rule_bwd_dhu"), self._pieces.runs
        chunk_arguments = {"chunk_size": CHUNK, "chunk_offsets": runs.chunk_ends, **run_indices(runs)}
        dh, _, dv = scan_gradients(**self._rows, h0=states, dht=leaving, scale=self._scale, **chunk_arguments)
        return dh, dv

    def _map_gradients(self) -> Tensor:
        """Return the gradients of the outputs by the states that enter pieces with maps; computed once."""
        if self._entry_gradients is None:
            map_runs, map_rows = self._pieces.pieces_with_maps
            self._entry_gradients = compute_entry_gradients(
                {name: x[:, map_rows] for name, x in self._rows.items()}, map_runs, self._scale
            )
        return self._entry_gradients
