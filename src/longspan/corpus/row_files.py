"""Readers of source files: lines, plain or compressed, texts, parquet and Arrow tables; `row_file` picks by name.

One process reads a file in chunks, others parse them. A row has a position: the byte at which its line begins (after
decompression), or its number in a table. A row over the limit of bytes is read over, and a bad one.
"""

import gzip
import io
import json
import sys
import weakref
import zlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from functools import cached_property, lru_cache
from importlib import import_module
from itertools import accumulate, islice
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, Literal, NamedTuple, cast

from longspan.config.sections import MAX_TEXT_BYTES
from longspan.corpus.rows.sample import BadRow, Row, type_name
from longspan.errors import DataError
from longspan.files import parse_json

CHUNK_BYTES = 1 << 20  # of a file of lines or a table; the last row is completed
SHOWN_BYTES = 240  # of a row that is too long: its beginning, for messages
MOST_LEVELS = 100  # of lists and objects in each other in a row
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
_JSON = "arrow.json"  # Arrow's type of texts that are JSON
Decode = Callable[[Any], Any]


class RowChunk(NamedTuple):
    """Rows of the file `name`, beginning with row number `first` (from 0) at `position`.

    `data` are lines, a text, or a table in Arrow's stream format; `end` counts the bytes of the file read so far. If
    the last row is longer than `most_bytes` (0: any), `data` may end with its beginning, and `too_long` is its size.
    """

    form: Literal["lines", "text", "table"]
    name: str
    first: int
    position: int
    data: bytes
    end: int
    folder: str = ""
    most_bytes: int = 0
    too_long: int = 0
    # which of its rows are read: the first, and the one after the last; None: all
    rows: tuple[int, int] | None = None


class PlacedRow(NamedTuple):
    """A row or a bad row, and its position in its file."""

    position: int
    row: Row | BadRow


def chunk_rows(chunk: RowChunk) -> Iterator[PlacedRow]:
    """Parse the rows of a chunk in order; empty lines are skipped.

    Raises UnicodeDecodeError for a text that is not UTF-8.
    """
    return islice(_read_rows(chunk), *chunk.rows or (None,))


def slice_chunks(chunks: Iterable[RowChunk], first: int, stop: int) -> Iterator[RowChunk]:
    """Yield the chunks with some rows of a file, from row `first` to before row `stop`; empty lines are no rows."""
    for chunk in chunks:
        count = count_rows(chunk)
        if count and first < count:
            yield chunk._replace(rows=(max(first, 0), min(stop, count)))
        first = first - count
        stop = stop - count
        if stop <= 0:
            return


def count_rows(chunk: RowChunk) -> int:
    if chunk.form == "text":
        return 1
    if chunk.form == "table":
        import pyarrow

        return sum(map(len, pyarrow.ipc.open_stream(chunk.data)))
    *lines, last = (bool(line.removeprefix(BYTE_ORDER_MARK).strip()) for line in chunk.data.split(b"\n"))
    return sum(lines) + (last or chunk.too_long > 0)


def _read_rows(chunk: RowChunk) -> Iterator[PlacedRow]:
    if chunk.form == "text":
        size = chunk.too_long or len(chunk.data)
        reason = _too_long_text(size, chunk.most_bytes, "a text")
        where = chunk.name
        text = "" if reason else chunk.data.decode("utf-8-sig")
        yield PlacedRow(0, BadRow(where, reason) if reason else Row(where, {"text": text}, chunk.folder))
    elif chunk.form == "table":
        yield from _read_table(chunk)
    else:
        yield from _read_line_rows(chunk)


def _read_line_rows(chunk: RowChunk) -> Iterator[PlacedRow]:
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


def _too_long_text(size: int, most_bytes: int, kind: str) -> str:
    if not most_bytes or size <= most_bytes:
        return ""
    return (
        f"{kind} of {size:,} bytes, and data.max_text_bytes is {most_bytes:,}; cut it into several, leave it out, or "
        "raise the key (0: any; a text takes some 10 to 200 times its bytes while it is tokenized)"
    )


