"""The plan of a step or of an evaluation, from the configuration and the lengths of its documents.

Planning itself is `longspan.plan`'s business. Nothing here needs torch or a process group.
"""

from longspan.train.plans.choice import (
    PlanChoice,
    StepPlanner,
    degrees_to_compare,
    home_of,
    planner_of_steps,
    plans_of_steps,
    query_heads,
    row_multiple_of,
)
from longspan.train.plans.run_cost import cost_of, cost_of_run

__all__ = [
    "PlanChoice",
    "StepPlanner",
    "cost_of",
    "cost_of_run",
    "degrees_to_compare",
    "home_of",
    "planner_of_steps",
    "plans_of_steps",
    "query_heads",
    "row_multiple_of",
]
