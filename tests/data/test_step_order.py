"""Which documents a step takes: whole epochs of every source by their weights, the same wherever a run goes on."""

import json
import math
import pickle
import tracemalloc
from collections import Counter
from hashlib import sha256
from itertools import chain, pairwise, permutations
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings, strategies as st

from longspan import Document
from longspan.data import stream
from longspan.data.shared_prefixes import group_documents
from longspan.data.shuffle import Epochs, shuffled_sample
from longspan.data.step_order import StepOrder, sample_documents
from longspan.data.stream import DocumentStream, Mixture, shuffled_sources
from longspan.errors import DataError
from longspan.layout import Integers

LENGTHS = np.array([2 + i * i * 37 % 898 for i in range(101)])


def order(seed: int = 3, tokens: int = 2000, held_out: int = 11, epochs: float = 0.0) -> StepOrder:
    return StepOrder(LENGTHS, tokens_per_step=tokens, seed=seed, eval_documents=held_out, epochs=epochs)


def training(found: StepOrder) -> list[int]:
    return sorted(set(range(len(LENGTHS))) - set(found.evaluation))


@pytest.mark.parametrize("tokens", [2, 500, 2000, 30_000, 10**6])
def test_a_step_takes_as_many_documents_as_fit_and_at_least_one(tokens: int) -> None:
    found = order(tokens=tokens)
    stream = [found.documents_of_step(step) for step in range(130)]
    for step, (now, then) in enumerate(pairwise(stream)):
        total = LENGTHS[list(now)].sum()
        assert len(now) == 1 or total <= tokens
        assert total + LENGTHS[then[0]] > tokens or then[0] in now  # the next one did not fit, or would be there twice
        assert len(set(now)) == len(now) or tokens > found.stream.tokens
        assert found.lengths_of_step(step) == LENGTHS[list(now)].tolist()


@pytest.mark.parametrize("tokens", [2, 500, 2000, 10**6])
@pytest.mark.parametrize("sources", [None, (1.0, 3.0)])
def test_pairs_stay_in_one_step_and_are_shuffled_as_one_document(
    tokens: int, sources: tuple[float, ...] | None
) -> None:
    """Also those that are held out, after pickling, and of several sources; each is as long as both documents."""
    lengths, source_of = LENGTHS[:100], np.repeat(np.array([0, 1], np.int16), (40, 60))
    mixture = None if sources is None else Mixture(source_of, sources)
    keys: Any = {"tokens_per_step": tokens, "seed": 3, "epochs": 0.0 if sources else 2}
    texts, targets = np.repeat(np.arange(50), 2), np.arange(100)
    found = StepOrder(lengths, eval_documents=5, mixture=mixture, texts=texts, targets=targets, unit=2, **keys)
    halved = None if mixture is None else mixture._replace(source_of=source_of[::2])
    of_pairs = StepOrder(lengths.reshape(-1, 2).sum(1), eval_documents=5, mixture=halved, **keys)
    assert (found.training_texts, found.held_out_texts) == (45, 5)
    assert found.evaluation == tuple(d for pair in of_pairs.evaluation for d in (2 * pair, 2 * pair + 1))
    for order in (found, pickle.loads(pickle.dumps(found))):
        for step in range(12 if sources else order.count_steps()):
            documents = order.documents_of_step(step)
            assert documents == tuple(d for pair in of_pairs.documents_of_step(step) for d in (2 * pair, 2 * pair + 1))
            assert order.lengths_of_step(step) == lengths[[*documents]].tolist()
            assert order.targets_of_step(step) == sum(documents)
            assert order.tokens_of_step_by_source(step) == of_pairs.tokens_of_step_by_source(step)
            assert order.begin_of_step(step) == of_pairs.begin_of_step(step)


