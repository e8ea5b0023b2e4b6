"""Files of lines, plain or compressed, and files that are one text. They are read in pieces, whatever their size."""

import gzip
import io
import weakref
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, cast

from longspan.corpus.formats.chunk import CHUNK_BYTES, Chunk, row_of_line
from longspan.corpus.formats.packages import needed
from longspan.corpus.rows.sample import BadRow, Row
from longspan.errors import DataError

GZIP, ZSTD = ".gz", ".zst"


class LineFile:
    """A .jsonl, or one that is compressed, whose rows before a row are decompressed to reach it."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self._stream: BinaryIO | None = None
        self._close: Callable[[], object] = lambda: None

    def chunks(self) -> Iterator[Chunk]:
        """Its lines in order, some at a time."""
        with self.path.open("rb") as raw, readable(self.name, self.path), _decompressed(raw, self.name) as lines:
            first, position = 0, 0
            while data := lines.read(CHUNK_BYTES):
                data += lines.readline()
                yield Chunk("lines", self.name, first, position, data, raw.tell(), folder_of(self.path))
                first, position = first + data.count(b"\n"), position + len(data)

    def row_at(self, position: int) -> Row | BadRow:
        """The row whose line begins at this byte."""
        with readable(self.name, self.path):
            if self._stream is None or (_is_compressed(self.name) and self._stream.tell() > position):
                self._stream = self._opened()
            _forward(self._stream, position, seekable=not _is_compressed(self.name))
            line = self._stream.readline()
        return row_of_line(line, f"{self.name}, byte {position}", folder_of(self.path))

    def _opened(self) -> BinaryIO:
        raw = self.path.open("rb")
        self._close()
        self._close = weakref.finalize(self, raw.close)
        return _decompressed(raw, self.name)


class TextFile:
    """A .txt, .md or .py: one row."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path

    def chunks(self) -> Iterator[Chunk]:
        """Its text."""
        with readable(self.name, self.path):
            data = self.path.read_bytes()
        yield Chunk("text", self.name, 0, 0, data, len(data), folder_of(self.path))

    def row_at(self, position: int) -> Row | BadRow:
        """Its text."""
        (chunk,) = self.chunks()
        return Row(self.name, {"text": chunk.data.decode("utf-8-sig")}, chunk.folder)


def folder_of(path: Path) -> str:
    """The folder of a file, absolute."""
    return str(path.absolute().parent)


@contextmanager
def readable(name: str, path: Path) -> Iterator[None]:
    """Turn errors of reading a file into DataErrors that name it."""
    try:
        yield
    except (EOFError, zlib.error, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise DataError(f"cannot read {name} of the corpus ({path}): {error.strerror}") from error
        reason = "cannot be decompressed, perhaps it was cut off" if _is_compressed(name) else "cannot be read"
        raise DataError(f"{name} of the corpus ({path}) {reason}: {error}") from error


def _is_compressed(name: str) -> bool:
    return name.endswith((GZIP, ZSTD))


def _decompressed(raw: BinaryIO, name: str) -> BinaryIO:
    """The lines of a file. What reads them raises OSError or EOFError where a compressed file ends too early."""
    if _is_compressed(name) and not raw.read(1):
        raise EOFError("it has 0 bytes")
    raw.seek(0)
    if name.endswith(GZIP):
        return cast(BinaryIO, gzip.GzipFile(fileobj=raw, mode="rb"))
    if name.endswith(ZSTD):
        return io.BufferedReader(_ZstdStream(needed("pyarrow", name).CompressedInputStream(raw, "zstd")), CHUNK_BYTES)
    return raw


class _ZstdStream(io.RawIOBase):
    """pyarrow's stream, which does not say where it is. That of zstandard ends quietly where a file was cut off."""

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


def _forward(stream: BinaryIO, position: int, *, seekable: bool) -> None:
    if seekable:
        stream.seek(position)
        return
    while (left := position - stream.tell()) > 0 and stream.read(min(left, CHUNK_BYTES)):
        pass
