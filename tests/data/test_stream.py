"""Sources with weights: each in epochs of its own, tokens in the proportion of the weights, wherever a run goes on."""

import math
import pickle
from collections import Counter
from itertools import permutations
from typing import NamedTuple
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.data import stream
from longspan.data.step_order import StepOrder
from longspan.data.stream import DocumentStream, Epochs, Mixture, shuffled_sample, shuffled_sources

WEIGHTS = st.sampled_from([0.1, 0.3, 1.0, 2.0, 7.0])


class Case(NamedTuple):
    lengths: npt.NDArray[np.int64]
    mixture: Mixture
    held_out: npt.NDArray[np.int64]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    counts = draw(st.lists(st.integers(1, 40), min_size=1, max_size=4))
    lengths = draw(st.lists(st.integers(1, 50), min_size=sum(counts), max_size=sum(counts)))
    first = np.cumsum([0, *counts])[:-1]  # stays in training
    held_out = sorted(draw(st.sets(st.integers(0, sum(counts) - 1), max_size=9)) - set(first.tolist()))
    weights = draw(st.lists(WEIGHTS, min_size=len(counts), max_size=len(counts)))
    mixture = Mixture(np.repeat(np.arange(len(counts)), counts), tuple(weights))
    return Case(np.array(lengths), mixture, np.array(held_out, dtype=np.int64))


def opened(case: Case, documents: int = 100) -> DocumentStream:
    with patch.object(stream, "_DOCUMENTS", documents):
        return DocumentStream(case.lengths, shuffled_sources(case.lengths, case.mixture, case.held_out, 5))


def taken(found: DocumentStream, count: int) -> list[int]:
    ids, part = list[int](), found.part_at(0)
    while len(ids) < count:
        ids += part.ids.tolist()
        part = found.next_part(part)
    return ids[:count]


def one_by_one(found: DocumentStream, lengths: npt.NDArray[np.int64], count: int) -> list[int]:
    tokens, ids = [0] * len(found.sources), list[int]()
    streams = [iter(source.ids(0, count).tolist()) for source in found.sources]
    for _ in range(count):
        behind = min(range(len(tokens)), key=lambda s: (tokens[s] / found.sources[s].weight, s))
        ids.append(next(streams[behind]))
        tokens[behind] += int(lengths[ids[-1]])
    return ids


@settings(deadline=None, max_examples=25)
@given(case=cases())
def test_the_next_document_is_of_the_source_that_is_furthest_behind(case: Case) -> None:
    found = opened(case)
    assert taken(found, 300) == one_by_one(found, case.lengths, 300)


@settings(deadline=None, max_examples=25)
@given(case=cases())
def test_sources_have_whole_epochs_and_tokens_in_the_proportion_of_weights(case: Case) -> None:
    ids = np.array(taken(opened(case), 400))
    weights = np.array(case.mixture.weights)
    of_source = case.mixture.source_of[ids][:, None] == np.arange(len(weights))
    shares = np.cumsum(of_source * case.lengths[ids][:, None], axis=0) / weights  # after each document
    assert (np.ptp(shares, axis=1) <= (case.lengths.max() / weights).max() + 1e-9).all()
    for source in range(len(case.mixture.weights)):
        documents = np.setdiff1d(np.flatnonzero(case.mixture.source_of == source), case.held_out)
        own = ids[case.mixture.source_of[ids] == source]
        for epoch in range(len(own) // len(documents)):
            assert sorted(own[epoch * len(documents) :][: len(documents)]) == documents.tolist()
        assert set(own.tolist()) <= set(documents.tolist())


@settings(deadline=None, max_examples=15)
@given(case=cases(), place=st.integers(0, 500))
def test_a_stream_is_the_same_from_any_place(case: Case, place: int) -> None:
    followed = taken(opened(case), 1000)
    found = opened(case)
    part = found.part_at(place)
    assert part.ids.tolist() == followed[part.first : part.first + len(part.ids)]
    assert part.before == case.lengths[followed[: part.first]].sum()
    assert found.part_at_token(part.before + 1).first == part.first
    again: DocumentStream = pickle.loads(pickle.dumps(found))
    there = again.part_at(place)
    assert there.ids[place - there.first] == followed[place]
    assert found.tokens_before(place) == case.lengths[followed[:place]].sum()


@pytest.mark.parametrize("documents", [1, 7, 2**14])
def test_parts_of_any_size_make_the_same_stream(documents: int) -> None:
    lengths, source_of = np.arange(1, 121), np.repeat([0, 1, 2], [70, 1, 49])
    case = Case(lengths, Mixture(source_of, (1.0, 3.0, 0.5)), np.array([3, 4, 90]))
    assert taken(opened(case, documents), 500) == taken(opened(case), 500)


def test_steps_of_several_sources_go_on_anywhere() -> None:
    lengths, mixture = np.arange(1, 121), Mixture(np.repeat([0, 1], [30, 90]), (3.0, 1.0))

    def order() -> StepOrder:
        return StepOrder(lengths, tokens_per_step=500, seed=1, eval_documents=4, mixture=mixture)

    followed = order()
    steps = [followed.documents_of_step(step) for step in range(200)]
    assert [order().documents_of_step(step) for step in (0, 70, 199)] == [steps[0], steps[70], steps[199]]
    ids = np.concatenate(steps)
    tokens = np.bincount(mixture.source_of[ids], weights=lengths[ids])
    assert tokens[0] / tokens[1] == pytest.approx(3.0, rel=0.01)


# ---- shuffled epochs, computed place by place


@settings(deadline=None, max_examples=30)
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
    epochs, orders = 12_000, list(permutations(range(count)))
    found = Counter(map(tuple, Epochs(count, 0)[np.arange(epochs * count)].reshape(epochs, count).tolist()))
    expected, free = epochs / len(orders), len(orders) - 1
    # within four standard deviations of the mean of a chi-square
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


@settings(deadline=None)
@given(count=st.integers(0, 200), most=st.integers(0, 200), block=st.integers(1, 64))
def test_the_first_of_a_shuffled_range_need_not_be_sorted_with_the_rest(count: int, most: int, block: int) -> None:
    most = min(most, count)
    found = shuffled_sample(count, most, 9, 0, block=block)
    assert found.tolist() == np.argsort(np.random.PCG64([9, 0]).random_raw(count), kind="stable")[:most].tolist()
