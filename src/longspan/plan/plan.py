"""What a step does: groups of slots that work on documents, micro-batch by micro-batch.

A Plan is made from document lengths alone and is the same on every rank and host. Planners (`fixed`, `padded`,
`dynamic`) make it; `comm.bind` turns one of its micro-batches into what a rank does. This module does not decide
anything and does not price anything (`cost.py`, `timeline.py`, `bound.py`); `check.py` says what makes a plan sound.
"""

from dataclasses import dataclass

from longspan.errors import PlanError
from longspan.plan.check import check_plan
from longspan.plan.cost.cost import Cost
from longspan.plan.plan_fields import PlanFields
from longspan.plan.plan_json import read_fields
from longspan.plan.plan_text import plan_table


@dataclass(frozen=True)
class Plan(PlanFields):
    """One step: which slots work together on which documents in which micro-batch.

    `lengths[d]` is the number of rows of document d; `targets` the number of predicted tokens by which the loss is
    divided; `predicted_seconds` the step's time under `cost`; `lower_bound_seconds` a time that no plan of these
    documents under that cost and cap can beat (0.0 for both where a plan was built by hand without a cost).

    Planners return checked plans; `check` checks one that was built by hand.
    """

    def table(self, cost: Cost | None = None, limit: int = 24) -> str:
        """The plan as plain text: its sizes and times, then a line for each of at most `limit` micro-batches."""
        return plan_table(self, cost, limit)

    def check(self) -> "Plan":
        """This plan, if it is sound: every document once, slots in range, caps held, known types.

        Raises PlanError naming the document, slot or micro-batch, and the numbers.
        """
        check_plan(self)
        return self

    @classmethod
    def from_json(cls, text: str | bytes) -> "Plan":
        """The checked plan that `to_json` wrote. Raises PlanError naming the part that is missing or wrong."""
        fields, tokens = read_fields(text)
        plan = cls(**fields).check()
        if tokens is not None and tokens != plan.tokens:
            raise PlanError(f"the plan says {tokens!r} tokens, but its lengths add up to {plan.tokens}")
        return plan
