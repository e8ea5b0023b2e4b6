"""A time that no plan of some documents can beat under a cost, computed from the lengths only.

The planners have no part in it, so that a mistake of theirs shows as a plan that beats its bound.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from longspan.errors import PlanError
from longspan.plan.cost.cost import Cost

ROUNDING = 1e-10  # relative; a plan may meet the bound exactly and sum its seconds in another order


@dataclass(frozen=True)
class Bound:
    """Two lower bounds in seconds and the larger of them, which is rounded down by 1e-10 of itself.

    `area`: all work spread evenly over all slots and their stages, and the launches of the fewest micro-batches;
    `crossing` is added to it: the messages of documents that are longer than a slot's cap, on ideal links only, so that
    plans on measured links are 2 to 20 % above it. `longest`: the longest document at its best degree.
    """

    area: float
    longest: float
    crossing: float = 0.0

    @property
    def seconds(self) -> float:
        """The bound: no plan takes less."""
        return max(self.area + self.crossing, self.longest) * (1 - ROUNDING)


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
    """Return the bound of these lengths, by area and by the longest document; max_tokens_per_slot None means no limit.

    `max_cp` limits the degree of any group. The slots of a step have slots · seconds together, of which work,
    unavoidable messages and launches are parts that do not overlap: their sum over the slots bounds the step. Raises
    PlanError if the longest document fits no group at all.
    """
    rows, widest = np.asarray(lengths, dtype=np.int64), min(max_cp or slots, slots)
    attention = math.fsum(rows.astype(np.float64) ** 2 * cost.attention_seconds)
    work = math.fsum(rows * float(cost.work_seconds(1, 0))) + attention
    # In free mode a slot skips micro-batches without documents for it: it is in as many as its rows fill, on average.
    launches = int(rows.sum()) / (slots * max_tokens_per_slot) if max_tokens_per_slot else 0.0
    launches = max(1, math.ceil(launches)) if mode == "lockstep" else launches
    # Every micro-batch takes its launches beside its work, and no less than the host needs.
    area = max(work / slots + cost.micro_batch_seconds * launches, cost.launch_seconds * launches) / cost.stages
    if not len(rows):
        return Bound(area, 0.0)
    longest = _longest_seconds(int(rows.max()), widest, max_tokens_per_slot, cost, node_size)
    if max_tokens_per_slot is None or cost.network:
        return Bound(area, longest)
    messages = _ideal_message_seconds(rows, max_tokens_per_slot, attention, cost)
    return Bound(area, longest, messages / slots / cost.stages)


def _ideal_message_seconds(rows: NDArray[np.int64], cap: int, attention: float, cost: Cost) -> float:
    """Return the slot seconds of messages that no plan avoids on ideal links, beyond those that `attention` hides.

    A document of L rows, more than the cap, needs n = ⌈L / cap⌉ slots or more. Its group has at least L / cap slots for
    these rows, each of which waits for the latency of n − 1 steps of a ring, or of one message under other types. Its
    rows go to n − 1 other slots at the least under `p2p` and `all_gather`; under `a2a` (n − 1) / n of them leave their
    slot once. Attention hides messages of a ring alone. Of types that may be rings or exchanges, "auto" and `a2a+p2p`,
    only the latency counts, and no bytes.
    """
    if not (rows > cap).any():
        return 0.0
    long = rows[rows > cap].astype(np.float64)
    needed, kind = np.ceil(long / cap), cost.cp_comm_type
    steps = needed - 1 if kind == "p2p" else np.ones_like(long)
    waits = math.fsum(long / cap * cost.ring_step_seconds * steps)
    fastest = max(cost.inside_bytes_per_second, cost.across_bytes_per_second)
    turns = math.fsum(cost.ring_bytes * long * (needed - 1)) / fastest
    exchanges = math.fsum(cost.exchange_bytes * long * (1 - 1 / needed)) / fastest
    if kind == "p2p":
        return max(turns - attention, 0.0) + waits
    return waits + {"all_gather": turns, "a2a": exchanges}.get(kind, 0.0)


def _longest_seconds(length: int, widest: int, cap: int | None, cost: Cost, node_size: int) -> float:
    """Return the seconds of one document in a group of its own, at the best degree and place that the cap allows.

    They are compute / degree + messages that show on ideal links, the least over all degrees and types, and one launch.
    A group with other documents in it takes no less. Of states the latency alone counts: their bytes depend on the
    group's other documents.
    """
    narrowest = 1 if cap is None else -(-length // cap)
    if narrowest > widest:
        raise PlanError(
            f"a document of {length} rows needs {narrowest} slots at max_tokens_per_slot {cap}, but a group has at "
            f"most {widest}; raise max_tokens_per_slot or cut the document"
        )
    degree = np.arange(narrowest, widest + 1)
    if cost.network:
        seconds = cost.work_seconds(length, float(length) ** 2) / degree
    else:
        fastest = max(cost.inside_bytes_per_second, cost.across_bytes_per_second)  # what fits a host may also be across
        alone = replace(cost, states=None, inside_bytes_per_second=fastest)
        together = np.minimum(degree, node_size)
        seconds = alone.group_seconds(length, length**2, degree, together == degree, together=together)
        seconds = seconds + (cost.states.step_seconds if cost.states else 0.0) * (degree > 1)
    return float(seconds.min()) + cost.micro_batch_seconds
