"""The plan of a step or of an evaluation, from the configuration and the lengths of its documents.

Planning itself is `longspan.plan`'s business.
"""

from longspan.train.plans.choice import (
    PlannerConfig,
    StepPlanner,
    degrees_to_compare,
    home_of,
    plan_row_multiple,
    plan_steps,
    query_heads,
)
from longspan.train.plans.run_cost import cost_without_model, find_run_cost

__all__ = [
    "PlannerConfig",
    "StepPlanner",
    "cost_without_model",
    "degrees_to_compare",
    "find_run_cost",
    "home_of",
    "plan_row_multiple",
    "plan_steps",
    "query_heads",
]
