"""Which documents a step takes: whole epochs of every source, the same wherever a run goes on."""

import json
import math
import pickle
import tracemalloc
from hashlib import sha256
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from longspan.data.step_order import StepOrder, sample_documents
from longspan.data.stream import Mixture
from longspan.errors import DataError

LENGTHS = np.array([2 + i * i * 37 % 898 for i in range(101)])


def order(seed: int = 3, tokens: int = 2000, held_out: int = 11, epochs: float = 0.0) -> StepOrder:
    return StepOrder(LENGTHS, tokens_per_step=tokens, seed=seed, eval_documents=held_out, epochs=epochs)


def training(found: StepOrder) -> list[int]:
    return sorted(set(range(len(LENGTHS))) - set(found.evaluation))


def test_epochs_hold_every_training_document_once_and_no_held_out_one() -> None:
    found = order()
    assert len(found.evaluation) == 11 and found.stream.documents == 90
    assert found.stream.tokens == LENGTHS[training(found)].sum()
    stream = [d for step in range(200) for d in found.documents_of_step(step)]
    for epoch in range(len(stream) // 90):
        assert sorted(stream[90 * epoch : 90 * epoch + 90]) == training(found)
    assert stream[:90] != stream[90:180]


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
        assert len(held_out) == 7 == found.held_out_texts and found.texts == 33
        assert found.evaluation == tuple(np.flatnonzero(np.isin(texts, [*held_out])).tolist())
        trained = {document for step in range(200) for document in found.documents_of_step(step)}
        assert trained == set(range(len(texts))) - {*found.evaluation}
        # Where every document is a text, the same are drawn with the numbers of texts and without.
        whole = StepOrder(np.ones(40), tokens_per_step=99, seed=seed, eval_documents=7)
        assert {*whole.evaluation} == held_out
    with pytest.raises(DataError, match=r"eval_documents 40 leaves nothing .* 40 texts; hold out at most 39"):
        StepOrder(lengths, tokens_per_step=99, seed=0, eval_documents=40, texts=texts)
    for held_out in (101, 500):
        words = rf"eval_documents {held_out} leaves nothing .* 101 texts; hold out at most 100"
        with pytest.raises(DataError, match=words):
            order(held_out=held_out)
    mixture = Mixture(np.repeat([0, 1], [99, 2]), (1.0, 1.0))
    with pytest.raises(DataError, match=r"data.sources\[1\] has 2 documents, of which data.eval_documents holds out 2"):
        for seed in range(40):
            StepOrder(LENGTHS, tokens_per_step=99, seed=seed, eval_documents=90, mixture=mixture)


def test_order_is_a_function_of_seed_and_step_alone() -> None:
    ahead = order().documents_of_step(150)  # as after a resume: no earlier step was asked for
    followed = order()
    assert [followed.documents_of_step(step) for step in range(151)][-1] == ahead
    assert [order().documents_of_step(step) for step in (150, 3, 64, 63)] == [
        followed.documents_of_step(step) for step in (150, 3, 64, 63)
    ]
    assert order(seed=4).documents_of_step(150) != ahead
    assert order().evaluation != order(seed=4).evaluation


@pytest.mark.parametrize(
    ("tokens", "steps", "digest"), [(2000, 400, "f097836e784b258a"), (10**6, 40, "a836d67130664009")]
)
def test_the_order_never_changes(tokens: int, steps: int, digest: str) -> None:
    lengths = np.random.default_rng(100).integers(1, 900, size=100)
    found = StepOrder(lengths, tokens_per_step=tokens, seed=3, eval_documents=11)
    stream = [found.documents_of_step(step) for step in range(steps)]
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
