"""Packs: documents end to end, cut every so many tokens and in no image, with the loss of the same texts."""

import math
import pickle
from dataclasses import replace
from itertools import accumulate, pairwise, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from longspan import Document, Layout, World, plan_dynamic, plan_fixed, prepare, run_step
from longspan.bridge import items_at_placeholders
from longspan.bridge.item_documents import ItemDocuments
from longspan.config.defaults import resolve_defaults
from longspan.config.sections import DataConfig, RunConfig, TrainConfig
from longspan.corpus.image_documents import ImagePacks, show_images
from longspan.data.document import LabelledPack, Piece
from longspan.data.documents import Corpus
from longspan.data.step_order import PackOrder, StepOrder, UncutSpans
from longspan.errors import ConfigError
from longspan.model.weights.hf_folder import read_configuration
from longspan.plan import Plan
from longspan.plan.items import Item
from longspan.run.checks import check_config
from longspan.run.loggers import read_metrics
from longspan.testing import backend, run_ranks
from longspan.train.plans.order import make_step_order
from longspan.train.step_inputs import count_pack_targets
from tests.corpus.images import test_run as runs
from tests.corpus.images.folders import write_images
from tests.corpus.images.test_images import SIZES, corpus_of
from tests.model.stock import gradients_of, texts, tiny, worst
from tests.mutation import mutated
from tests.train.small import small_config, train_rank

LENGTHS = (13, 2, 30, 7, 2, 18, 5, 9)
PACK = 16


def packed(
    lengths: Any, *, across: bool, pack_to: int = PACK, tokens: int = 2 * PACK, epochs: float = 0.0
) -> PackOrder:
    order = StepOrder(lengths, tokens_per_step=tokens, seed=2, eval_documents=1, epochs=epochs)
    return PackOrder(order, pack_to=pack_to, tokens_per_step=tokens, across=across)


