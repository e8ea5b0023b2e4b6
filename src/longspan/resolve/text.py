"""Choices and their reasons in words."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

from longspan.config.plan_section import ONE_DEGREE
from longspan.plan.micro_batch import comm_type_text
from longspan.plan.plan import Plan

NAMED = 3  # other choices in a reason


def plan_type_text(plan: Plan) -> str:
    """Name the communication types of a plan, with their levels; "" where no group has several slots."""
    groups = [group for group in plan.groups if group.degree > 1]
    kinds = ((g.cp_comm_type,) if isinstance(g.cp_comm_type, str) else g.cp_comm_type for g in groups)
    names = list(dict.fromkeys(chain.from_iterable(kinds)))
    return comm_type_text(names, (group.hierarchical_context_parallel_sizes for group in groups)) if names else ""


@dataclass(frozen=True)
class RankedWay:
    """A way that was compared: its planner, its degree (0: of dynamic plans), rows of a slot, and seconds of a step.

    `priced`: whether the seconds are of a machine, or only to be compared.
    """

    planner: str
    degree: int
    rows: int
    seconds: float
    priced: bool = True

    @property
    def text(self) -> str:
        return f"degree {self.degree}" if self.planner in ONE_DEGREE else self.planner


def planner_reason(ways: Sequence[RankedWay]) -> str:
    """Why the first of these ways is taken, in one sentence."""
    best, *others = ways
    words = f"{best.planner}, degree {best.degree}" if best.planner in ONE_DEGREE else best.planner
    if not others:
        return f"{words}, which alone is possible"
    seconds = f"{best.seconds:.3g} s a step, " if best.priced else ""
    texts = [f"{_speed_text(other.seconds / best.seconds)} {other.text}" for other in others[:NAMED]]
    return f"{words} (predicted {seconds}{', '.join(texts)})"


def _speed_text(times: float) -> str:
    """How fast a plan is beside one that takes so many times as long."""
    percent = 100 * (times - 1)
    if abs(percent) < 0.5:
        return "as fast as"
    if times >= 1.5:
        return f"{times:.1f} times as fast as"
    return f"{abs(percent):.0f} % {'faster' if percent > 0 else 'slower'} than"
