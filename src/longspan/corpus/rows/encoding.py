"""Rows of one kind to tokens and labels. It pickles, so that worker processes can do it.

How long a document may be is not its business: a sample is as long as its row.
"""

import hashlib
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from functools import cached_property
from typing import Any

from longspan.corpus.images.stock_processor import has_processor
from longspan.corpus.rows.chat import ChatEncoding
from longspan.corpus.rows.kinds import Kind, check_keys, check_objects, kind_of
from longspan.corpus.rows.media.named_media import has_media_keys, media_beside, names_read_as_text, row_and_media
from longspan.corpus.rows.media.placeholders import RowImages
from longspan.corpus.rows.media.row_media import NOTHING_SHOWN, RowMedia
from longspan.corpus.rows.messages import messages_of
from longspan.corpus.rows.plain import completion_sample, encode_texts, token_sample
from longspan.corpus.rows.sample import BadRow, Row, RowSettings, Sample
from longspan.corpus.rows.template import ChatTemplate
from longspan.corpus.rows.values import RowError, needed, string
from longspan.corpus.tokenizer import TextTokenizer
from longspan.data.document import NO_TARGET
from longspan.errors import DataError

__all__ = ["RowEncoding", "kind_of"]


@dataclass(frozen=True)
class RowEncoding:
    """How rows of a kind become samples, with this tokenizer.

    >>> encoding = RowEncoding("messages", load_tokenizer("model-folder"))
    >>> encoding.encode([Row("chat.jsonl, line 1", {"messages": […]})])

    With `check_pixels` images are decoded, and a row with a broken one is bad; what others become does not change.
    Raises DataError for rows of messages where the tokenizer has no chat template.
    """

    kind: Kind
    tokenizer: TextTokenizer
    settings: RowSettings = field(default_factory=RowSettings)
    check_pixels: bool = False

    def __post_init__(self) -> None:
        if self.kind == "messages":
            _ = self._chat

    def encode(self, rows: Sequence[Row]) -> list[Sample | BadRow]:
        """What becomes of the rows, in their order; a conversation that is split gives a sample for each turn."""
        if self.kind == "text" and not any(self._may_show(row.values) for row in rows):
            return encode_texts(rows, self.tokenizer.parsing(self.settings.parse_special_tokens))
        return [result for i, row in enumerate(rows) for result in self._encoded(i, row)]

    def names_as_text(self, rows: Sequence[Row]) -> Counter[str]:
        """In how many texts `<image>` and the like stand for nothing that is shown, where a model takes images."""
        counts = Counter[str]()
        for row in rows if self.images is not None else ():
            counts.update(names_read_as_text(row.values))
        return counts

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that decides the tokens of a row."""
        tokenizer = (self.tokenizer.digest, self.tokenizer.opening, self.tokenizer.closing)
        template: tuple[Any, ...] = ()
        if self.kind in ("messages", "prompt+completion"):
            with suppress(DataError):  # prompts that are strings need no template
                template = astuple(self._chat.template)
        decides = [self.kind, tokenizer, astuple(self.settings), template]
        if self.images is not None:
            decides.append(self.images.digest)
        return hashlib.sha256(json.dumps(decides).encode()).hexdigest()

    @property
    def template(self) -> ChatTemplate:
        """The tokenizer's chat template. Raises DataError where it has none."""
        return self._chat.template

    @cached_property
    def images(self) -> RowImages | None:
        """How images become placeholders; None where the tokenizer's folder has no image processor."""
        if not has_processor(self.tokenizer.folder):
            return None
        template = None
        with suppress(DataError):  # texts need none
            template = ChatTemplate.of(self.tokenizer, self.settings.date_string)
        return RowImages(self.tokenizer, template)

    def _may_show(self, values: Mapping[str, Any]) -> bool:
        """Whether a row of text has more than its text to be looked at."""
        return has_media_keys(values) if self.images is not None else media_beside(values, lists=True) is not None

    def _encoded(self, i: int, row: Row) -> list[Sample | BadRow]:
        try:
            samples = [sample._replace(row=i) for sample in self._samples(row)]
        except RowError as error:
            return [BadRow(row.where, str(error), error.masked)]
        return [_masked(row) if _has_no_target(sample) else sample for sample in samples]

    def _samples(self, row: Row) -> list[Sample]:
        check_keys(row.values, self.kind)
        values, media = self._with_media(row)
        check_objects(values)
        if self.kind == "messages":
            return self._chat.samples(values, media=media)
        if self.kind == "text" and media and self.images is not None:
            return [self.images.text_sample(values, media)]
        if self.kind == "text":
            tokenizer = self.tokenizer.parsing(self.settings.parse_special_tokens)
            return [Sample(tokenizer.encode([string(needed(values, "text"), "text")])[0])]
        if self.kind == "input_ids":
            return [token_sample(values, self.tokenizer.size)]
        prompt, completion = needed(values, "prompt"), needed(values, "completion")
        if isinstance(prompt, list) or isinstance(completion, list):
            before, said = (
                messages_of(part, name, images=self.images is not None)
                for part, name in ((prompt, "prompt"), (completion, "completion"))
            )
            both = [*before, *said]
            return self._chat.samples({**values, "messages": both}, first_target=len(before), media=media)
        if media:
            raise RowError("images stand beside prompt and completion as strings; write these as lists of messages")
        return [completion_sample(values, self.tokenizer.parsing(self.settings.parse_special_tokens))]

    @cached_property
    def _chat(self) -> ChatEncoding:
        template = ChatTemplate.of(self.tokenizer, self.settings.date_string)
        return ChatEncoding(self.tokenizer, template, self.settings, self.images)

    def _with_media(self, row: Row) -> tuple[Mapping[str, Any], RowMedia]:
        """A row's values, in which images and videos are parts of messages without more, and these in their order."""
        values = row.values
        if self.images is None:
            plain = self.kind in ("text", "input_ids")  # beside these a column "image" need not be one
            if (beside := media_beside(values, lists=plain)) is not None:
                raise RowError(
                    f"it has {beside}, and the folder of the tokenizer ({self.tokenizer.folder}) has no image "
                    "processor; train a model that takes images, from its folder with preprocessor_config.json, or "
                    "leave them out"
                )
            return values, NOTHING_SHOWN
        changed, media = row_and_media(row)
        if self.check_pixels:
            media.check_pixels()
        if media and self.kind == "input_ids":
            raise RowError("images stand beside input_ids; give text or messages, whose placeholders are made here")
        return changed, media


def _has_no_target(sample: Sample) -> bool:
    return sample.labels is not None and not (sample.labels[1:] != NO_TARGET).any()


def _masked(row: Row) -> BadRow:
    return BadRow(row.where, "none of its tokens is a target", masked=True)
