"""Which reader a file has, by the ending of its name."""

from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

from longspan.corpus.formats.chunk import Chunk
from longspan.corpus.formats.lines import LineFile, TextFile
from longspan.corpus.formats.tables import ArrowFile, ParquetFile
from longspan.corpus.rows.sample import BadRow, Row

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
    """A file of rows, which are read in order, or one by one."""

    def chunks(self) -> Iterator[Chunk]:
        """Its rows in order, some at a time."""
        ...

    def row_at(self, position: int) -> Row | BadRow:
        """The row at a position that a chunk had."""
        ...


def row_file(name: str, path: Path) -> RowFile:
    """The file of rows that `name` says it is; nothing is read yet."""
    return next(reader for suffix, reader in _READERS.items() if name.endswith(suffix))(name, path)
