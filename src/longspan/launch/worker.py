"""Worker processes: each answers requests that come through its connection, until that closes or its parent is gone.

A worker is a fresh interpreter, started without `multiprocessing.Process`: it shares no torch, threads or devices with
a rank, and a daemonic rank may start one too. Plans are made ahead in one (`plan/plan_ahead.py`), and corpora are
encoded in several (`corpus/encoding_processes.py`). Ranks are no workers: `launch.py` starts them.
"""

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing import spawn
from multiprocessing.connection import Connection, Pipe
from typing import Any

from longspan.launch.environment import import_path

Serve = Callable[["Connection[Any, Any]", int], None]  # (connection, process id of the parent)

# Python runs this with -P: without it the working directory would be the first place of its imports.
_START = """
import sys
from importlib import import_module
from multiprocessing.connection import Connection
connection = Connection(int(sys.argv[1]))
sys.path[:] = connection.recv()
getattr(import_module(sys.argv[3]), sys.argv[4])(connection, int(sys.argv[2]))
"""
_PARENT_CHECK_SECONDS = 1.0
_TORCHRUN = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


class Worker:
    """A worker process as its parent sees it: requests and answers go through `connection`. `serve`, a function at the
    top of a module, is all that the process runs. `environment` is added to this process's; with `own_session` the
    worker gets no signals from a terminal.
    """

    def __init__(
        self, serve: Serve, *, environment: Mapping[str, str] | None = None, own_session: bool = False
    ) -> None:
        self.connection: Connection[Any, Any]
        self.connection, worker_end = Pipe()
        arguments = [str(worker_end.fileno()), str(os.getpid()), serve.__module__, serve.__name__]
        self.process: subprocess.Popen[bytes] = subprocess.Popen(
            [sys.executable, "-P", "-c", _START, *arguments],
            stdin=subprocess.DEVNULL,
            pass_fds=[worker_end.fileno()],
            env={**os.environ, **(environment or {})},
            start_new_session=own_session,
        )
        worker_end.close()
        self.send(import_path())

    def send(self, value: Any) -> None:
        """Send what `connection.recv` returns in the worker. Raises OSError where the worker is gone."""
        # `Connection.send` would leave a buffer of a BytesIO in that error, which Python 3.13 complains of once the
        # error is collected in a cycle.
        self.connection.send_bytes(pickle.dumps(value))

    def end(self, patience: float = 0.0) -> None:
        """End the process, also in the middle of a request; with `patience`, ask first, and kill after these seconds.
        Close `connection` afterwards.
        """
        with suppress(OSError, subprocess.TimeoutExpired):
            if patience:
                self.send(None)
                self.process.wait(patience)
        with suppress(OSError):
            self.process.kill()  # does nothing to a process that has ended
        self.process.wait()


def next_request(connection: "Connection[Any, Any]", parent: int) -> Any:
    """Wait in a worker for the next request; None if the parent has asked the worker to end, or is gone.

    `connection` is the worker's end, and `parent` the process id of its parent.
    """
    while not connection.poll(_PARENT_CHECK_SECONDS):
        if os.getppid() != parent:  # a process that the parent forked may hold its side of the connection
            return None
    try:
        return connection.recv()
    except (EOFError, OSError):
        return None


def main_script(payload: bytes) -> dict[str, Any]:
    """Return where a worker finds this program's script, for `import_main`; {} if the payload names nothing of it.

    `payload` is a pickled call, which names the modules of its functions.
    """
    # The function may be in __main__, or in a worker's own __mp_main__.
    return main_program() if b"_main__" in payload else {}


def main_program() -> dict[str, Any]:
    """This program's words and its main module, by name or path, as `spawn.prepare` takes them in another process."""
    data = spawn.get_preparation_data("")
    names = ("sys_argv", "init_main_from_name", "init_main_from_path")
    return {name: data[name] for name in names if name in data}


def import_main(main: dict[str, Any]) -> None:
    """Run this program's script in a worker as a module that is not `__main__`, where the call needs its functions; {}
    is none.
    """
    if main:
        for name in _TORCHRUN:  # a script that trains when it is imported must not take a rank's place
            os.environ.pop(name, None)
        spawn.prepare(main)


def describe_end(code: int | None) -> str:
    """Return how a process ended, from its exit code, for messages."""
    if code is None or code >= 0:
        return f"left with exit code {code}"
    names = {number.value: number.name for number in signal.Signals}
    return f"was killed by signal {-code} ({names.get(-code, 'unknown')})"


def pickle_error(error: BaseException) -> bytes | None:
    """Return the pickled error; None for an error that cannot be pickled, or not be unpickled again."""
    try:
        pickled = pickle.dumps(error)
        pickle.loads(pickled)
    except Exception:
        return None
    return pickled
