"""Homes, packings, what all values of geometry have in common, and the calls that docstrings show."""

import copy
import pickle

import numpy as np
import pytest
from hypothesis import given, strategies as st

from longspan.errors import LayoutError
from longspan.layout import Coordinates, Exchange, Layout, Packing, Partition, check_lengths
from tests.layout.strategies import examples, lengths


@pytest.mark.parametrize(
    ("arguments", "slots", "planes"),
    [
        ({"ranks": 1}, 1, ((0,),)),
        ({"ranks": 8, "pp": 2}, 4, ((0, 1, 2, 3), (4, 5, 6, 7))),
        ({"ranks": 8, "pp": 2, "tp": 2}, 2, ((0, 2), (1, 3), (4, 6), (5, 7))),
        ({"ranks": (7, 5, 3, 1), "tp": 2}, 2, ((7, 3), (5, 1))),
        ({"ranks": np.arange(4), "dp_replicate": 2, "ep": 4}, 4, ((0, 1, 2, 3),)),
    ],
)
def test_a_home_counts_its_slots_and_planes(arguments, slots, planes):
    home = Layout(**arguments)
    assert (home.slots, home.planes()) == (slots, planes)


@examples
@given(st.integers(1, 3), st.integers(1, 5), st.integers(1, 4), st.randoms(use_true_random=False))
def test_every_rank_stands_at_one_place(pp, slots, tp, random):
    ranks = random.sample(range(100), pp * slots * tp)
    home = Layout(ranks, pp=pp, tp=tp)
    for rank in ranks:
        at = home.coordinates(rank)
        assert home.rank_at(at.slot, pp=at.pp, tp=at.tp) == rank
        assert rank in home.plane(pp=at.pp, tp=at.tp)
    for groups, count, size in (
        (home.planes(), pp * tp, slots),
        (home.tp_groups(), pp * slots, tp),
        (home.pp_groups(), slots * tp, pp),
    ):
        assert sorted(rank for group in groups for rank in group) == sorted(ranks)
        assert [len(group) for group in groups] == [size] * count


def test_pp_is_slowest_and_tp_fastest():
    home = Layout(ranks=12, pp=2, tp=2)
    assert home.coordinates(11) == Coordinates(pp=1, slot=2, tp=1)
    assert home.tp_groups()[:2] == ((0, 1), (2, 3))
    assert home.pp_groups()[:2] == ((0, 6), (1, 7))
    assert [home.rank_at(slot) for slot in range(3)] == [0, 2, 4] == list(home.plane())  # the first of both


