"""Arrays on disk that grow while they are written, and are mapped into memory when they are read."""

from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

_BLOCK = 1 << 20
Array = npt.NDArray[Any]


class GrowingArray:
    """A .npy file of one dimension, written from its beginning to its end. It is whole once it is closed."""

    def __init__(self, path: Path, dtype: str) -> None:
        self._dtype, self.count = np.dtype(dtype), 0
        self._file: BinaryIO = path.open("wb")
        self._write_header()

    def append(self, values: Array) -> None:
        """Write these values behind the others."""
        self._file.write(np.ascontiguousarray(values, dtype=self._dtype).data)
        self.count += len(values)

    def close(self) -> None:
        """Write down how many values there are."""
        self._file.seek(0)
        self._write_header()
        self._file.close()

    def _write_header(self) -> None:  # numpy leaves room for any number in the shape
        header = {"descr": np.lib.format.dtype_to_descr(self._dtype), "fortran_order": False, "shape": (self.count,)}
        np.lib.format.write_array_header_1_0(self._file, header)


class GrowingCodes:
    """Codes of tokens as `codes.bin`: a byte each, four bytes where labels name other tokens; no file without codes.

    What is never written reads as 0: the token itself is predicted.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file, self._dtype, self._tokens = path, None, np.dtype(np.uint8), 0

    @property
    def dtype(self) -> str:
        """The type of a code; empty where there are none."""
        return "" if self._file is None else self._dtype.str

    def append(self, codes: Array | None, tokens: int) -> None:
        """Write the codes of so many tokens behind the others."""
        if codes is not None:
            if codes.dtype.itemsize > self._dtype.itemsize:
                self._widen()
            self._file = self._file or self._path.open("wb")
            self._file.seek(self._tokens * self._dtype.itemsize)
            self._file.write(codes.astype(self._dtype).data)
        self._tokens += tokens

    def close(self) -> None:
        """Let the file have a code for every token."""
        if self._file is not None:
            self._file.truncate(self._tokens * self._dtype.itemsize)
            self._file.close()

    def _widen(self) -> None:
        narrow, self._dtype = self._path.with_suffix(".narrow"), np.dtype(np.int32)
        if self._file is None:
            return
        self._file.close()
        self._path.rename(narrow)
        self._file = self._path.open("wb")
        with narrow.open("rb") as old:
            while block := old.read(_BLOCK):
                self._file.write(np.frombuffer(block, np.uint8).astype(np.int32).data)
        narrow.unlink()


def mapped(path: Path) -> Array:
    """The values of a .npy file, of which only those that are asked for are read."""
    return np.asarray(np.load(path, mmap_mode="r"))
