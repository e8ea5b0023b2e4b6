"""Rows of one kind to tokens and labels. It pickles, so that worker processes can do it.

How long a document may be is not its business: a sample is as long as its row.
"""

import hashlib
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import cached_property

from longspan.errors import DataError
from longspan.train.data.rows.kinds import Kind, kind_of
from longspan.train.data.rows.sample import BadRow, Row, RowSettings, Sample
from longspan.train.data.rows.values import RowError, string
from longspan.train.data.tokenizer import TextTokenizer

__all__ = ["RowEncoding", "kind_of"]


@dataclass(frozen=True)
class RowEncoding:
    """How rows of a kind become samples, with this tokenizer.

    >>> encoding = RowEncoding("text", load_tokenizer("model-folder"))
    >>> encoding.encode([Row("notes.jsonl, line 1", {"text": "a note"})])
    """

    kind: Kind
    tokenizer: TextTokenizer
    settings: RowSettings = field(default_factory=RowSettings)

    def __post_init__(self) -> None:
        if self.kind != "text":
            raise DataError(f"rows of {self.kind} are not read yet")

    def encode(self, rows: Sequence[Row]) -> list[Sample | BadRow]:
        """What becomes of the rows, in their order; a conversation that is split gives a sample for each turn."""
        return _encode_texts(rows, self.tokenizer.parsing(self.settings.parse_special_tokens))

    @cached_property
    def digest(self) -> str:
        """SHA-256 of everything that decides the tokens of a row."""
        tokenizer = (self.tokenizer.digest, self.tokenizer.opening, self.tokenizer.closing)
        return hashlib.sha256(json.dumps([self.kind, tokenizer, asdict(self.settings)]).encode()).hexdigest()


def _encode_texts(rows: Sequence[Row], tokenizer: TextTokenizer) -> list[Sample | BadRow]:
    texts, results = list[str](), list[BadRow | None]()
    for row in rows:
        try:
            texts.append(string(row.values.get("text"), "text"))
            results.append(None)
        except RowError as error:
            results.append(BadRow(row.where, str(error)))
    encoded = iter(tokenizer.encode(texts))
    return [Sample(next(encoded), row=i) if bad is None else bad for i, bad in enumerate(results)]
