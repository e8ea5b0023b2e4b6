"""The life of one local rank: set itself up, call a function, answer through a pipe."""

import faulthandler
import gc
import multiprocessing
import os
import pickle
import signal
import sys
import traceback
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import connection, spawn, util
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any, NoReturn

from longspan.errors import CommError
from longspan.launch.environment import import_path
from longspan.launch.launcher_watch import stop_when_launcher_is_gone
from longspan.launch.output import write_error
from longspan.launch.stop_signals import ignore_signals, unblock_signals
from longspan.launch.worker import main_program, pickle_error

DEAD_KEY = "longspan/dead/"  # the launcher writes here, under the rank, how a rank died
DUMP = signal.SIGQUIT  # asks a rank where it is; those of `stop_signals` are a run's


class Descriptor:
    """An open file descriptor that travels with a process's arguments."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _receive_descriptor, (DupFd(self.number),)


def _receive_descriptor(handle: Any) -> Descriptor:
    return Descriptor(handle.detach())


@dataclass(frozen=True)
class RankSpec:
    """What a rank needs: its number, its environment with torchrun's variables, and the pickled function and arguments.
    It runs with `threads` threads of torch and writes its stack into `folder`. Signals that are `ignored` do nothing
    until the function handles them.
    """

    rank: int
    environment: dict[str, str]
    payload: bytes
    threads: int
    folder: Path
    ignored: tuple[int, ...]


@dataclass(frozen=True)
class RankAnswer:
    """The message of a rank: a pickled result, or a pickled error (None if it does not pickle) and its text."""

    ok: bool
    pickled: bytes | None
    text: str = ""
    summary: str = ""
    consequence: bool = False  # an error that reports another rank's failure

    def unpickle_value(self) -> Any:
        """Return the result of a rank that answered with one."""
        assert self.ok and self.pickled is not None
        return pickle.loads(self.pickled)

    def make_error(self, rank: int) -> BaseException:
        """Return the rank's error, of its own type if that pickles, with its traceback as the cause."""
        try:
            error = pickle.loads(self.pickled or b"")
        except Exception:
            error = CommError(f"rank {rank} failed with {self.summary}")
        error.__cause__ = RankError(rank, self.text)
        return error


class RankError(Exception):
    """The traceback of a rank, as text: the cause of the error that its launcher raises."""

    def __init__(self, rank: int, text: str) -> None:
        super().__init__(rank, text)
        self.rank: int = rank
        self.text: str = text

    def __str__(self) -> str:
        return f"on rank {self.rank}\n{self.text}"


def rank_main(spec: RankSpec, pipe: connection.Connection, out: Descriptor, err: Descriptor) -> None:
    """Run a rank from its start to its end, in a new Python process if the fork server has made CUDA unusable."""
    if not spec.folder.is_dir():  # the launcher was interrupted while it waited for this process
        os._exit(0)
    import torch

    # Where an import of the fork server used CUDA or would have, see `without_cuda`, nothing forked from it can use it.
    parent = multiprocessing.parent_process()
    launcher = parent.sentinel if parent is not None else None
    if torch.cuda._is_in_bad_fork():
        _restart_process(spec, pipe, out, err, launcher)
    _run_rank(spec, pipe, out, err, launcher)


def _run_rank(
    spec: RankSpec, pipe: connection.Connection, out: Descriptor, err: Descriptor, launcher: int | None
) -> NoReturn:
    """A rank has a process group of its own, in which signals come only from the launcher. What the fork server
    imported is no garbage: collections pass over it, and its memory stays shared. Processes that a rank starts, such as
    a loader's workers, start as elsewhere in Python, and not from a fork server of their own, which would import torch
    and transformers again."""
    gc.freeze()
    gc.enable()
    multiprocessing.set_start_method(None, force=True)
    os.setpgid(0, 0)
    for stream, target in ((out, 1), (err, 2)):
        os.dup2(stream.number, target)
        os.close(stream.number)
    log = (spec.folder / f"rank-{spec.rank}.txt").open("w")
    faulthandler.register(DUMP, file=log, all_threads=False)
    # A rank that dies of a fault in a library leaves its stack. Those of other threads, which run on, may be a fault of
    # their own to read.
    faulthandler.enable(file=log, all_threads=False)
    if launcher is not None:
        stop_when_launcher_is_gone(lambda: bool(connection.wait([launcher], 0)), with_message=spec.rank == 0)
    # The environment is set before anything of torch is used.
    os.environ.clear()
    os.environ.update(spec.environment)

    import torch

    torch.set_num_threads(spec.threads)
    if not pipe.poll():  # readable here means closed: the launcher was interrupted
        answer_call(spec, pipe)
    pipe.close()
    util._run_finalizers(0)  # pyright: ignore[reportAttributeAccessIssue]  (of locks, such as tqdm's, and pools)
    os._exit(0)  # no destructor may wait for a rank that is gone


