"""The images of a corpus for a model: their pixels, places and positions.

Pixels are read by the rank that encodes them; those of the next step are read ahead in threads. What a step calls is in
`image_documents.py`.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
import numpy.typing as npt

from longspan.corpus.images.image_file import ImageFile
from longspan.corpus.images.processor import Processor
from longspan.corpus.row_files import row_file
from longspan.corpus.rows.formats import rename_columns
from longspan.corpus.rows.named_media import read_row_media
from longspan.corpus.rows.row_media import RowMedia
from longspan.corpus.rows.sample import BadRow, RowError
from longspan.data.documents import Corpus
from longspan.data.images import ImageTable, PlacedImage, display_paths, split_paths
from longspan.errors import DataError
from longspan.layout import Partition
from longspan.model.vision.image_tokens import ImageInput, ImageTokens, Video, VideoTokens

THREADS = 4
_MOST_AHEAD = 4096  # images that were read ahead and not used yet; the oldest are dropped


class ImageReader:
    """Reads images of a corpus: `reader(number)` returns an encoder's input, `read_ahead(numbers)` begins to read some.

    Raises DataError, naming file and row, for an image that is gone, broken, or changed since the corpus was built.
    `images_read` counts those that were read here.
    """

    def __init__(self, table: ImageTable, processor: Processor, corpus: Corpus) -> None:
        self._table, self._processor, self._corpus = table, processor, corpus
        self._ahead, self._lock = OrderedDict[int, Future[ImageInput]](), Lock()  # by the images' numbers
        self._pool: ThreadPoolExecutor | None = None
        self.images_read = 0

    def __call__(self, number: int) -> ImageInput:
        """Return the encoder's input for an image; one that is being read ahead is waited for."""
        with self._lock:
            future = self._ahead.pop(number, None)
        return self._read_input(number) if future is None else future.result()

    def read_ahead(self, numbers: Iterable[int]) -> None:
        """Begin to read these images in threads; errors are raised when an image is used."""
        self._pool = self._pool or ThreadPoolExecutor(THREADS, "longspan-images")
        with self._lock:
            for number in numbers:
                if number not in self._ahead:
                    self._ahead[number] = self._pool.submit(self._read_input, number)
            while len(self._ahead) > _MOST_AHEAD:
                self._ahead.popitem(last=False)[1].cancel()

    def picture(self, number: int) -> Any:
        """Return the upright image in three channels (PIL); of a group of frames the first."""
        placed = self._table[number]
        return self._load_pictures(placed, self._find_bytes(placed)[:1])[0]

    def _read_input(self, number: int) -> ImageInput:
        """Read an image and process it. Raises DataError if its grid is not that of the corpus."""
        placed = self._table[number]
        pictures = self._load_pictures(placed, self._find_bytes(placed))
        try:
            image = self._process_pictures(placed, pictures)
        except DataError as error:
            raise DataError(f"{self._image_name(placed)}: {error}") from error
        self.images_read += 1
        if (image.grid or (0, 0, 0)) != placed.image.grid:  # (0, 0, 0) is recorded for an image without a grid
            raise DataError(
                f"{self._image_name(placed)}: its patches are {image.grid} and were {placed.image.grid} when the "
                "corpus was made; restore it, or start a run in a new folder"
            )
        return image

    def _process_pictures(self, placed: PlacedImage, pictures: Sequence[Any]) -> ImageInput:
        """The grid of a group is the recorded one, as it depends on all frames of the video."""
        if placed.image.frame < 0:
            return self._processor.image(pictures[0], placed.image.among)
        return ImageInput(self._processor.videos.pixels(pictures, placed.image.grid), placed.image.grid)

    def _load_pictures(self, placed: PlacedImage, files: Sequence[ImageFile]) -> list[Any]:
        pictures = list[Any]()
        for number, file in enumerate(files):
            try:
                pictures.append(file.load())
            except DataError as error:
                frame = f", frame {placed.image.frame + number + 1}" if placed.image.frame >= 0 else ""
                raise DataError(
                    f"{self._image_name(placed)}{frame}: {error}; restore the file, or start a run in a new folder "
                    "without its row"
                ) from error
        return pictures

    def _find_bytes(self, placed: PlacedImage) -> list[ImageFile]:
        """Find the bytes of an image or of a group of frames: in files, or in its row, which is read again."""
        if placed.image.path:
            return [ImageFile(path) for path in split_paths(placed.image.path)]
        source = self._corpus.sources[self._corpus.file_of(placed.document)]
        row = row_file(source.name, Path(source.path)).row_at(placed.position)
        try:
            columns = self._corpus.manifest.columns
            media = RowMedia() if isinstance(row, BadRow) else read_row_media(rename_columns(row, columns))
        except RowError as error:
            raise DataError(f"{self._image_name(placed)}: {error}") from error
        # Slices, as a row that has changed may have fewer images: without files the error below is raised.
        number, frame = placed.image.number, placed.image.frame
        if frame < 0:  # no frame of a video
            files = list(media.images[number : number + 1])
        else:
            frames = [file for video in media.videos[number : number + 1] for file in video.frames]
            files = frames[frame : frame + self._processor.videos.group]
        if not files:
            raise DataError(
                f"{self._image_name(placed)}: its row is another one than when the corpus was made; restore the file"
            )
        return files

    def _image_name(self, placed: PlacedImage) -> str:
        name = self._corpus.sources[self._corpus.file_of(placed.document)].name
        kind = "row" if name.endswith((".parquet", ".arrow")) else "the line at byte"
        number = placed.position + 1 if kind == "row" else placed.position
        media = "image" if placed.image.frame < 0 else "video"
        path = f" ({display_paths(placed.image.path)})" if placed.image.path else ""
        return f"{media} {placed.image.number + 1} of {name}, {kind} {number}{path}"


