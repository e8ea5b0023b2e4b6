import copy
import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.errors import LayoutError
from longspan.layout import Exchange, Partition
from tests.layout.strategies import examples, holdings, lengths


def carry_out(exchange, parts):
    """Move the rows as ranks would: what each sends is what the other receives; every place is written once."""
    moved = []
    for rank in range(exchange.degree):
        out = np.full(exchange.need.counts[rank], -1)
        written = np.zeros(len(out), dtype=int)
        arrivals = [(exchange.keep(rank), parts[rank])]
        for frm in range(exchange.degree):
            travelled = parts[frm][exchange.send(frm, to=rank)]
            arrivals.append((exchange.receive(rank, frm), travelled))
            assert len(travelled) == exchange.counts[frm, rank] == len(set(exchange.receive(rank, frm).source.tolist()))
        for (source, target), rows in arrivals:
            out[target] = rows[source]
            written[target] += 1
        assert (written == 1).all()
        moved.append(out)
    return moved


def rows_of(partition):
    return [partition.rows(rank) for rank in range(partition.degree)]


@examples
@given(holdings())
def test_every_rank_gets_exactly_what_it_lacks(sides):
    have, need = map(Partition.from_rows, sides)
    exchange = Exchange(have, need)
    assert [m.tolist() for m in carry_out(exchange, rows_of(have))] == sides[1]
    for rank in range(have.degree):
        lacking = set(sides[1][rank]) - set(sides[0][rank])
        arriving = [row for frm in range(have.degree) for row in have.rows(frm)[exchange.send(frm, to=rank)]]
        assert sorted(arriving) == sorted(lacking)
        assert exchange.received_rows(rank) == exchange.lower_bound_rows(rank) == len(lacking)
        assert exchange.sent_rows(rank) == sum(len(exchange.send(rank, to)) for to in range(have.degree))
        assert len(exchange.send(rank, to=rank)) == len(exchange.receive(rank, frm=rank).target) == 0
    assert exchange.counts.sum() == sum(map(exchange.sent_rows, range(have.degree)))


@examples
@given(holdings())
def test_there_and_back_is_the_identity(sides):
    have = Partition.from_rows(sides[0])
    order = [sorted({row for rows in sides[0] for row in rows}, key=lambda row: -row)]
    need = Partition.from_rows((order + [[]] * have.degree)[: have.degree])  # one rank needs everything
    exchange = Exchange(have, need)
    there = carry_out(exchange, rows_of(have))
    assert [m.tolist() for m in carry_out(exchange.reverse(), there)] == sides[0]


@examples
@given(lengths, st.integers(1, 9))
def test_between_partitions_of_the_same_documents(given_lengths, degree):
    zigzag, contiguous = Partition.zigzag(given_lengths, degree), Partition.contiguous(given_lengths, degree)
    exchange = Exchange(zigzag, contiguous)
    there = carry_out(exchange, rows_of(zigzag))
    assert np.concatenate(there).tolist() == list(range(sum(given_lengths)))
    back = carry_out(exchange.reverse(), there)
    assert all(np.array_equal(a, b) for a, b in zip(back, rows_of(zigzag), strict=True))
    assert np.array_equal(exchange.counts.T, exchange.reverse().counts)
    assert Exchange(zigzag, zigzag).counts.sum() == 0


def test_a_small_exchange_by_hand():
    exchange = Exchange(Partition.from_rows([[0, 1], [2], []]), Partition.from_rows([[2], [2, 0, 2], [1]]))
    assert exchange.counts.tolist() == [[0, 1, 1], [1, 0, 0], [0, 0, 0]]
    assert [exchange.received_rows(rank) for rank in range(3)] == [1, 1, 1]
    assert [exchange.sent_rows(rank) for rank in range(3)] == [2, 1, 0]
    assert exchange.send(0, to=1).tolist() == [0] and exchange.send(0, to=2).tolist() == [1]
    source, target = exchange.keep(1)  # rank 1 has row 2 and needs it twice
    assert (source.tolist(), target.tolist()) == ([0, 0], [0, 2])
    source, target = exchange.receive(1, frm=0)
    assert (source.tolist(), target.tolist()) == ([0], [1])


