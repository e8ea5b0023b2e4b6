"""Packs of documents with images: none is cut in an image, and each is read as the same tokens as one document."""

import pickle
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.bridge import items_at_placeholders
from longspan.config.sections import DataConfig, RunConfig, TrainConfig
from longspan.corpus.image_documents import ImagePacks, show_images
from longspan.data.step_order import PackOrder, StepOrder, UncutSpans
from longspan.errors import ConfigError
from longspan.model.weights.hf_folder import read_configuration
from longspan.testing import run_ranks
from longspan.train.plans.order import make_step_order
from tests.corpus.images import test_run as runs
from tests.corpus.images.folders import write_images
from tests.corpus.images.test_images import SIZES, corpus_of
from tests.mutation import mutated
from tests.run.runs.homes import farthest
from tests.train.small import train_rank

PLACEHOLDER = 260


@settings(deadline=None, max_examples=25)
@given(
    documents=st.lists(st.lists(st.tuples(st.integers(0, 5), st.integers(1, 6)), max_size=4), min_size=2, max_size=12),
    pack_to=st.integers(6, 40),
    across=st.booleans(),
)
def test_packs_are_the_stream_with_each_span_whole(
    documents: list[list[tuple[int, int]]], pack_to: int, across: bool
) -> None:
    corpus = [np.arange(2 + sum(map(sum, parts))) + 1000 * d for d, parts in enumerate(documents)]
    spans = np.array([span for d, parts in enumerate(documents) for span in _spans(d, parts)], dtype=np.int64).reshape(
        -1, 3
    )
    order = StepOrder([len(ids) for ids in corpus], tokens_per_step=2 * pack_to, seed=1, eval_documents=1)
    packs = PackOrder(order, pack_to=pack_to, tokens_per_step=2 * pack_to, across=across, uncut=UncutSpans(*spans.T))
    stream, read = np.concatenate([corpus[d] for d in order.stream.part_at(0).ids[:400]]), list[np.ndarray]()
    for step in range(3):
        made = packs.select(corpus, step)
        assert [len(pack) for pack in made] == packs.lengths_of_step(step)
        assert max(map(len, made)) <= pack_to and (not across or 1 <= len(made) <= 2)
        for pack in made:
            for document, start, stop in pack.pieces:
                number = next(d for d, ids in enumerate(corpus) if ids is document)
                assert not any(a < cut < b for d, a, b in spans if d == number for cut in (start, stop))
            read.append(pack[np.arange(len(pack))])
    text = np.concatenate(read)
    assert text[: len(stream)].tolist() == stream[: len(text)].tolist()
    if across:  # a pack is shorter than it may be only where the next span does not fit in
        borders = list(accumulate(map(len, read), initial=0))
        _check_greedy(
            borders, _in_stream(order, corpus, spans), pack_to, 0 if order.may_repeat else order.stream.tokens
        )


