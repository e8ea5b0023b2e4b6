"""Maps of pieces of runs, folded, are those of the runs; gradients go back the same way."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings, strategies as st
from torch import Tensor

from longspan.ssm.kernels.delta import Pieces, cut_into_pieces
from longspan.ssm.kernels.local_runs import CHUNK, LocalRuns
from tests.mutation import mutated

CPU = torch.device("cpu")
K, V = 3, 2


@given(
    rows=st.lists(st.integers(1, 5000), min_size=1, max_size=6),
    shared=st.lists(st.booleans(), min_size=6, max_size=6),
    heads=st.sampled_from((8, 32, 64, 200)),
)
@settings(max_examples=30, deadline=None)
def test_pieces_cover_their_runs(rows: list[int], shared: list[bool], heads: int) -> None:
    runs = LocalRuns(np.array(rows), CPU, np.array(shared[: len(rows)]))
    pieces = Pieces(runs, heads)
    assert pieces.runs.rows == runs.rows and (pieces.runs.lengths > 0).all()
    starts = np.concatenate([[0], np.cumsum(pieces.runs.lengths)])
    assert set(runs.starts) <= set(starts)
    for run, (start, length) in enumerate(zip(runs.starts, rows, strict=True)):
        inside = starts[(starts > start) & (starts < start + length)]
        assert ((inside - start) % CHUNK == 0).all()
        assert len(inside) < -(-64 // heads) and (shared[run] or not len(inside))
        if shared[run]:
            first, stop = starts[pieces.first], starts[pieces.stop]
            assert first <= start and start + length <= stop


def _case(seed: int) -> tuple[LocalRuns, Pieces, list[Tensor], Tensor]:
    runs = LocalRuns(np.array([70, 2500, 1024, 40, 1030]), CPU, np.array([False, True, True, False, True]))
    generator = torch.Generator().manual_seed(seed)
    pieces = cut_into_pieces(runs, 16)
    count = len(pieces.runs.lengths)
    maps = torch.randn(count, 2, K, V + K, generator=generator, dtype=torch.float64)
    return runs, pieces, list(maps), maps[pieces.first : pieces.stop]


def _by_hand(runs: LocalRuns, pieces: Pieces, maps: list[Tensor], states: Tensor) -> tuple[list[Tensor], list[Tensor]]:
    entering, final = [], []
    ends = np.cumsum(runs.lengths)
    piece_ends = np.cumsum(pieces.runs.lengths)
    state = states[0]
    for piece, end in enumerate(piece_ends):
        run = int(np.searchsorted(ends, end))
        if piece == 0 or piece_ends[piece - 1] in ends:
            state = states[run]
        entering.append(state)
        state = maps[piece][..., V:] @ state + maps[piece][..., :V]
        if end in ends:
            final.append(state)
    return entering, final


def worst(seed: int = 0) -> float:
    runs, pieces, all_maps, maps = _case(seed)
    generator = torch.Generator().manual_seed(seed + 1)
    states = torch.randn(5, 2, K, V, generator=generator, dtype=torch.float64).requires_grad_()
    entering, final = _by_hand(runs, pieces, all_maps, states)
    shared = np.array([1, 2, 4])
    added, transitions = maps[..., :V].contiguous(), maps[..., V:].contiguous()
    of_runs = pieces.compose_run_maps(added, transitions, shared)
    differences = [
        (pieces.entering_states(states.detach(), added, transitions) - torch.stack(entering)).abs().max(),
        (of_runs[1] @ states[shared] + of_runs[0] - torch.stack(final)[shared]).abs().max(),
    ]
    weights = torch.randn(len(entering), 2, K, V, generator=generator, dtype=torch.float64)  # what outputs owe
    leaving = torch.randn(5, 2, K, V, generator=generator, dtype=torch.float64)
    for entered in entering:
        if entered.requires_grad and not entered.is_leaf:
            entered.retain_grad()
    total = (torch.stack(entering) * weights).sum()
    (exact,) = torch.autograd.grad(total, states, retain_graph=True)
    initial_state_gradients = weights[pieces.first : pieces.stop]
    differences.append(
        (pieces.run_initial_state_gradients(initial_state_gradients, transitions, shared) - exact[shared]).abs().max()
    )
    found = pieces.leaving_gradients(leaving, initial_state_gradients, transitions)
    gradient, starts = leaving, np.cumsum(pieces.runs.lengths)
    for run, end in enumerate(np.cumsum(runs.lengths)):
        mine = [int(p) for p in np.flatnonzero((starts <= end) & (starts > end - runs.lengths[run]))]
        gradient = leaving[run]
        for piece in reversed(mine):
            differences.append((found[piece] - gradient).abs().max())
            gradient = all_maps[piece][..., V:].mT @ gradient + weights[piece]
    return max(x.item() for x in differences)


def test_folds_are_those_of_the_recurrence() -> None:
    assert len(_case(0)[1].runs.lengths) > 8
    assert max(map(worst, range(5))) <= 1e-12


@pytest.mark.parametrize(
    "old, new",
    [
        (
            "map_states(through, pick_rows(piece_values, pieces), pick_rows(added, maps))",
            "pick_rows(piece_values, pieces)",
        ),
        (
            "map_states(next_transitions, pick_rows(b, continuing), pick_rows(states, maps))",
            "map_states(next_transitions, pick_rows(b, continuing), pick_rows(b, continuing))",
        ),
        ("next_transitions @ pick_rows(m, continuing)", "pick_rows(m, continuing) @ next_transitions"),
        (
            "pick_rows(gradients, continuing), pick_rows(initial, maps)",
            "pick_rows(gradients, continuing), 0 * pick_rows(initial, maps)",
        ),
        ("through if step > 0 else through.mT", "through"),
    ],
)
def test_what_is_dropped_is_noticed(old: str, new: str) -> None:
    with mutated(("ssm.kernels.delta", old, new)):
        assert worst() > 1e-6
