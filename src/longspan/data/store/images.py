"""Where images stand in documents, and where their bytes are: arrays in files beside those of documents."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from longspan.corpus.images.video_file import files_of_paths, joined_stamp, shown_paths
from longspan.corpus.rows.sample import SampleImage
from longspan.data.store.arrays import GrowingArray, mapped

_COLUMNS = {
    "document": "<i8",
    "start": "<i4",
    "stop": "<i4",
    "rows": "<i4",
    "time": "<i4",
    "height": "<i4",
    "width": "<i4",
    "number": "<i4",
    "bytes": "<i8",
    "modified_ns": "<i8",
    "position": "<i8",
    "among": "<i4",
    "frame": "<i4",
    "seconds": "<f8",
}
_OF_IMAGES = {"among": 1, "frame": -1, "seconds": 0}  # of tables that were made before there were these
_PATHS, _ENDS = "image_paths.jsonl", "image_paths.npy"


class PlacedImage(NamedTuple):
    """An image of document number `document`, whose row stands at `position` of its file."""

    document: int
    image: SampleImage
    position: int


class ImageWriter:
    """The files of a folder's images, which are written from their beginnings to their ends."""

    def __init__(self, folder: Path) -> None:
        self._columns = {name: GrowingArray(_file(folder, name), dtype) for name, dtype in _COLUMNS.items()}
        self._paths, self._ends = (folder / _PATHS).open("wb"), GrowingArray(folder / _ENDS, "<i8")

    def append(self, images: Sequence[PlacedImage], documents: int) -> None:
        """Write the images of further documents, of which so many are there already."""
        rows = [_row(placed, documents) for placed in images]
        for number, column in enumerate(self._columns.values()):
            column.append(np.array([row[number] for row in rows]))
        for placed in images:
            self._paths.write(json.dumps(placed.image.path).encode() + b"\n")
            self._ends.append(np.array([self._paths.tell()]))

    @property
    def count(self) -> int:
        """How many images there are."""
        return self._ends.count

    def close(self) -> None:
        """Let the files be whole."""
        for column in (*self._columns.values(), self._ends):
            column.close()
        self._paths.close()


class ImageTable:
    """The images of a folder of documents, in the order of documents and of their places; files that are mapped."""

    def __init__(self, folder: Path) -> None:
        self._ends = mapped(folder / _ENDS)
        there = [name for name in _COLUMNS if name not in _OF_IMAGES or _file(folder, name).is_file()]
        self._columns: dict[str, npt.NDArray[Any]] = {name: mapped(_file(folder, name)) for name in there}
        self._columns |= {name: np.full(len(self), v) for name, v in _OF_IMAGES.items() if name not in there}
        self._paths = np.memmap(folder / _PATHS, mode="r") if len(self._ends) else np.zeros(0, np.uint8)

    @classmethod
    def of(cls, folder: Path) -> "ImageTable | None":
        """The images of a folder; None where it was made without."""
        return cls(folder) if (folder / _ENDS).is_file() else None

    def __len__(self) -> int:
        return len(self._ends)

    def of_document(self, document: int) -> range:
        """The numbers of a document's images."""
        first, last = np.searchsorted(self._columns["document"], (document, document + 1)).tolist()
        return range(first, last)

    def __getitem__(self, number: int) -> PlacedImage:
        at: dict[str, Any] = {name: column[number].item() for name, column in self._columns.items()}
        image = SampleImage(
            at["start"],
            at["stop"],
            at["rows"],
            (at["time"], at["height"], at["width"]),
            at["number"],
            self.path(number),
            at["bytes"],
            at["modified_ns"],
            at["among"],
            at["frame"],
            at["seconds"],
        )
        return PlacedImage(at["document"], image, at["position"])

    def path(self, number: int) -> str:
        """The file of an image, or those of a group of frames; empty where bytes are in a row."""
        begin = int(self._ends[number - 1]) if number else 0
        return str(json.loads(self._paths[begin : int(self._ends[number])].tobytes()))

    def column(self, name: str) -> npt.NDArray[Any]:
        """The values of all images: rows, or one side of a grid, say."""
        return self._columns[name]

    def changed(self) -> Iterator[str]:
        """The files of images that are gone, or other than they were, each with what is wrong."""
        stamps = zip(self._columns["bytes"].tolist(), self._columns["modified_ns"].tolist(), strict=True)
        for number, stamp in enumerate(stamps):
            path = self.path(number)
            try:
                if path and joined_stamp(files_of_paths(path)) != stamp:
                    yield f"image {shown_paths(path)} has changed"
            except OSError as error:
                yield f"image {shown_paths(path)} cannot be read ({error.strerror})"


def _file(folder: Path, column: str) -> Path:
    return folder / f"image_{column}.npy"


def _row(placed: PlacedImage, documents: int) -> tuple[float, ...]:
    image = placed.image
    place = (documents + placed.document, image.start, image.stop, image.rows, *image.grid)
    row = (*place, image.number, image.bytes, image.modified_ns, placed.position)
    return (*row, image.among, image.frame, image.seconds)
