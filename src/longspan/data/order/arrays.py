"""Arrays of a corpus on their way to another process: those of a file travel as its name."""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt


class FileArray(NamedTuple):
    """Where an array lies in a file that is mapped into memory."""

    path: str
    dtype: np.dtype[Any]
    offset: int
    shape: tuple[int, ...]


def as_sent(array: npt.NDArray[Any]) -> FileArray | npt.NDArray[Any]:
    """What is pickled of an array: its place, if it is a whole file's, else its values at the smallest integer type.

    >>> received(as_sent(np.load("lengths.npy", mmap_mode="r")))       # nothing is copied
    """
    mapped = array if isinstance(array, np.memmap) else array.base
    if isinstance(mapped, np.memmap) and mapped.filename is not None and _same(array, mapped):
        return FileArray(str(Path(mapped.filename).absolute()), array.dtype, mapped.offset, array.shape)
    return array.astype(np.min_scalar_type(int(array.max(initial=0))))


def received(sent: FileArray | npt.NDArray[Any]) -> npt.NDArray[Any]:
    """The array that was sent, mapped where a file has it."""
    if not isinstance(sent, FileArray):
        return sent
    return np.asarray(np.memmap(sent.path, dtype=sent.dtype, mode="r", offset=sent.offset, shape=sent.shape))


def _same(array: npt.NDArray[Any], mapped: "np.memmap[Any, Any]") -> bool:
    """Whether an array is all of a mapped file, which a slice of one is not."""
    whole = mapped.base is None or not isinstance(mapped.base, np.ndarray)
    layout = (array.dtype, array.shape, array.strides) == (mapped.dtype, mapped.shape, mapped.strides)
    return whole and layout and array.ctypes.data == mapped.ctypes.data
