"""Chunks of a source file, and the rows that are parsed from them: lines or a list of JSON, a .csv, a text, or an Arrow
table.

One process reads a file in chunks (`row_files.py`), others parse them. A row has a position: the byte at which it
begins (after decompression), or its number in a table.
"""

import csv
import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from typing import Any, Literal, NamedTuple, cast

from longspan.corpus.rows.sample import BadRow, Row
from longspan.corpus.rows.values import type_name
from longspan.corpus.sources.cut_rows import SHOWN_BYTES
from longspan.files import parse_json

# A row has at most this many lists and objects in each other.
MOST_LEVELS = 100
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_JSON = "arrow.json"  # Arrow's type of texts that are JSON
Decode = Callable[[Any], Any]


class RowPlace(NamedTuple):
    """A row in a chunk: its position in the file, where it ends in the chunk's data, and its size in the file; the data
    have only the beginning of one that is too long.
    """

    position: int
    stop: int
    size: int


class RowChunk(NamedTuple):
    """Rows of the file `name`, beginning with row number `first` (from 0) at `position`.

    `data` are lines, a text, a table in Arrow's stream format, or rows end to end, which have `places`: of JSON, or
    with a `header` of a .csv. `end` counts the bytes of the file read so far. If the last line is longer than
    `most_bytes` (0: any), `data` may end with its beginning, and `too_long` is its size. Relative paths in the rows
    begin in `folder`.
    """

    form: Literal["lines", "text", "table", "rows"]
    name: str
    first: int
    position: int
    data: bytes
    end: int
    folder: str = ""
    most_bytes: int = 0
    too_long: int = 0
    # These rows are read: the first, and the one after the last; None: all.
    rows: tuple[int, int] | None = None
    places: tuple[RowPlace, ...] = ()
    header: tuple[str, ...] | None = None


class PlacedRow(NamedTuple):
    """A row or a bad row, and its position in its file."""

    position: int
    row: Row | BadRow


def parse_chunk(chunk: RowChunk) -> Iterator[PlacedRow]:
    """Parse the rows of a chunk in order; empty lines are skipped.

    Raises UnicodeDecodeError for a text that is not UTF-8.
    """
    if chunk.form == "text":
        reason = _too_long_text(chunk.too_long or len(chunk.data), chunk.most_bytes, "a text")
        text = "" if reason else chunk.data.decode("utf-8-sig")
        row = BadRow(chunk.name, reason) if reason else Row(chunk.name, {"text": text}, chunk.folder)
        rows = iter([PlacedRow(0, row)])
    else:
        readers = {"table": _read_table_rows, "lines": _read_line_rows, "rows": _read_cut_rows}
        rows = readers[chunk.form](chunk)
    return islice(rows, *chunk.rows or (None,))


def slice_chunks(chunks: Iterable[RowChunk], first: int, stop: int) -> Iterator[RowChunk]:
    """Yield the chunks with some rows of a file, from row `first` to before row `stop`; empty lines are no rows."""
    for chunk in chunks:
        count = count_rows(chunk)
        if count and first < count:
            yield chunk._replace(rows=(max(first, 0), min(stop, count)))
        # both count from the next chunk on
        first -= count
        stop -= count
        if stop <= 0:
            return


def count_rows(chunk: RowChunk) -> int:
    """Count the rows of a chunk without parsing them; empty lines are none."""
    if chunk.form == "text":
        return 1
    if chunk.form == "table":
        import pyarrow

        return sum(map(len, pyarrow.ipc.open_stream(chunk.data)))
    if chunk.form == "rows":
        return len(chunk.places)
    *lines, last = (bool(line.removeprefix(BYTE_ORDER_MARK).strip()) for line in chunk.data.split(b"\n"))
    has_last = last or chunk.too_long > 0  # the chunk may have only blanks of a last line that is too long
    return sum(lines) + int(has_last)


def _read_line_rows(chunk: RowChunk) -> Iterator[PlacedRow]:
    """Positions and numbers count empty lines too."""
    position = chunk.position
    lines = chunk.data.split(b"\n")
    for number, line in enumerate(lines, chunk.first + 1):
        # Of the last line the chunk may have only the beginning; then `too_long` is its size.
        full_size = chunk.too_long if number == chunk.first + len(lines) else 0
        if full_size or line.removeprefix(BYTE_ORDER_MARK).strip():
            where = f"{chunk.name}, line {number}"
            size = full_size or len(line)
            reason = _too_long_text(size, chunk.most_bytes, "a line")
            yield PlacedRow(position, BadRow(where, reason) if reason else parse_line(line, where, chunk.folder))
        position += len(line) + 1  # 1: its line end


