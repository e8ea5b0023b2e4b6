"""Plans of coming steps, made in another process while this one trains; the same plans as made inline.

Planning is Python code and holds the interpreter's lock: a thread would make training wait for it, up to 5 ms at a time
(CPython's switch interval). What a planner is, is not decided here: any function from a step to its plan.
"""

import os
import pickle
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from types import TracebackType
from typing import Any

from longspan.errors import LongspanError, PlanError
from longspan.plan.ahead.process import Failure, StepRequest, checked, start_process
from longspan.plan.check import check_count
from longspan.plan.plan import Plan


class PlanAhead:
    """Plans of steps, with those of the next `ahead` steps made in the background; a context manager.

    >>> with PlanAhead(planner, ahead=2) as plans:  # doctest: +SKIP
    ...     for step in range(first, steps):
    ...         run_step(model, plans.plan(step), documents, world, optimizer=optimizer)

    `planner(step)` gives the Plan of any step, counted from 0, from the step alone: the same on every rank, whichever
    step was asked for before. Then so does `plan(step)`, whatever `ahead` and timing are, and a run may go on anywhere.
    It must pickle (a function at the top of a module, a `functools.partial` of one, an object); `ahead=0` plans inline,
    without another process. `WarmStart` makes such a planner of one that goes on from an earlier step's plan.

    The process ends with the context, and with this process however that ends. Use it from one thread of the process
    that opened it.
    """

    def __init__(self, planner: Callable[[int], Plan], *, ahead: int = 2) -> None:
        self.ahead = check_count("ahead", ahead, least=0)
        self._planner = planner
        self._planning: _Planning | None = None
        self._window: range | None = None
        self._generation = 0
        self._made_inline: tuple[int, Plan] | None = None

    def __enter__(self) -> "PlanAhead":
        if self.ahead and self._planning is None:
            self._planning = _Planning(self._planner)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, step: int) -> None:
        """Begin with the plans of this step and the next ones, without waiting for them."""
        step = check_count("step", step, least=0)
        if not self.ahead:
            return
        if self._window is None or step not in self._window:
            self._generation += 1
            self._window = range(step, step)
        planning, first_missing = self._open_planning(), self._window.stop
        self._window = range(step, step + 1 + self.ahead)
        planning.keep(self._generation, self._window)
        for following in range(first_missing, self._window.stop):
            planning.ask(StepRequest(self._generation, following))

    def plan(self, step: int) -> Plan:
        """The plan of this step, waited for if need be; the plans of the next steps are begun.

        Raises what the planner raised for this step, and PlanError where the planning process died before this plan.
        """
        self.start(step)
        if not self.ahead:
            return self._inline(step)
        return self._open_planning().take(StepRequest(self._generation, step))

    def plan_if_made(self, step: int) -> Plan | None:
        """The plan of a coming step, without waiting for it: None where it is not made yet, or could not be.

        The plans of the steps after it are begun. Inline plans are made now, and kept for `plan(step)`.
        """
        self.start(step)
        if not self.ahead:
            try:
                return self._inline(step)
            except LongspanError:
                return None
        return self._open_planning().answered(StepRequest(self._generation, step))

    def close(self) -> None:
        """End the planning process."""
        if self._planning is not None:
            self._planning.close()
        self._planning, self._window = None, None

    def _inline(self, step: int) -> Plan:
        if self._made_inline is None or self._made_inline[0] != step:
            self._made_inline = (step, checked(self._planner(step), step))
        return self._made_inline[1]

    def _open_planning(self) -> "_Planning":
        if self._planning is None:
            raise PlanError("plans are made ahead inside a with block: with PlanAhead(planner) as plans: …")
        self._planning.check_process()
        return self._planning


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


class PlannerError(Exception):
    """Where in the planning process an error was raised, as text: the cause of the error that `PlanAhead` raises."""


