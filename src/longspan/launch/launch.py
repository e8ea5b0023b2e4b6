"""Start N local ranks from one fork server, wait for their answers, and report which one failed and how.

Ranks are fresh processes with torchrun's variables, without a process group; their store lives in the parent, so that
survivors can talk to it when a rank dies. Torch's launchers return no results, and end ranks before these can report.
"""

import os
import pickle
import signal
import socket
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from multiprocessing import connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.errors import CommError, RankLostError
from longspan.host import usable_cores
from longspan.launch.environment import LOOPBACK, torchrun_variables
from longspan.launch.fork_server import kill_fork_server, start_fork_server
from longspan.launch.rank_process import (
    DEAD_KEY,
    DUMP,
    Descriptor,
    RankAnswer,
    RankSpec,
    rank_main,
    stack_text,
)
from longspan.launch.stop_signals import Forwarding, block_signals
from longspan.launch.worker import describe_end

if TYPE_CHECKING:
    from multiprocessing.context import ForkServerProcess


def start_store_server() -> Any:
    """Return a store in this process on a free port, which all ranks share. No other host may reach it: values in a
    store may be pickled objects, which can run code where they are read. torch's own server would listen on every
    network.
    """
    # What torch imports catches every exception, and the one that a signal raises with them.
    with block_signals():
        from torch.distributed import TCPStore

    listening = socket.create_server((LOOPBACK, 0), backlog=1024)
    port: int = listening.getsockname()[1]
    return TCPStore(
        LOOPBACK, port, None, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
    )


_USUAL_CAUSES: dict[int, str] = {
    signal.SIGKILL: ", as Linux does where memory runs out",
    signal.SIGBUS: ", as Linux does where a mapped file, as of a corpus, was cut, or the disk below it fails",
}


@dataclass(eq=False)
class LocalRank:
    """One rank's process, and its answer, or how the process died, once either has come."""

    index: int
    process: "ForkServerProcess"
    pipe: connection.Connection
    answer: RankAnswer | None = None
    death: str | None = None
    killed_by: int = 0  # the signal that the process died of; 0: none
    # The launcher waits for the rank's answer.
    waiting: bool = True

    def receive_answer(self) -> None:
        """Take the answer from the pipe; a pipe that ends or breaks without one means that the process died."""
        try:
            self.answer = pickle.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.process.join()
            code = self.process.exitcode
            self.killed_by = -min(0, code or 0)  # a negative exit code is a signal's number
            cause = _USUAL_CAUSES.get(self.killed_by, "") if self.killed_by else " before it answered"
            self.death = describe_end(code) + cause
        self.waiting = False

    @property
    def has_failed(self) -> bool:
        return self.death is not None or (self.answer is not None and not self.answer.ok)


class LocalRanks:
    """Local ranks of one call, from start to end. They write their stacks into `folder` and run with `threads` threads
    of torch.
    """

    def __init__(self, folder: Path, threads: int) -> None:
        self._context = start_fork_server()
        self.store: Any = start_store_server()
        self.folder = folder
        self.failure: BaseException | None = None
        self.ranks: list[LocalRank] = []
        # Failures are in the order in which they arrived.
        self.failed: list[LocalRank] = []
        self._threads = threads

    def start(self, n: int, payload: bytes, ignored: Sequence[int] = ()) -> None:
        """Start n ranks for a pickled call, each with its end of a pipe and this process's standard output and error.

        `ignored` signals do nothing in a rank until its function handles them.
        """
        for index in range(n):
            # The first start waits for the fork server's imports, so signals may interrupt it; no other is interrupted.
            with block_signals() if index else nullcontext():
                own_end, rank_end = self._context.Pipe()
                args = self.rank_spec(index, n, payload, ignored), rank_end, Descriptor(1), Descriptor(2)
                process = self._context.Process(target=rank_main, args=args, name=f"rank {index}")
                try:
                    process.start()
                    self.ranks.append(LocalRank(index, process, own_end))
                except BaseException:
                    own_end.close()  # a process that started in spite of the error reads the end of its pipe, and ends
                    raise
                finally:
                    rank_end.close()

    def rank_spec(self, index: int, n: int, payload: bytes, ignored: Sequence[int] = ()) -> RankSpec:
        """Return what rank `index` of n needs to run a pickled call."""
        environment = dict(os.environ) | torchrun_variables(n, self.store.port, self._threads)
        environment |= {"RANK": str(index), "LOCAL_RANK": str(index)}
        return RankSpec(index, environment, payload, self._threads, self.folder, tuple(ignored))

    def collect_answers(self, timeout: float | None, grace: float) -> None:
        """Wait for every answer for `timeout` seconds (None: no limit), but after a failure only for `grace` more; then
        set `failure`, the error to raise, None if every rank answered with a result.

        Deaths of ranks are posted in the store, and failed ranks are listed in `failed`.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        has_grace = False
        while waiting := {rank.pipe: rank for rank in self.ranks if rank.waiting}:
            seconds_left = None if deadline is None else deadline - time.monotonic()
            if seconds_left is not None and seconds_left <= 0:
                break
            for pipe in connection.wait(list(waiting), seconds_left):
                rank = waiting[pipe]  # pyright: ignore[reportArgumentType]
                rank.receive_answer()
                if rank.death is not None:
                    self.store.set(f"{DEAD_KEY}{rank.index}", rank.death)
                if rank.has_failed:
                    self.failed.append(rank)
            if self.failed and not has_grace:
                has_grace = True
                grace_end = time.monotonic() + grace
                deadline = grace_end if deadline is None else min(grace_end, deadline)
        self.failure = self._error_to_raise(timeout)

    def _error_to_raise(self, timeout: float | None) -> BaseException | None:
        """The error is that of the rank that most likely made others fail; None where no rank failed or still runs."""
        if not self.failed:
            running = [rank for rank in self.ranks if rank.waiting]
            return self._make_timeout_error(running, timeout) if running else None
        first = self._rank_to_blame()
        if first.death is not None or first.answer is None:
            error: BaseException = RankLostError(f"rank {first.index} of {len(self.ranks)} {first.death}")
            if stacks := stack_text(self.folder, first.index):
                error.add_note(f"rank {first.index} was at:\n{stacks}")
        else:
            error = first.answer.make_error(first.index)
        for rank in [rank for rank in self.ranks if rank is not first and (rank.has_failed or rank.waiting)][:4]:
            outcome = rank.answer.summary if rank.answer else rank.death or "was still running and was killed"
            error.add_note(f"rank {rank.index}: {outcome}")
        return error

    def _rank_to_blame(self) -> LocalRank:
        """One whose process died; else one with an error of its own; else one that only saw another's failure."""
        died = [rank for rank in self.failed if rank.death]
        raised = [rank for rank in self.failed if rank.answer is not None and not rank.answer.consequence]
        return [*died, *raised, *self.failed][0]

    def was_ended_by(self, signals: Sequence[int]) -> bool:
        """Whether the ranks failed because one of these signals, which were sent to them, ended the one to blame."""
        if not signals or not self.failed:
            return False
        first = self._rank_to_blame()
        return first.killed_by in signals or isinstance(self.failure, KeyboardInterrupt)

    def _make_timeout_error(self, running: list[LocalRank], timeout: float | None) -> CommError:
        """Waits 3 s at most for the stacks of `running`; `timeout` is how many seconds the launch waited."""
        _signal_ranks(running, DUMP)  # a rank's faulthandler dumps its stack
        deadline = time.monotonic() + 3
        while time.monotonic() < deadline and not all(stack_text(self.folder, rank.index) for rank in running):
            time.sleep(0.05)
        texts = {rank.index: stack_text(self.folder, rank.index) or "  (not known)" for rank in running}
        stacks = "".join(f"\nrank {index} was at:\n{text}" for index, text in texts.items())
        names = ", ".join(str(rank.index) for rank in running)
        return CommError(
            f"after {timeout:g} seconds, rank(s) {names} of {len(self.ranks)} were still running and were killed; "
            f"give more time, or see where they were:{stacks}"
        )

    def signal(self, number: int) -> None:
        """Send a signal to all ranks that still run."""
        _signal_ranks(self.ranks, number)

    def end(self) -> None:
        """End all ranks: those without an answer are killed, others end as their pipes close."""
        for rank in self.ranks:
            if rank.waiting:
                rank.process.kill()
            rank.pipe.close()
        for rank in self.ranks:
            rank.process.join(5)
            if rank.process.exitcode is None:
                rank.process.kill()
                rank.process.join()
            rank.process.close()


