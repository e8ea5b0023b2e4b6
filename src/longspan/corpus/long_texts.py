"""The ids of long texts in bounded memory: encoded in pieces that overlap, and joined where both pieces agree.

The tokenizers library takes some 150 bytes for each character of a text while it encodes it. Pieces are joined inside
their overlap, away from its ends, at a place around which

- both pieces have the same tokens at the same characters, and
- before and behind which runs of letters, spaces and other characters end inside the overlap.

By the second, what a pre-tokenizer's pattern looks ahead at is in both pieces. By the first, every two neighbouring
tokens are neighbours in a piece, and byte-pair encoding gives one sequence alone of which that is true. So the ids are
those of the whole text. Other models than byte-pair encoding are not encoded in pieces.
"""

from collections.abc import Iterator
from itertools import groupby
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer, models

PIECE, OVERLAP = 1 << 18, 1 << 13  # characters
_RUNS = 3  # of characters of a kind, of which the first and the last may go on outside

Integers = npt.NDArray[np.int64]


class _Piece(NamedTuple):
    """The tokens of text[begin:end], and the characters of the text that each stands for."""

    begin: int
    end: int
    ids: Integers  # (n,)
    spans: Integers  # (n, 2)


def has_pieces(engine: Tokenizer) -> bool:
    """Whether texts can be encoded in pieces: whether the model is byte-pair encoding that leaves nothing to chance."""
    return isinstance(engine.model, models.BPE) and not engine.model.dropout


def ids_in_pieces(engine: Tokenizer, text: str, *, piece: int = PIECE, overlap: int = OVERLAP) -> Integers:
    """The ids of a text without what stands around it, encoded in pieces of so many characters.

    Where pieces agree nowhere, their overlap is doubled; where that does not help, the text is encoded as a whole.
    """
    done, left, first = list[Integers](), _encoded(engine, text, 0, piece), 0
    while left.end < len(text):
        for right in _next_pieces(engine, text, left, piece, overlap):
            if seam := _seam(text, left, right, first):
                break
        else:
            return np.array(engine.encode(text, add_special_tokens=False).ids, dtype=np.int64)
        done.append(left.ids[first : seam[0]])
        left, first = right, seam[1]
    return np.concatenate([*done, left.ids[first:]])


def _next_pieces(engine: Tokenizer, text: str, left: _Piece, piece: int, overlap: int) -> Iterator[_Piece]:
    """The pieces that may follow, with ever larger overlaps."""
    while overlap < left.end - left.begin:
        yield _encoded(engine, text, left.end - overlap, left.end + piece)
        overlap *= 2


def _encoded(engine: Tokenizer, text: str, begin: int, end: int) -> _Piece:
    encoding = engine.encode(text[begin:end], add_special_tokens=False)
    spans = np.array(encoding.offsets, dtype=np.int64).reshape(-1, 2) + begin
    return _Piece(begin, min(end, len(text)), np.array(encoding.ids, dtype=np.int64), spans)


def _seam(text: str, left: _Piece, right: _Piece, first: int) -> tuple[int, int] | None:
    """The token before which the left piece ends, from its `first` on, and the one with which the right one goes on."""
    quarter = (left.end - right.begin) // 4
    begin, middle, end = (right.begin + n * quarter for n in (1, 2, 3))
    a, at, b = np.searchsorted(left.spans[:, 0], (begin, middle, end))
    c, d = np.searchsorted(right.spans[:, 0], (begin, end))
    if not (first < a < at < b and _runs(text[begin:middle]) >= _RUNS and _runs(text[middle:end]) >= _RUNS):
        return None
    same = np.array_equal(left.ids[a:b], right.ids[c:d]) and np.array_equal(left.spans[a:b], right.spans[c:d])
    return (int(at), int(c + at - a)) if same else None


def _runs(text: str) -> int:
    """How many runs of letters and digits, of spaces, and of other characters a text has."""
    return sum(1 for _ in groupby(text, lambda c: "space" if c.isspace() else "word" if c.isalnum() else "other"))
