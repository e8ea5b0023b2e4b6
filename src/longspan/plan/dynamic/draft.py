"""Where every item goes: anchors, which have slots of their own, and bins, which hold the others."""

import math
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush, heapreplace

import numpy as np

from longspan.plan.dynamic.problem import Floats, Problem
from longspan.plan.dynamic.slots import Parts


@dataclass(frozen=True)
class Anchor:
    """A document that has slots for itself, but for the fillers in the bins on these slots."""

    micro_batch: int
    item: int
    parts: Parts
    rows: int  # a slot
    seconds: float


@dataclass(eq=False)
class Bins:
    """Runs of equally busy slots inside a block, as columns; `anchor` is −1 where no anchor takes them."""

    micro_batch: list[int] = field(default_factory=list[int])
    start: list[int] = field(default_factory=list[int])
    width: list[int] = field(default_factory=list[int])
    anchor: list[int] = field(default_factory=list[int])
    seconds: list[float] = field(default_factory=list[float])  # until it ends
    room: list[int] = field(default_factory=list[int])  # rows of fillers that it can still hold
    fillers: list[list[int]] = field(default_factory=list[list[int]])

    def add(self, micro_batch: int, part: tuple[int, int], anchor: int, seconds: float, rows: int) -> None:
        """A bin that is busy for some seconds already and has so many rows left on each slot."""
        self.micro_batch.append(micro_batch)
        self.start.append(part[0])
        self.width.append(part[1])
        self.anchor.append(anchor)
        self.seconds.append(seconds)
        self.room.append(rows * part[1])
        self.fillers.append([])


class LeastLoaded:
    """Gives each item to the bin that ends earliest with it, measured against the duration of its micro-batch.

    Bins of one width are in a heap by how late they end. A bin that is too full for an item waits in another heap, by
    its room, until the items have become short enough.
    """

    def __init__(self, bins: Bins, durations: list[float], problem: Problem) -> None:
        self.bins = bins
        self.late = [seconds - durations[m] for seconds, m in zip(bins.seconds, bins.micro_batch, strict=True)]
        by_width: list[list[tuple[float, int]]] = [[] for _ in range(problem.widest_block + 1)]
        for b, (width, late) in enumerate(zip(bins.width, self.late, strict=True)):
            if width in problem.degrees:
                by_width[width].append((late, b))
        self.heaps: list[tuple[int, list[tuple[float, int]], list[tuple[int, int]]]] = []
        for width, heap in enumerate(by_width):
            if heap:
                heapify(heap)
                self.heaps.append((width, heap, []))

    def place(self, items: list[int], at: int, tokens: list[int], work: list[float]) -> int:
        """Place items from `at` on until one fits no bin; the position of that one, or the number of items."""
        room, late, total, fillers = self.bins.room, self.late, self.bins.seconds, self.bins.fillers
        heaps = self.heaps
        for position in range(at, len(items)):
            item = items[position]
            rows, seconds, earliest, taken, chosen = tokens[item], work[item], np.inf, 0, None
            for width, idle, full in heaps:
                while full and -full[0][0] >= rows:
                    b = heappop(full)[1]
                    heappush(idle, (late[b], b))
                while idle and room[idle[0][1]] < rows:
                    b = heappop(idle)[1]
                    heappush(full, (-room[b], b))
                if idle and (end := idle[0][0] + seconds / width) < earliest:
                    earliest, taken, chosen = end, width, idle
            if chosen is None:
                return position
            b = chosen[0][1]
            heapreplace(chosen, (earliest, b))
            late[b] = earliest
            total[b] += seconds / taken
            room[b] -= rows
            fillers[b].append(item)
        return len(items)


@dataclass(frozen=True, eq=False)
class Draft:
    """Where every item goes, before it is decided how the slots of a bin share its fillers."""

    problem: Problem
    durations: Floats  # (micro-batches,) when the last bin ends, without the launch, if fillers are shared evenly
    anchors: list[Anchor]
    bins: Bins

    @property
    def seconds(self) -> float:
        """The step's time in lockstep, launches included."""
        return step_seconds(self.problem, self.durations.tolist())


def step_seconds(problem: Problem, durations: list[float]) -> float:
    """The time in lockstep of micro-batches of these durations (0: it has no documents), with their launches."""
    multiple = problem.request.micro_batch_multiple
    count = -(-sum(duration > 0.0 for duration in durations) // multiple) * multiple
    return math.fsum(durations) + count * problem.request.cost.micro_batch_seconds
