"""Documents of a corpus with images, as a step takes them: token ids, and the places of images among them.

corpus = attach_images(Corpus(Path("runs/first/corpus")), configuration, Path("runs/first"))
corpus.select([3, 7]).items                     # every rank knows the places; read(i) has the pixels of one
"""

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, partial
from itertools import groupby
from pathlib import Path
from threading import Lock
from typing import Any, cast

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedConfig

from longspan.config.preference_losses import RowForm
from longspan.corpus.images.image_file import ImageFile
from longspan.corpus.images.processor import Processor, load_processor
from longspan.corpus.rows.formats import convert_format
from longspan.corpus.rows.kinds import Kind, rename_columns
from longspan.corpus.rows.media.row_media import RowMedia, extract_row_media
from longspan.corpus.rows.sample import BadRow, Row
from longspan.corpus.rows.values import RowError
from longspan.corpus.sources.row_files import make_row_file
from longspan.data.corpus_documents import Corpus, CorpusDocuments
from longspan.data.image_table import ImageTable, PlacedImage, display_paths, split_paths
from longspan.errors import DataError, ModelError, plural
from longspan.layout import Partition
from longspan.model.multimodal.image_modules import video_tokens
from longspan.model.vision.image_inputs import ImageInput, check_image_arguments_of_config
from longspan.model.vision.image_tokens import ImageTokens, image_tokens
from longspan.model.vision.videos import Video, VideoTokens
from longspan.plan.items.item_table import ItemTable, MediaItem

THREADS = 4
_MOST_AHEAD = 4096  # images that were read ahead and not used yet; the oldest are dropped


