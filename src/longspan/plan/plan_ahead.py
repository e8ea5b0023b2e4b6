"""Plans of coming steps, made in another process while this one trains; the same plans as made inline.

Planning is Python code and holds the interpreter's lock: a thread would make training wait for it, up to 5 ms at a time
(CPython's switch interval). How the process starts and ends is `launch/worker.py`'s.
"""

import os
import pickle
import queue
import signal
import threading
import traceback
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Any, NamedTuple, cast

from longspan.errors import LongspanError, PlanError
from longspan.launch.stop_signals import SIGNALS
from longspan.launch.worker import Worker, describe_end, describe_main, import_main, next_request, pickle_error
from longspan.plan.check import check_count
from longspan.plan.plan import Plan


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
        self.ahead: int = check_count("ahead", ahead, least=0)
        self._planner = planner
        self._planning: Planning | None = None
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
        """Begin with the plans of this step and the next ones, without waiting for them. A step outside the window of
        the last call voids all earlier requests: the run has jumped to it.
        """
        step = check_count("step", step, least=0)
        if self.ahead:
            self._require_planning().request_plans(step, self.ahead)

    def plan(self, step: int) -> Plan:
        """Return the plan of this step, waited for if need be; the plans of the next steps are begun. Raises what the
        planner raised for this step, and PlanError if the planning process died before this plan.
        """
        self.start(step)
        if not self.ahead:
            return self._plan_inline(step)
        return self._require_planning().wait_for_plan(step)

    def plan_if_made(self, step: int) -> Plan | None:
        """Return the plan of a coming step without waiting; None if it is not made yet, or the planner failed. The
        plans of the steps after it are begun. Inline plans are made now, and kept for `plan(step)`, which raises the
        error.
        """
        self.start(step)
        if not self.ahead:
            try:
                return self._plan_inline(step)
            except LongspanError:
                return None
        return self._require_planning().plan_if_made(step)

    def close(self) -> None:
        """End the planning process."""
        if self._planning is not None:
            self._planning.close()
        self._planning = None

    def _plan_inline(self, step: int) -> Plan:
        if self._made_inline is None or self._made_inline[0] != step:
            self._made_inline = (step, check_plan(self._planner(step), step))
        return self._made_inline[1]

    def _require_planning(self) -> "Planning":
        if self._planning is None:
            raise PlanError("plans are made ahead inside a with block: with PlanAhead(planner) as plans: …")
        if os.getpid() != self._planning.owner:  # a fork, to which no answers come
            raise PlanError(
                f"these plans belong to process {self._planning.owner}, this is process {os.getpid()}; open a "
                "PlanAhead here"
            )
        return self._planning


Planner = Callable[[int], Plan]  # of a step

_serving = False  # whether this is a planning process


class StepRequest(NamedTuple):
    generation: int
    step: int


class Failure(NamedTuple):
    """An error of the planner: pickled, or None if it does not pickle; its traceback and its last line as text."""

    pickled: bytes | None
    text: str
    summary: str

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        text = "".join(traceback.format_exception(error))
        return cls(pickle_error(error), text, traceback.format_exception_only(error)[-1].strip())

    def error(self, step: int) -> BaseException:
        """Make the planner's error again, of its own type if that pickles, with its traceback as the cause."""
        error: Any = None if self.pickled is None else pickle.loads(self.pickled)
        if not isinstance(error, Exception):  # it does not pickle, or is a SystemExit, which would end this process
            error = PlanError(f"the planner of step {step} failed with {self.summary}")
        error.__cause__ = PlannerError(f"while planning step {step}\n{self.text}")
        return error


class PlannerError(Exception):
    """Where in the planning process an error was raised, as text: the cause of the error that `PlanAhead` raises."""


