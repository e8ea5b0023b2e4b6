"""Texts that are encoded in pieces have the ids of the whole text, for byte-level and sentencepiece-like tokenizers."""

from functools import cache
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from longspan.corpus import long_texts, tokenizer
from longspan.corpus.long_texts import can_encode_in_pieces, encode_in_pieces, encode_with_spans
from longspan.corpus.rows import encoding
from longspan.corpus.rows.sample import BadRow, Row, Sample
from longspan.corpus.tokenizer import TextTokenizer, train_tokenizer

TEXTS = [
    "the layout of a plan says which rank holds which rows; the rank's rows aren't others'",
    "def layout(rank: int) -> int:\n    if rank:\n\n        return rank * 100000 + 2024\n\n\n    return  0  # 12345",
    "für alle Ränge: übrig, größer — 日本語の文章です。Привет, мир! 👍🏽 naïve e\u0301te\u0301",
    "aaaa aaa aa a    bb bbb  ababab abab\t\t\n\n \n  x 1 22 333 4444",
]
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
KINDS = ("gpt-2", "llama-3", "prefix space", "llama-2", "metaspace")


@cache
def engine_of(kind: str) -> Tokenizer:
    if kind == "gpt-2":
        return train_tokenizer(TEXTS * 4, 420).engine
    engine = Tokenizer(models.BPE(byte_fallback=kind == "llama-2", unk_token="<unk>", fuse_unk=kind == "llama-2"))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if kind == "llama-3":
        split = pre_tokenizers.Split(Regex(LLAMA_3), "isolated")
        engine.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
        engine.normalizer = normalizers.NFC()
    elif kind == "prefix space":
        engine.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
        engine.post_processor = processors.ByteLevel(trim_offsets=True)
    elif kind == "llama-2":  # the whole text is one word
        engine.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        alphabet = []
    else:
        engine.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
        alphabet = []
    trainer = trainers.BpeTrainer(
        vocab_size=420, special_tokens=["<unk>"], initial_alphabet=alphabet, show_progress=False
    )
    engine.train_from_iterator(TEXTS * 4, trainer)
    return engine


WORDS = [word for text in TEXTS for word in text.split(" ")]
PARTS = st.sampled_from([*WORDS, " ", " ", "  ", "\n", "12", "a", "aa", "'s"])
TEXT = st.lists(st.one_of(PARTS, PARTS, PARTS, st.text(max_size=4)), max_size=80).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=60, deadline=None)
@given(text=TEXT, piece=st.integers(40, 80), overlap=st.integers(24, 36))
def test_pieces_give_the_ids_of_the_whole(kind: str, text: str, piece: int, overlap: int) -> None:
    engine = engine_of(kind)
    whole = engine.encode(text, add_special_tokens=False)
    assert encode_in_pieces(engine, text, piece=piece, overlap=overlap).tolist() == whole.ids
    spans = encode_with_spans(engine, text, piece=piece, overlap=overlap)[1]
    assert spans.tolist() == [list(span) for span in whole.offsets]


@pytest.mark.parametrize("kind", KINDS)
def test_long_texts_are_joined_from_pieces(kind: str) -> None:
    engine, draw = engine_of(kind), np.random.default_rng(0)
    text = " ".join(TEXTS[i] for i in draw.integers(0, len(TEXTS), 400))
    whole = engine.encode(text, add_special_tokens=False).ids
    longest = 0
    encode = long_texts._encode_piece

    def noted(engine: Tokenizer, text: str, begin: int, end: int) -> object:
        nonlocal longest
        longest = max(longest, end - begin)
        return encode(engine, text, begin, end)

    with patch.object(long_texts, "_encode_piece", noted):
        assert encode_in_pieces(engine, text, piece=2000, overlap=200).tolist() == whole
    assert 0 < longest < 3000


def test_a_tokenizer_puts_the_same_around_long_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = Tokenizer.from_str(engine_of("llama-3").to_str())
    engine.add_special_tokens(["<s>", "</s>"])
    ids = [(name, engine.token_to_id(name)) for name in ("<s>", "</s>")]
    engine.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=ids)
    whole = TextTokenizer(engine, ids[1][1], "")
    texts = ["short", " ".join(TEXTS * 9), "", "shorter"]
    wanted = [row.tolist() for row in whole.encode(texts)]
    monkeypatch.setattr(tokenizer, "PIECE", 300)
    monkeypatch.setattr(tokenizer, "encode_in_pieces", lambda e, t: encode_in_pieces(e, t, piece=300, overlap=80))
    assert [row.tolist() for row in whole.encode(texts)] == wanted


