"""Tiles and members of groups: tiles cover what rows see once, in few launches; members send what others see of them.

Under windows, chunks (every so many positions of a document are as a document of their own) and spans, whose rows see
the later rows of their span.
"""

from itertools import pairwise, product
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings, strategies as st

from longspan import Group, MicroBatch, attend
from longspan.attention.all_to_all import HeadSplit
from longspan.attention.masks import (
    Mask,
    _band_tiles,
    _drop_idle_limits,
    entry_tilings,
    make_tilings,
    span_tiles,
    split_left_limits,
    tilings_between,
)
from longspan.attention.members import Members
from longspan.attention.tiles import Launch, Tile, Tiling
from longspan.comm import SequenceShard
from longspan.comm.shard import ShardPart
from longspan.errors import AttentionError, LayoutError
from longspan.layout import Partition, Segments
from longspan.layout.segments import Spans
from longspan.plan.messages import fetched_share
from tests.mutation import mutated

CPU = torch.device("cpu")
LENGTHS = [(16,), (1,), (3, 1, 2), (7, 16, 5, 1, 30), (2,) * 9]


def seen(tilings, q_rows, k_rows):
    count = np.zeros((q_rows, k_rows), dtype=int)
    for tiling in tilings:
        for tile in tiling.tiles:
            first = tile.keys - 1 - (tile.queries - 1 - np.arange(tile.queries)[:, None] + tile.slack) // tile.stride
            keys = np.arange(tile.keys)
            mask = np.ones((tile.queries, tile.keys), dtype=int)
            if tile.left is not None:
                mask &= keys >= first - tile.left
            if tile.right is not None:
                mask &= keys <= first + tile.right
            assert mask.any(0).all() and mask.any(1).all(), f"a row or key of {tile} sees nothing"
            count[tile.q_start : tile.q_stop, tile.k_start : tile.k_stop] += mask
    return count


def columns(segments):
    return np.repeat(segments.document, segments.stop - segments.start), segments.positions


def wanted(q, k, mask):
    (q_doc, q_pos), (k_doc, k_pos) = columns(q), columns(k)
    ago = q_pos[:, None] - k_pos
    visible = (q_doc[:, None] == k_doc) & ((ago >= 0) | (not mask.causal))
    if mask.window is not None:
        visible &= ago < mask.window
    if mask.chunk is not None:
        visible &= q_pos[:, None] // mask.chunk == k_pos // mask.chunk
    return visible


def in_spans(runs, q, k, before=None):
    """Which rows of their spans rows of q see besides: later ones, and those `before` positions or more before them."""
    (q_doc, q_pos), (k_doc, k_pos) = columns(q), columns(k)
    visible = np.zeros((len(q_doc), len(k_doc)), dtype=bool)
    for d, of_document in runs.items():
        for start, stop in of_document:
            rows, keys = ((doc == d) & (pos >= start) & (pos < stop) for doc, pos in ((q_doc, q_pos), (k_doc, k_pos)))
            visible |= rows[:, None] & keys & (k_pos > q_pos[:, None])
            if before is not None:
                visible |= rows[:, None] & keys & (k_pos <= q_pos[:, None] - before)
    return visible


def whole(lengths):
    lengths = np.asarray(lengths)
    return Segments(np.arange(len(lengths)), np.zeros_like(lengths), lengths, np.cumsum(lengths) - lengths)


def check_covered(tilings, q, k, visible):
    assert (seen(tilings, q.rows, k.rows) == visible).all(), (q, k)
    for tiling in tilings:
        assert_one_launch(tiling)


def assert_one_launch(tiling):
    assert len({(tile.left, tile.right) for tile in tiling.tiles}) == 1
    for rows in (tiling.q_rows(), tiling.k_rows()):
        listed = np.arange(rows.start, rows.stop) if isinstance(rows, slice) else rows
        assert len(set(listed.tolist())) == len(listed)
    packed = tiling.packed_tiling().tiles
    assert packed[0].q_start == packed[0].k_start == 0
    for before, after in pairwise(packed):
        assert before.q_stop == after.q_start and before.k_stop == after.k_start


