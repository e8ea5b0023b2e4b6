"""Readers of source files: lines, plain or compressed, texts, parquet and Arrow tables; `row_file` picks by name.

Every reader reads a file in chunks, whatever its size, and also a single row by its position. A row of more bytes than
its limit is read over, and is a bad one; images in tables do not count.
"""

import gzip
import io
import sys
import weakref
import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import cached_property, lru_cache
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from types import ModuleType
from typing import Any, BinaryIO, Protocol, cast

from longspan.config.sections import MAX_TEXT_BYTES
from longspan.corpus.chunk import CHUNK_BYTES, SHOWN_BYTES, Chunk, decode_row, parse_line
from longspan.corpus.rows.sample import BadRow, Row
from longspan.errors import DataError

GZIP, ZSTD = ".gz", ".zst"
_PIECE = 16 << 20  # bytes of a line that is read over, after which its reader may report
_END = b"\xff\xff\xff\xff\0\0\0\0"  # of a stream of Arrow's; without it Arrow reads a cut-off file as a shorter one


class LineFile:
    """A .jsonl file, plain or compressed; to reach a row of a compressed file the rows before it are decompressed."""

    def __init__(self, name: str, path: Path, most_bytes: int) -> None:
        self.name: str = name
        self.path: Path = path
        self._most_bytes = most_bytes
        self._stream: BinaryIO | None = None  # lines as `row_at` reads them
        self._close: Callable[[], object] = lambda: None  # closes the file of the stream

    def chunks(self) -> Iterator[Chunk]:
        """Yield the file's lines in order, in chunks of CHUNK_BYTES and the rest of the line in which these end.

        `first` and `position` are the number and the byte of a chunk's first line; its last line begins at `start` of
        `data`. A last line longer than the limit is read over: `data` has only its first bytes, to be shown, and
        `too_long` is its size without the line end. Meanwhile chunks without rows are yielded, which show progress.
        """
        folder, limit = parent_folder(self.path), self._most_bytes + 1 if self._most_bytes else -1  # 1: a line end
        with (
            self.path.open("rb") as raw,
            name_read_errors(self.name, self.path),
            _open_lines(raw, self.name) as lines,
        ):
            first, position = 0, 0
            while data := lines.read(CHUNK_BYTES):
                data += lines.readline(limit)
                start, number = data.rfind(b"\n") + 1, first + data.count(b"\n")  # of the last line
                line_piece, too_long = b"", 0
                if self._most_bytes and len(data) - start > self._most_bytes:  # its end was not reached
                    too_long = len(data) - start
                    while (line_piece := lines.readline(_PIECE)) and not line_piece.endswith(b"\n"):
                        too_long += len(line_piece)
                        yield Chunk("lines", self.name, number, position, b"", raw.tell(), folder)
                    too_long += max(0, len(line_piece) - 1)  # the last piece without its line end; "" at the file's end
                    data = data[: start + SHOWN_BYTES]
                yield Chunk("lines", self.name, first, position, data, raw.tell(), folder, self._most_bytes, too_long)
                position += start + too_long + 1 if too_long else len(data)
                first = number + bool(too_long)  # a line that is read over has no line end in `data`

    def row_at(self, position: int) -> Row | BadRow:
        """Read the row whose line begins at this byte; to go back in a compressed file, it is opened again."""
        with name_read_errors(self.name, self.path):
            if self._stream is None or (_is_compressed(self.name) and self._stream.tell() > position):
                self._stream = self._reopen_lines()
            _skip_to_position(self._stream, position, seekable=not _is_compressed(self.name))
            line = self._stream.readline()
        return parse_line(line, f"{self.name}, byte {position}", parent_folder(self.path))

    def _reopen_lines(self) -> BinaryIO:
        raw = self.path.open("rb")
        self._close()
        self._close = weakref.finalize(self, raw.close)
        return _open_lines(raw, self.name)


class TextFile:
    """A .txt, .md or .py file: one row."""

    def __init__(self, name: str, path: Path, most_bytes: int) -> None:
        self.name: str = name
        self.path: Path = path
        self._most_bytes = most_bytes

    def chunks(self) -> Iterator[Chunk]:
        """Yield the text as one chunk, only its beginning if it is longer than the limit."""
        with name_read_errors(self.name, self.path), self.path.open("rb") as file:
            size = self.path.stat().st_size
            too_long = size if self._most_bytes and size > self._most_bytes else 0
            data = file.read(SHOWN_BYTES if too_long else -1)
        yield Chunk("text", self.name, 0, 0, data, size, parent_folder(self.path), self._most_bytes, too_long)

    def row_at(self, position: int) -> Row | BadRow:
        """Read the whole text: the only row, at position 0."""
        with name_read_errors(self.name, self.path):
            text = self.path.read_bytes().decode("utf-8-sig")
        return Row(self.name, {"text": text}, parent_folder(self.path))


