"""Tokenizers: trained ones are the same each time, given ones are found, those that do not fit are refused."""

import json
from pathlib import Path

import numpy as np
import pytest
from tokenizers import processors
from transformers import AutoTokenizer

from longspan.corpus.tokenizer import END_OF_TEXT, check_vocabulary, load_tokenizer, train_tokenizer
from longspan.errors import DataError

TEXTS = ["def layout(rank):\n    return rank\n" * 5, "für alle Ränge: übrig\n", "plan " * 30]


def test_equal_texts_give_an_equal_tokenizer_and_every_byte_survives() -> None:
    one, two = train_tokenizer(TEXTS, 300), train_tokenizer(TEXTS, 300)
    assert one.digest == two.digest and one.size <= 300
    text = "\x00 any ünseen ✓ text\r\n\t" + TEXTS[0]
    (ids,) = one.encode([text])
    assert ids.dtype == np.int64 and ids[-1] == one.end
    assert one.engine.decode(ids[:-1].tolist()) == text


def test_the_name_of_a_special_token_in_a_text_is_plain_text() -> None:
    tokenizer = train_tokenizer(TEXTS, 300)
    (ids,) = tokenizer.encode([f"a {END_OF_TEXT} b"])
    assert list(ids).count(tokenizer.end) == 1


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


@pytest.mark.parametrize(
    ("settings", "end"),
    [
        ({"eos_token": END_OF_TEXT}, True),
        ({"eos_token": {"__type": "AddedToken", "content": END_OF_TEXT}}, True),
        ({}, False),
        (None, True),
    ],
)
def test_the_end_of_text_that_a_folder_names(tmp_path: Path, settings: dict[str, object] | None, end: bool) -> None:
    train_tokenizer(TEXTS, 300).save_pretrained(tmp_path)
    (tmp_path / "tokenizer_config.json").unlink()
    if settings is not None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    assert (load_tokenizer(tmp_path).end is not None) == end


LLAMA = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>"}


def with_bos(folder: Path, closing: str = "") -> Path:
    """A tokenizer whose post-processor begins every text with <s>, and has a special token in its settings alone."""
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
    assert (tokenizer.opening, tokenizer.closing) == (("<s>",), ("</s>",))
    assert tokenizer.size == len(stock)
    assert tokenizer.count_special_tokens(texts) == {"<|im_start|>": 1, "<|tool|>": 1, "</s>": 1, "<s>": 1}


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


def test_folders_without_a_tokenizer_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"no tokenizer.json in"):
        load_tokenizer(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(DataError, match=r"tokenizer.json is not a tokenizer"):
        load_tokenizer(tmp_path)


def test_a_vocabulary_that_is_larger_than_the_embedding() -> None:
    check_vocabulary(300, 300, tokenizer="here", model="m")
    with pytest.raises(DataError, match=r"tokenizer here has ids up to 300, the embedding of m has 300 rows"):
        check_vocabulary(301, 300, tokenizer="here", model="m")


def test_a_folder_with_files_of_another_kind_is_read_by_transformers(tmp_path: Path) -> None:
    """vocab.json and merges.txt give the ids that tokenizer.json would."""
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


@pytest.mark.parametrize("file", ["tokenizer.model", "tekken.json", "tiktoken.model"])
def test_a_folder_whose_files_cannot_be_read_names_them(tmp_path: Path, file: str) -> None:
    (tmp_path / file).write_bytes(b"\x00\x01 no vocabulary")
    (tmp_path / "tokenizer_config.json").write_text('{"tokenizer_class": "LlamaTokenizer"}')
    with pytest.raises(DataError, match=rf"{file} and no tokenizer.json: pip install sentencepiece tiktoken protobuf"):
        load_tokenizer(tmp_path)


def test_a_token_that_the_settings_alone_add_is_in_the_digest(tmp_path: Path) -> None:
    train_tokenizer(TEXTS, 300).save_pretrained(tmp_path)
    before, settings = load_tokenizer(tmp_path), json.loads((tmp_path / "tokenizer_config.json").read_text())
    token = {"content": "<tool>", "special": False, "normalized": False}
    settings["added_tokens_decoder"] = {str(before.size): token}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    after = load_tokenizer(tmp_path)
    assert len(after.encode(["a <tool> b"])[0]) < len(before.encode(["a <tool> b"])[0])
    assert after.digest != before.digest


def test_no_code_of_a_tokenizers_folder_is_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("a question"))
    train_tokenizer(TEXTS, 300).save_pretrained(tmp_path)
    settings = {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "own.py").write_text("from pathlib import Path\nPath(__file__ + '.ran').touch()\n")
    with pytest.raises(DataError, match=r"no code of a folder is run; where its tokenizer.json alone makes") as refused:
        load_tokenizer(tmp_path)
    assert "trust_remote_code" not in str(refused.value) and not list(tmp_path.glob("*.ran"))
