"""Tiles cover exactly what rows may see, and the common partitions cover it in one launch."""

import itertools
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.attention.tiles import (
    Tile,
    Tiling,
    _band_tiles,
    _drop_idle_limits,
    make_tilings,
    split_left_limits,
    tiles_between,
)
from longspan.layout import Partition, Segments

LENGTHS = [(16,), (1,), (3, 1, 2), (7, 16, 5, 1, 30), (2,) * 9]
DEGREES = [1, 2, 3, 4, 5, 8]


def seen(tilings, q_rows, k_rows):
    """How often each query row sees each key row."""
    count = np.zeros((q_rows, k_rows), dtype=int)
    for tiling in tilings:
        for tile in tiling.tiles:
            first = np.arange(tile.queries)[:, None] + tile.keys - tile.queries
            keys = np.arange(tile.keys)
            mask = np.ones((tile.queries, tile.keys), dtype=int)
            if tile.left is not None:
                mask &= keys >= first - tile.left
            if tile.right is not None:
                mask &= keys <= first + tile.right
            assert mask.any(0).all() and mask.any(1).all(), f"a row or key of {tile} sees nothing"
            count[tile.q_start : tile.q_stop, tile.k_start : tile.k_stop] += mask
    return count


def wanted(q, k, causal, window):
    def columns(segments):
        document = np.repeat(segments.document, segments.stop - segments.start)
        return document, segments.positions

    (q_doc, q_pos), (k_doc, k_pos) = columns(q), columns(k)
    mask = q_doc[:, None] == k_doc
    ago = q_pos[:, None] - k_pos
    if causal:
        mask &= ago >= 0
    if window is not None:
        mask &= ago < window
    return mask.astype(int)


def whole(lengths):
    lengths = np.asarray(lengths)
    return Segments(np.arange(len(lengths)), np.zeros_like(lengths), lengths, np.cumsum(lengths) - lengths)


@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4),
    degree=st.integers(1, 4),
    window=st.none() | st.integers(1, 40),
    size=st.sampled_from((1, 3, 16)),
    of_keys=st.booleans(),
)
@settings(max_examples=75, deadline=None)
def test_blocks_hold_every_row_once_the_costliest_first(lengths, degree, window, size, of_keys):
    shares = Partition.zigzag(lengths, degree)
    tilings = tiles_between(shares.segments(0), shares.segments(degree - 1), causal=True, window=window)
    for tiling in tilings:
        held, costs = [], []
        for tile, start in tiling.blocks(size, of_keys=of_keys):
            t = tiling.tiles[tile]
            stop = min(start + size, t.keys if of_keys else t.queries)
            held += [(int(tile), row) for row in range(start, stop)]
            own = seen([Tiling.from_tiles([t])], t.q_stop, t.k_stop)[t.q_start :, t.k_start :]
            met = np.flatnonzero((own[:, start:stop] if of_keys else own[start:stop].T).any(1))
            costs.append(met.max() - met.min() + 1)
            # A last block that is not full is counted as if it were, to the end of the tile.
        assert sorted(held) == [
            (i, row) for i, t in enumerate(tiling.tiles) for row in range(t.keys if of_keys else t.queries)
        ]
        assert all(later <= earlier + size - 1 for earlier, later in pairwise(costs)), (tiling, costs)


@pytest.mark.parametrize("make", [Partition.zigzag, Partition.contiguous], ids=["zigzag", "contiguous"])
@pytest.mark.parametrize("causal, window", [(False, None), (True, None), (True, 1), (True, 2), (True, 5), (True, 100)])
def test_tiles_cover_what_is_visible_once(make, causal, window):
    for lengths in LENGTHS:
        for degree in DEGREES:
            shares = make(lengths, degree)
            segments = [shares.segments(member) for member in range(degree)]
            for q in segments:
                for k in [*segments, whole(lengths)]:
                    tilings = tiles_between(q, k, causal=causal, window=window)
                    covered = seen(tilings, q.rows, k.rows)
                    assert (covered == wanted(q, k, causal, window)).all(), (lengths, degree, q, k)
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


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("degree", DEGREES)
def test_two_zigzag_members_need_one_launch(causal, degree):
    lengths = [16 * degree, 6 * degree, 2 * degree]
    shares = Partition.zigzag(lengths, degree)
    for q in range(degree):
        for k in range(degree):
            (tiling,) = tiles_between(shares.segments(q), shares.segments(k), causal=causal)
            assert len(tiling.tiles) == len(lengths), (q, k, tiling)


@pytest.mark.parametrize("make", [Partition.zigzag, Partition.contiguous], ids=["zigzag", "contiguous"])
@pytest.mark.parametrize("degree, window", [(2, 37), (4, 37), (4, 90), (8, 60)])
def test_launches_under_a_window_do_not_grow_with_the_documents(make, degree, window):
    """However long the documents are, their tiles have few masks: whole, causal, the own band, or one last key."""
    draw = np.random.default_rng(degree)
    most = {}
    for documents in (1, 8, 64, 512):
        shares = make(draw.integers(30, 200, documents), degree)
        segments = [shares.segments(member) for member in range(degree)]
        tilings = [tiles_between(q, k, causal=True, window=window) for q in segments for k in segments]
        most[documents] = max(map(len, tilings))
    assert most[512] <= 6 and most[512] <= most[64] + 1, most


@pytest.mark.parametrize("window", [1, 2, 5, 12, 100])
def test_each_way_to_group_tiles_under_a_window_covers_the_same(window):
    for lengths in LENGTHS:
        for degree in DEGREES:
            segments = [Partition.zigzag(lengths, degree).segments(member) for member in range(degree)]
            for q, k in itertools.product(segments, segments):
                banded = _band_tiles(q, k, window)
                for arrays in (banded, _drop_idle_limits(banded), split_left_limits(_drop_idle_limits(banded))):
                    tilings = make_tilings(arrays)
                    assert (seen(tilings, q.rows, k.rows) == wanted(q, k, True, window)).all(), (lengths, degree, q, k)
                    for tiling in tilings:
                        assert_one_launch(tiling)


def test_one_document_needs_no_gather():
    shares = Partition.zigzag([64], 4)
    for member in range(4):
        for tiling in tiles_between(shares.segments(member), whole([64]), causal=True):
            assert isinstance(tiling.q_rows(), slice) and isinstance(tiling.k_rows(), slice)


def test_a_piece_of_a_tile_sees_what_its_rows_saw():
    for tile in (
        Tile(3, 13, 5, 20),
        Tile(3, 13, 5, 20, right=0),
        Tile(2, 9, 0, 11, left=4, right=0),
        Tile(0, 8, 0, 6, 3, 2),
    ):
        whole_tile = seen_raw(tile)
        for rows in (1, 3, 100):
            count = np.zeros_like(whole_tile)
            for piece in tile.pieces(rows):
                assert piece.queries <= rows
                part = np.zeros_like(whole_tile)
                part[piece.q_start : piece.q_stop, piece.k_start : piece.k_stop] = seen_raw(piece)[
                    piece.q_start :, piece.k_start :
                ]
                count += part
            assert (count == whole_tile).all(), (tile, rows)


def seen_raw(tile):
    return seen([Tiling.from_tiles((tile,))], tile.q_stop, tile.k_stop)
