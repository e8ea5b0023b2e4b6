"""Readers of source files, in chunks or a row at a time: lines and lists of JSON, plain or compressed, .csv, texts,
parquet and Arrow tables.

`make_row_file` picks the reader by the name. How a chunk's rows are parsed is in `row_chunks.py`.
"""

import csv
import gzip
import io
import json
import shlex
import sys
import weakref
import zlib
from abc import ABC, abstractmethod
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cached_property, lru_cache
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, cast

from longspan.config.sections import MAX_TEXT_BYTES
from longspan.corpus.rows.sample import BadRow, Row
from longspan.corpus.sources.cut_rows import SHOWN_BYTES, CutError, CutRow, ListEnds, RecordEnds, RowEnds, cut_rows
from longspan.corpus.sources.row_chunks import (
    BYTE_ORDER_MARK,
    RowChunk,
    RowPlace,
    named_cells,
    parse_line,
    parse_record,
    record_decoder,
)
from longspan.errors import DataError

# A chunk of a file of lines or a table has this many bytes; its last row is completed.
CHUNK_BYTES = 1 << 20


GZIP = ".gz"
ZSTD = ".zst"
_HEAD = 1 << 16  # bytes by which the form of a .json is recognized
_PIECE = 16 << 20  # bytes of a line that is read over, after which its reader may report
# A stream of Arrow's ends so; without this end Arrow reads a cut-off file as a shorter one.
_END = b"\xff\xff\xff\xff\0\0\0\0"


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
    def _errors_with_name(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, zlib.error, CutError, OSError, *_arrow_errors()) as error:
            # The system's errors have a number, those of readers have none.
            if isinstance(error, OSError) and error.errno is not None:
                raise DataError(f"cannot read {self.name} of the corpus ({self.path}): {error.strerror}") from error
            is_compressed = self.name.endswith((GZIP, ZSTD)) and not isinstance(error, CutError)
            reason = "cannot be decompressed, perhaps it was cut off" if is_compressed else "cannot be read"
            raise DataError(f"{self.name} of the corpus ({self.path}) {reason}: {error}") from error


def _arrow_errors() -> tuple[type[Exception], ...]:
    """() while nothing has imported Arrow."""
    pyarrow: Any = sys.modules.get("pyarrow")  # reading may have imported it
    return () if pyarrow is None else (pyarrow.ArrowException, UnicodeDecodeError)


class LineFile(RowFile):
    """A .jsonl file, plain or compressed; to reach a row of a compressed file the rows before it are decompressed."""

    def __init__(self, name: str, path: Path, most_bytes: int) -> None:
        super().__init__(name, path, most_bytes)
        self._compressed = name.endswith((GZIP, ZSTD))
        self._stream: BinaryIO | None = None  # lines as `read_row_at` reads them
        self._close: Callable[[], object] = lambda: None  # closes the file that the stream reads

    def read_chunks(self) -> Iterator[RowChunk]:
        """Yield the file's lines in order, in chunks of CHUNK_BYTES and the rest of the line in which these end.

        `first` and `position` are the number and the byte of a chunk's first line; its last line begins at `start` of
        `data`. A last line longer than the limit is read over, and `data` has only its first bytes, to be shown;
        meanwhile chunks without rows show progress.
        """
        folder = self.folder
        limit = self.most_bytes + 1 if self.most_bytes else -1  # 1: a line end
        with self.path.open("rb") as raw, self._errors_with_name(), self._open_lines(raw) as lines:
            first = 0
            position = 0
            while data := lines.read(CHUNK_BYTES):
                data += lines.readline(limit)
                start = data.rfind(b"\n") + 1
                # The last line has this number.
                number = first + data.count(b"\n")
                line_piece = b""
                too_long = 0
                # The line's end was not reached.
                if self.most_bytes and len(data) - start > self.most_bytes:
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
                if too_long:  # a line that is read over has no line end in `data`
                    position += start + too_long + 1
                    first = number + 1
                else:
                    position += len(data)
                    first = number

    def read_row_at(self, position: int) -> Row | BadRow:
        """Read the row whose line begins at this byte."""
        with self._errors_with_name():
            line = self._stream_at(position).readline()
        return parse_line(line, f"{self.name}, byte {position}", self.folder)

    def _stream_at(self, position: int) -> BinaryIO:
        """To go back in a compressed file, it is opened again."""
        if self._stream is None or (self._compressed and self._stream.tell() > position):
            raw = self.path.open("rb")
            self._close()
            self._close = weakref.finalize(self, raw.close)
            self._stream = self._open_lines(raw)
        if not self._compressed:
            self._stream.seek(position)
        # A compressed file is read up to the line, or to its end.
        while (distance := position - self._stream.tell()) > 0 and self._stream.read(min(distance, CHUNK_BYTES)):
            pass
        return self._stream

    def _open_lines(self, raw: BinaryIO) -> BinaryIO:
        """The stream is not closed with `raw`."""
        if self._compressed and not raw.read(1):  # readers would take an empty file for one without lines
            raise EOFError("it has 0 bytes")
        raw.seek(0)
        if self.name.endswith(ZSTD):
            stream = cast(Any, import_reader("pyarrow", self.name)).CompressedInputStream(raw, "zstd")
            return io.BufferedReader(_ZstdStream(stream), CHUNK_BYTES)
        if self._compressed:
            return cast(BinaryIO, gzip.GzipFile(fileobj=raw, mode="rb"))
        return raw