BAD = [  # arguments, what the message must say
    ({"ranks": 6, "tp": 4}, r"6 ranks .* tp 4 x pp 1 = 4; use 4 or 8 ranks"),
    ({"ranks": 8, "tp": 2, "pp": 3}, r"8 ranks .* tp 2 x pp 3 = 6; use 6 or 12 ranks"),
    ({"ranks": 2, "tp": 4}, r"2 ranks .* tp 4 x pp 1 = 4; use 4 ranks"),
    ({"ranks": 8, "ep": 3}, r"ep 3 does not divide 8 slots \(8 ranks / tp 1 / pp 1\); use one of \[1, 2, 4, 8\]"),
    ({"ranks": 12, "tp": 2, "dp_replicate": 4}, r"dp_replicate 4 does not divide 6 slots .* \[1, 2, 3, 6\]"),
    ({"ranks": 0}, r"ranks is 0"),
    ({"ranks": True}, r"ranks is True"),
    ({"ranks": "8"}, r"distinct integers .* \('8'\)"),
    ({"ranks": ()}, r"at least one; got \(\)"),
    ({"ranks": (0, 1, 1)}, r"distinct .* \(0, 1, 1\)"),
    ({"ranks": (0, -1)}, r"from 0.* \(0, -1\)"),
    ({"ranks": (0, 1.5)}, r"integers .* \(0, 1\.5\)"),
    ({"ranks": (0, True)}, r"integers .* \(0, True\)"),
    ({"ranks": [0] * 20}, r"… 20 in all"),
    ({"ranks": 4, "tp": 0}, r"tp is 0; tp is an integer of at least 1"),
    ({"ranks": 4, "tp": 2.0}, r"tp is 2\.0"),
    ({"ranks": 4, "ep": np.bool_(True)}, r"ep is "),
    ({"ranks": 4, "dp_replicate": None}, r"dp_replicate is None"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_degrees_that_do_not_fit_are_refused(arguments, message):
    with pytest.raises(LayoutError, match=message):
        Layout(**arguments)


def test_places_outside_the_home_are_refused():
    home = Layout(ranks=(4, 5, 6, 7), tp=2)
    with pytest.raises(LayoutError, match=r"rank 3 is not in this home of 4 ranks: \(4, 5, 6, 7\)"):
        home.coordinates(3)
    with pytest.raises(LayoutError, match=r"slot 2 .* has 2 \(slot 0 to 1\)"):
        home.rank_at(2)
    with pytest.raises(LayoutError, match=r"tp -1 .* has 2"):
        home.plane(tp=-1)
    with pytest.raises(LayoutError, match=r"pp 1 .* has 1"):
        home.rank_at(0, pp=1)


@pytest.mark.parametrize("given_lengths", [[], (3, 1), range(3, 5), [np.int32(3), 1, np.uint64(7)]], ids=repr)
def test_integers_are_lengths(given_lengths):
    for these in (given_lengths, np.array(given_lengths, dtype=np.uint8)):
        checked = check_lengths(these)
        assert checked == tuple(int(n) for n in given_lengths) and {type(n) for n in checked} <= {int}


REFUSED = [  # lengths, what the message must say
    ([4, 0], r"length 1 is 0 \(int\); .* at least 1: "),
    ([True, 4], r"length 0 is True \(bool\); .* integer"),
    ([4, 3.0], r"length 1 is 3\.0 \(float\); .* int\("),
    ([4, float("nan"), 0], r"length 1 is nan \(float\)"),
    ("12", r"length 0 is '1' \(str\)"),
    (np.array([1.0, 2.0]), r"length 0 is 1\.0 \(float\)"),
    (np.array([True]), r"length 0 is True \(bool\)"),
    (np.ones((2, 2), dtype=int), r"length 0 is \[1, 1\] \(list\)"),
    (7, r"lengths are 7; give a sequence"),
]


@pytest.mark.parametrize(("given_lengths", "message"), REFUSED)
def test_what_is_not_a_length_is_refused(given_lengths, message):
    for make in (check_lengths, Packing):
        with pytest.raises(LayoutError, match=message):
            make(given_lengths)


@examples
@given(lengths)
def test_rows_know_their_document_and_position(given_lengths):
    packing = Packing(given_lengths)
    rows = [(d, p) for d, n in enumerate(given_lengths) for p in range(n)]
    assert packing.tokens == len(rows)
    assert list(zip(packing.document_of_row.tolist(), packing.positions.tolist(), strict=True)) == rows
    assert np.diff(packing.cu_seqlens).tolist() == given_lengths and packing.cu_seqlens[0] == 0


def between(need):
    return Exchange(Partition.from_rows([[0, 1], [2]]), Partition.from_rows(need))


SEGMENTS = ("document", "start", "stop", "offset", "positions")
VALUES = [  # what makes it, what it prints, its arrays; no two are equal
    (lambda: Layout(range(8), tp=2), "Layout(ranks=(0, 1, 2, 3, 4, 5, 6, 7), pp=1, tp=2, ep=1, dp_replicate=1)", ()),
    (lambda: Layout(8, tp=4), "Layout(ranks=(0, 1, 2, 3, 4, 5, 6, 7), pp=1, tp=4, ep=1, dp_replicate=1)", ()),
    (lambda: Packing([3, 2]), "Packing(lengths=(3, 2))", ("cu_seqlens", "positions")),
    (lambda: Packing(np.array([2, 3])), "Packing(lengths=(2, 3))", ("document_of_row",)),
    (lambda: Packing([3]), "Packing(lengths=(3))", ()),
    (lambda: Partition.zigzag([5, 3], 2), "Partition.zigzag((5, 3), degree=2)", ("rows", "runs")),
    (lambda: Partition.zigzag(np.array([5, 3]), 4), "Partition.zigzag((5, 3), degree=4)", ("rows", "runs")),
    (lambda: Partition.zigzag([3, 5], 2), "Partition.zigzag((3, 5), degree=2)", ()),
    (
        lambda: Partition.contiguous([1] * 9, 2),
        "Partition.contiguous((1, 1, 1, 1, 1, 1, 1, 1, … 9 in all), degree=2)",
        (),
    ),
    (lambda: Partition.contiguous([5, 3], 2), "Partition.contiguous((5, 3), degree=2)", ("rows", "runs")),
    (lambda: Partition.from_rows([[5, 3], []]), "Partition.from_rows(2 members with (2, 0) rows)", ("rows", "runs")),
    (lambda: Partition.from_rows([[3, 5], ()]), "Partition.from_rows(2 members with (2, 0) rows)", ()),
    (lambda: Partition.zigzag([8, 3], 2).segments(0), "Segments(0[0:2], 0[6:8], 1[0:1], 1[2:3]; 6 rows)", SEGMENTS),
    (lambda: Partition.zigzag([8, 3], 2).segments(1), "Segments(0[2:6], 1[1:2]; 5 rows)", SEGMENTS),
    (lambda: between([[2], [0]]), "Exchange(2 ranks, 2 rows travel)", ()),
    (lambda: between([[2], [1]]), "Exchange(2 ranks, 2 rows travel)", ()),
]


def test_geometry_is_made_of_values():
    made = [make() for make, _, _ in VALUES]
    assert len(set(made)) == len(made)
    for value, (make, text, arrays) in zip(made, VALUES, strict=True):
        if isinstance(value, Layout):
            value.coordinates(3)  # fills a cache, which is no part of the value
        assert value == make() and hash(value) == hash(make()) and value != 3 and repr(value) == text
        for twin in (value, pickle.loads(pickle.dumps(value)), copy.deepcopy(value)):
            assert twin == value and hash(twin) == hash(value)
            for name in arrays:
                array = getattr(twin, name)
                array = array(0) if callable(array) else array
                assert array.dtype == np.int64
                with pytest.raises(ValueError, match="read-only"):
                    array[:] = 0
    for value, name in zip(
        made, ["tp", None, "lengths", *[None] * 2, "degree", *[None] * 8, "have", None], strict=True
    ):
        if name:
            with pytest.raises(AttributeError):
                setattr(value, name, 4)
    assert Layout(8, tp=2) == made[0] and Packing(np.array([3, 2])) == made[2]
    assert repr(Partition.zigzag([8] * 9, 1).segments(0)).endswith("5[0:8], … 9 runs; 72 rows)")
