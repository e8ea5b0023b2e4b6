"""Where every item goes: anchors, which have slots of their own, and cells, which hold the others."""

import math
from dataclasses import dataclass, field

from longspan.plan.dynamic.problem import Floats, Parts, Problem


@dataclass(frozen=True)
class Anchor:
    """A document that has slots for itself, but for fillers in its cells."""

    micro_batch: int
    item: int
    parts: Parts
    rows: int  # a slot
    seconds: float


@dataclass(eq=False)
class Cells:
    """Runs of equally busy slots inside a block, as columns; `anchor` is −1 where no anchor takes them."""

    micro_batch: list[int] = field(default_factory=list[int])
    start: list[int] = field(default_factory=list[int])
    width: list[int] = field(default_factory=list[int])
    anchor: list[int] = field(default_factory=list[int])
    level: list[float] = field(default_factory=list[float])  # seconds until it ends
    room: list[int] = field(default_factory=list[int])  # rows of fillers that it can still hold
    fillers: list[list[int]] = field(default_factory=list[list[int]])

    def add(self, micro_batch: int, part: tuple[int, int], anchor: int, level: float, rows: int) -> None:
        """A cell with so many rows left on each slot."""
        self.micro_batch.append(micro_batch)
        self.start.append(part[0])
        self.width.append(part[1])
        self.anchor.append(anchor)
        self.level.append(level)
        self.room.append(rows * part[1])
        self.fillers.append([])


@dataclass(frozen=True, eq=False)
class Draft:
    """Where every item goes, before it is decided how the slots of a cell share its fillers."""

    problem: Problem
    durations: Floats  # (micro-batches,) when the last cell ends, without the launch, if fillers are shared evenly
    anchors: list[Anchor]
    cells: Cells

    @property
    def seconds(self) -> float:
        """The step's time in lockstep, launches included."""
        return self.step_seconds(self.durations.tolist())

    def step_seconds(self, ends: list[float]) -> float:
        """The step's time in lockstep if its micro-batches took so long (0: has no documents), with launches."""
        request = self.problem.request
        multiple = request.micro_batch_multiple
        count = -(-sum(end > 0.0 for end in ends) // multiple) * multiple
        return math.fsum(ends) + count * request.cost.micro_batch_seconds
