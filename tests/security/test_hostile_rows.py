"""Rows beyond a limit are bad rows with their file and line: long texts, nesting, numbers; and no memory is filled."""

import gzip
import json
import re
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st

from longspan.corpus.rows.chats.infer_turns import longest_overlap
from longspan.corpus.rows.sample import BadRow, Row
from longspan.corpus.sources import cut_rows
from longspan.corpus.sources.row_chunks import parse_chunk
from longspan.corpus.sources.row_files import CHUNK_BYTES, make_row_file
from longspan.data.corpus_documents import Corpus
from longspan.errors import DataError
from tests.corpus.test_formats import corpus_of, rows_as, zstd

GOOD = [{"text": "a text that every corpus has " * 2}, {"text": "and another one of some words"}]
LONG = {"text": "word " * 400}
CHAT = {"role": "user", "content": [{"type": "text", "text": "word " * 400}]}
LIMIT = 500


def nested(levels: int) -> str:
    return f'{{"text": "a", "other": {"[" * levels}{"]" * levels}}}'


def documents(folder: Path, path: Path, **keys: Any) -> int:
    return len(corpus_of(folder, path=str(path), on_bad_row="skip", max_document_tokens=0, **keys).lengths)


def test_long_rows_are_bad_in_files_of_every_kind(tmp_path: Path) -> None:
    for form in ("jsonl", "jsonl.gz", "jsonl.zst", "json", "json.gz", "csv", "parquet", "datasets"):
        path = rows_as(form, tmp_path / form, [*GOOD, LONG, *GOOD])
        place, kind = ("line 3", "a line") if form.startswith("jsonl") else ("row 3", "a row")
        with pytest.raises(DataError, match=rf"{place}: {kind} of 2,0\d\d bytes, and data.max_text_bytes is 500"):
            corpus_of(tmp_path, path=str(path), max_text_bytes=LIMIT)
        assert documents(tmp_path, path, max_text_bytes=LIMIT) == 4, form
    assert documents(tmp_path, path, max_text_bytes=0) == 5


