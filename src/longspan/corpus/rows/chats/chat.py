"""Encodes conversations by the tokenizer's chat template; the texts of the assistant are targets.

Nothing is put around the rendering, and it is tokenized apart at each learnt answer. A token is a target if it has a
character of the assistant's, by the template's marks or by `infer_turns.py`. In place of an image stand placeholders.
"""

import json
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import numpy as np
import numpy.typing as npt

from longspan.corpus.rows.chats.infer_turns import Conversation, TurnSpans, find_assistant_spans, marked_spans
from longspan.corpus.rows.chats.turn_tokens import TurnTokens, find_turn_tokens
from longspan.corpus.rows.media.placeholders import RowImages
from longspan.corpus.rows.media.row_media import NOTHING_SHOWN, RowMedia, check_media_counts, kinds_of_parts
from longspan.corpus.rows.messages import checked_messages, context_messages, learnt_messages, read_tools
from longspan.corpus.rows.sample import RowSettings, Sample, count_borders_inside_tokens
from longspan.corpus.rows.template import SOME_TOOL, ChatTemplate, Message, read_variables
from longspan.corpus.rows.values import RowError, check_strings, require_key
from longspan.corpus.tokenizer import TextTokenizer
from longspan.data.document import NO_TARGET
from longspan.layout import Integers

# Each value of chat_template_kwargs has an encoding.
_KEPT_ENCODINGS = 64


