"""The thread of a rank that answers for failure reports, also while its main thread is stuck.

It ends the process where nothing else would: a GPU does not get past a collective in time, gloo does not return from
one, or this rank waits in one for a rank that has left with an error.
"""

import math
import os
import signal
import sys
import threading
import time

from longspan.comm.failure_reports import ANSWER_SECONDS, FailureReports
from longspan.comm.watch import Operation, Watch, one_line
from longspan.launch.orphans import launcher_is_gone

SILENT_SECONDS = 60.0  # without an answer, after which this rank asks the store no more
LATE_SECONDS = 5.0  # after its limit, a collective on the host has ended with an error
LEFT_SECONDS = 30.0  # once a rank has left with an error, a collective of the others may last this long


class AnsweringThread:
    """Answers for the rank of a watch from `start` to `stop`; in a world of one process the thread does not start."""

    def __init__(self, watch: Watch) -> None:
        """Prepare the thread of this watch, which `start` starts."""
        self.watch = watch
        self._late: Operation | None = None  # the collective that was late when this thread last looked
        self._left_since: float | None = None  # when this rank first saw that another has left with an error
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._answer_until_stopped, name="longspan failure reports", daemon=True)

    def start(self) -> None:
        """Begin to answer."""
        if self.watch.reports is not None:
            self._thread.start()

    def stop(self) -> None:
        """Stop answering."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(ANSWER_SECONDS)

    def _answer_until_stopped(self) -> None:
        """Answer requests for reports until `stop`, and end the process if its main thread is stuck."""
        # Many ranks share one store: a thousand ranks ask it a thousand times a second, not more.
        interval = min(2.0, max(0.2, len(self.watch.ranks) / 1000))
        reports, silent_since = self.watch.reports, math.inf
        while not self._stop.wait(interval):
            self._end_with_stuck_device()
            self._end_with_stuck_host()
            if reports is None or launcher_is_gone():  # there is no store to ask any more
                continue
            try:
                if silent_since < math.inf:  # the last question failed
                    reports.connect_again()
                if reports.has_news():
                    self._end_waiting_for_lost_rank(reports)
                    if number := reports.open_request():
                        reports.post_answer(number, self.watch.activity())
                        self.watch.write_traces()
                silent_since = math.inf
            except RuntimeError as error:
                silent_since = min(silent_since, time.monotonic())
                if time.monotonic() - silent_since >= SILENT_SECONDS:
                    reports = None
                    self._report_silent_store(error)

    def _report_silent_store(self, error: RuntimeError) -> None:
        """Write to standard error that the store does not answer, and what this rank no longer learns."""
        _write_line(
            f"rank {self.watch.rank} answers for no more failure reports and does not learn of ranks that leave with "
            f"an error: the store has not answered for {SILENT_SECONDS:g} s; a collective still ends after "
            f"{self.watch.timeout:g} s, so check the process that serves the store ({one_line(error)})"
        )

    def _end_with_stuck_device(self) -> None:
        """Say which collective a GPU does not get past in time, and end this process, whose main thread may be stuck.

        NCCL's own watchdog ends it too, but only after a minute or more of dumping (torch 2.11).
        """
        watch, last_collective = self.watch, self.watch.last
        if last_collective is None:
            return
        operation, has_passed = last_collective
        if time.monotonic() - operation.started < operation.limit:
            return
        if has_passed():  # forgotten, unless the main thread has noted another meanwhile
            watch.last = None if watch.last is last_collective else watch.last
            return
        self._end_process(operation, f"timed out: the GPU of rank {watch.rank} has not got past it")

    def _end_with_stuck_host(self) -> None:
        """Say which collective the main thread is stuck in, and end this process.

        gloo connects two ranks at their first message, in the thread that sends it. Where the other rank is gone, it
        tries for five times the limit that their group was made with (torch 2.13). An operation that `is_work` has no
        limit, and one that failed is already being reported. The process ends at the second look that finds the same
        collective late.
        """
        operation, late = self.watch.current, self._late
        if operation is not None and (operation.is_work or operation is self.watch.failed):
            operation = None
        if operation is not None and time.monotonic() - operation.started < operation.limit + LATE_SECONDS:
            operation = None
        self._late = operation
        if operation is not None and operation is late:  # a process that stood still has had time to go on
            self._end_process(
                operation,
                f"timed out: rank {self.watch.rank} does not get past it, as at a first message to a rank that is gone",
            )

    def _end_waiting_for_lost_rank(self, reports: FailureReports) -> None:
        """End this process where it waits in a collective for a rank that has left with an error.

        Where connections break, the main thread has raised by then. With NCCL, or where the rank that left lives on and
        keeps its connections, nothing would happen before the time-out.
        """
        if self._left_since is None:
            self._left_since = time.monotonic() if reports.has_departures() else None
        elif time.monotonic() - self._left_since > LEFT_SECONDS:
            operation = self.watch.current or self.watch.named or self.watch.collective_on_device()
            if operation is not None:
                self._end_process(operation, f"a rank left {LEFT_SECONDS:g} s ago or more, and others wait for it")

    def _end_process(self, operation: Operation, why: str) -> None:
        """Say which collective failed and why, post it for the other ranks, and abort this process."""
        failure = self.watch.failure(operation, RuntimeError(why))
        _write_line(str(failure))
        self.watch.leave(failure)
        os.kill(os.getpid(), signal.SIGABRT)


def _write_line(text: str) -> None:
    print(f"longspan: {text}", file=sys.stderr, flush=True)
