"""The endless stream of training documents: shuffled epochs of each source, interleaved by the weights of sources.

The next document is of the source that is furthest behind, in tokens divided by its weight. So a part of the stream
is computed from how many documents and tokens each source gave before it. Steps are in `step_order.py`, the shuffling
in `shuffle.py`.
"""

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from longspan.data.array_files import pickle_form, restored_array
from longspan.data.shuffle import Epochs
from longspan.errors import DataError, plural
from longspan.layout import Integers

# These number the seed's streams.
HELD_OUT = 0
EPOCH = 1
EVAL_SET = 2
# Of documents, which checkpoints hold; in order 3 steps reached over the ends of epochs with all documents, and in
# order 4 held-out texts of several sources were drawn over all rows.
ORDER = 4
ORDER_OF_SOURCES = 5


class Mixture(NamedTuple):
    """Several sources: the number of each document's source (ascending), their weights, and whose epochs count."""

    source_of: npt.NDArray[Any]
    weights: tuple[float, ...]
    counted: int = 0


@dataclass(frozen=True)
class ShuffledSource:
    """The training documents of one source: those from `first` to `stop`, except the held-out ones."""

    first: int
    stop: int
    held_out: Integers  # document ids, sorted
    # These are the tokens of the documents that are trained on.
    tokens: int
    weight: float
    shuffled: Epochs  # numbers of its training documents

    @property
    def documents(self) -> int:
        """How many documents are trained on."""
        return self.stop - self.first - len(self.held_out)

    def document_ids(self, start: int, count: int) -> Integers:
        """Return the ids of `count` documents of this source's endless stream, from place `start` on."""
        numbers = self.shuffled[np.arange(start, start + count)]
        # how many training documents come before each held-out one: a number from there on skips it
        before = self.held_out - self.first - np.arange(len(self.held_out))
        return self.first + numbers + np.searchsorted(before, numbers, side="right")


def shuffled_sources(
    lengths: npt.NDArray[Any], mixture: Mixture | None, held_out: Integers, seed: int
) -> tuple[ShuffledSource, ...]:
    """Return the sources of a corpus, without its held-out documents (sorted); without a mixture there is one.

    Raises DataError for a source of which no document is left.
    """
    bounds = np.array([0, len(lengths)])
    weights = (1.0,)
    if mixture is not None:
        weights = mixture.weights
        # Numbers of another type would copy the array.
        numbers = np.arange(len(weights) + 1, dtype=mixture.source_of.dtype)
        bounds = np.searchsorted(mixture.source_of, numbers)
    sources = list[ShuffledSource]()
    for number, weight in enumerate(weights):
        first = int(bounds[number])
        stop = int(bounds[number + 1])
        source_held_out = held_out[(held_out >= first) & (held_out < stop)]
        if stop - first <= len(source_held_out):
            raise DataError(
                f"data.sources[{number}] has {plural(stop - first, 'document')}, of which evaluation.documents holds "
                f"out {len(source_held_out)}: nothing is left to train on; leave the source out, or hold out fewer"
            )
        tokens = int(lengths[first:stop].sum(dtype=np.int64)) - int(lengths[source_held_out].sum(dtype=np.int64))
        count = stop - first - len(source_held_out)
        sources.append(
            ShuffledSource(first, stop, source_held_out, tokens, weight, Epochs(count, seed, EPOCH, number))
        )
    return tuple(sources)


# A part has about this many documents.
_DOCUMENTS = 2**14


class StreamPart(NamedTuple):
    """Documents that follow each other in the stream: the place of the first, and their ids."""

    first: int
    ids: Integers  # (n,)
    ends: Integers  # (n + 1,) the tokens of the first i documents of the part
    source: Integers  # (n,) the number of each document's source


