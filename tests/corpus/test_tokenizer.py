"""Tokenizers: trained ones, given ones, those that are refused; bytes of tokens; ids of long texts in pieces."""

import json
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoTokenizer

from longspan.corpus import long_texts, tokenizer
from longspan.corpus.long_texts import can_encode_in_pieces, encode_with_spans
from longspan.corpus.rows import encoding
from longspan.corpus.rows.sample import BadRow, Row, Sample
from longspan.corpus.token_bytes import token_bytes
from longspan.corpus.tokenizer import END_OF_TEXT, TextTokenizer, check_vocabulary, load_tokenizer, train_tokenizer
from longspan.errors import DataError
from tests.corpus.rows.families import LLAMA_SPLIT, trained_engine

TEXTS = ["def layout(rank):\n    return rank\n" * 5, "für alle Ränge: übrig ✓\n", "plan " * 30]


def test_equal_texts_give_an_equal_tokenizer_and_every_byte_survives() -> None:
    one, two = train_tokenizer(TEXTS, 300), train_tokenizer(TEXTS, 300)
    assert one.digest == two.digest and one.size <= 300
    text = "\x00 any ünseen ✓ text\r\n\t" + TEXTS[0]
    (ids,) = one.encode([text])
    assert ids.dtype == np.int64 and ids[-1] == one.end
    assert one.engine.decode(ids[:-1].tolist()) == text


def test_a_saved_tokenizer_is_loaded_here_and_by_transformers(tmp_path: Path) -> None:
    tokenizer = train_tokenizer(TEXTS, 300)
    tokenizer.save_pretrained(str(tmp_path / "new" / "folder"))  # which is made
    tmp_path = tmp_path / "new" / "folder"
    again = load_tokenizer(tmp_path)
    again.save_pretrained(tmp_path / "copy")
    assert (tmp_path / "copy" / "tokenizer.json").read_bytes() == (tmp_path / "tokenizer.json").read_bytes()
    assert (again.digest, again.end, again.size) == (tokenizer.digest, tokenizer.end, tokenizer.size)
    stock = AutoTokenizer.from_pretrained(tmp_path, local_files_only=True)
    assert stock(TEXTS[0])["input_ids"] == tokenizer.encode([TEXTS[0]])[0][:-1].tolist()
    assert stock.eos_token_id == tokenizer.end


ENDS: list[tuple[dict[str, object] | None, bool]] = [({"eos_token": END_OF_TEXT}, True), ({}, False), (None, True)]
ENDS.append(({"eos_token": {"__type": "AddedToken", "content": END_OF_TEXT}}, True))


@pytest.mark.parametrize(("settings", "end"), ENDS)
def test_the_end_of_text_that_a_folder_names(tmp_path: Path, settings: dict[str, object] | None, end: bool) -> None:
    train_tokenizer(TEXTS, 300).save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert (load_tokenizer(tmp_path).end is not None) == end


LLAMA = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}


def with_bos(folder: Path, closing: str = "") -> Path:
    engine = train_tokenizer(TEXTS, 300).engine
    engine.add_special_tokens(["<s>", "</s>", "<|im_start|>"])
    ids = [(token, engine.token_to_id(token)) for token in ("<s>", "</s>")]
    engine.post_processor = processors.TemplateProcessing(single=f"<s> $A {closing}".strip(), special_tokens=ids)
    folder.mkdir()
    engine.save(str(folder / "tokenizer.json"))
    more = {"content": "<|tool|>", "special": True, "lstrip": False, "rstrip": False, "normalized": False}
    number = str(engine.get_vocab_size())
    (folder / "tokenizer_config.json").write_text(json.dumps(LLAMA | {"added_tokens_decoder": {number: more}}))
    return folder