def _spans(document: int, parts: list[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """A document is gaps and spans in turn, between two tokens more."""
    places = 1 + np.cumsum([0, *(n for part in parts for n in part)])
    return [(document, int(a), int(b)) for a, b in list(pairwise(places.tolist()))[1::2]]


def _config(pack_to: int, *, across: bool = False) -> RunConfig:
    data = DataConfig(pack_to=pack_to, pack_attention="across" if across else "document", eval_documents=0)
    return RunConfig(data=data, train=TrainConfig(tokens_per_step=128))


def _in_stream(order: StepOrder, corpus: list[np.ndarray], spans: np.ndarray) -> list[tuple[int, int]]:
    documents = order.stream.part_at(0).ids[:400].tolist()
    begins = accumulate((len(corpus[d]) for d in documents), initial=0)
    return [(begin + a, begin + b) for d, begin in zip(documents, begins, strict=False) for s, a, b in spans if s == d]


def _check_greedy(borders: list[int], spans: list[tuple[int, int]], pack_to: int, epoch: int) -> None:
    for begin, end in pairwise(borders):
        full = min(begin + pack_to, (begin // epoch + 1) * epoch if epoch else begin + pack_to)
        assert end == next((a for a, b in spans if a < full < b), full)


def test_borders_are_the_same_wherever_they_are_asked_for() -> None:
    draw = np.random.default_rng(0)
    lengths = draw.integers(9, 40, 300)
    starts = draw.integers(0, lengths - 8)
    spans = UncutSpans(np.arange(300), starts, starts + draw.integers(1, 9, 300))

    def packs_of(epochs: float = 0.0) -> PackOrder:
        order = StepOrder(lengths, tokens_per_step=32, seed=3, eval_documents=1, epochs=epochs)
        return PackOrder(order, pack_to=16, tokens_per_step=32, across=True, uncut=spans)

    packs = packs_of()
    late = [packs.lengths_of_step(step) for step in (300, 3, 64, 65)]
    other = pickle.loads(pickle.dumps(packs))
    assert [other.lengths_of_step(step) for step in (300, 3, 64, 65)] == late
    for epochs in (0.5, 1.0, 2.0):  # no token is left out, none stands twice, and an epoch begins with a step
        packs = packs_of(epochs)
        ends = list(accumulate(sum(packs.lengths_of_step(step)) for step in range(packs.count_steps())))
        last = packs.stream.place_after(epochs)
        assert ends[-1] == packs.stream.tokens_before(last) and (epochs < 2 or packs.stream.tokens in ends)
        assert ends[:-1] == [packs.begin_of_step(step) for step in range(1, len(ends))]


def test_a_large_image_shortens_its_own_pack_alone() -> None:
    lengths, images = np.full(411, 16), np.full(411, 6)
    lengths[7], images[7] = 74, 64
    spans = UncutSpans(np.arange(411), np.full(411, 5), 5 + images)
    order = StepOrder(lengths, tokens_per_step=640, seed=0, eval_documents=0)
    packs = PackOrder(order, pack_to=160, tokens_per_step=640, across=True, uncut=spans)
    tokens = [length for step in range(20) for length in packs.lengths_of_step(step)]
    assert 160 > np.mean(tokens) > 0.95 * 160
    assert sum(length < 160 - 5 for length in tokens) <= 2 * (20 * 640 // lengths.sum()) + 1  # and at an epoch's end


def packed(folder: Path, *, across: bool) -> tuple[ImagePacks, Any, Any]:
    model, names = runs.write_model(folder / "model"), write_images(folder, SIZES[:3])
    rows = [
        {
            "text": "a <image> bc <image>"[2 * (i % 3 == 0) :] * (1 + i % 2),
            "images": [*names, *names][: 2 + 2 * (i % 2)],
        }
        for i in range(6)
    ]
    corpus = show_images(corpus_of(folder, [*rows, {"text": "no image" * 4}], model), read_configuration(model), model)
    order = make_step_order(_config(pack_to=32, across=across), corpus)
    packs, documents = order.select(corpus, 1), corpus.select(range(len(corpus)))
    assert (
        isinstance(packs, ImagePacks)
        and packs.images is not None
        and [len(pack) for pack in packs] == order.lengths_of_step(1)
    )
    return packs, documents, packs.images.tokens


@pytest.mark.parametrize("across", [False, True])
def test_packs_with_images_are_documents_of_their_tokens(across: bool, tmp_path: Path) -> None:
    packs, documents, tokens = packed(tmp_path, across=across)
    assert packs.images is not None
    ids = [pack[np.arange(len(pack))] for pack in packs]
    images = [packs.images.table[number].image for number in packs.numbers]
    of_pack = [[k for k, item in enumerate(packs.items) if item.document == d] for d in range(len(packs))]
    wanted = items_at_placeholders(ids, PLACEHOLDER, [[images[k].rows for k in of] for of in of_pack])
    assert len(wanted) == len(packs.items) > 4 and list(packs.items) == list(wanted)
    for d, of in enumerate(of_pack):
        grids = np.array([images[k].grid for k in of]).reshape(-1, 3)
        found, positions = packs.positions(d), tokens.positions(ids[d], grids)
        assert (found is None) == (positions is None) and (positions is None or (found == positions).all())
    for item, number in enumerate(packs.numbers):
        assert torch.equal(packs.read(item).pixels, documents.read(number).pixels)


@pytest.mark.whole
def test_an_image_of_another_piece_is_noticed(tmp_path: Path) -> None:
    wrong = ("corpus.image_documents", "end - piece.stop", "end - piece.stop + piece.start")
    with mutated(wrong), pytest.raises(AssertionError):
        test_packs_with_images_are_documents_of_their_tokens(False, tmp_path)


class _Documents(SimpleNamespace):
    def __len__(self) -> int:
        return len(self.lengths)


def test_packs_without_room_for_an_image_are_refused() -> None:
    spans = {"document": np.array([0]), "start": np.array([2]), "stop": np.array([22])}
    images = type("Table", (), {"column": lambda _, name: spans[name], "__len__": lambda _: 1})()
    corpus: Any = _Documents(lengths=np.array([40, 30]), targets=None, images=images, source_of=None)
    with pytest.raises(ConfigError, match=r"data.pack_to is 19, and an image takes 20 tokens, .* set it to 20 or more"):
        make_step_order(_config(pack_to=19), corpus)


@pytest.mark.whole
@pytest.mark.parametrize("attention", ["document", "across"])
def test_a_run_of_packs_with_images(attention: str, tmp_path: Path) -> None:
    keys = {"data.pack_to": 64, "data.pack_attention": attention, "train.steps": 3}
    config = runs.config_of(tmp_path, **keys)
    run_ranks(train_rank, 2, config, 2, timeout=200)
    context = replace(config.context, context_parallel_size=1, max_tokens_per_slot=192).set_evaluation(
        max_tokens_per_slot=192
    )
    alone = replace(config, context=context, run=replace(config.run, dir=str(tmp_path / "alone")))
    alone = replace(alone, context=context.set_evaluation(context_parallel_size=1))
    run_ranks(train_rank, 1, alone, 1, timeout=200)
    wanted, found = runs.losses_of(alone), runs.losses_of(config)
    assert all(farthest(found[key], wanted[key]) <= 1e-6 for key in runs.COLUMNS)
