"""Partitions: which rows a member holds, in which runs and segments."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given

from longspan.errors import LayoutError
from longspan.layout import Packing, Partition
from tests.layout.strategies import degrees, examples, lengths

kinds = pytest.mark.parametrize("make", [Partition.zigzag, Partition.contiguous], ids=["zigzag", "contiguous"])


@kinds
def test_the_segments_asked_for_last_are_kept(make):
    shares = make([9, 4], 4)
    first = [shares.segments(member) for member in range(4)]
    assert shares.segments(3) is first[3] and shares.segments(2) is first[2]
    assert shares.segments(0) is not first[0] and [shares.segments(member) for member in range(4)] == first


def dealt_by_hand(given_lengths, degree):
    """The rules of the zigzag, row by row: the rows of each member, document after document."""
    rows_of, pointer, start = [[] for _ in range(degree)], 0, 0
    for document, length in enumerate(given_lengths):
        size = [length // degree] * degree
        for i in range(length % degree):
            size[(pointer + i) % degree] += 1
        longer_late = document * 0x9E3779B97F4A7C15 % 2**64 < 2**63
        pointer += length % degree
        chunks = [[0, 0] for _ in range(degree)]
        for member, n in enumerate(size):
            chunks[member] = [n // 2, n // 2]
            if n % 2:
                chunks[member][1 if longer_late else 0] += 1
                longer_late = not longer_late
        rows = iter(range(start, start + length))
        first = [[next(rows) for _ in range(early)] for early, _ in chunks]
        for member in reversed(range(degree)):
            first[member] += [next(rows) for _ in range(chunks[member][1])]
        for member in range(degree):
            rows_of[member] += first[member]
        start += length
    return rows_of


@examples
@given(lengths, degrees)
def test_the_closed_form_deals_like_a_hand(given_lengths, degree):
    shares = Partition.zigzag(given_lengths, degree)
    assert [shares.rows(m).tolist() for m in range(degree)] == dealt_by_hand(given_lengths, degree)


@kinds
@examples
@given(given_lengths=lengths, degree=degrees)
def test_each_row_is_held_once_in_few_runs_and_segments_and_members_differ_by_at_most_one(make, given_lengths, degree):
    shares, packing, total = make(given_lengths, degree), Packing(given_lengths), sum(given_lengths)
    rows_of = [shares.rows(member) for member in range(degree)]
    assert sorted(np.concatenate(rows_of).tolist()) == list(range(total))
    assert sum(shares.counts) == total and shares.counts == tuple(map(len, rows_of))
    assert max(shares.counts) - min(shares.counts) <= 1 and max(shares.counts) <= -(-total // degree)
    if make is Partition.contiguous:
        assert all(len(shares.runs(member)) <= 1 for member in range(degree))
        assert np.concatenate(rows_of).tolist() == list(range(total))
        assert sorted(shares.counts, reverse=True) == list(shares.counts)
    for member, rows in enumerate(rows_of):
        runs = shares.runs(member)
        assert [row for start, stop in runs.tolist() for row in range(start, stop)] == rows.tolist()
        assert (runs[:, 0] < runs[:, 1]).all() and (runs[1:, 0] != runs[:-1, 1]).all()
        segments = shares.segments(member)
        assert segments.rows == len(rows)
        for document, start, stop, offset in segments:
            local = rows[offset : offset + stop - start]
            assert (packing.document_of_row[local] == document).all()
            assert packing.positions[local].tolist() == list(range(start, stop)) != []
        assert segments.positions.tolist() == packing.positions[rows].tolist()
        for a, b in pairwise(segments):  # as few as can be
            assert (a.document < b.document or a.stop < b.start) and b.offset == a.offset + a.stop - a.start


def pairs_by_document(shares, given_lengths):
    """Causal work, position + 1 pairs a row: (members, documents)."""
    packing = Packing(given_lengths)
    work = np.zeros((shares.degree, len(given_lengths)), dtype=np.int64)
    for member in range(shares.degree):
        rows = shares.rows(member)
        np.add.at(work[member], packing.document_of_row[rows], packing.positions[rows] + 1)
    return work


@pytest.mark.parametrize("degree", [2, 3, 5])
def test_one_row_and_a_pair_bounds_every_document(degree):
    tightest = 0
    for length in range(1, 5 * degree):
        for before in range(degree):  # whoever gets the first extra row, whoever begins
            documents = [degree + before, length, 2 * degree - length % degree, degree, degree, length]
            spread = np.ptp(pairs_by_document(Partition.zigzag(documents, degree), documents), axis=0)
            assert spread[1] <= length + 1 and spread[5] <= length + 1, (length, before)
            tightest = max(tightest, spread[1] - length, spread[5] - length)
    assert tightest == 1


@pytest.mark.parametrize("degree, length", [(2, 999), (3, 100), (8, 3), (16, 100)])
def test_imbalance_of_one_document_is_not_repeated_by_the_next(degree, length):
    many = [length] * 100
    work = pairs_by_document(Partition.zigzag(many, degree), many).sum(axis=1)
    assert np.ptp(work) <= 10 * length  # were the members always taken in one turn: up to 95 * length


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([], r"rows of 0 members"),
        ([[0], [2, -3]], r"rows of member 1 hold \(2, -3\)"),
        ([[0], [1.0]], r"rows of member 1 hold \(1\.0\)"),
        ([np.array([True])], r"rows of member 0 hold \(True\)"),
        ([[0], None], r"rows of member 1 are None"),
        ([["a", None]], r"rows of member 0 hold \('a', None\)"),
    ],
)
def test_given_rows_are_checked_and_copied(rows, message):
    with pytest.raises(LayoutError, match=message):
        Partition.from_rows(rows)
    ids = np.array([0, 1])
    shares = Partition.from_rows([ids])
    ids[0] = 7
    assert shares.rows(0).tolist() == [0, 1]


@kinds
def test_lengths_and_degrees_are_checked(make):
    for degree, shown in ((0, "0"), (2.0, r"2\.0"), (True, "True")):
        with pytest.raises(LayoutError, match=f"degree is {shown}; degree is an integer of at least 1"):
            make([4], degree)
    with pytest.raises(LayoutError, match="length 0 is 0"):
        make([0], 2)


@pytest.mark.parametrize(
    "shares",
    [Partition.zigzag([4], 2), Partition.contiguous([4], 2), Partition.from_rows([[0, 1], [2, 3]])],
    ids=["zigzag", "contiguous", "from_rows"],
)
def test_what_does_not_fit_a_partition_is_refused(shares):
    for member in (-1, 2):
        for ask in (shares.rows, shares.runs):
            with pytest.raises(LayoutError, match=rf"member {member} is outside a group of 2 \(members 0 to 1\)"):
                ask(member)


def test_given_rows_have_no_documents():
    shares = Partition.from_rows([[2, 0], [], [1, 2]])
    assert [shares.rows(member).tolist() for member in range(3)] == [[2, 0], [], [1, 2]]
    with pytest.raises(LayoutError, match="knows no documents"):
        shares.segments(0)


def test_wide_groups_and_many_documents_stay_cheap():
    lengths = np.random.default_rng(0).integers(1, 4000, 5000)  # work is over documents, not over members or rows
    shares = Partition.zigzag(lengths, 1024)
    assert sum(shares.segments(member).rows for member in range(0, 1024, 256)) == sum(shares.counts[::256])
    million = Partition.zigzag(np.ones(1_000_000, dtype=int), 1024)
    assert million.rows(1023)[0] == 1023 and len(million.runs(5)) == million.counts[5] == 977


def test_a_partition_of_runs_is_that_of_their_rows() -> None:
    runs = [np.array([[4, 6], [6, 9], [0, 2]]), np.empty((0, 2), dtype=np.int64), np.array([[2, 4]])]
    rows = [[4, 5, 6, 7, 8, 0, 1], [], [2, 3]]
    partition = Partition.from_runs(runs)
    assert partition == Partition.from_rows(rows) and partition.counts == (7, 0, 2)
    assert partition.runs(0).tolist() == [[4, 9], [0, 2]]
    assert [partition.rows(member).tolist() for member in range(3)] == rows
    with pytest.raises(LayoutError, match="knows no documents"):
        partition.segments(0)
