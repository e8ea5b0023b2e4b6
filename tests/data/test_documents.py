"""Documents with labels are cut anywhere, ten million are opened in little memory; what is missing is named."""

import json
import sys
import tracemalloc
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from longspan.config.plan_section import EvalConfig
from longspan.config.sections import RunConfig, SourceConfig
from longspan.corpus.document_encoder import DocumentEncoder, FileChunk
from longspan.corpus.rows.encoding import RowEncoding
from longspan.corpus.sources.row_chunks import RowChunk
from longspan.corpus.tokenizer import train_tokenizer
from longspan.data.array_files import decode_labels
from longspan.data.corpus_documents import Corpus
from longspan.data.manifest import Manifest, SourceFile, SourceFiles
from longspan.errors import ConfigError, DataError
from longspan.run.checks import check_data, check_paths_exist

ENCODING = RowEncoding("input_ids", train_tokenizer(["a b"], 300))
TOKEN = st.tuples(st.integers(0, 250), st.sampled_from(["own", "other", "none"]))
LABELS = {"own": lambda token: token, "other": lambda token: token + 1, "none": lambda _: -100}


@settings(max_examples=50, deadline=None)
@given(rows=st.lists(st.lists(TOKEN, min_size=1, max_size=30), min_size=1, max_size=6), longest=st.integers(0, 12))
def test_labels_are_cut_with_their_tokens(rows: list[list[tuple[int, str]]], longest: int) -> None:
    lines, wanted = list[str](), list[tuple[list[int], list[int]]]()
    for row in rows:
        ids, labels = [token for token, _ in row], [LABELS[kind](token) for token, kind in row]
        lines.append(json.dumps({"input_ids": ids, "labels": labels}))
        starts = range(0, len(ids), longest or len(ids))
        parts = [slice(start, start + (longest or len(ids))) for start in starts]
        wanted += [(ids[p], labels[p][1:]) for p in parts if any(label != -100 for label in labels[p][1:])]
    chunk = RowChunk("lines", "rows.jsonl", 0, 0, "\n".join(lines).encode(), 0)
    encoded = DocumentEncoder((ENCODING,), longest, "<u4").encode_chunks([FileChunk(0, 0, chunk)])
    ids = encoded.ids.astype(np.int64)
    labels = ids if encoded.codes is None else decode_labels(ids, encoded.codes)
    ends = np.cumsum(encoded.lengths)
    spans = [slice(end - n, end) for end, n in zip(ends, encoded.lengths, strict=True)]
    cut = [(ids[span].tolist(), labels[span].tolist()[1:]) for span in spans]
    assert cut == wanted
    assert encoded.targets.tolist() == [sum(label != -100 for label in labels) for _, labels in wanted]


def test_ten_million_documents_are_opened_in_little_memory(tmp_path: Path) -> None:
    documents, length = 10_000_000, 4
    for name, dtype in (("lengths", "<i4"), ("origins", "<i4"), ("targets", "<i4"), ("offsets", "<i8")):
        column = np.lib.format.open_memmap(tmp_path / f"{name}.npy", "w+", dtype, (documents,))
        if name != "origins":  # what is not written is no block of the file
            column[-1] = length * (documents - 1) if name == "offsets" else length
        del column
    with (tmp_path / "tokens.bin").open("wb") as tokens:
        tokens.truncate(2 * length * documents)
    SourceFiles.write(tmp_path, [SourceFile("rows.jsonl", 1, 1, "")])
    (tmp_path / "corpus.json").write_text(Manifest(1, "<u2", documents=documents, tokens=length * documents).to_json())
    tracemalloc.start()
    try:
        corpus = Corpus(tmp_path)
        assert len(corpus) == documents and corpus[documents - 1][np.arange(length)].tolist() == [0] * length
        assert tracemalloc.get_traced_memory()[1] < 1 << 20
    finally:
        tracemalloc.stop()
    columns = (corpus.lengths, corpus.targets, corpus._origins)
    assert all(isinstance(column.base, np.memmap) for column in columns if column is not None)


def test_a_path_beside_sources_is_an_error() -> None:
    config = RunConfig()
    data = replace(config.data, path="texts", sources=(SourceConfig("more"), SourceConfig("others")))
    with pytest.raises(ConfigError, match=r"data.path is 'texts' and there are 2 tables \[\[data.sources\]\]"):
        check_data(replace(config, data=data))
    mixed = replace(config, data=replace(data, path=""))
    check_data(mixed)
    with pytest.raises(ConfigError, match=r"data.split is 'train' and there are 2 tables .*; give it in each"):
        check_data(replace(config, data=replace(data, path="", split="train")))
    with pytest.raises(
        ConfigError, match=r"give train.steps in place of train.epochs, or, if all rows are of one kind"
    ):
        check_data(replace(mixed, train=replace(mixed.train, epochs=2.0)))


@pytest.mark.parametrize(("name", "module"), [("rows.parquet", "pyarrow.parquet"), ("rows.arrow", "pyarrow")])
def test_missing_packages_are_named(name: str, module: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    texts, tables = tmp_path / "texts", tmp_path / "tables"
    for path in (texts / "a.txt", tables / "a.txt", tables / name):
        path.parent.mkdir(exist_ok=True)
        path.write_text("no table")
    config = RunConfig(run=replace(RunConfig().run, dir=str(tmp_path / "run")))
    of_tables = [
        replace(config, data=replace(config.data, path=str(tables / name))),
        replace(config, data=replace(config.data, sources=(SourceConfig(str(texts)), SourceConfig(str(tables))))),
        replace(config, data=replace(config.data, path=str(texts))).with_sets([EvalConfig(name="a", path=str(tables))]),
    ]
    for run in of_tables:
        check_paths_exist(run)
    monkeypatch.delitem(sys.modules, "pyarrow.parquet", raising=False)  # that was imported already
    monkeypatch.setitem(sys.modules, module, None)
    for run in of_tables:
        with pytest.raises(DataError, match=rf"{name} is read with pyarrow, .*: pip install 'longspan\[data\]'"):
            check_paths_exist(run)
