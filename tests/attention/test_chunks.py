"""Chunks: every so many positions of a document are as a document of their own, in tiles, members and estimates."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan import Group
from longspan.attention.call import Members
from longspan.attention.tiles import Mask, tiles_between
from longspan.comm.shard import ShardPart
from longspan.layout import Partition, Segments
from longspan.plan.cost.machine import fetched_share
from tests.attention.test_tiles import assert_one_launch, seen, whole
from tests.mutation import mutated

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(1, 70), min_size=1, max_size=5)


def visible(q: Segments, k: Segments, window: int | None, chunk: int) -> np.ndarray:
    """Which rows see which, one by one."""
    (q_doc, q_pos), (k_doc, k_pos) = ((np.repeat(s.document, s.stop - s.start), s.positions) for s in (q, k))
    ago = q_pos[:, None] - k_pos
    mask = (q_doc[:, None] == k_doc) & (ago >= 0) & (q_pos[:, None] // chunk == k_pos // chunk)
    return mask if window is None else mask & (ago < window)


@given(
    lengths=LENGTHS,
    degree=st.integers(1, 6),
    chunk=st.integers(1, 80),
    window=st.one_of(st.none(), st.integers(1, 20)),
    kind=st.sampled_from((Partition.zigzag, Partition.contiguous)),
)
@settings(max_examples=60, deadline=None)
def test_tiles_cover_what_is_visible_in_chunks_once(lengths, degree, chunk, window, kind):
    check_tiles(lengths, degree, chunk, window, kind)


def check_tiles(lengths, degree, chunk, window, kind):
    segments = [kind(lengths, degree).segments(member) for member in range(degree)]
    for q in segments:
        for k in [*segments, whole(lengths)]:
            tilings = tiles_between(q, k, causal=True, window=window, chunk=chunk)
            assert (seen(tilings, q.rows, k.rows) == visible(q, k, window, chunk)).all()
            for tiling in tilings:
                assert_one_launch(tiling)


@pytest.mark.parametrize("chunk", [16, 48, 96])
def test_chunks_are_documents_of_one_launch(chunk):
    """Whatever their number, where zigzag cuts them as it cuts documents, and all of them where one rank has them."""
    shares = Partition.zigzag([96 * 8, 96 * 4], 4)
    for member in range(4):
        (tiling,) = tiles_between(shares.segments(member), whole([96 * 8, 96 * 4]), causal=True, chunk=chunk)
        assert (tiling.left, tiling.right) == (None, 0)
    (tiling,) = tiles_between(whole([96 * 8]), whole([96 * 8]), causal=True, chunk=chunk)
    assert len(tiling) == 96 * 8 // chunk and tiling.q_rows() == tiling.k_rows() == slice(0, 96 * 8)


@given(
    lengths=LENGTHS,
    degree=st.integers(2, 5),
    inner=st.sampled_from((1, 2)),
    mask=st.builds(Mask, st.just(True), st.one_of(st.none(), st.integers(1, 20)), st.integers(1, 40)),
    padding=st.integers(0, 5),
)
@settings(max_examples=50, deadline=None)
def test_members_send_the_rows_of_chunks_that_others_began(lengths, degree, inner, mask, padding):
    check_members(lengths, degree, inner, mask, padding)


def check_members(lengths, degree, inner, mask, padding):
    pad_to = max(lengths) + padding if padding else None
    group = Group(tuple(range(degree * inner)), tuple(range(len(lengths))), tuple(lengths), pad_to=pad_to)
    every = [Members(ShardPart(group, 0, slot, 0, 0), mask, CPU, inner) for slot in range(0, degree * inner, inner)]
    for reader in every:
        mine = reader.real_segments(reader.member)
        assert len(reader.window_rows.rows_to_send[reader.member]) == 0
        for owner in every:
            theirs = owner.segments(owner.member)
            needed = np.flatnonzero(visible(mine, theirs, mask.window, mask.chunk).any(0)).tolist()
            sent = owner.window_rows.rows_to_send[reader.member] if owner is not reader else reader.window_rows.own_rows
            assert sent.tolist() == needed
            assert owner is reader or reader.window_rows.receive_counts[owner.member] == len(needed)


TILES, MEMBERS = "attention.tiles", "attention.call"
MUTATIONS = [
    (TILES, "q, k = _cut_at_chunks(q, k, chunk)", "window = min(window or chunk, chunk)"),  # a window, not a chunk
    (TILES, "segments.start // chunk, -(-", "0 * segments.start, -(-"),
    (TILES, "(number + 1) * chunk", "(number + 1) * chunk - 1"),
    (TILES, "* -(-longest // chunk) + number", "+ number"),
    (MEMBERS, "runs.start - runs.start % chunk", "runs.start"),
    (MEMBERS, "runs.start - runs.start % chunk", "runs.start - chunk + 1"),
]


@pytest.mark.parametrize(("module", "old", "new"), MUTATIONS, ids=[new for _, _, new in MUTATIONS])
def test_every_edge_of_a_chunk_is_noticed(module, old, new):
    with mutated((module, old, new)), pytest.raises((AssertionError, IndexError, ValueError)):
        check_tiles([13, 40, 7], 3, 9, None, Partition.zigzag)
        check_members([13, 40, 7], 3, 1, Mask(chunk=9), 0)


def test_nothing_is_sent_where_every_chunk_lies_in_one_rank():
    group = Group((0, 1, 2, 3), (0,), (64 * 8,))
    for slot in range(4):
        members = Members(ShardPart(group, 0, slot, 0, 0), Mask(chunk=64), CPU)
        assert members.has_narrow_window
        assert sum(members.window_rows.receive_counts) == len(members.window_rows.all_rows_to_send) == 0
        assert members.window_rows.row_count == members.counts[slot]


NARROW = [((4096,), 8, 256, True), ((4096,), 8, 512, True), ((4096,), 8, 1024, True), ((4096,), 8, 2048, False)]


@pytest.mark.parametrize(("lengths", "degree", "chunk", "narrow"), [*NARROW, ((4096,), 1, 64, False)])
def test_chunks_are_narrow_where_less_is_sent_than_round_a_ring(lengths, degree, chunk, narrow):
    assert (fetched_share(lengths, degree, None, chunk) < 1) == narrow


def test_a_chunk_of_the_longest_document_is_none():
    assert Mask(chunk=40).for_lengths((40, 7)) == Mask() and Mask(True, 50, 39).for_lengths((40, 7)) == Mask(chunk=39)
