"""A run's plans at the speed of its own steps, where the cost that made them is of no machine (CPUs).

Evaluations are priced for forward passes alone; those that an older release saved are priced so here.
"""

import re
from dataclasses import replace

import numpy as np

from longspan.plan import Plan, lower_bound_seconds
from longspan.plan.cost.cost import FORWARD_ALONE
from longspan.report.run_folder import RunFolder

OWN_STEPS = "this run, scaled to its median step"


def priced_plans(run: RunFolder) -> tuple[tuple[str, Plan], ...]:
    """The saved plans by name; those of no machine stay so where no step was measured."""
    factor = _factor(run)
    return tuple((name, _priced(name, plan, factor)) for name, plan in run.plans)


def measured_seconds(run: RunFolder, name: str) -> float | None:
    """What the step of a saved plan took; None for an evaluation, and for a step without a record."""
    number = re.fullmatch(r"step ([\d,]+)", name)
    took = run.train["seconds"][run.step == int(number.group(1).replace(",", ""))] if number else np.zeros(0)
    return float(took[0]) if len(took) and took[0] > 0 else None


def _factor(run: RunFolder) -> float | None:
    """How many times as long as predicted a step took, by the median step and the median of the saved plans."""
    predicted = [plan.predicted_seconds for name, plan in run.plans if name.startswith("step ")]
    took = run.train["seconds"][run.train["seconds"] > 0]
    return float(np.median(took) / np.median(predicted)) if len(took) and any(predicted) else None


def _priced(name: str, plan: Plan, factor: float | None) -> Plan:
    if name.startswith("evaluation") and plan.cost.passes != "forward":
        plan = _forward_only(plan)
    if plan.cost.source or factor is None:
        return plan
    source = f"{OWN_STEPS}; {FORWARD_ALONE}" if plan.cost.passes == "forward" else OWN_STEPS
    return replace(
        plan,
        cost=plan.cost.scaled(factor, source),
        predicted_seconds=plan.predicted_seconds * factor,
        lower_bound_seconds=plan.lower_bound_seconds * factor,
    )


def _forward_only(plan: Plan) -> Plan:
    """The plan with the cost, time and bound of its forward passes."""
    cost = plan.cost.forward_only()
    cap, slots, node_size = plan.max_tokens_per_slot, plan.slots, plan.node_size
    bound = lower_bound_seconds(plan.lengths, slots, cap, cost, plan.mode, node_size=node_size).seconds
    seconds = plan.timeline(cost).step_seconds
    return replace(plan, cost=cost, predicted_seconds=seconds, lower_bound_seconds=bound)
