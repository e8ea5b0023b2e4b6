"""The same rows from every kind of file; masks, bad rows, sources, and builders side by side."""

import csv
import gzip
import json
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longspan.config.sections import DataConfig, SourceConfig
from longspan.corpus.recipe import CorpusSettings
from longspan.corpus.rows.sample import Row
from longspan.corpus.run_corpus import open_or_build_corpus
from longspan.corpus.sources import cut_rows, row_files
from longspan.corpus.sources.find_files import CorpusFile, find_rows
from longspan.corpus.sources.row_chunks import parse_chunk
from longspan.corpus.sources.row_files import make_row_file
from longspan.corpus.tokenizer import TextTokenizer, load_tokenizer, train_tokenizer
from longspan.data.corpus_documents import Corpus
from longspan.data.document import count_targets
from longspan.errors import DataError
from longspan.model.weights.tokenizer_files import read_stop_token_ids
from tests.corpus.rows.families import write_folder

TEXTS = ["def layout(rank):\n    return rank\n", "für alle Ränge: übrig " * 9, "plan " * 30, "one\ntwo", "a b c d e"]


def corpus_of(folder: Path, said: list[str] | None = None, **keys: Any) -> Corpus:
    data = DataConfig(**{"max_document_tokens": 20} | keys)
    log = (said if said is not None else []).append
    settings = CorpusSettings(data)
    return open_or_build_corpus(settings, folder / "run", tokenizer=tokenizer(folder), resumed=False, log=log)


def tokenizer(folder: Path) -> TextTokenizer:
    if not (folder / "tokenizer").is_dir():
        (folder / "tokenizer").mkdir(parents=True)
        train_tokenizer(TEXTS, 300).save_pretrained(folder / "tokenizer")
    return load_tokenizer(folder / "tokenizer")


def contents(corpus: Corpus) -> list[tuple[list[int], list[int], int]]:
    result = []
    for number, length in enumerate(corpus.lengths.tolist()):
        document, at = corpus[number], np.arange(length)
        labels = document.labels(at) if corpus.targets is not None else document[at]  # type: ignore[attr-defined]
        result.append((document[at].tolist(), labels[1:].tolist(), count_targets(document)))
    return result


def zstd(data: bytes) -> bytes:
    """Of two frames, as the parts of the Pile are; by the system's own program, where it is installed."""
    if (program := shutil.which("zstd")) is None:
        pyarrow: Any = pytest.importorskip("pyarrow")
        frames = [pyarrow.Codec("zstd").compress(part, asbytes=True) for part in (data[:40], data[40:])]
    else:
        run = partial(subprocess.run, [program, "-qc"], check=True, capture_output=True)
        frames = [run(input=part).stdout for part in (data[:40], data[40:])]
    return b"".join(frames)


PACKED: dict[str, Callable[[bytes], bytes]] = {
    "jsonl.gz": gzip.compress,
    "jsonl.zst": zstd,
    "json.gz": gzip.compress,
    "json.zst": zstd,
}


