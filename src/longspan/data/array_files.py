"""The arrays of a corpus in files: written as they grow, then mapped, and pickled as the place of their file.

Labels are written as codes: one small number for each token.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt

from longspan.errors import DataError
from longspan.layout import Integers
from longspan.layout.partition import NO_TARGET

# Types of a corpus's files, as a build writes them; no other that a file names is mapped, as one may be of pointers.
TOKEN_TYPES = ("<u2", "<u4")
CODE_TYPES = ("|u1", "<i4")
# These .npy files have a value for each document; `labels.npy` may have several.
COLUMN_TYPES = {
    **dict.fromkeys(("lengths", "origins", "targets", "texts"), "<i4"),
    **dict.fromkeys(("offsets", "hashes"), "<i8"),
    "source_of": "<i2",
    "labels": "<f8",
}
_BLOCK = 1 << 20
Array = npt.NDArray[Any]


class FileArray(NamedTuple):
    """The place of an array in a file that is mapped into memory."""

    path: str
    dtype: np.dtype[Any]
    offset: int
    shape: tuple[int, ...]


def pickle_form(array: npt.NDArray[Any]) -> FileArray | npt.NDArray[Any]:
    """Return what to pickle of an array of integers ≥ 0: the place of its file if it maps a whole file, else its values
    in the smallest type that holds them all.

    >>> pickle_form(np.array([5, 300]))  # of a whole file that is mapped, nothing is copied
    array([  5, 300], dtype=uint16)
    """
    file = array if isinstance(array, np.memmap) else array.base  # np.asarray of a memmap has that as its base
    if isinstance(file, np.memmap) and file.filename is not None:
        is_base_mapped = not isinstance(file.base, np.ndarray)  # else it is a slice of a memmap
        has_same_layout = (array.dtype, array.shape, array.strides) == (file.dtype, file.shape, file.strides)
        if is_base_mapped and has_same_layout and array.ctypes.data == file.ctypes.data:
            return FileArray(str(Path(file.filename).absolute()), array.dtype, file.offset, array.shape)
    return array.astype(np.min_scalar_type(int(array.max(initial=0))))


def restored_array(pickled: FileArray | npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return the array of a `pickle_form`; a file is mapped again."""
    if not isinstance(pickled, FileArray):
        return pickled
    path, dtype, offset, shape = pickled
    return np.asarray(np.memmap(path, dtype=dtype, mode="r", offset=offset, shape=shape))


class GrowingArray:
    """A .npy file of one dimension, written from its beginning to its end. It is complete once it is closed."""

    def __init__(self, path: Path, dtype: str) -> None:
        self._dtype = np.dtype(dtype)
        self.count: int = 0
        self._file: BinaryIO = path.open("wb")
        self._write_header()

    def append(self, values: Array) -> None:
        """Write values behind those that are there, in the type of the file."""
        self._file.write(np.ascontiguousarray(values, dtype=self._dtype).data)
        self.count += len(values)

    def close(self) -> None:
        """Write the number of values into the header, and close the file."""
        self._file.seek(0)
        self._write_header()
        self._file.close()

    def _write_header(self) -> None:
        """numpy leaves room in the header for any number."""
        header = {
            "descr": np.lib.format.dtype_to_descr(self._dtype),
            "fortran_order": False,
            "shape": (self.count,),
        }
        np.lib.format.write_array_header_1_0(self._file, header)


OWN_TOKEN = 0  # a code of a label: the token's own id is predicted
NOTHING = 1
OTHER_TOKEN = 2  # the smallest code of another id, which is the code − 2


def encode_labels(ids: Integers, labels: Integers) -> Integers:
    """Return codes (n,) of tokens by their labels: 0 where it is the token's own id, 1 for none, else the label + 2."""
    codes = np.where(labels == NO_TARGET, NOTHING, labels + OTHER_TOKEN)
    return np.where(labels == ids, OWN_TOKEN, codes)


def decode_labels(ids: Integers, codes: npt.NDArray[Any]) -> Integers:
    """Return the labels (n,) of tokens with these ids and codes: −100 for none."""
    codes = codes.astype(np.int64)
    return np.where(codes == OWN_TOKEN, ids, np.where(codes == NOTHING, NO_TARGET, codes - OTHER_TOKEN))


class GrowingCodes:
    """The file `codes.bin`: a byte for each token, four bytes if labels name other tokens.

    Codes that are never written read as 0: the token itself is predicted.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file = path.open("wb")
        self._dtype = np.dtype(np.uint8)

    @property
    def dtype(self) -> str:
        return self._dtype.str

    def write(self, codes: Array, first: int) -> None:
        """Write the codes, uint8 or int32, of the tokens from number `first` on."""
        # The codes that are there are written again, in four bytes.
        if codes.dtype.itemsize > self._dtype.itemsize:
            narrow = self._path.with_suffix(".narrow")
            self._dtype = np.dtype(np.int32)
            self._file.close()
            self._path.rename(narrow)
            self._file = self._path.open("wb")
            with narrow.open("rb") as narrow_file:
                while block := narrow_file.read(_BLOCK):
                    self._file.write(np.frombuffer(block, np.uint8).astype(np.int32).data)
            narrow.unlink()
        self._file.seek(first * self._dtype.itemsize)
        self._file.write(codes.astype(self._dtype).data)

    def close(self, tokens: int) -> None:
        """Extend the file to a code for each of so many tokens, with zeros, and close it."""
        self._file.truncate(tokens * self._dtype.itemsize)
        self._file.close()


def map_array(path: Path, dtype: str, count: int | None = None) -> Array:
    """Map the values of a .npy file; only those that are used are read.

    Raises DataError where it is damaged, of another type than `dtype`, or has not `count` values (None: any number).
    """
    try:
        array = np.asarray(np.load(path, mmap_mode="r"))
        if array.ndim != 1 or array.dtype != np.dtype(dtype):
            raise ValueError(f"it holds {array.dtype} of {array.ndim} dims, and not a list of {np.dtype(dtype)}")
        if count is not None and len(array) != count:
            raise ValueError(f"it has {len(array)} values, and corpus.json wants {count}")
    except OSError:  # the file cannot be read, which does not make it damaged
        raise
    except Exception as error:  # numpy reads the header as Python, whose errors are of many kinds
        raise DataError(f"{path} is damaged: {error}; remove its folder, and it is built again") from error
    return array


def map_token_values(path: Path, dtype: object, types: Sequence[str], count: int) -> Array:
    """Map a file with a value for each of `count` tokens. `dtype` is what corpus.json says of it, one of these types.

    Raises DataError for another type, and where the file has not so many values.
    """
    remedy = "remove the folder and it is built again"
    if dtype not in types:
        raise DataError(
            f"{path.parent} is damaged: {path.name} is of type {dtype!r} by corpus.json, and a build writes "
            f"{' or '.join(types)}; {remedy}"
        )
    array = np.memmap(path, dtype=str(dtype), mode="r")
    if len(array) != count:
        raise DataError(
            f"{path.parent} is damaged: {path.name} has {len(array)} tokens, corpus.json wants {count}; {remedy}"
        )
    return array
