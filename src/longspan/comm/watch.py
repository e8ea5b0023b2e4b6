"""What a rank is doing: the collective that it is in, the error where one fails, and the thread that answers for it.

The thread ends the process where nothing else would: a GPU does not get past a collective in time, gloo does not
return from one, or this rank waits in one for a rank that has left with an error.
"""

import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import cached_property
from types import TracebackType

import torch
import torch.distributed as dist
from torch.distributed import Work

from longspan.comm.device import is_out_of_memory
from longspan.comm.failure_reports import (
    ANSWER_SECONDS,
    Activity,
    FailureReport,
    FailureReports,
    last_collective_text,
)
from longspan.errors import CommError, LongspanError, RankLostError
from longspan.launch.launcher_watch import launcher_is_gone
from longspan.plain_text import excerpt


def is_backend_error(error: BaseException) -> bool:
    """Whether gloo or NCCL raised this error, and not torch or longspan; gloo's errors are plain RuntimeErrors."""
    if not isinstance(error, RuntimeError) or isinstance(error, LongspanError) or is_out_of_memory(error):
        return False
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def error_in_one_line(error: BaseException) -> str:
    """Return the error's type and its text, 300 characters at most, for messages of other ranks."""
    text = " ".join(str(error).split()).partition(" This is typically caused by")[0]
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


class Operation:
    """One collective of this rank, from entering to leaving: `with watch.enter_operation("ring forward", ranks): ...`.

    A RuntimeError inside, as a backend raises it for an error or a time-out, becomes a CommError that names the
    collective, the step and the ranks, with a failure report; longspan's own errors, and a lack of memory, pass as they
    are. Where one operation is inside another, this rank is in the inner one until that ends. One that `is_work` has
    computing or files inside, and no limit as a whole.
    """

    __slots__ = ("is_work", "label", "limit", "outer", "ranks", "started", "step", "watch")

    def __init__(
        self, watch: "Watch", label: str, ranks: Sequence[int], step: int | None = None, *, is_work: bool = False
    ) -> None:
        self.watch: Watch = watch
        self.label: str = label
        self.ranks: Sequence[int] = ranks
        self.is_work: bool = is_work
        self.started = 0.0
        self.limit: float = watch.timeout  # seconds
        # Errors name this step; None stands for the world's.
        self.step = step
        # inside `naming`, errors name the step that it was given
        if step is None and watch.named_operation is not None:
            self.step = watch.named_operation.step
        self.outer: Operation | None = None

    def __enter__(self) -> "Operation":
        self.started: float = time.monotonic()
        self.limit = self.watch.timeout
        self.outer = self.watch.current
        self.watch.current = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if (
                isinstance(error, RuntimeError)
                and not isinstance(error, LongspanError)
                and not is_out_of_memory(error)
            ):
                raise self.watch.failure_error(self, error) from error
            self.watch.last_label = self.label
        finally:
            self.watch.current = self.outer

    def __str__(self) -> str:
        step = self.watch.step if self.step is None else self.step
        return f"'{self.label}' of step {step} between ranks {excerpt(self.ranks)}"


