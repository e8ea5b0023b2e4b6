"""Slots as the dynamic planner takes them: blocks, which lie in one node, runs that hold a group, and free slots."""

from bisect import bisect_right
from functools import cache
from itertools import pairwise

DegreeSet = range | tuple[int, ...]  # rising
Parts = list[tuple[int, int]]  # (first slot, number of slots), one for each block


def blocks_of(slots: int, node_size: int, min_cp: int, max_cp: int) -> tuple[tuple[int, int], ...]:
    """Nodes; or, where a group needs more than a node, runs of nodes that hold one. What cannot hold one stays idle."""
    size = node_size if min_cp <= node_size else -(-min_cp // node_size) * node_size
    if size > max_cp and min_cp > node_size:
        size = min_cp
    size = min(size, slots)
    starts = list(range(0, slots, size))
    sizes = [min(size, slots - start) for start in starts]
    if len(sizes) > 1 and sizes[-1] < min_cp and sizes[-2] + sizes[-1] <= max_cp:
        sizes[-2:] = [sizes[-2] + sizes[-1]]
    return tuple(zip(starts, sizes, strict=False))


@cache
def runs(slots: int, degrees: DegreeSet) -> Parts:
    """Runs of so many slots that each hold a group: as few left out, as few runs, and as even as the degrees allow."""
    if slots < degrees[0]:
        return []
    pieces = -(-slots // degrees[-1])
    if slots // pieces < degrees[0]:
        pieces = slots // degrees[0]
    used = min(slots, pieces * degrees[-1])
    edges = [used * piece // pieces for piece in range(pieces + 1)]
    even = [(first, stop - first) for first, stop in pairwise(edges)]
    return even if all(width in degrees for _, width in even) else _uneven_runs(slots, degrees)


def _uneven_runs(slots: int, degrees: DegreeSet) -> Parts:
    """The same where equal parts are no degrees, the widest run first."""
    best: list[tuple[int, int, int, tuple[int, ...]]] = [(0, 0, 0, ())]  # left out, runs, squared widths, widths
    for count in range(1, slots + 1):
        left, number, squares, widths = best[-1]
        options = [(left + 1, number, squares, widths)]
        for width in degrees[: bisect_right(degrees, count)]:
            left, number, squares, widths = best[count - width]
            options.append((left, number + 1, squares + width * width, (*widths, width)))
        best.append(min(options))
    widths = sorted(best[slots][3], reverse=True)
    return [(sum(widths[:i]), width) for i, width in enumerate(widths)]


def slots_of(parts: Parts) -> tuple[int, ...]:
    """All slots of these parts, in rising order."""
    return tuple(sorted(slot for start, count in parts for slot in range(start, start + count)))


class FreeSlots:
    """The free slots of one micro-batch, taken from the start of each block, so that a group stays in a node if it can.

    Blocks are found by how many slots they have left.
    """

    def __init__(self, blocks: tuple[tuple[int, int], ...], degrees: DegreeSet) -> None:
        self.blocks = blocks
        self.degrees = degrees
        self.left = [size for _, size in blocks]
        self.total = sum(self.left)
        self.by_left: list[list[int]] = [[] for _ in range(max(self.left) + 1)]
        for block in range(len(self.left) - 1, -1, -1):
            self.by_left[self.left[block]].append(block)

    def take(self, width: int) -> Parts:
        """So many slots, from one block if one has them, else from as few as possible; at most `total`."""
        parts: Parts = []
        while width:
            size = self._fitting(width, alone=not parts) or self._largest()
            count = min(size, width)
            parts.append(self._take_from(self.by_left[size].pop(), count))
            width -= count
        return parts

    def has_block(self, width: int) -> bool:
        """Whether one block has so many free slots."""
        return bool(self._fitting(width, alone=False))

    def remaining_runs(self) -> Parts:
        """The slots that are left, in runs that hold a group."""
        return [
            (start + size - left + offset, count)
            for (start, size), left in zip(self.blocks, self.left, strict=True)
            for offset, count in runs(left, self.degrees)
        ]

    def _fitting(self, width: int, *, alone: bool) -> int:
        """The fewest free slots of a block that hold the width, and leave none or enough for a group; 0 for none."""
        for size in range(width, len(self.by_left)):
            if self.by_left[size] and not (alone and 0 < size - width < self.degrees[0]):
                return size
        return self._fitting(width, alone=False) if alone else 0

    def _largest(self) -> int:
        return next(size for size in range(len(self.by_left) - 1, 0, -1) if self.by_left[size])

    def _take_from(self, block: int, count: int) -> tuple[int, int]:
        start, size = self.blocks[block]
        left = self.left[block]
        self.left[block] = left - count
        self.total -= count
        self.by_left[left - count].append(block)
        return start + size - left, count