def test_a_long_text_file_is_bad(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    for name, text in (("a.txt", GOOD[0]["text"]), ("b.md", LONG["text"])):
        (tmp_path / "data" / name).write_text(text)
    with pytest.raises(DataError, match=r"b.md: a text of 2,000 bytes, and data.max_text_bytes is 500"):
        corpus_of(tmp_path, path=str(tmp_path / "data"), max_text_bytes=LIMIT)
    assert documents(tmp_path, tmp_path / "data", max_text_bytes=LIMIT) == 1


def test_texts_in_parts_of_a_table_count_and_images_do_not(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    short = {"role": "user", "content": [{"type": "text", "text": "word"}]}
    rows = [{"messages": [short]}, {"messages": [short, CHAT]}, {"messages": [short]}]
    table = pyarrow.Table.from_pylist([row | {"images": [{"bytes": b"x" * 3000, "path": None}]} for row in rows])
    words = pyarrow.array(["short", "word " * 400, "short"]).dictionary_encode()
    parquet.write_table(table.append_column("word", words), tmp_path / "rows.parquet")
    (chunk,) = make_row_file("rows.parquet", tmp_path / "rows.parquet", LIMIT * 5).read_chunks()
    assert [type(row.row) is BadRow for row in parse_chunk(chunk)] == [False, True, False]


def test_a_line_that_is_too_long_is_read_over_in_pieces(tmp_path: Path) -> None:
    whole = json.dumps(GOOD[0]).encode()
    size = 18 << 20
    data = b"\n".join([whole, b" " * size, whole, b'{"text": "' + b"a" * LIMIT + b'"}', whole])
    for name, write in (("a.jsonl", bytes), ("a.jsonl.gz", gzip.compress), ("a.jsonl.zst", zstd)):
        (tmp_path / name).write_bytes(write(data))
        file = make_row_file(name, tmp_path / name, LIMIT)
        chunks = list(file.read_chunks())
        assert max(len(chunk.data) for chunk in chunks) <= CHUNK_BYTES + LIMIT + 1
        assert any(not chunk.data for chunk in chunks)
        rows = [row for chunk in chunks for row in parse_chunk(chunk)]
        assert [type(row.row) is BadRow for row in rows] == [False, True, False, True, False]
        assert [row.row.where for row in rows] == [f"{name}, line {n}" for n in range(1, 6)]
        assert f"a line of {size:,} bytes" in str(rows[1].row)
        assert file.read_row_at(rows[4].position).values == GOOD[0]  # type: ignore[union-attr]


@pytest.mark.parametrize("name", ["a.json", "a.csv"])
def test_a_row_that_is_too_long_is_read_over(tmp_path: Path, name: str) -> None:
    """Of a list or a .csv, whose rows need not be lines; memory holds a piece and a row of the limit."""
    words = "word\n" * (8 << 18)
    rows = [GOOD[0], {"text": words}, GOOD[1]]
    text = json.dumps(rows) if name == "a.json" else "text\n" + "\n".join(f'"{row["text"]}"' for row in rows)
    (tmp_path / name).write_text(text)
    chunks = list(make_row_file(name, tmp_path / name, LIMIT).read_chunks())
    assert sum(len(chunk.data) for chunk in chunks) < 1000
    placed = [row.row for chunk in chunks for row in parse_chunk(chunk)]
    assert [type(row) is BadRow for row in placed] == [False, True, False]
    assert [row.where for row in placed] == [f"{name}, row {n}" for n in (1, 2, 3)]


MARKS = '"\\{}[],: \na\u00e9'
OBJECTS = st.dictionaries(st.text(MARKS, max_size=4), st.text(MARKS, max_size=6) | st.lists(st.none()), max_size=2)


@settings(max_examples=100, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(
    rows=st.lists(OBJECTS, min_size=1, max_size=3),
    place=st.floats(0, 0.999),
    change=st.sampled_from([*MARKS[:9].encode(), None]),
    piece=st.sampled_from([1, 3, 1 << 20]),
)
def test_a_list_with_another_byte_is_what_json_reads_or_an_error(
    tmp_path: Path, rows: list[dict[str, Any]], place: float, change: int | None, piece: int
) -> None:
    data = bytearray(json.dumps(rows).encode())
    at = 1 + int(place * (len(data) - 1))  # behind the bracket that opens it
    data[at : at + 1] = b"" if change is None else bytes([change])
    (tmp_path / "a.json").write_bytes(data)
    found: list[Any] | None = None
    with pytest.MonkeyPatch.context() as patch, suppress(DataError):
        patch.setattr(cut_rows, "_PIECE", piece)
        chunks = make_row_file("a.json", tmp_path / "a.json", 0).read_chunks()
        found = [placed.row for chunk in chunks for placed in parse_chunk(chunk)]
    try:
        wanted = json.loads(data)
    except ValueError:
        assert found is None or any(isinstance(row, BadRow) for row in found)
    else:
        assert [row.values if isinstance(row, Row) else None for row in found or ()] == [
            row if isinstance(row, dict) else None for row in wanted
        ]


ROWS: list[tuple[str, str]] = [
    (nested(200), "nested too deeply, in more than 100"),
    (nested(100_000), "nested too deeply, in more than 100"),
    ('{"text": "a", "n": 1' + "0" * 10_000 + "}", r"an integer of more than [\d,]+ digits"),
    ('{"text": "a", "' + "k" * 100 + '": ' + "[" * 300, "not JSON|nested too deeply"),
]


@pytest.mark.parametrize(("line", "message"), ROWS, ids=[message[:20] for _, message in ROWS])
def test_a_row_beyond_a_limit_is_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join([json.dumps(GOOD[0]), line, json.dumps(GOOD[1])]))
    with pytest.raises(DataError, match=rf"a.jsonl, line 2.*({message})"):
        corpus_of(tmp_path, path=str(tmp_path / "a.jsonl"))
    assert documents(tmp_path, tmp_path / "a.jsonl") == 2
    if message != ROWS[-1][1]:  # which has no end
        (tmp_path / "a.json").write_text(f"[{json.dumps(GOOD[0])}, {line}, {json.dumps(GOOD[1])}]")
        with pytest.raises(DataError, match=rf"a.json, row 2: .*({message})"):
            corpus_of(tmp_path, path=str(tmp_path / "a.json"))
        assert documents(tmp_path, tmp_path / "a.json") == 2
    (tmp_path / "a.jsonl").write_text(nested(99).replace('"a"', json.dumps(LONG["text"])))
    assert documents(tmp_path, tmp_path / "a.jsonl") == 1  # a hundred levels are read


def test_tables_with_damaged_texts_are_named(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    texts = pyarrow.array([b"a text of words", b"broken \xff\xfe", b"another of words"], pyarrow.binary())
    damaged = pyarrow.Array.from_buffers(pyarrow.string(), 3, texts.buffers())
    parquet.write_table(pyarrow.table({"text": damaged}), tmp_path / "a.parquet")
    with pytest.raises(DataError, match=r"a.parquet, row 2: a text that is not UTF-8"):
        corpus_of(tmp_path, path=str(tmp_path / "a.parquet"))
    assert documents(tmp_path, tmp_path / "a.parquet") == 2


@settings(max_examples=50)
@given(text=st.text("ab c", max_size=100), other=st.text("ab c", max_size=100), shared=st.integers(0, 100))
def test_overlaps_are_the_longest(text: str, other: str, shared: int) -> None:
    other = text[shared:] + other
    lengths = range(min(len(text), len(other)) + 1)
    assert longest_overlap(text, other) == max(n for n in lengths if text.endswith(other[:n]))


def test_a_long_answer_is_found_in_time_that_grows_with_it() -> None:
    words = "some words " * 400_000
    assert longest_overlap(f"user: {words}", f"{words}and more" * 2) == len(words)
    assert longest_overlap("a" * 300_000 + "b", "a" * 300_000) == 0


def test_an_arrow_file_with_places_outside_of_it_is_named(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"text": [GOOD[0]["text"], GOOD[1]["text"]]})
    with pyarrow.OSFile(str(tmp_path / "a.arrow"), "wb") as sink, pyarrow.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    data = (tmp_path / "a.arrow").read_bytes()
    ends = len(GOOD[0]["text"]).to_bytes(4, "little") + sum(len(row["text"]) for row in GOOD).to_bytes(4, "little")
    assert data.count(ends) == 1
    (tmp_path / "a.arrow").write_bytes(data.replace(ends, b"\xff\xff\xff\x0f\xff\xff\xff\x1f"))
    with pytest.raises(DataError, match=r"a.arrow of the corpus .* cannot be read"):
        corpus_of(tmp_path, path=str(tmp_path / "a.arrow"))


def test_damaged_documents_of_a_corpus_are_named(tmp_path: Path, token_cache: Path) -> None:
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, GOOD * 3)))
    corpus_of(tmp_path, path=str(tmp_path / "a.jsonl"))
    (folder,) = {file.parent for file in token_cache.rglob("lengths.npy")}

    def read() -> None:
        corpus = Corpus(folder)
        for document in range(len(corpus)):
            assert len(corpus[document][[0, 1]]) == 2 and list(corpus.sources)

    read()
    (folder / "codes.bin").write_bytes(b"A" * 4 * (folder / "tokens.bin").stat().st_size)
    manifest = (folder / "corpus.json").read_bytes()
    dtype, codes = b'"dtype": "<u2"', b'"codes": ""'
    assert dtype in manifest and codes in manifest
    types = ("O", "|O", "<f2", "<i2", ">u2", "V2", "S2", "u2,u2", "none", ["<u2"], None)
    crafted = [(dtype, b'"dtype": ' + json.dumps(name).encode()) for name in types]
    crafted += [(codes, b'"codes": ' + json.dumps(name).encode()) for name in ("O", "<f4", "S1", "<u2")]
    for old, new in crafted:
        (folder / "corpus.json").write_bytes(manifest.replace(old, new))
        with pytest.raises(DataError, match=r"is of type .* by corpus.json, and a build writes <u2 or <u4|\|u1 or <i4"):
            read()
        (folder / "corpus.json").write_bytes(manifest)
    floats = (folder / "lengths.npy").read_bytes().replace(b"<i4", b"<f4")
    for name in ("targets.npy", "texts.npy", "source_of.npy"):
        (folder / name).write_bytes(floats)
        with pytest.raises(DataError, match=rf"{name} is damaged: it holds float32"):
            read()
        (folder / name).unlink()
    for name, change in {
        "offsets.npy": lambda data: data[:-8] + b"\xff" * 8,
        "hashes.npy": lambda data: data.replace(b"<i8", b"<f8"),
        "origins.npy": lambda data: re.sub(rb"\(\d", b"(0", data, count=1),
        "lengths.npy": lambda data: data.replace(b"'shape': (", b"'shape': [", 1),
        "sources.jsonl": lambda data: b"[" * len(data),
        "sources.npy": lambda data: data.replace(b"<i8", b"|O8"),
        "corpus.json": lambda data: b"[[]]",
    }.items():
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(change(data))
        with pytest.raises(DataError, match=r"is damaged|is not a corpus"):
            read()
        (folder / name).write_bytes(data)