def _read_cut_rows(chunk: RowChunk) -> Iterator[PlacedRow]:
    start = 0
    for number, place in enumerate(chunk.places, chunk.first + 1):
        where = f"{chunk.name}, row {number}"
        data = chunk.data[start : place.stop]
        start = place.stop
        if reason := _too_long_text(place.size, chunk.most_bytes, "a row"):
            row = BadRow(where, reason)
        elif chunk.header is not None:
            row = named_cells(data, chunk.header, where, chunk.folder)
        else:
            row = parse_line(data, where, chunk.folder)
        yield PlacedRow(place.position, row)


def named_cells(record: bytes, names: Sequence[str], where: str, folder: str) -> Row | BadRow:
    """Return a record of a .csv, which errors call `where`, as a row with a string for each of the `names`."""
    try:
        cells = parse_record(record)
    except UnicodeDecodeError as error:
        return BadRow(where, f"byte {error.start + 1} of the row is not UTF-8")
    except csv.Error as error:
        return BadRow(
            where, f"no row of cells with commas between, some in quotes ({error}): {_line_beginning(record)}"
        )
    if len(cells) != len(names):
        header = f"the header has {len(names)} ({', '.join(names)})"
        return BadRow(where, f"it has {len(cells)} cells, and {header}: {_line_beginning(record)}")
    return Row(where, dict(zip(names, cells, strict=True)), folder)


def parse_record(record: bytes) -> list[str]:
    """Parse the cells of one record of a .csv. Raises UnicodeDecodeError, and csv.Error for a malformed one."""
    text = record.decode("utf-8")
    most = csv.field_size_limit(len(text) + 1)  # the module's own limit is 128 KiB for a cell
    try:
        return next(csv.reader([text], strict=True), [])
    finally:
        csv.field_size_limit(most)


def _too_long_text(size: int, most_bytes: int, kind: str) -> str:
    """The text is "" if `most_bytes` is 0."""
    if not most_bytes or size <= most_bytes:
        return ""
    return (
        f"{kind} of {size:,} bytes, and data.max_text_bytes is {most_bytes:,}; cut it into several, leave it out, or "
        "raise the key (0: any; a text takes some 10 to 200 times its bytes while it is tokenized)"
    )