class CutFile(LineFile):
    """A file whose rows are cut out of its bytes, as they need not be lines."""

    def _cut_chunks(self, start: int, ends: RowEnds, header: tuple[str, ...] | None = None) -> Iterator[RowChunk]:
        with self.path.open("rb") as raw, self._errors_with_name(), self._open_lines(raw) as stream:
            stream.read(start)
            rows = cut_rows(stream, start, ends, self.most_bytes)
            first = 0
            while batch := _take_bytes(rows, CHUNK_BYTES):
                stops = accumulate(len(row.data) for row in batch)
                places = tuple(
                    RowPlace(row.position, stop, row.size) for row, stop in zip(batch, stops, strict=True)
                )
                yield RowChunk(
                    "rows",
                    self.name,
                    first,
                    batch[0].position,
                    b"".join(row.data for row in batch),
                    raw.tell(),
                    self.folder,
                    self.most_bytes,
                    places=places,
                    header=header,
                )
                first += len(batch)

    def _cut_row_at(self, position: int, ends: RowEnds) -> bytes:
        with self._errors_with_name():
            row = next(cut_rows(self._stream_at(position), position, ends), None)
        return b"" if row is None else row.data


def _take_bytes(rows: Iterator[CutRow], most: int) -> list[CutRow]:
    batch = list[CutRow]()
    size = 0
    while size < most and (row := next(rows, None)) is not None:
        batch.append(row)
        size += len(row.data)
    return batch


