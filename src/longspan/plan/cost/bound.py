"""A time that no plan of some documents can beat, whatever its groups and micro-batches.

It is computed from the lengths only and shares no code with the planners or with the evaluation of plans, so that a
mistake in either shows as a plan that beats its bound. It is a bound of the cost model, not of a machine.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from longspan.errors import PlanError
from longspan.plan.cost.cost import Cost

ROUNDING = 1e-10  # relative; a plan may meet the bound exactly and sum its seconds in another order


@dataclass(frozen=True)
class Bound:
    """Two lower bounds in seconds and the larger of them, which is rounded down by 1e-10 of itself.

    `area`: all work spread evenly over all slots, and the launches of the fewest micro-batches. `longest`: the longest
    document in a group of its own at its best degree.
    """

    area: float
    longest: float

    @property
    def seconds(self) -> float:
        """The bound: no plan takes less."""
        return max(self.area, self.longest) * (1 - ROUNDING)


def lower_bound_seconds(
    lengths: Sequence[int],
    slots: int,
    max_tokens_per_slot: int | None,
    cost: Cost,
    mode: str = "lockstep",
    *,
    max_cp: int | None = None,
    node_size: int = 8,
) -> Bound:
    """The area and the longest document of these lengths; max_tokens_per_slot None means no limit.

    `max_cp` limits the degree of any group. Raises PlanError if the longest document fits no group at all.
    """
    rows = np.asarray(lengths, dtype=np.int64)
    work = math.fsum(rows * cost.linear_seconds + rows.astype(np.float64) ** 2 * cost.attention_seconds)
    area = work / slots + cost.micro_batch_seconds * _launches(int(rows.sum()), slots, max_tokens_per_slot, mode)
    if not len(rows):
        return Bound(area, 0.0)
    widest = min(max_cp or slots, slots)
    return Bound(area, _longest_seconds(int(rows.max()), widest, max_tokens_per_slot, cost, node_size))


def _launches(tokens: int, slots: int, cap: int | None, mode: str) -> float:
    """Micro-batches that a slot must take part in, on average; in lockstep it takes part in all, at least one."""
    if mode == "lockstep":
        return 1 if cap is None else max(1, -(-tokens // (slots * cap)))
    return 0.0 if cap is None else tokens / (slots * cap)


def _longest_seconds(length: int, widest: int, cap: int | None, cost: Cost, node_size: int) -> float:
    """Seconds of one document in a group of its own, at the best degree that the cap allows and the best place."""
    narrowest = 1 if cap is None else -(-length // cap)
    if narrowest > widest:
        raise PlanError(
            f"a document of {length} rows needs {narrowest} slots at max_tokens_per_slot {cap}, but a group has at "
            f"most {widest}; raise max_tokens_per_slot or cut the document"
        )
    degree = np.arange(narrowest, widest + 1)
    within = max(cost.inside_bytes_per_second, cost.across_bytes_per_second)  # a group of this size may also be across
    speed = np.where(degree <= node_size, within, cost.across_bytes_per_second)
    compute = (cost.linear_seconds * length + cost.attention_seconds * float(length) ** 2) / degree
    return float((compute + _waits(cost, length, degree, speed)).min()) + cost.micro_batch_seconds


def _waits(cost: Cost, length: int, degree: NDArray[np.int64], speed: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds that each member of a group of a degree communicates beyond what attention hides (degrees,)."""
    if cost.cp_comm_type in ("a2a", "a2a+p2p"):
        swapping = degree if cost.cp_comm_type == "a2a" else np.gcd(degree, cost.a2a_size)
        speed_of_swap = speed if cost.cp_comm_type == "a2a" else cost.inside_bytes_per_second
        swap = cost.exchange_bytes * length / degree * (1 - 1 / swapping) / speed_of_swap
        swap = swap + cost.ring_step_seconds * (swapping > 1)
    else:
        swapping, swap = np.ones_like(degree), np.zeros(len(degree))
    states = (cost.states.step_seconds if cost.states else 0.0) * (degree > 1)  # what they send depends on others too
    turn = cost.ring_bytes * length * (1 / swapping - 1 / degree) / speed
    if cost.cp_comm_type == "all_gather":
        return turn + cost.ring_step_seconds * (degree > 1) + states
    hidden = cost.attention_seconds * float(length) ** 2 / degree
    return swap + np.maximum(turn - hidden, 0.0) + cost.ring_step_seconds * (degree / swapping - 1) + states
