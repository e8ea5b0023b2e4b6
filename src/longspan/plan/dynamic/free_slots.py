"""Slots of one micro-batch that nobody has taken yet, by block, so that a group stays inside a node where it can."""

from longspan.plan.dynamic.problem import Parts, Problem, runs


class FreeSlots:
    """The free slots of each block, taken from its start; blocks are found by how many they have left."""

    def __init__(self, problem: Problem) -> None:
        self.blocks = problem.blocks
        self.degrees = problem.degrees
        self.left = [size for _, size in problem.blocks]
        self.total = sum(self.left)
        self.by_left: list[list[int]] = [[] for _ in range(problem.widest_block + 1)]
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

    def rest(self) -> Parts:
        """What is left, in runs that hold a group."""
        found: Parts = []
        for (start, size), left in zip(self.blocks, self.left, strict=True):
            first = start + size - left
            found.extend((first + offset, count) for offset, count in runs(left, self.degrees))
        return found

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