@dataclass(eq=False)
class Watch:
    """What this rank is doing. `reports` is what ranks exchange when one fails, or None (a single process).

    `timeout` is the limit of each collective in seconds. `gpu`: a stuck collective raises nothing in the host.
    """

    rank: int
    ranks: tuple[int, ...]
    timeout: float
    reports: FailureReports | None
    gpu: bool = False
    step: int = 0
    current: Operation | None = None
    last_failed: Operation | None = None  # the last that failed here, and got or gets a report
    last_label: str = "nothing yet"
    notes: tuple[str, ...] = ()  # lines for a report, the same on every rank
    # These are the watches of every world that is open on this rank.
    open_watches: "Callable[[], Sequence[Watch]]" = lambda: ()
    # Others start collectives inside this operation.
    named_operation: Operation | None = None
    # This says what a thread of this rank is doing meanwhile, "" for nothing.
    background: Callable[[], str] = str
    # The last collective that was waited for, and how to ask whether the device is past it.
    last_waited: tuple[Operation, Callable[[], bool]] | None = None

    @cached_property
    def _passed(self) -> torch.cuda.Event | None:
        return torch.cuda.Event() if self.gpu else None

    def enter_operation(self, label: str, ranks: Sequence[int], *, is_work: bool = False) -> Operation:
        """Return a context for one collective with this label between these ranks; see `Operation`."""
        return Operation(self, label, ranks, is_work=is_work)

    @contextmanager
    def name_collectives(self, label: str, ranks: Sequence[int], step: int | None = None) -> Iterator[None]:
        """Name collectives in this context that others start, such as FSDP2's: an error of one has this label.

        `step` is the one that errors inside name (None: the world's). Errors that no backend raised pass as they are.
        """
        operation = Operation(self, label, ranks, step)
        operation.started = time.monotonic()
        operation.outer = self.named_operation
        self.named_operation = operation
        try:
            yield
        except RuntimeError as error:
            if is_backend_error(error):
                raise self.failure_error(operation, error) from error
            raise
        finally:
            self.named_operation = operation.outer

    def watch_works(self, operation: Operation, works: Sequence[Work]) -> None:
        """Note that the device's stream is now ordered behind these works of a collective, which may still run.

        A collective that is captured in a CUDA graph is not noted: it does not run now, and has no state to query.
        """
        if self._passed is not None and not torch.cuda.is_current_stream_capturing():
            self.last_waited = operation, lambda: _has_passed(lambda: all(work.is_completed() for work in works))

    def watch_stream(self, operation: Operation) -> None:
        """Note a collective without keeping its works: it has passed when the device's stream is past this point."""
        if self._passed is not None and not torch.cuda.is_current_stream_capturing():
            self._passed.record()
            passed = self._passed
            self.last_waited = operation, lambda: _has_passed(passed.query)

    def collective_on_device(self) -> Operation | None:
        """Return the last collective that was waited for, if the device is not past it yet."""
        if self.last_waited is None:
            return None
        operation, has_passed = self.last_waited
        return None if has_passed() else operation

    def report_leaving(self, error: BaseException) -> None:
        """Tell the others, before this rank goes, that it leaves with an error."""
        if self.reports is not None:
            self.reports.post_departure(
                error_in_one_line(error), echo=bool(getattr(error, "seen_from_outside", False))
            )

    def failure_error(self, operation: Operation, error: BaseException) -> CommError:
        """Return the error to raise for a collective that failed here, with a failure report.

        The error of the rank that collected the report has all of it, in at most 20 lines; those of the others have its
        causes, in one line. Where no rank could collect one (reporter −1), each rank's error has all that it knows. It
        is a RankLostError unless a rank left with an error of its own, which would come again.
        """
        self.last_failed = operation
        seconds = time.monotonic() - operation.started
        outcome = "timed out" if "timed out" in str(error).lower() else "failed"
        report = FailureReport(("this process has no store to ask through",))
        if self.reports is not None:
            try:
                report = self.reports.request_report(self.activity(), operation.started)
            except RuntimeError:
                report = FailureReport((self.reports.server_text(),))
        text = (
            f"{operation} {outcome} on rank {self.rank} after {seconds:.1f} s (limit {operation.limit:g} s): "
            f"{'; '.join(report.causes)}"
        )
        if report.reporter in (self.rank, -1):
            text = "\n  ".join(
                [text, *report.activities, *self.notes, f"the backend said: {error_in_one_line(error)}"]
            )
        else:
            text = f"{text} (rank {report.reporter} prints what each rank does)"
        failure = (CommError if report.own_error else RankLostError)(text)
        failure.seen_from_outside = True  # an echo of what another rank did  # type: ignore[attr-defined]
        return failure

    def activity(self) -> Activity:
        """Describe what this rank is doing, for failure reports.

        The first of these that is so: it is in a collective, of this world or another open one; its device has not yet
        passed the last one; it is inside `name_collectives`, where others start collectives, of which torch recorded
        the last; it computes.
        """
        recorded = last_collective_text()
        operation = self.current or next((watch.current for watch in self.open_watches() if watch.current), None)
        if operation is not None:
            text = f"in {operation} for {time.monotonic() - operation.started:.1f} s"
            name = operation.label
        elif (operation := self.collective_on_device()) is not None:
            text = (
                f"past {operation} in its program, its GPU in it for {time.monotonic() - operation.started:.1f} s"
            )
            name = operation.label
        elif (named := self.named_operation) is not None:
            # The rank is in a collective of FSDP2 or DTensor, which torch recorded, or after it.
            step = self.step if named.step is None else named.step
            text = f"computing in step {step}, in '{named.label}', after '{self.last_label}'"
            name = recorded
        else:
            text = f"computing in step {self.step}, after '{self.last_label}'"
            name = ""
        background = self.background()
        return Activity(f"{text}, in the background in {background}" if background else text, name, recorded)

    def has_died(self, rank: int) -> bool:
        """Whether a launcher has posted that the rank is dead; false where the store does not answer."""
        with suppress(RuntimeError):  # the store does not answer
            return self.reports is not None and self.reports.has_died(rank)
        return False


def _has_passed(query: Callable[[], bool]) -> bool:
    """A device that failed counts as past it, as the main thread gets the error."""
    try:
        return query()
    except RuntimeError:
        return True


# After this time without an answer this rank asks the store no more.
SILENT_SECONDS = 60.0
# A collective on the host has ended with an error by this time after its limit.
LATE_SECONDS = 5.0
LEFT_SECONDS = 30.0  # once a rank has left with an error, a collective of the others may last this long