def shares_of(kind, lengths, degree):
    shares = getattr(Partition, kind)(lengths, degree)
    return [shares.segments(member) for member in range(degree)]


def check_tiles(lengths, degree, mask, kind="zigzag"):
    segments = shares_of(kind, lengths, degree)
    for q, k in product(segments, [*segments, whole(lengths)]):
        limits = {"causal": mask.causal, "window": mask.window, "chunk": mask.chunk}
        check_covered(tilings_between(q, k, **limits), q, k, wanted(q, k, mask))


documents_lengths = st.lists(st.integers(1, 60), min_size=1, max_size=4).map(tuple)
kinds = st.sampled_from(("zigzag", "contiguous"))
masks = st.builds(Mask, st.just(True), *(st.none() | st.integers(1, most) for most in (40, 80)), st.just("later"))


@given(lengths=documents_lengths, degree=st.integers(1, 6), mask=masks | st.just(Mask(False)), kind=kinds)
@example(lengths=(2,) * 9, degree=5, mask=Mask(True, 1), kind="zigzag")
@example(lengths=(3, 1, 2), degree=3, mask=Mask(True, 100), kind="contiguous")
@settings(max_examples=30, deadline=None)
def test_tiles_cover_what_is_visible_once(lengths, degree, mask, kind):
    check_tiles(lengths, degree, mask, kind)


@given(lengths=documents_lengths, degree=st.integers(1, 5), stride=st.integers(1, 9), chosen=st.booleans(), kind=kinds)
@example(lengths=(3, 4, 5, 8, 1), degree=2, stride=4, chosen=False, kind="zigzag")
@settings(max_examples=30, deadline=None)
def test_tiles_of_entries_cover_those_whose_windows_ended(lengths, degree, stride, chosen, kind):
    counts = np.asarray(lengths) // stride
    for q in shares_of(kind, lengths, degree):
        tilings = entry_tilings(q, counts, stride, chosen=chosen)
        document, position = columns(q)
        owner = np.repeat(np.arange(len(counts)), counts)
        number = np.concatenate([np.arange(count) for count in counts])
        ends = number * stride + stride - 1
        visible = (document[:, None] == owner) & (position[:, None] >= ends)
        if not chosen:
            check_covered(tilings, q, whole(counts), visible)
        pieces = [piece for tiling in tilings for tile in tiling.tiles for piece in tile.pieces(3)]
        covered = seen([SimpleNamespace(tiles=pieces)], q.rows, int(counts.sum()))
        assert (covered[visible] == 1).all() and (chosen or not covered[~visible].any())
        assert len(tilings) <= 4, tilings


@pytest.mark.parametrize("window", [1, 2, 12, 100])
def test_each_way_to_group_tiles_under_a_window_covers_the_same(window):
    for lengths, degree in product(LENGTHS, (1, 2, 4)):
        for q, k in product(shares_of("zigzag", lengths, degree), repeat=2):
            banded = _band_tiles(q, k, window)
            for arrays in (banded, _drop_idle_limits(banded), split_left_limits(_drop_idle_limits(banded))):
                check_covered(make_tilings(arrays), q, k, wanted(q, k, Mask(True, window)))


@given(
    lengths=documents_lengths,
    degree=st.integers(1, 4),
    window=st.none() | st.integers(1, 40),
    size=st.sampled_from((1, 3, 16)),
    of_keys=st.booleans(),
)
@settings(max_examples=20, deadline=None)
def test_blocks_hold_every_row_once_the_costliest_first(lengths, degree, window, size, of_keys):
    shares = Partition.zigzag(lengths, degree)
    for tiling in tilings_between(shares.segments(0), shares.segments(degree - 1), causal=True, window=window):
        held, costs = [], []
        for tile, start in tiling.blocks(size, of_keys=of_keys):
            t = tiling.tiles[tile]
            stop = min(start + size, t.keys if of_keys else t.queries)
            held += [(int(tile), row) for row in range(start, stop)]
            own = seen_raw(t)[t.q_start :, t.k_start :]
            met = np.flatnonzero((own[:, start:stop] if of_keys else own[start:stop].T).any(1))
            costs.append(met.max() - met.min() + 1)
            # A last block that is not full is counted as if it were, to the end of the tile.
        rows = [t.keys if of_keys else t.queries for t in tiling.tiles]
        assert sorted(held) == [(i, row) for i, count in enumerate(rows) for row in range(count)]
        assert all(later <= earlier + size - 1 for earlier, later in pairwise(costs)), (tiling, costs)


