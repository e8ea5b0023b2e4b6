"""Texts that are held out: drawn before they are cut or split, so that no part of one is trained on."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longspan.config.sections import DataConfig, RunConfig, SourceConfig
from longspan.corpus import builder
from longspan.corpus.build import ensure_corpus
from longspan.corpus.corpus_settings import CorpusSettings
from longspan.corpus.tokenizer import load_tokenizer
from longspan.data.documents import Corpus
from longspan.train.plans.order import documents_line, make_step_order
from tests.run.runs.test_lora_run import write_base
from tests.run.runs.test_rows_run import TEMPLATE

NAMES = "abcdefghijkl"  # of rows; each is written with its own letter alone, in capitals
LOWEST = ord("!")  # the byte of token 0


def chat(name: str) -> dict[str, Any]:
    turns = 1 + ord(name) % 3
    return {"messages": [{"role": role, "content": name.upper() * 9} for role in ("user", "assistant") * turns]}


ROWS = {
    "text": lambda name: {"text": name.upper() * (5 + 3 * ord(name) % 50)},
    "tokens": lambda name: {"input_ids": [ord(name.upper()) - LOWEST] * (2 + 3 * ord(name) % 50)},
    "prompts": lambda name: {"prompt": name.upper() * 20, "completion": name.upper() * (ord(name) % 30 + 1)},
    "chats": chat,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "texts that are cut": ("text", {"max_document_tokens": 16}),
    "files that are cut": ("files", {"max_document_tokens": 16}),
    "rows of tokens that are cut": ("tokens", {"max_document_tokens": 16}),
    "completions that are cut": ("prompts", {"max_document_tokens": 16}),
    "chats in turns": ("chats", {"turns": "split"}),
    "chats in turns that are cut": ("chats", {"turns": "split", "max_document_tokens": 30}),
    "a number of texts": ("chats", {"turns": "split", "eval_documents": 5}),
    "several sources": ("sources", {"max_document_tokens": 16}),
    "packs": ("text", {"max_document_tokens": 16, "pack_to": 8}),
    "whole texts": ("text", {}),
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny chat model, of whose tokens each is a byte."""
    folder = write_base(tmp_path_factory.mktemp("chat") / "base")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def write_rows(folder: Path, form: str, names: str = NAMES) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    if form == "files":
        for name in names:
            (folder / f"{name}.txt").write_text(ROWS["text"](name)["text"])
        return folder
    path = folder / f"{form}.jsonl"
    path.write_text("".join(json.dumps(ROWS[form](name)) + "\n" for name in names))
    return path


def build(
    folder: Path, base: Path, data: DataConfig, *, resumed: bool = False, lines: list[str] | None = None
) -> Corpus:
    log = (lines if lines is not None else []).append
    tokenizer = load_tokenizer(base)
    return ensure_corpus(CorpusSettings(data), folder / "run", tokenizer=tokenizer, resumed=resumed, log=log)


def names_of(folder: Path, corpus: Corpus, documents: Any) -> set[str]:
    """The rows that documents are of: each shows the letter of its row."""
    engine = load_tokenizer(folder / "run").engine
    texts = [engine.decode(corpus[d][np.arange(len(corpus[d]))].tolist()) for d in documents]
    found = [{*NAMES.upper()} & {*text} for text in texts]
    assert all(len(row) == 1 for row in found)
    return {row.pop() for row in found}


@pytest.mark.parametrize(("form", "keys"), CASES.values(), ids=CASES)
def test_no_part_of_a_held_out_text_is_trained_on(
    tmp_path: Path, base: Path, form: str, keys: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(builder, "BATCH_BYTES", 100)  # texts of several batches
    data = DataConfig(**{"cache": str(tmp_path / "cache"), "max_document_tokens": 0} | keys)
    if form == "sources":
        paths = write_rows(tmp_path / "a", "text", NAMES[:8]), write_rows(tmp_path / "b", "tokens", NAMES[8:])
        data = replace(data, sources=tuple(SourceConfig(str(path), 1.0) for path in paths))
    else:
        data = replace(data, path=str(write_rows(tmp_path / "rows", form)))
    corpus = build(tmp_path, base, data)
    config = RunConfig(data=data)
    config = replace(config, train=replace(config.train, tokens_per_step=64))
    order = make_step_order(config, corpus)
    trained = set(range(len(corpus))) - {*order.evaluation}
    held_out, others = names_of(tmp_path, corpus, order.evaluation), names_of(tmp_path, corpus, trained)
    assert not held_out & others and held_out | others == {*NAMES.upper()}
    count = data.eval_documents if isinstance(data.eval_documents, int) else 1  # one in ten of twelve
    assert (len(held_out), len(others)) == (count, 12 - count) == (order.held_out_texts, order.texts)
    assert (corpus.texts is None) == (len(corpus) == 12) == (not {"turns", "max_document_tokens"} & {*keys})
    line = documents_line(config, order)
    assert f"; {count} text" in line and ("of 11 texts to train on" in line or len(trained) == 11 or count > 1)
