"""The images of a folder of documents: their places among tokens, and the places of their bytes.

Each column of the table is an array in a file. Pixels are read in `longspan.corpus`.
"""

import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from longspan.data.array_files import GrowingArray, map_array
from longspan.files import Stamp, file_stamp

_COLUMNS = {
    "document": "<i8",
    **dict.fromkeys(("start", "stop", "rows", "time", "height", "width", "number"), "<i4"),
    **dict.fromkeys(("bytes", "modified_ns", "position"), "<i8"),
    **dict.fromkeys(("among", "frame"), "<i4"),
    "seconds": "<f8",
}
_PATHS = "image_paths.jsonl"
_ENDS = "image_paths.npy"
_ENDS_TYPE = "<i8"
# This stands between the paths of frames, which cannot contain it.
_BETWEEN = "\0"


class SampleImage(NamedTuple):
    """An image of a document: `rows` placeholders, the first at `start` and the last before `stop`.

    `grid` is that of its patches (0, 0, 0: it has none), `number` counts the images of its row from 0. Its bytes are in
    the file `path`, or in the row if that is empty. The conversation has `among` images, this one included. A group of
    frames of a video is one too: `number` counts videos, `frame` is the group's first (−1 for an image), `path` joins
    those of its frames (`join_paths`), and `seconds` is the time from one group to the next.
    """

    start: int
    stop: int
    rows: int
    grid: tuple[int, int, int]
    number: int
    path: str
    bytes: int
    modified_ns: int
    among: int = 1
    frame: int = -1
    seconds: float = 0.0


class PlacedImage(NamedTuple):
    """An image of document number `document`, whose row is at `position` of its file."""

    document: int
    image: SampleImage
    position: int


class ImageWriter:
    """Writes the files of a folder's images from their beginnings to their ends."""

    def __init__(self, folder: Path) -> None:
        self._columns = {name: GrowingArray(_column_file(folder, name), dtype) for name, dtype in _COLUMNS.items()}
        self._paths = (folder / _PATHS).open("wb")
        self._ends = GrowingArray(folder / _ENDS, _ENDS_TYPE)

    def append(self, images: Sequence[PlacedImage], documents: int) -> None:
        """Write the images of further documents, which have numbers from 0; the folder has `documents` earlier ones."""
        rows = list[tuple[float, ...]]()  # values in the order of _COLUMNS
        for document, image, position in images:
            place = (documents + document, image.start, image.stop, image.rows, *image.grid)
            row = (*place, image.number, image.bytes, image.modified_ns, position)
            rows.append((*row, image.among, image.frame, image.seconds))
        for number, column in enumerate(self._columns.values()):
            column.append(np.array([row[number] for row in rows]))
        for placed in images:
            self._paths.write(json.dumps(placed.image.path).encode() + b"\n")
            self._ends.append(np.array([self._paths.tell()]))

    @property
    def count(self) -> int:
        """How many images are written so far."""
        return self._ends.count

    def close(self) -> None:
        for column in (*self._columns.values(), self._ends):
            column.close()
        self._paths.close()


class ImageTable:
    """The images of a folder of documents, in the order of documents and of their places; the files are mapped."""

    def __init__(self, folder: Path) -> None:
        self._ends = map_array(folder / _ENDS, _ENDS_TYPE)
        self._columns: dict[str, npt.NDArray[Any]] = {
            name: map_array(_column_file(folder, name), dtype, len(self._ends)) for name, dtype in _COLUMNS.items()
        }
        # An empty file cannot be mapped.
        self._paths = np.memmap(folder / _PATHS, mode="r") if len(self._ends) else np.zeros(0, np.uint8)

    @classmethod
    def open_in_folder(cls, folder: Path) -> "ImageTable | None":
        """Return the table of the images of a folder of documents; None if it was built without images."""
        return cls(folder) if (folder / _ENDS).is_file() else None

    def __len__(self) -> int:
        return len(self._ends)

    def images_of_document(self, document: int) -> range:
        """Return the numbers of the images of a document, in the order of their places."""
        first, last = np.searchsorted(self._columns["document"], (document, document + 1)).tolist()
        return range(first, last)

    def __getitem__(self, number: int) -> PlacedImage:
        values: dict[str, Any] = {name: column[number].item() for name, column in self._columns.items()}
        document = values.pop("document")
        position = values.pop("position")
        grid = values.pop("time"), values.pop("height"), values.pop("width")
        return PlacedImage(document, SampleImage(grid=grid, path=self.path_of_image(number), **values), position)

    def path_of_image(self, number: int) -> str:
        """Return the path of an image, of frames joined (`join_paths`); "" if its bytes are in its row."""
        begin = int(self._ends[number - 1]) if number else 0
        return str(json.loads(self._paths[begin : int(self._ends[number])].tobytes()))

    def column(self, name: str) -> npt.NDArray[Any]:
        """Return a column of the table: a value for each image."""
        return self._columns[name]

    def describe_changes(self) -> Iterator[str]:
        """Yield a phrase for each file of an image that is gone or has changed; rows have the stamp of their file."""
        stamps = zip(self._columns["bytes"].tolist(), self._columns["modified_ns"].tolist(), strict=True)
        for number, stamp in enumerate(stamps):
            path = self.path_of_image(number)
            try:
                if path and join_stamps(map(file_stamp, split_paths(path))) != stamp:
                    yield f"image {display_paths(path)} has changed"
            except OSError as error:
                yield f"image {display_paths(path)} cannot be read ({error.strerror})"


def join_paths(paths: Sequence[str]) -> str:
    """Join the paths of frames to one text; empty if the bytes of a frame are in its row."""
    return _BETWEEN.join(paths) if all(paths) else ""


def split_paths(paths: str) -> list[str]:
    """Return the paths that `join_paths` joined."""
    return paths.split(_BETWEEN)


def display_paths(paths: str) -> str:
    """Write joined paths for messages."""
    return paths.replace(_BETWEEN, " or ")


def join_stamps(stamps: Iterable[Stamp]) -> Stamp:
    """Return one stamp for several files, which changes if one of theirs does."""
    sizes, times = zip(*stamps, strict=True)
    # The column is int64.
    return sum(sizes), sum(times) % (1 << 62)


def _column_file(folder: Path, column: str) -> Path:
    return folder / f"image_{column}.npy"
