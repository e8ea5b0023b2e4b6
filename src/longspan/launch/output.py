"""Standard output and error of a run. It goes on where these cannot be written: a full disk, a reader that has left."""

import io
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from longspan.errors import LongspanError
from longspan.files import own_file

# The file is in a run's folder, and has what standard output or error did not take.
FILE = "output.txt"


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


class _RefusedOutput(io.FileIO):
    """Writes to a descriptor; what that does not take is an error in words, and the rest is dropped."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:  # a reader that has left is no error of the command
            raise
        except OSError as error:
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.fileno())  # Python would write the rest as it ends
            raise LongspanError(
                f"standard output does not take the result ({error.strerror}); give it a file with room, and start the "
                "command again"
            ) from error


@contextmanager
def refuse_full_output() -> Iterator[None]:
    """Raise LongspanError where standard output does not take what is printed inside; all of it is written at the end.
    Characters that the terminal's encoding lacks are written as escapes.
    """
    if sys.stdout is None or sys.stdout is not sys.__stdout__:  # a program's own, as under pytest
        yield
        return
    sys.stdout = sys.__stdout__ = _wrapped(sys.stdout, _RefusedOutput(sys.stdout.fileno(), "wb", closefd=False))
    try:
        yield
    except SystemExit:
        # argparse exits so after --help.
        sys.stdout.flush()
        raise
    sys.stdout.flush()


def _wrapped(stream: Any, raw: io.RawIOBase) -> Any:
    """Characters that the encoding lacks become escapes."""
    options = {"encoding": stream.encoding, "errors": "backslashreplace", "line_buffering": stream.line_buffering}
    return io.TextIOWrapper(io.BufferedWriter(raw), **options)


def keep_prints_from_failing(folder: Path | None, names: Sequence[str] = ("stdout", "stderr")) -> None:
    """Replace these streams by ones that never fail: what cannot be written goes to FILE in the folder, if any."""
    for name in names:
        stream: Any = getattr(sys, name)
        # another stream than the interpreter's is a program's own, as under pytest, and stays
        if stream is not None and stream is getattr(sys, f"__{name}__"):
            output = _wrapped(stream, _Output(stream.fileno(), folder and folder / FILE))
            setattr(sys, name, output)
            # A later call knows it by this name, and gives it a folder.
            setattr(sys, f"__{name}__", output)


def write_error(text: str, descriptor: int = 2) -> None:
    """Write to standard error from a thread or the handler of a signal, if that can be written."""
    with suppress(OSError):
        os.write(descriptor, text.encode())
