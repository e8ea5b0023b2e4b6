"""A run's plans at the speed of its own steps, where the cost that made them is of no machine (CPUs).

Evaluations are forward passes alone, a third of what a plan's cost prices.
"""

import re
from dataclasses import replace

import numpy as np

from longspan.plan import Plan
from longspan.plan.simulate.pipeline_time import FORWARD_SHARE
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
    source, share = plan.cost.source or "", 1.0
    if not source and factor is not None:
        source, share = OWN_STEPS, factor
    if name.startswith("evaluation"):
        source, share = source and f"{source}; forward passes alone", share * FORWARD_SHARE
    return replace(
        plan,
        cost=plan.cost.scaled(share, source),
        predicted_seconds=plan.predicted_seconds * share,
        lower_bound_seconds=plan.lower_bound_seconds * share,
    )
