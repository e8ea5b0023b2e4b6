"""Who made the device wait: the gaps of its timeline in which nothing runs, and what the host was doing meanwhile.

A gap belongs to the shortest call of the host that covers most of it: an operator, a call of CUDA such as cudaFree or
cudaStreamSynchronize, or a named range of FSDP2. Where none does, Python ran between two operators, and the operator
that came next is named. What kernels that run wait for is not seen: a message that waits for another rank is no gap.
"""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

Interval = tuple[float, float]
Event = tuple[str, float, float]  # name, start and end in seconds

GAP_TITLES = ("the host meanwhile", "gaps", "ms", "longest, ms", "the device then ran")
SHORT = "gaps shorter than these"  # a row of what is not told apart
MOST_GAPS, MOST_ROWS = 2_000, 12  # the longest gaps, whose causes are looked for, and rows
SHORTEST = 5e-6  # seconds of a gap; between two kernels of one stream there are some
_COVERED = 0.5  # of a gap, by the call that it belongs to
_NAME_LENGTH = 100


class _Cause:
    """The gaps of one activity of the host, and what the device ran after each."""

    def __init__(self, seconds: Sequence[float] = ()) -> None:
        """Begin with gaps of these lengths; `kernels` counts by name what the device ran next."""
        self.seconds = list(seconds)
        self.kernels = Counter[str]()

    def row(self, name: str, repeats: int) -> dict[str, Any]:
        """Return a row of the table: what the host did, and the gaps meanwhile.

        Their number and seconds are divided by `repeats` steps; `then` is what the device most often ran after one.
        """
        kernel = self.kernels.most_common(1)[0][0] if self.kernels else ""
        return {
            "host": name[:_NAME_LENGTH],
            "gaps": round(len(self.seconds) / repeats),
            "seconds": sum(self.seconds) / repeats,
            "longest": max(self.seconds),
            "then": kernel[:_NAME_LENGTH],
        }


def gaps_by_cause(
    device: Sequence[Event], host: Sequence[Event], within: Interval, repeats: int = 1
) -> list[dict[str, Any]]:
    """Return rows of the device's idle time by what the host did, the longest first.

    Events are (name, start, end) in seconds, of the device and of the host on one clock. `within` is the interval that
    is looked at, in which `repeats` steps were run; figures are those of a step in the mean. Causes are looked for only
    of the MOST_GAPS longest gaps; all shorter ones share the row SHORT. Of the causes, the MOST_ROWS of most seconds
    get a row.

    >>> device, host = [("gemm", 0.0, 1.0), ("adam", 3.0, 4.0)], [("aten::empty", 0.9, 2.9), ("cudaFree", 1.0, 2.8)]
    >>> [(row["host"], row["seconds"], row["then"]) for row in gaps_by_cause(device, host, (0.0, 4.0))]
    [('cudaFree', 2.0, 'adam')]
    """
    gaps = sorted(find_gaps(device, within), key=lambda gap: gap[0] - gap[1])  # the longest first
    starts = sorted((start, name) for name, start, _ in device)
    start_times, calls = np.array([start for start, _ in starts]), _Calls(host)
    causes: dict[str, _Cause] = {}
    for start, end in gaps[:MOST_GAPS]:
        cause = causes.setdefault(calls.find_cause(start, end), _Cause())
        cause.seconds.append(end - start)
        next_event = int(np.searchsorted(start_times, end))
        if next_event < len(starts):
            cause.kernels[starts[next_event][1]] += 1
    rows = [cause.row(name, repeats) for name, cause in causes.items()]
    rows.sort(key=lambda row: -row["seconds"])
    short_gaps = _Cause([end - start for start, end in gaps[MOST_GAPS:]])
    return rows[:MOST_ROWS] + ([short_gaps.row(SHORT, repeats)] if short_gaps.seconds else [])


def find_gaps(device: Iterable[Event], within: Interval) -> list[Interval]:
    """Return when nothing runs on the device, as intervals in order, of SHORTEST seconds at least."""
    first, last = within
    busy = merge_intervals(
        [(max(start, first), min(end, last)) for _, start, end in device if start < last and end > first]
    )
    # edges at even indices are where something ended, those at odd indices where the next thing began
    edges = [first, *(time for interval in busy for time in interval), last]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if b - a >= SHORTEST]


def merge_intervals(intervals: Sequence[Interval]) -> list[Interval]:
    """Return the union of intervals as intervals that do not touch, in order."""
    disjoint: list[Interval] = []
    for start, end in sorted(intervals):
        if disjoint and start <= disjoint[-1][1]:
            disjoint[-1] = (disjoint[-1][0], max(end, disjoint[-1][1]))
        else:
            disjoint.append((start, end))
    return disjoint


class _Calls:
    """The host's calls, as arrays: there are some hundred thousand in a step."""

    def __init__(self, host: Sequence[Event]) -> None:
        """Sort the calls by their beginning."""
        calls = sorted(host, key=lambda event: event[1])
        self._names = [name for name, _, _ in calls]
        self._starts = np.array([start for _, start, _ in calls])
        self._ends = np.array([end for _, _, end in calls])

    def find_cause(self, start: float, end: float) -> str:
        """Return the name of the shortest call that covers half of an interval at least.

        Where no call does, Python ran, and the first call that began after the interval's middle tells where: short
        calls in the first half are passed over.
        """
        overlaps = np.minimum(self._ends, end) - np.maximum(self._starts, start)
        covering = np.flatnonzero(overlaps >= _COVERED * (end - start))
        if len(covering):
            return self._names[covering[np.argmin((self._ends - self._starts)[covering])]]
        next_call = int(np.searchsorted(self._starts, (start + end) / 2))
        return f"Python before {self._names[next_call]}" if next_call < len(self._names) else "Python"


def gap_cells(rows: Iterable[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    """Return rows of gaps under `GAP_TITLES`, in milliseconds."""
    return [
        (row["host"], str(row["gaps"]), f"{1e3 * row['seconds']:.1f}", f"{1e3 * row['longest']:.2f}", row["then"])
        for row in rows
    ]
