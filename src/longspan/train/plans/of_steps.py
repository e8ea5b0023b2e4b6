"""The plans of a run's training steps, each from its number alone; those of coming steps may be made meanwhile."""

from collections.abc import Callable
from dataclasses import dataclass

from longspan.data.step_order import PackOrder, StepOrder
from longspan.layout import Layout
from longspan.plan import Plan, PlanAhead
from longspan.train.plans.choice import PlanChoice


@dataclass(frozen=True)
class StepPlanner:
    """The plan of any training step, from the step alone. Pickles, so that another process may plan."""

    choice: PlanChoice
    order: StepOrder | PackOrder
    home: Layout

    def __call__(self, step: int) -> Plan:
        """The plan of a step, counted from 0; its documents are numbered as the order's `select` gives them."""
        lengths, targets = self.order.lengths_of_step(step), self.order.targets_of_step(step)
        return self.choice.plan(lengths, self.home, targets=targets)


def planner_of_steps(choice: PlanChoice, order: StepOrder | PackOrder, home: Layout) -> Callable[[int], Plan]:
    """What plans any training step of a run."""
    return StepPlanner(choice, order, home)


def plans_of_steps(choice: PlanChoice, order: StepOrder | PackOrder, home: Layout, *, ahead: int) -> PlanAhead:
    """The plans of a run's training steps; a context manager.

    Dynamic plans are made `ahead` steps early in another process; those of the other planners take a millisecond and
    are made when their step begins.
    """
    return PlanAhead(planner_of_steps(choice, order, home), ahead=ahead if choice.planner == "dynamic" else 0)
