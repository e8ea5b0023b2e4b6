"""Documents of passkey retrieval, made when they are read, and what an evaluation measures of them.

Whether a document's key is retrieved is whether every token of its answer is the likeliest one after the true tokens
before it. That is what greedy decoding of the answer would show: its first token is the same choice, and while its
tokens are those of the answer, so are the tokens that the next one follows.
"""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from longspan.config.data_sections import DEPTHS, check_passkey
from longspan.corpus.tokenizer import TextTokenizer
from longspan.errors import DataError
from longspan.evaluation.metrics import DocumentMetric, Mean, TargetRows
from longspan.evaluation.result import PasskeyGrid
from longspan.layout import Integers

PASSKEY_OPENING = (
    "There is an important info hidden inside a lot of irrelevant text. Find it and memorize it. "
    "I will quiz you about the important information there."
)
SENTENCES = ("The grass is green.", "The sky is blue.", "The sun is yellow.", "Here we go.", "There and back again.")
FILLER = " ".join(SENTENCES)
KEY = "The pass key is {key}. Remember it. {key} is the pass key."
QUESTION = "What is the pass key? The pass key is"


def passkey_number(seed: int, length: int, depth: float, sample: int) -> int:
    """Return the key of a document, of five digits: a function of only these numbers, the same on every machine."""
    digest = hashlib.sha256(f"{seed} {length} {depth!r} {sample}".encode()).digest()
    return 10_000 + int.from_bytes(digest[:8]) % 90_000


def passkey_text(key: int, before: int, after: int) -> str:
    """Write the text of a document with `before` sentences of filler before the key and `after` sentences behind it.

    >>> passkey_text(71432, before=0, after=1)[-64:]
    'The grass is green. What is the pass key? The pass key is 71432'
    """
    filler = [SENTENCES[i % len(SENTENCES)] for i in range(before + after)]
    parts = (PASSKEY_OPENING, *filler[:before], KEY.format(key=key), *filler[before:], QUESTION, str(key))
    return " ".join(parts)


class TextPieces(NamedTuple):
    """The ids of what documents of one tokenizer share, and the tokenizer for what they do not."""

    engine: Tokenizer
    opening: Integers  # with what the tokenizer puts before a text
    filler: Integers  # of all sentences, once
    sentence_ends: tuple[int, ...]  # the tokens of `filler` up to the end of each sentence
    question: Integers

    @classmethod
    def of(cls, tokenizer: Any) -> "TextPieces":
        """Encode the pieces by a TextTokenizer, a fast tokenizer of transformers, or one of the library tokenizers.

        Raises DataError for another object, and for a tokenizer that writes different keys with the same ids.
        """
        engine = _find_engine(tokenizer)
        ids_before_text = TextTokenizer(engine, None, "").surrounding_ids[0]
        filler, stops = _encode_after_context(engine, FILLER, FILLER)
        ends = np.cumsum([len(sentence) + 1 for sentence in SENTENCES])  # in characters, each with the space before it
        pieces = cls(
            engine=engine,
            opening=np.concatenate(
                [np.array(ids_before_text, dtype=np.int64), _encode_after_context(engine, "", PASSKEY_OPENING)[0]]
            ),
            filler=filler,
            sentence_ends=tuple(np.searchsorted(stops, ends, side="right").tolist()),
            question=_encode_after_context(engine, FILLER, QUESTION)[0],
        )
        if np.array_equal(pieces.encode_answer(12345), pieces.encode_answer(67890)):
            raise DataError(
                "the tokenizer writes the keys 12345 and 67890 with the same ids, so that no model could tell them "
                "apart; passkey retrieval needs a tokenizer that knows digits"
            )
        return pieces

    def encode_key(self, key: int) -> Integers:
        """Encode the sentences with the key."""
        return _encode_after_context(self.engine, FILLER, KEY.format(key=key))[0]

    def encode_answer(self, key: int) -> Integers:
        """Encode the key behind the question: with the space before it, where that is a token of its own."""
        return _encode_after_context(self.engine, QUESTION, str(key))[0]


