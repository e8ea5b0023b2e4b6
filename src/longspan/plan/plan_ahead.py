"""Plans of coming steps, made in another process while this one trains; the same plans as made inline.

Planning is Python code and holds the interpreter's lock: a thread would make training wait for it, up to 5 ms at a time
(CPython's switch interval). How the process starts and ends is `launch/worker.py`'s.
"""

import os
import pickle
import signal
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, cast

from longspan.errors import LongspanError, PlanError
from longspan.launch.stop_signals import SIGNALS
from longspan.launch.worker import Worker, describe_end, import_main, main_script, next_request, pickle_error
from longspan.plan.check import check_count
from longspan.plan.plan import Plan

# A planner is called with a step.
Planner = Callable[[int], Plan]

_serving = False  # whether this is a planning process


class AsyncPlanner:
    """Plans of steps, with those of the next `ahead` steps made in the background; a context manager.

    >>> with AsyncPlanner(planner, ahead=2) as plans:  # doctest: +SKIP
    ...     for step in range(first, steps):
    ...         run_step(model, plans.plan(step), documents, world, optimizer=optimizer)

    `planner(step)` gives the Plan of any step, counted from 0, and depends on nothing else: the same on every rank,
    whichever steps were planned before. Then so does `plan(step)`, whatever `ahead` and timing are, and a run may go on
    anywhere. It must pickle (a function at the top of a module, a `functools.partial` of one, an object); `ahead=0`
    plans inline, without another process.

    The process ends with the context, and with this process however that ends. Use it from one thread of the process
    that opened it.
    """

    def __init__(self, planner: Planner, *, ahead: int = 2) -> None:
        self.ahead: int = check_count("ahead", ahead, least=0)
        self._planner = planner
        self._owner = 0
        self._worker: Worker | None = None
        # The thread asks for one plan after the other.
        self._thread: ThreadPoolExecutor
        self._answers = dict[int, Future[bytes]]()  # pickled until they are read, of the steps that may come
        self._died_before: int | None = None  # the step at which the process was found dead
        self._made_inline: tuple[int, Plan] | None = None  # the last plan that was made here, and its step

    def __enter__(self) -> "AsyncPlanner":
        """Start the planning process and send it the planner; do nothing with `ahead=0`, or if it runs already. Raises
        PlanError for a planner that cannot be sent, and in a planning process.
        """
        if self.ahead and self._worker is None:
            if _serving:  # importing a script that plans ahead would start yet another process
                raise PlanError(
                    "a planning process imported a script that plans ahead when it is imported; put what the script "
                    'does under if __name__ == "__main__"'
                )
            try:
                payload = pickle.dumps(self._planner)
            except (pickle.PicklingError, AttributeError, TypeError) as error:
                raise PlanError(
                    f"the planner {self._planner!r} cannot be sent to the process that plans ahead ({error}); give a "
                    "function at the top of a module, a functools.partial of one, or an object that pickles; or plan "
                    "inline with ahead=0"
                ) from error
            self._worker = Worker(serve_plans)
            self._worker.send((main_script(payload), payload))
            self._owner = os.getpid()
            self._thread = ThreadPoolExecutor(1, "plans ahead")
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def start(self, step: int) -> None:
        """Begin with the plans of this step and the next ones, without waiting for them. A step outside the window of
        the last call voids all earlier requests: the run has jumped to it. Raises PlanError outside the `with` block,
        and in a fork of the process that opened it.
        """
        step = check_count("step", step, least=0)
        if not self.ahead:
            return
        if self._worker is None:
            raise PlanError("plans are made ahead inside a with block: with AsyncPlanner(planner) as plans: …")
        if os.getpid() != self._owner:  # a fork, to which no answers come
            raise PlanError(
                f"these plans belong to process {self._owner}, this is process {os.getpid()}; open an AsyncPlanner here"
            )
        window = range(step, step + 1 + self.ahead)
        goes_on = step in self._answers
        for requested in list(self._answers):
            if not goes_on or requested not in window:
                self._answers.pop(requested).cancel()
        for coming in window:
            if coming not in self._answers:
                self._answers[coming] = self._thread.submit(self._request_plan, self._worker, coming)

    def plan(self, step: int) -> Plan:
        """Return the plan of this step, waited for if need be; the plans of the next steps are begun. Raises what the
        planner raised for this step, PlanError if the planning process died before this plan, and what `start` raises.
        """
        self.start(step)
        if not self.ahead:
            return self._plan_inline(step)
        answer = pickle.loads(self._answers[step].result())
        if isinstance(answer, Plan):
            return answer
        raise answer

    def plan_if_made(self, step: int) -> Plan | None:
        """Return the plan of a coming step without waiting; None if it is not made yet, or if the planner failed, whose
        error `plan(step)` raises. The plans of the steps after it are begun. With `ahead=0` the plan is made now, and
        kept for `plan(step)`.
        """
        self.start(step)
        if self.ahead and not self._answers[step].done():
            return None
        with suppress(LongspanError):
            answer = pickle.loads(self._answers[step].result()) if self.ahead else self._plan_inline(step)
            return answer if isinstance(answer, Plan) else None
        return None

    def close(self) -> None:
        """End the planning process; plans that are made and not yet taken are lost. In a fork of the process that
        opened it nothing happens.
        """
        if self._worker is not None and os.getpid() == self._owner:
            for answer in self._answers.values():
                answer.cancel()
            self._worker.end()
            self._thread.shutdown()
            self._worker.connection.close()
        self._worker = None

    def _plan_inline(self, step: int) -> Plan:
        """The last plan that was made here is kept."""
        if self._made_inline is None or self._made_inline[0] != step:
            self._made_inline = (step, check_planner_result(self._planner(step), step))
        return self._made_inline[1]

    def _request_plan(self, worker: Worker, step: int) -> bytes:
        """Runs in the planner's thread, one request at a time. The plan, or the planner's error, is pickled."""
        try:
            worker.send(step)
            return worker.connection.recv_bytes()
        except (EOFError, OSError):
            end = describe_end(worker.process.wait())
            self._died_before = step if self._died_before is None else self._died_before
            raise PlanError(
                f"step {step} has no plan: the planning process {worker.process.pid} {end} before step "
                f"{self._died_before} was planned; see what it wrote to standard error, whether the machine ran out of "
                "memory, or plan inline with ahead=0"
            ) from None


