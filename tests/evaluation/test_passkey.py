"""Passkey retrieval: spans and lengths for kinds of tokenizers, and the grid beside one process and greedy decoding."""

import json
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast

from longspan import Layout, World, evaluate, prepare
from longspan.errors import DataError, EvaluationError
from longspan.evaluation.passkey import (
    KEY,
    PASSKEY_OPENING,
    QUESTION,
    PasskeyDocument,
    PasskeyDocuments,
    passkey_documents,
    passkey_text,
)
from longspan.evaluation.result import PasskeyGrid
from longspan.testing import backend, run_ranks
from longspan.train import EvaluationOptions, PlanChoice, TargetRows
from tests.model.deep import deep

TEXTS = [passkey_text(10_000 + 977 * i % 90_000, i % 4, i % 3) for i in range(60)]


@cache
def byte_level() -> Tokenizer:
    """As GPT-2's: the space before a word belongs to its first token."""
    engine = Tokenizer(models.BPE())
    engine.pre_tokenizer, engine.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    engine.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    )
    return engine


@cache
def digit_by_digit() -> Tokenizer:
    """As Qwen's and Llama 3's: the space before a number is a token, so is a digit; a text begins with a token."""
    engine = Tokenizer(models.BPE())
    digits = pre_tokenizers.Digits(individual_digits=True)
    engine.pre_tokenizer = pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    engine.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=420,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    engine.train_from_iterator(TEXTS, trainer)
    around = processors.TemplateProcessing(single="<s> $A </s>", special_tokens=[("<s>", 0), ("</s>", 1)])
    engine.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=True), around])
    return engine


@cache
def sentence_piece() -> Tokenizer:
    """As Llama 2's: no words, spaces are written ▁, and one stands before every text."""
    engine = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    engine.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    engine.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)])
    trainer = trainers.BpeTrainer(vocab_size=200, special_tokens=["<unk>"], show_progress=False, max_token_length=9)
    engine.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    engine.train_from_iterator(TEXTS, trainer)
    engine.pre_tokenizer = None
    return engine


KINDS = {"byte-level": byte_level, "digits": digit_by_digit, "sentencepiece": sentence_piece}


@pytest.mark.parametrize("kind", KINDS)
@settings(deadline=None)
@given(extra=st.integers(0, 300), depth=st.floats(0, 1), seed=st.integers(0, 9))
def test_documents_have_their_length_and_say_key_question_and_answer(
    kind: str, extra: int, depth: float, seed: int
) -> None:
    tokenizer = KINDS[kind]()
    length = 110 + extra
    (document,) = passkey_documents(tokenizer, (length,), (depth,), samples=1, seed=seed)
    ids = document.all_ids()
    assert len(ids) == len(document) == length
    assert np.array_equal(document[np.array([length - 1, 3])], ids[[length - 1, 3]])
    text = tokenizer.decode(ids.tolist(), skip_special_tokens=True)
    key = str(document.key)
    assert text.startswith(PASSKEY_OPENING)
    assert text.endswith(f"{QUESTION} {key}")
    assert text.count(KEY.format(key=key)) == 1
    assert tokenizer.decode(ids[document.answer_start :].tolist()).strip() == key
    assert tokenizer.decode(ids[: document.answer_start].tolist(), skip_special_tokens=True).endswith(QUESTION)
    longest = max(np.diff([0, *document.pieces.sentence_ends]))  # the key stands between sentences
    assert abs(document.key_at - depth * document.filler) <= longest / 2


@pytest.mark.parametrize("kind", KINDS)
def test_ids_are_those_of_the_whole_text(kind: str) -> None:
    """Where all filler is whole sentences, the tokenizer's own ids of the text, without what it puts behind one."""
    tokenizer = KINDS[kind]()
    for before, after in ((0, 0), (0, 7), (5, 1), (6, 0)):
        text = passkey_text(71432, before, after)
        ids = tokenizer.encode(text).ids
        closing = len(tokenizer.encode("").ids) // 2 if kind == "digits" else 0
        whole = ids[: len(ids) - closing]
        for depth in (before / max(before + after, 1),):
            (document,) = passkey_documents(tokenizer, (len(whole),), (depth,), samples=1)
            again = tokenizer.encode(passkey_text(document.key, before, after)).ids
            if len(again) == len(ids):  # a key of as many tokens
                assert document.all_ids().tolist() == again[: len(again) - closing]


def test_the_same_arguments_give_the_same_documents_and_other_lengths_change_none() -> None:
    few = passkey_documents(byte_level(), (200,), (0.5,), samples=2, seed=3)
    stock = PreTrainedTokenizerFast(tokenizer_object=byte_level())
    more = passkey_documents(stock, (150, 200), (0, 0.5), samples=3, seed=3)
    by_place = {(d.length, d.depth, i % 3): d for i, d in enumerate(more)}
    for sample, document in enumerate(few):
        assert np.array_equal(document.all_ids(), by_place[200, 0.5, sample].all_ids())
    assert len({document.key for document in more}) == len(more) == 12
    assert passkey_documents(byte_level(), (200,), (0.5,), samples=2, seed=4)[0].key != few[0].key


