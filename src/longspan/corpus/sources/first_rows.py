"""Rows that are read before a corpus is built: their kind, texts that train a tokenizer, and sizes of texts."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from longspan.config.sections import MAX_TEXT_BYTES, DataConfig
from longspan.corpus.rows.kinds import KIND_TEXTS, Kind, rename_columns, row_kind
from longspan.corpus.rows.sample import BadRow, Row
from longspan.corpus.sources.find_files import CorpusFile
from longspan.corpus.sources.row_chunks import parse_chunk
from longspan.errors import DataError

FIRST_ROWS = 20
FIRST_FILES = 5
# At most this many characters train the byte-pair tokenizer.
SAMPLE_CHARACTERS = 4_000_000


def find_kind_of_rows(files: Sequence[CorpusFile], data: DataConfig) -> Kind:
    """Return the kind of rows of these files, by the first rows of the first files; "text" if there are no rows.

    Where bad rows are skipped, they and rows of no kind do not count; else they raise DataError, as rows of several
    kinds do.
    """
    rows = list[Row]()
    bad = list[BadRow]()
    for file in files[:FIRST_FILES]:
        for row in islice(read_file_rows(file, data.max_text_bytes), FIRST_ROWS):
            row = rename_columns(row, data.rename_columns) if not isinstance(row, BadRow) else row
            if data.on_bad_row == "skip" and not _has_one_kind(row):
                continue
            if isinstance(row, BadRow):
                bad.append(row)  # raised below: first rows of other files are read, as their kind may differ
                break
            rows.append(row)
    kind = row_kind(rows[0]) if rows else "text"
    for row in rows[1:]:
        if (other := row_kind(row)) != kind:
            raise DataError(
                f"{row.where} holds {KIND_TEXTS[other]}, and {rows[0].where} holds {KIND_TEXTS[kind]}; rows of one "
                "source must be of one kind: give each kind a source of its own"
            )
    if bad:  # different kinds are reported first
        raise DataError(f"{bad[0].where}: {bad[0].reason}")
    return kind


def read_texts_for_tokenizer(files: Sequence[CorpusFile], most_bytes: int = MAX_TEXT_BYTES) -> Iterator[str]:
    """Yield texts to train a tokenizer on, up to SAMPLE_CHARACTERS, of files in a fixed shuffled order."""
    budget = SAMPLE_CHARACTERS
    order = np.argsort(np.random.PCG64(0).random_raw(len(files)), kind="stable")
    for number in order:
        for row in read_file_rows(files[number], most_bytes):
            text = "" if isinstance(row, BadRow) else _join_texts(row.values)
            yield text[:budget]
            budget -= len(text)
            if budget <= 0:
                return


def read_text_sizes(files: Sequence[CorpusFile], most_bytes: int = 0) -> Iterator[int]:
    """Yield the bytes of the texts of each row. Raises DataError for a bad one, as of over `most_bytes` (0: any)."""
    for file in files:
        for row in read_file_rows(file, most_bytes):
            if isinstance(row, BadRow):
                raise DataError(f"{row.where}: {row.reason}")
            yield len(_join_texts(row.values).encode())


def read_file_rows(file: CorpusFile, most_bytes: int) -> Iterator[Row | BadRow]:
    """Yield the rows of a file in order; a text that is not UTF-8, which is a whole file, has none."""
    for chunk in file.read_chunks(most_bytes):
        try:
            for placed in parse_chunk(chunk):
                yield placed.row
        except UnicodeDecodeError:
            return


def _has_one_kind(row: Row | BadRow) -> bool:
    try:
        return isinstance(row, Row) and bool(row_kind(row))
    except DataError:
        return False


def _join_texts(value: Any) -> str:
    """Of an object with a text under "text" that one alone. Lone surrogates, which no tokenizer can read,
    are left out."""
    if isinstance(value, dict):
        text = value.get("text")
        if isinstance(text, str):
            return _join_texts(text)
        return "\n".join(filter(None, map(_join_texts, value.values())))
    if isinstance(value, list):
        return "\n".join(_join_texts(inner) for inner in value if isinstance(inner, dict | str))
    return value.encode(errors="ignore").decode() if isinstance(value, str) else ""