def parent_folder(path: Path) -> str:
    """Return the folder of a file, absolute."""
    return str(path.absolute().parent)


@contextmanager
def name_read_errors(name: str, path: Path) -> Iterator[None]:
    """Turn read errors of a file into DataErrors that name it."""
    try:
        yield
    except (EOFError, zlib.error, OSError, *_arrow_errors()) as error:
        if isinstance(error, OSError) and error.errno is not None:  # of the system; those of readers have no number
            raise DataError(f"cannot read {name} of the corpus ({path}): {error.strerror}") from error
        reason = "cannot be decompressed, perhaps it was cut off" if _is_compressed(name) else "cannot be read"
        raise DataError(f"{name} of the corpus ({path}) {reason}: {error}") from error


def _arrow_errors() -> tuple[type[Exception], ...]:
    pyarrow: Any = sys.modules.get("pyarrow")
    return () if pyarrow is None else (pyarrow.ArrowException, UnicodeDecodeError)


def _is_compressed(name: str) -> bool:
    return name.endswith((GZIP, ZSTD))


def _open_lines(raw: BinaryIO, name: str) -> BinaryIO:
    if _is_compressed(name) and not raw.read(1):  # readers would take an empty file for one without lines
        raise EOFError("it has 0 bytes")
    raw.seek(0)
    if name.endswith(GZIP):
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw, mode="rb"))
    if name.endswith(ZSTD):
        return io.BufferedReader(
            _ZstdStream(import_reader("pyarrow", name).CompressedInputStream(raw, "zstd")), CHUNK_BYTES
        )
    return raw


class _ZstdStream(io.RawIOBase):
    """pyarrow's stream with a position. (zstandard's own stream ends without an error if a file was cut off.)"""

    def __init__(self, stream: Any) -> None:
        self._stream, self._position = stream, 0

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        count: int = self._stream.readinto(buffer)
        self._position += count
        return count

    def tell(self) -> int:
        return self._position


def _skip_to_position(stream: BinaryIO, position: int, *, seekable: bool) -> None:
    if seekable:
        stream.seek(position)
        return
    while (distance := position - stream.tell()) > 0 and stream.read(min(distance, CHUNK_BYTES)):
        pass


