"""Puts the placeholders of a row's images and videos into its text, and finds their places among its token ids."""

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from longspan.corpus.images.image_file import ImageFile, VideoFile
from longspan.corpus.images.processor import Grid, Processor, load_processor
from longspan.corpus.images.stock_processor import processor_digest
from longspan.corpus.images.video_processor import VideoProcessor
from longspan.corpus.rows.media.row_media import (
    PARTS,
    RowMedia,
    check_media_counts,
    kinds_in_text,
    media_name_pattern,
)
from longspan.corpus.rows.sample import Sample
from longspan.corpus.rows.template import ChatTemplate
from longspan.corpus.rows.values import RowError, check_strings, require_string
from longspan.corpus.tokenizer import TextTokenizer, any_name_pattern
from longspan.data.document import NO_TARGET
from longspan.data.image_table import SampleImage, join_paths, join_stamps
from longspan.errors import DataError, plural

# Part of the digest of placeholders: it changes with the rules by which texts name images.
_RULES = "images are named by parts, else by texts of rows with a key for them"
_WORDS = ("Zq0before", "Zq1behind")


class ShownMedium(NamedTuple):
    """An image or a video in a text: its name for messages, its file or frames, and what the processor makes of it.

    `text` is what the processor writes for it, `grid` the grid of its patches (None: it is not cut into a grid).
    """

    name: str
    file: ImageFile | VideoFile
    text: str
    grid: Grid | None


class ExpandedText(NamedTuple):
    """A text with placeholders for its media, these in their order, and spans (start, stop) of characters."""

    text: str
    shown: tuple[ShownMedium, ...]
    spans: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True)
