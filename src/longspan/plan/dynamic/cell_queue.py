"""Cells in the order in which they would end, so that the earliest one with room for an item is found quickly."""

from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from longspan.plan.dynamic.draft import Cells
from longspan.plan.dynamic.problem import Problem


class CellQueue:
    """Cells by how late they end against the duration of their micro-batch, in one heap for each width.

    A cell that is too full for an item waits in another heap, by its room, until the items have become short enough.
    """

    def __init__(self, cells: Cells, durations: list[float], problem: Problem) -> None:
        self.cells = cells
        self.late = [level - durations[m] for level, m in zip(cells.level, cells.micro_batch, strict=True)]
        idle: list[list[tuple[float, int]]] = [[] for _ in range(problem.widest_block + 1)]
        for cell, (width, late) in enumerate(zip(cells.width, self.late, strict=True)):
            if width in problem.degrees:
                idle[width].append((late, cell))
        self.queues: list[tuple[int, list[tuple[float, int]], list[tuple[int, int]]]] = []
        for width, heap in enumerate(idle):
            if heap:
                heapify(heap)
                self.queues.append((width, heap, []))

    def place(self, items: list[int], at: int, tokens: list[int], work: list[float]) -> int:
        """Place items from `at` on until one fits no cell; the position of that one, or the number of items."""
        room, late, level, fillers = self.cells.room, self.late, self.cells.level, self.cells.fillers
        queues = self.queues
        for position in range(at, len(items)):
            item = items[position]
            rows, seconds, earliest, taken, chosen = tokens[item], work[item], np.inf, 0, None
            for width, idle, full in queues:
                while full and -full[0][0] >= rows:
                    cell = heappop(full)[1]
                    heappush(idle, (late[cell], cell))
                while idle and room[idle[0][1]] < rows:
                    cell = heappop(idle)[1]
                    heappush(full, (-room[cell], cell))
                if idle and (end := idle[0][0] + seconds / width) < earliest:
                    earliest, taken, chosen = end, width, idle
            if chosen is None:
                return position
            cell = chosen[0][1]
            heapreplace(chosen, (earliest, cell))
            late[cell] = earliest
            level[cell] += seconds / taken
            room[cell] -= rows
            fillers[cell].append(item)
        return len(items)