def _restart_process(
    spec: RankSpec, pipe: connection.Connection, out: Descriptor, err: Descriptor, launcher: int | None
) -> NoReturn:
    """What was forked here cannot use CUDA; the process keeps its id and open ends of pipes."""
    if spec.rank == 0:
        write_error(
            "ranks take longer to start: a module that they import uses CUDA as it is imported\n", err.number
        )
    file = spec.folder / f"rank-{spec.rank}.pickle"
    # The order matters: `spec` may name what is importable only after `spawn.prepare`.
    with file.open("wb") as stream:
        pickle.dump({"dir": str(Path.cwd()), **main_program()}, stream)
        pickle.dump(spec, stream)
    numbers = (pipe.fileno(), out.number, err.number, -1 if launcher is None else launcher)  # −1: there is none
    for number in numbers:
        if number >= 0:
            os.set_inheritable(number, True)
    program = f"import sys; sys.path[:] = {import_path()!r}; from longspan.launch import rank_process as process; "
    program += "process.continue_restarted_rank()"
    os.execv(sys.executable, [sys.executable, "-P", "-c", program, str(file), *map(str, numbers)])


def continue_restarted_rank() -> NoReturn:
    """Run the rank that `_restart_process` has put into the arguments of this process."""
    file, *numbers = sys.argv[1:]
    pipe, out, err, launcher = map(int, numbers)
    sys.argv[1:] = []
    with Path(file).open("rb") as stream:
        spawn.prepare(pickle.load(stream))
        spec: RankSpec = pickle.load(stream)
    for number in (pipe, out, err, launcher):
        if number >= 0:
            os.set_inheritable(number, False)
    _run_rank(
        spec, connection.Connection(pipe), Descriptor(out), Descriptor(err), launcher if launcher >= 0 else None
    )


def answer_call(spec: RankSpec, pipe: connection.Connection) -> None:
    """Run the function, and send its result or its error to the launcher; nothing is raised."""
    ignore_signals(spec.ignored)
    try:
        with unblock_signals():
            fn, args = _read_call(spec.payload)
            result = fn(spec.rank, *args)
        message = RankAnswer(ok=True, pickled=pickle.dumps(result))
    except BaseException as error:
        text = "".join(traceback.format_exception(error))
        summary = f"{type(error).__name__}: {error}".strip()[:2000]
        consequence = bool(getattr(error, "seen_from_outside", False))
        message = RankAnswer(
            ok=False, pickled=pickle_error(error), text=text, summary=summary, consequence=consequence
        )
    with suppress(OSError):  # the launcher was killed: nobody waits for an answer
        sys.stdout.flush()
        sys.stderr.flush()
        pipe.send_bytes(pickle.dumps(message))


def _read_call(payload: bytes) -> tuple[Any, Any]:
    try:
        return pickle.loads(payload)
    except AttributeError as error:
        raise CommError(
            f"a rank does not find what it shall run ({error}); define it at the top of its module, and only call "
            'run_ranks under `if __name__ == "__main__":`'
        ) from error


def stack_text(folder: Path, index: int) -> str:
    """Return the stack that a rank's faulthandler has written, 14 lines at most; "" if it has written none. After a
    fault in a library, these are the name of the fault and the stack of the thread in which it happened.
    """
    path = folder / f"rank-{index}.txt"
    lines = path.read_text().splitlines() if path.exists() else []
    return "\n".join(lines[:14])
