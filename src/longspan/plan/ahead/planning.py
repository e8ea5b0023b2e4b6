"""The planning process as its owner sees it: requests, answers as they come, and how it ended."""

import os
import pickle
import signal
import subprocess
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from longspan.errors import PlanError
from longspan.plan.ahead.process import Failure, StepRequest, start_process
from longspan.plan.plan import Plan


class PlannerError(Exception):
    """Where in the planning process an error was raised, as text: the cause of the error that `PlanAhead` raises."""


class Planning:
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
