"""Spans of documents that no pack is cut in: the placeholders of an image."""

from dataclasses import dataclass

import numpy as np

from longspan.train.data.order.permutation import Integers


@dataclass(frozen=True)
class UncutSpans:
    """Spans (start, stop) of documents, sorted by document and start, none in another.

    >>> UncutSpans.of(np.array([0]), np.array([2]), np.array([6])).cuts(np.array([0, 0]), np.array([4, 6]))
    array([2, 6])

    `longest` is the length of the longest, 1 where there is none.
    """

    keys: Integers  # (n,) where spans start: document * stride + start
    stops: Integers  # (n,) likewise
    stride: int
    longest: int = 1

    @classmethod
    def of(cls, documents: Integers, starts: Integers, stops: Integers) -> "UncutSpans":
        """From the document, start and stop of each."""
        stride, keys = int(stops.max(initial=0)) + 1, documents.astype(np.int64)
        return cls(keys * stride + starts, keys * stride + stops, stride, int((stops - starts).max(initial=1)))

    def cuts(self, documents: Integers, offsets: Integers) -> Integers:
        """These places (n,) of documents, those inside of a span moved back to its start."""
        places = documents * self.stride + np.minimum(offsets, self.stride - 1)  # no span reaches further
        span = np.searchsorted(self.keys, places) - 1
        inside = (span >= 0) & (places < np.append(self.stops, -1)[span])
        return np.where(inside, np.append(self.keys, 0)[span] - documents * self.stride, offsets)