class _Planning:
    """The planning process, and a thread that takes its answers as they come, as bytes and without the lock."""

    def __init__(self, planner: Callable[[int], Plan]) -> None:
        self._owner = os.getpid()
        self._process, self._connection = start_process(planner)
        self._answers: dict[StepRequest, bytes | Failure] = {}
        self._outstanding: deque[StepRequest] = deque()
        self._wanted = (0, range(0))
        self._gone = False
        self._changed = threading.Condition()
        self._receiver = threading.Thread(target=self._receive, name="plans ahead", daemon=True)
        self._receiver.start()

    def check_process(self) -> None:
        """Raise PlanError in a process that was forked from the owner: the answers would not come here."""
        if os.getpid() != self._owner:
            raise PlanError(
                f"these plans belong to process {self._owner}, this is process {os.getpid()}; open a PlanAhead here"
            )

    def ask(self, request: StepRequest) -> None:
        """Send a request."""
        with self._changed:
            self._outstanding.append(request)
        with suppress(OSError):  # the process is gone, and `take` says how
            self._connection.send(request)

    def keep(self, generation: int, window: range) -> None:
        """Forget answers outside the window."""
        with self._changed:
            self._wanted = (generation, window)
            self._answers = {request: answer for request, answer in self._answers.items() if self._is_wanted(request)}

    def take(self, request: StepRequest) -> Plan:
        """Wait for an answer; it is kept, for a second call."""
        with self._changed:
            self._changed.wait_for(lambda: request in self._answers or self._gone)
            answer = self._answers.get(request)
        if answer is None:
            raise self._death(request.step)
        if isinstance(answer, bytes):
            return pickle.loads(answer)
        raise _error(answer, request.step)

    def answered(self, request: StepRequest) -> Plan | None:
        """The plan of a request that is answered; None before that, and for one that failed."""
        with self._changed:
            answer = self._answers.get(request)
        return pickle.loads(answer) if isinstance(answer, bytes) else None

    def close(self) -> None:
        """Ask the process to leave, and see that it does."""
        if os.getpid() != self._owner:
            return
        try:
            self._connection.send(None)
            self._process.wait(5)
        except (OSError, subprocess.TimeoutExpired):
            self._process.kill()
        self._process.wait()
        self._receiver.join(5)
        self._connection.close()

    def _receive(self) -> None:
        try:
            while True:
                request, failure = self._connection.recv()
                plan = self._connection.recv_bytes()
                with self._changed:
                    while self._outstanding.popleft() != request:
                        pass
                    if self._is_wanted(request):
                        self._answers[request] = failure or plan
                    self._changed.notify_all()
        except (EOFError, OSError):
            with self._changed:
                self._gone = True
                self._changed.notify_all()

    def _is_wanted(self, request: StepRequest) -> bool:
        generation, window = self._wanted
        return request.generation == generation and request.step in window

    def _death(self, step: int) -> PlanError:
        how = _how_it_ended(self._process.wait())
        at = self._outstanding[0].step
        return PlanError(
            f"step {step} has no plan: the planning process {self._process.pid} {how} before step {at} was planned; "
            "see what it wrote to standard error, whether the machine ran out of memory, or plan inline with ahead=0"
        )


def _error(failure: Failure, step: int) -> BaseException:
    """The planner's error, of its own type where that pickles, with its traceback as the cause."""
    error: Any = None
    if failure.pickled is not None:
        error = pickle.loads(failure.pickled)
    if not isinstance(error, Exception):  # that of a planner that exits would end this process
        error = PlanError(f"the planner of step {step} failed with {failure.summary}")
    error.__cause__ = PlannerError(f"while planning step {step}\n{failure.text}")
    return error


def _how_it_ended(code: int) -> str:
    if code >= 0:
        return f"left with exit code {code}"
    known = {number.value: number.name for number in signal.Signals}
    return f"was killed by signal {-code} ({known.get(-code, 'unknown')})"
