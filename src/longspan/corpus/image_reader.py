"""Pixels of a corpus's images, read by the rank that encodes them; those of a coming step in threads, ahead of it."""

from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from longspan.corpus.rows.named_media import media_of_row
from longspan.corpus.rows.row_media import RowMedia
from longspan.corpus.rows.sample import BadRow, RowError
from longspan.data.documents import Corpus
from longspan.data.images import ImageTable, PlacedImage, display_paths, split_paths
from longspan.data.manifest import SourceFile
from longspan.errors import DataError
from longspan.layout import Partition
from longspan.model.vision.image_tokens import ImageInput, ImageTokens
from longspan.model.vision.video_tokens import Video, VideoTokens

THREADS = 4
_MOST = 4096  # images that are read ahead and not yet asked for; the oldest are dropped


class ImageReader:
    """Reads images of a corpus: `reader(number)` gives what an encoder takes, `ahead(numbers)` begins to read some.

    `file_of` says in which of the `sources` a document's row stands. Raises DataError, naming file and row, for an
    image that is gone, broken, or other than when the corpus was made. `read` counts the images that were read here.
    """

    def __init__(
        self, table: ImageTable, processor: Processor, sources: Sequence[SourceFile], file_of: Callable[[int], int]
    ) -> None:
        self._table, self._processor, self._sources, self._file_of = table, processor, sources, file_of
        self._ahead, self._lock = OrderedDict[int, Future[ImageInput]](), Lock()
        self._pool: ThreadPoolExecutor | None = None
        self.read = 0

    def __call__(self, number: int) -> ImageInput:
        """What the encoder is given for an image."""
        with self._lock:
            begun = self._ahead.pop(number, None)
        return self._input(number) if begun is None else begun.result()

    def ahead(self, numbers: Iterable[int]) -> None:
        """Begin to read these images, in threads; errors are raised when they are asked for."""
        self._pool = self._pool or ThreadPoolExecutor(THREADS, "longspan-images")
        with self._lock:
            for number in numbers:
                if number not in self._ahead:
                    self._ahead[number] = self._pool.submit(self._input, number)
            while len(self._ahead) > _MOST:
                self._ahead.popitem(last=False)[1].cancel()

    def picture(self, number: int) -> Any:
        """The upright image in three channels (PIL); of a group of frames the first."""
        placed = self._table[number]
        return self._loaded(placed, self._files(placed)[:1])[0]

    def _input(self, number: int) -> ImageInput:
        placed = self._table[number]
        pictures = self._loaded(placed, self._files(placed))
        try:
            image = self._made(placed, pictures)
        except DataError as error:
            raise DataError(f"{self._where(placed)}: {error}") from error
        self.read += 1
        if (image.grid or (0, 0, 0)) != placed.image.grid:
            raise DataError(
                f"{self._where(placed)}: its patches are {image.grid} and were {placed.image.grid} when the corpus was "
                "made; restore it, or start a run in a new folder"
            )
        return image

    def _made(self, placed: PlacedImage, pictures: Sequence[Any]) -> ImageInput:
        """What the encoder takes; the grid of a group of frames was decided by all frames of its video."""
        if placed.image.frame < 0:
            return self._processor.image(pictures[0], placed.image.among)
        return ImageInput(self._processor.videos.pixels(pictures, placed.image.grid), placed.image.grid)

    def _loaded(self, placed: PlacedImage, files: Sequence[ImageFile]) -> list[Any]:
        pictures = list[Any]()
        for number, file in enumerate(files):
            try:
                pictures.append(file.load())
            except DataError as error:
                frame = f", frame {placed.image.frame + number + 1}" if placed.image.frame >= 0 else ""
                raise DataError(
                    f'{self._where(placed)}{frame}: {error} (a run in a new folder with data.check_images = "pixels" '
                    'finds such images before its first step, and with data.on_bad = "skip" leaves their rows out)'
                ) from error
        return pictures

    def _files(self, placed: PlacedImage) -> list[ImageFile]:
        """Where the bytes of an image, or of a group of frames, are: files, or its row, which is read again."""
        if placed.image.path:
            return [ImageFile(path) for path in split_paths(placed.image.path)]
        source = self._sources[self._file_of(placed.document)]
        row = row_file(source.name, Path(source.path)).row_at(placed.position)
        try:
            media = RowMedia() if isinstance(row, BadRow) else media_of_row(row)
        except RowError as error:
            raise DataError(f"{self._where(placed)}: {error}") from error
        number, frame = placed.image.number, placed.image.frame
        if frame < 0:
            files = list(media.images[number : number + 1])
        else:
            frames = [file for video in media.videos[number : number + 1] for file in video.frames]
            files = frames[frame : frame + self._processor.videos.group]
        if not files:
            raise DataError(
                f"{self._where(placed)}: its row is another one than when the corpus was made; restore the file"
            )
        return files

    def _where(self, placed: PlacedImage) -> str:
        name = self._sources[self._file_of(placed.document)].name
        kind = "row" if name.endswith((".parquet", ".arrow")) else "the line at byte"
        number = placed.position + 1 if kind == "row" else placed.position
        what = "image" if placed.image.frame < 0 else "video"
        path = f" ({display_paths(placed.image.path)})" if placed.image.path else ""
        return f"{what} {placed.image.number + 1} of {name}, {kind} {number}{path}"


@dataclass(frozen=True)
class ShownImages:
    """The images of a corpus, what reads them, and what the model's ids and positions say of them.

    Groups of frames of videos are images too; `videos` says what ids and positions say of them, None where none are.
    """

    corpus: Corpus
    table: ImageTable
    reader: ImageReader
    tokens: ImageTokens
    videos: VideoTokens | None = None

    def spans(self, number: int, shift: int = 0) -> tuple[tuple[int, int], ...]:
        """The runs of placeholders of an image, so much further on than in its document.

        They are one, but where its processor puts other tokens between rows.
        """
        document, image, _ = self.table[number]
        if image.stop - image.start == image.rows:
            return ((image.start + shift, image.stop + shift),)
        ids = self.corpus.read(document, np.arange(image.start, image.stop))
        places = image.start + shift + np.flatnonzero(ids == self.tokens.placeholder)
        return tuple((int(a), int(b)) for a, b in Partition.from_rows([places]).runs(0).tolist())

    def positions(self, ids: npt.NDArray[np.int64], numbers: Sequence[int]) -> npt.NDArray[np.int64] | None:
        """The positions (n, T) of these tokens (T,), in which these images stand; None where they are plain."""
        placed = [self.table[number] for number in numbers]
        grids = np.array([p.image.grid for p in placed if p.image.frame < 0], dtype=np.int64)
        if self.videos is None:
            return self.tokens.positions(ids, grids)
        return self.videos.positions(ids, grids, list(_videos(p for p in placed if p.image.frame >= 0)))


def _videos(groups: Iterable[PlacedImage]) -> Iterator[Video]:
    """The videos that groups of frames make, in order; of one that is cut what is there."""
    for _, several in groupby(groups, key=lambda placed: (placed.document, placed.image.number)):
        first, *others = (placed.image for placed in several)
        yield Video((1 + len(others), *first.grid[1:]), first.seconds)
