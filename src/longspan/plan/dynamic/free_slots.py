"""The free slots of a micro-batch while documents are placed in it: who takes some changes what is left."""

from longspan.plan.dynamic.problem import DegreeSet, Parts, divide_into_even_runs


class FreeSlots:
    """The free slots of one micro-batch, taken from the start of each block; a group stays in a node if it can.

    `left` are the free slots of each block, `total` those of all.
    """

    def __init__(self, blocks: tuple[tuple[int, int], ...], degrees: DegreeSet) -> None:
        self.blocks = blocks
        self.degrees = degrees
        self.left: list[int] = [size for _, size in blocks]
        self.total = sum(self.left)
        self.by_left: list[list[int]] = [[] for _ in range(max(self.left) + 1)]  # blocks by free slots
        # backwards: the last of a list, a first block, is taken first
        for block in range(len(self.left) - 1, -1, -1):
            self.by_left[self.left[block]].append(block)

    def take_slots(self, width: int) -> Parts:
        """Take `width` slots, at most `total`, and return their parts: of one block if one has them, else of as few as
        possible, in the order in which they were taken.
        """
        parts: Parts = []
        while width:
            size = self.smallest_fit(width, avoid_remnant=not parts) or max(
                n for n, b in enumerate(self.by_left) if b
            )
            block = self.by_left[size].pop()
            count = min(size, width)
            start, all_slots = self.blocks[block]
            parts.append((start + all_slots - size, count))
            self.left[block] = size - count
            self.by_left[size - count].append(block)
            self.total -= count
            width -= count
        return parts

    def usable_runs_left(self) -> Parts:
        """Return the runs (first slot, slots) of free slots that each hold a group, by block; none is taken."""
        return [
            (start + size - left + offset, count)
            for (start, size), left in zip(self.blocks, self.left, strict=True)
            for offset, count in divide_into_even_runs(left, self.degrees)
        ]

    def smallest_fit(self, width: int, *, avoid_remnant: bool = False) -> int:
        """Return the fewest free slots of any block that has at least `width`; 0 if none has. With `avoid_remnant`,
        blocks come first in which taking `width` leaves no slot, or enough for another group.
        """
        for size in range(width, len(self.by_left)):
            if self.by_left[size] and not (avoid_remnant and 0 < size - width < self.degrees[0]):
                return size
        return self.smallest_fit(width) if avoid_remnant else 0
