"""Exchanges and moves of rows as ranks carry them out, there and back, against sums over all copies of a row."""

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from longspan.errors import LayoutError
from longspan.layout import Exchange, Partition
from longspan.layout.exchange import PIECES, cut_into_blocks, plan_moves
from tests.layout.strategies import examples, feedings, holdings, lacking, lengths, random_gradients, summed


def carry_out(exchange, parts):
    return carry([exchange.moves(rank) for rank in range(exchange.degree)], parts)


def counts(exchange):
    return np.array([exchange.moves(rank).sends for rank in range(exchange.degree)])


def rows_of(partition):
    return [partition.rows(rank) for rank in range(partition.degree)]


@examples
@given(holdings())
def test_every_rank_gets_exactly_what_it_lacks_and_back(sides):
    have, need = map(Partition.from_rows, sides)
    exchange = Exchange(have, need)
    assert [rows.tolist() for rows in rows_of(have)] == sides[0]
    assert [m.tolist() for m in carry_out(exchange, rows_of(have))] == sides[1]
    for rank in range(have.degree):
        lacking = set(sides[1][rank]) - set(sides[0][rank])
        assert exchange.received_rows(rank) == exchange.lower_bound_rows(rank) == len(lacking)
        assert exchange.sent_rows(rank) == counts(exchange)[rank].sum() and exchange.moves(rank).sends[rank] == 0
    assert np.array_equal(counts(exchange).T, [exchange.moves(rank).receives for rank in range(have.degree)])
    order = [sorted({row for rows in sides[0] for row in rows}, key=lambda row: -row)]
    everything = Exchange(have, Partition.from_rows((order + [[]] * have.degree)[: have.degree]))  # one rank needs it
    there = carry_out(everything, rows_of(have))
    assert [m.tolist() for m in carry_out(Exchange(everything.need, have), there)] == sides[0]


@settings(examples, max_examples=20)
@given(lengths, st.integers(1, 9))
def test_between_partitions_of_the_same_documents(given_lengths, degree):
    zigzag, contiguous = Partition.zigzag(given_lengths, degree), Partition.contiguous(given_lengths, degree)
    exchange = Exchange(zigzag, contiguous)
    there = carry_out(exchange, rows_of(zigzag))
    assert np.concatenate(there).tolist() == list(range(sum(given_lengths)))
    back = carry_out(Exchange(contiguous, zigzag), there)
    assert all(np.array_equal(a, b) for a, b in zip(back, rows_of(zigzag), strict=True))
    assert np.array_equal(counts(exchange).T, counts(Exchange(contiguous, zigzag)))
    assert counts(Exchange(zigzag, zigzag)).sum() == 0


@pytest.mark.parametrize("holders, stride, receivers", [(2, 1, 1), (3, 1000, 1), (4, 3, 4)])
def test_rows_with_several_holders_come_from_all_of_them(holders, stride, receivers):
    rows = [stride * i for i in range(1200)]
    have = Partition.from_rows([rows] * holders + [[]] * receivers)
    need = Partition.from_rows([[]] * holders + [rows] * receivers)
    exchange = Exchange(have, need)
    share = 1200 / holders
    assert all(abs(n - share) < 0.1 * share for n in counts(exchange)[:holders, holders:].ravel())


def test_wide_exchanges_stay_cheap():
    lengths = [65536, 30000, 3000, 500, 77]  # work is over rows, not over pairs of ranks
    exchange = Exchange(Partition.zigzag(lengths, 256), Partition.contiguous(lengths, 256))
    for rank in (0, 255):
        assert exchange.received_rows(rank) == exchange.lower_bound_rows(rank) > 0


def twice(have, need):
    return Exchange(Partition.from_rows(have), Partition.from_rows(need))


OUTSIDE = r"rank 2 is outside an exchange among 2 \(ranks 0 to 1\)"
BAD = [  # what is asked, what the message must say
    (lambda _: twice([[0], [1]], [[5], [1]]), r"row 5 is needed by rank 0 and nobody has it \(1 such rows in all\)"),
    (lambda _: twice([[0], [4]], [[0], [2, 9, 4, 9]]), r"row 2 is needed by rank 1 and nobody has it \(2 such rows in"),
    (lambda _: twice([[0], [1]], [[0]]), r"rows of 2 members cannot be exchanged for rows of 1"),
    (lambda e: e.received_rows(2), OUTSIDE),
    (lambda e: e.sent_rows(2), OUTSIDE),
    (lambda e: e.moves(-1), "rank -1 is outside an exchange"),
]


@pytest.mark.parametrize(("ask", "message"), BAD)
def test_what_cannot_be_exchanged_is_refused(ask, message):
    with pytest.raises(LayoutError, match=message):
        ask(twice([[0], [1]], [[1], [0]]))


def carry(moves, parts):
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
def test_rows_and_gradients_of_every_convention_travel_once(sides):
    have, need, slots = sides
    moves = plan_all(have, need)
    assert [rows.tolist() for rows in carry(moves, [np.array(rows, dtype=float) for rows in have])] == need
    for rank, move in enumerate(moves):
        assert sum(move.receives) == len(set(need[rank]) - set(have[rank]))
        assert not move.folds and not move.further_addends and not move.widened
    slot_of = {rank: index for index, ranks in enumerate(slots) for rank in ranks}
    of_slots = random_gradients(need, lambda rank, row, number: (slot_of[rank], row, number))
    check_sums(have, need, of_slots, slots)
    check_sums(have, need, random_gradients(need, lambda *copy: copy), [[rank] for rank in range(len(have))])
    # gradients that all copies have alike
    parts = [np.array(rows, dtype=float) + 1 for rows in need]
    needed = {row for rows in need for row in rows}
    expected = [[row + 1.0 if row in needed else 0.0 for row in rows] for rows in have]
    moves = plan_all(need, have)
    assert [rows.tolist() for rows in carry(moves, parts)] == expected
    for rank, move in enumerate(moves):
        assert sum(move.receives) == len((set(have[rank]) & needed) - set(need[rank])) and not move.folds


def check_sums(have, need, gradients, groups):
    moves = plan_all(need, have, groups)
    assert [rows.tolist() for rows in carry(moves, gradients)] == summed(have, need, gradients, groups)
    repeated = any(len(set(rows)) < len(rows) for rows in need)
    for rank, move in enumerate(moves):
        assert sum(move.receives) == lacking(have, need, groups, rank) and move.widened == repeated


@pytest.mark.parametrize("rows", [3 * PIECES, 20 * PIECES])
def test_the_ranks_of_a_slot_share_the_way_back_evenly(rows):
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