@dataclass(frozen=True)
class ChatEncoding:
    """Makes samples of conversations with this tokenizer and its template."""

    tokenizer: TextTokenizer
    template: ChatTemplate
    settings: RowSettings = field(default_factory=RowSettings)
    images: RowImages | None = None
    _encodings: "dict[str, ChatEncoding]" = field(
        default_factory=dict[str, "ChatEncoding"], init=False, repr=False, compare=False
    )

    def with_variables(self, values: Mapping[str, Any]) -> "ChatEncoding":
        """Return the encoding with a row's chat_template_kwargs; the last _KEPT_ENCODINGS that were made are kept."""
        encodings = self._encodings
        variables = json.dumps(read_variables(values.get("chat_template_kwargs")), sort_keys=True, default=str)
        if variables not in encodings:
            if len(encodings) >= _KEPT_ENCODINGS:
                del encodings[next(iter(encodings))]
            encodings[variables] = replace(self, template=replace(self.template, variables=variables))
        return encodings[variables]

    def encode_messages(self, values: Any, first_target: int = 0, media: RowMedia | None = None) -> list[Sample]:
        """Encode a row's messages, tools and `media`; messages before number `first_target` are no targets.

        Raises RowError for malformed messages, and for those that the template or the search for turns refuses.
        """
        media = media or NOTHING_SHOWN
        messages, tools = self._read_messages(values, media)
        return list(self._encode_turns(messages, tools, learnt_messages(messages, first_target), media))

    def encode_answer(self, values: Any, first_target: int, media: RowMedia | None, *, with_prompt: bool) -> Sample:
        """Encode a prompt of `first_target` messages and one answer of a preference, with what its row keeps out of the
        targets as `context`; of the prompt only `with_prompt`. RowError as `encode_messages`.
        """
        media = media or NOTHING_SHOWN
        messages, tools = self._read_messages(values, media)
        learnt = learnt_messages(messages, first_target)
        context = context_messages(messages, 0 if with_prompt else first_target)
        return self._encode_sample(messages, tools, learnt, media, context=context)

    def encode_whole(self, values: Any) -> Integers:
        """Encode a row's messages and tools without targets; RowError as `encode_messages`."""
        messages, tools = self._read_messages(values, NOTHING_SHOWN)
        text = self.template.render(messages, tools).text
        if not self.settings.parse_special_tokens:
            self._check_special_tokens(text, messages, tools)
        return self.tokenizer.set_parsing(True).encode_with_spans(text)[0]

    def _read_messages(self, values: Any, media: RowMedia) -> tuple[list[Message], Sequence[Any] | None]:
        tools = read_tools(values.get("tools"))
        messages = checked_messages(require_key(values, "messages"), images=self.images is not None)
        messages = self.template.fit_arguments(messages, tools)
        check_media_counts(kinds_of_parts(messages), media, "its messages")
        if not self.settings.parse_special_tokens:  # the rendering has special tokens, so its texts must have none
            pattern = self._turn_tokens(tools).any_token
            check_strings(messages, "messages", pattern)
            check_strings(tools, "tools", pattern)
            check_strings(values.get("chat_template_kwargs"), "chat_template_kwargs", pattern)
        else:
            check_strings([messages, tools], "the row", None)  # only for lone surrogates
        return messages, tools

    def _encode_turns(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, learnt: Sequence[int], media: RowMedia
    ) -> Iterator[Sample]:
        """One sample has all learnt turns or, with turns "split", each has one."""
        if self.settings.turns == "together":
            yield self._encode_sample(messages, tools, learnt, media)
            return
        first = 0  # the first message behind the learnt turn before
        for turn in learnt:
            beginning = messages[: turn + 1]
            kinds = kinds_of_parts(beginning)
            first_media = RowMedia(media.images[: kinds.count("image")], media.videos[: kinds.count("video")])
            yield self._encode_sample(beginning, tools, [turn], first_media, first)
            first = turn + 1

    def _encode_sample(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        learnt: Collection[int],
        media: RowMedia,
        first: int = 0,
        context: Collection[int] = (),
    ) -> Sample:
        """Messages before number `first` are in another sample too, which counts what is not rendered of them."""
        marks = self.template.has_marks(tools)
        rendered = self.template.render(messages, tools, marks=marks)
        if not self.settings.parse_special_tokens:
            self._check_special_tokens(rendered.text, messages, tools)
        conversation = Conversation(messages, tools, self.template, rendered.text)
        if marks:
            find_spans = partial(marked_spans, conversation, rendered.marks)
        else:
            find_spans = partial(find_assistant_spans, conversation, self._turn_tokens(tools))
        spans = find_spans(learnt, first)
        context_spans = find_spans(context, first).spans if context else ()
        if not media or self.images is None:
            sample = self._tokenize_rendering(rendered.text, spans, context_spans, tools)
            return self._add_end_of_chat(sample, messages, learnt)
        expanded = self.images.expand_placeholders(rendered.text, media, (*spans.spans, *context_spans))
        spans = spans._replace(spans=expanded.spans[: len(spans.spans)])
        context_spans = expanded.spans[len(spans.spans) :]
        sample = self._tokenize_rendering(expanded.text, spans, context_spans, tools)
        return self.images.add_images(self._add_end_of_chat(sample, messages, learnt), expanded)

    def _add_end_of_chat(self, sample: Sample, messages: Sequence[Message], learnt: Collection[int]) -> Sample:
        """Blanks that the template writes behind the answer are dropped. Calls of tools end at other tokens."""
        end = self.settings.end_of_chat
        engine = self.tokenizer.engine
        is_answer = len(messages) - 1 in learnt and not messages[-1].get("tool_calls")
        if not end or not is_answer or sample.labels is None or (sample.labels == NO_TARGET).all():
            return sample
        ends = self.template.ends
        added = engine.get_added_tokens_decoder()
        if (end_id := engine.token_to_id(end)) is None:
            advice = f"generation stops at {' or '.join(sorted(ends)) or 'no token that its folder names'}"
            raise RowError(f"data.end_of_chat_token is {end!r}, which is no token of the tokenizer; {advice}")
        stop = int(np.flatnonzero(sample.labels != NO_TARGET)[-1]) + 1  # blanks of the template may follow
        last_id = int(sample.ids[stop - 1])
        text_behind = engine.decode(sample.ids[stop:].tolist(), skip_special_tokens=False).strip()
        has_end = engine.id_to_token(last_id) in ends or (last_id in added and added[last_id].special)
        if text_behind or has_end:
            written = text_behind or engine.id_to_token(last_id)
            raise RowError(
                f"data.end_of_chat_token is {end!r}, and the chat template writes {written!r} there; leave it out"
            )
        ids, labels = (np.append(values[:stop], end_id) for values in (sample.ids, sample.labels))
        return sample._replace(ids=ids, labels=labels)

    def _tokenize_rendering(
        self, text: str, spans: TurnSpans, context_spans: Sequence[tuple[int, int]], tools: Sequence[Any] | None
    ) -> Sample:
        """A prompt is tokenized by itself, as at inference."""
        starts = [start for start, _ in (*spans.spans, *context_spans)]
        prompts: tuple[str, ...] = ()
        with suppress(RowError):  # a template with marks need not write a plain conversation
            prompts = self._turn_tokens(tools).prompts
        prompt_ends = [_find_prompt_end(text, start, prompts) for start in starts]
        borders = sorted({end for end in prompt_ends if end is not None})
        ids, offsets = self.tokenizer.set_parsing(True).encode_with_spans(text, borders)
        is_target = _lie_in_spans(offsets, spans.spans)
        answer_starts = (start if end is None else end for start, end in zip(starts, prompt_ends, strict=True))
        unseen = spans.unseen._replace(inside_tokens=count_borders_inside_tokens(offsets, answer_starts))
        context = tuple(np.flatnonzero(_lie_in_spans(offsets, context_spans)).tolist())
        return Sample(ids, np.where(is_target, ids, NO_TARGET), unseen=unseen, context=context)

    def _check_special_tokens(self, text: str, messages: Sequence[Message], tools: Sequence[Any] | None) -> None:
        """Several texts that follow one another can form a token together, so the whole rendering is compared."""
        tokens = self._turn_tokens(tools)
        if tokens.is_harmless([messages, tools]):
            return
        harmless = self.template.render(*tokens.make_harmless([messages, tools])).text
        names = tokens.any_token.findall(text)
        harmless_names = tokens.any_token.findall(harmless)
        if names != harmless_names:
            counts = {
                name: (names.count(name), harmless_names.count(name)) for name in sorted({*names, *harmless_names})
            }
            changes = ", ".join(
                f"{count} {name} in place of {harmless_count}"
                for name, (count, harmless_count) in counts.items()
                if count != harmless_count
            )
            raise RowError(
                "what its texts say changes the special tokens of the chat, such as those that end turns: it has "
                f"{changes or 'them in another order'}; leave out the characters in its texts that make them together, "
                "or let these be special tokens with data.parse_special_tokens = true"
            )

    def _turn_tokens(self, tools: Sequence[Any] | None) -> TurnTokens:
        return self._turn_tokens_with_tools if tools else self._turn_tokens_without_tools

    @cached_property
    def _turn_tokens_without_tools(self) -> TurnTokens:
        return find_turn_tokens(self.template, None, self.tokenizer.engine)

    @cached_property
    def _turn_tokens_with_tools(self) -> TurnTokens:
        """A template that does not write a plain chat with tools has those without tools."""
        try:
            return find_turn_tokens(self.template, SOME_TOOL, self.tokenizer.engine)
        except RowError:
            return self._turn_tokens_without_tools


def _lie_in_spans(offsets: Integers, spans: Sequence[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    begins, ends = offsets.T
    is_target = np.zeros(len(begins), dtype=bool)
    for start, stop in spans:  # a token is one if it has a character in a span
        is_target |= (begins < stop) & (ends > start)
    return is_target


def _find_prompt_end(text: str, start: int, prompts: tuple[str, ...]) -> int | None:
    """The prompt need not end at `start`: a template's mark may begin inside it, or a blank behind it."""
    if text.endswith(prompts, 0, start):
        return start
    for prompt in prompts:
        at = text.rfind(prompt, max(0, start - len(prompt) - 1), start + len(prompt))
        if at >= 0 and not text[at + len(prompt) : start].strip():
            return at + len(prompt)
    return None