def parse_line(line: bytes, where: str, folder: str = "") -> Row | BadRow:
    """Parse a line of JSON; any may begin with a byte order mark, as files may have been concatenated."""
    try:
        record = json.loads(line.removeprefix(BYTE_ORDER_MARK).decode("utf-8"))
    except UnicodeDecodeError as error:
        return BadRow(where, f"byte {error.start + 1} of the line is not UTF-8")
    except json.JSONDecodeError as error:
        return BadRow(where, f"not JSON ({error.msg} at column {error.colno}): {_line_beginning(line)}")
    except ValueError:  # any other one is of int(), which limits digits
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
    """Return what decodes a value of an Arrow type; None: nothing does, as for types deeper than MOST_LEVELS."""
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


def _read_table(chunk: RowChunk) -> Iterator[PlacedRow]:
    """A bad row is too long (images do not count), nested too deeply, or has a value that Python cannot hold."""
    import pyarrow

    first = chunk.first
    for batch in pyarrow.ipc.open_stream(chunk.data):
        types = str(batch.schema)
        decode = record_decoder(batch.schema)
        # Arrow writes nested types as list<struct<…>>
        may_be_deep = _JSON in types or types.count("<") > MOST_LEVELS
        for number, record in enumerate(_iterate_records(batch, types, chunk.most_bytes), first):
            where = f"{chunk.name}, row {number + 1}"
            reason = record if isinstance(record, str) else ""
            values = dict[str, Any]()
            if not isinstance(record, str):
                try:
                    values = decode(record)
                except ValueError as error:
                    reason = f"a text of a column of JSON that is no JSON: {error}"
            if may_be_deep and _is_deep(values):
                reason = f"a row of more than {MOST_LEVELS} lists and objects in each other"
            yield PlacedRow(number, BadRow(where, reason) if reason else Row(where, values, chunk.folder))
        first += len(batch)


def _iterate_records(batch: Any, types: str, most_bytes: int) -> Iterator[dict[str, Any] | str]:
    """Yield the records of a batch, as dictionaries; in place of one that cannot be read, what is wrong with it."""
    repeats = "dictionary<" in types or "run_end_encoded<" in types  # a value of these may stand in many rows
    if not repeats and (not most_bytes or batch.nbytes <= most_bytes):
        # of some row, before any is yielded; row by row it is located below
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
    """Count the bytes of an Arrow array without binary values: these are images, whose pixels have their own limit."""
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


GZIP = ".gz"
ZSTD = ".zst"
_PIECE = 16 << 20  # bytes of a line that is read over, after which its reader may report
_END = b"\xff\xff\xff\xff\0\0\0\0"  # of a stream of Arrow's; without it Arrow reads a cut-off file as a shorter one


class RowFile(ABC):
    """A file of rows, read in order or one by one; rows of more than `most_bytes` (0: any) are bad ones."""

    def __init__(self, name: str, path: Path, most_bytes: int) -> None:
        self.name: str = name
        self.path: Path = path
        self.most_bytes: int = most_bytes
        self.folder: str = str(path.absolute().parent)

    @abstractmethod
    def read_chunks(self) -> Iterator[RowChunk]:
        """Yield its rows in order, some at a time."""

    @abstractmethod
    def read_row_at(self, position: int) -> Row | BadRow:
        """Read the row at a position of a chunk; no limit holds, as the build has checked the row."""

    @contextmanager
    def _name_file_in_errors(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, zlib.error, OSError, *_arrow_errors()) as error:
            # of the system; those of readers have no number
            if isinstance(error, OSError) and error.errno is not None:
                raise DataError(f"cannot read {self.name} of the corpus ({self.path}): {error.strerror}") from error
            is_compressed = self.name.endswith((GZIP, ZSTD))
            reason = "cannot be decompressed, perhaps it was cut off" if is_compressed else "cannot be read"
            raise DataError(f"{self.name} of the corpus ({self.path}) {reason}: {error}") from error


def _arrow_errors() -> tuple[type[Exception], ...]:
    pyarrow: Any = sys.modules.get("pyarrow")  # reading may have imported it
    return () if pyarrow is None else (pyarrow.ArrowException, UnicodeDecodeError)


