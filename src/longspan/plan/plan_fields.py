"""The fields of a plan, and what follows from them alone: sizes, its timeline, its digest, its JSON."""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from longspan.plan.cost.cost import DEFAULT_COST, Cost
from longspan.plan.micro_batch import MicroBatch, Mode
from longspan.plan.timeline import Timeline, slot_rows, timeline


@dataclass(frozen=True)
class PlanFields:
    """The integers, strings and times of a Plan, and what follows from them alone.

    `lengths[d]` is the number of rows of document d; `targets` the number of predicted tokens by which the loss is
    divided; `predicted_seconds` the step's time under `cost`; `lower_bound_seconds` a time that no plan of these
    documents under that cost and cap can beat (0.0 for both where a plan was built by hand without a cost).
    """

    slots: int
    lengths: tuple[int, ...]
    micro_batches: tuple[MicroBatch, ...]
    targets: int
    mode: Mode = "lockstep"
    max_tokens_per_slot: int | None = None
    node_size: int = 8
    row_multiple: int = 1
    planner: str = "given"
    predicted_seconds: float = 0.0
    lower_bound_seconds: float = 0.0
    cost: Cost = DEFAULT_COST

    @property
    def tokens(self) -> int:
        """Rows of all documents."""
        return sum(self.lengths)

    @property
    def ratio(self) -> float:
        """Predicted time over the lower bound, at least 1; nan where the plan has no bound."""
        return self.predicted_seconds / self.lower_bound_seconds if self.lower_bound_seconds else float("nan")

    @cached_property
    def efficiency(self) -> float:
        """Rows used: tokens / (slots x micro-batches x rows of the fullest slot), between 0 and 1.

        A plan that is balanced by time need not fill its slots.
        """
        rows = slot_rows(self.micro_batches, self.slots, self.row_multiple)
        return self.tokens / (rows.size * int(rows.max())) if rows.any() else 0.0

    def timeline(self, cost: Cost | None = None) -> Timeline:
        """When each slot works in each micro-batch, under the plan's own cost or another."""
        cost = self.cost if cost is None else cost
        batches, slots = self.micro_batches, self.slots
        return timeline(batches, slots, cost, mode=self.mode, node_size=self.node_size, row_multiple=self.row_multiple)

    def digest(self) -> str:
        """SHA-256 (hex) of the integers and strings: what ranks compare before the first collective of a step.

        Times and the cost are left out: two hosts may round them differently without disagreeing on what to do.
        """
        return self._digest

    @cached_property
    def _digest(self) -> str:
        return hashlib.sha256(json.dumps(self._integers(), separators=(",", ":")).encode()).hexdigest()

    def to_json(self, indent: int | None = None) -> str:
        """The plan as JSON; `Plan.from_json` gives an equal plan back."""
        seconds = {"predicted_seconds": self.predicted_seconds, "lower_bound_seconds": self.lower_bound_seconds}
        floats = {"tokens": self.tokens} | seconds | {"cost": self.cost.to_json()}
        return json.dumps(self._integers() | floats, indent=indent)

    def _integers(self) -> dict[str, Any]:
        names = ("slots", "lengths", "targets", "mode", "max_tokens_per_slot", "node_size", "row_multiple", "planner")
        batches = [[group.to_dict() for group in batch.groups] for batch in self.micro_batches]
        return {name: getattr(self, name) for name in names} | {"micro_batches": batches}
