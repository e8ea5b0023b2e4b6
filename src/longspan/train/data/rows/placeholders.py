"""The placeholders of images in the tokens of a row: as many as the folder's processor gives an image of its size.

Pixels are not read. What stands around placeholders is the processor's and the chat template's own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from longspan.errors import DataError, counted
from longspan.train.data.images.image_file import ImageFile
from longspan.train.data.images.processor import Processor, digest_of, load_processor
from longspan.train.data.rows.named_images import NAMED, PART, check_count
from longspan.train.data.rows.sample import Sample, SampleImage
from longspan.train.data.rows.template import ChatTemplate
from longspan.train.data.rows.turn_tokens import pattern_of
from longspan.train.data.rows.values import RowError, check_strings, string
from longspan.train.data.tokenizer import TextTokenizer
from longspan.train.document import NO_TARGET

_RULES = "what an image is among others of its document is its processor's"  # another sentence for other rules
_WORDS = ("Zq0before", "Zq1behind")


class Expanded(NamedTuple):
    """A text with the placeholders of its images, what each of them is there, and spans (start, stop) of characters."""

    text: str
    images: tuple[str, ...]
    spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class RowImages:
    """How images of rows become placeholders: with the processor in the tokenizer's folder, and its chat template.

    Every method raises RowError for what is wrong with a row.
    """

    tokenizer: TextTokenizer
    template: ChatTemplate | None

    @property
    def processor(self) -> Processor:
        """The folder's processor, once a process."""
        assert self.tokenizer.folder is not None
        return load_processor(self.tokenizer.folder.absolute())

    @property
    def digest(self) -> tuple[str, ...]:
        """What decides placeholders beside the tokenizer: what the files of the processor and the template say."""
        assert self.tokenizer.folder is not None
        return _RULES, digest_of(self.tokenizer.folder), *(() if self.template is None else (self.template.plain,))

    @cached_property
    def mark(self) -> str:
        """What stands in a text for an image: what the chat template writes for a part, else the processor's token."""
        token = self.processor.token
        if self.template is None:
            return token
        before, behind = ({"type": "text", "text": word} for word in _WORDS)
        try:
            text = self.template.render([{"role": "user", "content": [before, PART, behind]}], None).text
        except RowError:
            return token
        between = text.split(_WORDS[0])[-1].split(_WORDS[1])[0]
        return between if between.count(token) == 1 and between in text else token

    def expand(self, text: str, images: Sequence[ImageFile], spans: Sequence[tuple[int, int]] = ()) -> Expanded:
        """The text with what the processor writes for these images."""
        token = self.processor.token
        pieces = text.split(token)
        if len(pieces) - 1 != len(images):
            raise RowError(
                f"its chat template writes {counted(len(pieces) - 1, 'placeholder')} {token} for "
                f"{counted(len(images), 'image')}; mend the template of {self.tokenizer.folder}"
            )
        written = tuple(self._of_size(image, i, len(images)) for i, image in enumerate(images))
        starts = list(accumulate((len(piece) + len(token) for piece in pieces[:-1]), initial=0))[1:]
        starts = np.array([start - len(token) for start in starts], dtype=np.int64)
        grown = np.cumsum([0, *(len(made) - len(token) for made in written)])
        moved = tuple((int(a + grown[(starts < a).sum()]), int(b + grown[(starts < b).sum()])) for a, b in spans)
        joined = "".join(piece + made for piece, made in zip(pieces, (*written, ""), strict=True))
        return Expanded(joined, written, moved)

    def with_images(self, sample: Sample, expanded: Expanded, images: Sequence[ImageFile]) -> Sample:
        """A sample of an expanded text with the places of its images, whose placeholders are no targets."""
        placed = self._placed(sample.ids, expanded.images, images)
        labels = sample.ids if sample.labels is None else sample.labels
        labels = np.where(sample.ids == self.processor.placeholder, NO_TARGET, labels)
        return sample._replace(labels=labels, images=placed)

    def text_sample(self, values: Mapping[str, Any], images: Sequence[ImageFile]) -> Sample:
        """The sample of a text in which images are named, with what the tokenizer puts around texts."""
        text = string(values.get("text"), "text")
        added = self.tokenizer.engine.get_added_tokens_decoder().values()
        special = pattern_of({token.content for token in added if token.special})
        check_count(text.count(NAMED), images, "its text")
        for i, piece in enumerate(text.split(NAMED)):
            check_strings(piece, f"its text (piece {i + 1})", special)
        expanded = self.expand(text.replace(NAMED, self.mark), images)
        ids = self.tokenizer.parsing(True).engine.encode(expanded.text, add_special_tokens=False).ids
        (opening, closing), end = self.tokenizer.around, self.tokenizer.end_of_text
        return self.with_images(Sample(np.array([*opening, *ids, *closing, *end], np.int64)), expanded, images)

    def _placed(
        self, ids: npt.NDArray[np.int64], written: Sequence[str], images: Sequence[ImageFile]
    ) -> tuple[SampleImage, ...]:
        """Where the placeholders of the images stand in the tokens of their text (n,)."""
        places = np.flatnonzero(ids == self.processor.placeholder)
        counts = [self._placeholders(text) for text in written]
        if len(places) != sum(counts) or not all(counts):
            raise RowError(
                f"{counted(len(places), 'placeholder')} (token id {self.processor.placeholder}) for "
                f"{counted(len(images), 'image')} of {sum(counts)} rows ({counts[:8]}); the processor and the "
                f"tokenizer of {self.tokenizer.folder} must agree, and its texts hold none of their own"
            )
        parts = np.split(places, np.cumsum(counts)[:-1]) if counts else []
        return tuple(
            self._image(i, part, image, len(images)) for i, (part, image) in enumerate(zip(parts, images, strict=True))
        )

    def _image(self, index: int, places: npt.NDArray[np.int64], image: ImageFile, among: int) -> SampleImage:
        grid = self.processor.grid(_size(image, index)) or (0, 0, 0)
        start, stop = int(places[0]), int(places[-1]) + 1
        return SampleImage(start, stop, len(places), grid, index, image.path, *image.stamp(), among)

    def _of_size(self, image: ImageFile, index: int, among: int) -> str:
        size = _size(image, index)
        try:
            return self.processor.text(size, among)
        except DataError as error:
            raise RowError(f"images[{index}]: {error}") from error

    def _placeholders(self, text: str) -> int:
        """How many placeholders the text of one image has."""
        ids = self.tokenizer.parsing(True).engine.encode(text, add_special_tokens=False).ids
        return ids.count(self.processor.placeholder)


def _size(image: ImageFile, index: int) -> tuple[int, int]:
    try:
        return image.size()
    except DataError as error:
        raise RowError(f"images[{index}]: {error}") from error
