"""Planners that go on from an earlier step's plan, and still depend on the step alone."""

from collections.abc import Callable

from longspan.errors import LongspanError
from longspan.plan.check import check_count
from longspan.plan.plan import Plan


class WarmStart:
    """A planner for `PlanAhead` that warm-starts, with plans that still depend on the step alone.

    >>> def plan_step(step, warm):  # doctest: +SKIP
    ...     return plan_dynamic(lengths_of(step), home, max_tokens_per_slot=8192, warm=warm)
    >>> planner = WarmStart(plan_step, every=64)  # doctest: +SKIP

    The rule: steps go in blocks of `every`. The first step of a block is planned cold (`warm` is None); its plan
    warm-starts every other step of its block, and nothing else does. So a plan depends on its step and on the first
    step of its block, not on which steps were planned before: a run that goes on in the middle of a block plans the
    block's first step once more. A first step that cannot be planned leaves its block cold.

    `plan_step(step, warm)` must be a pure function.
    """

    def __init__(self, plan_step: Callable[[int, Plan | None], Plan], *, every: int) -> None:
        self.every = check_count("every", every)
        self._plan_step = plan_step
        self._found: tuple[int, Plan | None] | None = None  # the first step of the block at hand, and its plan

    def __call__(self, step: int) -> Plan:
        """The plan of a step."""
        first = step - step % self.every
        if step == first:
            plan = self._plan_step(step, None)
            self._found = (first, plan)
            return plan
        if self._found is None or self._found[0] != first:
            self._found = (first, self._first_plan(first))
        return self._plan_step(step, self._found[1])

    def _first_plan(self, first: int) -> Plan | None:
        try:
            return self._plan_step(first, None)
        except LongspanError:
            return None
