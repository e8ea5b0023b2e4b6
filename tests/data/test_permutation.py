"""Shuffled epochs computed place by place: each number once in each, all orders alike, the same on every machine."""

import math
from collections import Counter
from itertools import permutations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.data.stream import Epochs, shuffled_sample


@given(count=st.integers(1, 3000), seed=st.integers(0, 2**40))
def test_every_number_stands_at_one_place_of_an_epoch(count: int, seed: int) -> None:
    found = Epochs(count, seed, 1)[np.arange(3 * count)]
    for epoch in range(3):
        assert sorted(found[epoch * count :][:count].tolist()) == list(range(count))
    some = np.arange(3 * count)[:: max(1, count // 7)]
    assert Epochs(count, seed, 1)[some].tolist() == found[some].tolist()
    assert Epochs(count, seed, 1)[some[-1:]].tolist() == found[some[-1:]].tolist()


def test_many_numbers_and_no_more_memory_than_places() -> None:
    count = 10**12
    found = Epochs(count, 5)[np.arange(count - 1000, count)]
    assert len(set(found.tolist())) == 1000 and found.min() >= 0 and found.max() < count
    assert np.corrcoef(np.arange(1000), found)[0, 1] < 0.1


@pytest.mark.parametrize("count", [2, 3, 4, 5, 6])
def test_all_orders_are_alike(count: int) -> None:
    """Chi-square of 12,000 epochs over all orders, within four standard deviations of its mean."""
    epochs, orders = 12_000, list(permutations(range(count)))
    found = Counter(map(tuple, Epochs(count, 0)[np.arange(epochs * count)].reshape(epochs, count).tolist()))
    expected, free = epochs / len(orders), len(orders) - 1
    chi = sum((found[order] - expected) ** 2 / expected for order in orders)
    assert abs(chi - free) < 4 * math.sqrt(2 * free)


def test_neighbours_are_not_neighbours_before() -> None:
    epochs = Epochs(1000, 7)[np.arange(200_000)].reshape(200, 1000)
    counts = np.bincount(np.diff(epochs).ravel() % 1000, minlength=1000)[1:]
    expected = counts.sum() / 999
    chi = ((counts - expected) ** 2 / expected).sum()
    assert abs(chi - 998) < 4 * math.sqrt(2 * 998)


def test_an_epoch_never_changes() -> None:
    assert Epochs(1000, 3, 1, 0)[np.arange(2000, 2006)].tolist() == [732, 408, 832, 302, 400, 157]


@given(count=st.integers(0, 200), most=st.integers(0, 200), block=st.integers(1, 64))
def test_the_first_of_a_shuffled_range_need_not_be_sorted_with_the_rest(count: int, most: int, block: int) -> None:
    most = min(most, count)
    found = shuffled_sample(count, most, 9, 0, block=block)
    assert found.tolist() == np.argsort(np.random.PCG64([9, 0]).random_raw(count), kind="stable")[:most].tolist()
