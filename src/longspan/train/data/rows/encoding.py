"""Rows of one kind to tokens and labels. It pickles, so that worker processes can do it.

How long a document may be is not its business: a sample is as long as its row.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass, field
from functools import cached_property
from typing import Any

from longspan.errors import DataError
from longspan.train.data.rows.chat import ChatEncoding
from longspan.train.data.rows.kinds import Kind, kind_of
from longspan.train.data.rows.messages import messages_of
from longspan.train.data.rows.plain import completion_sample, encode_texts, token_sample
from longspan.train.data.rows.sample import BadRow, Row, RowSettings, Sample
from longspan.train.data.rows.template import ChatTemplate
from longspan.train.data.rows.values import RowError, needed
from longspan.train.data.tokenizer import TextTokenizer
from longspan.train.document import NO_TARGET

__all__ = ["RowEncoding", "kind_of"]


@dataclass(frozen=True)
class RowEncoding:
    """How rows of a kind become samples, with this tokenizer.

    >>> encoding = RowEncoding("messages", load_tokenizer("model-folder"))
    >>> encoding.encode([Row("chat.jsonl, line 1", {"messages": […]})])

    Raises DataError for rows of messages where the tokenizer has no chat template.
    """

    kind: Kind
    tokenizer: TextTokenizer
    settings: RowSettings = field(default_factory=RowSettings)

    def __post_init__(self) -> None:
        if self.kind == "messages":
            _ = self._chat

    def encode(self, rows: Sequence[Row]) -> list[Sample | BadRow]:
        """What becomes of the rows, in their order; a conversation that is split gives a sample for each turn."""
        if self.kind == "text":
            return encode_texts(rows, self.tokenizer.parsing(self.settings.parse_special_tokens))
        return [result for i, row in enumerate(rows) for result in self._encoded(i, row)]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that decides the tokens of a row."""
        tokenizer = (self.tokenizer.digest, self.tokenizer.opening, self.tokenizer.closing)
        template: tuple[Any, ...] = ()
        if self.kind in ("messages", "prompt+completion"):
            with suppress(DataError):  # prompts that are strings need no template
                template = astuple(self._chat.template)
        decides = [self.kind, tokenizer, astuple(self.settings), template]
        return hashlib.sha256(json.dumps(decides).encode()).hexdigest()

    @property
    def template(self) -> ChatTemplate:
        """The tokenizer's chat template. Raises DataError where it has none."""
        return self._chat.template

    def _encoded(self, i: int, row: Row) -> list[Sample | BadRow]:
        try:
            samples = [sample._replace(row=i) for sample in self._samples(row.values)]
        except RowError as error:
            return [BadRow(row.where, str(error), error.masked)]
        return [_masked(row) if _has_no_target(sample) else sample for sample in samples]

    def _samples(self, values: Mapping[str, Any]) -> list[Sample]:
        if self.kind == "messages":
            return self._chat.samples(values)
        if self.kind == "input_ids":
            return [token_sample(values, self.tokenizer.size)]
        prompt, completion = needed(values, "prompt"), needed(values, "completion")
        if isinstance(prompt, list) or isinstance(completion, list):
            before = messages_of(prompt, "prompt")
            both = [*before, *messages_of(completion, "completion")]
            return self._chat.samples({**values, "messages": both}, first_target=len(before))
        return [completion_sample(values, self.tokenizer.parsing(self.settings.parse_special_tokens))]

    @cached_property
    def _chat(self) -> ChatEncoding:
        template = ChatTemplate.of(self.tokenizer, self.settings.date_string)
        return ChatEncoding(self.tokenizer, template, self.settings)


def _has_no_target(sample: Sample) -> bool:
    return sample.labels is not None and not (sample.labels[1:] != NO_TARGET).any()


def _masked(row: Row) -> BadRow:
    return BadRow(row.where, "none of its tokens is a target", masked=True)
