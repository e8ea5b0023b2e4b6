"""Bins for documents: the fewest that hold them, or a number of bins with about equal work."""

from collections.abc import Sequence
from heapq import heappop, heappush, heapreplace


def pack_first_fit(lengths: Sequence[int], room: int) -> list[int]:
    """Choose the bin of each document: the first with room for its rows, of bins with `room` rows each. With lengths in
    falling order this is first-fit decreasing. The bins are the leaves of a binary tree in an array (node n has the
    children 2n and 2n + 1), whose nodes hold the most room of any bin below: a search goes left where that has room
    enough.
    """
    leaves = 1
    # Two neighbouring bins hold more than `room` rows together, so no more than this many bins are filled.
    while leaves < min(len(lengths), 2 * sum(lengths) // room + 1):
        leaves *= 2
    most_room = [room] * (2 * leaves)
    bins: list[int] = []
    for length in lengths:
        node = 1
        while node < leaves:
            node *= 2
            node += most_room[node] < length
        bins.append(node - leaves)
        value = most_room[node] = most_room[node] - length
        while node > 1:
            sibling = most_room[node ^ 1]
            node //= 2
            value = max(value, sibling)
            if most_room[node] == value:  # so nothing changes above either
                break
            most_room[node] = value
    return bins


def pack_least_loaded(lengths: Sequence[int], work: Sequence[float], bins: int, room: int) -> list[int] | None:
    """Choose the bin of each document: the one with the least work, of the `bins` bins that have `room` for it; None if
    a document fits none. Lengths (rows) must be in falling order; `work` are seconds. `idle` is a heap of (load, bin).
    Bins that are too full for a document wait in `full` until the documents have become short enough.
    """
    room_left = [room] * bins
    idle = [(0.0, b) for b in range(bins)]
    full: list[tuple[int, int, float]] = []  # (−room left, bin, load)
    places: list[int] = []
    for length, seconds in zip(lengths, work, strict=True):
        while full and -full[0][0] >= length:
            _, b, load = heappop(full)
            heappush(idle, (load, b))
        while idle and room_left[idle[0][1]] < length:
            load, b = heappop(idle)
            heappush(full, (-room_left[b], b, load))
        if not idle:
            return None
        load, b = idle[0]
        heapreplace(idle, (load + seconds, b))
        room_left[b] -= length
        places.append(b)
    return places
