"""A teacher's k likeliest tokens of each token that a document predicts: a table of the document, and of a file.

A table is (n, k + 1), an entry an id and its log-probability: row p is of the distribution that predicts token p, as
labels are. The last column has the id −1 and the log of the sum of all other tokens' probabilities.
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from longspan.errors import DataError
from longspan.files import name_file_in_errors
from longspan.layout import Flags, Integers
from longspan.plain_text import short_text

ENTRY = np.dtype([("id", "<i4"), ("log_prob", "<f4")])
REST = -1
Table = npt.NDArray[np.void]


def make_table(ids: npt.NDArray[Any], log_probs: npt.NDArray[Any], rests: npt.NDArray[Any]) -> Table:
    """Return the table (n, k + 1) of ids (n, k), their log-probabilities (n, k), and those of all other tokens (n,)."""
    table = np.empty((len(ids), ids.shape[1] + 1), ENTRY)
    table["id"][:, :-1] = ids
    table["id"][:, -1] = REST
    table["log_prob"][:, :-1] = log_probs
    table["log_prob"][:, -1] = rests
    return table


def check_table(table: Any, rows: int, noun: str) -> Table:
    """Return a table of `rows` rows. Raises DataError, which calls them `noun`, for anything else.

    Log-probabilities are below 0 up to rounding, and may be −∞. Rows of tokens that no label predicts are not read.
    """
    if not isinstance(table, np.ndarray) or table.dtype != ENTRY or table.ndim != 2 or table.shape[1] < 2:
        form = f"{table.dtype} of shape {table.shape}" if isinstance(table, np.ndarray) else short_text(table)
        raise DataError(
            f"a table of likeliest tokens is {form}; give what likeliest_tokens(…).of(document) returns"
        )
    if len(table) != rows:
        raise DataError(f"a table of likeliest tokens has {len(table)} rows for {rows} {noun}; give one for each")
    if not (table["log_prob"] <= 1e-3).all():
        raise DataError(
            "a table of likeliest tokens has log-probabilities above 0 or NaN; give what likeliest_tokens returns"
        )
    return table


def table_numbers(table: Table) -> npt.NDArray[np.int64]:
    """Return a table's entries (n, k + 1) as the bits of int64, in which they travel between ranks."""
    return np.ascontiguousarray(table).view(np.int64)


def table_of_numbers(numbers: npt.NDArray[np.int64]) -> Table:
    """Return the table of what `table_numbers` gave."""
    return np.ascontiguousarray(numbers).view(ENTRY)


class TableFile:
    """The tables of the documents of a corpus in two files of a folder, a row for each target, document after document.

    `likeliest.bin` has the rows, 8 (k + 1) bytes each, and `done.npy` says which documents have theirs. `targets` (D,)
    counts those of each document. A row that was never written is 0, which readers notice.
    """

    def __init__(self, folder: Path, targets: npt.NDArray[Any], top_k: int) -> None:
        self.folder = folder
        self._starts = np.cumsum([0, *targets.tolist()], dtype=np.int64)
        self._shape = (int(self._starts[-1]), top_k + 1)
        self._rows: Table | None = None
        self.done: Flags = self._read_done()

    @property
    def row_bytes(self) -> int:
        return self._shape[1] * ENTRY.itemsize

    def read(self, document: int, targets: Integers) -> Table:
        """Return the rows (n, k + 1) of targets of a document by their numbers in it, zeros for those below 0.

        Raises DataError where the file is damaged or gone.
        """
        if self._rows is None:
            self._rows = self._map_rows("r")
        table = np.zeros((len(targets), self._shape[1]), ENTRY)
        is_target = targets >= 0
        table[is_target] = self._rows[self._starts[document] + targets[is_target]]
        return table

    def write(self, document: int, targets: Integers, table: Table) -> None:
        """Write rows of targets of a document by their numbers in it. Raises OSError where the disk refuses."""
        if self._rows is None or not self._rows.flags.writeable:
            self._rows = self._map_rows("r+")
        self._rows[self._starts[document] + targets] = table

    def mark_done(self, documents: Integers) -> None:
        """Note that these documents have all of their rows, once these are on the disk; others that are noted in the
        file, by another run say, stay.
        """
        rows: Any = self._rows
        if rows is not None:
            rows.flush()
            self._rows = None
        self.done = self._read_done()
        self.done[documents] = True
        file = self.folder / "done.npy"
        partial = self.folder / "done.partial.npy"
        with name_file_in_errors(file):
            np.save(partial, self.done)
            partial.replace(file)

    def _read_done(self) -> Flags:
        """None is done where the rows' file is gone or has another size."""
        count = len(self._starts) - 1
        rows = self.folder / "likeliest.bin"
        if not rows.is_file() or rows.stat().st_size != self._shape[0] * self.row_bytes:
            return np.zeros(count, dtype=bool)
        try:
            done = np.load(self.folder / "done.npy")
        except (OSError, ValueError, EOFError):
            return np.zeros(count, dtype=bool)
        return done if done.dtype == bool and done.shape == (count,) else np.zeros(count, dtype=bool)

    def _map_rows(self, mode: str) -> Table:
        """A file that is written is as long as all rows from the first on; a hole in it takes no place on the disk."""
        file = self.folder / "likeliest.bin"
        size = self._shape[0] * self.row_bytes
        if mode == "r+":
            with name_file_in_errors(file):
                self.folder.mkdir(parents=True, exist_ok=True)
                with file.open("ab") as opened:
                    opened.truncate(size)
        if not file.is_file() or file.stat().st_size != size:
            raise DataError(
                f"{file} is not there or has not {size:,} bytes; give the teacher (teacher.path), which writes it again"
            )
        return np.memmap(file, dtype=ENTRY, mode=mode, shape=self._shape)  # pyright: ignore[reportCallIssue, reportArgumentType]
