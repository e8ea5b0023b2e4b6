"""Pieces of documents end to end, read as one document: a view, of which nothing is written."""

from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from longspan.data.document import NO_TARGET, Labelled
from longspan.data.order.permutation import Integers


class Piece(NamedTuple):
    """Tokens from start to stop of a document."""

    document: Any
    start: int
    stop: int


@dataclass(frozen=True)
class Pack:
    """Pieces of documents end to end, read as one document.

    >>> Pack((Piece([1, 2, 3], 1, 3), Piece([7, 8], 0, 2)))[np.arange(4)]
    array([2, 3, 7, 8])
    """

    pieces: tuple[Piece, ...]

    @cached_property
    def ends(self) -> Integers:
        """Where each piece ends in the pack."""
        return np.cumsum([piece.stop - piece.start for piece in self.pieces])

    def __len__(self) -> int:
        return int(self.ends[-1])

    def __getitem__(self, positions: Integers) -> Integers:
        ids = np.empty(len(positions), dtype=np.int64)
        for document, there, here in self._runs(positions):
            ids[here] = np.asarray(document)[there] if isinstance(document, list | tuple) else document[there]
        return ids

    def _runs(self, positions: Integers) -> list[tuple[Any, Integers, Integers]]:
        """Of each document that has any of these positions: it, its own positions, and where they were asked for."""
        of_piece = np.searchsorted(self.ends, positions, side="right")
        runs = list[tuple[Any, Integers, Integers]]()
        for number in np.unique(of_piece).tolist():
            here, piece = np.flatnonzero(of_piece == number), self.pieces[number]
            runs.append((piece.document, positions[here] - int(self.ends[number]) + piece.stop, here))
        return runs


class LabelledPack(Pack):
    """A pack of documents in which not every token is a target (`Labelled` in `document.py`)."""

    def labels(self, positions: Integers) -> Integers:
        """The token id to predict at each position (n,), −100 where none is."""
        labels = np.empty(len(positions), dtype=np.int64)
        for document, there, here in self._runs(positions):
            labels[here] = document.labels(there)
        return labels

    @cached_property
    def targets(self) -> int:
        """How many of its tokens are predicted."""
        return int((self.labels(np.arange(1, len(self))) != NO_TARGET).sum())


def pack_of(pieces: tuple[Piece, ...]) -> Pack:
    """These pieces as one document, which has labels where theirs have."""
    return (LabelledPack if isinstance(pieces[0].document, Labelled) else Pack)(pieces)
