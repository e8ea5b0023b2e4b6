"""Documents of a corpus with images, as a step takes them: token ids, and where images stand among them.

    corpus = Corpus(Path("runs/first/corpus"))
    show_images(corpus, configuration, Path("runs/first"))
    corpus.select([3, 7]).items                     # every rank knows the places; read(i) has the pixels of one

They are what `longspan.bridge.ItemDocuments` is in memory. A corpus without images has none to show, and its documents
have no items.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar, cast

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedConfig

from longspan.errors import DataError, counted
from longspan.layout import Partition
from longspan.model.vision.image_tokens import ImageInput, ImageTokens, image_tokens
from longspan.plan.items import Item, ItemTable
from longspan.train.data.documents import Corpus, Documents
from longspan.train.data.image_reader import ImageReader
from longspan.train.data.images.processor import load_processor
from longspan.train.data.store.images import ImageTable

if TYPE_CHECKING:
    from PIL.Image import Image

AnyDocuments = TypeVar("AnyDocuments")  # those of a corpus become ImageDocuments


@dataclass(frozen=True)
class ShownImages:
    """The images of a corpus, what reads them, and what the model's ids and positions say of them."""

    table: ImageTable
    reader: ImageReader
    tokens: ImageTokens


@dataclass(frozen=True)
class ImageDocuments(Documents):
    """Some documents of a corpus, in the order of a plan's lengths, with the images that stand in them."""

    images: ShownImages | None = None

    @cached_property
    def numbers(self) -> tuple[int, ...]:
        """The corpus's numbers of the images, in the order of `items`."""
        return tuple(number for document in self.ids for number in self._of(document))

    @cached_property
    def items(self) -> tuple[Item, ...]:
        """The images by the positions that their rows take."""
        return tuple(
            Item(index, self._spans(document, number))
            for index, document in enumerate(self.ids)
            for number in self._of(document)
        )

    @cached_property
    def item_table(self) -> ItemTable:
        """The items, checked and in arrays."""
        return ItemTable(self.lengths, self.items)

    def read(self, item: int) -> ImageInput:
        """What the encoder is given for an item."""
        assert self.images is not None
        return self.images.reader(self.numbers[item])

    def picture(self, item: int) -> "Image":
        """An item as it is in its file: upright, in three channels."""
        assert self.images is not None
        return self.images.reader.picture(self.numbers[item])

    def read_ahead(self, items: Sequence[int]) -> None:
        """Begin to read these items, in threads."""
        if self.images is not None:
            self.images.reader.ahead(self.numbers[item] for item in items)

    def positions(self, document: int) -> npt.NDArray[np.int64] | None:
        """The positions of a document in several parts (n, T); None where they are plain."""
        number = self.ids[document]
        if self.images is None or not len(self._of(number)):
            return None
        grids = np.array([self.images.table[i].image.grid for i in self._of(number)], dtype=np.int64)
        ids = self.corpus.read(number, np.arange(int(self.corpus.lengths[number])))
        return self.images.tokens.positions(ids, grids)

    def _of(self, document: int) -> range:
        return range(0) if self.images is None else self.images.table.of_document(document)

    def _spans(self, document: int, number: int) -> tuple[tuple[int, int], ...]:
        """The runs of placeholders of an image: one, but where its processor puts other tokens between rows."""
        assert self.images is not None
        image = self.images.table[number].image
        if image.stop - image.start == image.rows:
            return ((image.start, image.stop),)
        ids = self.corpus.read(document, np.arange(image.start, image.stop))
        places = image.start + np.flatnonzero(ids == self.images.tokens.placeholder)
        return tuple((int(a), int(b)) for a, b in Partition.from_rows([places]).runs(0).tolist())


def show_images(corpus: Corpus, model: PreTrainedConfig, folder: Path) -> Corpus:
    """Let a corpus give its documents with images, for a model of this configuration, by the processor in a folder.

    Of a model without images nothing changes. Raises DataError where there are images and the model takes none, or,
    with a document and both counts, where it makes other rows of an image than placeholders stand for it.
    """
    images = corpus.images if corpus.images is not None and len(corpus.images) else None
    takes_images = getattr(model, "vision_config", None) is not None
    if images is not None and not takes_images:
        raise DataError(
            f"{counted(len(images), 'image')} stand in the documents, and {type(model).__name__} is of a model that "
            "takes none; train one that does, or leave them out of the rows"
        )
    shown = None
    if images is not None:
        processor, tokens = load_processor(folder.absolute()), image_tokens(model)
        _check(corpus, images, tokens, processor.placeholder, processor.name)
        shown = ShownImages(images, ImageReader(images, processor, corpus.sources, corpus.file_of), tokens)
    if takes_images:
        corpus.selects = partial(ImageDocuments, images=shown)
    return corpus


def with_images(documents: AnyDocuments, model: PreTrainedConfig, folder: Path) -> AnyDocuments:
    """Documents of a corpus with their images; others as they are. Raises DataError as `show_images` does."""
    if not isinstance(documents, Documents):
        return documents
    return cast(AnyDocuments, show_images(documents.corpus, model, folder).select(documents.ids))


def _check(corpus: Corpus, table: ImageTable, tokens: ImageTokens, placeholder: int, processor: str) -> None:
    if placeholder != tokens.placeholder:
        raise DataError(
            f"{processor} puts token id {placeholder} where images stand, and the model takes id {tokens.placeholder} "
            "(image_token_id) for them; use the processor and the tokenizer of the model's own folder"
        )
    grids = np.stack([table.column(name) for name in ("time", "height", "width")], axis=1)
    unique, inverse = np.unique(grids, axis=0, return_inverse=True)
    rows = [tokens.rows(tuple(grid) if any(grid) else None) for grid in unique.tolist()]
    wrong = np.flatnonzero(np.array(rows, dtype=np.int64)[inverse.reshape(-1)] != table.column("rows"))
    if len(wrong):
        first = table[int(wrong[0])]
        raise DataError(
            f"document {first.document} ({corpus.origin(first.document)}) has "
            f"{counted(first.image.rows, 'placeholder')} for its image of patches {first.image.grid}, of which the "
            f"model makes {rows[int(inverse.reshape(-1)[wrong[0]])]} rows; {processor} and the model must agree: use "
            "the model folder's own processor, with image sizes and merges of the configuration"
        )
