"""Long runs cut into pieces that are scanned side by side, where the heads of a delta rule are too few to fill a GPU.

A scan goes through a run's chunks one after another, a head a program or two. Pieces of a run are to the run what the
runs of a document are to the document (`state_pass.py`): each is an affine map [B | M] of the state that enters it, and
folding these in order gives the run's own map, and the states that enter its pieces.
"""

from functools import cached_property

import numpy as np
from torch import Tensor

from longspan.layout.segments import Integers
from longspan.ssm.kernels.runs import CHUNK, LocalRuns, apply_maps, pick_rows, put_runs

_AT_ONCE = 64  # pieces times heads that fill a GPU
_SHORTEST = 8 * CHUNK  # rows of a piece at least


class Pieces:
    """Pieces of the runs that share a document with others; other runs are one piece each.

    `runs` are the pieces as runs. Only the pieces from `first` to before `stop`, which include all of shared runs, have
    maps, which are numbered from `first` on: map i is of piece `first` + i.
    """

    def __init__(self, runs: LocalRuns, heads: int) -> None:
        """Cut shared runs into pieces, as many as fill a GPU with these heads; other runs are one piece each."""
        most_pieces = -(-_AT_ONCE // heads)
        sizes = [
            _piece_sizes(int(rows), most_pieces) if is_shared else [int(rows)]
            for rows, is_shared in zip(runs.lengths, runs.shared, strict=True)
        ]
        counts = np.array([len(cut) for cut in sizes])
        self.runs: LocalRuns = LocalRuns(np.array([n for cut in sizes for n in cut], dtype=np.int64), runs.device)
        self._starts = np.cumsum(counts) - counts
        self._counts = counts
        shared_runs = np.flatnonzero(runs.shared)
        self.first: int = int(self._starts[shared_runs[0]]) if len(shared_runs) else 0
        self.stop: int = int((self._starts + counts)[shared_runs[-1]]) if len(shared_runs) else 0

    @cached_property
    def pieces_with_maps(self) -> tuple[LocalRuns, slice]:
        """Return the pieces from `first` to before `stop` as runs of their own, and which of all rows are theirs."""
        lengths, begin = self.runs.lengths, int(self.runs.lengths[: self.first].sum())
        runs = LocalRuns(lengths[self.first : self.stop], self.runs.device)
        return runs, slice(begin, begin + runs.rows)

    @property
    def has_cuts(self) -> bool:
        """Whether any run has several pieces."""
        return bool((self._counts > 1).any())

    def compose_run_maps(self, states: Tensor, transitions: Tensor, runs: Integers) -> tuple[Tensor, Tensor]:
        """Return B (n, H, K, V) and M (n, H, K, K) of some shared runs, composed from those of their pieces.

        The map S → M S + B of a run is that of its pieces one after another: B ← M_p B + B_p, M ← M_p M. Runs without
        a further piece stay as they are; if none has, B and M may be views of those of pieces.
        """
        first_pieces = self._starts[runs] - self.first
        b, m = pick_rows(states, first_pieces), pick_rows(transitions, first_pieces)
        for place in range(1, int(self._counts[runs].max(initial=1))):
            continuing = np.flatnonzero(self._counts[runs] > place)
            maps = first_pieces[continuing] + place
            next_transitions = pick_rows(transitions, maps)
            b = _replace_rows(
                b, continuing, apply_maps(next_transitions, pick_rows(b, continuing), pick_rows(states, maps))
            )
            m = _replace_rows(m, continuing, next_transitions @ pick_rows(m, continuing))
        return b, m

    def entering_states(self, of_runs: Tensor, states: Tensor, transitions: Tensor) -> Tensor:
        """Return the state that enters each piece, from those (R, H, K, V) that enter runs, and B and M of pieces.

        The first piece of a run gets the run's. Each further piece gets what the map of the piece before makes of the
        state that enters the piece before.
        """
        if not self.has_cuts:
            return of_runs
        result = of_runs.new_empty((len(self.runs.lengths), *of_runs.shape[1:]))
        put_runs(result, self._starts, of_runs)
        for place in range(1, int(self._counts.max())):
            pieces_before = self._starts[self._counts > place] + place - 1
            maps = pieces_before - self.first
            put_runs(
                result,
                pieces_before + 1,
                apply_maps(pick_rows(transitions, maps), pick_rows(result, pieces_before), pick_rows(states, maps)),
            )
        return result

    def run_entry_gradients(self, entry_gradients: Tensor, transitions: Tensor, runs: Integers) -> Tensor:
        """Return gradients (n, H, K, V) at the states that enter some shared runs, from those at states of pieces.

        Pieces are followed backwards. The gradient at the state that enters a piece is that of the piece's outputs,
        plus the gradient at its final state through its transposed M.
        """
        last_pieces = self._starts[runs] + self._counts[runs] - 1
        result = pick_rows(entry_gradients, last_pieces - self.first)
        for place in range(1, int(self._counts[runs].max(initial=1))):
            continuing = np.flatnonzero(self._counts[runs] > place)
            maps = last_pieces[continuing] - place - self.first
            gradient_before = apply_maps(
                pick_rows(transitions, maps).mT, pick_rows(result, continuing), pick_rows(entry_gradients, maps)
            )
            result = _replace_rows(result, continuing, gradient_before)
        return result

    def leaving_gradients(self, leaving: Tensor, entry_gradients: Tensor | None, transitions: Tensor) -> Tensor:
        """Return the gradient at each piece's final state, from those (R, H, K, V) at the final states of runs.

        The last piece of a run gets the run's. Each earlier piece gets the gradient at the state that enters the next
        piece: that of the next piece's outputs, plus the gradient at the next piece's final state through its
        transposed M. Without cuts pieces are runs.
        """
        if entry_gradients is None or not self.has_cuts:
            return leaving
        last_pieces = self._starts + self._counts - 1
        result = leaving.new_empty((len(self.runs.lengths), *leaving.shape[1:]))
        put_runs(result, last_pieces, leaving)
        for place in range(1, int(self._counts.max())):
            pieces_after = last_pieces[self._counts > place] - place + 1
            maps = pieces_after - self.first
            put_runs(
                result,
                pieces_after - 1,
                apply_maps(
                    pick_rows(transitions, maps).mT,
                    pick_rows(result, pieces_after),
                    pick_rows(entry_gradients, maps),
                ),
            )
        return result


def _replace_rows(x: Tensor, rows: Integers, values: Tensor) -> Tensor:
    """Return x with these rows replaced; a copy, because x may be a view of something else."""
    if len(rows) == len(x):
        return values
    x = x.clone()
    put_runs(x, rows, values)
    return x


def _piece_sizes(rows: int, most: int) -> list[int]:
    """Return how many rows each piece of a run has: nearly equal, whole chunks except for the last.

    There are `most` pieces at most, and so few that none is much shorter than _SHORTEST.
    """
    chunks = -(-rows // CHUNK)
    count = max(1, min(most, rows // _SHORTEST))
    ends = [min(rows, CHUNK * (chunks * (i + 1) // count)) for i in range(count)]
    return np.diff([0, *ends]).tolist()


def cut_into_pieces(runs: LocalRuns, heads: int) -> Pieces:
    """Cut these runs into pieces, once for each number of heads."""
    if heads not in runs.pieces:
        runs.pieces[heads] = Pieces(runs, heads)
    return runs.pieces[heads]
