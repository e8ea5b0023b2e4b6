"""Plans of a step: which slots work together on which documents (Plan), what that costs (Cost), and the planners that
make one from document lengths alone. Integers and numpy; no torch.

>>> from longspan.layout import Layout
>>> plan = plan_fixed([900, 300, 20], Layout(ranks=8), cp=4, max_tokens_per_slot=512)
>>> len(plan.micro_batches), plan.tokens, plan.targets
(1, 1220, 1217)
"""

from longspan.plan.ahead import PlanAhead, WarmStart
from longspan.plan.bound import Bound, lower_bound_seconds
from longspan.plan.cost import Cost
from longspan.plan.dynamic import plan_dynamic
from longspan.plan.evaluate import Timeline, predicted_seconds, slot_rows, timeline
from longspan.plan.fixed import plan_fixed
from longspan.plan.padded import plan_padded
from longspan.plan.plan import CommType, Group, MicroBatch, Mode, PartitionKind, Plan

__all__ = [
    "Bound",
    "CommType",
    "Cost",
    "Group",
    "MicroBatch",
    "Mode",
    "PartitionKind",
    "Plan",
    "PlanAhead",
    "Timeline",
    "WarmStart",
    "lower_bound_seconds",
    "plan_dynamic",
    "plan_fixed",
    "plan_padded",
    "predicted_seconds",
    "slot_rows",
    "timeline",
]
