"""Runs of rows that one member of a group holds, seen inside their documents; runs that see each other (`Spans`).

Attention, data loading and position ids are computed from Segments, without expanding the rows that a member
holds. Not covered: which member holds what (`partition.py`).
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from longspan.errors import LayoutError

# The arrays of the host, in every room; what they hold is in their names.
Integers = NDArray[np.int64]
Floats = NDArray[np.float64]
Flags = NDArray[np.bool_]


class Segment(NamedTuple):
    """One run of one document: rows `start` to `stop` (half open) are held from local row `offset` on."""

    document: int
    start: int
    stop: int
    offset: int


@dataclass(frozen=True, eq=False, repr=False)
class Segments:
    """The runs that one member holds, in held order, as four arrays of equal length.

    Entry i: the member's local rows `offset[i]` to `offset[i] + stop[i] - start[i]` are positions `start[i]` to
    `stop[i]` (half open) of document `document[i]`, an index into the lengths of the partition. Every run is non-empty,
    runs of one document follow each other with rising positions, and two runs that touch are one.

    >>> list(Partition.zigzag([8], degree=2).segments(0))
    [Segment(document=0, start=0, stop=2, offset=0), Segment(document=0, start=6, stop=8, offset=2)]
    """

    document: Integers
    start: Integers
    stop: Integers
    offset: Integers

    @property
    def rows(self) -> int:
        """How many rows the member holds: T."""
        return int(self.offset[-1] + self.stop[-1] - self.start[-1]) if len(self) else 0

    @cached_property
    def positions(self) -> Integers:
        """Position inside its document of each local row: (T,) int64."""
        return make_read_only(expand_runs(self.start, self.stop))

    def __len__(self) -> int:
        return len(self.document)

    def __iter__(self) -> Iterator[Segment]:
        columns = (self.document, self.start, self.stop, self.offset)
        return map(Segment, *(column.tolist() for column in columns))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Segments) and self._column_bytes() == other._column_bytes()

    def __hash__(self) -> int:
        return hash(self._column_bytes())

    def _column_bytes(self) -> tuple[bytes, ...]:
        return tuple(column.tobytes() for column in (self.document, self.start, self.stop, self.offset))

    def __reduce__(self) -> tuple[object, ...]:
        """Offsets follow from the runs; arrays are read-only again when they are loaded."""
        return segments_from_runs, (self.document, self.start, self.stop)

    def __repr__(self) -> str:
        first_runs = ", ".join(f"{s.document}[{s.start}:{s.stop}]" for s, _ in zip(self, range(6), strict=False))
        more_text = f", … {len(self)} runs" if len(self) > 6 else ""
        return f"Segments({first_runs}{more_text}; {self.rows} rows)"


def segments_from_runs(document: Integers, start: Integers, stop: Integers) -> Segments:
    """Make segments of runs in held order: empty runs are left out, touching runs of one document joined.

    A segment's offset is the number of rows that the segments before it have.
    """
    keep = stop > start
    document = document[keep]
    start = start[keep]
    stop = stop[keep]
    opens = np.ones(len(start), dtype=bool)
    opens[1:] = (document[1:] != document[:-1]) | (start[1:] != stop[:-1])
    closes = np.append(opens[1:], np.ones(min(1, len(opens)), dtype=bool))
    document = document[opens]
    start = start[opens]
    stop = stop[closes]
    offset = np.cumsum(stop - start) - (stop - start)
    return Segments(make_read_only(document), make_read_only(start), make_read_only(stop), make_read_only(offset))


def expand_runs(start: NDArray[Any], stop: NDArray[Any]) -> Integers:
    """Return the integers of half-open runs, one run after another; runs of one integer each are returned at once."""
    sizes = stop - start
    total = int(sizes.sum())
    if total == len(sizes) and (sizes == 1).all():
        return start.astype(np.int64)
    integers_before = np.cumsum(sizes) - sizes
    return np.repeat(start - integers_before, sizes) + np.arange(total, dtype=np.int64)


def join_runs(runs: Integers) -> Integers:
    """Join runs (start, stop) that follow each other directly to one."""
    # The first run, if there is one, opens a joined run, and so does each that begins elsewhere than the last stopped.
    opens = np.flatnonzero(np.append([True] * (len(runs) > 0), runs[1:, 0] != runs[:-1, 1]))
    closes = np.append(opens, len(runs))[1:] - 1
    return make_read_only(np.stack([runs[opens, 0], runs[closes, 1]], axis=1).astype(np.int64))


def is_integer_type(kind: type) -> bool:
    """Whether this is a type of integers, Python's or numpy's; bool is none."""
    return issubclass(kind, (int, np.integer)) and kind is not bool


def make_read_only(array: NDArray[Any]) -> Integers:
    """Return the array as contiguous int64, read-only; one that is so already is not copied: it becomes read-only
    itself.
    """
    array = np.ascontiguousarray(array, dtype=np.int64)
    array.setflags(write=False)
    return array


SpansOfDocuments = Mapping[int, Iterable[Sequence[int]]]


@dataclass(frozen=True, eq=False, repr=False)
class Spans:
    """Half-open runs of positions [start, stop) of documents, which are indices into a group's, in ascending order.

    A row of such a run, as of an image's tokens, sees the later rows of the run beyond what its mask lets it see.

    >>> spans = Spans.from_documents({7: [(2, 6)]}, documents=(3, 7), lengths=(5, 8))
    >>> spans.document.tolist(), spans.start.tolist(), spans.stop.tolist()
    ([1], [2], [6])
    """

    document: Integers
    start: Integers
    stop: Integers

    @staticmethod
    def from_documents(by_document: SpansOfDocuments, documents: Sequence[int], lengths: Sequence[int]) -> "Spans":
        """Collect the spans of a group's documents, in the group's order, with document ids as indices into the group.

        Runs of one row are left out: the row has no later row to see. Raises LayoutError, naming the document, for
        spans that are not integers, empty, outside the document, or not ascending.
        """
        rows = list[tuple[int, int, int]]()
        for index, (document, length) in enumerate(zip(documents, lengths, strict=True)):
            end = 0
            for span in by_document.get(document, ()):
                if len(span) != 2 or not all(is_integer_type(type(position)) for position in span):
                    raise LayoutError(
                        f"document {document} has the span {span!r}; a span is (start, stop), two integers"
                    )
                start, stop = span
                if not end <= start < stop <= length:
                    raise LayoutError(
                        f"document {document} has the span ({start}, {stop}) after position {end}, and {length} rows; "
                        "spans are (start, stop), not empty, ascending, disjoint and inside their document"
                    )
                end = stop
                if stop - start > 1:
                    rows.append((index, start, stop))
        table = np.array(rows, dtype=np.int64).reshape(-1, 3)
        return Spans(*(make_read_only(np.ascontiguousarray(column)) for column in table.T))

    def find_rows(self, segments: Segments) -> Segments:
        """Find the rows of these segments that lie in runs of these spans; the result's `document` is the run's index.

        Positions of all documents are put on one line, `document · stride + position`, so that two sorted searches give
        the runs that each segment meets.
        """
        stride = int(max(segments.stop.max(initial=0), self.stop.max(initial=0))) + 1
        start, stop = (segments.document * stride + position for position in (segments.start, segments.stop))
        starts, stops = (self.document * stride + position for position in (self.start, self.stop))
        first_run, end_run = np.searchsorted(stops, start, side="right"), np.searchsorted(starts, stop, side="left")
        segment = np.repeat(np.arange(len(segments)), end_run - first_run)
        run = expand_runs(first_run, end_run)
        begin = np.maximum(segments.start[segment], self.start[run])
        end = np.minimum(segments.stop[segment], self.stop[run])
        return Segments(run, begin, end, segments.offset[segment] + begin - segments.start[segment])

    def run_starts(self, segments: Segments) -> Integers:
        """Where the run that has each segment's first row begins, or the segment's start if none has it: (n,)."""
        inside = self.find_rows(segments)
        starts = segments.start.copy()
        segment = np.searchsorted(segments.offset, inside.offset, side="right") - 1
        has_first_row = inside.start == segments.start[segment]
        starts[segment[has_first_row]] = self.start[inside.document[has_first_row]]
        return starts

    def run_ends(self, segments: Segments) -> Integers:
        """Where the run that has each segment's last row ends, or the segment's stop if none has it: (n,)."""
        inside = self.find_rows(segments)  # parts of runs; `inside.document` are indices of runs
        ends = segments.stop.copy()
        # Each part lies in this segment.
        segment = np.searchsorted(segments.offset, inside.offset, side="right") - 1
        has_last_row = inside.stop == segments.stop[segment]
        ends[segment[has_last_row]] = self.stop[inside.document[has_last_row]]
        return ends

    def __len__(self) -> int:
        return len(self.document)

    def __repr__(self) -> str:
        return f"Spans({len(self)} runs)"


NO_SPANS = Spans.from_documents({}, (), ())
