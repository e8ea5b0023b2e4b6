"""The endless stream of training documents: shuffled epochs of each source, interleaved by the weights of sources.

The next document is of the source that is furthest behind, in tokens divided by its weight. That is the merge of the
sources' own streams by the tokens before each document over the weight. So a part of the stream is computed from how
many documents and tokens each source gave before it, and only where parts begin is kept.
"""

from bisect import bisect_right
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from longspan.data.order.arrays import as_sent, received
from longspan.data.order.permutation import Integers
from longspan.data.order.source import Source

_DOCUMENTS = 2**14  # of a part, about


class Part(NamedTuple):
    """A run of the stream: its first place, the tokens before it, and its documents."""

    first: int
    before: int
    ids: Integers  # (n,)
    ends: Integers  # (n + 1,) the tokens of the first i documents of the part
    source: Integers  # (n,) the number of each document's source


class _Mark(NamedTuple):
    """How many documents, and tokens of them, each source gave before a part begins."""

    documents: tuple[int, ...]
    tokens: tuple[int, ...]


class DocumentStream:
    """The endless stream of documents, found by place or by token.

    >>> DocumentStream(lengths, sources).at(0).ids[:2]      # the first two documents
    array([40, 17])

    Parts are found one after the other, and where they begin is kept: some bytes for 16,384 documents. Pickles without
    what a file holds.
    """

    def __init__(self, lengths: npt.NDArray[Any], sources: Sequence[Source]) -> None:
        self.lengths, self.sources = lengths, tuple(sources)
        rates = [source.weight * source.documents / source.tokens for source in sources]  # of documents
        self._counts = [max(1, int(_DOCUMENTS * rate / sum(rates))) for rate in rates]
        self._marks, self._places, self._tokens = [_Mark((0,) * len(sources), (0,) * len(sources))], [0], [0]
        self._part = lru_cache(maxsize=2)(self._made)

    def __getstate__(self) -> tuple[Any, ...]:
        return as_sent(self.lengths), self.sources

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        lengths, sources = state
        self.__init__(received(lengths), sources)

    @property
    def documents(self) -> int:
        """How many documents are trained on."""
        return sum(source.documents for source in self.sources)

    @property
    def tokens(self) -> int:
        """Their tokens."""
        return sum(source.tokens for source in self.sources)

    def at(self, place: int) -> Part:
        """The part that holds a place."""
        while self._places[-1] <= place:
            self._part(len(self._marks) - 1)
        return self._part(bisect_right(self._places, place) - 1)

    def at_token(self, token: int) -> Part:
        """The part that holds a token."""
        while self._tokens[-1] <= token:
            self._part(len(self._marks) - 1)
        return self._part(bisect_right(self._tokens, token) - 1)

    def after(self, part: Part) -> Part:
        """The part that follows another."""
        return self.at(part.first + len(part.ids))

    def tokens_of_sources(self, ids: Integers, tokens: Integers) -> list[int]:
        """Of documents and the tokens that are taken of each, how many each source gives."""
        of_source = np.searchsorted([source.first for source in self.sources], ids, side="right") - 1
        return np.bincount(of_source, weights=tokens, minlength=len(self.sources)).astype(np.int64).tolist()

    def place_after(self, epochs: float) -> int:
        """The first place before which every source gave each of its documents so many times."""
        needed = [_ceil(epochs * source.documents) for source in self.sources]
        if len(needed) == 1 or not any(needed):
            return sum(needed)
        number = 0
        while any(map(int.__lt__, self._marks[number].documents, needed)):
            number += 1
            if number == len(self._marks):
                self._part(number - 1)
        part, before = self._part(number - 1), self._marks[number - 1].documents
        return part.first + max(
            int(np.flatnonzero(part.source == source)[count - had - 1]) + 1
            for source, (had, count) in enumerate(zip(before, needed, strict=True))
            if count > had
        )

    def tokens_before(self, place: int) -> int:
        """The tokens of all documents before a place."""
        part = self.at(place)
        return part.before + int(part.ends[place - part.first])

    def _made(self, number: int) -> Part:
        """A part: documents of every source, until the first of them has given as many as are looked at."""
        mark = self._marks[number]
        runs = [self._run(source, mark) for source in range(len(self.sources))]
        shares = [run.tokens / source.weight for run, source in zip(runs, self.sources, strict=True)]
        until = min(share[-1] for share in shares)
        taken = [int(np.searchsorted(share, until)) for share in shares]
        order = np.argsort(_joined(shares, taken), kind="stable")
        ids = _joined([run.ids for run in runs], taken)[order]
        part = Part(
            self._places[number],
            self._tokens[number],
            ids,
            self._ends(ids),
            np.repeat(np.arange(len(runs)), taken)[order],
        )
        if number == len(self._marks) - 1:
            documents = (had + new for had, new in zip(mark.documents, taken, strict=True))
            tokens = (int(run.tokens[new]) for run, new in zip(runs, taken, strict=True))
            self._keep(_Mark(tuple(documents), tuple(tokens)))
        return part

    def _keep(self, mark: _Mark) -> None:
        self._marks.append(mark)
        self._places.append(sum(mark.documents))
        self._tokens.append(sum(mark.tokens))

    def _run(self, source: int, mark: _Mark) -> "_Run":
        ids = self.sources[source].ids(mark.documents[source], self._counts[source])
        return _Run(ids, mark.tokens[source] + self._ends(ids))

    def _ends(self, ids: Integers) -> Integers:
        ends = np.zeros(len(ids) + 1, dtype=np.int64)
        np.cumsum(self.lengths[ids], out=ends[1:])
        return ends


class _Run(NamedTuple):
    """Documents of one source, and the source's tokens before each and after the last."""

    ids: Integers
    tokens: Integers


def _joined(arrays: Sequence[npt.NDArray[Any]], taken: Sequence[int]) -> npt.NDArray[Any]:
    """The first so many values of each array, end to end."""
    return np.concatenate([array[:count] for array, count in zip(arrays, taken, strict=True)])


def _ceil(documents: float) -> int:
    """Rounded up, but for what the product of a fraction and a count is off by."""
    return int(np.ceil(round(documents, 6)))
