"""The rows just before each run that a member of a group holds: which they are, and who sends which to whom.

Short convolutions, and whatever else looks a few rows back, read them. `comm/row_fetch.py` moves them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from longspan.layout.segments import Integers, Segments, expand_runs


class MemberRuns(NamedTuple):
    """Runs of all members of a group, sorted by document and position: the fields of `Segment`, and who holds each."""

    member: Integers
    document: Integers
    start: Integers
    stop: Integers
    offset: Integers


def sort_runs(segments: Sequence[Segments]) -> MemberRuns:
    """Sort the runs of each member's segments into one list, by document and position."""
    columns = [
        (np.full(len(s), member), s.document, s.start, s.stop, s.offset) for member, s in enumerate(segments)
    ]
    joined = MemberRuns(*(np.concatenate(column) for column in zip(*columns, strict=True)))
    order = np.lexsort((joined.start, joined.document))
    return MemberRuns(*(column[order] for column in joined))


class PrefixTree(NamedTuple):
    """Which document each continues (−1: none), and how many rows all that it continues have."""

    parents: Integers
    bases: Integers


@dataclass(frozen=True, eq=False)
class RowsBefore:
    """Up to `reach` rows before each run of one member, fewer where its document has not as many.

    `rows` are the member's own rows that leave, `sends[m]` of them to member m, one member after another; `receives[m]`
    rows arrive from m. A row that this member needs and holds itself goes the same way. `arrived` (runs, reach) says
    which arriving row lies at each place before a run, in the last column the one right before it; −1 for none.
    `travels`: some member needs a row.
    """

    reach: int
    rows: Integers
    sends: tuple[int, ...]
    receives: tuple[int, ...]
    arrived: Integers
    travels: bool


def rows_before(
    segments: Sequence[Segments], member: int, reach: int, prefixes: PrefixTree | None = None
) -> RowsBefore:
    """Find the rows before the runs of a member; `segments` are those of each member of its group.

    Every member works out the needs of all, in one order, so that no member has to ask. Where documents share prefixes
    the rows before a run may be those of a document that its own continues.

    >>> partition = Partition.contiguous([8], degree=2)
    >>> rows_before([partition.segments(0), partition.segments(1)], member=1, reach=2).receives
    (2, 0)
    """
    runs = sort_runs(segments)
    needs = [_rows_to_fetch(runs, member_segments, reach, prefixes) for member_segments in segments]
    owners = [runs.member[run] for run, _ in needs]
    needs_here = [np.flatnonzero(owner == member) for owner in owners]
    rows = [
        runs.offset[run[index]] + position[index] - runs.start[run[index]]
        for (run, position), index in zip(needs, needs_here, strict=True)
    ]
    # Rows arrive ordered by owner, of each owner in the order of the needs.
    number = np.empty(len(owners[member]), dtype=np.int64)
    number[np.argsort(owners[member], kind="stable")] = np.arange(len(number))
    own_runs = segments[member]
    arrived = np.full((len(own_runs), reach), -1, dtype=np.int64)
    sizes = np.minimum(_path_starts(own_runs, prefixes), reach)
    arrived[np.arange(reach) >= reach - sizes[:, None]] = number
    return RowsBefore(
        reach,
        rows=np.concatenate(rows),
        sends=tuple(len(index) for index in needs_here),
        receives=tuple(np.bincount(owners[member], minlength=len(segments)).tolist()),
        arrived=arrived,
        travels=any(map(len, owners)),
    )


def _path_starts(segments: Segments, prefixes: PrefixTree | None) -> Integers:
    """The first position of each run, counted from the first row of all that its document continues."""
    return segments.start if prefixes is None else segments.start + prefixes.bases[segments.document]


def _rows_to_fetch(
    runs: MemberRuns, segments: Segments, reach: int, prefixes: PrefixTree | None
) -> tuple[Integers, Integers]:
    """The run that has each row, and the row's position in its document. One sorted search finds the run: `document ·
    stride + position` is in the order of both."""
    stop = _path_starts(segments, prefixes)
    start = np.maximum(stop - reach, 0)
    position = expand_runs(start, stop)
    document = np.repeat(segments.document, stop - start)
    if prefixes is not None:
        while (is_before := position < prefixes.bases[document]).any():
            document = np.where(is_before, prefixes.parents[document], document)
        position = position - prefixes.bases[document]
    stride = int(runs.stop.max(initial=0)) + 1
    key = document * stride + position
    return np.searchsorted(runs.document * stride + runs.start, key, side="right") - 1, position