class RowImages:
    """Makes placeholders of the images of rows, with the processor in the tokenizer's folder and its chat template.

    Every method raises RowError if something is wrong with a row.
    """

    tokenizer: TextTokenizer
    template: ChatTemplate | None

    @property
    def processor(self) -> Processor:
        """The processor of the tokenizer's folder, loaded once a process."""
        assert self.tokenizer.folder is not None
        return load_processor(self.tokenizer.folder.absolute())

    @property
    def digest(self) -> tuple[str, ...]:
        """What decides placeholders: the rules of names, the settings of the processor, and the template."""
        assert self.tokenizer.folder is not None
        return _RULES, processor_digest(self.tokenizer.folder), *([self.template.plain] if self.template else ())

    @cached_property
    def marks(self) -> dict[str, str]:
        """What is written into a text in place of `<image>` and of `<video>`, by kind, before it is expanded."""
        return {
            kind: self._template_mark(kind, token) for kind, token in self._processor_tokens(videos=True).items()
        }

    def _template_mark(self, kind: str, token: str) -> str:
        """It is all that stands between words around the part, or `token` if there is no template, or it does not write
        the token exactly once."""
        if self.template is None:
            return token
        part_before, part_after = ({"type": "text", "text": word} for word in _WORDS)
        try:
            content = [part_before, PARTS[kind], part_after]
            text = self.template.render([{"role": "user", "content": content}], None).text
        except RowError:
            return token
        between = text.split(_WORDS[0])[-1].split(_WORDS[1])[0]
        return between if between.count(token) == 1 else token

    def _processor_tokens(self, *, videos: bool) -> dict[str, str]:
        """There is no video where the processor has none."""
        tokens = {"image": self.processor.token}
        if videos:
            with suppress(DataError):
                tokens["video"] = self.processor.videos.token
        return tokens

    def expand_placeholders(
        self, text: str, media: RowMedia, spans: Sequence[tuple[int, int]] = ()
    ) -> ExpandedText:
        """Replace placeholders in a text, one for each file in order, by what the processor writes for these.

        `spans` of the text, in characters, move by as many as the placeholders before them grow. Raises RowError for
        another number of placeholders than of files.
        """
        tokens = self._processor_tokens(videos=bool(media.videos))
        if media.videos:
            _ = self._videos  # raises RowError if videos cannot be processed
        pattern = re.compile("|".join(re.escape(token) for token in tokens.values()))
        placeholders = pattern.findall(text)
        pieces = pattern.split(text)
        kinds = [kind for token in placeholders for kind in tokens if tokens[kind] == token]
        for kind, files in (("image", media.images), ("video", media.videos)):
            if kinds.count(kind) != len(files):
                raise RowError(
                    f"its chat template writes {plural(kinds.count(kind), 'placeholder')} {tokens[kind]} for "
                    f"{plural(len(files), kind)}; mend the template of {self.tokenizer.folder}"
                )
        numbered_files = {"image": enumerate(media.images), "video": enumerate(media.videos)}
        shown = tuple(
            self._shown_medium(kind, *next(numbered_files[kind]), images=len(media.images)) for kind in kinds
        )
        sizes = [len(token) for token in placeholders]
        # Where each placeholder begins in the text, and by how much those before it have grown.
        starts = np.cumsum([len(piece) for piece in pieces[:-1]]) + np.cumsum(sizes) - sizes
        grown_before = np.cumsum([0, *(len(medium.text) - size for medium, size in zip(shown, sizes, strict=True))])
        moved_spans = tuple(
            (int(start + grown_before[(starts < start).sum()]), int(stop + grown_before[(starts < stop).sum()]))
            for start, stop in spans
        )
        shown_texts = (*(medium.text for medium in shown), "")  # no placeholder follows the last piece
        expanded_text = "".join(piece + shown_text for piece, shown_text in zip(pieces, shown_texts, strict=True))
        return ExpandedText(expanded_text, shown, moved_spans)

    def add_images(self, sample: Sample, expanded: ExpandedText) -> Sample:
        """Return a sample of an expanded text with its images; placeholders are no targets."""
        placed = list[SampleImage]()
        labels = sample.ids if sample.labels is None else sample.labels
        for kind in ("image", "video"):
            shown = [medium for medium in expanded.shown if isinstance(medium.file, VideoFile) == (kind == "video")]
            if kind == "image" or shown:  # a folder may lack a processor of videos, which only videos need
                placeholder = self.processor.placeholder if kind == "image" else self._videos.placeholder
                placed += self._place_images(sample.ids, kind, placeholder, shown)
                labels = np.where(sample.ids == placeholder, NO_TARGET, labels)
        return sample._replace(labels=labels, images=tuple(sorted(placed)))

    def text_sample(self, values: Mapping[str, Any], media: RowMedia) -> Sample:
        """Encode a text that names images and videos, with the tokens that the tokenizer puts around texts."""
        text = require_string(values.get("text"), "text")
        pattern = media_name_pattern(values)
        special = any_name_pattern(self.tokenizer.special_tokens)
        check_media_counts(kinds_in_text(text, pattern), media, "its text")
        if media.videos:
            _ = self._videos  # raises RowError if videos cannot be processed
        # What stands between names of media is tokenized with the placeholders, so it must name no special token.
        for i, piece in enumerate(pattern.split(text)):
            check_strings(piece, f"its text (piece {i + 1})", special)
        expanded = self.expand_placeholders(
            pattern.sub(lambda match: self.marks[match[0].strip("<>")], text), media
        )
        ids = self.tokenizer.set_parsing(True).engine.encode(expanded.text, add_special_tokens=False).ids
        return self.add_images(Sample(self.tokenizer.surround(ids)), expanded)

    @property
    def _videos(self) -> VideoProcessor:
        try:
            return self.processor.videos
        except DataError as error:
            raise RowError(str(error)) from error

    def _place_images(
        self, ids: npt.NDArray[np.int64], kind: str, placeholder: int, shown: Sequence[ShownMedium]
    ) -> Iterator[SampleImage]:
        """`ids` are (n,); a video gives groups of frames."""
        places = np.flatnonzero(ids == placeholder)
        engine = self.tokenizer.set_parsing(True).engine
        counts = [engine.encode(m.text, add_special_tokens=False).ids.count(placeholder) for m in shown]
        if len(places) != sum(counts) or not all(counts):
            raise RowError(
                f"{plural(len(places), 'placeholder')} (token id {placeholder}) for "
                f"{plural(len(shown), kind)} of {sum(counts)} rows ({counts[:8]}); the processor and the "
                f"tokenizer of {self.tokenizer.folder} must agree, and its texts hold none of their own"
            )
        parts = np.split(places, np.cumsum(counts)[:-1]) if counts else []
        for number, (medium_places, medium) in enumerate(zip(parts, shown, strict=True)):
            if isinstance(medium.file, VideoFile):
                yield from self._frame_groups(number, medium_places, medium.file, medium.grid or (0, 0, 0))
            else:
                start = int(medium_places[0])
                stop = int(medium_places[-1]) + 1
                file = medium.file
                grid = medium.grid or (0, 0, 0)
                rows = len(medium_places)
                yield SampleImage(start, stop, rows, grid, number, file.path, *file.stamp(), among=len(shown))

    def _frame_groups(
        self, number: int, places: npt.NDArray[np.int64], video: VideoFile, grid: Grid
    ) -> Iterator[SampleImage]:
        """Each group has an equal share of the placeholders, at these places (n,)."""
        size = self._videos.frames_per_group
        # The grid counts patches.
        groups, height, width = grid
        if len(places) % groups:
            raise RowError(
                f"videos[{number}] has {plural(len(places), 'placeholder')} for {groups} groups of frames; the "
                f"processor of {self.tokenizer.folder} must write as many for each"
            )
        for group, group_places in enumerate(np.split(places, groups)):
            frames = video.frames[group * size : (group + 1) * size]
            start = int(group_places[0])
            stop = int(group_places[-1]) + 1
            rows = len(group_places)
            path = join_paths([frame.path for frame in frames])
            stamp = join_stamps(frame.stamp() for frame in frames)
            seconds = video.interval * size
            yield SampleImage(
                start, stop, rows, (1, height, width), number, path, *stamp, frame=group * size, seconds=seconds
            )

    def _shown_medium(self, kind: str, number: int, file: ImageFile | VideoFile, *, images: int) -> ShownMedium:
        name = f"{kind}s[{number}]"
        try:
            if isinstance(file, VideoFile):
                grid = self._videos.patch_grid(len(file.frames), file.size())
                return ShownMedium(name, file, self._videos.video_text(grid, file.times), grid)
            size = file.size()
            return ShownMedium(name, file, self.processor.image_text(size, images), self.processor.patch_grid(size))
        except DataError as error:
            raise RowError(f"{name}: {error}") from error