class LineFile(RowFile):
    """A .jsonl file, plain or compressed; to reach a row of a compressed file the rows before it are decompressed."""

    def __init__(self, name: str, path: Path, most_bytes: int) -> None:
        super().__init__(name, path, most_bytes)
        self._compressed = name.endswith((GZIP, ZSTD))
        self._stream: BinaryIO | None = None  # lines as `read_row_at` reads them
        self._close: Callable[[], object] = lambda: None  # closes the file of the stream

    def read_chunks(self) -> Iterator[RowChunk]:
        """Yield the file's lines in order, in chunks of CHUNK_BYTES and the rest of the line in which these end.

        `first` and `position` are the number and the byte of a chunk's first line; its last line begins at `start` of
        `data`. A last line longer than the limit is read over, and `data` has only its first bytes, to be shown;
        meanwhile chunks without rows show progress.
        """
        folder = self.folder
        limit = self.most_bytes + 1 if self.most_bytes else -1  # 1: a line end
        with self.path.open("rb") as raw, self._name_file_in_errors(), self._open_lines(raw) as lines:
            first = 0
            position = 0
            while data := lines.read(CHUNK_BYTES):
                data += lines.readline(limit)
                start = data.rfind(b"\n") + 1
                number = first + data.count(b"\n")  # of the last line
                line_piece = b""
                too_long = 0
                if self.most_bytes and len(data) - start > self.most_bytes:  # its end was not reached
                    too_long = len(data) - start
                    while (line_piece := lines.readline(_PIECE)) and not line_piece.endswith(b"\n"):
                        too_long += len(line_piece)
                        yield RowChunk("lines", self.name, number, position, b"", raw.tell(), folder)
                    # the last piece without its line end; "" at the file's end
                    too_long += max(0, len(line_piece) - 1)
                    data = data[: start + SHOWN_BYTES]
                yield RowChunk(
                    "lines", self.name, first, position, data, raw.tell(), folder, self.most_bytes, too_long
                )
                position += start + too_long + 1 if too_long else len(data)
                first = number + bool(too_long)  # a line that is read over has no line end in `data`

    def read_row_at(self, position: int) -> Row | BadRow:
        """Read the row whose line begins at this byte; to go back in a compressed file, it is opened again."""
        with self._name_file_in_errors():
            if self._stream is None or (self._compressed and self._stream.tell() > position):
                raw = self.path.open("rb")
                self._close()
                self._close = weakref.finalize(self, raw.close)
                self._stream = self._open_lines(raw)
            if not self._compressed:
                self._stream.seek(position)
            while (distance := position - self._stream.tell()) > 0 and self._stream.read(
                min(distance, CHUNK_BYTES)
            ):
                pass
            line = self._stream.readline()
        return parse_line(line, f"{self.name}, byte {position}", self.folder)

    def _open_lines(self, raw: BinaryIO) -> BinaryIO:
        if self._compressed and not raw.read(1):  # readers would take an empty file for one without lines
            raise EOFError("it has 0 bytes")
        raw.seek(0)
        if self.name.endswith(ZSTD):
            stream = cast(Any, import_reader("pyarrow", self.name)).CompressedInputStream(raw, "zstd")
            return io.BufferedReader(_ZstdStream(stream), CHUNK_BYTES)
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw, mode="rb")) if self._compressed else raw


class _ZstdStream(io.RawIOBase):
    """pyarrow's stream with a position. (zstandard's own stream ends without an error if a file was cut off.)"""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._position = 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count: int = self._stream.readinto(buffer)
        self._position += count
        return count

    def tell(self) -> int:
        return self._position


class TextFile(RowFile):
    """A .txt, .md or .py file: one row, at position 0."""

    def read_chunks(self) -> Iterator[RowChunk]:
        with self._name_file_in_errors(), self.path.open("rb") as file:
            size = self.path.stat().st_size
            too_long = size if self.most_bytes and size > self.most_bytes else 0
            data = file.read(SHOWN_BYTES if too_long else -1)
        yield RowChunk("text", self.name, 0, 0, data, size, self.folder, self.most_bytes, too_long)

    def read_row_at(self, position: int) -> Row | BadRow:
        with self._name_file_in_errors():
            text = self.path.read_bytes().decode("utf-8-sig")
        return Row(self.name, {"text": text}, self.folder)


