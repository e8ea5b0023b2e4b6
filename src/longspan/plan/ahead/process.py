"""The process in which `PlanAhead` plans: it answers requests one after the other until its parent is gone.

A fresh interpreter, started without `multiprocessing.Process`: it shares no torch, threads or devices with a rank, and
a daemonic rank may start it too. A request is (generation, step); those of an older generation than the newest are
void and answered without planning. The parent's side is `planning.py`.
"""

import os
import pickle
import queue
import signal
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable
from multiprocessing import spawn
from multiprocessing.connection import Connection, Pipe
from pathlib import Path
from typing import Any, NamedTuple, cast

from longspan.errors import PlanError
from longspan.plan.plan import Plan

_START = """
import sys
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
sys.path[:] = connection.recv()
from longspan.plan.ahead.process import serve
serve(connection, int(sys.argv[2]))
"""
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
_PARENT_CHECK_SECONDS = 1.0

_serving = False


class StepRequest(NamedTuple):
    """A step to plan."""

    generation: int
    step: int


class Failure(NamedTuple):
    """An error of the planner: pickled, or None where it does not pickle; its traceback and its last line as text."""

    pickled: bytes | None
    text: str
    summary: str


def start_process(planner: Callable[[int], Plan]) -> tuple["subprocess.Popen[bytes]", "Connection[Any, Any]"]:
    """Start a process that answers requests for this planner's plans; returns it and this side of its connection.

    Raises PlanError for a planner that cannot be sent, and in a planning process itself.
    """
    if _serving:
        raise PlanError(
            "a planning process imported a script that plans ahead when it is imported; put what the script does under "
            'if __name__ == "__main__"'
        )
    payload = _pickled(planner)
    here, there = Pipe()
    command = [sys.executable, "-c", _START, str(there.fileno()), str(os.getpid())]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, pass_fds=[there.fileno()])
    there.close()
    here.send([str(Path(folder).absolute()) for folder in sys.path])
    here.send((_main_module() if b"_main__" in payload else {}, payload))
    return process, here


def _pickled(planner: Callable[[int], Plan]) -> bytes:
    try:
        return pickle.dumps(planner)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise PlanError(
            f"the planner {planner!r} cannot be sent to the process that plans ahead ({error}); give a function at the "
            "top of a module, a functools.partial of one, or an object that pickles; or plan inline with ahead=0"
        ) from error


def _main_module() -> dict[str, Any]:
    """Where the planning process finds what this program defines in its script, as `spawn.prepare` takes it."""
    main = sys.modules["__main__"]
    name, file = getattr(main.__spec__, "name", None), getattr(main, "__file__", None)
    by_path = {} if file is None else {"init_main_from_path": file}
    return {"sys_argv": sys.argv} | (by_path if name is None else {"init_main_from_name": name})


def serve(connection: "Connection[Any, Any]", parent: int) -> None:
    """What the process does: plan what is asked, in order; leave at once when asked to, or when the parent is gone."""
    global _serving
    _serving = True
    for number in (signal.SIGINT, signal.SIGTERM):  # meant for the parent, which may want plans until it has stopped
        signal.signal(number, signal.SIG_IGN)
    main, payload = connection.recv()
    requests = _Requests(connection, parent)
    plan = _planner(main, payload)
    while True:
        request = requests.next()
        if request.generation < requests.newest:
            answer: bytes | Failure | None = None
        else:
            answer = plan(request.step)
        connection.send((request, answer if isinstance(answer, Failure) else None))
        connection.send_bytes(answer if isinstance(answer, bytes) else b"")


class _Requests:
    """Requests in the order in which they come, read by a thread that also ends the process."""

    def __init__(self, connection: "Connection[Any, Any]", parent: int) -> None:
        self.newest = 0
        self._queue: queue.SimpleQueue[StepRequest] = queue.SimpleQueue()
        threading.Thread(target=self._read, args=(connection, parent), daemon=True).start()

    def next(self) -> StepRequest:
        return self._queue.get()

    def _read(self, connection: "Connection[Any, Any]", parent: int) -> None:
        try:
            while (request := _next_request(connection, parent)) is not None:
                self.newest = request.generation
                self._queue.put(request)
        finally:
            os._exit(0)


def _next_request(connection: "Connection[Any, Any]", parent: int) -> StepRequest | None:
    """The next request; None where there will be none."""
    while not connection.poll(_PARENT_CHECK_SECONDS):
        if os.getppid() != parent:  # a process that the parent forked may hold its side of the connection
            return None
    try:
        return connection.recv()
    except (EOFError, OSError):
        return None


def _planner(main: dict[str, Any], payload: bytes) -> Callable[[int], bytes | Failure]:
    """The planner, answering with bytes; one that cannot be loaded fails for every step."""
    try:
        if main:
            for name in _TORCHRUN:  # a script that trains when it is imported must not take a rank's place
                os.environ.pop(name, None)
            spawn.prepare(main)
        planner = pickle.loads(payload)
    except BaseException as error:
        failure = _failure(error)
        return lambda _: failure

    def plan(step: int) -> bytes | Failure:
        try:
            return pickle.dumps(checked(planner(step), step))
        except BaseException as error:
            return _failure(error)

    return plan


def checked(plan: Any, step: int) -> Plan:
    """The plan, if it is one."""
    if not isinstance(plan, Plan):
        raise PlanError(
            f"the planner returned {type(cast(object, plan)).__name__} for step {step}; it must return a Plan"
        )
    return plan


def _failure(error: BaseException) -> Failure:
    text = "".join(traceback.format_exception(error))
    summary = traceback.format_exception_only(error)[-1].strip()
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:
        pickled = None
    return Failure(pickled, text, summary)