class AnsweringThread:
    """Answers for the rank of a watch from `start` to `stop`; a world of one process has none."""

    def __init__(self, watch: Watch) -> None:
        self.watch = watch
        self._late: Operation | None = None  # the collective that was late when this thread last looked
        self._left_since: float | None = None  # when this rank first saw that another has left with an error
        # when the store first failed to answer since its last answer; inf: it answers
        self._silent_since = math.inf
        self._stop = threading.Event()
        self._thread = threading.Thread(
            target=self._answer_until_stopped, name="longspan failure reports", daemon=True
        )

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """Stop answering, and wait for the thread, ANSWER_SECONDS at most."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(ANSWER_SECONDS)

    def _answer_until_stopped(self) -> None:
        """Every 0.2 to 2 s. Where the store has not answered for SILENT_SECONDS, it is asked no more, and the looks go
        on."""
        # Many ranks share one store: a thousand ranks ask it a thousand times a second, not more.
        interval = min(2.0, max(0.2, len(self.watch.ranks) / 1000))
        reports = self.watch.reports
        while not self._stop.wait(interval):
            self._end_with_stuck_device()
            self._end_with_stuck_host()
            if reports is None or launcher_is_gone():  # there is no store to ask any more
                continue
            try:
                if self._silent_since < math.inf:  # the last question failed
                    reports.open_own_connection()
                if reports.has_departure_or_request():
                    self._end_waiting_for_lost_rank(reports)
                    if number := reports.unanswered_request_number():
                        reports.post_answer(number, self.watch.activity())
                self._silent_since = math.inf
            except RuntimeError as error:
                self._silent_since = min(self._silent_since, time.monotonic())
                if time.monotonic() - self._silent_since >= SILENT_SECONDS:
                    reports = None
                    _write_line(
                        f"rank {self.watch.rank} answers for no more failure reports and does not learn of ranks that "
                        f"leave with an error: the store has not answered for {SILENT_SECONDS:g} s; a collective still "
                        f"ends after {self.watch.timeout:g} s, so check the process that serves the store "
                        f"({error_in_one_line(error)})"
                    )

    def _end_with_stuck_device(self) -> None:
        """NCCL's own watchdog ends the process too, but only after a minute or more of dumping (torch 2.11)."""
        watch = self.watch
        last_collective = self.watch.last_waited
        if last_collective is None:
            return
        operation, has_passed = last_collective
        if time.monotonic() - operation.started < operation.limit:
            return
        if has_passed():
            if watch.last_waited is last_collective:  # else the main thread has noted another meanwhile
                watch.last_waited = None
            return
        self._end_process(operation, f"timed out: the GPU of rank {watch.rank} has not got past it")

    def _end_with_stuck_host(self) -> None:
        """gloo connects two ranks at their first message, in the thread that sends it. Where the other rank is gone, it
        tries for five times the limit that their group was made with (torch 2.13). An operation that `is_work` has a
        limit only where rank 0 serves the store and is silent. After the first late look a process that was stopped for
        a while, and not stuck, has the time until the second one to get past."""
        operation = self.watch.current
        late_before = self._late
        self._late = None
        if operation is None or operation is self.watch.last_failed:
            return
        served_by_rank = self.watch.reports is not None and self.watch.reports.server == "rank 0"
        silent = served_by_rank and time.monotonic() - self._silent_since > operation.limit
        if operation.is_work and not silent:
            return
        if time.monotonic() - operation.started < operation.limit + LATE_SECONDS:
            return
        self._late = operation
        if operation is late_before:  # a process that stood still has had time to go on
            self._end_process(
                operation,
                f"timed out: rank {self.watch.rank} does not get past it, as at a first message to a rank that is gone",
            )

    def _end_waiting_for_lost_rank(self, reports: FailureReports) -> None:
        """Where connections break, the main thread has raised by then. With NCCL, or where the rank that left lives on
        and keeps its connections, nothing would happen before the time-out."""
        if self._left_since is None:
            self._left_since = time.monotonic() if reports.has_departures() else None
        elif time.monotonic() - self._left_since > LEFT_SECONDS:
            operation = self.watch.current or self.watch.named_operation or self.watch.collective_on_device()
            if operation is not None:
                self._end_process(operation, f"a rank left {LEFT_SECONDS:g} s ago or more, and others wait for it")

    def _end_process(self, operation: Operation, why: str) -> None:
        failure = self.watch.failure_error(operation, RuntimeError(why))
        _write_line(str(failure))
        self.watch.report_leaving(failure)
        os.kill(os.getpid(), signal.SIGABRT)


def _write_line(text: str) -> None:
    """Nothing happens where standard error cannot be written."""
    with suppress(OSError):
        print(f"longspan: {text}", file=sys.stderr, flush=True)