@pytest.mark.parametrize("tokens", [2, 700, 30_000, 10**6])
@pytest.mark.parametrize("epochs", [0.25, 1, 1.5, 3])
def test_epochs_train_every_document_so_often_and_no_step_has_one_twice(epochs: float, tokens: int) -> None:
    full, endless = order(tokens=tokens, epochs=epochs), order(tokens=tokens)
    steps = [full.documents_of_step(step) for step in range(full.count_steps())]
    stream = [document for step in steps for document in step]
    assert len(stream) == math.ceil(epochs * 90) and all(len(set(step)) == len(step) for step in steps)
    assert {stream.count(document) for document in training(full)} <= {math.floor(epochs), math.ceil(epochs)}
    begins = [full.begin_of_step(step) for step in range(len(steps) + 1)]
    assert np.diff(begins).tolist() == [len(step) for step in steps]
    for step, then in enumerate(steps[1:], 1):  # the one before is as long as it may be, or ends an epoch
        assert LENGTHS[[*steps[step - 1], then[0]]].sum() > tokens or begins[step] % 90 == 0
    first = [step for step, end in zip(steps, begins[1:], strict=True) if end < min(90, len(stream))]
    assert first == [endless.documents_of_step(step) for step in range(len(first))]
    assert stream == [endless.stream.part_at(0).ids[place] for place in range(len(stream))]


def test_a_text_is_held_out_with_all_of_its_documents() -> None:
    draw = np.random.default_rng(0)
    texts = np.repeat(np.arange(40, dtype=np.int32), draw.integers(1, 6, 40))
    lengths = draw.integers(2, 60, len(texts))
    for seed in range(5):
        found = StepOrder(lengths, tokens_per_step=99, seed=seed, eval_documents=7, texts=texts)
        held_out = {*texts[[*found.evaluation]].tolist()}
        assert len(held_out) == 7 == found.held_out_texts and found.training_texts == 33
        assert found.evaluation == tuple(np.flatnonzero(np.isin(texts, [*held_out])).tolist())
        trained = {document for step in range(200) for document in found.documents_of_step(step)}
        assert trained == set(range(len(texts))) - {*found.evaluation}
        # Where every document is a text, the same are drawn with the numbers of texts and without.
        whole = StepOrder(np.ones(40), tokens_per_step=99, seed=seed, eval_documents=7)
        assert {*whole.evaluation} == held_out
    with pytest.raises(DataError, match=r"evaluation.documents 40 leaves nothing .* 40 texts; hold out at most 39"):
        StepOrder(lengths, tokens_per_step=99, seed=0, eval_documents=40, texts=texts)
    for held_out in (101, 500):
        words = rf"evaluation.documents {held_out} leaves nothing .* 101 texts; hold out at most 100"
        with pytest.raises(DataError, match=words):
            order(held_out=held_out)
    mixture = Mixture(np.repeat([0, 1], [99, 2]), (1.0, 1.0))
    message = r"data.sources\[1\] has 2 documents, of which evaluation.documents holds out 2"
    with pytest.raises(DataError, match=message):
        for seed in range(40):
            StepOrder(LENGTHS, tokens_per_step=99, seed=seed, eval_documents=100, mixture=mixture)


@pytest.mark.parametrize(
    ("counts", "asked", "quotas"),
    [([14, 30, 16], 7, [2, 3, 2]), ([900, 40, 3], 32, [30, 1, 1]), ([5, 5, 5], 2, [1, 1, 1]), ([1, 40], 4, [0, 4]),
     ([30, 2], 20, [19, 1]), ([9, 9], 0, [0, 0]), ([50], 9, [9])],
)  # fmt: skip
def test_each_source_holds_out_its_share(counts: list[int], asked: int, quotas: list[int]) -> None:
    """The texts of a source are those of any seed, also where a text is several documents."""
    drawn = set[tuple[int, ...]]()
    source_of_text = np.repeat(np.arange(len(counts)), counts)
    for seed in range(8):
        mixture = Mixture(source_of_text, (1.0,) * len(counts))
        found = StepOrder(np.full(sum(counts), 5), tokens_per_step=9, seed=seed, eval_documents=asked, mixture=mixture)
        assert np.bincount(source_of_text[[*found.evaluation]], minlength=len(counts)).tolist() == quotas
        assert (found.held_out_texts, found.training_texts) == (sum(quotas), sum(counts) - sum(quotas))
        assert [source.documents for source in found.stream.sources] == np.subtract(counts, quotas).tolist()
        drawn.add(found.evaluation)
        texts = np.repeat(np.arange(sum(counts)), 1 + np.arange(sum(counts)) % 3)
        cut = StepOrder(
            np.full(len(texts), 5),
            tokens_per_step=9,
            seed=seed,
            eval_documents=found.held_out_texts,
            mixture=mixture._replace(source_of=source_of_text[texts]),
            texts=texts,
        )
        assert tuple(dict.fromkeys(texts[[*cut.evaluation]].tolist())) == found.evaluation
    assert len(drawn) > 4 or not asked


