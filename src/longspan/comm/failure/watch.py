"""What a rank is doing, and what the ranks tell each other when a collective fails.

Every rank notes the collective that it is in. When one fails, the first rank to notice asks the others through the
store (`incident.py`); a thread on each rank answers, also while its main thread is stuck. The outcome names the ranks
that no longer answer and quotes those that left with an error. Nothing here moves data.
"""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import TracebackType

import torch
import torch.distributed as dist
from torch.distributed import Work

from longspan.comm.failure.incident import CALL_SECONDS, Notes
from longspan.errors import CommError, LongspanError
from longspan.layout.layout import short

SILENT_SECONDS = 60.0  # a store that has not answered for this long is not asked again
LEFT_SECONDS = 30.0  # once a rank has left with an error, a collective of the others may last this long


class Operation:
    """One collective of this rank, from entering to leaving: `with watch.during("ring forward", ranks): ...`.

    A backend's error or time-out inside becomes a CommError that names the collective, the step, the ranks and the
    outcome of a roll call. Inside another one, this rank is in the inner one until it ends.
    """

    __slots__ = ("outer", "ranks", "started", "watch", "what")

    def __init__(self, watch: "Watch", what: str, ranks: Sequence[int]) -> None:
        self.watch, self.what, self.ranks, self.started = watch, what, ranks, 0.0
        self.outer: Operation | None = None

    def __enter__(self) -> "Operation":
        self.started = time.monotonic()
        self.outer, self.watch.current = self.watch.current, self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if isinstance(error, RuntimeError) and not isinstance(error, LongspanError) and not is_out_of_memory(error):
                raise self.watch.failed(self, error) from error
            self.watch.finished = self.what
        finally:
            self.watch.current = self.outer

    def __str__(self) -> str:
        return f"'{self.what}' of step {self.watch.step} between ranks {short(self.ranks)}"


