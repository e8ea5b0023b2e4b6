"""Plans of coming steps, made in another process while this one trains; the same plans as made inline.

Planning is Python code and holds the interpreter's lock: a thread would make training wait for it, up to 5 ms at a time
(CPython's switch interval). The process and what runs in it are in `planning.py`.
"""

from collections.abc import Callable
from types import TracebackType

from longspan.errors import LongspanError, PlanError
from longspan.plan.check import check_count
from longspan.plan.plan import Plan
from longspan.plan.planning import Planning, StepRequest, check_plan


class PlanAhead:
    """Plans of steps, with those of the next `ahead` steps made in the background; a context manager.

    >>> with PlanAhead(planner, ahead=2) as plans:  # doctest: +SKIP
    ...     for step in range(first, steps):
    ...         run_step(model, plans.plan(step), documents, world, optimizer=optimizer)

    `planner(step)` gives the Plan of any step, counted from 0, and depends on nothing else: the same on every rank,
    whichever steps were planned before. Then so does `plan(step)`, whatever `ahead` and timing are, and a run may go on
    anywhere. It must pickle (a function at the top of a module, a `functools.partial` of one, an object); `ahead=0`
    plans inline, without another process.

    The process ends with the context, and with this process however that ends. Use it from one thread of the process
    that opened it.
    """

    def __init__(self, planner: Callable[[int], Plan], *, ahead: int = 2) -> None:
        """Take the planner; its process starts when the context is entered."""
        self.ahead: int = check_count("ahead", ahead, least=0)
        self._planner = planner
        self._planning: Planning | None = None
        self._window: range | None = None  # steps whose plans are requested or made
        self._generation = 0  # of requests; one more after a jump to a step outside the window
        self._made_inline: tuple[int, Plan] | None = None  # the last plan that was made here, and its step

    def __enter__(self) -> "PlanAhead":
        if self.ahead and self._planning is None:
            self._planning = Planning(self._planner)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, step: int) -> None:
        """Begin with the plans of this step and the next ones, without waiting for them.

        A step outside the window of the last call voids all earlier requests: the run has jumped to it.
        """
        step = check_count("step", step, least=0)
        if not self.ahead:
            return
        if self._window is None or step not in self._window:
            self._generation += 1
            self._window = range(step, step)  # empty: nothing is requested yet
        planning, first_missing = self._require_planning(), self._window.stop
        self._window = range(step, step + 1 + self.ahead)
        planning.keep_window(self._generation, self._window)
        for following_step in range(first_missing, self._window.stop):
            planning.send_request(StepRequest(self._generation, following_step))

    def plan(self, step: int) -> Plan:
        """Return the plan of this step, waited for if need be; the plans of the next steps are begun.

        Raises what the planner raised for this step, and PlanError if the planning process died before this plan.
        """
        self.start(step)
        if not self.ahead:
            return self._plan_inline(step)
        return self._require_planning().wait_for_plan(StepRequest(self._generation, step))

    def plan_if_made(self, step: int) -> Plan | None:
        """Return the plan of a coming step without waiting; None if it is not made yet, or the planner failed.

        The plans of the steps after it are begun. Inline plans are made now, and kept for `plan(step)`, which raises
        the planner's error.
        """
        self.start(step)
        if not self.ahead:
            try:
                return self._plan_inline(step)
            except LongspanError:
                return None
        return self._require_planning().plan_if_made(StepRequest(self._generation, step))

    def close(self) -> None:
        """End the planning process."""
        if self._planning is not None:
            self._planning.close()
        self._planning, self._window = None, None

    def _plan_inline(self, step: int) -> Plan:
        if self._made_inline is None or self._made_inline[0] != step:
            self._made_inline = (step, check_plan(self._planner(step), step))
        return self._made_inline[1]

    def _require_planning(self) -> "Planning":
        if self._planning is None:
            raise PlanError("plans are made ahead inside a with block: with PlanAhead(planner) as plans: …")
        self._planning.check_owner()
        return self._planning
