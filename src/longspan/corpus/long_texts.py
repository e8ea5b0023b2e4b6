"""Encodes long texts in bounded memory: in overlapping pieces, which are joined where both have the same tokens.

The tokenizers library takes some 150 bytes for each character of a text. Two pieces are joined inside their overlap,
away from its ends, if both have the same tokens at the same characters around the place, and if before and after it
runs of letters, spaces and other characters end inside the overlap.

By the second condition both pieces contain everything that a pre-tokenizer's pattern looks ahead at. By the first,
every two neighbouring tokens are neighbours in a piece, and byte-pair encoding gives only one sequence with this
property. So the ids are those of the whole text. Other models than byte-pair encoding are not encoded in pieces.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import numpy as np
from tokenizers import Tokenizer, models

from longspan.errors import DataError
from longspan.layout import Integers

# characters
PIECE = 1 << 18
OVERLAP = 1 << 13
LARGEST = 1 << 23
# Each side has this many runs of characters of a kind; the first and the last may continue outside.
_RUNS = 3


class LongTextError(DataError):
    """What is wrong with a text that cannot be encoded in bounded memory, in one line without its place."""


class _Piece(NamedTuple):
    """The tokens of text[begin:end], and the characters of the text that each one covers."""

    begin: int
    end: int
    ids: Integers  # (n,)
    spans: Integers  # (n, 2)


class _Run(NamedTuple):
    """The tokens of a piece, from `first` to before `stop`, that are taken for the whole text."""

    piece: _Piece
    first: int
    stop: int


def can_encode_in_pieces(engine: Tokenizer) -> bool:
    """Return whether texts can be encoded in pieces: the model is byte-pair encoding without dropout."""
    return isinstance(engine.model, models.BPE) and not engine.model.dropout


def encode_with_spans(
    engine: Tokenizer, text: str, *, piece: int = PIECE, overlap: int = OVERLAP
) -> tuple[Integers, Integers]:
    """Encode a text in pieces of `piece` characters; return its ids (n,), and the characters (n, 2) of each token.

    The tokens that a tokenizer puts around a text are left out.

    Where two pieces cannot be joined, their overlap is doubled until it is the whole left piece; after that the left
    piece is doubled. Raises LongTextError for a piece of more than `LARGEST` characters.
    """
    joined = list[_Run]()
    left_piece = _encode_piece(engine, text, 0, piece)
    first = 0  # the first token of `left_piece` that is not yet in `joined`
    while left_piece.end < len(text):
        for right_piece in _next_pieces(engine, text, left_piece, piece, overlap):
            if joint := _find_joint(text, left_piece, right_piece, first):
                joined.append(_Run(left_piece, first, joint[0]))
                left_piece = right_piece
                first = joint[1]
                break
        else:  # no overlap has a joint
            left_piece, first = _lengthen_piece(engine, text, left_piece, joined)
    runs = [*joined, _Run(left_piece, first, len(left_piece.ids))]
    ids, spans = ([getattr(run.piece, name)[run.first : run.stop] for run in runs] for name in ("ids", "spans"))
    return np.concatenate(ids), np.concatenate(spans)


def _lengthen_piece(engine: Tokenizer, text: str, left: _Piece, joined: list[_Run]) -> tuple[_Piece, int]:
    """The longer piece may have other tokens than `left`, so the last of the `joined` runs, which are changed in place,
    is joined to it anew. If the two have no joint, they become one piece, which is joined to the run before in the same
    way."""
    begin = left.begin
    size = 2 * (left.end - left.begin)
    while True:
        if min(size, len(text) - begin) > LARGEST:
            raise LongTextError(
                f"its text has a stretch of more than {size // 2:,} characters, from character {begin + 1:,} on, that "
                "cannot be cut for tokenizing, as one word cannot; it would take 150 bytes of memory for each "
                f"character, and {LARGEST:,} characters are the most; put blanks or line ends into it, or leave it out"
            )
        piece = _encode_piece(engine, text, begin, begin + size)
        if not joined:
            return piece, 0
        last = joined.pop()
        if joint := _find_joint(text, last.piece, piece, last.first):
            joined.append(_Run(last.piece, last.first, joint[0]))
            return piece, joint[1]
        # no joint: both as one piece
        begin = last.piece.begin
        size = piece.end - last.piece.begin


def _next_pieces(engine: Tokenizer, text: str, left: _Piece, piece: int, overlap: int) -> Iterator[_Piece]:
    """Pieces begin `overlap` characters before the end of `left`, then twice as many, up to its begin."""
    while overlap < left.end - left.begin:
        yield _encode_piece(engine, text, left.end - overlap, left.end + piece)
        overlap *= 2


def _encode_piece(engine: Tokenizer, text: str, begin: int, end: int) -> _Piece:
    """`end` may lie behind the text's end; spans count characters of the whole text."""
    encoding = engine.encode(text[begin:end], add_special_tokens=False)
    spans = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2) + begin
    return _Piece(begin, min(end, len(text)), np.array(encoding.ids, dtype=np.int64), spans)


def _find_joint(text: str, left: _Piece, right: _Piece, first: int) -> tuple[int, int] | None:
    """From this token on the right piece's tokens are taken. Of the overlap's four quarters, both pieces must agree on
    the middle two, which hold enough runs of characters that what is beyond has no influence; the joint is in the
    middle of the overlap, behind the left piece's token `first`. None: they do not agree, or the overlap is too short.
    """
    quarter = (left.end - right.begin) // 4
    begin, middle, end = (right.begin + n * quarter for n in (1, 2, 3))
    left_begin, left_joint, left_end = np.searchsorted(left.spans[:, 0], (begin, middle, end))
    right_begin, right_end = np.searchsorted(right.spans[:, 0], (begin, end))
    has_tokens = first < left_begin < left_joint < left_end
    if not has_tokens or min(_count_runs(text[begin:middle]), _count_runs(text[middle:end])) < _RUNS:
        return None
    is_equal = np.array_equal(left.ids[left_begin:left_end], right.ids[right_begin:right_end]) and np.array_equal(
        left.spans[left_begin:left_end], right.spans[right_begin:right_end]
    )
    return (int(left_joint), int(right_begin + left_joint - left_begin)) if is_equal else None


def _count_runs(text: str) -> int:
    """Runs are of blanks, of letters and digits, and of other characters."""
    return sum(1 for _ in groupby(text, lambda character: (character.isspace(), character.isalnum())))
