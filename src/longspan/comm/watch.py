"""What a rank is doing: the collective that it is in, and the error to raise where one fails.

The answers that other ranks get meanwhile are in `answering`, what they exchange in `reports`. Nothing here moves data.
"""

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType

import torch
import torch.distributed as dist
from torch.distributed import Work

from longspan.comm.failure_reports import FailureReports
from longspan.errors import CommError, LongspanError, RankLostError
from longspan.layout.layout import excerpt


def is_backend_error(error: BaseException) -> bool:
    """Whether a collective's backend raised this error, gloo's being plain RuntimeErrors."""
    if not isinstance(error, RuntimeError) or isinstance(error, LongspanError) or is_out_of_memory(error):
        return False
    return isinstance(error, dist.DistError) or "gloo" in str(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether this error means that no memory was left, on a device or on the host."""
    if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
        return True
    return isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)


def one_line(error: BaseException) -> str:
    """The type of an error and the beginning of its text."""
    text = " ".join(str(error).split()).partition(" This is typically caused by")[0]
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__


class Operation:
    """One collective of this rank, from entering to leaving: `with watch.during("ring forward", ranks): ...`.

    A backend's error or time-out inside becomes a CommError that names the collective, the step and the ranks, with a
    failure report. Inside another one, this rank is in the inner one until it ends.
    """

    __slots__ = ("outer", "ranks", "started", "step", "watch", "what")

    def __init__(self, watch: "Watch", what: str, ranks: Sequence[int], step: int | None = None) -> None:
        self.watch, self.what, self.ranks, self.started = watch, what, ranks, 0.0
        self.step = step  # that errors name; None: the world's
        if step is None and watch.named is not None:
            self.step = watch.named.step
        self.outer: Operation | None = None

    def __enter__(self) -> "Operation":
        self.started = time.monotonic()
        self.outer, self.watch.current = self.watch.current, self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Turn an error of the backend into one with a failure report; note that the operation is over."""
        try:
            if isinstance(error, RuntimeError) and not isinstance(error, LongspanError) and not is_out_of_memory(error):
                raise self.watch.failure(self, error) from error
            self.watch.finished = self.what
        finally:
            self.watch.current = self.outer

    def __str__(self) -> str:
        step = self.watch.step if self.step is None else self.step
        return f"'{self.what}' of step {step} between ranks {excerpt(self.ranks)}"


class Watch:
    """What this rank is doing. `reports` is what ranks exchange when one fails, or None (a single process).

    `gpu`: collectives run on a GPU, where a stuck one raises nothing in the host.
    """

    def __init__(
        self, rank: int, ranks: Sequence[int], timeout: float, reports: FailureReports | None, *, gpu: bool = False
    ) -> None:
        self.rank, self.ranks, self.timeout, self.reports = rank, tuple(ranks), timeout, reports
        self.step = 0
        self.current: Operation | None = None
        self.finished = "nothing yet"
        self.others: Callable[[], Sequence[Watch]] = lambda: ()  # of every world that is open on this rank
        self.named: Operation | None = None  # around collectives that others start
        # The last collective that was waited for, and how to ask whether the device is past it.
        self.last: tuple[Operation, Callable[[], bool]] | None = None
        self._passed = torch.cuda.Event() if gpu else None

    def during(self, what: str, ranks: Sequence[int]) -> Operation:
        """A context in which this rank is in the collective `what` with `ranks`."""
        return Operation(self, what, ranks)

    @contextmanager
    def naming(self, what: str, ranks: Sequence[int], step: int | None = None) -> Iterator[None]:
        """A context around collectives that others start, such as FSDP2's: where one fails, the error is of `what`.

        `step` is the one that errors inside name (None: the world's). Errors that no backend raised pass as they are.
        """
        operation = Operation(self, what, ranks, step)
        operation.started, operation.outer, self.named = time.monotonic(), self.named, operation
        try:
            yield
        except RuntimeError as error:
            if is_backend_error(error):
                raise self.failure(operation, error) from error
            raise
        finally:
            self.named = operation.outer

    def watch_works(self, operation: Operation, works: Sequence[Work]) -> None:
        """Note that the device's stream is now ordered behind these works of a collective, which may still run.

        A collective that is captured in a CUDA graph does not run now, and has no state to query.
        """
        if self._passed is not None and not torch.cuda.is_current_stream_capturing():
            self.last = operation, lambda: _has_passed(lambda: all(work.is_completed() for work in works))

    def mark(self, operation: Operation) -> None:
        """Note a collective whose works are not at hand: it has passed when the device's stream is past this point."""
        if self._passed is not None and not torch.cuda.is_current_stream_capturing():
            self._passed.record()
            passed = self._passed
            self.last = operation, lambda: _has_passed(passed.query)

    def leave(self, error: BaseException) -> None:
        """Tell the others, before this rank goes, that it leaves with an error."""
        if self.reports is not None:
            self.reports.post_departure(one_line(error), echo=bool(getattr(error, "seen_from_outside", False)))

    def failure(self, operation: Operation, error: BaseException) -> CommError:
        """Return the error to raise for a collective that failed here, with a failure report.

        It is a RankLostError unless a rank left with an error of its own, which would come again.
        """
        seconds = time.monotonic() - operation.started
        outcome = "timed out" if "timed out" in str(error).lower() else "failed"
        report, own_error = self._failure_report(operation.started)
        failure = (CommError if own_error else RankLostError)(
            f"{operation} {outcome} on rank {self.rank} after {seconds:.1f} s (limit {self.timeout:g} s). "
            f"Failure report: {report}. The backend said: {one_line(error)}"
        )
        failure.seen_from_outside = True  # type: ignore[attr-defined]
        return failure

    def activity(self) -> str:
        """Say what this rank is doing, for the others."""
        operation = self.current or next((watch.current for watch in self.others() if watch.current), None)
        if operation is None:
            step = self.step if self.named is None or self.named.step is None else self.named.step
            return f"computing in step {step}, after '{self.finished}'"
        return f"in {operation} for {time.monotonic() - operation.started:.1f} s"

    def has_died(self, rank: int) -> bool:
        """Whether a rank is known to be dead, by its launcher."""
        with suppress(RuntimeError):  # the store does not answer
            return self.reports is not None and self.reports.has_died(rank)
        return False

    def _failure_report(self, since: float) -> tuple[str, bool]:
        """The report of a collective entered at `since`, and whether a rank left with an error of its own.

        The first rank that notices requests it, all read it.
        """
        if self.reports is None:
            return "this process has no store to ask through", False
        try:
            return self.reports.report(self.activity(), since)
        except RuntimeError:
            served = "the store does not answer, so the rank or launcher that served it is gone"
            return served + self.reports.first_node(), False


def _has_passed(query: Callable[[], bool]) -> bool:
    """Whether the device is past a collective or has failed; the main thread gets the error at its next call."""
    try:
        return query()
    except RuntimeError:
        return True