def rows_as(form: str, folder: Path, rows: list[dict[str, Any]]) -> Path:
    folder.mkdir(parents=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path = folder / f"rows.{form}"
    if form == "jsonl":
        path.write_bytes(lines)
    elif form.startswith("json") and not form.startswith("jsonl"):
        path.write_bytes(PACKED.get(form, bytes)(json.dumps(rows, indent=form.count(".") or None).encode()))
    elif form == "csv":
        with path.open("w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerows([rows[0].keys(), *(row.values() for row in rows)])
    elif form in PACKED:
        path.write_bytes(PACKED[form](lines))
    elif form == "parquet":
        parquet = pytest.importorskip("pyarrow.parquet")
        table = pytest.importorskip("pyarrow").Table.from_pylist(rows)
        parquet.write_table(table, path, row_group_size=2)
    else:
        path = folder / "saved"
        pytest.importorskip("datasets").Dataset.from_list(rows).save_to_disk(path)
    return path


FORMS = ["jsonl", "jsonl.gz", "jsonl.zst", "json", "json.gz", "json.zst", "csv", "parquet", "datasets"]


@pytest.mark.parametrize("form", FORMS)
def test_every_form_gives_the_same_documents(tmp_path: Path, form: str) -> None:
    plain = [{"text": text} for text in TEXTS]
    wanted = contents(corpus_of(tmp_path, path=str(rows_as("jsonl", tmp_path / "plain", plain))))
    ids = [{"input_ids": row.tolist()} for row in tokenizer(tmp_path).encode(TEXTS)]
    for kind, rows in (("text", plain), ("ids", ids))[: 1 if form == "csv" else 2]:
        corpus = corpus_of(tmp_path, path=str(rows_as(form, tmp_path / kind, rows)))
        assert contents(corpus) == wanted and corpus.targets is None


ODD = [
    'a "quoted" [word]',
    "{",
    "\\",
    'ends in a backslash \\"',
    "two\r\nlines, one comma",
    "",
    "für \u2028 \U0001f600",
    "7",
]


@pytest.mark.parametrize("form", ["json", "jsonl in a json", "csv"])
@pytest.mark.parametrize("piece", [1, 2, 3, 50, 1 << 20])
def test_rows_are_cut_alike_wherever_a_piece_ends(
    tmp_path: Path, form: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And each is read again by its position; of a .csv every cell is a text, numbers too."""
    monkeypatch.setattr(cut_rows, "_PIECE", piece)
    monkeypatch.setattr(row_files, "CHUNK_BYTES", 40)
    rows = [{"text": text, "other": text[::-1]} for text in ODD]
    if form != "csv":
        rows = [{**row, "nested": [{"a": [1, {}], row["text"]: None}]} for row in rows]
    path = rows_as("jsonl" if "jsonl" in form else form, tmp_path / "rows", rows)
    path = path.rename(path.with_suffix(f".{form.split()[-1]}"))
    assert read_all(path) == (rows, rows)
    blanks = b"" if form == "csv" else b" \n"
    path.write_bytes(b"\xef\xbb\xbf" + blanks + path.read_bytes() + b"\n" + blanks)
    assert read_all(path) == (rows, rows)
    assert [(file.rows, len(read_part(file))) for file in find_rows(str(path), "train[2:5]")] == [((2, 5), 3)]


def read_part(file: CorpusFile) -> list[Any]:
    return [placed for chunk in file.read_chunks(0) for placed in parse_chunk(chunk)]


def test_a_csv_of_pandas_has_a_column_without_a_name(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(",text\n0,some text\n1,more text\n")
    said = list[str]()
    assert len(corpus_of(tmp_path, said, path=str(tmp_path / "a.csv"))) == 2
    assert "keys that nothing reads: column 1 (100 % of rows)" in said


def read_all(path: Path) -> tuple[list[Any], list[Any]]:
    file = make_row_file(path.name, path, 0)
    placed = [placed for chunk in file.read_chunks() for placed in parse_chunk(chunk)]
    good = [file.read_row_at(position) for position, row in placed if isinstance(row, Row)]
    values = [row.values if isinstance(row, Row) else row.reason for _, row in placed]
    return values, [row.values for row in good if isinstance(row, Row)]


@pytest.mark.parametrize("form", ["parquet", "arrow"])
def test_json_in_tables_is_read_as_datasets_reads_it(tmp_path: Path, form: str) -> None:
    datasets: Any = pytest.importorskip("datasets")
    shapes = [{"city": {"type": "string", "default": None}}, {"days": {"enum": [1, None]}}]
    rows = [
        {
            "messages": [{"role": "assistant", "tool_calls": [{"name": "f", "arguments": shape}]}, {"content": "a"}],
            "whole": shape,
            "deep": {"a": [[{"b": shape}]]},
        }
        for shape in shapes
    ]
    some_json = datasets.Json()
    features = {"messages": [some_json], "whole": some_json, "deep": {"a": [[{"b": some_json}]]}}
    saved = datasets.Dataset.from_list(rows, features=datasets.Features(features))
    if form == "parquet":
        saved.to_parquet(tmp_path / "rows.parquet")
    else:
        saved.save_to_disk(tmp_path)
    (path,) = tmp_path.glob(f"*.{form}")
    assert read_all(path) == (list(saved), list(saved)) and list(saved) == rows


def test_values_of_every_type_of_a_table(tmp_path: Path) -> None:
    pyarrow: Any = pytest.importorskip("pyarrow")
    text, number, some_json = pyarrow.string(), pyarrow.int64(), pyarrow.array(["[1, null]", None], pyarrow.json_())
    columns = {
        "map": pyarrow.MapArray.from_arrays([0, 2, 2, 2], ["a", "b"], some_json),
        "struct": pyarrow.array([{"a": 1, "b": None}, {"b": [None]}, None]),
        "word": pyarrow.array(["x", "x", "y"]).dictionary_encode(),
        "large": pyarrow.array(["x", "y", "z"], pyarrow.large_string()),
        "view": pyarrow.array([["x"], ["y"], []], pyarrow.list_(pyarrow.string_view())),
        "again": pyarrow.RunEndEncodedArray.from_arrays(pyarrow.array([3], pyarrow.int32()), pyarrow.array(["z"])),
        "time": pyarrow.array([0, 0, -(10**17)], pyarrow.timestamp("us")),
        "json": pyarrow.array(["1", "{", "2"], pyarrow.json_()),
        "null": pyarrow.array([None] * 3, pyarrow.list_(pyarrow.struct({"a": text, "b": number}))),
    }
    table, path = pyarrow.table(columns), tmp_path / "rows.arrow"
    with pyarrow.ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table)
    (first, second, third), again = read_all(path)
    assert [first] == again and first == {
        "map": {"a": [1, None], "b": None},
        "struct": {"a": 1},
        "word": "x",
        "large": "x",
        "view": ["x"],
        "again": "z",
        "time": datetime(1970, 1, 1),
        "json": 1,
        "null": None,
    }
    assert second.startswith("a text of a column of JSON that is no JSON: ") and "date value out of range" in third


@pytest.mark.parametrize("other", [False, True])
def test_masks_and_labels_are_cut_with_their_tokens(tmp_path: Path, other: bool) -> None:
    draw = np.random.default_rng(0)
    rows, wanted = list[dict[str, Any]](), list[tuple[list[int], list[int], int]]()
    for length in (7, 20, 21, 45, 60):
        ids, mask = draw.integers(0, 299, length), draw.random(length) < 0.3
        labels = np.where(mask, (ids + other) % 299, -100)
        labels[length // 2] = ids[length // 2]
        rows.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
        for start in range(0, length, 20):
            part = labels[start : start + 20][1:]
            if (part != -100).any():
                wanted.append((ids[start : start + 20].tolist(), part.tolist(), int((part != -100).sum())))
    path = rows_as("jsonl", tmp_path / "rows", [{"input_ids": [1, 2, 3]}, *rows])
    corpus = corpus_of(tmp_path, path=str(path))
    assert contents(corpus) == [([1, 2, 3], [2, 3], 2), *wanted]
    assert corpus.targets is not None
    assert corpus.manifest.codes == ("<i4" if other else "|u1")


def test_bad_rows_are_errors_or_counted(tmp_path: Path) -> None:
    path = rows_as("jsonl", tmp_path / "rows", [{"text": "some text"}, {"no": 1}, {"text": 3}, {"text": "more text"}])
    with path.open("ab") as file:
        file.write(b'{"text": \n\xff\n{"text": "more", "id": ' + b"9" * 10_000 + b'}\n{"text": "the end"}')
    with pytest.raises(DataError, match=r"rows.jsonl, line 2: needs text"):
        corpus_of(tmp_path, path=str(path))
    said = list[str]()
    corpus = corpus_of(tmp_path, said, path=str(path), on_bad_row="skip")
    assert len(corpus) == 3 and corpus.manifest.left_out.bad_rows == 5
    assert (
        said[-1].startswith('left out 5 bad rows (data.on_bad_row = "skip"): rows.jsonl, line') and "2 more" in said[-1]
    )
    path.write_text('{"text": "some text"}\n{"text": "more", "id": ' + "9" * 10_000 + "}\n")
    with pytest.raises(DataError, match=r"rows.jsonl, line 2: an integer of more than 4,300 digits"):
        corpus_of(tmp_path, path=str(path))


def test_turns_without_a_target_give_no_document(tmp_path: Path) -> None:
    turns = [("user", "a b"), ("assistant", ""), ("user", "c d"), ("assistant", "plan e")]
    chat = {"messages": [{"role": role, "content": text} for role, text in turns]}
    blank = {"messages": chat["messages"][:2]}
    path = rows_as("jsonl", tmp_path / "rows", [blank, chat, blank])
    write_folder(tmp_path / "tokenizer", "qwen3")  # whose generation settings the folder of a run lacks
    assert len(corpus_of(tmp_path, path=str(path), split_turns=True, max_document_tokens=0)) == 1


def test_sources_keep_their_order_and_kind(tmp_path: Path) -> None:
    ids = rows_as("jsonl", tmp_path / "ids", [{"input_ids": [5, 6, 7], "loss_mask": [0, 0, 1]}])
    texts = rows_as("jsonl", tmp_path / "texts", [{"text": text} for text in TEXTS[3:]])
    sources = (SourceConfig(str(texts), 2.0), SourceConfig(str(ids)))
    corpus = corpus_of(tmp_path, sources=sources)
    assert corpus.source_of.tolist() == [0, 0, 1] and corpus.manifest.kinds == ("text", "input_ids")
    assert contents(corpus)[2] == ([5, 6, 7], [-100, 7], 1)


def test_two_builders_at_once_and_one_that_was_interrupted(
    tmp_path: Path, token_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = rows_as("jsonl", tmp_path / "rows", [{"text": text} for text in TEXTS])
    tokenizer(tmp_path)
    data = DataConfig(path=str(path), max_document_tokens=20)

    def build(name: str) -> Corpus:
        settings, loaded = CorpusSettings(data), load_tokenizer(tmp_path / "tokenizer")
        return open_or_build_corpus(settings, tmp_path / name, tokenizer=loaded, resumed=False, log=lambda _: None)

    with monkeypatch.context() as patch:
        patch.setattr("longspan.corpus.build_documents._Writer.finish_manifest", lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            build("interrupted")
    assert not list(token_cache.glob("*.partial*"))
    with ThreadPoolExecutor(2) as threads:
        one, two = threads.map(build, ("one", "two"))
    assert contents(one) == contents(two) and one.manifest == two.manifest
    assert len([entry for entry in token_cache.iterdir() if (entry / "corpus.json").is_file()]) == 1


@pytest.mark.parametrize("form", PACKED)
def test_a_compressed_file_that_was_cut_off_is_refused_also_where_bad_rows_are_skipped(
    tmp_path: Path, form: str
) -> None:
    lines = b"".join(json.dumps({"text": f"row {i} of many"}).encode() + b"\n" for i in range(5000))
    whole, path = PACKED[form](lines), tmp_path / f"rows.{form}"
    for damaged in (b"", whole[:7], whole[: len(whole) // 2], whole[:-1], b"no such stream"):
        path.write_bytes(damaged)
        with pytest.raises(DataError, match=rf"rows.{form} .*cannot be decompressed, perhaps it was cut off: "):
            corpus_of(tmp_path, path=str(path), on_bad_row="skip")


def test_byte_order_marks_of_files_that_were_joined(tmp_path: Path) -> None:
    mark, path = b"\xef\xbb\xbf", tmp_path / "rows.jsonl"
    rows = [json.dumps({"text": text}).encode() + b"\n" for text in TEXTS]
    path.write_bytes(b"".join(rows))
    plain = contents(corpus_of(tmp_path, path=str(path)))
    path.write_bytes(mark + rows[0] + mark + b"\n" + mark + b"".join(rows[1:]) + mark)
    assert contents(corpus_of(tmp_path, path=str(path))) == plain


def test_an_arrow_file_that_ends_between_two_batches_is_refused(tmp_path: Path) -> None:
    pyarrow: Any = pytest.importorskip("pyarrow")
    path, table = tmp_path / "rows.arrow", pyarrow.table({"text": ["some text of a row"] * 9})
    with pyarrow.ipc.new_stream(path, table.schema) as stream:
        stream.write_table(table, max_chunksize=3)
    assert len(corpus_of(tmp_path, path=str(path))) == 9
    whole, rows = path.read_bytes(), list[int]()
    for size in range(8, len(whole), 8):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"rows.arrow of the corpus .* cannot be read"):
            make_row_file("rows.arrow", path).read_chunks().__next__()
        with suppress(pyarrow.ArrowInvalid, OSError):
            rows.append(len(pyarrow.ipc.open_stream(whole[:size]).read_all()))
    assert {3, 6} <= {*rows}, "pyarrow reads some of these"


@pytest.mark.parametrize("text", ["{", "[]", '{"eos_token_id": "x"}', '{"eos_token_id": [1, "x"]}', "9" * 10_000])
def test_ends_of_generation_that_are_none_are_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "generation_config.json").write_text(text)
    message = r"generation_config.json (is not a JSON object|has eos_token_id 'x'; give the id)"
    with pytest.raises(DataError, match=message):
        read_stop_token_ids(tmp_path)
