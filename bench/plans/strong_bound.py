"""A stronger lower bound than that of a plan: it also knows that caps force groups to be wide, and what that costs.

Like that one it is computed from the lengths alone, without the planners. It shows how much of a plan's distance from
area and longest document no plan could avoid. It is stronger where documents need much of the cluster, where `min_cp`
forces short documents apart, or where the network is slow.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longspan.errors import PlanError
from longspan.plan.cost.cost import Cost
from longspan.plan.step_times import ROUNDING

MIXTURES = (0.0, 0.25, 0.5, 0.75, 1.0)  # of traffic in the longer of attention and traffic

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]


@dataclass(frozen=True)
class StrongBound:
    """Two lower bounds in seconds and the larger of them, which is rounded down by 1e-10 of itself.

    `area`: all work with the ring steps and the traffic that no group can be without, spread evenly over all slots, and
    the launches. `serial`: documents of which no two fit one micro-batch, one after another, each at its best degree.
    """

    area: float
    serial: float

    @property
    def seconds(self) -> float:
        """The bound: no plan takes less."""
        return max(self.area, self.serial) * (1 - ROUNDING)


def strong_bound(
    lengths: Sequence[int],
    slots: int,
    max_tokens_per_slot: int | None,
    cost: Cost,
    mode: str = "lockstep",
    *,
    min_cp: int = 1,
    max_cp: int | None = None,
    node_size: int = 8,
) -> StrongBound:
    """The bound of plans of these lengths whose groups have degrees from `min_cp` to `max_cp`.

    >>> round(strong_bound([15000] * 4, 16, 1024, Cost()).seconds, 2)
    1.13

    A group of c slots holds at most c x cap rows and c is at least the least degree of each of its documents, so its
    c x (c − 1) steps come to at least (least degree − 1) / cap for each row. The longer of attention and traffic is at
    least any mixture of both, and traffic grows with the degree. Raises PlanError where a document fits no group.
    """
    rows = np.sort(np.asarray(lengths, dtype=np.int64))[::-1]
    widest = min(max_cp or slots, slots)
    if not len(rows):
        return StrongBound(cost.micro_batch_seconds if mode == "lockstep" else 0.0, 0.0)
    cap = int(rows.sum()) if max_tokens_per_slot is None else max_tokens_per_slot
    least = np.maximum(min_cp, -(-rows // max(cap, 1)))
    if int(least[0]) > widest:
        raise PlanError(
            f"a document of {rows[0]} rows needs {least[0]} slots at max_tokens_per_slot {max_tokens_per_slot}, but a "
            f"group has at most {widest}; raise max_tokens_per_slot or cut the document"
        )
    floor = _Floor(cost, widest, node_size)
    area = floor.slot_seconds(rows, least, max_tokens_per_slot) / slots
    area += cost.micro_batch_seconds * _launches(int(rows.sum()), slots, max_tokens_per_slot, mode)
    return StrongBound(area, floor.serial_seconds(rows, least, slots, max_tokens_per_slot, mode))


@dataclass(frozen=True)
class _Floor:
    """What documents cost at the least, whatever group they are in."""

    cost: Cost
    widest: int
    node_size: int

    def _wire_seconds(self, degree: Ints) -> Floats:
        """Slot seconds of traffic for each row of a group of this degree in the best place; more for a higher one."""
        fast = max(self.cost.inside_bytes_per_second, self.cost.across_bytes_per_second)
        speed = np.where(degree <= self.node_size, fast, self.cost.across_bytes_per_second)
        return self.cost.ring_bytes * (degree.astype(np.float64) - 1) / speed

    def slot_seconds(self, rows: Ints, least: Ints, cap: int | None) -> float:
        """Seconds of all documents added over their slots."""
        cost = self.cost
        steps = 0.0 if cap is None else math.fsum(rows * (least - 1.0)) * cost.ring_step_seconds / cap
        attention = math.fsum(rows.astype(np.float64) ** 2) * cost.attention_seconds
        wire = math.fsum(rows * self._wire_seconds(least))
        mixed = max((1.0 - share) * attention + share * wire for share in MIXTURES)
        return math.fsum(rows * cost.linear_seconds) + mixed + steps

    def serial_seconds(self, rows: Ints, least: Ints, slots: int, cap: int | None, mode: str) -> float:
        """Seconds of documents that need micro-batches of their own; rows fall.

        Two documents with more rows than all slots hold never meet in a micro-batch. In lockstep the i-th micro-batch
        takes at least as long as the first document that i − 1 full ones before it have no rows for; in free mode two
        such documents share a slot if both need more than half of the slots, so they follow each other.
        """
        capacity = int(rows.sum()) if cap is None else slots * cap
        if mode == "lockstep":
            before = (np.cumsum(rows) - 1) // capacity  # micro-batches that cannot hold all up to this document
            first = np.flatnonzero(np.diff(before, prepend=-1))
        else:
            first = np.flatnonzero(2 * rows > capacity)
            first = first if len(first) else np.zeros(1, dtype=np.int64)
        alone = [self._alone(int(rows[i]), int(least[i])) for i in first.tolist()]
        return math.fsum(alone) + len(alone) * self.cost.micro_batch_seconds

    def _alone(self, length: int, least: int) -> float:
        """Seconds of one document in a group of its own at its best degree."""
        cost = self.cost
        degree = np.arange(least, self.widest + 1)
        attention = np.maximum(cost.attention_seconds * float(length) ** 2, length * self._wire_seconds(degree))
        total = (cost.linear_seconds * length + attention) / degree + cost.ring_step_seconds * (degree - 1.0)
        return float(total.min())


def _launches(tokens: int, slots: int, cap: int | None, mode: str) -> float:
    if mode == "lockstep":
        return 1 if cap is None else max(1, -(-tokens // (slots * cap)))
    return 0.0 if cap is None else tokens / (slots * cap)
