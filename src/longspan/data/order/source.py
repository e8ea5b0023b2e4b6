"""The sources of a corpus, each of which gives its training documents in shuffled epochs without end."""

from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from longspan.data.order.permutation import Epochs, FirstEpochs, Integers, Shuffled
from longspan.errors import DataError, counted

HELD_OUT, EPOCH, EVAL_SET = 0, 1, 2  # which of the seed's streams
FIRST_ORDER, ORDER = 1, 3  # that of earlier versions, with which the runs that they began go on, and that of new runs
EQUAL_CUTS = 2  # the last order that cut packs with images at equal distances


class Mixture(NamedTuple):
    """Several sources: which of them each document is of (ascending), and their weights."""

    source_of: npt.NDArray[Any]
    weights: tuple[float, ...]


@dataclass(frozen=True)
class Source:
    """The training documents of one source: all from `first` on, up to `stop`, but those that are held out."""

    first: int
    stop: int
    held_out: Integers  # document ids, sorted
    tokens: int  # of the documents that are trained on
    weight: float
    shuffled: Shuffled  # numbers of its training documents

    @property
    def documents(self) -> int:
        """How many are trained on."""
        return self.stop - self.first - len(self.held_out)

    def ids(self, start: int, count: int) -> Integers:
        """The ids of so many documents of its endless stream, from a place on."""
        return self._beside_held_out(self.shuffled[np.arange(start, start + count)])

    def _beside_held_out(self, numbers: Integers) -> Integers:
        """The ids of training documents by their numbers."""
        before = self.held_out - self.first - np.arange(len(self.held_out))  # training documents before each
        return self.first + numbers + np.searchsorted(before, numbers, side="right")


def sources_of(
    lengths: npt.NDArray[Any], mixture: Mixture | None, held_out: Integers, seed: int, version: int
) -> tuple[Source, ...]:
    """The sources of a corpus without its held-out documents (sorted); one where nothing is mixed.

    Raises DataError for a source of which nothing is left.
    """
    bounds, weights = np.array([0, len(lengths)]), (1.0,)
    if mixture is not None:
        weights = mixture.weights
        numbers = np.arange(len(weights) + 1, dtype=mixture.source_of.dtype)  # of another type, all would be copied
        bounds = np.searchsorted(mixture.source_of, numbers)
    sources = list[Source]()
    for number, weight in enumerate(weights):
        first, stop = int(bounds[number]), int(bounds[number + 1])
        here = held_out[(held_out >= first) & (held_out < stop)]
        if stop - first <= len(here):
            raise DataError(
                f"data.sources[{number}] has {counted(stop - first, 'document')}, of which data.eval_documents holds "
                f"out {len(here)}: nothing is left to train on; leave the source out, or hold out fewer"
            )
        tokens = int(lengths[first:stop].sum(dtype=np.int64)) - int(lengths[here].sum(dtype=np.int64))
        count = stop - first - len(here)
        old = version == FIRST_ORDER
        shuffled = FirstEpochs(count, seed, EPOCH) if old else Epochs(count, seed, EPOCH, number)
        sources.append(Source(first, stop, here, tokens, weight, shuffled))
    return tuple(sources)