def test_other_models_are_encoded_as_a_whole() -> None:
    assert can_encode_in_pieces(engine_of("gpt-2"))
    assert not can_encode_in_pieces(Tokenizer(models.Unigram())) and not can_encode_in_pieces(
        Tokenizer(models.BPE(dropout=0.1))
    )


def test_overlaps_are_doubled_while_they_are_shorter_than_a_piece() -> None:
    engine, text = engine_of("gpt-2"), "a b" * 100
    left = long_texts._encode_piece(engine, text, 0, 100)
    pieces = [*long_texts._next_pieces(engine, text, left, 50, 8)]
    assert [(left.end - piece.begin, piece.end) for piece in pieces] == [(8, 150), (16, 150), (32, 150), (64, 150)]


def test_pieces_that_disagree_are_not_joined() -> None:
    merges = [("▁", "a"), ("▁a", "▁a"), ("▁a▁a", "▁a▁a")]
    words = ["▁", "a", *(first + second for first, second in merges)]
    engine = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    engine.normalizer = normalizers.Replace(" ", "▁")
    for count in range(60, 80):  # the whole text is one word, whose tokens depend on where it begins
        text = "▁a" * count + " " + "▁a" * count
        whole = engine.encode(text).ids
        for piece in range(50, 58):
            assert encode_in_pieces(engine, text, piece=piece, overlap=25).tolist() == whole


def test_a_pattern_sees_the_end_of_a_run_of_spaces() -> None:
    trained = ["x\n  \n  x", "x\n    \nx", "\n   \n   \n  x"] * 3
    engine = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(LLAMA_3), "isolated")
    engine.pre_tokenizer = pre_tokenizers.Sequence([split, pre_tokenizers.ByteLevel(False, use_regex=False)])
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False)
    engine.train_from_iterator(trained, trainer)
    for spaces in range(30, 90):
        for before in range(20, 40, 3):
            text = "x y, " * (before // 5) + "z" * (before % 5) + "\n" + " " * spaces + "\n  x, y" * 4
            whole = engine.encode(text).ids
            assert encode_in_pieces(engine, text, piece=60, overlap=28).tolist() == whole


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(before=TEXT, word=st.integers(0, 500), after=TEXT, piece=st.integers(40, 80))
def test_a_word_that_cannot_be_cut_lengthens_its_piece_only(
    kind: str, before: str, word: int, after: str, piece: int
) -> None:
    engine = engine_of(kind)
    text = f"{before} {'layout' * word} {after}"
    whole = engine.encode(text, add_special_tokens=False).ids
    assert encode_in_pieces(engine, text, piece=piece, overlap=30).tolist() == whole


def test_a_word_that_is_too_long_is_a_bad_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_texts, "LARGEST", 3000)
    monkeypatch.setattr(encoding, "PIECE", 200)
    monkeypatch.setattr(tokenizer, "PIECE", 200)
    monkeypatch.setattr(tokenizer, "encode_in_pieces", lambda e, t: encode_in_pieces(e, t, piece=200, overlap=80))
    whole = TextTokenizer(engine_of("gpt-2"), None, "")
    words = " ".join(TEXTS * 9)
    texts = [words, f"{words} {'z' * 2000} {words}", f"{words} {'z' * 9000} {words}", "short"]
    rows = [Row(f"a.jsonl, line {n}", {"text": text}) for n, text in enumerate(texts, 1)]
    found = encoding.encode_texts(rows, whole)
    bad = found[2]
    assert isinstance(bad, BadRow) and bad.where == "a.jsonl, line 3"
    assert "characters, from character" in bad.reason and "3,000 characters are the most" in bad.reason
    for n in (0, 1, 3):
        sample = found[n]
        assert isinstance(sample, Sample) and sample.row == n
        assert sample.ids.tolist() == whole.engine.encode(texts[n]).ids
