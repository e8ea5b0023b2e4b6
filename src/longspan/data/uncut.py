"""Borders of packs, and spans of documents in which no pack is cut, such as the placeholders of an image."""

from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from longspan.data.stream import ENDLESS, DocumentStream, EpochEnds, StreamPart
from longspan.layout import Integers

_STRIDE = 64  # steps; the beginning of every 64th is kept


@dataclass(frozen=True)
class UncutSpans:
    """Spans (start, stop) of documents, sorted by document and start, none in another.

    >>> UncutSpans(np.array([0, 4]), np.array([2, 0]), np.array([6, 3])).find_spans(np.array([4, 7, 0]))
    (array([0, 2]), array([0, 2]), array([3, 6]))
    """

    documents: Integers  # (n,)
    starts: Integers  # (n,)
    stops: Integers  # (n,)

    @property
    def longest(self) -> int:
        """The length of the longest span, 1 without spans."""
        return int((self.stops - self.starts).max(initial=1))

    def find_spans(self, documents: Integers) -> tuple[Integers, Integers, Integers]:
        """Return the spans of these documents: the index of each span's document, its start and its stop."""
        first, last = (np.searchsorted(self.documents, documents, side=side) for side in ("left", "right"))
        counts = last - first  # of spans in each document
        index = np.repeat(np.arange(len(documents)), counts)
        # Entry i of `index` is span first[d] + i, less the entries of the documents before d.
        spans = np.arange(len(index)) + np.repeat(first - (np.cumsum(counts) - counts), counts)
        return index, self.starts[spans].astype(np.int64), self.stops[spans].astype(np.int64)


class EqualBorders:
    """Borders of packs of a stream, `size` tokens from one to the next; a step takes `packs` packs.

    >>> EqualBorders(8, packs=2).step_borders(1)
    array([16, 24, 32])

    No pack goes on beyond one of the `ends`: a step that reaches one has fewer packs, and a shorter last one.
    """

    def __init__(self, size: int, packs: int, ends: EpochEnds = ENDLESS) -> None:
        self._size, self._packs, self._ends = size, packs, ends

    def step_borders(self, step: int) -> Integers:
        """Return where the packs of a step begin, and where the last one ends (packs + 1,)."""
        epoch, step = divmod(step, self._steps_of(self._ends.size))
        begin = epoch * self._ends.size + step * self._packs * self._size
        return np.unique(np.minimum(begin + np.arange(self._packs + 1) * self._size, self._ends.next_end(begin)))

    def steps_to(self, token: int) -> int:
        """Return how many steps take the first `token` tokens of the stream."""
        epochs, tokens = divmod(token, self._ends.size)
        return epochs * self._steps_of(self._ends.size) + self._steps_of(tokens)

    def _steps_of(self, tokens: int) -> int:
        return -(-tokens // (self._packs * self._size))


class UncutBorders:
    """Borders of packs of a stream, at most `size` tokens apart and never inside a span.

    A border inside a span is moved back to the span's start, and the next pack begins there: a pack is shorter only if
    an image does not fit into its rest, or the step reaches one of the `ends`. So the beginning of a step depends on
    all steps before it: borders are computed in order, and the beginning of every 64th step is kept. A span must not be
    longer than `size`; this is not checked here.
    """

    def __init__(
        self, stream: DocumentStream, spans: UncutSpans, size: int, packs: int, ends: EpochEnds = ENDLESS
    ) -> None:
        """Begin with no borders computed; `_begins` is where each block of 64 steps begins, as far as known."""
        self._stream, self._spans, self._size, self._packs, self._ends = stream, spans, size, packs, ends
        self._begins = array("q", [0])
        self._block_borders = lru_cache(maxsize=2)(self._compute_borders)
        self._part_spans = lru_cache(maxsize=2)(self._find_spans)

    def __reduce__(self) -> tuple[Any, ...]:
        return UncutBorders, (self._stream, self._spans, self._size, self._packs, self._ends)

    def step_borders(self, step: int) -> Integers:
        """Return where the packs of a step begin, and where the last one ends (packs + 1,).

        Each call of `_block_borders` in the loop computes the next 64 steps, and where the steps after them begin.
        """
        block, index = divmod(step, _STRIDE)
        while len(self._begins) <= block:
            self._block_borders(len(self._begins) - 1)
        return np.unique(self._block_borders(block)[index * self._packs : (index + 1) * self._packs + 1])

    def steps_to(self, token: int) -> int:
        """Return how many steps take the first `token` tokens of the stream.

        Each call of `_block_borders` in the loop computes the next 64 steps, and adds to `_begins` where the steps
        after them begin.
        """
        while self._begins[-1] < token:
            self._block_borders(len(self._begins) - 1)
        block = max(0, bisect_left(self._begins, token) - 1)
        return block * _STRIDE + int(np.searchsorted(self._block_borders(block)[:: self._packs], token))

    def _compute_borders(self, block: int) -> Integers:
        """A border that would lie inside a span is moved to the span's start. A step that reaches the end of an epoch
        has the same border for all packs that it lacks.
        """
        border, borders, end = self._begins[block], array("q", [self._begins[block]]), 0
        stream_part = self._stream.part_at_token(border)
        while len(borders) <= _STRIDE * self._packs:
            if (len(borders) - 1) % self._packs == 0:  # a step begins here
                end = self._ends.next_end(border)
            border = min(border + self._size, end)
            while border >= stream_part.before + stream_part.ends[-1]:
                stream_part = self._stream.next_part(stream_part)
            starts, stops = self._part_spans(stream_part.first)
            span = bisect_right(starts, border) - 1
            if span >= 0 and border < stops[span]:
                border = starts[span]
            borders.append(border)
        if block == len(self._begins) - 1:  # else it was computed before, and dropped from the cache
            self._begins.append(border)
        return np.array(borders, dtype=np.int64)

    def _find_spans(self, first: int) -> tuple[list[int], list[int]]:
        """Return starts and stops, in tokens of the stream, of the spans in the part whose first place is `first`.

        A part's `ends` start with 0, so that `ends[i]` of its tokens are before document i.
        """
        stream_part: StreamPart = self._stream.part_at(first)
        index, starts, stops = self._spans.find_spans(stream_part.ids)
        begins = stream_part.before + stream_part.ends[index]
        return (begins + starts).tolist(), (begins + stops).tolist()