def _find_engine(tokenizer: Any) -> Tokenizer:
    """Return a copy of the tokenizers library's object in a tokenizer, set to neither cut nor pad texts."""
    # Attributes of a TextTokenizer and of a fast tokenizer of transformers.
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


def _encode_after_context(engine: Tokenizer, context: str, piece: str) -> tuple[Integers, Integers]:
    """Encode a piece of text as it reads behind a context, which may change its first token.

    Returns the ids (n,), and where each token ends (n,), in characters from the end of the context; the first of these
    characters is the space between context and piece.
    """
    text = f"{context} {piece}" if context else piece
    encoding = engine.encode(text, add_special_tokens=False)
    ids, stops = (
        np.array(encoding.ids, dtype=np.int64),
        np.array([stop for _, stop in encoding.offsets], dtype=np.int64),
    )
    behind = stops > len(context)
    return ids[behind], stops[behind] - len(context)


@dataclass(frozen=True)
class PasskeyDocument:
    """A document of `length` tokens, indexed by an array of positions; its last tokens are the answer's.

    `key_at` is how many tokens of filler stand before the key, `filler` how many there are.
    """

    pieces: TextPieces
    key: int
    length: int
    depth: float
    filler: int
    key_at: int
    answer: Integers

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, positions: Any) -> Integers:
        """Return the ids at these positions; the whole document is made for them."""
        return self.all_ids()[positions]

    @property
    def name(self) -> str:
        """The key, its depth and the length, in words."""
        return f"passkey {self.key} at depth {self.depth:g} of {self.length} tokens"

    @property
    def answer_start(self) -> int:
        """The position of the answer's first token."""
        return self.length - len(self.answer)

    def all_ids(self) -> Integers:
        """Return all token ids."""
        filler = np.resize(self.pieces.filler, self.filler)  # repeated up to so many tokens
        key, pieces = self.pieces.encode_key(self.key), self.pieces
        parts = (pieces.opening, filler[: self.key_at], key, filler[self.key_at :], pieces.question, self.answer)
        return np.concatenate(parts)


@dataclass(frozen=True)
class PasskeyDocuments(Sequence[PasskeyDocument]):
    """Documents of every length, depth and sample, in this order; made by `passkey_documents`."""

    documents: tuple[PasskeyDocument, ...]
    asked_lengths: tuple[int, ...]
    depths: tuple[float, ...]
    samples: int

    @property
    def items(self) -> tuple[()]:
        """An empty tuple: the documents have no images, the items of other documents."""
        return ()

    def __len__(self) -> int:
        return len(self.documents)

    def __getitem__(self, index: int) -> PasskeyDocument:  # pyright: ignore[reportIncompatibleMethodOverride]
        return self.documents[index]

    def __iter__(self) -> Iterator[PasskeyDocument]:
        return iter(self.documents)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Tokens of each document."""
        return tuple(document.length for document in self.documents)

    def origin(self, document: int) -> str:
        """Return the name of a document, in place of the file that other documents come from."""
        return self.documents[document].name

    @property
    def origins(self) -> tuple[str, ...]:
        """The name of each document, in place of the file that other documents come from."""
        return tuple(document.name for document in self.documents)

    @property
    def metrics(self) -> Mapping[str, DocumentMetric]:
        """Return what `evaluate` measures of each document's answer: wrongly predicted tokens, and losses of all."""
        starts = torch.tensor([document.answer_start for document in self.documents])

        def is_in_answer(rows: TargetRows) -> Tensor:
            """Return which rows (n,) predict a token of their document's answer: the token after them is in it."""
            return rows.positions + 1 >= starts.to(rows.positions.device)[rows.documents]

        def wrong_tokens(rows: TargetRows) -> tuple[Tensor, Tensor]:
            """Return which rows (n,) predict another token than their target, and which of them count."""
            return rows.logits.argmax(-1) != rows.targets, is_in_answer(rows)

        def answer_loss(rows: TargetRows) -> tuple[Tensor, Tensor]:
            """Return the losses of rows (n,), and which of them count."""
            return rows.losses, is_in_answer(rows)

        return {"passkey_wrong": wrong_tokens, "passkey_loss": answer_loss}

    def figures(self, measured: Mapping[str, Sequence[Mean]], *, step: int, cp: int) -> Mapping[str, PasskeyGrid]:
        """Return the field `passkey` of an evaluation's result: the grid of retrieved keys."""
        return {"passkey": self.make_grid(measured, step=step, cp=cp)}

    def make_grid(self, measured: Mapping[str, Sequence[Mean]], *, step: int, cp: int) -> PasskeyGrid:
        """Make the grid of retrieved keys and mean losses for each length and depth.

        `measured` has the sum and count of each document by the names of `metrics`. A key is retrieved if every token
        of its answer was counted and none was wrong.
        """
        shape = len(self.asked_lengths), len(self.depths), self.samples
        wrong, losses = (measured[name] for name in ("passkey_wrong", "passkey_loss"))
        pairs = zip(wrong, self.documents, strict=True)
        is_retrieved = [mean.sum == 0 and mean.count == len(document.answer) for mean, document in pairs]
        retrieved = np.array(is_retrieved).reshape(shape).sum(-1)  # (lengths, depths)
        sums = np.array([mean.sum for mean in losses]).reshape(shape).sum(-1)
        counts = np.array([mean.count for mean in losses]).reshape(shape).sum(-1)
        return PasskeyGrid(
            lengths=self.asked_lengths,
            depths=self.depths,
            samples=self.samples,
            retrieved=tuple(map(tuple, retrieved.tolist())),
            losses=tuple(map(tuple, (sums / counts).tolist())),
            step=step,
            cp=cp,
        )