class DocumentStream:
    """The endless stream of documents, indexed by place; it pickles without arrays that are in files.

    >>> DocumentStream(lengths, sources).part_at(0).ids[:2]  # the first two documents  # doctest: +SKIP
    array([40, 17])

    Parts are computed one after the other, and their beginnings are kept: some bytes for 16,384 documents.
    """

    def __init__(self, lengths: npt.NDArray[Any], sources: Sequence[ShuffledSource]) -> None:
        """Compute nothing yet; `lengths` (D,) are the tokens of all documents, those held out too."""
        self.sources: tuple[ShuffledSource, ...] = tuple(sources)
        self.lengths = lengths
        # Sources give tokens in proportion to their weights, so documents in proportion to weight over mean length.
        rates = [source.weight * source.documents / source.tokens for source in sources]
        self._candidates = [max(1, int(_DOCUMENTS * rate / sum(rates))) for rate in rates]  # documents for a part
        # Where each part begins, as far as known: by documents and tokens of each source, and by place.
        self._marks = [((0,) * len(sources), (0,) * len(sources))]
        self._places = [0]
        # Parts are kept by their numbers.
        self._part = lru_cache(maxsize=2)(self._merge_part)

    def __getstate__(self) -> tuple[Any, ...]:
        return pickle_form(self.lengths), self.sources

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        lengths, sources = state
        self.__init__(restored_array(lengths), sources)

    @property
    def documents(self) -> int:
        """How many documents one epoch of every source has."""
        return sum(source.documents for source in self.sources)

    @property
    def tokens(self) -> int:
        """How many tokens one epoch of every source has."""
        return sum(source.tokens for source in self.sources)

    def part_at(self, place: int) -> StreamPart:
        """Return the part of the stream that has this place; the parts before it are computed once, to know where they
        begin.
        """
        # Each call computes the next part, and where the part after it begins.
        while self._places[-1] <= place:
            self._part(len(self._marks) - 1)
        return self._part(bisect_right(self._places, place) - 1)

    def next_part(self, part: StreamPart) -> StreamPart:
        """Return the part behind this one."""
        return self.part_at(part.first + len(part.ids))

    def place_after(self, epochs: float, source: int) -> int:
        """Return the place behind the last document of so many epochs of a source, of parts of an epoch too."""
        documents = math.ceil(round(epochs * self.sources[source].documents, 6))  # 0.07 * 100 is above 7
        if len(self.sources) == 1:
            return documents
        part = self.part_at(0)
        while len(places := np.flatnonzero(part.source == source)) < documents:
            documents -= len(places)
            part = self.next_part(part)
        return part.first + int(places[documents - 1]) + 1

    def _merge_part(self, number: int) -> StreamPart:
        """Where the next part begins is noted in `_marks` and `_places`. A document's share is the tokens that its
        source gave before it, over the source's weight; documents are sorted by their shares. The part ends at the
        lowest share at which a source runs out of candidates: documents of larger shares may have to wait for further
        ones of that source."""
        used, used_tokens = self._marks[number]
        candidates = [
            source.document_ids(start, n)
            for source, start, n in zip(self.sources, used, self._candidates, strict=True)
        ]
        # The source's tokens before each candidate, and after the last.
        before = [start + self._document_ends(ids) for start, ids in zip(used_tokens, candidates, strict=True)]
        shares = [tokens / source.weight for tokens, source in zip(before, self.sources, strict=True)]
        end_share = min(share[-1] for share in shares)
        counts = [int(np.searchsorted(share, end_share)) for share in shares]
        order = np.argsort(
            np.concatenate([share[:n] for share, n in zip(shares, counts, strict=True)]), kind="stable"
        )
        ids = np.concatenate([ids[:n] for ids, n in zip(candidates, counts, strict=True)])[order]
        source_of = np.repeat(np.arange(len(counts)), counts)[order]
        ends = self._document_ends(ids)
        if number == len(self._marks) - 1:  # else it was computed before, and dropped from the cache
            documents = tuple(start + count for start, count in zip(used, counts, strict=True))
            tokens = tuple(int(tokens[count]) for tokens, count in zip(before, counts, strict=True))
            self._marks.append((documents, tokens))
            self._places.append(sum(documents))
        return StreamPart(self._places[number], ids, ends, source_of)

    def _document_ends(self, ids: Integers) -> Integers:
        """(n + 1,), the tokens of the first i of these documents."""
        ends = np.zeros(len(ids) + 1, dtype=np.int64)
        np.cumsum(self.lengths[ids], out=ends[1:])
        return ends