class Watch:
    """What this rank is doing, and its side of a roll call.

    `notes` is what the ranks tell each other, or None (a single process). `gpu`: collectives run on a GPU, where a
    stuck one raises nothing in the host: there the answering thread writes the error to stderr and ends the process. It
    does so too, on a GPU or not, where a rank has left with an error and this one does not get out of a collective that
    waits for it.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        timeout: float,
        notes: Notes | None,
        *,
        gpu: bool = False,
    ) -> None:
        self.rank, self.ranks, self.timeout = rank, tuple(ranks), timeout
        self.step = 0
        self.current: Operation | None = None
        self.finished = "nothing yet"
        self._notes = notes
        self._passed = torch.cuda.Event() if gpu else None
        # The last collective that was waited for, and how to ask whether the device is past it.
        self._last: tuple[Operation, Callable[[], bool]] | None = None
        self._named: Operation | None = None  # around collectives that others start
        self._left_since: float | None = None  # when this rank first saw that another has left with an error
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def during(self, what: str, ranks: Sequence[int]) -> Operation:
        """A context in which this rank is in the collective `what` with `ranks`."""
        return Operation(self, what, ranks)

    @contextmanager
    def naming(self, what: str, ranks: Sequence[int]) -> Iterator[None]:
        """A context around collectives that others start, such as FSDP2's: where one fails, the error is of `what`.

        Errors that no backend raised pass as they are.
        """
        operation = Operation(self, what, ranks)
        operation.started, operation.outer, self._named = time.monotonic(), self._named, operation
        try:
            yield
        except RuntimeError as error:
            if of_backend(error):
                raise self.failed(operation, error) from error
            raise
        finally:
            self._named = operation.outer

    def queued(self, operation: Operation, works: Sequence[Work]) -> None:
        """Note that the device's stream is now ordered behind these works of a collective, which may still run.

        A collective that is captured in a CUDA graph does not run now, and cannot be asked.
        """
        if self._passed is not None and not torch.cuda.is_current_stream_capturing():
            self._last = operation, lambda: _past(lambda: all(work.is_completed() for work in works))

    def mark(self, operation: Operation) -> None:
        """The same for a collective without works at hand: the device is past it when the stream is past this point."""
        if self._passed is not None and not torch.cuda.is_current_stream_capturing():
            self._passed.record()
            passed = self._passed
            self._last = operation, lambda: _past(passed.query)

    def open(self) -> None:
        """Start the thread that answers roll calls."""
        if self._notes is not None:
            self._thread = threading.Thread(target=self._answer_calls, name="longspan roll call", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Stop answering."""
        self._stop.set()
        if self._thread is not None:
            self._thread.join(CALL_SECONDS)
            self._thread = None

    def leave(self, error: BaseException) -> None:
        """Tell the others, before this rank goes, that it leaves with an error."""
        if self._notes is not None:
            self._notes.leave(_one_line(error), echo=bool(getattr(error, "seen_from_outside", False)))

    def failed(self, operation: Operation, error: BaseException) -> CommError:
        """The error to raise for a collective that failed here, after a roll call."""
        seconds = time.monotonic() - operation.started
        how = "timed out" if "timed out" in str(error).lower() else "failed"
        failure = CommError(
            f"{operation} {how} on rank {self.rank} after {seconds:.1f} s (limit {self.timeout:g} s). "
            f"Roll call: {self._roll_call(operation.started)}. The backend said: {_one_line(error)}"
        )
        failure.seen_from_outside = True  # type: ignore[attr-defined]
        return failure

    def describe(self) -> str:
        """What this rank is doing, for the others."""
        operation = self.current
        if operation is None:
            return f"computing in step {self.step}, after '{self.finished}'"
        return f"in {operation} for {time.monotonic() - operation.started:.1f} s"

    def _answer_calls(self) -> None:
        # Many ranks share one store: a thousand ranks ask it a thousand times a second, not more.
        interval = min(2.0, max(0.2, len(self.ranks) / 1000))
        notes, silent_since = self._notes, math.inf
        while not self._stop.wait(interval):
            self._report_stuck_device()
            if notes is None:
                continue
            try:
                if silent_since < math.inf:
                    notes.connect_again()
                self._ask(notes)
                silent_since = math.inf
            except RuntimeError as error:
                silent_since = min(silent_since, time.monotonic())
                if time.monotonic() - silent_since >= SILENT_SECONDS:
                    notes = None
                    self._say_that_the_store_is_silent(error)

    def _ask(self, notes: Notes) -> None:
        self._report_waiting_in_vain(notes)
        if number := notes.unanswered():
            notes.answer(number, self.describe())

    def _say_that_the_store_is_silent(self, error: RuntimeError) -> None:
        _say(
            f"rank {self.rank} answers no more roll calls and does not learn of ranks that leave with an error: the "
            f"store has not answered for {SILENT_SECONDS:g} s; a collective still ends after {self.timeout:g} s, so "
            f"check the process that serves the store ({_one_line(error)})"
        )

    def _report_stuck_device(self) -> None:
        """Say which collective a GPU does not get past in time, and end this process, whose main thread may be stuck.

        NCCL's own watchdog ends it too, but only after a minute or more of dumping (torch 2.11).
        """
        last = self._last
        if last is None or time.monotonic() - last[0].started < self.timeout:
            return
        operation, past = last
        if past():
            self._last = None if self._last is last else self._last
            return
        self._end(operation, f"timed out: the GPU of rank {self.rank} has not got past it")

    def _report_waiting_in_vain(self, notes: Notes) -> None:
        """End this process where it waits in a collective for a rank that has left with an error.

        Where connections break, the main thread has raised by then. With NCCL, or where the rank that left lives on and
        keeps its connections, nothing would happen before the time-out.
        """
        if self._left_since is None:
            self._left_since = time.monotonic() if notes.somebody_left() else None
        elif time.monotonic() - self._left_since > LEFT_SECONDS:
            unfinished = None if self._last is None or self._last[1]() else self._last[0]
            operation = self.current or self._named or unfinished
            if operation is not None:
                self._end(operation, f"a rank left {LEFT_SECONDS:g} s ago or more, and others wait for it")

    def _end(self, operation: Operation, why: str) -> None:
        failure = self.failed(operation, RuntimeError(why))
        _say(str(failure))
        self.leave(failure)
        os.kill(os.getpid(), signal.SIGABRT)

    def _roll_call(self, since: float) -> str:
        """Who answers, about a collective entered at `since`: the first rank that notices asks, the others read it."""
        if self._notes is None:
            return "this process has no store to ask through"
        try:
            return self._notes.call(self.describe(), since)
        except RuntimeError:
            return "the store does not answer, so the rank or launcher that served it is gone"


def of_backend(error: BaseException) -> bool:
    """Whether a collective's backend raised this error, of which gloo's are plain RuntimeErrors."""
    known = isinstance(error, dist.DistError) or "gloo" in str(error)
    own = isinstance(error, LongspanError) or is_out_of_memory(error)
    return isinstance(error, RuntimeError) and not own and known


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this error says that no memory was left, on a device or on the host."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def _past(query: Callable[[], bool]) -> bool:
    """Whether the device is past a collective, or has failed, which the main thread hears of when it next asks it."""
    try:
        return query()
    except RuntimeError:
        return True


def _say(text: str) -> None:
    print(f"longspan: {text}", file=sys.stderr, flush=True)


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()).partition(" This is typically caused by")[0]
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
