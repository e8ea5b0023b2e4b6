"""What a step does: groups of slots that work on documents, micro-batch by micro-batch.

A Plan is made from document lengths alone and is the same on every rank and host. Planners (`fixed`, `padded`,
`dynamic`) make it; `comm.bind` turns one of its micro-batches into what a rank does. This module does not decide
anything and does not price anything (`cost.py`, `timeline.py`, `bound.py`); `check.py` says what makes a plan sound.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from longspan.layout import Partition
from longspan.plan.check import check_plan
from longspan.plan.cost.cost import DEFAULT_COST, Cost
from longspan.plan.plan_text import plan_table
from longspan.plan.timeline import Timeline, slot_rows, timeline

CommType = Literal["p2p", "all_gather", "a2a", "a2a+p2p", "auto"]
PartitionKind = Literal["zigzag", "contiguous"]
Mode = Literal["lockstep", "free"]


@dataclass(frozen=True)
class Group:
    """Slots that share documents in one micro-batch: all that `bind` needs to know of them.

    `slots` in ring order; `documents` are ids into the plan's lengths, `lengths` their rows, in packed order.
    `cp_comm_type` is one string, or one per model layer. `pad_to` lays every document out as that many rows
    (the classical padded batch); None lays each out as it is.
    """

    slots: tuple[int, ...]
    documents: tuple[int, ...]
    lengths: tuple[int, ...]
    cp_comm_type: str | tuple[str, ...] = "p2p"
    hierarchical_context_parallel_sizes: tuple[int, int] | None = None
    partition: PartitionKind = "zigzag"
    pad_to: int | None = None

    @property
    def degree(self) -> int:
        """Context-parallel degree: how many slots share the rows."""
        return len(self.slots)

    @property
    def tokens(self) -> int:
        """Rows of the documents, without padding."""
        return sum(self.lengths)

    @property
    def laid_out(self) -> tuple[int, ...]:
        """Rows that each document takes, padding included."""
        return self.lengths if self.pad_to is None else (self.pad_to,) * len(self.lengths)

    @property
    def rows_per_slot(self) -> int:
        """The most rows that one member holds, padding included: ceil(laid-out rows / degree)."""
        return -(-sum(self.laid_out) // self.degree)

    def to_dict(self) -> dict[str, Any]:
        """The fields for a JSON document; those that most groups leave at their default are left out."""
        fields = {name: getattr(self, name) for name in ("slots", "documents", "lengths", "cp_comm_type")}
        if self.hierarchical_context_parallel_sizes is not None:
            fields["hierarchical_context_parallel_sizes"] = self.hierarchical_context_parallel_sizes
        if self.partition != "zigzag":
            fields["partition"] = self.partition
        return fields if self.pad_to is None else fields | {"pad_to": self.pad_to}

    @cached_property
    def shares(self) -> Partition:
        """Who holds which laid-out rows; rows count through the documents in order, padding included."""
        make = Partition.zigzag if self.partition == "zigzag" else Partition.contiguous
        return make(self.laid_out, self.degree)


@dataclass(frozen=True)
class MicroBatch:
    """One forward and backward pass: groups in the one order in which every slot takes them.

    A slot may be in several groups. A slot that is in none runs a dummy pass in lockstep and skips in free mode.
    """

    groups: tuple[Group, ...] = ()

    @property
    def tokens(self) -> int:
        """Rows of all documents of this micro-batch, without padding: S."""
        return sum(group.tokens for group in self.groups)

    @property
    def documents(self) -> tuple[int, ...]:
        """Document ids in packed order, group by group."""
        return tuple(d for group in self.groups for d in group.documents)

    @property
    def lengths(self) -> tuple[int, ...]:
        """Document lengths in packed order, group by group."""
        return tuple(n for group in self.groups for n in group.lengths)

    def groups_of(self, slot: int) -> tuple[tuple[int, Group], ...]:
        """The groups that a slot is in, with their index, in order."""
        return tuple((i, group) for i, group in enumerate(self.groups) if slot in group.slots)


@dataclass(frozen=True)
class Plan:
    """One step: which slots work together on which documents in which micro-batch.

    `lengths[d]` is the number of rows of document d; `targets` the number of predicted tokens by which the loss is
    divided; `predicted_seconds` the step's time under `cost`; `lower_bound_seconds` a time that no plan of these
    documents under that cost and cap can beat (0.0 for both where a plan was built by hand without a cost).

    Planners return checked plans; `check` checks one that was built by hand.
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
        """Packing efficiency: tokens / (slots x micro-batches x rows of the fullest slot), between 0 and 1."""
        rows = slot_rows(self.micro_batches, self.slots, self.row_multiple)
        return self.tokens / (rows.size * int(rows.max())) if rows.any() else 0.0

    def timeline(self, cost: Cost | None = None) -> Timeline:
        """When each slot works in each micro-batch, under the plan's own cost or another."""
        cost = self.cost if cost is None else cost
        batches, slots = self.micro_batches, self.slots
        return timeline(batches, slots, cost, mode=self.mode, node_size=self.node_size, row_multiple=self.row_multiple)

    def table(self, cost: Cost | None = None, limit: int = 24) -> str:
        """The plan as plain text: its sizes and times, then a line for each of at most `limit` micro-batches."""
        return plan_table(self, cost, limit)

    def check(self) -> "Plan":
        """This plan, if it is sound: every document once, slots in range, caps held, known types.

        Raises PlanError naming the document, slot or micro-batch, and the numbers.
        """
        check_plan(self)
        return self

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

    @classmethod
    def from_json(cls, text: str | bytes) -> "Plan":
        """The checked plan that `to_json` wrote. Raises PlanError naming the part that is missing or wrong."""
        from longspan.plan.plan_json import read_plan

        return read_plan(text)

    def _integers(self) -> dict[str, Any]:
        names = ("slots", "lengths", "targets", "mode", "max_tokens_per_slot", "node_size", "row_multiple", "planner")
        batches = [[group.to_dict() for group in batch.groups] for batch in self.micro_batches]
        return {name: getattr(self, name) for name in names} | {"micro_batches": batches}
