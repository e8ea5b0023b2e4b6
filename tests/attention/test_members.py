"""Geometry of groups: heads are dealt once, rows exchanged land in document order, rings see few tiles."""

import itertools

import numpy as np
import pytest
import torch

from longspan import Group, MicroBatch
from longspan.attention.all_to_all import HeadSplit
from longspan.attention.call import Dropout, Members, _absorb_word
from longspan.attention.tiles import Launch, Mask, Tile, Tiling, Tokens
from longspan.comm import SequenceShard

CPU = torch.device("cpu")
LENGTHS = [(64,), (13, 1, 40, 2, 7), (1,), (5, 200, 5)]
LEVELS = [(2, 2), (4, 2), (2, 4), (2, 3), (3, 2), (1, 4), (4, 1), (6, 1), (1, 6)]


def members_of_group(lengths, inner, outer, mask=Mask(), **options):  # noqa: B008
    """The members of every member of a group."""
    degree = inner * outer
    batch = MicroBatch((Group(tuple(range(degree)), tuple(range(len(lengths))), lengths, **options),))
    parts = (SequenceShard(batch, slot, -1, CPU).parts[0] for slot in range(degree))
    return [Members(part, mask, CPU, inner) for part in parts]


@pytest.mark.parametrize("heads, kv_heads", [(12, 12), (12, 4), (12, 1), (12, 6), (32, 8), (64, 8), (24, 2), (8, 8)])
def test_every_query_head_is_dealt_once_with_the_key_value_head_that_it_uses(heads, kv_heads):
    for members in (m for m in range(1, heads + 1) if heads % m == 0):
        split = HeadSplit(heads, kv_heads, members)
        dealt = [head for head in range(kv_heads) for _ in range(split.kv_copies)]
        assert len(dealt) == members * split.member_kv_heads, "every head as often"
        uses = [dealt[run] for run in range(len(dealt)) for _ in range(split.member_heads // split.member_kv_heads)]
        assert uses == [head * kv_heads // heads for head in range(heads)], (heads, kv_heads, members)
        for at_most in (1, 2, 3, 4):
            slices = split.slice_count(at_most)
            assert slices <= at_most and split.member_heads % slices == 0
            assert split.member_kv_heads % slices == 0 or slices % split.member_kv_heads == 0, (
                "a slice has whole runs, or a part of one"
            )
            assert slices // split.slices_per_kv_head(slices) in (slices, split.member_kv_heads), (
                "a head is shared where there are too few"
            )


def test_heads_are_cut_as_often_as_they_can_be():
    cut = {
        (32, 8, 4): (2, 4),
        (32, 8, 8): (2, 4),
        (64, 8, 8): (2, 4),
        (12, 6, 2): (1, 3),
        (8, 8, 8): (1, 1),
        (12, 4, 2): (2, 2),
    }
    for shape, slices in cut.items():
        assert (HeadSplit(*shape).slice_count(2), HeadSplit(*shape).slice_count(4)) == slices, shape
    assert [HeadSplit(32, 8, 8).slices_per_kv_head(n) for n in (1, 2, 4)] == [1, 2, 4] and HeadSplit(
        32, 8, 4
    ).slices_per_kv_head(2) == 1


@pytest.mark.parametrize("partition", ["zigzag", "contiguous"])
@pytest.mark.parametrize("inner, outer", LEVELS)
def test_exchanged_rows_land_in_document_order(inner, outer, partition):
    for lengths in LENGTHS:
        for members in members_of_group(lengths, inner, outer, partition=partition):
            shares = members.part.group.shares
            first = members.member * inner
            arriving = np.concatenate([shares.rows(first + i) for i in range(inner)])
            segments = members.segments(members.member)
            starts = np.cumsum((0, *lengths))
            expected = starts[np.repeat(segments.document, segments.stop - segments.start)] + segments.positions
            landed, back = arriving, arriving
            if members.arrival_orders is not None:
                landed = arriving[members.arrival_orders[0].numpy()]
                back = landed[members.arrival_orders[1].numpy()]
            assert (back == arriving).all()
            assert (landed == expected).all() and len(arriving) == members.counts[members.member]
            assert inner == 1 or (np.diff(landed) > 0).all()
            assert sum(members.inner_counts) == len(arriving)


@pytest.mark.parametrize("inner, outer", [(2, 2), (4, 2), (2, 4), (3, 2), (2, 3), (6, 1)])
def test_zigzag_composes_with_levels(inner, outer):
    """A neighbourhood holds two runs of a document, or one where it is the group; a block takes a tile a document."""
    lengths = (48 * inner * outer, 7, 96)
    for members in members_of_group(lengths, inner, outer):
        assert len(members.segments(members.member)) <= len(lengths) * (2 if outer > 1 else 1)
        for owner in range(outer):
            assert len(members.launches(owner)) <= (1 if owner == members.member else 2)
            assert sum(len(launch.tiles) for launch in members.launches(owner)) <= len(lengths)


@pytest.mark.parametrize("partition", ["zigzag", "contiguous"])
@pytest.mark.parametrize("window", [1, 2, 5, 30])
def test_a_halo_is_what_is_seen_in_one_band_a_run(window, partition):
    for lengths in LENGTHS:
        for inner, outer in ((1, 4), (2, 3)):
            for pad_to in (None, max(lengths) + 3):
                group = members_of_group(lengths, inner, outer, Mask(True, window), partition=partition, pad_to=pad_to)
                for members in group:
                    check_window_rows(members, group, window)


def check_window_rows(members, group, window):
    window_rows, keys = members.window_rows, members.visible_rows(members.member)
    arriving = []
    for owner in group:
        if owner.part.member % owner.inner == members.part.member % members.inner:
            mine = owner.member == members.member
            rows = (window_rows.own_rows if mine else owner.window_rows.rows_to_send[members.member]).numpy()
            assert rows.tolist() == seen_rows(members, owner.member, window)
            assert window_rows.receive_counts[owner.member] == (0 if mine else len(rows))
            segments = owner.segments(owner.member)
            held_rows = zip(
                segments.document.repeat(segments.stop - segments.start)[rows], segments.positions[rows], strict=True
            )
            arriving.insert(0, [*held_rows]) if mine else arriving.append([*held_rows])
    places = np.concatenate([window_rows.own_places.numpy(), window_rows.received_places.numpy()])
    landed = [list(itertools.chain(*arriving))[i] for i in np.argsort(places)]
    assert landed == list(zip(keys.document.repeat(keys.stop - keys.start), keys.positions, strict=True))
    assert window_rows.row_count == len(landed) and len(window_rows.rows_to_send[members.member]) == 0
    assert {(launch.left, launch.right) for launch in window_rows.launches} <= {
        (None, None),
        (None, 0),
        (window - 1, 0),
        (window - 1, None),
    }


def seen_rows(members, owner, window):
    """Rows of the owner that some row here sees, one by one."""
    lengths = np.asarray(members.part.group.lengths)
    mine, theirs = members.segments(members.member), members.segments(owner)
    q, k = ((s.document.repeat(s.stop - s.start), s.positions) for s in (mine, theirs))
    ago = q[1][:, None] - k[1]
    seen = (q[0][:, None] == k[0]) & (ago >= 0) & (ago < window) & (q[1] < lengths[q[0]])[:, None]
    return np.flatnonzero(seen.any(0)).tolist()


NARROW = [((4096,), 8, 512, True), ((4096,), 8, 514, False), ((4096,), 8, None, False), ((4,), 2, 1, True)]


@pytest.mark.parametrize("lengths, degree, window, narrow", NARROW)
def test_a_window_is_narrow_where_half_of_a_ring_and_twice_the_own_rows_would_do(lengths, degree, window, narrow):
    group = members_of_group(lengths, 1, degree, Mask(True, window))
    assert [members.has_narrow_window for members in group] == [narrow] * degree
    if narrow:  # the bounds hold
        foreign_rows = [len(members.window_rows.received_places) for members in group]
        assert 2 * sum(foreign_rows) <= (degree - 1) * sum(lengths) and sum(foreign_rows) <= 2 * sum(lengths)


SPLITMIX64 = [(0, 0, 16294208416658607535), (1234567, 0, 6457827717110365317), (1234567, 1, 3203168211198807973)]


@pytest.mark.parametrize("seed, word, expected", SPLITMIX64)
def test_the_hash_of_dropout_is_splitmix64(seed, word, expected):
    """The published outputs of the generator: a mask is the same in every version."""
    assert int(_absorb_word(seed, torch.tensor(word))) % 2**64 == expected


def test_dropout_drops_at_its_rate_whatever_the_head_document_or_position():
    rows, heads = 300, 8
    tiling = Tiling.from_tiles((Tile(0, rows, 0, rows),))
    tokens = Tokens(np.repeat([3, 1 << 40], rows // 2), np.arange(rows), np.arange(rows) + 100_000)
    launch = Launch(tiling, CPU, lambda: tokens)
    for rate in (0.1, 0.5, 0.9):
        is_kept = Dropout(rate, seed=-7).factors(launch, launch.tiles[0], heads, torch.float64) > 0
        for dim in ((1, 2), (0, 2), (0, 1)):
            shares = 1 - is_kept.double().mean(dim)
            count = is_kept.numel() / len(shares)
            assert (shares - rate).abs().max() < 5 * (rate * (1 - rate) / count) ** 0.5, (rate, dim)
    half = Dropout(0.5, seed=-7, first_head=3).factors(launch, launch.tiles[0], 2, torch.float64)
    assert torch.equal(half, Dropout(0.5, seed=-7).factors(launch, launch.tiles[0], heads, torch.float64)[3:5])


def test_a_launch_says_where_tiles_begin_and_how_long_they_get() -> None:
    launch = Launch(Tiling.from_tiles((Tile(0, 3, 0, 5), Tile(3, 4, 5, 7), Tile(4, 8, 7, 8))), CPU)
    assert launch.max_lengths == (4, 5)
    assert [ends.tolist() for ends in launch.cu_seqlens] == [[0, 3, 4, 8], [0, 5, 7, 8]]
