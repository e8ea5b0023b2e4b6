"""Encodes rows of one kind as samples: texts, prompts with completions, tokens, conversations, pairs.

A `RowEncoding` pickles for worker processes. Rows are cut into documents in `document_encoder.py`.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from longspan.corpus.long_texts import PIECE, LongTextError
from longspan.corpus.rows.formats import convert_format
from longspan.corpus.rows.kinds import (
    CHATS,
    KEYS,
    Kind,
    check_keys,
    check_objects,
    has_media_keys,
    media_key,
    readable_keys,
)
from longspan.corpus.rows.messages import checked_messages
from longspan.corpus.rows.preferences import check_not_empty, drop_repeated_prompt, join_samples, read_label
from longspan.corpus.rows.sample import (
    DATE,
    BadRow,
    Row,
    RowSettings,
    Sample,
    UnseenCounts,
    count_borders_inside_tokens,
)
from longspan.corpus.rows.token_ids import take_token_ids
from longspan.corpus.rows.values import RowError, has_value, number_in_text, require_key, require_string, short_repr
from longspan.corpus.tokenizer import TextTokenizer
from longspan.data.document import NO_TARGET
from longspan.data.manifest import PAIRS
from longspan.errors import DataError
from longspan.layout import Integers
from longspan.model.weights.tokenizer_files import has_image_processor

# Texts do without these classes of conversations and images.
if TYPE_CHECKING:
    from longspan.corpus.rows.chats.chat import ChatEncoding
    from longspan.corpus.rows.media.placeholders import RowImages
    from longspan.corpus.rows.media.row_media import RowMedia
    from longspan.corpus.rows.template import ChatTemplate


@dataclass(frozen=True)
class RowEncoding:
    """Makes samples of rows of a kind, with this tokenizer.

    >>> encoding = RowEncoding("messages", load_tokenizer("model-folder"))
    >>> encoding.encode([Row("chat.jsonl, line 1", {"messages": […]})])

    Raises DataError for rows of messages if the tokenizer has no chat template.
    """

    kind: Kind
    tokenizer: TextTokenizer
    settings: RowSettings = field(default_factory=RowSettings)

    def __post_init__(self) -> None:
        if self.kind in CHATS:
            _ = self.template  # raises DataError without a chat template

    def encode(self, rows: Sequence[Row]) -> list[Sample | BadRow]:
        """Encode rows in their order; a conversation that is split gives a sample for each turn.

        What is wrong with a row is a BadRow in its place.
        """
        # Without an image processor only a list under such a key counts: a column "image" may hold anything.
        has_media = (
            has_media_keys if self.images is not None else lambda values: bool(media_key(values, lists=True))
        )
        if self.kind != "text" or self.settings.num_labels or any(has_media(row.values) for row in rows):
            return [sample for i, row in enumerate(rows) for sample in self._encode_row(i, row)]
        return self._encode_texts(rows)

    def _encode_texts(self, rows: Sequence[Row]) -> list[Sample | BadRow]:
        """A long text is encoded by itself, as it may turn out a bad row."""
        short_texts = list[str]()
        results = list[BadRow | Integers | None]()  # None: of a short text, which is encoded below
        for row in rows:
            try:
                check_keys(row.values, "text")
                text = require_string(require_key(row.values, "text"), "text")
                results.append(self._text_tokenizer.encode_text(text) if len(text) > PIECE else None)
            except (RowError, LongTextError) as error:
                results.append(BadRow(row.where, str(error)))
            else:
                if results[-1] is None:
                    short_texts.append(text)
        short_encodings = iter(self._text_tokenizer.encode(short_texts))
        encoded = [next(short_encodings) if result is None else result for result in results]
        return [ids if isinstance(ids, BadRow) else Sample(ids, row=i) for i, ids in enumerate(encoded)]

    @cached_property
    def digest(self) -> str:
        """The SHA-256 of all that decides the samples of a row."""
        tokenizer = (self.tokenizer.digest, *self.tokenizer.surrounding_tokens)
        template: tuple[Any, ...] = ()
        if self.kind in (*CHATS, "prompt+completion", PAIRS):
            with suppress(DataError):  # prompts that are strings need no template
                template = astuple(self.template)
        rows = self.settings
        # Settings that came with version 0.4 count only where they are set, so that older corpora keep their digest.
        optional = filter(None, (rows.end_of_chat, [*rows.columns], rows.num_labels, rows.preference))
        settings = [rows.parse_special_tokens, rows.turns, DATE, *optional]
        deciding_values = [self.kind, tokenizer, settings, template]
        if self.images is not None:
            deciding_values.append(self.images.digest)
        if self.settings.num_labels:
            # The manifest records this value.
            deciding_values.append(self.tokenizer.pad)
        return hashlib.sha256(json.dumps(deciding_values).encode()).hexdigest()

    @property
    def _text_tokenizer(self) -> TextTokenizer:
        return self.tokenizer.set_parsing(self.settings.parse_special_tokens)

    @cached_property
    def template(self) -> "ChatTemplate":
        """The chat template of the tokenizer. Raises DataError if it has none."""
        from longspan.corpus.rows.template import ChatTemplate

        return ChatTemplate.from_tokenizer(self.tokenizer)

    @cached_property
    def images(self) -> "RowImages | None":
        """What puts placeholders of images into texts; None if the tokenizer's folder has no image processor."""
        if not has_image_processor(self.tokenizer.folder):
            return None
        from longspan.corpus.rows.media.placeholders import RowImages

        template = None
        with suppress(DataError):  # texts need none
            template = self.template
        return RowImages(self.tokenizer, template)

    def unread_columns(self, values: Mapping[str, Any]) -> list[str]:
        """List the keys of a row, in its order, that have a value and that nothing reads."""
        read = readable_keys(values, self.kind, scored=self._reads_label, media=self.images is not None)
        return [key for key, value in values.items() if key not in read and has_value(value)]

    def _add_end(self, sample: Sample) -> Sample:
        """Where a template writes no token behind the last answer, it is the one behind the answer before. Blanks that
        are targets may follow it. There is none if other text follows the last target."""
        if sample.labels is None or (sample.labels == NO_TARGET).all():
            return sample
        engine = self.tokenizer.engine
        is_target = sample.labels != NO_TARGET
        # the last token of each run of targets
        stops = np.flatnonzero(is_target & ~np.append(is_target[1:], False))
        # `decode` leaves out special tokens.
        if engine.decode(sample.ids[stops[-1] + 1 :].tolist()).strip():
            return sample
        for stop in reversed(stops.tolist()):
            while is_target[stop - 1] and not engine.decode([sample.ids[stop]], skip_special_tokens=False).strip():
                stop -= 1
            end = int(sample.ids[stop])
            if (name := str(engine.id_to_token(end))) in self.tokenizer.special_tokens:
                return sample._replace(ends=((name, end),))
        return sample

    def _encode_row(self, i: int, row: Row) -> list[Sample | BadRow]:
        try:
            samples = [sample._replace(row=i) for sample in self._encode_by_kind(row)]
        except RowError as error:
            return [BadRow(row.where, str(error), error.masked)]
        except LongTextError as error:
            return [BadRow(row.where, str(error))]
        masked = BadRow(row.where, "none of its tokens is a target", masked=True)
        return [
            masked if sample.labels is not None and (sample.labels[1:] == NO_TARGET).all() else sample
            for sample in samples
        ]

    def _encode_by_kind(self, row: Row) -> list[Sample]:
        """The loss decides first, then the model's head, then the kind."""
        check_keys(row.values, self.kind, scored=self._reads_label)
        values = row.values
        if self.kind in (PAIRS, "prompt+completion"):
            values = drop_repeated_prompt(values, KEYS[self.kind])
        values = convert_format(values, self.kind, self.settings.preference)
        values, media = self._values_and_media(row._replace(values=values))
        check_objects(values)
        if self.settings.preference:
            return self._encode_preferences(values, media)
        if self.settings.num_labels:
            if media:
                raise RowError("it has images, and a head scores documents of text alone; leave the row out")
            return [self._scored_sample(values)]
        if self.kind in CHATS:
            samples = self._chat_encoding.with_variables(values).encode_messages(values, media=media)
            return [self._add_end(sample) for sample in samples]
        if self.kind == "text" and media and self.images is not None:
            return [self.images.text_sample(values, media)]
        if self.kind == "text":
            return [Sample(self._text_tokenizer.encode_text(require_string(require_key(values, "text"), "text")))]
        if self.kind == "input_ids":
            return [take_token_ids(values, self.tokenizer.size)]
        return [self._add_end(sample) for sample in self._encode_prompt_and_answer(values, media)]

    def _encode_prompt_and_answer(self, values: Mapping[str, Any], media: "RowMedia | None") -> list[Sample]:
        prompt = require_key(values, "prompt")
        completion = require_key(values, "completion")
        if isinstance(prompt, list) or isinstance(completion, list):
            prompt = checked_messages(prompt, "prompt", images=self.images is not None)
            answers = checked_messages(completion, "completion", images=self.images is not None)
            values = {**values, "messages": [*prompt, *answers]}
            chat_encoding = self._chat_encoding.with_variables(values)
            if preference := self.settings.preference:
                return [chat_encoding.encode_answer(values, len(prompt), media, with_prompt=preference == "orpo")]
            return chat_encoding.encode_messages(values, len(prompt), media)
        if media:
            raise RowError("images stand beside prompt and completion as strings; write these as lists of messages")
        prompt = require_string(prompt, "prompt")
        return [self._encode_prompt_and_text(prompt, require_string(completion, "completion"))]

    def _encode_prompt_and_text(self, prompt: str, completion: str) -> Sample:
        """No token lies across the end of the prompt. Targets are the tokens with a character of the completion, and
        all after it."""
        border = len(prompt)
        text_ids, spans = self._text_tokenizer.encode_with_spans(prompt + completion, [border])
        ids = self.tokenizer.surround(text_ids)
        opening = self.tokenizer.surrounding_ids[0]
        start = 0 if text_ids[: len(opening)].tolist() == opening else len(opening)
        is_target = np.ones(len(ids), dtype=bool)
        is_target[:start] = False
        is_target[start : start + len(text_ids)] = spans[:, 1] > border
        unseen = UnseenCounts(inside_tokens=count_borders_inside_tokens(spans, [border]))
        return Sample(ids, np.where(is_target, ids, NO_TARGET), unseen=unseen)

    @property
    def _reads_label(self) -> bool:
        return self.settings.num_labels > 0 or self.settings.preference == "kto"

    def _encode_preferences(self, values: Mapping[str, Any], media: "RowMedia | None") -> list[Sample]:
        """A pair's two documents stand end to end; for orpo `numbers` has where the chosen answer begins."""
        form = self.settings.preference
        if self.kind != PAIRS:
            answer = self._encode_answer(values, "completion", media)
            label = number_in_text(values.get("kto_tag") if values.get("label") is None else values["label"])
            if not isinstance(label, bool | int | float | np.bool_) or label not in (0, 1):
                raise RowError(
                    f"label is {short_repr(label)}; give true for an answer that is wanted, and false for one that is "
                    "not"
                )
            return [_labelled_answer(answer, float(label))]
        chosen, rejected = (self._encode_answer(values, key, media) for key in KEYS[PAIRS])
        if np.array_equal(chosen.ids, rejected.ids):
            raise RowError("chosen and rejected are the same tokens, which prefer nothing; leave the row out")
        if form == "kto":
            return [_labelled_answer(chosen, 1.0), _labelled_answer(rejected, 0.0)]
        numbers: tuple[float, ...] = ()
        assert chosen.labels is not None
        # orpo learns the prompt too, except for its images.
        if form == "orpo":
            numbers = (float(np.flatnonzero(chosen.labels != NO_TARGET)[0]),)
            chosen = _learnt_from(chosen, 0)
        return [join_samples(chosen, rejected)._replace(numbers=numbers)]

    def _encode_answer(self, values: Mapping[str, Any], key: str, media: "RowMedia | None") -> Sample:
        """Every token from the answer's first on is a target, as TRL has it, but for those that the row keeps out."""
        for name in ("prompt", key):
            check_not_empty(values.get(name), name)
        (sample,) = self._encode_prompt_and_answer({**values, "completion": values[key]}, media)
        assert sample.labels is not None
        targets = 1 + np.flatnonzero(sample.labels[1:] != NO_TARGET)  # the first token is never predicted
        if not len(targets):
            raise RowError(f"none of the tokens of {key} is a target", masked=True)
        return _learnt_from(self._add_end(sample), int(targets[0]))

    def _scored_sample(self, values: Mapping[str, Any]) -> Sample:
        if self.kind == PAIRS:
            numbers = (0.0,) if values.get("margin") is None else read_label(values, 1, "margin")
            documents = [self._scored_document(values, completion) for completion in KEYS[PAIRS]]
        else:
            numbers = read_label(values, self.settings.num_labels)
            documents = [self._scored_document(values)]
        stops = accumulate(map(len, documents))
        return Sample(np.concatenate(documents), numbers=numbers, stops=tuple(stops))

    def _scored_document(self, values: Mapping[str, Any], completion: str = "completion") -> npt.NDArray[np.int64]:
        if self.kind == "input_ids":
            return take_token_ids(values, self.tokenizer.size).ids
        keys: Sequence[str] = ("messages",) if self.kind in CHATS else KEYS[self.kind]
        if self.kind == PAIRS:
            keys = (completion,) if values.get("prompt") is None else ("prompt", completion)
        parts = {key: require_key(values, key) for key in keys}
        # A pair has both answers, so that neither is a text alone.
        answers = (values.get(key) for key in KEYS[PAIRS])
        if self.kind in CHATS or any(isinstance(value, list) for value in (*parts.values(), *answers)):
            messages = [message for key, value in parts.items() for message in checked_messages(value, key)]
            return self._chat_encoding.with_variables(values).encode_whole({**values, "messages": messages})
        text = "".join(require_string(value, key) for key, value in parts.items())
        return self._text_tokenizer.encode_text(text)

    @cached_property
    def _chat_encoding(self) -> "ChatEncoding":
        from longspan.corpus.rows.chats.chat import ChatEncoding

        return ChatEncoding(self.tokenizer, self.template, self.settings, self.images)

    def _values_and_media(self, row: Row) -> "tuple[Mapping[str, Any], RowMedia | None]":
        values = row.values
        if self.images is None:
            # A column "image" of such rows need not be an image.
            without_parts = self.kind in ("text", "input_ids")
            if (media_name := media_key(values, lists=without_parts)) is not None:
                raise RowError(
                    f"it has {media_name}, and the folder of the tokenizer ({self.tokenizer.folder}) has no image "
                    "processor; train a model that takes images, from its folder with preprocessor_config.json, or "
                    "leave them out"
                )
            return values, None
        from longspan.corpus.rows.media.row_media import extract_row_media

        bare_values, media = extract_row_media(row)
        if media and self.kind == "input_ids":
            raise RowError("images stand beside input_ids; give text or messages, whose placeholders are made here")
        return bare_values, media


def _learnt_from(answer: Sample, first: int) -> Sample:
    labels = np.where(np.arange(len(answer.ids)) >= first, answer.ids, NO_TARGET)
    for image in answer.images:
        labels[image.start : image.stop] = NO_TARGET
    labels[[place for place in answer.context if place < len(labels)]] = NO_TARGET
    return answer._replace(labels=labels)


def _labelled_answer(answer: Sample, label: float) -> Sample:
    """The end of an answer that is not wanted teaches no end; images would stand behind another row's prompt too."""
    assert answer.labels is not None
    first = int(np.argmax(answer.labels[1:] != NO_TARGET)) + 1
    if any(image.stop > first for image in answer.images):
        raise RowError(
            "images stand in its answer, and kto compares it with prompts of other rows; leave the row out"
        )
    return answer._replace(numbers=(label,), stops=(len(answer.ids),), ends=answer.ends if label else ())
