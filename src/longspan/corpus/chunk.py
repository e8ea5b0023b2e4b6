"""Some rows of one file as bytes: one process reads them in order, another parses them.

A row has a position: in a file of lines the byte at which its line begins (after decompression), in a table its number,
in a file that is one text 0. How files are read is in `row_files.py`.
"""

import json
import sys
from collections.abc import Iterator
from typing import Any, Literal, NamedTuple

from longspan.corpus.rows.sample import BadRow, Row, type_name

CHUNK_BYTES = 1 << 20  # of a file of lines or a table; the last row is completed
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class Chunk(NamedTuple):
    """Rows of the file `name`, beginning with row number `first` (from 0) at `position`.

    `data` are lines, a text, or a table in Arrow's stream format; `end` counts the bytes of the file read so far;
    `folder` is the file's folder.
    """

    form: Literal["lines", "text", "table"]
    name: str
    first: int
    position: int
    data: bytes
    end: int
    folder: str = ""


class PlacedRow(NamedTuple):
    """A row or a bad row, and its position in its file."""

    position: int
    row: Row | BadRow


def chunk_rows(chunk: Chunk) -> Iterator[PlacedRow]:
    """Parse the rows of a chunk in order; empty lines are skipped.

    Raises UnicodeDecodeError for a text that is not UTF-8.
    """
    if chunk.form == "text":
        yield PlacedRow(0, Row(chunk.name, {"text": chunk.data.decode("utf-8-sig")}, chunk.folder))
    elif chunk.form == "table":
        yield from _read_table(chunk)
    else:
        position = chunk.position
        for number, line in enumerate(chunk.data.split(b"\n"), chunk.first + 1):
            if line.removeprefix(BYTE_ORDER_MARK).strip():
                yield PlacedRow(position, parse_line(line, f"{chunk.name}, line {number}", chunk.folder))
            position += len(line) + 1


def parse_line(line: bytes, where: str, folder: str = "") -> Row | BadRow:
    """Parse a line of JSON in a file of this folder.

    Any line may begin with a byte order mark, as files may have been concatenated.
    """
    try:
        record = json.loads(line.removeprefix(BYTE_ORDER_MARK).decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRow(where, f"byte {error.start + 1} of the line is not UTF-8")
    except json.JSONDecodeError as error:
        return BadRow(where, f"not JSON ({error.msg} at column {error.colno}): {_beginning(line)}")
    except ValueError:
        digits = f"{sys.get_int_max_str_digits():,}"
        return BadRow(
            where, f"an integer of more than {digits} digits, which no key of a row takes: {_beginning(line)}"
        )
    except RecursionError:
        return BadRow(where, f"JSON that is nested too deeply: {_beginning(line)}")
    if not isinstance(record, dict):
        return BadRow(where, f'needs an object, such as {{"text": …}}; found {type_name(record)}: {_beginning(line)}')
    return Row(where, record, folder)


def values_of_record(record: dict[str, Any]) -> dict[str, Any]:
    """Return a row of a table without null values in structs, as an Arrow struct has each key in every row."""
    return {key: drop_nulls(value) for key, value in record.items()}


def drop_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: drop_nulls(inner) for key, inner in value.items() if inner is not None}
    return [drop_nulls(inner) for inner in value] if isinstance(value, list) else value


def _read_table(chunk: Chunk) -> Iterator[PlacedRow]:
    """Yield the rows of a chunk of an Arrow stream, with their numbers in the file."""
    import pyarrow

    for batch in pyarrow.ipc.open_stream(chunk.data):
        for number, record in enumerate(batch.to_pylist(), chunk.first):
            yield PlacedRow(number, Row(f"{chunk.name}, row {number + 1}", values_of_record(record), chunk.folder))


def _beginning(line: bytes) -> str:
    return repr(line[:240].decode("utf-8", "replace").strip()[:60])
