"""The text of passkey retrieval, after Mohtashami & Jaggi 2023 (arXiv 2305.16300), and its pieces as token ids.

A document is its opening, filler, the key, filler, and the question with its answer, joined by spaces. Each piece is
tokenized behind the text that it follows, so that its ids are those of a whole text, leading spaces included.
"""

import hashlib
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from longspan.corpus.tokenizer import TextTokenizer
from longspan.errors import DataError

OPENING = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. "
    "I will quiz you about the important information there."
)
SENTENCES = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")
FILLER = " ".join(SENTENCES)
KEY = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key? The pass key is"

Ids = npt.NDArray[np.int64]


def key_of(seed: int, length: int, depth: float, sample: int) -> int:
    """The key of a document, of five digits: a function of these numbers alone, on every machine."""
    digest = hashlib.sha256(f"{seed} {length} {depth!r} {sample}".encode()).digest()
    return 10_000 + int.from_bytes(digest[:8]) % 90_000


def passkey_text(key: int, before: int, after: int) -> str:
    """The text of a document with so many sentences of filler before and after the key.

    >>> passkey_text(71432, before=0, after=1)[-64:]
    'The grass is green. What is the pass key? The pass key is 71432'
    """
    filler = [SENTENCES[i % len(SENTENCES)] for i in range(before + after)]
    parts = (OPENING, *filler[:before], KEY.format(key=key), *filler[before:], QUESTION, str(key))
    return " ".join(parts)


class Pieces(NamedTuple):
    """The ids of what documents of one tokenizer share, and the tokenizer for what they do not."""

    engine: Tokenizer
    opening: Ids  # with what the tokenizer puts before a text
    filler: Ids  # of all sentences, once
    sentence_ends: tuple[int, ...]  # where sentences end in them
    question: Ids

    @classmethod
    def of(cls, tokenizer: Any) -> "Pieces":
        """The pieces of a tokenizer: a TextTokenizer, a fast one of transformers, or one of tokenizers.

        Raises DataError for another object, and for a tokenizer that writes different keys with the same ids.
        """
        engine = _engine(tokenizer)
        first = TextTokenizer(engine, None, "").around[0]
        filler, stops = _ids_behind(engine, FILLER, FILLER)
        ends = np.cumsum([len(sentence) + 1 for sentence in SENTENCES])
        pieces = cls(
            engine=engine,
            opening=np.concatenate([np.array(first, dtype=np.int64), _ids_behind(engine, "", OPENING)[0]]),
            filler=filler,
            sentence_ends=tuple(np.searchsorted(stops, ends, side="right").tolist()),
            question=_ids_behind(engine, FILLER, QUESTION)[0],
        )
        if np.array_equal(pieces.answer(12345), pieces.answer(67890)):
            raise DataError(
                "the tokenizer writes the keys 12345 and 67890 with the same ids, so that no model could tell them "
                "apart; passkey retrieval needs a tokenizer that knows digits"
            )
        return pieces

    def key(self, key: int) -> Ids:
        """The ids of the sentences that tell the key."""
        return _ids_behind(self.engine, FILLER, KEY.format(key=key))[0]

    def answer(self, key: int) -> Ids:
        """The ids of the key behind the question: with the space before it, where that is a token of its own."""
        return _ids_behind(self.engine, QUESTION, str(key))[0]


def _engine(tokenizer: Any) -> Tokenizer:
    engine = getattr(tokenizer, "engine", None) or getattr(tokenizer, "backend_tokenizer", None) or tokenizer
    if not isinstance(engine, Tokenizer):
        raise DataError(
            f"{type(tokenizer).__name__} is no tokenizer whose tokens say where they stand in a text; give a fast one "
            "of transformers, or load_tokenizer(folder)"
        )
    engine = Tokenizer.from_str(engine.to_str())  # a copy: the caller's may cut or pad texts
    engine.no_truncation()
    engine.no_padding()
    return engine


def _ids_behind(engine: Tokenizer, context: str, piece: str) -> tuple[Ids, Ids]:
    """The ids of a piece of text behind another, and where each token ends in it, in characters (1: the space)."""
    text = f"{context} {piece}" if context else piece
    encoding = engine.encode(text, add_special_tokens=False)
    ids, stops = (
        np.array(encoding.ids, dtype=np.int64),
        np.array([stop for _, stop in encoding.offsets], dtype=np.int64),
    )
    behind = stops > len(context)
    return ids[behind], stops[behind] - len(context)