class JsonFile(CutFile):
    """A .json file: a list of rows, or a row on each line. Another object is refused."""

    def read_chunks(self) -> Iterator[RowChunk]:
        """Yield the rows in order; of a list, whose elements are cut apart first, none stays in memory."""
        start = self._list_start
        if start is not None:
            yield from self._cut_chunks(start, ListEnds())
        elif self._has_lines or not self._beginning:
            yield from super().read_chunks()
        else:
            raise DataError(
                f"{self.name} of the corpus ({self.path}) holds no list of rows: it begins with "
                f"{self._beginning[:60]!r}; give [{{…}}, {{…}}], or an object on each line; if one of its keys has the "
                f"list, jq .KEY {shlex.quote(self.path.name)} > rows.json takes it out"
            )

    def read_row_at(self, position: int) -> Row | BadRow:
        """Read the row that begins at this byte."""
        if self._list_start is None:
            return super().read_row_at(position)
        row = self._cut_row_at(position, ListEnds())
        return parse_line(row, f"{self.name}, byte {position}", self.folder)

    def has_rows(self) -> bool:
        """Return whether the file holds rows: a list that begins with an object, or lines of objects."""
        is_list = self._list_start is not None and self._beginning[1:].lstrip().startswith("{")
        return is_list or self._has_lines

    @cached_property
    def _head(self) -> bytes:
        with self.path.open("rb") as raw, self._errors_with_name(), self._open_lines(raw) as stream:
            return stream.read(_HEAD)

    @property
    def _beginning(self) -> str:
        return self._head.removeprefix(BYTE_ORDER_MARK).lstrip()[:SHOWN_BYTES].decode("utf-8", "replace")

    @property
    def _list_start(self) -> int | None:
        rest = self._head.removeprefix(BYTE_ORDER_MARK).lstrip()
        return len(self._head) - len(rest) + 1 if rest.startswith(b"[") else None

    @cached_property
    def _has_lines(self) -> bool:
        """The first line ends an object, and the next one begins another."""
        if not self._beginning.startswith("{"):
            return False
        limit = self.most_bytes + 1 if self.most_bytes else -1
        with self.path.open("rb") as raw, self._errors_with_name(), self._open_lines(raw) as stream:
            lines = filter(
                None,
                (line.removeprefix(BYTE_ORDER_MARK).strip() for line in iter(lambda: stream.readline(limit), b"")),
            )
            first = next(lines, b"")
            second = next(lines, b"")
        return first.endswith(b"}") and second.startswith(b"{")


class CsvFile(CutFile):
    """A .csv file: its first row names the columns, and a cell with a comma or a line end stands in quotes."""

    def read_chunks(self) -> Iterator[RowChunk]:
        """Yield the rows behind the header."""
        if (header := self._header) is not None:
            yield from self._cut_chunks(header[1], RecordEnds(), header[0])

    def read_row_at(self, position: int) -> Row | BadRow:
        """Read the row that begins at this byte."""
        names = () if self._header is None else self._header[0]
        return named_cells(
            self._cut_row_at(position, RecordEnds()), names, f"{self.name}, byte {position}", self.folder
        )

    @cached_property
    def _header(self) -> tuple[tuple[str, ...], int] | None:
        """The byte is the one behind the names; None for an empty file."""
        with self.path.open("rb") as raw, self._errors_with_name(), self._open_lines(raw) as stream:
            row = next(cut_rows(stream, 0, RecordEnds(), self.most_bytes), None)
        if row is None:
            return None
        try:
            names = parse_record(row.data.removeprefix(BYTE_ORDER_MARK))
        except (csv.Error, UnicodeDecodeError) as error:
            raise DataError(
                f"the header of {self.name} ({self.path}) cannot be read: {error}; give UTF-8"
            ) from error
        separator = next((mark for mark in ";\t" if len(names) == 1 and mark in names[0]), "")
        if separator:
            raise DataError(
                f"the header of {self.name} ({self.path}) is {names[0]!r}, and commas separate cells; "
                f"python -c 'import csv, sys; csv.writer(sys.stdout).writerows(csv.reader(sys.stdin, delimiter="
                f"{json.dumps(separator)}))' < {shlex.quote(self.path.name)} > rows.csv writes them"
            )
        if repeated := [name for name in names if names.count(name) > 1]:
            raise DataError(
                f"the header of {self.name} ({self.path}) has {names.count(repeated[0])} columns {repeated[0]!r}; give "
                "each a name of its own"
            )
        names = [name or f"column {number}" for number, name in enumerate(names, 1)]
        return tuple(names), row.position + len(row.data)


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
        """Yield the file as one chunk; of one that is too long only the beginning."""
        with self._errors_with_name(), self.path.open("rb") as file:
            size = self.path.stat().st_size
            too_long = size if self.most_bytes and size > self.most_bytes else 0
            data = file.read(SHOWN_BYTES if too_long else -1)
        yield RowChunk("text", self.name, 0, 0, data, size, self.folder, self.most_bytes, too_long)

    def read_row_at(self, position: int) -> Row | BadRow:
        """Read the whole file, which is the one row."""
        with self._errors_with_name():
            text = self.path.read_bytes().decode("utf-8-sig")
        return Row(self.name, {"text": text}, self.folder)


