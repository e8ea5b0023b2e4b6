"""Documents of a corpus with images, as a step takes them: token ids, and the places of images among them.

    corpus = Corpus(Path("runs/first/corpus"))
    show_images(corpus, configuration, Path("runs/first"))
    corpus.select([3, 7]).items                     # every rank knows the places; read(i) has the pixels of one

They correspond to `longspan.bridge.ItemDocuments` in memory. Documents of a corpus without images have no items. Pixels
are read in `image_reader.py`.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedConfig

from longspan.corpus.image_reader import ImageReader, ShownImages
from longspan.corpus.images.processor import Processor, load_processor
from longspan.data.document import Pack
from longspan.data.documents import Corpus, CorpusDocuments
from longspan.data.images import ImageTable
from longspan.errors import DataError, ModelError, plural
from longspan.model.exactness.image_trial import video_tokens
from longspan.model.vision.image_arguments import check_images
from longspan.model.vision.image_tokens import ImageInput, ImageTokens, VideoTokens, image_tokens
from longspan.plan.items import Item, ItemTable

if TYPE_CHECKING:
    from PIL.Image import Image


class ImagePlace(NamedTuple):
    """Image number `number` of the corpus, in document number `document` of a step.

    `shift` is added to the image's place in the corpus's document to give its place in the step's document: a pack has
    pieces of several documents, one after another.
    """

    document: int
    number: int
    shift: int = 0


class ReadsImages(ABC):
    """Documents with images, which a step sees as `items`; `numbers` are the corpus's numbers of the items."""

    images: ShownImages | None

    @abstractmethod
    def find_images(self, images: ShownImages) -> Iterator[ImagePlace]:
        """Find the images in these documents, by document and then by position."""

    @property
    @abstractmethod
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document."""

    @abstractmethod
    def __getitem__(self, index: int) -> Any:
        """Return one of the documents."""

    @cached_property
    def places(self) -> tuple[ImagePlace, ...]:
        """The places of the images."""
        return () if self.images is None else tuple(self.find_images(self.images))

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The corpus's numbers of the images, in the order of `items`."""
        return tuple(place.number for place in self.places)

    @cached_property
    def items(self) -> tuple[Item, ...]:
        """The images, each with the spans of placeholders that its encoded rows take."""
        images = self.images
        return () if images is None else tuple(Item(p.document, images.spans(p.number, p.shift)) for p in self.places)

    @cached_property
    def item_table(self) -> ItemTable:
        """The items, checked and as arrays."""
        return ItemTable(self.lengths, self.items)

    def positions(self, document: int) -> npt.NDArray[np.int64] | None:
        """Return the position ids (n, T) of a document, n for each token (time, height and width, say).

        None: the position ids are 0 to T − 1.
        """
        numbers = self._numbers_by_document.get(document)
        if self.images is None or numbers is None:
            return None
        tokens = self[document]
        return self.images.positions(tokens[np.arange(len(tokens))], numbers)

    def read(self, item: int) -> ImageInput:
        """Read the encoder's input for an item."""
        assert self.images is not None
        return self.images.reader(self.numbers[item])

    def picture(self, item: int) -> "Image":
        """Read an item as in its file: upright, in three channels."""
        assert self.images is not None
        return self.images.reader.picture(self.numbers[item])

    def read_ahead(self, items: Sequence[int]) -> None:
        """Begin to read these items in threads."""
        if self.images is not None:
            self.images.reader.read_ahead(self.numbers[item] for item in items)

    @cached_property
    def _numbers_by_document(self) -> dict[int, list[int]]:
        numbers = dict[int, list[int]]()
        for place in self.places:
            numbers.setdefault(place.document, []).append(place.number)
        return numbers