@pytest.mark.parametrize("closing", ["", "</s>"])
@pytest.mark.parametrize("parse", [False, True])
def test_ids_are_those_of_transformers_and_the_end_of_text(tmp_path: Path, closing: str, parse: bool) -> None:
    folder = with_bos(tmp_path / "t", closing)
    tokenizer = load_tokenizer(folder).set_parsing(parse)
    stock = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    texts = ["", "plan", "<|im_start|>user <|tool|> def</s> rank<s>", TEXTS[1]]
    for text, ids in zip(texts, tokenizer.encode(texts), strict=True):
        wanted = stock(text, split_special_tokens=not parse)["input_ids"]
        assert ids.tolist() == wanted + [stock.eos_token_id] * (not closing)
    assert tokenizer.surrounding_tokens == (("<s>",), ("</s>",))
    assert tokenizer.size == len(stock)


def test_files_of_a_tokenizer_are_kept_byte_for_byte(tmp_path: Path) -> None:
    folder, kept = with_bos(tmp_path / "t"), tmp_path / "kept"
    (folder / "chat_template.jinja").write_text("{% for message in messages %}{{ message }}{% endfor %}")
    (folder / "special_tokens_map.json").write_text('{"bos_token": "<s>"}')
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tools.jinja").write_text("{{ tools }}")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    kept.mkdir()
    (kept / "vocab.txt").write_text("of another tokenizer")
    load_tokenizer(folder).save_pretrained(kept)
    files = {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    del files[Path("config.json")]
    assert {path.relative_to(kept): path.read_bytes() for path in kept.rglob("*") if path.is_file()} == files


def test_a_vocabulary_that_is_larger_than_the_embedding() -> None:
    check_vocabulary(300, 300, tokenizer="here", model="m")
    with pytest.raises(DataError, match=r"tokenizer here has ids up to 300, the embedding of m has 300 rows"):
        check_vocabulary(301, 300, tokenizer="here", model="m")


def test_a_folder_with_files_of_another_kind_is_read_by_transformers(tmp_path: Path) -> None:
    trained = train_tokenizer(TEXTS, 300)
    trained.engine.model.save(str(tmp_path))
    settings = {"tokenizer_class": "GPT2Tokenizer", "eos_token": END_OF_TEXT, "add_prefix_space": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["merges.txt", "tokenizer_config.json", "vocab.json"]
    loaded = load_tokenizer(tmp_path)
    for mine, other in zip(loaded.encode(TEXTS), trained.encode(TEXTS), strict=True):
        np.testing.assert_array_equal(mine, other)
    assert loaded.end == trained.end
    kept = tmp_path / "kept"
    kept.mkdir()
    loaded.save_pretrained(kept)
    assert load_tokenizer(kept).digest == loaded.digest


def test_folders_whose_files_are_none_of_a_tokenizer_name_them(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no tokenizer.json in"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    for file in ("tokenizer.model", "tekken.json", "tiktoken.model"):
        (tmp_path / file).write_bytes(b"\x00\x01 no vocabulary")
        message = rf"{file} and no tokenizer.json: pip install sentencepiece tiktoken protobuf"
        with pytest.raises(DataError, match=message):
            load_tokenizer(tmp_path)
        (tmp_path / file).unlink()
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer.json is not a tokenizer"):
        load_tokenizer(tmp_path)


def test_no_code_of_a_tokenizers_folder_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question"))
    train_tokenizer(TEXTS, 300).save_pretrained(tmp_path)
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "own.py").write_text("from pathlib import Path\nPath(__file__ + '.ran').touch()\n")
    with pytest.raises(DataError, match=r"no code of a folder is run; where its tokenizer.json alone makes") as refused:
        load_tokenizer(tmp_path)
    assert "trust_remote_code" not in str(refused.value) and not list(tmp_path.glob("*.ran"))


BYTE_LEVEL = train_tokenizer(TEXTS, 300).engine


def _sentencepiece() -> Tokenizer:
    engine = Tokenizer(models.BPE(byte_fallback=True, fuse_unk=True))
    engine.normalizer = normalizers.Replace(" ", "\u2581")
    engine.decoder = decoders.Sequence([decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()])
    special = ["<s>", *(f"<0x{i:02X}>" for i in range(256))]
    trainer = trainers.BpeTrainer(vocab_size=400, special_tokens=special, show_progress=False)
    engine.train_from_iterator(TEXTS, trainer)
    return engine


SENTENCEPIECE = _sentencepiece()


@settings(max_examples=40, deadline=None, derandomize=True)
@pytest.mark.parametrize("engine", [BYTE_LEVEL, SENTENCEPIECE], ids=["byte-level", "sentencepiece"])
@given(text=st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\u2581<>"), max_size=40))
def test_bytes_of_tokens_add_up_to_those_of_the_text(engine: Tokenizer, text: str) -> None:
    counts = token_bytes(engine)
    assert counts is not None
    assert counts[engine.encode(text, add_special_tokens=False).ids].sum() == len(text.encode())


def test_special_tokens_stand_for_no_text_and_added_ones_for_theirs() -> None:
    engine = Tokenizer.from_str(BYTE_LEVEL.to_str())
    engine.add_special_tokens(["<|pad|>"])
    engine.add_tokens([AddedToken("größe", normalized=False)])
    counts = token_bytes(engine, 400)
    assert counts is not None and len(counts) == 400
    assert [counts[engine.token_to_id(token)] for token in ("<|pad|>", "größe")] == [0, 7]
    assert not counts[engine.get_vocab_size() :].any()


def test_a_vocabulary_that_does_not_say_has_none() -> None:
    engine = Tokenizer(models.WordPiece({"[UNK]": 0, "a": 1, "##b": 2}, unk_token="[UNK]"))
    engine.pre_tokenizer, engine.decoder = pre_tokenizers.Whitespace(), decoders.WordPiece()
    assert token_bytes(engine) is None


LONG = [
    "the layout of a plan says which rank holds which rows; the rank's rows aren't others'",
    "def layout(rank: int) -> int:\n    if rank:\n\n        return rank * 100000 + 2024\n\n\n    return  0  # 12345",
    "für alle Ränge: übrig, größer — 日本語の文章です。Привет, мир! 👍🏽 naïve e\u0301te\u0301",
    "aaaa aaa aa a    bb bbb  ababab abab\t\t\n\n \n  x 1 22 333 4444",
]
KINDS = ("gpt-2", "llama-3", "prefix space", "llama-2", "metaspace")


@cache
def engine_of(kind: str) -> Tokenizer:
    if kind == "gpt-2":
        return train_tokenizer(LONG * 4, 420).engine
    engine = Tokenizer(models.BPE(byte_fallback=kind == "llama-2", unk_token="<unk>", fuse_unk=kind == "llama-2"))
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if kind == "llama-3":
        split = pre_tokenizers.Split(Regex(LLAMA_SPLIT), "isolated")
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
    options: dict[str, Any] = {"special_tokens": ["<unk>"], "initial_alphabet": alphabet, "show_progress": False}
    trainer = trainers.BpeTrainer(vocab_size=420, **options)
    engine.train_from_iterator(LONG * 4, trainer)
    return engine


WORDS = [word for text in LONG for word in text.split(" ")]
PARTS = st.sampled_from([*WORDS, " ", " ", "  ", "\n", "12", "a", "aa", "'s"])
TEXT = st.lists(st.one_of(PARTS, PARTS, PARTS, st.text(max_size=4)), max_size=80).map("".join)


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(before=TEXT, word=st.integers(-500, 500), after=TEXT, piece=st.integers(40, 80), overlap=st.integers(24, 36))
def test_pieces_give_the_ids_of_the_whole(
    kind: str, before: str, word: int, after: str, piece: int, overlap: int
) -> None:
    """Also around a word that cannot be cut, which lengthens its piece alone."""
    engine, text = engine_of(kind), f"{before} {'layout' * word} {after}"
    whole = engine.encode(text, add_special_tokens=False)
    ids, spans = encode_with_spans(engine, text, piece=piece, overlap=overlap)
    assert ids.tolist() == whole.ids and spans.tolist() == [list(span) for span in whole.offsets]


@pytest.mark.parametrize("kind", KINDS)
def test_long_texts_are_joined_from_pieces(kind: str) -> None:
    engine, draw = engine_of(kind), np.random.default_rng(0)
    text = " ".join(LONG[i] for i in draw.integers(0, len(LONG), 200))
    whole = engine.encode(text, add_special_tokens=False).ids
    longest = 0
    encode = long_texts._encode_piece

    def noted(engine: Tokenizer, text: str, begin: int, end: int) -> object:
        nonlocal longest
        longest = max(longest, end - begin)
        return encode(engine, text, begin, end)

    with patch.object(long_texts, "_encode_piece", noted):
        assert encode_with_spans(engine, text, piece=2000, overlap=200)[0].tolist() == whole
    assert 0 < longest < 3000


def test_other_models_are_encoded_as_a_whole() -> None:
    assert can_encode_in_pieces(engine_of("gpt-2"))
    assert not any(map(can_encode_in_pieces, (Tokenizer(models.Unigram()), Tokenizer(models.BPE(dropout=0.1)))))


def test_pieces_that_disagree_are_not_joined() -> None:
    merges = [("▁", "a"), ("▁a", "▁a"), ("▁a▁a", "▁a▁a")]
    words = ["▁", "a", *(first + second for first, second in merges)]
    engine = Tokenizer(models.BPE({word: i for i, word in enumerate(words)}, merges))
    engine.normalizer = normalizers.Replace(" ", "▁")
    for count in range(60, 80):  # the whole text is one word, whose tokens depend on where it begins
        text = "▁a" * count + " " + "▁a" * count
        whole = engine.encode(text).ids
        for piece in range(50, 58):
            assert encode_with_spans(engine, text, piece=piece, overlap=25)[0].tolist() == whole


def test_a_pattern_sees_the_end_of_a_run_of_spaces() -> None:
    engine = trained_engine(("x\n  \n  x", "x\n    \nx", "\n   \n   \n  x") * 3, LLAMA_SPLIT)
    for spaces in range(30, 90):
        for before in range(20, 40, 3):
            text = "x y, " * (before // 5) + "z" * (before % 5) + "\n" + " " * spaces + "\n  x, y" * 4
            whole = engine.encode(text).ids
            assert encode_with_spans(engine, text, piece=60, overlap=28)[0].tolist() == whole


def test_a_word_that_is_too_long_is_a_bad_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(long_texts, "LARGEST", 3000)
    monkeypatch.setattr(encoding, "PIECE", 200)
    monkeypatch.setattr(tokenizer, "PIECE", 200)
    monkeypatch.setattr(
        tokenizer, "encode_with_spans", lambda e, t, **_: encode_with_spans(e, t, piece=200, overlap=80)
    )
    whole = TextTokenizer(engine_of("gpt-2"), None, "")
    words = " ".join(LONG * 9)
    texts = [words, f"{words} {'z' * 2000} {words}", f"{words} {'z' * 9000} {words}", "short"]
    rows = [Row(f"a.jsonl, line {n}", {"text": text}) for n, text in enumerate(texts, 1)]
    found = encoding.RowEncoding("text", whole).encode(rows)
    bad = found[2]
    assert isinstance(bad, BadRow) and bad.where == "a.jsonl, line 3"
    assert "characters, from character" in bad.reason and "3,000 characters are the most" in bad.reason
    for n in (0, 1, 3):
        sample = found[n]
        assert isinstance(sample, Sample) and sample.row == n
        assert sample.ids.tolist() == whole.engine.encode(texts[n]).ids