@pytest.mark.parametrize(
    ("tokens", "steps", "digest"), [(2000, 400, "f097836e784b258a"), (10**6, 40, "a836d67130664009")]
)
def test_the_order_never_changes(tokens: int, steps: int, digest: str) -> None:
    lengths = np.random.default_rng(100).integers(1, 900, size=100)
    found, resumed = (StepOrder(lengths, tokens_per_step=tokens, seed=3, eval_documents=11) for _ in range(2))
    stream = [found.documents_of_step(step) for step in range(steps)]
    assert [resumed.documents_of_step(step) for step in (steps - 1, 3)] == [stream[-1], stream[3]]
    trained = sorted(set(range(100)) - set(found.evaluation))
    text = json.dumps([found.evaluation, trained, stream])
    assert sha256(text.encode()).hexdigest()[:16] == digest


def test_an_order_holds_nothing_of_a_corpus_and_travels_as_the_name_of_its_file(tmp_path: Path) -> None:
    count, step = 300_000, 500
    for name, values in (("lengths.npy", 100), ("targets.npy", 40)):
        np.save(tmp_path / name, np.full(count, values, dtype=np.uint32))
    lengths, targets = (np.asarray(np.load(tmp_path / f"{name}.npy", mmap_mode="r")) for name in ("lengths", "targets"))
    tracemalloc.start()
    try:
        found = StepOrder(lengths, targets=targets, tokens_per_step=100_000, seed=0, eval_documents=8)
        documents = found.documents_of_step(step)  # in the second epoch
        held, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    sent = pickle.dumps(found)
    assert held < 2e6 and peak < 8e6 and len(sent) < 2000
    travelled: StepOrder = pickle.loads(sent)
    assert travelled.documents_of_step(step) == documents and travelled.targets_of_step(step) == 40 * len(documents)
    slices = StepOrder(lengths[5:], targets=targets[5:], tokens_per_step=100_000, seed=0, eval_documents=8)
    assert pickle.loads(pickle.dumps(slices)).documents_of_step(step) == slices.documents_of_step(step)


def test_some_documents_are_the_same_in_every_version() -> None:
    assert sample_documents(9, 0, seed=1) == sample_documents(9, 9, seed=1) == tuple(range(9))
    assert sample_documents(1000, 5, seed=1) == (287, 641, 733, 876, 969)


# ---- sources with weights, each in epochs of its own


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
    streams = [iter(source.document_ids(0, count).tolist()) for source in found.sources]
    for _ in range(count):
        behind = min(range(len(tokens)), key=lambda s: (tokens[s] / found.sources[s].weight, s))
        ids.append(next(streams[behind]))
        tokens[behind] += int(lengths[ids[-1]])
    return ids


@settings(deadline=None, max_examples=25)
@given(case=cases(), documents=st.sampled_from([1, 7, 100, 2**14]), place=st.integers(0, 500))
def test_the_next_document_is_of_the_source_that_is_furthest_behind(case: Case, documents: int, place: int) -> None:
    """In parts of any size, and the same from any place, also after pickling."""
    found = opened(case, documents)
    count = 1000 if documents > 7 else 60  # small parts take longer
    followed, place = one_by_one(found, case.lengths, count), place % count
    assert taken(opened(case, documents), count) == followed
    part = found.part_at(place)
    ids = part.ids.tolist()[: len(followed) - part.first]
    assert len(ids) > place - part.first >= 0 and ids == followed[part.first : part.first + len(ids)]
    again: DocumentStream = pickle.loads(pickle.dumps(found))
    there = again.part_at(place)
    assert there.ids[place - there.first] == followed[place]