@dataclass(frozen=True)
class ImageDocuments(CorpusDocuments, ReadsImages):
    """Some documents of a corpus, in the order of a plan's lengths, with their images."""

    images: ShownImages | None = None

    def find_images(self, images: ShownImages) -> Iterator[ImagePlace]:
        """Find the images in these documents, by document and then by position."""
        for index, document in enumerate(self.ids):
            for number in images.table.document_images(document):
                yield ImagePlace(index, number)


@dataclass(frozen=True)
class ImagePacks(ReadsImages, Sequence[Pack]):
    """The packs of a step, each as one document, with their images; a pack cuts no image."""

    packs: tuple[Pack, ...]
    images: ShownImages | None = None

    def __len__(self) -> int:
        return len(self.packs)

    def __getitem__(self, index: int) -> Pack:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.packs[index]

    def __iter__(self) -> Iterator[Pack]:
        return iter(self.packs)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each pack."""
        return tuple(map(len, self.packs))

    def find_images(self, images: ShownImages) -> Iterator[ImagePlace]:
        """Find the images in these packs, by pack and then by position.

        Position p of a document is position p − `piece.stop` + `end` of the pack.
        """
        for index, pack in enumerate(self.packs):
            for end, piece in zip(pack.ends.tolist(), pack.pieces, strict=True):
                for number in images.table.document_images(piece.document.number):
                    if piece.start <= images.table[number].image.start < piece.stop:
                        yield ImagePlace(index, number, end - piece.stop)


def show_images(corpus: Corpus, model: PreTrainedConfig, folder: Path) -> Corpus:
    """Make a corpus return documents with images, for a model of this configuration, by the processor in a folder.

    For a model without images nothing changes. Raises DataError if there are images and the model takes none, or if the
    model makes another number of rows of an image than it has placeholders.
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
        processor, tokens = load_processor(folder.absolute()), image_tokens(model)
        _check_placeholders(corpus, images, tokens, processor)
        check_images(model, processor.fields)
        has_videos = (images.column("frame") >= 0).any()  # −1 for an image that is no frame
        videos = _video_tokens(model, processor) if has_videos else None
        reader = ImageReader(images, processor, corpus)
        shown_images = ShownImages(corpus, images, reader, tokens, videos)
    if takes_images:  # also for a corpus without images: a step of this model asks for items, which are then none
        corpus.selects = partial(ImageDocuments, images=shown_images)
        corpus.packs = partial(ImagePacks, images=shown_images)
    return corpus


def _video_tokens(model: PreTrainedConfig, processor: Processor) -> VideoTokens:
    """Return the model's tokens of videos."""
    try:
        videos = video_tokens(model)
    except ModelError as error:
        raise DataError(f"the documents have videos: {error}") from error
    video_processor, vision = processor.videos, getattr(model, "vision_config", None)
    group = getattr(vision, "temporal_patch_size", video_processor.group)
    if (video_processor.placeholder, video_processor.group) != (videos.placeholder, group):
        raise DataError(
            f"{video_processor.kind} puts token id {video_processor.placeholder} where videos stand, for groups of "
            f"{video_processor.group} frames, and "
            f"the model takes id {videos.placeholder} (video_token_id) for groups of {group} (temporal_patch_size); "
            "use the processor and the tokenizer of the model's own folder"
        )
    return videos


def _check_placeholders(corpus: Corpus, table: ImageTable, tokens: ImageTokens, processor: Processor) -> None:
    """Raise DataError if the processor writes other placeholders than the model takes, or another number of them."""
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
    model_rows = np.array(rows_of_grid, dtype=np.int64)[grid_of_image.reshape(-1)]  # one number for each image
    wrong = np.flatnonzero(model_rows != table.column("rows"))
    if len(wrong):
        first = table[int(wrong[0])]
        raise DataError(
            f"document {first.document} ({corpus.origin(first.document)}) has "
            f"{plural(first.image.rows, 'placeholder')} for its image of patches {first.image.grid}, of which the "
            f"model makes {model_rows[wrong[0]]} rows; {processor.name} and the model must agree: "
            "use the model folder's own processor, with image sizes and merges of the configuration"
        )