@dataclass(eq=False)
class ImageReader:
    """Reads images of a corpus: `reader(number)` returns an encoder's input, `read_ahead(numbers)` begins to read some.

    Raises DataError, naming file and row, for an image that is gone, broken, or changed since the corpus was built.
    """

    table: ImageTable
    processor: Processor
    corpus: Corpus
    images_read: int = 0
    # The key is an image's number.
    _ahead: OrderedDict[int, Future[ImageInput]] = field(default_factory=OrderedDict[int, Future[ImageInput]])
    _lock: Lock = field(default_factory=Lock)
    _pool: ThreadPoolExecutor | None = None

    def __call__(self, number: int) -> ImageInput:
        """Return the input of the image with this number in the table, read now unless it was read ahead."""
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

    def _read_input(self, number: int) -> ImageInput:
        placed = self.table[number]
        # These are PIL's: the image, or the frames of its group.
        pictures = list[Any]()
        for number_in_group, file in enumerate(self._image_files(placed)):
            try:
                pictures.append(file.load())
            except DataError as error:
                frame = f", frame {placed.image.frame + number_in_group + 1}" if placed.image.frame >= 0 else ""
                raise DataError(
                    f"{self._image_name(placed)}{frame}: {error}; restore the file, or start a run in a new folder "
                    "without its row"
                ) from error
        grid = placed.image.grid
        try:
            if placed.image.frame < 0:
                image = self.processor.process_image(pictures[0], placed.image.among)
            else:  # a group of frames, whose grid depends on all frames of the video
                image = ImageInput(self.processor.videos.group_patches(pictures, grid), grid)
        except DataError as error:
            raise DataError(f"{self._image_name(placed)}: {error}") from error
        self.images_read += 1
        if (image.grid or (0, 0, 0)) != grid:  # (0, 0, 0) is recorded for an image without a grid
            raise DataError(
                f"{self._image_name(placed)}: its patches are {image.grid} and were {grid} when the corpus was made; "
                "restore it, or start a run in a new folder"
            )
        return image

    def _image_files(self, placed: PlacedImage) -> list[ImageFile]:
        """Without a path the bytes are in the row, which is read again."""
        if placed.image.path:
            return [ImageFile(path) for path in split_paths(placed.image.path)]
        source = self.corpus.source_file(placed.document)
        row = make_row_file(source.name, Path(source.path)).read_row_at(placed.position)
        try:
            media = RowMedia() if isinstance(row, BadRow) else self._read_media(row, placed.document)
        except RowError as error:
            raise DataError(f"{self._image_name(placed)}: {error}") from error
        # A row that has changed may have fewer images: slices of these are empty, and the error below is raised.
        number = placed.image.number
        frame = placed.image.frame
        if frame < 0:  # no frame of a video
            files = list(media.images[number : number + 1])
        else:
            frames = [file for video in media.videos[number : number + 1] for file in video.frames]
            files = frames[frame : frame + self.processor.videos.frames_per_group]
        if not files:
            raise DataError(
                f"{self._image_name(placed)}: its row is another one than when the corpus was made; restore the file"
            )
        return files

    def _read_media(self, row: Row, document: int) -> RowMedia:
        manifest = self.corpus.manifest
        kind = cast(Kind, manifest.kinds[self.corpus.source_of[document]])
        values = convert_format(
            rename_columns(row, manifest.columns).values, kind, cast(RowForm, manifest.preference)
        )
        return extract_row_media(row._replace(values=values))[1]

    def _image_name(self, placed: PlacedImage) -> str:
        name = self.corpus.origin(placed.document)
        is_table = name.endswith((".parquet", ".arrow"))
        row = f"row {placed.position + 1}" if is_table else f"the line at byte {placed.position}"
        media = "image" if placed.image.frame < 0 else "video"
        path = f" ({display_paths(placed.image.path)})" if placed.image.path else ""
        return f"{media} {placed.image.number + 1} of {name}, {row}{path}"


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

    def spans(self, number: int) -> tuple[tuple[int, int], ...]:
        """Return the runs of placeholders of an image; more than one if tokens stand between its rows."""
        document, image, _ = self.table[number]
        if image.stop - image.start == image.rows:
            return ((image.start, image.stop),)
        ids = self.corpus.read(document, np.arange(image.start, image.stop))
        places = image.start + np.flatnonzero(ids == self.tokens.placeholder)
        # the runs of neighbouring places
        return tuple((int(start), int(stop)) for start, stop in Partition.from_rows([places]).runs(0).tolist())

    def positions(self, ids: npt.NDArray[np.int64], numbers: Sequence[int]) -> npt.NDArray[np.int64] | None:
        """Return the position ids (n, T) of a document's tokens (T,), which contain the images of these numbers.

        None: the ids are 0 to T − 1. Groups of frames are joined to their videos first.
        """
        placed = [self.table[number] for number in numbers]
        grids = np.array([p.image.grid for p in placed if p.image.frame < 0], dtype=np.int64)
        if self.videos is None:
            return self.tokens.positions(ids, grids)
        groups = (p for p in placed if p.image.frame >= 0)
        videos = list[Video]()
        for _, groups_of_video in groupby(groups, key=lambda p: (p.document, p.image.number)):
            first, *others = (p.image for p in groups_of_video)
            # the grid of a group counts one patch of time, so the grid of a video counts its groups
            videos.append(Video((1 + len(others), *first.grid[1:]), first.seconds))
        return self.videos.positions(ids, grids, videos)


@dataclass(frozen=True)
class ImageDocuments(CorpusDocuments):
    """Some documents of a corpus, in the order of a plan's lengths, with their images, which a step sees as `items`."""

    images: ShownImages | None = None

    @cached_property
    def image_numbers(self) -> tuple[int, ...]:
        """The numbers of the images in the corpus's table, in the order of `items`: by document, then by position."""
        return tuple(number for numbers in self._numbers_by_document for number in numbers)

    @cached_property
    def items(self) -> tuple[MediaItem, ...]:
        """The images, each with the spans of placeholders that its encoded rows take."""
        images = self.images
        if images is None:
            return ()
        numbers_by_document = enumerate(self._numbers_by_document)
        return tuple(MediaItem(d, images.spans(number)) for d, numbers in numbers_by_document for number in numbers)

    @cached_property
    def item_table(self) -> ItemTable:
        """The items by document and position, checked."""
        return ItemTable(self.lengths, self.items)

    def positions(self, document: int) -> npt.NDArray[np.int64] | None:
        """Return the position ids (n, T) of a document, n for each token; None: they are 0 to T − 1."""
        numbers = self._numbers_by_document[document]
        if self.images is None or not numbers:
            return None
        tokens = self[document]
        return self.images.positions(tokens[np.arange(len(tokens))], numbers)

    def read(self, item: int) -> ImageInput:
        """Read the encoder's input for an item."""
        assert self.images is not None
        return self.images.reader(self.image_numbers[item])

    def read_ahead(self, items: Sequence[int]) -> None:
        """Begin to read these items in threads."""
        if self.images is not None:
            self.images.reader.read_ahead(self.image_numbers[item] for item in items)

    @cached_property
    def _numbers_by_document(self) -> tuple[range, ...]:
        return tuple(range(0) if self.images is None else self.images.table.images_of_document(d) for d in self.ids)