def test_a_row_needed_several_times_travels_once():
    exchange = Exchange(Partition.from_rows([[4, 9], []]), Partition.from_rows([[], [9, 4, 9, 9]]))
    assert exchange.send(0, to=1).tolist() == [1, 0] and exchange.received_rows(1) == 2
    source, target = exchange.receive(1, frm=0)
    assert sorted(zip(source.tolist(), target.tolist(), strict=True)) == [(0, 0), (0, 2), (0, 3), (1, 1)]


@pytest.mark.parametrize("holders", [2, 3, 4])
@pytest.mark.parametrize("stride", [1, 2, 3, 16, 1000])
@pytest.mark.parametrize("receivers", [1, 4])
def test_rows_with_several_holders_come_from_all_of_them(holders, stride, receivers):
    rows = [stride * i for i in range(1200)]
    have = Partition.from_rows([rows] * holders + [[]] * receivers)
    need = Partition.from_rows([[]] * holders + [rows] * receivers)
    exchange = Exchange(have, need)
    share = 1200 / holders
    assert all(abs(n - share) < 0.1 * share for n in exchange.counts[:holders, holders:].ravel())


def test_an_exchange_is_a_value():
    def make(need):
        return Exchange(Partition.from_rows([[0, 1], [2]]), Partition.from_rows(need))

    exchange, same, other = make([[2], [0]]), make([[2], [0]]), make([[2], [1]])
    assert exchange == same and hash(exchange) == hash(same) and exchange != other
    assert repr(exchange) == "Exchange(2 ranks, 2 rows travel)"
    for twin in (exchange, pickle.loads(pickle.dumps(exchange)), copy.deepcopy(exchange)):
        assert twin == exchange and twin.send(0, to=1).tolist() == [0]
        for array in (twin.counts, twin.send(0, 1), *twin.receive(0, 1), *twin.keep(0)):
            assert array.dtype == np.int64 and not array.flags.writeable
    with pytest.raises(AttributeError):
        exchange.have = exchange.need


BAD = [  # have, need, what the message must say
    ([[0], [1]], [[5], [1]], r"row 5 is needed by rank 0 and nobody has it \(1 such rows in all\)"),
    ([[0], [4]], [[0], [2, 9, 4, 9]], r"row 2 is needed by rank 1 and nobody has it \(2 such rows in all\)"),
    ([[], []], [[], [7]], r"row 7 is needed by rank 1"),
    ([[0], [1]], [[0]], r"rows of 2 members cannot be exchanged for rows of 1"),
]


@pytest.mark.parametrize(("have", "need", "message"), BAD)
def test_what_cannot_be_exchanged_is_refused(have, need, message):
    with pytest.raises(LayoutError, match=message):
        Exchange(Partition.from_rows(have), Partition.from_rows(need))


def test_a_reverse_that_lacks_rows_is_refused():
    exchange = Exchange(Partition.from_rows([[0, 1]]), Partition.from_rows([[0]]))
    with pytest.raises(LayoutError, match=r"row 1 is needed by rank 0"):
        exchange.reverse()


@pytest.mark.parametrize(
    "ask",
    [
        lambda e: e.received_rows(2),
        lambda e: e.sent_rows(2),
        lambda e: e.lower_bound_rows(2),
        lambda e: e.send(2, to=0),
        lambda e: e.send(0, to=2),
        lambda e: e.receive(2, frm=0),
        lambda e: e.keep(2),
    ],
)
def test_a_rank_outside_the_exchange_is_refused(ask):
    exchange = Exchange(Partition.from_rows([[0], [1]]), Partition.from_rows([[1], [0]]))
    with pytest.raises(LayoutError, match=r"rank 2 is outside an exchange among 2 \(ranks 0 to 1\)"):
        ask(exchange)


def test_wide_exchanges_stay_cheap():
    lengths = [65536, 30000, 3000, 500, 77] * 4  # work is over rows, not over pairs of ranks
    exchange = Exchange(Partition.zigzag(lengths, 256), Partition.contiguous(lengths, 256))
    for rank in (0, 100, 255):
        assert exchange.received_rows(rank) == exchange.lower_bound_rows(rank) > 0
