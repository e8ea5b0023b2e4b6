"""Standard output and error of a run. It goes on where these cannot be written: a full disk, a reader that has left."""

import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from longspan.files import own_file

FILE = "output.txt"  # in a run's folder: what standard output or error did not take


class _Output(io.FileIO):
    """Writes to a descriptor; what that does not take is appended to `file`, after a line that gives the reason.

    It is kept in memory while the file cannot be written, as before its folder is there, and where there is no file.
    """

    def __init__(self, descriptor: int, file: Path | None) -> None:
        super().__init__(descriptor, "wb", closefd=False)
        self._file = file
        self._unwritten = b""
        self._has_failed = False

    def write(self, data: Any, /) -> int:
        """Write to the descriptor, and what it does not take to the file; never raises, so that prints go on."""
        try:
            return super().write(data)
        except OSError as error:
            if not self._has_failed:
                stream = "standard error" if self.fileno() == 2 else "standard output"
                self._unwritten += f"{stream} does not take this ({error.strerror}); the run goes on:\n".encode()
            self._has_failed = True
        self._unwritten += bytes(data)
        if self._file is not None:
            with suppress(OSError), own_file(self._file).open("ab") as file:
                file.write(self._unwritten)
                self._unwritten = b""
        return len(data)


def keep_prints_from_failing(folder: Path | None, names: Sequence[str] = ("stdout", "stderr")) -> None:
    """Replace these streams by ones that never fail: what cannot be written goes to FILE in the folder, if any."""
    for name in names:
        stream: Any = getattr(sys, name)
        # another stream than the interpreter's is a program's own, as under pytest, and stays
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            raw = _Output(stream.fileno(), folder and folder / FILE)
            buffer = io.BufferedWriter(raw)
            options = {"encoding": stream.encoding, "errors": stream.errors}
            setattr(sys, name, io.TextIOWrapper(buffer, line_buffering=stream.line_buffering, **options))


def write_error(text: str, descriptor: int = 2) -> None:
    """Write to standard error from a thread or the handler of a signal, if that can be written."""
    with suppress(OSError):
        os.write(descriptor, text.encode())