def attach_images(corpus: Corpus, model: PreTrainedConfig, folder: Path) -> Corpus:
    """Have a corpus select ImageDocuments if the model takes images, and return it.

    The processor of the model is in `folder`. Raises DataError if there are images and the model takes none, or makes
    another number of rows of one than it has placeholders.
    """
    images = corpus.images if corpus.images is not None and len(corpus.images) else None
    takes_images = getattr(model, "vision_config", None) is not None
    if images is not None and not takes_images:
        raise DataError(
            f"{plural(len(images), 'image')} stand in the documents, and {type(model).__name__} is of a model that "
            "takes none; train one that does, or leave them out of the rows"
        )
    shown_images = None
    if images is not None:
        processor = load_processor(folder.absolute())
        tokens = image_tokens(model)
        _check_placeholders(corpus, images, tokens, processor)
        check_image_arguments_of_config(model, processor.input_names)
        has_videos = (images.column("frame") >= 0).any()  # −1 for an image that is no frame
        videos = _checked_video_tokens(model, processor) if has_videos else None
        reader = ImageReader(images, processor, corpus)
        shown_images = ShownImages(corpus, images, reader, tokens, videos)
    if takes_images:  # also for a corpus without images: a step of this model asks for items, which are then none
        corpus.selects = partial(ImageDocuments, images=shown_images)
    return corpus


def _checked_video_tokens(model: PreTrainedConfig, processor: Processor) -> VideoTokens:
    try:
        videos = video_tokens(model)
    except ModelError as error:
        raise DataError(f"the documents have videos: {error}") from error
    video_processor = processor.videos
    vision = getattr(model, "vision_config", None)
    group = getattr(vision, "temporal_patch_size", video_processor.frames_per_group)
    if (video_processor.placeholder, video_processor.frames_per_group) != (videos.placeholder, group):
        raise DataError(
            f"{video_processor.kind} puts token id {video_processor.placeholder} where videos stand, for groups of "
            f"{video_processor.frames_per_group} frames, and "
            f"the model takes id {videos.placeholder} (video_token_id) for groups of {group} (temporal_patch_size); "
            "use the processor and the tokenizer of the model's own folder"
        )
    return videos


def _check_placeholders(corpus: Corpus, table: ImageTable, tokens: ImageTokens, processor: Processor) -> None:
    if processor.placeholder != tokens.placeholder:
        raise DataError(
            f"{processor.name} puts token id {processor.placeholder} where images stand, and the model takes id "
            f"{tokens.placeholder} (image_token_id) for them; use the processor and the tokenizer of the model's own "
            "folder"
        )
    if not tokens.has_grids and (tokens.unknown or not processor.has_fixed_placeholders):
        return  # how many rows the encoder makes is known only once it runs, and compared with placeholders then
    grids = np.stack([table.column(name) for name in ("time", "height", "width")], axis=1)
    unique_grids, grid_of_image = np.unique(grids, axis=0, return_inverse=True)
    # (0, 0, 0): an image without a grid.
    rows_of_grid = [tokens.rows(tuple(grid) if any(grid) else None) for grid in unique_grids.tolist()]
    # Each image has one number of rows.
    model_rows = np.array(rows_of_grid, dtype=np.int64)[grid_of_image.reshape(-1)]
    wrong = np.flatnonzero(model_rows != table.column("rows"))
    if len(wrong):
        first = table[int(wrong[0])]
        raise DataError(
            f"document {first.document} ({corpus.origin(first.document)}) has "
            f"{plural(first.image.rows, 'placeholder')} for its image of patches {first.image.grid}, of which the "
            f"model makes {model_rows[wrong[0]]} rows; {processor.name} and the model must agree: "
            "use the model folder's own processor, with image sizes and merges of the configuration"
        )