@pytest.mark.parametrize("documents", [1, 7, 2**14])
def test_parts_of_any_size_make_the_same_stream_over_epochs(documents: int) -> None:
    lengths, source_of = np.arange(1, 121), np.repeat([0, 1, 2], [70, 1, 49])
    case = Case(lengths, Mixture(source_of, (1.0, 3.0, 0.5)), np.array([3, 4, 90]))
    assert taken(opened(case, documents), 500) == taken(opened(case), 500)


@settings(deadline=None, max_examples=15)
@given(case=cases(), epochs=st.sampled_from([0.5, 1.0, 2.3]), tokens=st.integers(1, 400), number=st.integers(0, 3))
def test_a_run_ends_in_the_step_that_ends_the_epochs_of_a_source(
    case: Case, epochs: float, tokens: int, number: int
) -> None:
    counts = np.bincount(case.mixture.source_of)
    mixture = case.mixture._replace(counted=number % len(counts))
    with patch.object(stream, "_DOCUMENTS", 50):
        keys: Any = {"tokens_per_step": tokens, "epochs": epochs, "mixture": mixture}
        order = StepOrder(case.lengths, seed=5, eval_documents=0, **keys)
    needed = math.ceil(round(epochs * int(counts[mixture.counted]), 6))
    given_documents = [0]
    for step in range(order.count_steps()):
        of_source = [mixture.source_of[i] for i in order.documents_of_step(step)].count(mixture.counted)
        given_documents.append(given_documents[-1] + of_source)
    assert given_documents[-2] < needed <= given_documents[-1]


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


@settings(deadline=None)
@given(count=st.integers(0, 200), most=st.integers(0, 200), block=st.integers(1, 64))
def test_the_first_of_a_shuffled_range_need_not_be_sorted_with_the_rest(count: int, most: int, block: int) -> None:
    most = min(most, count)
    found = shuffled_sample(count, most, 9, 0, block=block)
    assert found.tolist() == np.argsort(np.random.PCG64([9, 0]).random_raw(count), kind="stable")[:most].tolist()


def test_documents_with_a_common_prompt_come_in_one_step() -> None:
    """Of prompts that begin with the same text; a group of more tokens than a step has is divided."""
    draw = np.random.default_rng(0)
    system, documents = draw.integers(0, 9, 300), list[Document]()
    for _ in range(6):
        prompt = np.append(system, draw.integers(0, 9, 900))
        for _ in range(3):
            ids = np.append(prompt, draw.integers(0, 9, 50))
            documents.append(Document(ids, loss_mask=np.arange(1250) >= 1200))
    documents = [Document([1, 2, 3]), *documents]
    shuffled = draw.permutation(len(documents))
    prompt_of = {i: (number + 2) // 3 for i, number in enumerate(shuffled.tolist())}

    def order_of(tokens: int) -> StepOrder:
        def group(numbers: Integers) -> list[Integers]:
            chosen = [documents[shuffled[i]] for i in numbers]
            return [numbers[g] for g in group_documents(chosen, np.zeros(len(chosen)), tokens)]

        lengths = [len(documents[i]) for i in shuffled]
        return StepOrder(lengths, tokens_per_step=tokens, seed=0, eval_documents=2, group=group, epochs=1)

    grouped = order_of(4000)
    steps = [grouped.documents_of_step(step) for step in range(grouped.count_steps())]
    assert sorted([*chain(*steps), *grouped.evaluation]) == list(range(19))
    assert all(len({step for step in steps for i in step if prompt_of[i] == p}) <= 1 for p in range(7))
    again = pickle.loads(pickle.dumps(grouped))
    assert [again.documents_of_step(step) for step in range(len(steps))] == steps
    assert again.lengths_of_step(0) == grouped.lengths_of_step(0)
    assert max(map(len, order_of(2600).groups or ())) == 2
