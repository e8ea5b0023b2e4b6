"""Runs of a document's positions that see each other in both directions, as tokens of an image do.

A row of such a run sees, beyond what a causal mask or a window lets it see, the later rows of the run. The caller
sets them (`SequenceShard.with_spans`); what is computed for them is decided in `attention/tiles.py`.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from longspan.errors import LayoutError
from longspan.layout.partition import is_integer
from longspan.layout.segments import Integers, Segments, expand_runs, make_read_only

SpansOfDocuments = Mapping[int, Iterable[tuple[int, int]]]


@dataclass(frozen=True, eq=False, repr=False)
class Spans:
    """Half-open runs of positions [start, stop) of documents, which are indices into a group's, in ascending order.

    >>> spans = Spans.of({7: [(2, 6)]}, documents=(3, 7), lengths=(5, 8))
    >>> spans.document.tolist(), spans.start.tolist(), spans.stop.tolist()
    ([1], [2], [6])
    """

    document: Integers
    start: Integers
    stop: Integers

    @staticmethod
    def of(by_document: SpansOfDocuments, documents: Sequence[int], lengths: Sequence[int]) -> "Spans":
        """Collect the spans of a group's documents, in the group's order, with document ids as indices into the group.

        Runs of one row are left out: the row has no later row to see. Raises LayoutError, naming the document, for
        spans that are not integers, empty, outside the document, or not ascending.
        """
        rows = [
            (index, start, stop)
            for index, (document, length) in enumerate(zip(documents, lengths, strict=True))
            for start, stop in _check_span_runs(by_document.get(document, ()), document, length)
            if stop - start > 1
        ]
        table = np.array(rows, dtype=np.int64).reshape(-1, 3)
        return Spans(*(make_read_only(np.ascontiguousarray(column)) for column in table.T))

    @cached_property
    def pairs(self) -> int:
        """How many (row, later row of its run) there are."""
        rows = self.stop - self.start
        return int((rows * (rows - 1) // 2).sum())

    def find_rows(self, segments: Segments) -> Segments:
        """Find the rows of these segments that lie in runs of these spans; the result's `document` is the run's index.

        Positions of all documents are put on one line, `document · stride + position`, so that two sorted searches give
        the runs that each segment meets.
        """
        stride = int(max(segments.stop.max(initial=0), self.stop.max(initial=0))) + 1
        start, stop = (segments.document * stride + position for position in (segments.start, segments.stop))
        starts, stops = (self.document * stride + position for position in (self.start, self.stop))
        first_run, end_run = np.searchsorted(stops, start, side="right"), np.searchsorted(starts, stop, side="left")
        segment, run = np.repeat(np.arange(len(segments)), end_run - first_run), expand_runs(first_run, end_run)
        begin = np.maximum(segments.start[segment], self.start[run])
        end = np.minimum(segments.stop[segment], self.stop[run])
        return Segments(run, begin, end, segments.offset[segment] + begin - segments.start[segment])

    def run_ends(self, segments: Segments) -> Integers:
        """Where the run that has each segment's last row ends, or the segment's stop if none has it: (n,)."""
        inside, ends = self.find_rows(segments), segments.stop.copy()  # `inside.document`: indices of runs
        segment = np.searchsorted(segments.offset, inside.offset, side="right") - 1  # in which each part of a run lies
        has_last_row = inside.stop == segments.stop[segment]
        ends[segment[has_last_row]] = self.stop[inside.document[has_last_row]]
        return ends

    def __len__(self) -> int:
        return len(self.document)

    def __repr__(self) -> str:
        return f"Spans({len(self)} runs, {self.pairs} pairs)"


NO_SPANS = Spans.of({}, (), ())


def _check_span_runs(spans: Iterable[Sequence[int]], document: int, length: int) -> list[tuple[int, int]]:
    pairs, end = list(spans), 0
    for span in pairs:
        if len(span) != 2 or not all(is_integer(type(position)) for position in span):
            raise LayoutError(f"document {document} has the span {span!r}; a span is (start, stop), two integers")
        start, stop = span
        if not end <= start < stop <= length:
            raise LayoutError(
                f"document {document} has the span ({start}, {stop}) after position {end}, and {length} rows; spans "
                "are (start, stop), not empty, ascending, disjoint and inside their document"
            )
        end = stop
    return [(int(start), int(stop)) for start, stop in pairs]
