import pickle

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.errors import LayoutError
from longspan.layout import Coordinates, Layout
from tests.layout.strategies import examples

HOMES = [  # arguments, slots, planes
    ({"ranks": 1}, 1, ((0,),)),
    ({"ranks": 4}, 4, ((0, 1, 2, 3),)),
    ({"ranks": 8, "tp": 2}, 4, ((0, 2, 4, 6), (1, 3, 5, 7))),
    ({"ranks": 8, "pp": 2}, 4, ((0, 1, 2, 3), (4, 5, 6, 7))),
    ({"ranks": 8, "pp": 2, "tp": 2}, 2, ((0, 2), (1, 3), (4, 6), (5, 7))),
    ({"ranks": 6, "tp": 3}, 2, ((0, 3), (1, 4), (2, 5))),
    ({"ranks": (7, 5, 3, 1), "tp": 2}, 2, ((7, 3), (5, 1))),
    ({"ranks": np.arange(4), "dp_replicate": 2, "ep": 4}, 4, ((0, 1, 2, 3),)),
]


@pytest.mark.parametrize(("arguments", "slots", "planes"), HOMES)
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
    assert [home.coordinates(rank) for rank in (0, 1, 2, 6, 11)] == [
        (0, 0, 0),
        (0, 0, 1),
        (0, 1, 0),
        (1, 0, 0),
        (1, 2, 1),
    ]
    assert home.coordinates(11) == Coordinates(pp=1, slot=2, tp=1)
    assert home.tp_groups()[:2] == ((0, 1), (2, 3))
    assert home.pp_groups()[:2] == ((0, 6), (1, 7))
    assert [home.rank_at(slot) for slot in range(3)] == [0, 2, 4] == list(home.plane())  # the first of both


def test_a_home_is_a_value():
    home, same = Layout(8, tp=2), Layout(range(8), tp=2)
    home.coordinates(3)  # fills a cache, which is no part of the value
    assert home == same and hash(home) == hash(same) and home != Layout(8, tp=4)
    assert pickle.loads(pickle.dumps(home)) == home
    assert repr(same) == "Layout(ranks=(0, 1, 2, 3, 4, 5, 6, 7), pp=1, tp=2, ep=1, dp_replicate=1)"
    with pytest.raises(AttributeError):
        home.tp = 4


BAD = [  # arguments, what the message must say
    ({"ranks": 6, "tp": 4}, r"6 ranks .* tp 4 x pp 1 = 4; use 4 or 8 ranks"),
    ({"ranks": 8, "tp": 2, "pp": 3}, r"8 ranks .* tp 2 x pp 3 = 6; use 6 or 12 ranks"),
    ({"ranks": 2, "tp": 4}, r"2 ranks .* tp 4 x pp 1 = 4; use 4 ranks"),
    ({"ranks": 8, "ep": 3}, r"ep 3 does not divide 8 slots \(8 ranks / tp 1 / pp 1\); use one of \[1, 2, 4, 8\]"),
    ({"ranks": 12, "tp": 2, "dp_replicate": 4}, r"dp_replicate 4 does not divide 6 slots .* \[1, 2, 3, 6\]"),
    ({"ranks": 0}, r"ranks is 0"),
    ({"ranks": -4}, r"ranks is -4"),
    ({"ranks": True}, r"ranks is True"),
    ({"ranks": None}, r"ranks is None"),
    ({"ranks": 4.0}, r"ranks is 4\.0"),
    ({"ranks": "8"}, r"distinct integers .* \('8'\)"),
    ({"ranks": ()}, r"at least one; got \(\)"),
    ({"ranks": (0, 1, 1)}, r"distinct .* \(0, 1, 1\)"),
    ({"ranks": (0, -1)}, r"from 0.* \(0, -1\)"),
    ({"ranks": (0, 1.5)}, r"integers .* \(0, 1\.5\)"),
    ({"ranks": (0, True)}, r"integers .* \(0, True\)"),
    ({"ranks": [0] * 20}, r"… 20 in all"),
    ({"ranks": 4, "tp": 0}, r"tp is 0; tp is an integer of at least 1"),
    ({"ranks": 4, "pp": -1}, r"pp is -1"),
    ({"ranks": 4, "tp": "two"}, r"tp is 'two'"),
    ({"ranks": 4, "tp": 2.0}, r"tp is 2\.0"),
    ({"ranks": 4, "ep": False}, r"ep is False"),
    ({"ranks": 4, "ep": np.bool_(True)}, r"ep is "),
    ({"ranks": 4, "dp_replicate": None}, r"dp_replicate is None"),
    ({"ranks": 4, "dp_replicate": float("nan")}, r"dp_replicate is nan"),
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