@dataclass(frozen=True)
class ShownImages:
    """The images of a corpus with their reader, and the model's token ids and positions for them.

    Groups of frames of videos are images too; `videos` has ids and positions for them (None without videos).
    """

    corpus: Corpus
    table: ImageTable
    reader: ImageReader
    tokens: ImageTokens
    videos: VideoTokens | None = None

    def spans(self, number: int, shift: int = 0) -> tuple[tuple[int, int], ...]:
        """Return the runs of placeholders of an image, moved by `shift` from their places in its document.

        There is one run, unless the processor puts other tokens between rows.
        """
        document, image, _ = self.table[number]
        if image.stop - image.start == image.rows:
            return ((image.start + shift, image.stop + shift),)
        ids = self.corpus.read(document, np.arange(image.start, image.stop))
        places = image.start + shift + np.flatnonzero(ids == self.tokens.placeholder)
        return tuple((int(a), int(b)) for a, b in Partition.from_rows([places]).runs(0).tolist())

    def positions(self, ids: npt.NDArray[np.int64], numbers: Sequence[int]) -> npt.NDArray[np.int64] | None:
        """Return the position ids (n, T) of a document's tokens (T,), which contain the images of these numbers.

        n ids for each token (time, height and width, say); None: the ids are 0 to T − 1. Groups of frames go to
        `videos`, which joins them.
        """
        placed = [self.table[number] for number in numbers]
        grids = np.array([p.image.grid for p in placed if p.image.frame < 0], dtype=np.int64)
        if self.videos is None:
            return self.tokens.positions(ids, grids)
        return self.videos.positions(ids, grids, list(_join_frame_groups(p for p in placed if p.image.frame >= 0)))


def _join_frame_groups(groups: Iterable[PlacedImage]) -> Iterator[Video]:
    """The grid of a group counts one patch of time, so the grid of a video counts its groups."""
    for _, groups_of_video in groupby(groups, key=lambda placed: (placed.document, placed.image.number)):
        first_group, *further_groups = (placed.image for placed in groups_of_video)
        yield Video((1 + len(further_groups), *first_group.grid[1:]), first_group.seconds)