class Planning:
    """The planning process, and a thread that receives its answers, which stay pickled until they are asked for, so
    that receiving them hardly holds the interpreter's lock. Raises PlanError for a planner that cannot be sent, and in
    a planning process itself: importing a script that plans ahead would start yet another process.
    """

    def __init__(self, planner: Planner) -> None:
        if _serving:
            raise PlanError(
                "a planning process imported a script that plans ahead when it is imported; put what the script does "
                'under if __name__ == "__main__"'
            )
        try:
            payload = pickle.dumps(planner)
        except (pickle.PicklingError, AttributeError, TypeError) as error:
            raise PlanError(
                f"the planner {planner!r} cannot be sent to the process that plans ahead ({error}); give a function at "
                "the top of a module, a functools.partial of one, or an object that pickles; or plan inline with "
                "ahead=0"
            ) from error
        self.owner = os.getpid()
        self._worker = Worker(serve_plans)
        self._worker.connection.send((describe_main(payload), payload))
        self._answers: dict[StepRequest, bytes | Failure] = {}
        self._outstanding: deque[StepRequest] = deque()  # sent and not answered, in order
        self._generation, self._window = 0, range(0)  # of the answers that are kept; a jump begins a generation
        self._gone = False  # whether the process has ended
        self._changed = threading.Condition()
        self._receiver = threading.Thread(target=self._receive_answers, name="plans ahead", daemon=True)
        self._receiver.start()

    @property
    def pid(self) -> int:
        return self._worker.process.pid

    def request_plans(self, step: int, ahead: int) -> None:
        """Request the plans of a step and those ahead that are missing; answers of other steps are forgotten."""
        with self._changed:
            if step not in self._window:  # the run has jumped: all earlier requests are void
                self._generation, self._window = self._generation + 1, range(step, step)
            first, self._window = self._window.stop, range(step, step + 1 + ahead)
            requests = [StepRequest(self._generation, missing) for missing in range(first, self._window.stop)]
            self._answers = {of: answer for of, answer in self._answers.items() if self._is_in_window(of)}
            self._outstanding += requests
        with suppress(OSError):  # the process is gone, and `wait_for_plan` reports how
            for request in requests:
                self._worker.connection.send(request)

    def wait_for_plan(self, step: int) -> Plan:
        """Wait for the plan of a requested step, which a second call returns again. Raises the planner's error."""
        request = StepRequest(self._generation, step)
        with self._changed:
            self._changed.wait_for(lambda: request in self._answers or self._gone)
            answer = self._answers.get(request)
        if answer is None:
            end, first = describe_end(self._worker.process.wait()), self._outstanding[0].step
            raise PlanError(
                f"step {step} has no plan: the planning process {self.pid} {end} before step {first} was "
                "planned; see what it wrote to standard error, whether the machine ran out of memory, or plan inline "
                "with ahead=0"
            )
        if isinstance(answer, bytes):
            return pickle.loads(answer)
        raise answer.error(step)

    def plan_if_made(self, step: int) -> Plan | None:
        with self._changed:
            answer = self._answers.get(StepRequest(self._generation, step))
        return pickle.loads(answer) if isinstance(answer, bytes) else None

    def close(self) -> None:
        """Ask the process to end, and kill it after 5 seconds. In a fork of the owner nothing happens."""
        if os.getpid() != self.owner:
            return
        self._worker.end(patience=5)
        self._receiver.join(5)
        self._worker.connection.close()

    def _receive_answers(self) -> None:
        """Answers come in the order of the requests: those before an answered one are not outstanding either. An answer
        is two messages: the request with a failure or None, and the bytes of the pickled plan.
        """
        connection = self._worker.connection
        try:
            while True:
                request, failure = connection.recv()
                plan = connection.recv_bytes()
                with self._changed:
                    while self._outstanding.popleft() != request:
                        pass
                    if self._is_in_window(request):
                        self._answers[request] = failure or plan
                    self._changed.notify_all()
        except (EOFError, OSError):
            with self._changed:
                self._gone = True
                self._changed.notify_all()

    def _is_in_window(self, request: StepRequest) -> bool:
        return request.generation == self._generation and request.step in self._window


def check_plan(plan: Any, step: int) -> Plan:
    if not isinstance(plan, Plan):
        raise PlanError(
            f"the planner returned {type(cast(object, plan)).__name__} for step {step}; it must return a Plan"
        )
    return plan


def serve_plans(connection: "Connection[Any, Any]", parent: int) -> None:
    """Plan requested steps in order, in the planning process, until the owner ends it or is gone."""
    global _serving
    _serving = True
    for number in SIGNALS:  # meant for the parent, which may want plans until it has stopped
        signal.signal(number, signal.SIG_IGN)
    main, payload = connection.recv()
    requests = _Requests(connection, parent)
    plan = _load_planner(main, payload)
    while True:
        request = requests.queue.get()
        # The plan of an older generation is not made: the run has jumped to another step, and does not wait for it.
        answer = plan(request) if request.generation >= requests.newest else None
        connection.send((request, answer if isinstance(answer, Failure) else None))
        connection.send_bytes(answer if isinstance(answer, bytes) else b"")


class _Requests:
    """Requests in order, read by a thread that also ends the process: the newest generation is known while an older one
    is planned.
    """

    def __init__(self, connection: "Connection[Any, Any]", parent: int) -> None:
        self.newest = 0  # generation that has been read
        self.queue: queue.SimpleQueue[StepRequest] = queue.SimpleQueue()
        threading.Thread(target=self._read_requests, args=(connection, parent), daemon=True).start()

    def _read_requests(self, connection: "Connection[Any, Any]", parent: int) -> None:
        try:
            while (request := next_request(connection, parent)) is not None:
                self.newest = request.generation
                self.queue.put(request)
        finally:
            os._exit(0)


def _load_planner(main: dict[str, Any], payload: bytes) -> Callable[[StepRequest], bytes | Failure]:
    """A planner that cannot be loaded fails for every step, so that each `PlanAhead.plan` raises that error."""
    try:
        import_main(main)
        planner = pickle.loads(payload)
    except BaseException as error:
        failure = Failure.of(error)
        return lambda _: failure

    def plan(request: StepRequest) -> bytes | Failure:
        try:
            return pickle.dumps(check_plan(planner(request.step), request.step))
        except BaseException as error:
            return Failure.of(error)

    return plan
