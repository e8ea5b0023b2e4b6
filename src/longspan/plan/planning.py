"""The process that makes plans ahead: first as its owner sees it (`Planning`), then what runs in it (`serve_plans`).

Requests are answered one after the other. How the process starts and ends is `launch/worker.py`'s.
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
from typing import Any, NamedTuple, cast

from longspan.errors import PlanError
from longspan.launch.stop_signals import SIGNALS
from longspan.launch.worker import Worker, describe_end, describe_main, import_main, next_request, pickle_error
from longspan.plan.plan import Plan

Planner = Callable[[int], Plan]  # of a step

_serving = False  # whether this is a planning process


class StepRequest(NamedTuple):
    """A step to plan; a later generation voids requests of earlier ones."""

    generation: int
    step: int


class Failure(NamedTuple):
    """An error of the planner: pickled, or None if it does not pickle; its traceback and its last line as text."""

    pickled: bytes | None
    text: str
    summary: str

    @classmethod
    def of(cls, error: BaseException) -> "Failure":
        """Make the failure of this error."""
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
    """The planning process, and a thread that receives its answers as they come.

    Answers stay pickled until they are asked for, so that receiving them hardly holds the interpreter's lock. Raises
    PlanError for a planner that cannot be sent, and in a planning process itself.
    """

    def __init__(self, planner: Planner) -> None:
        """Start the process that plans ahead, give it the planner, and begin to receive its plans.

        Raises PlanError inside a planning process: importing a script that plans ahead would start yet another process.
        """
        if _serving:
            raise PlanError(
                "a planning process imported a script that plans ahead when it is imported; put what the script does "
                'under if __name__ == "__main__"'
            )
        payload = _pickle_planner(planner)
        self._owner = os.getpid()
        self._worker = Worker(serve_plans)
        self._worker.connection.send((describe_main(payload), payload))
        self._answers: dict[StepRequest, bytes | Failure] = {}
        self._outstanding: deque[StepRequest] = deque()  # sent and not answered, in order
        self._generation, self._window = 0, range(0)  # of the answers that are kept
        self._gone = False  # whether the process has ended
        self._changed = threading.Condition()
        self._receiver = threading.Thread(target=self._receive_answers, name="plans ahead", daemon=True)
        self._receiver.start()

    @property
    def pid(self) -> int:
        """The id of the process."""
        return self._worker.process.pid

    def check_owner(self) -> None:
        """Raise PlanError in a process that was forked from the owner: the answers would not come here."""
        if os.getpid() != self._owner:
            raise PlanError(
                f"these plans belong to process {self._owner}, this is process {os.getpid()}; open a PlanAhead here"
            )

    def send_request(self, request: StepRequest) -> None:
        """Send a request to the process, which answers requests in order."""
        with self._changed:
            self._outstanding.append(request)
        with suppress(OSError):  # the process is gone, and `wait_for_plan` reports how
            self._worker.connection.send(request)

    def keep_window(self, generation: int, window: range) -> None:
        """Forget answers of other generations or outside this window of steps, and drop those that still come."""
        with self._changed:
            self._generation, self._window = generation, window
            self._answers = {
                request: answer for request, answer in self._answers.items() if self._is_in_window(request)
            }

    def wait_for_plan(self, request: StepRequest) -> Plan:
        """Wait for the plan of a request, which a second call returns again. Raises the planner's error."""
        with self._changed:
            self._changed.wait_for(lambda: request in self._answers or self._gone)
            answer = self._answers.get(request)
        if answer is None:
            raise self._death_error(request.step)
        if isinstance(answer, bytes):
            return pickle.loads(answer)
        raise answer.error(request.step)

    def plan_if_made(self, request: StepRequest) -> Plan | None:
        """Return the plan of a request that is answered; None before that, and for one that failed."""
        with self._changed:
            answer = self._answers.get(request)
        return pickle.loads(answer) if isinstance(answer, bytes) else None

    def close(self) -> None:
        """Ask the process to end, and kill it after 5 seconds. In a fork of the owner nothing happens."""
        if os.getpid() != self._owner:
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

    def _death_error(self, step: int) -> PlanError:
        """Return the error for a step that has no plan because the planning process ended; names the step it was at."""
        end = describe_end(self._worker.process.wait())
        return PlanError(
            f"step {step} has no plan: the planning process {self.pid} {end} before step {self._outstanding[0].step} "
            "was planned; see what it wrote to standard error, whether the machine ran out of memory, or plan inline "
            "with ahead=0"
        )


def _pickle_planner(planner: Planner) -> bytes:
    try:
        return pickle.dumps(planner)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise PlanError(
            f"the planner {planner!r} cannot be sent to the process that plans ahead ({error}); give a function at the "
            "top of a module, a functools.partial of one, or an object that pickles; or plan inline with ahead=0"
        ) from error


def check_plan(plan: Any, step: int) -> Plan:
    """Return what a planner returned for a step. Raises PlanError unless it is a plan."""
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
        request = requests.take_request()
        # The plan of an older generation is not made: the run has jumped to another step, and does not wait for it.
        answer = plan(request) if request.generation >= requests.newest else None
        connection.send((request, answer if isinstance(answer, Failure) else None))
        connection.send_bytes(answer if isinstance(answer, bytes) else b"")


class _Requests:
    """Requests in the order in which they come, read by a thread that also ends the process."""

    def __init__(self, connection: "Connection[Any, Any]", parent: int) -> None:
        """Begin to read requests, so that the newest generation is known while an older request is planned."""
        self.newest = 0  # generation that has been read
        self._queue: queue.SimpleQueue[StepRequest] = queue.SimpleQueue()
        threading.Thread(target=self._read_requests, args=(connection, parent), daemon=True).start()

    def take_request(self) -> StepRequest:
        return self._queue.get()

    def _read_requests(self, connection: "Connection[Any, Any]", parent: int) -> None:
        """Read requests, in a thread, until the owner ends the process or is gone."""
        try:
            while (request := next_request(connection, parent)) is not None:
                self.newest = request.generation
                self._queue.put(request)
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