class TableFile(RowFile):
    """A table, read about CHUNK_BYTES at a time; the position of a row is its number."""

    def read_chunks(self) -> Iterator[RowChunk]:
        """Yield the batches, each in Arrow's stream format; `end`, the bytes read, is estimated by rows."""
        import_reader("pyarrow", self.name)
        import pyarrow

        with self._errors_with_name():
            first = 0
            size = self.path.stat().st_size
            rows, batches = self._row_count_and_batches()
            for batch in batches:
                sink = pyarrow.BufferOutputStream()
                with pyarrow.ipc.new_stream(sink, batch.schema) as stream:
                    stream.write_batch(batch)
                end = size * (first + len(batch)) // rows
                data = sink.getvalue().to_pybytes()
                yield RowChunk("table", self.name, first, first, data, end, self.folder, self.most_bytes)
                first += len(batch)

    def read_row_at(self, position: int) -> Row:
        """Read the row with this number, and decode its values."""
        with self._errors_with_name():
            table = self._read_row_table(position)
            (record,) = table.to_pylist()
            return Row(f"{self.name}, row {position + 1}", record_decoder(table.schema)(record), self.folder)

    @abstractmethod
    def _row_count_and_batches(self) -> tuple[int, Iterator[Any]]:
        """Return the number of rows, and an iterator of the rows in batches of about CHUNK_BYTES."""

    @abstractmethod
    def _read_row_table(self, number: int) -> Any:
        """Return a table of row `number` alone."""


class ParquetFile(TableFile):
    """A .parquet file. A row is read with its row group, which stays in memory until a row of another one is read."""

    @cached_property
    def _cached_row_group(self) -> Callable[[int], Any]:
        return lru_cache(maxsize=1)(self._file.read_row_group)

    def _row_count_and_batches(self) -> tuple[int, Iterator[Any]]:
        meta = self._file.metadata

        def batches() -> Iterator[Any]:
            for number in range(meta.num_row_groups):
                group = meta.row_group(number)
                rows = max(1, CHUNK_BYTES * group.num_rows // max(group.total_byte_size, 1))
                # At most 65,536 rows: `total_byte_size` is that of encoded values, which may be small for many rows.
                yield from self._file.iter_batches(batch_size=min(rows, 1 << 16), row_groups=[number])

        return meta.num_rows, batches()

    def _read_row_table(self, number: int) -> Any:
        group = bisect_right(self._group_starts, number) - 1
        return self._cached_row_group(group).slice(number - self._group_starts[group], 1)

    @cached_property
    def _file(self) -> Any:
        parquet: Any = import_reader("pyarrow.parquet", self.name)
        return parquet.ParquetFile(self.path)

    @cached_property
    def _group_starts(self) -> list[int]:
        """The number of all rows comes last."""
        meta = self._file.metadata
        return list(accumulate((meta.row_group(i).num_rows for i in range(meta.num_row_groups)), initial=0))


class ArrowFile(TableFile):
    """An .arrow file in Arrow's stream or file format, mapped into memory."""

    def _row_count_and_batches(self) -> tuple[int, Iterator[Any]]:
        def batches() -> Iterator[Any]:
            for batch in self._table.to_batches():
                # else Arrow follows a damaged file's offsets to bytes outside of the file
                batch.validate(full=True)
                step = max(1, CHUNK_BYTES * len(batch) // max(batch.nbytes, 1))
                yield from (batch.slice(start, step) for start in range(0, len(batch), step))

        return self._table.num_rows, batches()

    def _read_row_table(self, number: int) -> Any:
        return self._table.slice(number, 1)

    @cached_property
    def _table(self) -> Any:
        """Arrow raises an error of its own for a file that was cut off."""
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
    **dict.fromkeys((".json", ".json.gz", ".json.zst"), JsonFile),
    ".csv": CsvFile,
}
SUFFIXES = tuple(_READERS)


def make_row_file(name: str, path: Path, most_bytes: int = MAX_TEXT_BYTES) -> RowFile:
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
