import copy
import pickle
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given

from longspan.errors import LayoutError
from longspan.layout import Packing, Partition, Segment
from tests.layout.strategies import degrees, examples, lengths

KINDS = {"zigzag": Partition.zigzag, "contiguous": Partition.contiguous}
kinds = pytest.mark.parametrize("make", KINDS.values(), ids=KINDS)

TABLE = [  # partition, member, its segments: document, start, stop, offset
    (Partition.zigzag([8], 2), 0, [(0, 0, 2, 0), (0, 6, 8, 2)]),
    (Partition.zigzag([8], 2), 1, [(0, 2, 6, 0)]),  # chunks that touch are one run
    (Partition.zigzag([8, 3], 1), 0, [(0, 0, 8, 0), (1, 0, 3, 8)]),  # never across documents
    (Partition.zigzag([1, 8], 2), 1, [(1, 2, 6, 0)]),  # no row of document 0
    (Partition.zigzag([1], 3), 2, []),
    (Partition.zigzag([], 3), 0, []),
    (Partition.contiguous([3, 5, 1], 2), 0, [(0, 0, 3, 0), (1, 0, 2, 3)]),
    (Partition.contiguous([3, 5, 1], 2), 1, [(1, 2, 5, 0), (2, 0, 1, 3)]),
]


@pytest.mark.parametrize(("shares", "member", "segments"), TABLE, ids=repr)
def test_small_segments(shares, member, segments):
    of_member = shares.segments(member)
    assert list(of_member) == [Segment(*s) for s in segments] and len(of_member) == len(segments)


@kinds
@examples
@given(given_lengths=lengths, degree=degrees)
def test_segments_are_the_rows_of_a_member(make, given_lengths, degree):
    packing, shares = Packing(given_lengths), make(given_lengths, degree)
    for member in range(degree):
        segments, rows = shares.segments(member), shares.rows(member)
        assert segments.rows == len(rows) == shares.counts[member]
        for document, start, stop, offset in segments:
            local = rows[offset : offset + stop - start]
            assert (packing.document_of_row[local] == document).all()
            assert packing.positions[local].tolist() == list(range(start, stop)) != []
        assert segments.positions.tolist() == packing.positions[rows].tolist()
        documents = packing.document_of_row[rows]
        assert segments.documents.tolist() == sorted(set(documents.tolist()))
        assert np.repeat(segments.documents, np.diff(segments.cu_seqlens)).tolist() == documents.tolist()


@kinds
@examples
@given(given_lengths=lengths, degree=degrees)
def test_segments_are_as_few_as_can_be(make, given_lengths, degree):
    for member in range(degree):
        segments = list(make(given_lengths, degree).segments(member))
        for a, b in pairwise(segments):
            assert a.document < b.document or (a.document == b.document and a.stop < b.start)
            assert b.offset == a.offset + a.stop - a.start
        assert all(sum(s.document == d for s in segments) <= 2 for d in range(len(given_lengths)))


def test_segments_are_a_value():
    segments, same = Partition.zigzag([8, 3], 2).segments(0), Partition.zigzag([8, 3], 2).segments(0)
    assert (
        segments == same
        and hash(segments) == hash(same)
        and segments != Partition.zigzag([8, 3], 2).segments(1)
        and segments != 3
    )
    assert repr(segments) == "Segments(0[0:2], 0[6:8], 1[0:1], 1[2:3]; 6 rows)"
    assert repr(Partition.zigzag([8] * 9, 1).segments(0)).endswith("5[0:8], … 9 runs; 72 rows)")
    for twin in (segments, pickle.loads(pickle.dumps(segments)), copy.deepcopy(segments)):
        assert twin == segments
        for name in ("document", "start", "stop", "offset", "positions", "documents", "cu_seqlens"):
            assert getattr(twin, name).dtype == np.int64
            with pytest.raises(ValueError, match="read-only"):
                getattr(twin, name)[0] = 1


def test_given_rows_have_no_documents():
    with pytest.raises(LayoutError, match="knows no documents"):
        Partition.from_rows([[0, 1]]).segments(0)


@kinds
def test_a_member_outside_the_group_is_refused(make):
    with pytest.raises(LayoutError, match=r"member 3 is outside a group of 3 \(members 0 to 2\)"):
        make([5], 3).segments(3)
