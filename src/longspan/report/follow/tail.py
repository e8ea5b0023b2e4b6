"""Lines that another process appends to a file, as they come; and whether a run is at work in a folder.

A file may be missing, may be replaced by another one, as metrics.jsonl is by a run that is resumed, or be cut and
written anew, as plans.jsonl is. Only whole lines count; a line that is too long is left out.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from longspan.run.facts import LOCK

MOST_BYTES = 64 << 20  # of a line
CHUNK = 1 << 20  # bytes that are read at once
COMPARED = 4096  # bytes of the last line by which a file that was cut and written anew is noticed


class Tail:
    """The whole lines of a file that were added since they were read last.

    >>> tail = Tail(Path("runs/first/metrics.jsonl"))
    >>> for line in tail.lines():
    ...     if tail.is_first:  # of a file that begins anew: what was read before does not count any more
    ...         rows.clear()
    ...     rows.append(line)
    """

    def __init__(self, path: Path, most_bytes: int = MOST_BYTES) -> None:
        """Begin at the first line of a file; lines of more than `most_bytes` are left out."""
        self.is_first: bool = False
        self._path, self._most_bytes = path, most_bytes
        self._file: tuple[int, int] | None = None  # device and number of the file that was read
        self._offset = 0  # behind the last whole line
        self._last_line = 0, b""  # where the last line begins, and its first bytes

    def lines(self) -> Iterator[bytes]:
        """Yield the lines that are new, without those that are too long; none where there is no such file.

        `is_first` is true while the first line of a file is yielded, and from a file's new beginning until then.
        """
        try:
            if not self._path.is_file():  # a pipe of that name would wait for a writer
                return
            file = self._path.open("rb")
        except OSError:
            return
        with file:
            status = os.fstat(file.fileno())
            identity = status.st_dev, status.st_ino  # differs if another file took the name
            if identity != self._file or status.st_size < self._offset or not self._has_last_line(file):
                self._file, self._offset, self._last_line = identity, 0, (0, b"")
                self.is_first = True
            yield from self._new_lines(file)

    def _has_last_line(self, file: BinaryIO) -> bool:
        """Return whether the line that was read last is still where it was; else the file was written anew in place."""
        start, first_bytes = self._last_line
        file.seek(start)
        return file.read(len(first_bytes)) == first_bytes

    def _new_lines(self, file: BinaryIO) -> Iterator[bytes]:
        """Yield the complete lines after the last one that was read; lines longer than the limit are passed over.

        Of a longer line the rest is read in chunks and dropped, up to its end.
        """
        file.seek(self._offset)
        while line := file.readline(self._most_bytes + 1):
            length, is_long = len(line), len(line) > self._most_bytes and not line.endswith(b"\n")
            first_bytes = line[:COMPARED]
            while not line.endswith(b"\n") and is_long and (line := file.readline(CHUNK)):
                length += len(line)
            if not line.endswith(b"\n"):  # the writer is not done with it: it is read again from its beginning
                return
            self._last_line, self._offset = (self._offset, first_bytes), self._offset + length
            if not is_long:
                yield line
                self.is_first = False


def lock_holder(folder: Path) -> str:
    """Return which process is at work in a run's folder, as its lock names it; "" where none is.

    The lock is only asked for and never taken, so that a run which begins meanwhile is not refused.
    """
    path = folder / LOCK
    try:
        if not path.is_file():
            return ""
        with path.open("rb") as file:
            holder = file.read(COMPARED).decode("utf-8", "replace").strip()
            return (holder or "another process") if _is_locked(file.fileno(), holder) else ""
    except OSError:
        return ""


def _is_locked(descriptor: int, holder: str) -> bool:
    """Where the system has no locks of files, the lock counts as held if the file names a `holder`."""
    os.lseek(descriptor, 0, os.SEEK_SET)
    try:
        os.lockf(descriptor, os.F_TEST, 0)
    except (PermissionError, BlockingIOError):
        return True
    except OSError:
        return bool(holder)
    return False
