"""Tables: parquet files, read by row groups, and Arrow files, as `save_to_disk` of the package datasets writes them."""

from bisect import bisect_right
from collections.abc import Iterator
from functools import cached_property, lru_cache
from itertools import accumulate
from pathlib import Path
from typing import Any

from longspan.corpus.formats.chunk import CHUNK_BYTES, Chunk, values_of_record
from longspan.corpus.formats.lines import folder_of, readable
from longspan.corpus.formats.packages import needed
from longspan.corpus.rows.sample import Row
from longspan.errors import DataError

_END = b"\xff\xff\xff\xff\0\0\0\0"  # of a stream of Arrow's, which reads on quietly where it is missing


class ParquetFile:
    """A .parquet file. To reach a row its row group is read, and kept until a row of another group is asked for."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self._group = lru_cache(maxsize=1)(self._read_group)

    def chunks(self) -> Iterator[Chunk]:
        """Its rows in order, some at a time."""
        with readable(self.name, self.path):
            first, meta, size = 0, self._file.metadata, self.path.stat().st_size
            for number in range(meta.num_row_groups):
                group = meta.row_group(number)
                rows = max(1, CHUNK_BYTES * group.num_rows // max(group.total_byte_size, 1))
                for batch in self._file.iter_batches(batch_size=min(rows, 1 << 16), row_groups=[number]):
                    end = size * (first + len(batch)) // meta.num_rows
                    yield Chunk("table", self.name, first, first, _streamed(batch), end, folder_of(self.path))
                    first += len(batch)

    def row_at(self, position: int) -> Row:
        """The row of this number."""
        with readable(self.name, self.path):
            group = bisect_right(self._ends, position) - 1
            (record,) = self._group(group).slice(position - self._ends[group], 1).to_pylist()
        return Row(f"{self.name}, row {position + 1}", values_of_record(record), folder_of(self.path))

    @cached_property
    def _file(self) -> Any:
        parquet: Any = needed("pyarrow.parquet", self.name)
        return _opened(parquet.ParquetFile, self.name, self.path)

    @cached_property
    def _ends(self) -> list[int]:
        """How many rows stand before each row group, and how many there are."""
        meta = self._file.metadata
        return list(accumulate((meta.row_group(i).num_rows for i in range(meta.num_row_groups)), initial=0))

    def _read_group(self, number: int) -> Any:
        return self._file.read_row_group(number)


class ArrowFile:
    """An .arrow file, mapped into memory."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path

    def chunks(self) -> Iterator[Chunk]:
        """Its rows in order, some at a time."""
        first, size = 0, self.path.stat().st_size
        rows = self._table.num_rows
        for batch in self._table.to_batches():
            step = max(1, CHUNK_BYTES * len(batch) // max(batch.nbytes, 1))
            for start in range(0, len(batch), step):
                piece = batch.slice(start, step)
                end = size * (first + len(piece)) // rows
                yield Chunk("table", self.name, first, first, _streamed(piece), end, folder_of(self.path))
                first += len(piece)

    def row_at(self, position: int) -> Row:
        """The row of this number."""
        (record,) = self._table.slice(position, 1).to_pylist()
        return Row(f"{self.name}, row {position + 1}", values_of_record(record), folder_of(self.path))

    @cached_property
    def _table(self) -> Any:
        pyarrow: Any = needed("pyarrow", self.name)

        def read(path: Path) -> Any:
            mapped = pyarrow.memory_map(str(path))
            try:
                table = pyarrow.ipc.open_stream(mapped).read_all()
            except pyarrow.ArrowInvalid:
                return pyarrow.ipc.open_file(mapped).read_all()
            if mapped.size() < len(_END) or mapped.read_at(len(_END), mapped.size() - len(_END)) != _END:
                raise pyarrow.ArrowInvalid("it was cut off: there is no mark of its end")
            return table

        return _opened(read, self.name, self.path)


def _opened(read: Any, name: str, path: Path) -> Any:
    pyarrow: Any = needed("pyarrow", name)
    try:
        return read(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"cannot read {name} of the corpus ({path}): {error}") from error


def _streamed(batch: Any) -> bytes:
    """A batch of rows as bytes, which another process reads."""
    import pyarrow

    sink = pyarrow.BufferOutputStream()
    with pyarrow.ipc.new_stream(sink, batch.schema) as stream:
        stream.write_batch(batch)
    return sink.getvalue().to_pybytes()