def seen_raw(tile):
    return seen([Tiling.from_tiles((tile,))], tile.q_stop, tile.k_stop)


def test_a_piece_of_a_tile_sees_what_its_rows_saw():
    masks = ((None, None), (None, 0), (4, 0), (3, 2))
    tiles = [Tile(3, 13, 5, 20, *masks[0]), Tile(3, 13, 5, 20, *masks[1]), Tile(2, 9, 0, 11, *masks[2])]
    for tile, rows in product((*tiles, Tile(0, 8, 0, 6, *masks[3])), (1, 3, 100)):
        count = np.zeros_like(seen_raw(tile))
        for piece in tile.pieces(rows):
            assert piece.queries <= rows
            count[: piece.q_stop, : piece.k_stop] += seen_raw(piece)
        assert (count == seen_raw(tile)).all(), (tile, rows)


# ---- few launches


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("degree", [1, 2, 5, 8])
def test_two_zigzag_members_need_one_launch(causal, degree):
    lengths = [16 * degree, 6 * degree, 2 * degree]
    shares = Partition.zigzag(lengths, degree)
    for q, k in product(range(degree), repeat=2):
        (tiling,) = tilings_between(shares.segments(q), shares.segments(k), causal=causal)
        assert len(tiling.tiles) == len(lengths), (q, k, tiling)
    for q, k in product(shares_of("zigzag", [64], degree), [whole([64])]):  # one document needs no gather
        for tiling in tilings_between(q, k, causal=causal):
            assert isinstance(tiling.q_rows(), slice) and isinstance(tiling.k_rows(), slice)


@pytest.mark.parametrize("kind", ["zigzag", "contiguous"])
@pytest.mark.parametrize("degree, window", [(2, 37), (4, 90)])
def test_launches_under_a_window_do_not_grow_with_the_documents(kind, degree, window):
    draw = np.random.default_rng(degree)
    most = {}
    for documents in (64, 512):
        segments = shares_of(kind, draw.integers(30, 200, documents), degree)
        most[documents] = max(
            len(tilings_between(q, k, causal=True, window=window)) for q in segments for k in segments
        )
    assert most[512] <= 6 and most[512] <= most[64] + 1, most


@pytest.mark.parametrize("chunk", [16, 48, 96])
def test_chunks_are_documents_of_one_launch(chunk):
    shares = Partition.zigzag([96 * 8, 96 * 4], 4)
    for member in range(4):
        (tiling,) = tilings_between(shares.segments(member), whole([96 * 8, 96 * 4]), causal=True, chunk=chunk)
        assert (tiling.left, tiling.right) == (None, 0)
    (tiling,) = tilings_between(whole([96 * 8]), whole([96 * 8]), causal=True, chunk=chunk)
    assert len(tiling) == 96 * 8 // chunk and tiling.q_rows() == tiling.k_rows() == slice(0, 96 * 8)


def test_whole_spans_are_one_launch_however_many():
    spans = Spans.from_documents({d: [(i, i + 5) for i in range(2, 90, 7)] for d in range(6)}, range(6), (97,) * 6)
    (tiling,) = span_tiles(whole((97,) * 6), whole((97,) * 6), spans)
    assert len(tiling) == 6 * 13 and (tiling.left, tiling.right) == (0, None)


def test_a_launch_says_where_tiles_begin_and_how_long_they_get() -> None:
    launch = Launch(Tiling.from_tiles((Tile(0, 3, 0, 5), Tile(3, 4, 5, 7), Tile(4, 8, 7, 8))), CPU)
    assert launch.max_lengths == (4, 5)
    assert [ends.tolist() for ends in launch.cu_seqlens] == [[0, 3, 4, 8], [0, 5, 7, 8]]


# ---- rows that members send under windows, chunks and spans


