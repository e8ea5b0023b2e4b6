"""Rows of spans see the later rows of their span: in tiles, in the rows that members send, and in what is refused."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan import Group, MicroBatch, attend
from longspan.attention.call import AttendCall, Members
from longspan.attention.kernels.table import find_kernel
from longspan.attention.tiles import Mask, span_tiles
from longspan.comm import SequenceShard
from longspan.comm.shard import ShardPart
from longspan.errors import AttentionError, LayoutError
from longspan.layout import Partition
from longspan.layout.segments import Spans
from tests.attention.test_tiles import assert_one_launch, seen, whole

CPU = torch.device("cpu")


@st.composite
def documents(draw):
    """Lengths, and of each document some disjoint runs."""
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=4))
    runs = {}
    for d, length in enumerate(lengths):
        cuts = sorted(draw(st.sets(st.integers(0, length), max_size=6)))
        runs[d] = list(zip(cuts[::2], cuts[1::2], strict=False))
    return tuple(lengths), runs


def later(runs, q, k):
    """Which rows see which as later rows of their span, one by one."""
    (q_doc, q_pos), (k_doc, k_pos) = ((np.repeat(s.document, s.stop - s.start), s.positions) for s in (q, k))
    mask = np.zeros((q.rows, k.rows), dtype=int)
    for d, of_document in runs.items():
        for start, stop in of_document:
            rows, keys = ((doc == d) & (pos >= start) & (pos < stop) for doc, pos in ((q_doc, q_pos), (k_doc, k_pos)))
            mask += rows[:, None] & keys & (k_pos > q_pos[:, None])
    return mask


@given(documents=documents(), degree=st.integers(1, 5), kind=st.sampled_from((Partition.zigzag, Partition.contiguous)))
@settings(max_examples=40, deadline=None)
def test_tiles_cover_later_rows_of_spans_once(documents, degree, kind):
    lengths, runs = documents
    spans = Spans.of(runs, range(len(lengths)), lengths)
    segments = [kind(lengths, degree).segments(member) for member in range(degree)]
    for q in segments:
        for k in [*segments, whole(lengths)]:
            tilings = span_tiles(q, k, spans)
            assert (seen(tilings, q.rows, k.rows) == later(runs, q, k)).all()
            for tiling in tilings:
                assert_one_launch(tiling)


def test_whole_spans_are_one_launch_however_many():
    spans = Spans.of({d: [(i, i + 5) for i in range(2, 90, 7)] for d in range(6)}, range(6), (97,) * 6)
    (tiling,) = span_tiles(whole((97,) * 6), whole((97,) * 6), spans)
    assert len(tiling) == 6 * 13 and (tiling.left, tiling.right) == (0, None) and spans.pairs == 6 * 13 * 10


@given(documents=documents(), degree=st.integers(2, 5), inner=st.sampled_from((1, 2)), window=st.integers(1, 9))
@settings(max_examples=30, deadline=None)
def test_members_send_the_rows_of_spans_that_reach_over_their_end(documents, degree, inner, window):
    lengths, runs = documents
    group = Group(tuple(range(degree * inner)), tuple(range(len(lengths))), lengths)
    spans, mask = Spans.of(runs, group.documents, lengths), Mask(True, window)
    slots = range(0, degree * inner, inner)
    every = [Members(ShardPart(group, 0, slot, 0, 0), mask, CPU, inner, spans) for slot in slots]
    for reader in every:
        mine = reader.real_segments(reader.member)
        rows = np.repeat(mine.document, mine.stop - mine.start), mine.positions
        for owner in every:
            theirs = owner.segments(owner.member)
            ago = rows[1][:, None] - theirs.positions
            same = rows[0][:, None] == np.repeat(theirs.document, theirs.stop - theirs.start)
            needed = (same & (ago >= 0) & (ago < window)).any(0) | later(runs, mine, theirs).any(0)
            sent = owner.window_rows.rows_to_send[reader.member] if owner is not reader else reader.window_rows.own_rows
            assert sent.tolist() == np.flatnonzero(needed).tolist()


def shard() -> SequenceShard:
    return SequenceShard(MicroBatch((Group((0,), (4, 9), (6, 8)),)), 0, -1, CPU)


@pytest.mark.parametrize(
    ("spans", "message"),
    [
        ({9: [(2, 9)]}, r"document 9 has the span \(2, 9\) after position 0, and 8 rows"),
        ({4: [(1, 3), (2, 5)]}, r"document 4 has the span \(2, 5\) after position 3, and 6 rows"),
        ({4: [(3, 3)]}, r"document 4 has the span \(3, 3\)"),
        ({4: [(1, 2.5)]}, r"document 4 has the span \(1, 2.5\); a span is \(start, stop\), two integers"),
    ],
)
def test_spans_that_do_not_fit_are_refused(spans, message):
    with pytest.raises(LayoutError, match=message):
        shard().with_spans(spans)


def test_a_kernel_without_windows_has_no_spans():
    cudnn = replace(find_kernel("cudnn"), devices=("cpu",))
    for window, lacks in ((None, "spans"), (4, "window")):
        call = AttendCall(1, 1, 64, 64, torch.bfloat16, CPU, Mask(True, window), one_document=True, spans=True)
        assert cudnn.lack_for(call) == f"needs a call without {lacks}, got {lacks}" and not cudnn.suits(call)


def test_spans_stay_with_a_shard_that_is_padded_and_refuse_chunks():
    bound = shard().with_spans({9: [(2, 5)], 12: [(0, 99)]})  # document 12 is of another micro-batch
    padded = bound.with_padding(minimum=20)
    assert padded.spans is bound.spans and padded.has_spans and not shard().has_spans and shard().spans is None
    assert len(padded.spans_of(padded.parts[1])) == 0 and not shard().with_spans({}).has_spans
    x = torch.zeros(20, 1, 4)
    with pytest.raises(AttentionError, match="chunk is 4 and the shard has 1 spans of rows that see each other"):
        attend(x, x, x, padded, chunk=4)
