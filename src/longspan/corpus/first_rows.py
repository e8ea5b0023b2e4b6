"""Rows of source files before a corpus is built: the first rows decide its kind, and texts train a tokenizer."""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from longspan.config.data_sections import MAX_TEXT_BYTES
from longspan.corpus.chunk import chunk_rows
from longspan.corpus.files import CorpusFile
from longspan.corpus.row_files import row_file
from longspan.corpus.rows.kinds import Kind, common_kind, row_kind
from longspan.corpus.rows.sample import BadRow, Row
from longspan.errors import DataError

FIRST_ROWS, FIRST_FILES = 20, 5
SAMPLE_CHARACTERS = 4_000_000  # at most so many train the byte-pair tokenizer


def kind_of_files(files: Sequence[CorpusFile], *, skip_bad: bool, most_bytes: int = MAX_TEXT_BYTES) -> Kind:
    """Return the kind of rows of these files, by the first rows of the first files; "text" if there are no rows.

    A row of more than `most_bytes` (0: any) is a bad one. With `skip_bad`, bad rows and rows of no kind do not count;
    without it they raise DataError, as rows of different kinds always do.
    """
    rows, bad = list[Row](), list[BadRow]()
    for file in files[:FIRST_FILES]:
        for row in islice(_rows_of_file(file, most_bytes), FIRST_ROWS):
            if skip_bad and not _has_kind(row):
                continue
            if isinstance(row, BadRow):
                bad.append(row)  # raised below: first rows of other files are read, as their kind may differ
                break
            rows.append(row)
    kind = common_kind(rows) if rows else "text"  # different kinds are reported before a bad row
    if bad:
        raise DataError(f"{bad[0].where}: {bad[0].reason}")
    return kind


def sample_texts(files: Sequence[CorpusFile], most_bytes: int = MAX_TEXT_BYTES) -> Iterator[str]:
    """Yield texts to train a tokenizer on: at most SAMPLE_CHARACTERS characters, of files in a fixed shuffled order.

    A bad row gives "".
    """
    budget = SAMPLE_CHARACTERS
    order = np.argsort(np.random.PCG64(0).random_raw(len(files)), kind="stable")
    for number in order:
        for row in _rows_of_file(files[number], most_bytes):
            text = "" if isinstance(row, BadRow) else _texts_in(row.values)
            yield text[:budget]
            budget -= len(text)
            if budget <= 0:
                return


def text_sizes(files: Sequence[CorpusFile], most_bytes: int = 0) -> Iterator[int]:
    """Yield how many bytes the texts of each row have. Raises DataError for a bad row.

    A row of more than `most_bytes` (0: any) is a bad one.
    """
    for file in files:
        for row in _rows_of_file(file, most_bytes):
            if isinstance(row, BadRow):
                raise DataError(f"{row.where}: {row.reason}")
            yield len(_texts_in(row.values).encode())


def _rows_of_file(file: CorpusFile, most_bytes: int) -> Iterator[Row | BadRow]:
    """Yield the rows of a file; a text that is not UTF-8, which is a whole file, has none."""
    for chunk in row_file(file.name, file.path, most_bytes).chunks():
        try:
            for placed in chunk_rows(chunk):
                yield placed.row
        except UnicodeDecodeError:
            return


def _has_kind(row: Row | BadRow) -> bool:
    """Return whether a row could be read and its keys are those of one kind."""
    try:
        return isinstance(row, Row) and bool(row_kind(row))
    except DataError:
        return False


def _texts_in(value: Any) -> str:
    """Return the text of a JSON value: an object's `text`, or else all strings in the value, a line each.

    Lone surrogates, which no tokenizer can read, are left out.
    """
    if isinstance(value, dict):
        text = value.get("text")
        return _texts_in(text) if isinstance(text, str) else "\n".join(filter(None, map(_texts_in, value.values())))
    if isinstance(value, list):
        return "\n".join(_texts_in(inner) for inner in value if isinstance(inner, dict | str))
    return value.encode(errors="ignore").decode() if isinstance(value, str) else ""