@st.composite
def spans_of_documents(draw):
    lengths = draw(documents_lengths)
    runs = {}
    for d, length in enumerate(lengths):
        cuts = sorted(draw(st.sets(st.integers(0, length), max_size=6)))
        runs[d] = list(zip(cuts[::2], cuts[1::2], strict=False))
    return lengths, runs


@given(documents=spans_of_documents(), degree=st.integers(1, 5), kind=kinds, before=st.none() | st.integers(1, 12))
@settings(max_examples=30, deadline=None)
def test_tiles_cover_rows_of_spans_once(documents, degree, kind, before):
    lengths, runs = documents
    spans = Spans.from_documents(runs, range(len(lengths)), lengths)
    segments = shares_of(kind, lengths, degree)
    for q, k in product(segments, [*segments, whole(lengths)]):
        check_covered(span_tiles(q, k, spans, before), q, k, in_spans(runs, q, k, before))


def check_members(lengths, degree, inner, mask, padding=0, runs=None, partition="zigzag"):
    """Each member is sent just the rows that it sees, and they land in document order."""
    pad_to = max(lengths) + padding if padding else None
    slots = tuple(range(degree * inner))
    group = Group(slots, tuple(range(len(lengths))), lengths, pad_to=pad_to, partition=partition)
    spans = Spans.from_documents(runs or {}, group.documents, lengths)
    every = [Members(ShardPart(group, 0, slot, 0, 0), mask, CPU, inner, spans) for slot in slots[::inner]]
    for reader in every:
        mine, window_rows = reader.real_segments(reader.member), reader.window_rows
        assert len(window_rows.rows_to_send[reader.member]) == 0
        arriving = []
        for owner in every:
            theirs = owner.segments(owner.member)
            rows = window_rows.own_rows if owner is reader else owner.window_rows.rows_to_send[reader.member]
            before = mask.window if mask.spans == "whole" else None
            needed = (wanted(mine, theirs, mask) | in_spans(runs or {}, mine, theirs, before)).any(0)
            assert rows.tolist() == np.flatnonzero(needed).tolist()
            assert window_rows.receive_counts[owner.member] == (0 if owner is reader else len(rows))
            document, position = columns(theirs)
            sent = [*zip(document[rows.numpy()], position[rows.numpy()], strict=True)]
            arriving = [*sent, *arriving] if owner is reader else [*arriving, *sent]
        places = np.concatenate([window_rows.own_places.numpy(), window_rows.received_places.numpy()])
        assert [arriving[i] for i in np.argsort(places)] == list(
            zip(*columns(reader.visible_rows(reader.member)), strict=True)
        )
        assert window_rows.row_count == len(arriving)
        if runs is None and mask.chunk is None:
            band = mask.window - 1
            limits = {(None, None), (None, 0), (band, 0), (band, None)}
            assert {(launch.left, launch.right) for launch in window_rows.launches} <= limits


@given(
    documents=spans_of_documents(),
    degree=st.integers(2, 5),
    inner=st.sampled_from((1, 2)),
    mask=masks.filter(lambda mask: mask != Mask()),
    whole_spans=st.booleans(),
    padding=st.integers(0, 5),
    kind=kinds,
)
@settings(max_examples=25, deadline=None)
def test_members_send_the_rows_that_others_see(documents, degree, inner, mask, whole_spans, padding, kind):
    lengths, runs = documents
    mask = mask._replace(spans="whole") if whole_spans and mask.window is not None else mask
    check_members(lengths, degree, inner, mask, padding, runs if mask.chunk is None and not padding else None, kind)


MUTATIONS = [
    (
        "masks",
        "q, k = _chunk_segments(q, chunk, longest), _chunk_segments(k, chunk, longest)",
        "window = min(window or chunk, chunk)",
    ),  # a window, not a chunk
    ("masks", "first_chunk = segments.start // chunk", "first_chunk = 0 * segments.start"),
    ("masks", "(number + 1) * chunk", "(number + 1) * chunk - 1"),
    ("masks", "* -(-longest // chunk) + number", "+ number"),
    ("members", "runs.start - runs.start % chunk", "runs.start"),
    ("members", "runs.start - runs.start % chunk", "runs.start - chunk + 1"),
]


