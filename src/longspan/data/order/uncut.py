"""Spans of documents that no pack is cut in, the placeholders of an image, and where packs end that cut none."""

from array import array
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from longspan.data.order.permutation import Integers
from longspan.data.order.stream import DocumentStream, Part

_STRIDE = 64  # steps; where every so many begin is kept


@dataclass(frozen=True)
class UncutSpans:
    """Spans (start, stop) of documents, sorted by document and start, none in another.

    >>> UncutSpans(np.array([0, 4]), np.array([2, 0]), np.array([6, 3])).of(np.array([4, 7, 0]))
    (array([0, 2]), array([0, 2]), array([3, 6]))
    """

    documents: Integers  # (n,)
    starts: Integers  # (n,)
    stops: Integers  # (n,)

    @property
    def longest(self) -> int:
        """The length of the longest, 1 where there is none."""
        return int((self.stops - self.starts).max(initial=1))

    def of(self, documents: Integers) -> tuple[Integers, Integers, Integers]:
        """Which of these documents have spans, each as often as it has, and the starts and stops of these."""
        first, last = (np.searchsorted(self.documents, documents, side=side) for side in ("left", "right"))
        counts = last - first
        place = np.repeat(np.arange(len(documents)), counts)
        span = np.arange(len(place)) + np.repeat(first - (np.cumsum(counts) - counts), counts)
        return place, self.starts[span].astype(np.int64), self.stops[span].astype(np.int64)


class EqualBorders:
    """Borders of packs of a stream in tokens, `size` from one to the next; a step takes so many `packs`.

    >>> EqualBorders(8, packs=2).of_step(1)
    array([16, 24, 32])
    """

    def __init__(self, size: int, packs: int) -> None:
        self._size, self._packs = size, packs

    def of_step(self, step: int) -> Integers:
        """Where the packs of a step (packs + 1,) begin, and the last ends."""
        return np.arange(step * self._packs, (step + 1) * self._packs + 1) * self._size

    def steps_to(self, token: int) -> int:
        """The steps that it takes until so many tokens of the stream are taken."""
        return -(-token // (self._packs * self._size))


class UncutBorders:
    """Borders of packs of a stream, at most `size` tokens apart, none of which is inside of a span.

    A border that would be is moved back to the span's start, and the next pack begins there: a pack is shorter where an
    image does not fit in its rest, and nowhere else. So where a step begins follows from all before it: borders are
    walked once, and where every 64th step begins is kept. Raises nothing: a span is to be no longer than `size`.
    """

    def __init__(self, stream: DocumentStream, spans: UncutSpans, size: int, packs: int) -> None:
        self._stream, self._spans, self._size, self._packs = stream, spans, size, packs
        self._begins = array("q", [0])
        self._block, self._of_part = lru_cache(maxsize=2)(self._borders), lru_cache(maxsize=2)(self._spans_of)

    def __reduce__(self) -> tuple[Any, ...]:
        return UncutBorders, (self._stream, self._spans, self._size, self._packs)

    def of_step(self, step: int) -> Integers:
        """Where the packs of a step (packs + 1,) begin, and the last ends."""
        block, index = divmod(step, _STRIDE)
        while len(self._begins) <= block:
            self._block(len(self._begins) - 1)
        return self._block(block)[index * self._packs : (index + 1) * self._packs + 1]

    def steps_to(self, token: int) -> int:
        """The steps that it takes until so many tokens of the stream are taken."""
        while self._begins[-1] < token:
            self._block(len(self._begins) - 1)
        block = max(0, bisect_left(self._begins, token) - 1)
        return block * _STRIDE + int(np.searchsorted(self._block(block)[:: self._packs], token))

    def _borders(self, block: int) -> Integers:
        """The borders of 64 steps, with that at which the next ones begin."""
        border, borders = self._begins[block], array("q", [self._begins[block]])
        part = self._stream.at_token(border)
        while len(borders) <= _STRIDE * self._packs:
            border += self._size
            while border >= part.before + part.ends[-1]:
                part = self._stream.after(part)
            starts, stops = self._of_part(part.first)
            span = bisect_right(starts, border) - 1
            if span >= 0 and border < stops[span]:
                border = starts[span]
            borders.append(border)
        if block == len(self._begins) - 1:
            self._begins.append(border)
        return np.array(borders, dtype=np.int64)

    def _spans_of(self, first: int) -> tuple[list[int], list[int]]:
        """The starts and stops of the spans in the part of the stream that begins at this place, in its tokens."""
        part: Part = self._stream.at(first)
        place, starts, stops = self._spans.of(part.ids)
        begins = part.before + part.ends[place]
        return (begins + starts).tolist(), (begins + stops).tolist()