def _signal_ranks(ranks: Sequence[LocalRank], number: int) -> None:
    for rank in ranks:
        rank.process.join(0)
        if rank.process.exitcode is None and rank.process.pid is not None:
            os.kill(rank.process.pid, number)


def run_local(
    fn: Callable[..., Any],
    n: int,
    args: Sequence[Any] = (),
    *,
    timeout: float | None = None,
    grace: float = 10.0,
    threads: int | None = None,
    ignored: Sequence[int] = (),
) -> list[Any]:
    """Run `fn(rank, *args)` on n fresh local processes and return their results by rank.

    >>> run_local(train_rank, 4, (config,), timeout=None)

    `fn` must be importable (a function at the top of a module or script). `timeout` bounds the wait for answers, in
    seconds from when all ranks have started (None: no limit); when one rank fails, the others have `grace` seconds to
    report and are then killed. `threads` is torch's number of threads in each rank (None: the CPUs shared out evenly).
    Output of the ranks goes where the caller's goes. A first SIGINT or SIGTERM is forwarded to the ranks, and the call
    waits until they end; a second one, more than a second later, kills them. SIGHUP, SIGUSR1 and SIGUSR2 are forwarded
    each time. If ranks end by such a signal, it has its usual effect here too. Signals that are `ignored` do nothing in
    a rank until `fn` handles them.

    The error of the rank that most likely made others fail is raised again here, with its type and its traceback as the
    cause. RankLostError names a rank that was killed or left without an answer, CommError the ranks that still ran when
    the time was up.
    """
    if n < 1:
        raise CommError(f"{n} ranks were asked for; give a count of at least 1")
    payload = pickle_call(fn, args)
    with tempfile.TemporaryDirectory(prefix="longspan-ranks-") as folder:
        try:
            ranks = LocalRanks(Path(folder), threads or max(1, usable_cores() // n))
            try:
                ranks.start(n, payload, ignored)
                with Forwarding(ranks.signal) as forwarding:
                    ranks.collect_answers(timeout, grace)
            finally:
                ranks.end()
        except KeyboardInterrupt:  # while ranks start: the server would go on importing for nobody
            kill_fork_server()
            raise
    if ranks.failure is not None:
        if ranks.was_ended_by(forwarding.sent):
            signal.raise_signal(forwarding.received)
        raise ranks.failure
    return [rank.answer.unpickle_value() for rank in ranks.ranks if rank.answer is not None]


def pickle_call(fn: Callable[..., Any], args: Sequence[Any]) -> bytes:
    """Pickle a function and its arguments for another process; raise CommError where they do not pickle."""
    try:
        return pickle.dumps((fn, tuple(args)))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise CommError(
            f"{fn!r} and its arguments cannot be sent to other processes ({error}); give a function at the top of a "
            f"module and arguments that pickle"
        ) from error