@pytest.mark.parametrize(("module", "old", "new"), MUTATIONS, ids=[new for _, _, new in MUTATIONS])
def test_every_edge_of_a_chunk_is_noticed(module, old, new):
    with mutated((f"attention.{module}", old, new)), pytest.raises((AssertionError, IndexError, ValueError)):
        check_tiles((13, 40, 7), 3, Mask(chunk=9))
        check_members((13, 40, 7), 3, 1, Mask(chunk=9))


def members_of_group(lengths, inner, outer, mask=Mask(), **options):  # noqa: B008
    group = Group(tuple(range(inner * outer)), tuple(range(len(lengths))), lengths, **options)
    return [Members(ShardPart(group, 0, slot, 0, -1), mask, CPU, inner) for slot in group.slots]


NARROW = [
    *(((4096,), 8, Mask(True, window), window == 512) for window in (512, 514, None)),
    *(((4096,), 8, Mask(chunk=chunk), chunk < 2048) for chunk in (256, 512, 1024, 2048)),
    ((4,), 2, Mask(True, 1), True),
    ((4096,), 1, Mask(chunk=64), False),
]


@pytest.mark.parametrize(("lengths", "degree", "mask", "narrow"), NARROW, ids=str)
def test_a_mask_is_narrow_where_half_of_a_ring_and_twice_the_own_rows_would_do(lengths, degree, mask, narrow):
    assert (fetched_share(lengths, degree, mask.window, mask.chunk) < 1) == narrow
    group = members_of_group(lengths, 1, degree, mask)
    assert [members.has_narrow_window for members in group] == [narrow] * degree
    if narrow:  # the bounds hold
        foreign_rows = [len(members.window_rows.received_places) for members in group]
        assert 2 * sum(foreign_rows) <= (degree - 1) * sum(lengths) and sum(foreign_rows) <= 2 * sum(lengths)


def test_a_chunk_of_the_longest_document_is_none():
    assert Mask(chunk=40).for_lengths((40, 7)) == Mask() and Mask(True, 50, 39).for_lengths((40, 7)) == Mask(chunk=39)


# ---- spans of shards


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


def test_spans_stay_with_a_shard_that_is_padded_and_refuse_chunks():
    bound = shard().with_spans({9: [(2, 5)], 12: [(0, 99)]})  # document 12 is of another micro-batch
    padded = bound.with_padding(minimum=20)
    assert padded.spans is bound.spans and padded.has_spans and not shard().has_spans and shard().spans is None
    assert len(padded.spans_of(padded.parts[1])) == 0 and not shard().with_spans({}).has_spans
    x = torch.zeros(20, 1, 4)
    with pytest.raises(AttentionError, match="chunk is 4 and the shard has 1 spans of rows that see each other"):
        attend(x, x, x, padded, chunk=4)


# ---- slices of heads, and levels


CUT = {  # heads, key/value heads and members: slices of at most 2 and of at most 4
    (32, 8, 4): (2, 4),
    (32, 8, 8): (2, 4),
    (64, 8, 8): (2, 4),
    (12, 6, 2): (1, 3),
    (8, 8, 8): (1, 1),
    (12, 4, 2): (2, 2),
}


def test_heads_are_cut_as_often_as_they_can_be():
    for shape, slices in CUT.items():
        assert (HeadSplit(*shape).slice_count(2), HeadSplit(*shape).slice_count(4)) == slices, shape
    assert [HeadSplit(32, 8, 8).slices_per_kv_head(n) for n in (1, 2, 4)] == [1, 2, 4]
    assert HeadSplit(32, 8, 4).slices_per_kv_head(2) == 1


@pytest.mark.parametrize("inner, outer", [(2, 2), (4, 2), (2, 4), (3, 2), (6, 1)])
def test_zigzag_composes_with_levels(inner, outer):
    lengths = (48 * inner * outer, 7, 96)
    for members in members_of_group(lengths, inner, outer):
        assert len(members.segments(members.member)) <= len(lengths) * (2 if outer > 1 else 1)
        for owner in range(outer):
            assert len(members.launches(owner)) <= (1 if owner == members.member else 2)
            assert sum(len(launch.tiles) for launch in members.launches(owner)) <= len(lengths)
