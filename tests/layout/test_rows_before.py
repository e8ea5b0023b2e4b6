"""Rows before runs, and entries made of windows of rows, equal a list made row by row."""

from collections.abc import Sequence

import numpy as np
from hypothesis import given, strategies as st

from longspan.layout import Partition
from longspan.layout.entries import find_entries
from longspan.layout.rows_before import RowsBefore, rows_before
from tests.layout.strategies import examples

Row = tuple[int, int]  # a document, and a position in it
NONE = (-1, -1)


@st.composite
def groups(draw: st.DrawFn) -> tuple[int, tuple[int, ...], Partition]:
    """A stride m, lengths around it, and a partition of them over some members."""
    stride = draw(st.sampled_from([1, 2, 4, 7]))
    around = st.sampled_from([stride - 1, stride, stride + 1, 2 * stride, 1]).filter(bool)
    lengths = tuple(draw(st.lists(st.one_of(around, st.integers(1, 60)), min_size=1, max_size=6)))
    make = draw(st.sampled_from([Partition.zigzag, Partition.contiguous]))
    return stride, lengths, make(lengths, degree=draw(st.integers(1, 5)))


def _held_rows(partition: Partition, member: int) -> list[Row]:
    return [(s.document, p) for s in partition.segments(member) for p in range(s.start, s.stop)]


def _arriving(partition: Partition, values: Sequence[RowsBefore], member: int) -> list[Row]:
    """What arrives at a member, if all members send by their own value."""
    rows = list[Row]()
    for owner, value in enumerate(values):
        held = _held_rows(partition, owner)
        starts = np.concatenate([[0], np.cumsum(value.sends)])
        rows += [held[row] for row in value.rows[starts[member] : starts[member + 1]]]
        assert value.sends[member] == values[member].receives[owner]
    return rows


@examples
@given(groups(), st.integers(0, 9))
def test_rows_before_runs_come_from_their_owners(group: tuple[int, tuple[int, ...], Partition], reach: int) -> None:
    _, _, partition = group
    segments = [partition.segments(member) for member in range(partition.degree)]
    values = [rows_before(segments, member, reach) for member in range(partition.degree)]
    for member, value in enumerate(values):
        arriving = [*_arriving(partition, values, member), NONE]
        for segment, arrived in zip(segments[member], value.arrived, strict=True):
            wanted = [(segment.document, p) if p >= 0 else NONE for p in range(segment.start - reach, segment.start)]
            assert [arriving[row] for row in arrived] == wanted
        assert sorted(value.arrived[value.arrived >= 0].tolist()) == list(range(sum(value.receives)))
        assert value.travels == any(segment.start and reach for runs in segments for segment in runs)


@examples
@given(groups(), st.integers(0, 2))
def test_entries_are_made_once_of_their_windows(
    group: tuple[int, tuple[int, ...], Partition], windows_before: int
) -> None:
    stride, lengths, partition = group
    segments = [partition.segments(member) for member in range(partition.degree)]
    values = [
        find_entries(segments, member, lengths, stride, windows_before=windows_before)
        for member in range(partition.degree)
    ]
    names = [(document, w) for document, length in enumerate(lengths) for w in range(length // stride)]
    assert sorted(np.concatenate(values[0].made).tolist()) == list(range(len(names)))
    for member, value in enumerate(values):
        sources = [
            *_held_rows(partition, member),
            *_arriving(partition, [other.before for other in values], member),
            NONE,
        ]
        laid_out = [[sources[row] for row in rows] for rows in value.windows.tolist()]
        assert len(value.own) == len(value.made[member]) and len(laid_out) >= 1
        for place, number in zip(value.own.tolist(), value.made[member].tolist(), strict=True):
            document, window = names[number]
            assert (document, window * stride + stride - 1) in sources[: segments[member].rows]
            assert value.positions[place] == window * stride
            assert value.firsts[document] + window == number
            for back in range(windows_before + 1):
                first = (window - back) * stride
                wanted = [(document, p) if first >= 0 else NONE for p in range(first, first + stride)]
                assert laid_out[place - back] == wanted