class ParquetFile:
    """A .parquet file. A row is read with its row group, which stays in memory until a row of another one is read."""

    def __init__(self, name: str, path: Path, most_bytes: int) -> None:
        self.name: str = name
        self.path: Path = path
        self._most_bytes = most_bytes
        self._last_group = lru_cache(maxsize=1)(self._read_group)

    def chunks(self) -> Iterator[Chunk]:
        """Yield its rows in order, about CHUNK_BYTES at a time; `end`, the bytes read, is estimated by rows."""
        with name_read_errors(self.name, self.path):
            first, meta, size = 0, self._file.metadata, self.path.stat().st_size
            for number in range(meta.num_row_groups):
                group = meta.row_group(number)
                rows = max(1, CHUNK_BYTES * group.num_rows // max(group.total_byte_size, 1))
                # At most 65,536 rows: `total_byte_size` is that of encoded values, which may be small for many rows.
                for batch in self._file.iter_batches(batch_size=min(rows, 1 << 16), row_groups=[number]):
                    end, data = size * (first + len(batch)) // meta.num_rows, _serialize_rows(batch)
                    yield Chunk("table", self.name, first, first, data, end, parent_folder(self.path), self._most_bytes)
                    first += len(batch)

    def row_at(self, position: int) -> Row:
        """Read the row of this number."""
        with name_read_errors(self.name, self.path):
            group = bisect_right(self._group_starts, position) - 1
            rows = self._last_group(group).slice(position - self._group_starts[group], 1)
            return Row(f"{self.name}, row {position + 1}", decode_row(rows), parent_folder(self.path))

    @cached_property
    def _file(self) -> Any:
        parquet: Any = import_reader("pyarrow.parquet", self.name)
        return _open_table(parquet.ParquetFile, self.name, self.path)

    @cached_property
    def _group_starts(self) -> list[int]:
        meta = self._file.metadata
        return list(accumulate((meta.row_group(i).num_rows for i in range(meta.num_row_groups)), initial=0))

    def _read_group(self, number: int) -> Any:
        return self._file.read_row_group(number)


class ArrowFile:
    """An .arrow file, mapped into memory."""

    def __init__(self, name: str, path: Path, most_bytes: int) -> None:
        self.name: str = name
        self.path: Path = path
        self._most_bytes = most_bytes

    def chunks(self) -> Iterator[Chunk]:
        """Yield its rows in order, about CHUNK_BYTES at a time; `end`, the bytes read, is estimated by rows."""
        first, size = 0, self.path.stat().st_size
        with name_read_errors(self.name, self.path):
            rows = self._table_in_file.num_rows
            for batch in self._table_in_file.to_batches():
                batch.validate(full=True)  # else Arrow follows a damaged file's offsets to bytes outside of the file
                step = max(1, CHUNK_BYTES * len(batch) // max(batch.nbytes, 1))
                for start in range(0, len(batch), step):
                    piece = batch.slice(start, step)
                    end, data = size * (first + len(piece)) // rows, _serialize_rows(piece)
                    yield Chunk("table", self.name, first, first, data, end, parent_folder(self.path), self._most_bytes)
                    first += len(piece)

    def row_at(self, position: int) -> Row:
        """Read the row of this number."""
        values = decode_row(self._table_in_file.slice(position, 1))
        return Row(f"{self.name}, row {position + 1}", values, parent_folder(self.path))

    @cached_property
    def _table_in_file(self) -> Any:
        """Return the table of the file, in Arrow's stream or file format, mapped into memory."""
        pyarrow: Any = import_reader("pyarrow", self.name)

        def read_table(path: Path) -> Any:
            mapped = pyarrow.memory_map(str(path))
            try:
                table = pyarrow.ipc.open_stream(mapped).read_all()
            except pyarrow.ArrowInvalid:
                return pyarrow.ipc.open_file(mapped).read_all()
            if mapped.size() < len(_END) or mapped.read_at(len(_END), mapped.size() - len(_END)) != _END:
                raise pyarrow.ArrowInvalid("it was cut off: there is no mark of its end")
            return table

        return _open_table(read_table, self.name, self.path)


def _open_table(read: Any, name: str, path: Path) -> Any:
    pyarrow: Any = import_reader("pyarrow", name)
    try:
        return read(path)
    except (OSError, ValueError, pyarrow.ArrowException) as error:  # also of names of columns that are not UTF-8
        raise DataError(f"cannot read {name} of the corpus ({path}): {error}") from error


def _serialize_rows(batch: Any) -> bytes:
    """Return a batch of rows as bytes for another process."""
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return sink.getvalue().to_pybytes()


_READERS = {
    ".txt": TextFile,
    ".md": TextFile,
    ".py": TextFile,
    ".jsonl": LineFile,
    ".jsonl.gz": LineFile,
    ".jsonl.zst": LineFile,
    ".parquet": ParquetFile,
    ".arrow": ArrowFile,
}
SUFFIXES = tuple(_READERS)


class RowFile(Protocol):
    """A file of rows, which are read in order or one by one."""

    def chunks(self) -> Iterator[Chunk]:
        """Yield its rows in order, some at a time."""
        ...

    def row_at(self, position: int) -> Row | BadRow:
        """Read the row at a position of a chunk."""
        ...


def row_file(name: str, path: Path, most_bytes: int = MAX_TEXT_BYTES) -> RowFile:
    """Return the reader for the ending of `name`; it calls rows of more than `most_bytes` (0: any) bad ones.

    Nothing is read yet. Reading a row by its position has no limit, as the build has checked the row.
    """
    return next(reader for suffix, reader in _READERS.items() if name.endswith(suffix))(name, path, most_bytes)


def check_readers(names: Iterable[str]) -> None:
    """Raise DataError for the first of these files whose reader is not installed; no file is read."""
    table = next((name for name in names if name.endswith((ZSTD, ".parquet", ".arrow"))), None)
    if table is not None:
        import_reader("pyarrow.parquet", table)


def import_reader(module: str, name: str) -> ModuleType:
    """Import the module that reads the file `name`. Raises DataError, with the command that installs it, if missing."""
    try:
        return import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise DataError(
            f"{name} is read with {package}, which is not installed: pip install 'longspan[data]'"
        ) from error
