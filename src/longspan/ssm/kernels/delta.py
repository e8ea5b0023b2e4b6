"""Gated delta rules, by the kernels of flash-linear-attention; long runs are cut into pieces.

A scan goes through a run's chunks one after another, a head a program or two. Pieces of a run are scanned side by side
where heads are too few to fill a GPU; they are to the run what the runs of a document are to the document
(`state_pass.py`): each is an affine map [B | M], and folding these in order gives the run's own map.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from longspan.layout.segments import Integers
from longspan.ssm.kernels.fla import (
    add_batch_dim,
    chunk_arguments,
    chunk_cumsum,
    fla_function,
    gradients_like_inputs,
    run_index_arguments,
    triton_kernel,
)
from longspan.ssm.kernels.interface import Inputs, SavedScan, map_states
from longspan.ssm.kernels.local_runs import CHUNK, LocalRuns, pick_rows, put_rows

_AT_ONCE = 64  # pieces times heads that fill a GPU
_SHORTEST = 8 * CHUNK  # rows of a piece at least


class Pieces:
    """Pieces of the runs that share a document with others, as many as fill a GPU; other runs are one piece each.

    `runs` are the pieces as runs. Only the pieces from `first` to before `stop`, which include all of shared runs, have
    maps, which are numbered from `first` on: map i is of piece `first` + i.
    """

    def __init__(self, runs: LocalRuns, heads: int) -> None:
        most_pieces = -(-_AT_ONCE // heads)
        sizes = list[list[int]]()
        for rows, is_shared in zip(runs.lengths.tolist(), runs.shared, strict=True):
            # nearly equal, whole chunks but for the last, and so few that none is much shorter than _SHORTEST
            count = max(1, min(most_pieces, rows // _SHORTEST)) if is_shared else 1
            chunks = -(-rows // CHUNK)
            ends = [min(rows, CHUNK * (chunks * (i + 1) // count)) for i in range(count)]
            sizes.append(np.diff([0, *ends]).tolist())
        counts = np.array([len(cut) for cut in sizes])
        self.runs: LocalRuns = LocalRuns(np.array([n for cut in sizes for n in cut], dtype=np.int64), runs.device)
        self._starts = np.cumsum(counts) - counts
        self._counts = counts
        shared_runs = np.flatnonzero(runs.shared)
        self.first: int = int(self._starts[shared_runs[0]]) if len(shared_runs) else 0
        self.stop: int = int((self._starts + counts)[shared_runs[-1]]) if len(shared_runs) else 0

    @cached_property
    def pieces_with_maps(self) -> tuple[LocalRuns, slice]:
        """The pieces from `first` to before `stop` as runs of their own, and which of all rows are theirs."""
        lengths = self.runs.lengths
        begin = int(self.runs.lengths[: self.first].sum())
        runs = LocalRuns(lengths[self.first : self.stop], self.runs.device)
        return runs, slice(begin, begin + runs.rows)

    @property
    def has_cuts(self) -> bool:
        return bool((self._counts > 1).any())

    def compose_run_maps(self, states: Tensor, transitions: Tensor, runs: Integers) -> tuple[Tensor, Tensor]:
        """Return B (n, H, K, V) and M (n, H, K, K) of some shared runs, composed from `states` and `transitions`, the B
        and M of the pieces that have maps.

        The map of a run is that of its pieces one after another: B ← M_p B + B_p, M ← M_p M. Runs without a further
        piece stay as they are; if none has, B and M may be views of those of pieces.
        """
        first_pieces = self._starts[runs] - self.first
        b, m = pick_rows(states, first_pieces), pick_rows(transitions, first_pieces)
        for place in range(1, int(self._counts[runs].max(initial=1))):
            continuing = np.flatnonzero(self._counts[runs] > place)
            maps = first_pieces[continuing] + place
            next_transitions = pick_rows(transitions, maps)
            b = _replace_rows(
                b, continuing, map_states(next_transitions, pick_rows(b, continuing), pick_rows(states, maps))
            )
            m = _replace_rows(m, continuing, next_transitions @ pick_rows(m, continuing))
        return b, m

    def entering_states(self, entering_runs: Tensor, b: Tensor, m: Tensor) -> Tensor:
        """Return the state that enters each piece, from those (R, H, K, V) that enter runs, and B and M of pieces.

        Each further piece of a run gets what the map of the piece before it makes of the state that enters that piece.
        """
        if not self.has_cuts:
            return entering_runs
        return self._follow_pieces(entering_runs, self._starts, b, m, step=1)

    def run_initial_state_gradients(self, initial: Tensor, transitions: Tensor, runs: Integers) -> Tensor:
        """Return gradients (n, H, K, V) at the states that enter some shared runs, from those at states of pieces.

        Pieces are followed backwards: the gradient at the state that enters a piece is that of the piece's outputs,
        plus the gradient at its final state through its transposed M.
        """
        last_pieces = self._starts[runs] + self._counts[runs] - 1
        gradients = pick_rows(initial, last_pieces - self.first)
        for place in range(1, int(self._counts[runs].max(initial=1))):
            continuing = np.flatnonzero(self._counts[runs] > place)
            maps = last_pieces[continuing] - place - self.first
            gradient_before = map_states(
                pick_rows(transitions, maps).mT, pick_rows(gradients, continuing), pick_rows(initial, maps)
            )
            gradients = _replace_rows(gradients, continuing, gradient_before)
        return gradients

    def leaving_gradients(self, leaving: Tensor, initial: Tensor, transitions: Tensor) -> Tensor:
        """Return the gradient at each piece's final state, from those (R, H, K, V) at the final states of runs.

        Each piece but a run's last gets the gradient at the state that enters the next piece.
        """
        return self._follow_pieces(leaving, self._starts + self._counts - 1, initial, transitions, step=-1)

    def _follow_pieces(
        self, run_values: Tensor, start_pieces: Integers, added: Tensor, transitions: Tensor, *, step: int
    ) -> Tensor:
        """With `step` 1 the map is M S + B, for states from a run's first piece on; with −1 it is Mᵀ G + B, for
        gradients from its last piece back. `added` are the B, and M the `transitions`, of the pieces that have maps."""
        piece_values = run_values.new_empty((len(self.runs.lengths), *run_values.shape[1:]))
        put_rows(piece_values, start_pieces, run_values)
        for place in range(1, int(self._counts.max())):
            pieces = start_pieces[self._counts > place] + step * (place - 1)
            maps = pieces - self.first
            through = pick_rows(transitions, maps)
            through = through if step > 0 else through.mT
            put_rows(
                piece_values,
                pieces + step,
                map_states(through, pick_rows(piece_values, pieces), pick_rows(added, maps)),
            )
        return piece_values


def _replace_rows(x: Tensor, rows: Integers, values: Tensor) -> Tensor:
    """x may be a view of something else, so it is copied."""
    if len(rows) == len(x):
        return values
    x = x.clone()
    put_rows(x, rows, values)
    return x


def cut_into_pieces(runs: LocalRuns, heads: int) -> Pieces:
    """Return the pieces of these runs for so many heads, made once and kept in `runs.pieces` for all layers."""
    if heads not in runs.pieces:
        runs.pieces[heads] = Pieces(runs, heads)
    return runs.pieces[heads]


NamedRows = dict[str, Tensor]  # tensors (1, T, ·, ·) by the names that fla's kernels give them
_COLUMNS = 64  # columns of a state that one program computes
_NARROW = 128  # key numbers up to which a program of four warps keeps a state in registers


def compute_run_maps(rows: NamedRows, runs: LocalRuns) -> tuple[Tensor, Tensor]:
    """Compute B (R, H, K, V) and M (R, H, K, K) of each run, where S_out = M S_in + B, in float32."""
    heads, size = rows["w"].shape[2:]
    width = rows["u"].shape[-1]
    count = len(runs.lengths)
    states, transitions = (_new_state(rows, count, heads, size, columns) for columns in (width, size))
    blocks = -(-width // _COLUMNS) + -(-size // _COLUMNS)
    arguments = [rows["k"], rows["w"], rows["u"], _decay_rows(rows), states, transitions, runs.ends]
    # A single rank has no such runs, and compiles no kernel for them.
    if count:
        triton_kernel("maps_kernel")[blocks, heads, count](*arguments, **_kernel_sizes(rows, width))
    return states, transitions


def _kernel_sizes(rows: NamedRows, width: int) -> dict[str, Any]:
    """KEYS is a power of two, as Triton's blocks are, and 16 at least, as its products need."""
    heads, size = rows["w"].shape[2:]
    keys = max(16, 1 << (size - 1).bit_length())
    sizes = {"HEADS": heads, "SHARED": heads // rows["k"].shape[2], "SIZE": size, "WIDTH": width, "CHUNK": CHUNK}
    blocks = {"KEYS": keys, "COLUMNS": _COLUMNS, "BY_CHANNEL": "gk" in rows}
    narrow = keys <= _NARROW
    return {**sizes, **blocks, "num_warps": 4 if narrow else 8, "num_stages": 3 if narrow else 1}


def _decay_rows(rows: NamedRows) -> Tensor:
    """By key number (Kimi), or one a head."""
    return rows["gk"] if "gk" in rows else rows["g"]


def _new_state(rows: NamedRows, *shape: int) -> Tensor:
    return rows["w"].new_empty(shape, dtype=torch.float32)


_MODULE = "ops.common.chunk_delta_h"


class DeltaStates:
    """States in the forward pass of a delta rule: maps of pieces at once, the states that enter chunks when asked.

    `transitions` are M of the pieces that have maps. `rows` are what fla's kernels take, by their names: k, w and u of
    the chunks' products, and the decays g or gk.
    """

    def __init__(self, rows: NamedRows, pieces: Pieces) -> None:
        self._rows = rows
        self._pieces = pieces
        map_runs, map_rows = pieces.pieces_with_maps
        self.transitions: Tensor
        self._states, self.transitions = compute_run_maps(
            {name: x[:, map_rows] for name, x in rows.items()}, map_runs
        )

    def summaries(self, leaving: Integers, carrying: Integers) -> tuple[Tensor, Tensor]:
        """Return B of the runs `leaving` and M of the runs `carrying`, composed from the maps of their pieces."""
        summed_runs = np.union1d(leaving, carrying)
        states, transitions = self._pieces.compose_run_maps(self._states, self.transitions, summed_runs)
        leaving_at, carrying_at = (np.searchsorted(summed_runs, runs) for runs in (leaving, carrying))
        return pick_rows(states, leaving_at), pick_rows(transitions, carrying_at)

    def chunk_states(self, states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Compute from the states that enter runs those that enter chunks, the values that rows add, and those that
        enter pieces.
        """
        entering = self._pieces.entering_states(states, self._states, self.transitions)
        return *compute_chunk_states(self._rows, entering, self._pieces.runs), entering


def compute_chunk_states(rows: NamedRows, states: Tensor, runs: LocalRuns) -> tuple[Tensor, Tensor]:
    """Scan the runs from their entering states by fla: the state before each chunk, and the values u − w S that rows
    add.
    """
    scan_states = fla_function(_MODULE, "chunk_gated_delta_rule_fwd_h")
    h, new_values, _ = scan_states(
        **rows, initial_state=states, chunk_offsets=runs.chunk_ends, **chunk_arguments(runs)
    )
    return h, new_values


@dataclass(eq=False)
class DeltaGradients:
    """Gradients of states in the backward pass of a delta rule: at the states that enter pieces, and those of chunks.

    `_rows` are what the kernels take, by their names: q, k, w, decays, do and dv.
    """

    _rows: NamedRows
    _pieces: Pieces
    _transitions: Tensor
    _scale: float
    _initial_state_gradients: Tensor | None = None

    def initial_state_gradients(self, runs: Integers) -> Tensor:
        """Return gradients (n, H, K, V) of the outputs by the states that enter these runs."""
        return self._pieces.run_initial_state_gradients(self._map_gradients(), self._transitions, runs)

    def leaving_gradients(self, leaving: Tensor) -> Tensor:
        """Return the gradient at each piece's final state, from those at the final states of runs; without cut runs
        pieces are runs.
        """
        if not self._pieces.has_cuts:
            return leaving
        return self._pieces.leaving_gradients(leaving, self._map_gradients(), self._transitions)

    def _map_gradients(self) -> Tensor:
        """(pieces, H, K, V) float32, by the states that enter the pieces with maps, of which there is one at least."""
        if self._initial_state_gradients is None:
            map_runs, map_rows = self._pieces.pieces_with_maps
            rows = {name: x[:, map_rows] for name, x in self._rows.items()}
            heads, size = rows["w"].shape[2:]
            width = rows["dv"].shape[-1]
            count = len(map_runs.lengths)
            gradients = _new_state(rows, count, heads, size, width)
            inputs = [rows["q"], rows["k"], rows["w"], _decay_rows(rows), rows["do"], rows["dv"]]
            shared = {"Q_SHARED": heads // rows["q"].shape[2], **_kernel_sizes(rows, width)}
            triton_kernel("initial_state_gradients_kernel")[-(-width // _COLUMNS), heads, count](
                *inputs, gradients, map_runs.ends, self._scale, **shared
            )
            self._initial_state_gradients = gradients
        return self._initial_state_gradients


class KimiForward:
    """A forward pass of Kimi's delta rule, with a decay for each key number; see `ScanForward`."""

    def __init__(self, inputs: Inputs, runs: LocalRuns, scale: float) -> None:
        pieces = cut_into_pieces(runs, inputs.state_shape[0])
        self._runs = pieces.runs
        self._scale = scale
        self._q, k, v, _, beta = add_batch_dim(inputs)
        self._g = chunk_cumsum(inputs.g, self._runs)
        chunk_kernel = fla_function("ops.kda.chunk_intra", "chunk_kda_fwd_intra")
        arguments = {"q": self._q, "k": k, "v": v, "gk": self._g, "beta": beta, "scale": scale}
        # w and u: a and beta times decayed keys, and values. kg: keys decayed to the chunk's end. qk, kk: matrices of a
        # chunk's pairs of rows.
        w, u, _, kg, self._qk, kk = chunk_kernel(**arguments, **chunk_arguments(self._runs))
        self._states = DeltaStates({"k": kg, "w": w, "u": u, "gk": self._g}, pieces)
        self.summaries = self._states.summaries
        self.activations: tuple[Tensor, ...] = (self._g, self._qk, kk, self._states.transitions)

    def outputs(self, states: Tensor) -> Tensor:
        """Compute the outputs; the states that enter pieces join `activations` only here."""
        h, new_values, entering = self._states.chunk_states(states)
        self.activations = (*self.activations, entering)
        arguments = {"q": self._q, "v": new_values, "g": self._g, "A": self._qk, "h": h, "scale": self._scale}
        compute_outputs = fla_function("ops.gla.chunk", "chunk_gla_fwd_o_gk")
        return compute_outputs(**arguments, **chunk_arguments(self._runs)).squeeze(0)


class KimiBackward:
    """A backward pass of Kimi's delta rule; see `ScanBackward`.

    Its kernels work out the states of chunks themselves, after the exchange.
    """

    def __init__(self, inputs: Inputs, runs: LocalRuns, scale: float, saved: SavedScan) -> None:
        pieces = cut_into_pieces(runs, inputs.state_shape[0])
        self._inputs = inputs
        self._runs = pieces.runs
        self._scale = scale
        self._g, self._qk, self._kk, transitions, self._entering = saved.activations
        self._do = saved.dout.to(inputs.v.dtype).contiguous().unsqueeze(0)
        q, k, v, _, beta = add_batch_dim(inputs)
        recompute = fla_function("ops.kda.wy_fast", "recompute_w_u_fwd")
        # qg: queries decayed from the chunk's start, kg: keys decayed to its end.
        w, _, qg, kg = recompute(
            q=q, k=k, v=v, beta=beta, A=self._kk, gk=self._g, **run_index_arguments(self._runs)
        )
        chunk_kernel = fla_function("ops.kda.chunk_bwd", "chunk_kda_bwd_dAv")
        _, dv = chunk_kernel(q=q, k=k, v=v, do=self._do, A=self._qk, scale=scale, **chunk_arguments(self._runs))
        rows = {"q": qg, "k": kg, "w": w, "gk": self._g, "do": self._do, "dv": dv}
        self._states = DeltaGradients(rows, pieces, transitions, scale)
        self.initial_state_gradients = self._states.initial_state_gradients

    def prepare_chunks(self) -> None:
        """Do nothing during the exchange: `gradients` computes the states of chunks too."""

    def gradients(self, leaving: Tensor) -> tuple[Tensor, ...]:
        """Return all gradients, by one kernel of fla, states of chunks included; those of decays are as given, not
        summed.
        """
        q, k, v, _, beta = add_batch_dim(self._inputs)
        dq, dk, dv, dbeta, dg, *_ = fla_function("ops.kda.chunk_bwd", "chunk_kda_bwd")(
            q=q,
            k=k,
            v=v,
            beta=beta,
            Aqk=self._qk,
            Akk=self._kk,
            scale=self._scale,
            initial_state=self._entering,
            do=self._do,
            dht=self._states.leaving_gradients(leaving),
            g=self._g,
            **chunk_arguments(self._runs),
        )
        return gradients_like_inputs((dq, dk, dv, dg, dbeta), self._inputs)


_WY = "ops.gated_delta_rule.wy_fast"


class DeltaForward:
    """A forward pass of the gated delta rule, with one decay a head; see `ScanForward`.

    `_runs` are pieces. `activations` are what backward needs besides the inputs and the states.
    """

    def __init__(self, inputs: Inputs, runs: LocalRuns, scale: float) -> None:
        pieces = cut_into_pieces(runs, inputs.state_shape[0])
        self._runs = pieces.runs
        self._scale = scale
        self._q, self._k, v, _, beta = add_batch_dim(inputs)
        self._g = chunk_cumsum(inputs.g.squeeze(-1), self._runs)
        chunk_kernel = fla_function("ops.gated_delta_rule.chunk_fwd", "chunk_gated_delta_rule_fwd_intra")
        # a: the inverse of a matrix of each chunk's pairs of rows; w and u: a and beta times decayed keys, and values.
        w, u, a = chunk_kernel(k=self._k, v=v, g=self._g, beta=beta, **chunk_arguments(self._runs))
        self._states = DeltaStates({"k": self._k, "w": w, "u": u, "g": self._g}, pieces)
        self.summaries = self._states.summaries
        self.activations: tuple[Tensor, ...] = (self._g, a, self._states.transitions)

    def outputs(self, states: Tensor) -> Tensor:
        """Compute the outputs; the states that enter pieces join `activations` only here."""
        h, new_values, entering = self._states.chunk_states(states)
        self.activations = (*self.activations, entering)
        arguments = {"q": self._q, "k": self._k, "v": new_values, "h": h, "g": self._g, "scale": self._scale}
        return fla_function("ops.common.chunk_o", "chunk_fwd_o")(
            **arguments, **chunk_arguments(self._runs)
        ).squeeze(0)


class DeltaBackward:
    """A backward pass of the gated delta rule; see `ScanBackward`."""

    def __init__(self, inputs: Inputs, runs: LocalRuns, scale: float, saved: SavedScan) -> None:
        pieces = cut_into_pieces(runs, inputs.state_shape[0])
        self._inputs = inputs
        self._runs = pieces.runs
        self._scale = scale
        self._g, self._a, transitions, self._entering = saved.activations
        self._q, self._k, self._v, _, self._beta = add_batch_dim(inputs)
        recompute = fla_function(_WY, "recompute_w_u_fwd")
        self._w, self._u = recompute(
            k=self._k, v=self._v, beta=self._beta, A=self._a, g=self._g, **run_index_arguments(self._runs)
        )
        self._do = saved.dout.to(inputs.v.dtype).contiguous().unsqueeze(0)
        self._shared_rows = {"q": self._q, "k": self._k, "g": self._g, "do": self._do}
        chunk_kernel = fla_function("ops.common.chunk_o", "chunk_bwd_dv_local")
        self._dv = chunk_kernel(**self._shared_rows, scale=scale, **chunk_arguments(self._runs))
        rows = {**self._shared_rows, "w": self._w, "dv": self._dv}
        self._states = DeltaGradients(rows, pieces, transitions, scale)
        self.initial_state_gradients = self._states.initial_state_gradients
        # results of `compute_chunk_states`, once `prepare_chunks` has run
        self._h = self._new_values = inputs.v[:0]

    def prepare_chunks(self) -> None:
        """Compute the states of chunks once more: forward did not keep them."""
        rows = {"k": self._k, "w": self._w, "u": self._u, "g": self._g}
        self._h, self._new_values = compute_chunk_states(rows, self._entering, self._runs)

    def gradients(self, leaving: Tensor) -> tuple[Tensor, ...]:
        """Return all gradients; those of k and g have two parts: from the outputs, and from the products u and w of
        each chunk (WY).
        """
        # dh: at the states that leave chunks, dv: at the values that rows add.
        dh, _, dv = fla_function(_MODULE, "chunk_gated_delta_rule_bwd_dhu")(
            **{**self._shared_rows, "w": self._w, "dv": self._dv},
            h0=self._entering,
            dht=self._states.leaving_gradients(leaving),
            scale=self._scale,
            chunk_offsets=self._runs.chunk_ends,
            **chunk_arguments(self._runs),
        )
        arguments = {**self._shared_rows, "v": self._new_values, "w": self._w, "h": self._h, "dv": dv, "dh": dh}
        compute_gradients = fla_function("ops.common.chunk_o", "chunk_bwd_dqkwg")
        dq, dk_outputs, dw, dg_outputs = compute_gradients(
            **arguments, scale=self._scale, **chunk_arguments(self._runs)
        )
        # dv as du: rows add the values u − w S, so that u has their gradient.
        arguments = {"k": self._k, "v": self._v, "beta": self._beta, "g": self._g, "A": self._a, "dw": dw, "du": dv}
        dk_wy, dv, dbeta, dg_wy = fla_function(_WY, "prepare_wy_repr_bwd")(
            **arguments, **run_index_arguments(self._runs)
        )
        dg = chunk_cumsum((dg_outputs + dg_wy).squeeze(0), self._runs, reverse=True).unsqueeze(-1)
        return gradients_like_inputs((dq, dk_outputs + dk_wy, dv, dg, dbeta), self._inputs)
