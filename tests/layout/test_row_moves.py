"""Moves of rows as ranks would carry them out, there and back, against sums over all copies of a row."""

import numpy as np
import pytest
from hypothesis import given

from longspan.errors import LayoutError
from longspan.layout import Partition
from longspan.layout.exchange import PIECES, cut_into_blocks, plan_moves
from tests.layout.copies import lacking, random_gradients, summed
from tests.layout.strategies import examples, feedings


def carry(moves, parts):
    """What every rank has after the moves of all ranks, each a RowMoves, from its rows of the source, parts[rank]."""
    packed = []
    for move, x in zip(moves, parts, strict=True):
        x = x.copy()
        for source, target in move.folds:
            assert len(set(target.tolist())) == len(target)
            x[target] += x[source]
        packed.append((x, np.split(x[move.leaves], np.cumsum(move.sends)[:-1])))
    results = []
    for me, move in enumerate(moves):
        arrived = [packed[other][1][me] for other in range(len(moves))]
        assert tuple(map(len, arrived)) == move.receives and not len(arrived[me])
        pool = np.concatenate([*arrived, packed[me][0][move.stays], [0.0]])
        y = pool[move.places]
        for source, target in move.further_addends:
            assert len(set(target.tolist())) == len(target)
            y[move.summed_rows[target]] += pool[source]
        results.append(y)
    return results


def plan_all(source, target, groups=None):
    source, target = cut_into_blocks(Partition.from_rows(source), Partition.from_rows(target))
    return [plan_moves(source, target, me, groups) for me in range(len(source.members))]


@examples
@given(feedings())
def test_every_rank_gets_its_rows_once(sides):
    have, need, _ = sides
    moves = plan_all(have, need)
    assert [rows.tolist() for rows in carry(moves, [np.array(rows, dtype=float) for rows in have])] == need
    for rank, move in enumerate(moves):
        assert sum(move.receives) == len(set(need[rank]) - set(have[rank]))
        assert not move.folds and not move.further_addends and not move.widened


@examples
@given(feedings())
def test_partial_gradients_of_slots_are_summed_in_order(sides):
    have, need, slots = sides
    slot_of = {rank: index for index, ranks in enumerate(slots) for rank in ranks}
    gradients = random_gradients(need, lambda rank, row, number: (slot_of[rank], row, number))
    check_gradients(have, need, gradients, slots)


@examples
@given(feedings())
def test_partial_gradients_of_ranks_are_summed_in_order(sides):
    have, need, _ = sides
    gradients = random_gradients(need, lambda *copy: copy)
    check_gradients(have, need, gradients, [[rank] for rank in range(len(have))])


def check_gradients(have, need, gradients, groups):
    moves = plan_all(need, have, groups)
    assert [rows.tolist() for rows in carry(moves, gradients)] == summed(have, need, gradients, groups)
    repeated = any(len(set(rows)) < len(rows) for rows in need)
    for rank, move in enumerate(moves):
        assert sum(move.receives) == lacking(have, need, groups, rank) and move.widened == repeated


@examples
@given(feedings())
def test_of_identical_gradients_one_is_taken(sides):
    have, need, _ = sides
    moves = plan_all(need, have)
    parts = [np.array(rows, dtype=float) + 1 for rows in need]
    needed = {row for rows in need for row in rows}
    expected = [[row + 1.0 if row in needed else 0.0 for row in rows] for rows in have]
    assert [rows.tolist() for rows in carry(moves, parts)] == expected
    for rank, move in enumerate(moves):
        assert sum(move.receives) == len((set(have[rank]) & needed) - set(need[rank])) and not move.folds


@pytest.mark.parametrize("rows", [3 * PIECES, 100 * PIECES])
def test_the_ranks_of_a_slot_share_the_way_back_evenly(rows):
    """Four replicas of a slot each bring a quarter of every receiver's rows, whatever long runs these rows form."""
    everything, nothing = range(rows), range(0)
    moves = plan_all([everything] * 4 + [nothing] * 2, [nothing] * 4 + [range(rows // 2), range(rows // 2, rows)])
    shares = np.array([move.sends for move in moves[:4]])[:, 4:]
    assert shares.sum() == rows and (np.abs(shares - rows / 8) < 0.05 * rows / 8).all()


def test_long_runs_are_few_blocks():
    blocks, _ = cut_into_blocks(Partition.contiguous([10**9], degree=8), Partition.zigzag([10**9], degree=8))
    assert len(blocks.size) < 3 * PIECES and blocks.size.sum() == 10**9


def test_ranks_of_a_slot_that_use_a_row_differently_often_are_refused():
    have, need = [[7], [], [8], []], [[8, 8], [8, 8], [7, 7], [7, 8]]
    message = r"ranks 3 and 2 are of one slot, whose ranks carry the same gradient, but need row 7 1 and 2 times"
    with pytest.raises(LayoutError, match=message):
        plan_all(need, have, [[0, 1], [2, 3]])