def test_what_cannot_be_is_refused_with_its_numbers() -> None:
    with pytest.raises(DataError, match=r"of 40 tokens has no room .* \d+ tokens of this tokenizer"):
        passkey_documents(byte_level(), (40,))
    with pytest.raises(DataError, match=r"not \[1.5\]"):
        passkey_documents(byte_level(), (200,), (0.5, 1.5))
    with pytest.raises(DataError, match="0 lengths, 5 depths and 4 samples"):
        passkey_documents(byte_level(), ())
    words = Tokenizer(models.WordLevel({"<unk>": 0, "The": 1}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    with pytest.raises(DataError, match="12345 and 67890 with the same ids"):
        passkey_documents(words, (200,))
    with pytest.raises(DataError, match="str is no tokenizer"):
        passkey_documents("folder", (200,))


LENGTHS, DEPTHS, SAMPLES = (96, 130, 201), (0.0, 1.0), 2
VOCABULARY = 420


@cache
def retrieved_and_lost() -> PasskeyDocuments:
    """Documents whose answers are what the model generates greedily, in some with one token changed."""
    model, made = deep("qwen3", torch.float64, vocabulary=VOCABULARY).eval(), list[PasskeyDocument]()
    documents = passkey_documents(digit_by_digit(), LENGTHS, DEPTHS, SAMPLES)
    for index, document in enumerate(documents):
        ids = document.all_ids()[: document.answer_start].tolist()
        for _ in document.answer:
            with torch.no_grad():
                ids.append(int(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
        answer = np.array(ids[document.answer_start :])
        if index in WRONG_AT:
            answer[WRONG_AT[index]] = (answer[WRONG_AT[index]] + 1) % VOCABULARY
        made.append(replace(document, answer=answer))
    return replace(documents, documents=tuple(made))


WRONG_AT = {0: 0, 1: 5, 2: 3, 7: 5, 9: 0}  # of documents, the token of the answer (of six) that is changed
RETRIEVED = ((0, 1), (2, 1), (1, 2))


def _grids(rank: int, home: dict[str, int], degrees: tuple[int, ...], documents: PasskeyDocuments) -> list[PasskeyGrid]:
    grids, options = list[PasskeyGrid](), EvaluationOptions(step=7, loss_chunk_rows=7)
    with World(Layout(**home), backend=backend(), timeout=60) as world:
        model = prepare(deep("qwen3", torch.float64, vocabulary=VOCABULARY), world)
        for degree in degrees:
            evaluation = evaluate(model, documents, PlanChoice.fixed(degree), world, options)
            assert evaluation.passkey is not None
            assert evaluation.row()["passkey"] == evaluation.passkey.to_json()
            grids.append(evaluation.passkey)
    return grids


@pytest.mark.parametrize(
    ("home", "degrees"), [({"ranks": 4}, (1, 2, 4)), ({"ranks": 4, "pp": 2}, (1, 2)), ({"ranks": 4, "tp": 2}, (2,))]
)
def test_the_grid_equals_greedy_decoding_and_dense_losses(home: dict[str, int], degrees: tuple[int, ...]) -> None:
    documents = retrieved_and_lost()
    model, device = deep("qwen3", torch.float64, vocabulary=VOCABULARY).eval(), "cuda" if backend() == "nccl" else "cpu"
    torch.nn.Module.to(model, device)  # of the ranks: a GPU may round float32 rotary factors otherwise
    losses = []
    for document in documents:
        ids, first = torch.from_numpy(document.all_ids()), document.answer_start - 1
        with torch.no_grad():
            logits = model(input_ids=ids[None].to(device), use_cache=False).logits[0].cpu()
        losses.append(F.cross_entropy(logits[first:-1], ids[first + 1 :]).item())
    dense = np.array(losses).reshape(len(LENGTHS), len(DEPTHS), SAMPLES).mean(-1)
    of_ranks = run_ranks(_grids, 4, home, degrees, documents)
    assert of_ranks[0] == of_ranks[1] == of_ranks[2] == of_ranks[3]
    for grid, degree in zip(of_ranks[0], degrees, strict=True):
        assert (grid.lengths, grid.depths, grid.samples) == (LENGTHS, DEPTHS, SAMPLES)
        assert (grid.retrieved, grid.step, grid.cp) == (RETRIEVED, 7, degree)
        assert np.array(grid.losses) == pytest.approx(dense, rel=1e-12)


def _failure(rank: int) -> str:
    def total(rows: TargetRows) -> Any:
        return rows.losses.sum(), len(rows.losses)

    with World(Layout(ranks=1), backend=backend(), timeout=60) as world:
        model = prepare(deep("qwen3", torch.float64, vocabulary=VOCABULARY), world)
        with pytest.raises(EvaluationError) as error:
            options = EvaluationOptions(document_metrics={"total": total})
            evaluate(model, [np.arange(9)], PlanChoice.fixed(1), world, options)
    return str(error.value)


def test_a_metric_of_documents_gives_a_value_and_a_count_for_each_row() -> None:
    (said,) = run_ranks(_failure, 1)
    assert "the metric of documents 'total' gave" in said
    assert "two tensors of shape (2,)" in said


def test_a_grid_is_the_same_from_json_and_reads_as_a_table() -> None:
    grid = PasskeyGrid((512, 1024), (0.0, 1.0), 4, ((4, 4), (1, 3)), ((0.1, 0.1), (2.0, 0.7)), step=9, cp=2)
    assert PasskeyGrid.from_json(json.loads(json.dumps(grid.to_json()))) == grid
    assert grid.share == 12 / 16
    assert grid.share_of_length(1) == 4 / 8
    assert [line.split() for line in grid.table().splitlines()[1:]] == [
        ["depth", "512", "1,024"],
        ["0", "100%", "25%"],
        ["1", "100%", "75%"],
    ]
    with pytest.raises(ValueError, match="2 x 1 cells"):
        PasskeyGrid.from_json(grid.to_json() | {"depths": [0.5]})