class TableFile(RowFile):
    """A table, read about CHUNK_BYTES at a time; the position of a row is its number."""

    def read_chunks(self) -> Iterator[RowChunk]:
        """`end` of a chunk, the bytes read, is estimated by rows."""
        import_reader("pyarrow", self.name)
        import pyarrow

        with self._name_file_in_errors():
            first, size, (rows, batches) = 0, self.path.stat().st_size, self._open_batches()
            for batch in batches:
                sink = pyarrow.BufferOutputStream()
                with pyarrow.ipc.new_stream(sink, batch.schema) as stream:
                    stream.write_batch(batch)
                end = size * (first + len(batch)) // rows
                data = sink.getvalue().to_pybytes()
                yield RowChunk("table", self.name, first, first, data, end, self.folder, self.most_bytes)
                first += len(batch)

    def read_row_at(self, position: int) -> Row:
        with self._name_file_in_errors():
            table = self._open_row(position)
            (record,) = table.to_pylist()
            return Row(f"{self.name}, row {position + 1}", record_decoder(table.schema)(record), self.folder)

    @abstractmethod
    def _open_batches(self) -> tuple[int, Iterator[Any]]:
        """The number of rows, and batches of them."""

    @abstractmethod
    def _open_row(self, number: int) -> Any:
        """A table of this row."""


class ParquetFile(TableFile):
    """A .parquet file. A row is read with its row group, which stays in memory until a row of another one is read."""

    @cached_property
    def _last_group(self) -> Callable[[int], Any]:
        return lru_cache(maxsize=1)(self._file.read_row_group)

    def _open_batches(self) -> tuple[int, Iterator[Any]]:
        meta = self._file.metadata

        def batches() -> Iterator[Any]:
            for number in range(meta.num_row_groups):
                group = meta.row_group(number)
                rows = max(1, CHUNK_BYTES * group.num_rows // max(group.total_byte_size, 1))
                # At most 65,536 rows: `total_byte_size` is that of encoded values, which may be small for many rows.
                yield from self._file.iter_batches(batch_size=min(rows, 1 << 16), row_groups=[number])

        return meta.num_rows, batches()

    def _open_row(self, number: int) -> Any:
        group = bisect_right(self._group_starts, number) - 1
        return self._last_group(group).slice(number - self._group_starts[group], 1)

    @cached_property
    def _file(self) -> Any:
        parquet: Any = import_reader("pyarrow.parquet", self.name)
        return parquet.ParquetFile(self.path)

    @cached_property
    def _group_starts(self) -> list[int]:
        meta = self._file.metadata
        return list(accumulate((meta.row_group(i).num_rows for i in range(meta.num_row_groups)), initial=0))


class ArrowFile(TableFile):
    """An .arrow file in Arrow's stream or file format, mapped into memory."""

    def _open_batches(self) -> tuple[int, Iterator[Any]]:
        def batches() -> Iterator[Any]:
            for batch in self._table.to_batches():
                # else Arrow follows a damaged file's offsets to bytes outside of the file
                batch.validate(full=True)
                step = max(1, CHUNK_BYTES * len(batch) // max(batch.nbytes, 1))
                yield from (batch.slice(start, step) for start in range(0, len(batch), step))

        return self._table.num_rows, batches()

    def _open_row(self, number: int) -> Any:
        return self._table.slice(number, 1)

    @cached_property
    def _table(self) -> Any:
        pyarrow: Any = import_reader("pyarrow", self.name)
        mapped = pyarrow.memory_map(str(self.path))
        try:
            table = pyarrow.ipc.open_stream(mapped).read_all()
        except pyarrow.ArrowInvalid:
            return pyarrow.ipc.open_file(mapped).read_all()
        if mapped.size() < len(_END) or mapped.read_at(len(_END), mapped.size() - len(_END)) != _END:
            raise pyarrow.ArrowInvalid("it was cut off: there is no mark of its end")
        return table


_READERS: dict[str, type[RowFile]] = {
    **dict.fromkeys((".txt", ".md", ".py"), TextFile),
    **dict.fromkeys((".jsonl", ".jsonl.gz", ".jsonl.zst"), LineFile),
    ".parquet": ParquetFile,
    ".arrow": ArrowFile,
}
SUFFIXES = tuple(_READERS)


def row_file(name: str, path: Path, most_bytes: int = MAX_TEXT_BYTES) -> RowFile:
    """Return the reader for the ending of `name`. Nothing is read yet."""
    return next(reader for suffix, reader in _READERS.items() if name.endswith(suffix))(name, path, most_bytes)


def import_reader(module: str, name: str) -> ModuleType:
    """Import the module that reads the file `name`. Raises DataError, with the command that installs it, if missing."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise DataError(
            f"{name} is read with {package}, which is not installed: pip install 'longspan[data]'"
        ) from error