@settings(deadline=None, max_examples=25)
@given(
    lengths=st.lists(st.integers(1, 40), min_size=2, max_size=30),
    pack_to=st.integers(1, 50),
    packs=st.integers(1, 4),
    across=st.booleans(),
)
def test_packs_are_the_stream_cut_at_equal_distance(lengths: list[int], pack_to: int, packs: int, across: bool) -> None:
    corpus = [np.arange(length) + 100 * document for document, length in enumerate(lengths)]
    tokens = pack_to * packs
    order = packed(lengths, across=across, pack_to=pack_to, tokens=tokens)
    stream = np.concatenate([corpus[document] for document in order.stream.part_at(0).ids[:400]])
    for step in (0, 3, 1):
        documents, ends = order.select(corpus, step), np.cumsum([0, *order.lengths_of_step(step)])
        assert [len(document) for document in documents] == order.lengths_of_step(step)
        text = np.concatenate([document[np.arange(len(document))] for document in documents])
        begin, length = step * tokens, tokens
        if (epoch := order.stream.tokens) >= tokens:
            before, within = divmod(step, -(-epoch // tokens))
            begin, length = before * epoch + within * tokens, min(tokens, epoch - within * tokens)
            assert len({*text.tolist()}) == len(text)
        part = stream[begin : begin + length]
        assert text[: len(part)].tolist() == part.tolist() and len(text) == length
        assert set(range(0, length, pack_to)) <= set(ends.tolist())
        if across:
            assert len(documents) == -(-length // pack_to)
        else:
            assert all(len(document.pieces) == 1 for document in documents)
        some = documents[-1][np.arange(len(documents[-1]))[1::2]]
        assert some.tolist() == text[ends[-2] :][1::2].tolist()


@pytest.mark.parametrize("across", [False, True])
@pytest.mark.parametrize("packs", [1, 2, 99])
@pytest.mark.parametrize("epochs", [0.5, 1, 2])
def test_epochs_of_packs_hold_all_tokens_so_often(epochs: float, packs: int, across: bool) -> None:
    order = packed(LENGTHS, across=across, tokens=packs * PACK, epochs=epochs)
    corpus = [np.arange(length) + 100 * document for document, length in enumerate(LENGTHS)]
    steps = [order.select(corpus, step) for step in range(order.count_steps())]
    tokens = [[token for document in step for token in document[np.arange(len(document))].tolist()] for step in steps]
    assert all(len(set(step)) == len(step) for step in tokens)
    ids = order.stream.part_at(0).ids[: math.ceil(epochs * 7)]
    assert [token for step in tokens for token in step] == np.concatenate(
        [corpus[document] for document in ids]
    ).tolist()
    lengths = [order.lengths_of_step(step) for step in range(len(steps))]
    assert lengths == [[len(document) for document in step] for step in steps] and max(map(max, lengths)) <= PACK
    assert [order.begin_of_step(step) for step in range(len(steps))] == np.cumsum([0, *map(sum, lengths)])[:-1].tolist()


def masked() -> list[Document]:
    draw = np.random.default_rng(0)
    ids = texts(LENGTHS)
    return [Document(ids[d], loss_mask=draw.random(length) < 0.5) for d, length in enumerate(LENGTHS)]


def dense(order: PackOrder, corpus: list[Any], *, across: bool) -> tuple[float, int, dict[str, torch.Tensor]]:
    """Loss, targets and gradients of the stock model on the second step: the stream cut by hand."""
    run, place = list[tuple[int, int, int]](), 0  # token, label, place in its document
    while len(run) < 4 * PACK:
        document = corpus[int(order.stream.part_at(place).ids[place - order.stream.part_at(place).first])]
        positions = np.arange(len(document))
        labels = document.labels(positions) if isinstance(document, Document) else np.asarray(document)
        ids = document[positions] if isinstance(document, Document) else np.asarray(document)
        run += zip(ids.tolist(), labels.tolist(), positions.tolist(), strict=True)
        place += 1
    model, total, count = tiny("qwen3", torch.float64), torch.zeros((), dtype=torch.float64), 0
    for start in (2 * PACK, 3 * PACK):
        pack = run[start : start + PACK]
        cuts = [0, *(i for i in range(1, PACK) if not across and pack[i][2] == 0), PACK]
        for a, b in pairwise(cuts):
            ids, labels, _ = (torch.tensor(values) for values in zip(*pack[a:b], strict=True))
            logits = model(input_ids=ids[None]).logits[0, :-1]
            total = total + F.cross_entropy(logits, labels[1:], ignore_index=-100, reduction="sum")
            count += int((labels[1:] != -100).sum())
    (total / count).backward()
    return float(total / count), count, gradients_of(model)


def _steps(rank: int) -> dict[str, tuple[float, ...]]:
    errors = dict[str, tuple[float, ...]]()
    with World(Layout(ranks=2), backend=backend()) as world:
        model = prepare(tiny("qwen3", torch.float64), world)
        for across, labelled in product((False, True), repeat=2):
            corpus: list[Any] = masked() if labelled else texts(LENGTHS)
            order = packed(LENGTHS, across=across)
            loss, count, gradients = dense(order, corpus, across=across)
            lengths, documents = order.lengths_of_step(1), order.select(corpus, 1)
            assert all(isinstance(document, LabelledPack) == labelled for document in documents)
            plans: dict[str, Plan] = {f"cp {cp}": plan_fixed(lengths, world.home, cp=cp) for cp in (1, 2)}
            plans["dynamic"] = plan_dynamic(lengths, world.home, max_tokens_per_slot=8)
            for name, plan in plans.items():
                counted = count_pack_targets(documents, plan)
                assert labelled or counted is plan
                result = run_step(model, counted, documents, world)
                assert result.targets == count
                here = {key: value.cpu() for key, value in gradients_of(model).items()}
                errors[f"{across} {labelled} {name}"] = abs(result.loss / loss - 1), worst(here, gradients)
                model.zero_grad()
    return errors


def test_packs_have_the_loss_and_gradients_of_the_dense_model() -> None:
    for errors in run_ranks(_steps, 2):
        assert len(errors) == 4 * 3 and all(max(of_plan) < 1e-12 for of_plan in errors.values()), errors


def test_first_tokens_of_documents_are_targets_but_that_of_the_pack() -> None:
    documents = [Document([1, 2, 3], loss_mask=[1, 1, 1]), Document([4, 5], loss_mask=[1, 0])]
    pack = LabelledPack((Piece(documents[0], 1, 3), Piece(documents[1], 0, 2)))
    assert pack.labels(np.arange(4)).tolist() == [2, 3, 4, -100] and pack.targets == 2


def test_a_run_of_packs(tmp_path: Path) -> None:
    config = small_config(
        tmp_path, train__steps=3, data__pack_to=16, data__eval_documents=6, context__max_tokens_per_slot=8
    )
    run_ranks(train_rank, 2, config, 2, timeout=120)
    rows = read_metrics(Path(config.run.dir) / "metrics.jsonl")
    order = make_step_order(config, corpus := Corpus(Path(config.run.dir) / "corpus"))
    expected = [(128, 128 - len(order.lengths_of_step(step))) for step in range(3)]
    assert [(row["tokens"], row["targets"]) for row in rows if "loss" in row] == expected
    held_out = corpus.lengths[list(order.evaluation)]
    assert {row["eval_tokens"] for row in rows if "eval_loss" in row} == {held_out.sum()} and held_out.max() > 16


def test_labels_on_placeholders_of_packs_are_no_targets() -> None:
    chats = [Document([5, 6, 7, 8], labels=[-100, 6, 7, 8]), Document([3, 4, 5], labels=[3, -100, 5])]
    pack = LabelledPack((Piece(chats[0], 0, 4), Piece(chats[1], 0, 3)))
    documents = ItemDocuments([pack], [Item(0, ((2, 4),))], [None])
    plan = plan_fixed([7], Layout(1), cp=1)
    assert pack.targets == 5 and count_pack_targets(documents, plan).targets == 3 == documents.targets


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"pack_to": 1}, "data.pack_to is 1; a pack of one token predicts nothing"),
        ({"pack_to": 5000}, r"data.pack_to is 5000 and a step takes 4096 tokens .* to 5000 or a"),
        ({"pack_to": 64, "max_document_tokens": 32}, "max_document_tokens 32 would cut .* to 64 tokens"),
        (
            {"pack_attention": "across"},
            "data.pack_attention is .across., which needs data.pack_to at least 1, and data.pack_to is 0",
        ),
    ],
)
def test_keys_that_do_not_fit_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(resolve_defaults(RunConfig(data=DataConfig(**values))), 4)
    config = resolve_defaults(RunConfig(data=DataConfig(pack_to=512)))
    assert config.data.max_document_tokens == 0  # packs cut texts where nothing else is said
    check_config(config, 4)
    with pytest.raises(ConfigError, match=r"data\.pack_to 512"):
        check_config(replace(config, context=replace(config.context, max_tokens_per_slot=128)), 4)


# ---- packs of documents with images: none is cut in an image


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


def packed_images(folder: Path, *, across: bool) -> tuple[ImagePacks, Any, Any]:
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
    packs, documents, tokens = packed_images(tmp_path, across=across)
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
