"""Conversations to tokens, by the tokenizer's own chat template; what the assistant says is a target.

The rendering is tokenized once, and nothing is put around it: the template writes the beginning of text where the model
wants it. A token is a target where a character of it is said by the assistant. What images show is not read: in the
rendering each, as each video, is a placeholder, which becomes as many as it takes before the text is tokenized.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt

from longspan.corpus.rows.infer_turns import Spans, assistant_spans, marked_spans
from longspan.corpus.rows.messages import learnt_of, messages_of, tools_of
from longspan.corpus.rows.named_media import check_counts, kinds_of_parts
from longspan.corpus.rows.placeholders import RowImages
from longspan.corpus.rows.row_media import NOTHING_SHOWN, RowMedia
from longspan.corpus.rows.sample import RowError, RowSettings, Sample, check_strings, needed
from longspan.corpus.rows.template import SOME_TOOL, ChatTemplate, Message
from longspan.corpus.rows.turn_tokens import TurnTokens, turn_tokens
from longspan.corpus.tokenizer import TextTokenizer
from longspan.data.document import NO_TARGET

Labels = npt.NDArray[np.int64]


@dataclass(frozen=True)
class ChatEncoding:
    """How conversations become samples with this tokenizer and its template."""

    tokenizer: TextTokenizer
    template: ChatTemplate
    settings: RowSettings = field(default_factory=RowSettings)
    images: RowImages | None = None

    def samples(self, values: Any, first_target: int = 0, media: RowMedia = NOTHING_SHOWN) -> list[Sample]:
        """The samples of a row's messages, tools and `media`; messages before `first_target` are no targets.

        Raises RowError for messages that are none, or that the template or the search for turns refuses.
        """
        messages = messages_of(needed(values, "messages"), images=self.images is not None)
        tools = tools_of(values.get("tools"))
        check_counts(kinds_of_parts(messages), media, "its messages")
        if not self.settings.parse_special_tokens:
            pattern = self._turn_tokens(tools).between
            check_strings(messages, "messages", pattern)
            check_strings(tools, "tools", pattern)
        else:
            check_strings([messages, tools], "the row", None)
        return list(self._samples(messages, tools, learnt_of(messages, first_target), media))

    def _samples(
        self, messages: Sequence[Message], tools: Sequence[Any] | None, said: Sequence[int], media: RowMedia
    ) -> Iterator[Sample]:
        if self.settings.turns == "together":
            yield self._sample(messages, tools, said, media)
            return
        for i in said:
            begun = messages[: i + 1]
            kinds = kinds_of_parts(begun)
            yield self._sample(begun, tools, [i], media.first(kinds.count("image"), kinds.count("video")))

    def _sample(
        self,
        messages: Sequence[Message],
        tools: Sequence[Any] | None,
        said: Collection[int],
        media: RowMedia,
    ) -> Sample:
        marks = self.template.marked(tools)
        rendered = self.template.render(messages, tools, marks=marks)
        if not self.settings.parse_special_tokens:
            self._check_tokens(rendered.text, messages, tools)
        if marks:
            found = Spans(marked_spans(messages, rendered, self.template, tools, said))
        else:
            tokens = self._turn_tokens(tools)
            found = assistant_spans(messages, rendered.text, self.template, tools, tokens, said)
        if not media or self.images is None:
            ids, labels = self._tokens(rendered.text, found.spans)
            return Sample(ids, labels, unseen=found.unseen)
        expanded = self.images.expand(rendered.text, media, found.spans)
        ids, labels = self._tokens(expanded.text, expanded.spans)
        return self.images.with_images(Sample(ids, labels, unseen=found.unseen), expanded)

    def _tokens(self, text: str, spans: Sequence[tuple[int, int]]) -> tuple[Labels, Labels]:
        """The ids of a rendering (n,), and its labels: what stands in spans."""
        encoding = self.tokenizer.parsing(True).engine.encode(text, add_special_tokens=False)
        ids = np.array(encoding.ids, dtype=np.int64)
        return ids, np.where(in_spans(encoding.offsets, spans), ids, NO_TARGET)

    def _check_tokens(self, text: str, messages: Sequence[Message], tools: Sequence[Any] | None) -> None:
        """Raise RowError where a rendering has other special tokens than one of the same chat with harmless texts.

        Texts can make a token together that none of them holds.
        """
        tokens = self._turn_tokens(tools)
        if tokens.between is None or tokens.is_harmless([messages, tools]):
            return
        harmless = self.template.render(*tokens.harmless([messages, tools])).text
        here, there = tokens.between.findall(text), tokens.between.findall(harmless)
        if here != there:
            counts = {name: (here.count(name), there.count(name)) for name in sorted({*here, *there})}
            others = ", ".join(f"{a} {name} in place of {b}" for name, (a, b) in counts.items() if a != b)
            raise RowError(
                "what its texts say changes the special tokens of the chat, such as those that end turns: it has "
                f"{others or 'them in another order'}; leave out the characters in its texts that make them together, "
                "or let these be special tokens with data.parse_special_tokens = true"
            )

    def _turn_tokens(self, tools: Sequence[Any] | None) -> TurnTokens:
        return self._with_tools if tools else self._plain

    @cached_property
    def _plain(self) -> TurnTokens:
        return turn_tokens(self.template, None, self.tokenizer.engine)

    @cached_property
    def _with_tools(self) -> TurnTokens:
        try:  # a template may put tools where this conversation has no place for them
            return turn_tokens(self.template, SOME_TOOL, self.tokenizer.engine)
        except RowError:
            return self._plain


def in_spans(offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]]) -> npt.NDArray[np.bool_]:
    """Which tokens (n,) have a character in a span; offsets and spans (start, stop) in characters."""
    inside = np.zeros(len(offsets), dtype=bool)
    begins, ends = np.array(offsets, dtype=np.int64).reshape(-1, 2).T
    for start, stop in spans:
        inside |= (begins < stop) & (ends > start)
    return inside
