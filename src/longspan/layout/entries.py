"""Entries: keys made of windows of a document's rows; which member of a group makes which, and of which rows.

Window w of a document is its rows w · stride to w · stride + stride − 1, and a row at position p sees the entries of
windows that end by p: w < (p + 1) // stride. Rows after a document's last whole window make none.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from longspan.layout.rows_before import RowsBefore, rows_before
from longspan.layout.segments import Integers, Segments, expand_runs


@dataclass(frozen=True, eq=False)
class Entries:
    """The entries of a group's documents, numbered document after document, and those that one member makes.

    The member that holds a window's last row makes its entry; rows that it lacks are among those `before` its runs.
    `counts` and `firsts` (documents,) are how many entries a document has, and the number of its first one. `made[m]`
    are the numbers of the entries that member m makes, in its order.

    Windows that this member lays out: those of its entries (`own` says which they are), before each run's first of them
    as many earlier windows as an entry reads beside its own, and one without rows if there are no others. `windows` (W,
    stride) are their rows, as indices into [own rows | arrived rows | one row for none]; `positions` (W,) is the first
    position of each, 0 where it would lie before the document.
    """

    stride: int
    before: RowsBefore
    counts: Integers
    firsts: Integers
    made: tuple[Integers, ...]
    windows: Integers
    positions: Integers
    own: Integers


def find_entries(
    segments: Sequence[Segments], member: int, lengths: Sequence[int], stride: int, *, windows_before: int = 0
) -> Entries:
    """Find a member's entries; `segments` are those of each member of its group, `lengths` those of its documents.

    Each entry is made of its own window and of `windows_before` windows before it. Padding of documents is in segments,
    and not in lengths.
    """
    counts = np.asarray(lengths, dtype=np.int64) // stride
    firsts = np.cumsum(counts) - counts
    before = rows_before(segments, member, (1 + windows_before) * stride - 1)
    made = tuple(_entries_made(s, counts, firsts, stride) for s in segments)
    runs = segments[member]
    first, end = _window_range(runs, counts, stride)
    laid_out = np.where(end > first, end - first + windows_before, 0)
    run = np.repeat(np.arange(len(runs)), laid_out)
    window = expand_runs(first - windows_before, first - windows_before + laid_out)
    rows = _window_rows(runs, run, window, stride, before)
    none = runs.rows + sum(before.receives)
    own = np.flatnonzero(window >= first[run])
    if not len(window):
        rows = np.full((1, stride), none)
        window = np.zeros(1, dtype=np.int64)
    return Entries(stride, before, counts, firsts, made, rows, np.maximum(window * stride, 0), own)


def _window_range(runs: Segments, counts: Integers, stride: int) -> tuple[Integers, Integers]:
    """The first window whose last row each run has, and the one after its last."""
    first = np.minimum(runs.start // stride, counts[runs.document])
    return first, np.minimum(runs.stop // stride, counts[runs.document])


def _entries_made(runs: Segments, counts: Integers, firsts: Integers, stride: int) -> Integers:
    first, end = _window_range(runs, counts, stride)
    return expand_runs(firsts[runs.document] + first, firsts[runs.document] + end)


def _window_rows(runs: Segments, run: Integers, window: Integers, stride: int, before: RowsBefore) -> Integers:
    """The rows of each window of a run: (windows, stride)."""
    position = window[:, None] * stride + np.arange(stride)
    steps_back = runs.start[run][:, None] - position
    own_row = runs.offset[run][:, None] - steps_back
    none = runs.rows + sum(before.receives)
    # What a run's windows read lies at most `reach` rows before it, and at position 0 at the earliest.
    place = np.clip(before.reach - steps_back, 0, before.reach - 1)
    arrived_row = runs.rows + before.arrived[run[:, None], place] if before.reach else own_row
    return np.where(position < 0, none, np.where(steps_back > 0, arrived_row, own_row))