def parse_line(line: bytes, where: str, folder: str = "") -> Row | BadRow:
    """Parse a line of JSON, which errors call `where`; relative paths in it begin in `folder`.

    Any line may begin with a byte order mark, as files may have been concatenated.
    """
    try:
        record = json.loads(line.removeprefix(BYTE_ORDER_MARK).decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRow(where, f"byte {error.start + 1} of the line is not UTF-8")
    except json.JSONDecodeError as error:
        place = (
            f"column {error.colno}"
            if error.lineno == 1
            else f"line {error.lineno}, column {error.colno} of the row"
        )
        return BadRow(where, f"not JSON ({error.msg} at {place}): {_line_beginning(line)}")
    except ValueError:
        # Any other ValueError is of int(), which limits digits.
        digits = f"{sys.get_int_max_str_digits():,}"
        return BadRow(
            where, f"an integer of more than {digits} digits, which no key of a row takes: {_line_beginning(line)}"
        )
    except RecursionError:
        return _too_deep_row(where, line)
    if not isinstance(record, dict):
        return BadRow(
            where, f'needs an object, such as {{"text": …}}; found {type_name(record)}: {_line_beginning(line)}'
        )
    # Brackets are counted first, which is fast; few lines have enough of them to be deep.
    if line.count(b"[") + line.count(b"{") > MOST_LEVELS and _is_deep(record):
        return _too_deep_row(where, line)
    return Row(where, record, folder)


def _too_deep_row(where: str, line: bytes) -> BadRow:
    return BadRow(
        where,
        f"JSON that is nested too deeply, in more than {MOST_LEVELS} lists and objects: {_line_beginning(line)}",
    )


def _is_deep(record: dict[str, Any]) -> bool:
    level: list[Any] = [record]
    for _ in range(MOST_LEVELS):
        inner = (value.values() if isinstance(value, dict) else value for value in level)
        level = [value for values in inner for value in values if isinstance(value, dict | list)]
        if not level:
            return False
    return True


def record_decoder(schema: Any) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return what turns a record of a table into the values of a row, by the table's Arrow schema.

    JSON is parsed, as `datasets` does. A map becomes an object. A struct loses its keys without a value, as Arrow gives
    it every key in every row; a null in JSON or of a column stays.
    """
    decoders = {field.name: _value_decoder(field.type) for field in schema}
    return lambda record: {key: _decode_value(value, decoders[key]) for key, value in record.items()}


def _decode_value(value: Any, decoder: Decode | None) -> Any:
    return value if value is None or decoder is None else decoder(value)


def _value_decoder(kind: Any, levels: int = 0) -> Decode | None:
    """None: nothing decodes the value, as for types deeper than MOST_LEVELS."""
    from pyarrow import types

    if levels > MOST_LEVELS:
        return None
    if getattr(kind, "extension_name", "") == _JSON:
        return parse_json
    if types.is_struct(kind):
        fields = {field.name: _value_decoder(field.type, levels + 1) for field in kind}
        return lambda record: {
            key: _decode_value(value, fields[key]) for key, value in record.items() if value is not None
        }
    if types.is_map(kind):
        item = _value_decoder(kind.item_type, levels + 1)
        return lambda pairs: {key: _decode_value(value, item) for key, value in pairs}
    inner = _value_decoder(kind.value_type, levels + 1) if hasattr(kind, "value_type") else None
    if inner is None or types.is_dictionary(kind) or types.is_run_end_encoded(kind):
        return inner
    return lambda values: [_decode_value(value, inner) for value in values]


def _read_table_rows(chunk: RowChunk) -> Iterator[PlacedRow]:
    """Positions are numbers of rows in the file. A bad row is too long (images do not count), nested too deeply, or has
    a value that Python cannot hold."""
    import pyarrow

    first = chunk.first
    for batch in pyarrow.ipc.open_stream(chunk.data):
        types = str(batch.schema)
        decode = record_decoder(batch.schema)
        # Arrow writes nested types as list<struct<…>>
        may_be_deep = _JSON in types or types.count("<") > MOST_LEVELS
        for number, record_or_reason in enumerate(_iterate_records(batch, types, chunk.most_bytes), first):
            where = f"{chunk.name}, row {number + 1}"
            reason = ""
            values = dict[str, Any]()
            try:
                if isinstance(record_or_reason, str):
                    reason = record_or_reason
                else:
                    values = decode(record_or_reason)
            except ValueError as error:
                reason = f"a text of a column of JSON that is no JSON: {error}"
            if may_be_deep and _is_deep(values):
                reason = f"a row of more than {MOST_LEVELS} lists and objects in each other"
            yield PlacedRow(number, BadRow(where, reason) if reason else Row(where, values, chunk.folder))
        first += len(batch)


def _iterate_records(batch: Any, types: str, most_bytes: int) -> Iterator[dict[str, Any] | str]:
    """A text says what is wrong with a record that cannot be read."""
    repeats = "dictionary<" in types or "run_end_encoded<" in types  # a value of these may stand in many rows
    if not repeats and (not most_bytes or batch.nbytes <= most_bytes):
        # An error of any row comes before one is yielded; below, rows are read one by one, which tells whose it is.
        with suppress(ValueError, OverflowError):
            yield from batch.to_pylist()
            return
    for number in range(len(batch)):
        row = batch.slice(number, 1)
        try:
            yield _too_long_text(sum(map(_text_bytes, row.columns)), most_bytes, "a row") or row.to_pylist()[0]
        except UnicodeDecodeError:
            yield "a text that is not UTF-8"
        except (ValueError, OverflowError) as error:
            yield f"a value that cannot be read, perhaps a time ({error}); leave its column out"


def _text_bytes(column: Any) -> int:
    """Binary values are images, whose pixels have their own limit."""
    import pyarrow.compute
    from pyarrow import types

    kind = column.type
    compute = cast(Any, pyarrow.compute)
    if types.is_dictionary(kind):
        return _text_bytes(column.dictionary_decode())
    if types.is_run_end_encoded(kind):
        return _text_bytes(compute.run_end_decode(column))
    if types.is_struct(kind):
        return sum(map(_text_bytes, column.flatten()))
    if hasattr(kind, "value_type") and not types.is_map(kind):  # lists of any kind
        return _text_bytes(column.flatten())
    is_binary = types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)
    return 0 if is_binary or types.is_binary_view(kind) else column.nbytes


def _line_beginning(line: bytes) -> str:
    return repr(line[:SHOWN_BYTES].decode("utf-8", "replace").strip()[:60])