def passkey_documents(
    tokenizer: Any,
    lengths: Sequence[int],
    depths: Sequence[float] = DEPTHS,
    samples: int = 4,
    seed: int = 0,
) -> PasskeyDocuments:
    """Make documents that hide a number at each depth (0: the beginning, 1: the end) of filler text, and ask for it.

    >>> documents = passkey_documents(AutoTokenizer.from_pretrained(folder), lengths=(1024, 16384), depths=(0, 0.5, 1))
    >>> result = evaluate(model, documents, PlanChoice.fixed(4), world)
    >>> print(result.passkey.table())

    A document has exactly its length in tokens, and the same arguments give the same documents, on every rank.
    `tokenizer` is a TextTokenizer, or a fast one of transformers; what it puts before a text (the beginning of text)
    stands before a document, and nothing behind. Raises DataError for lengths, depths or samples that cannot be.
    """
    lengths, depths = tuple(dict.fromkeys(map(int, lengths))), tuple(dict.fromkeys(map(float, depths)))
    check_passkey(lengths, depths, samples)
    pieces = TextPieces.of(tokenizer)
    documents = tuple(
        _make_document(pieces, length, depth, passkey_number(seed, length, depth, sample))
        for length in lengths
        for depth in depths
        for sample in range(samples)
    )
    return PasskeyDocuments(documents, lengths, depths, samples)


def _make_document(pieces: TextPieces, length: int, depth: float, key: int) -> PasskeyDocument:
    """Make a document with its key at a depth. Raises DataError for a length without room for its fixed parts."""
    answer = pieces.encode_answer(key)
    fixed = sum(map(len, (pieces.opening, pieces.encode_key(key), pieces.question, answer)))
    if length < fixed:
        raise DataError(
            f"a passkey document of {length} tokens has no room for its opening, its key and its question, {fixed} "
            f"tokens of this tokenizer without any filler; use lengths above {fixed}"
        )
    filler = length - fixed
    return PasskeyDocument(
        pieces, key, length, depth, filler, _nearest_sentence_end(pieces, depth * filler, filler), answer
    )


def _nearest_sentence_end(pieces: TextPieces, position: float, filler: int) -> int:
    """Return the place between two sentences that is nearest to a position in `filler` tokens of filler.

    Places and positions are in tokens; the beginning and the end of the filler are such places too.
    """
    # The filler repeats all sentences; here the repetition begins in which the position lies.
    start = int(position) // len(pieces.filler) * len(pieces.filler)
    ends = [end for end in (start, *(start + end for end in pieces.sentence_ends), filler) if end <= filler]
    return min(ends, key=lambda end: abs(end - position))