def check_planner_result(plan: Any, step: int) -> Plan:
    """Return what a planner gave for a step if it is a Plan. Raises PlanError otherwise."""
    if not isinstance(plan, Plan):
        raise PlanError(
            f"the planner returned {type(cast(object, plan)).__name__} for step {step}; it must return a Plan"
        )
    return plan


def serve_plans(connection: "Connection[Any, Any]", parent: int) -> None:
    """Plan requested steps in order, in the planning process, until the owner ends it or is gone. `connection` brings
    (script, pickled planner) once and then steps, and takes a pickled plan or error for each; `parent` is the id of the
    owner.
    """
    global _serving
    _serving = True
    for number in SIGNALS:  # meant for the parent, which may want plans until it has stopped
        signal.signal(number, signal.SIG_IGN)
    main, payload = connection.recv()
    planner: Any = None
    failure: BaseException | None = None
    try:
        import_main(main)
        planner = pickle.loads(payload)
    except BaseException as error:  # then each `AsyncPlanner.plan` raises it
        failure = error
    with suppress(OSError):  # the owner is gone
        while (step := next_request(connection, parent)) is not None:
            try:
                if failure is not None:
                    raise failure
                answer = pickle.dumps(check_planner_result(planner(step), step))
            except BaseException as error:
                answer_error = error
                # A SystemExit, which is no Exception, would end the owner; some errors cannot be pickled.
                if not isinstance(error, Exception) or pickle_error(error) is None:
                    last = traceback.format_exception_only(error)[-1].strip()
                    answer_error = PlanError(f"the planner of step {step} failed with {last}")
                answer_error.add_note(f"while planning step {step}\n{''.join(traceback.format_exception(error))}")
                answer = pickle.dumps(answer_error)
            connection.send_bytes(answer)
