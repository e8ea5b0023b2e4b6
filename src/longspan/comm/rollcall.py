"""What a rank is doing, and what the ranks tell each other when a collective fails.

Every rank notes the collective that it is in. When one fails, the first rank to notice asks the others through the
store; a thread on each rank answers, also while its main thread is stuck. The outcome names the ranks that no longer
answer and quotes those that left with an error. Nothing here moves data.
"""

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from types import TracebackType
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import Store, Work

from longspan.comm.child import DEAD_KEY
from longspan.errors import CommError, LongspanError

CALL_SECONDS = 5.0  # a roll call waits this long for answers
NAMED = 8  # ranks named one by one in a message


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
        if isinstance(error, RuntimeError) and not isinstance(error, LongspanError):
            raise self.watch.failed(self, error) from error
        self.watch.finished, self.watch.current = self.what, self.outer

    def __str__(self) -> str:
        return f"'{self.what}' of step {self.watch.step} between ranks {short(self.ranks)}"


class Watch:
    """What this rank is doing, and its side of a roll call.

    `store` is this world's own corner of the store that all ranks share, or None (a single process), `root` the whole
    of it, where a launcher writes which ranks died. `gpu`: collectives run on a GPU, where a stuck one raises nothing
    in the host: there the answering thread writes the error to stderr and ends the process.
    """

    def __init__(
        self,
        rank: int,
        ranks: Sequence[int],
        timeout: float,
        store: Store | None,
        root: Store | None,
        *,
        gpu: bool = False,
    ) -> None:
        self.rank, self.ranks, self.timeout = rank, tuple(ranks), timeout
        self.step = 0
        self.current: Operation | None = None
        self.finished = "nothing yet"
        self._store, self._root = store, root
        self._passed = torch.cuda.Event() if gpu else None
        # The last collective that was waited for, and how to ask whether the device is past it.
        self._last: tuple[Operation, Callable[[], bool]] | None = None
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
        operation.started = time.monotonic()
        try:
            yield
        except RuntimeError as error:
            if of_backend(error):
                raise self.failed(operation, error) from error
            raise

    def queued(self, operation: Operation, works: Sequence[Work]) -> None:
        """Note that the device's stream is now ordered behind these works of a collective, which may still run."""
        if self._passed is not None:
            self._last = operation, lambda: all(work.is_completed() for work in works)

    def mark(self, operation: Operation) -> None:
        """The same for a collective without works at hand: the device is past it when the stream is past this point."""
        if self._passed is not None and not torch.cuda.is_current_stream_capturing():
            self._passed.record()
            self._last = operation, self._passed.query

    def open(self) -> None:
        """Start the thread that answers roll calls."""
        if self._store is not None:
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
        note = {"rank": self.rank, "error": _one_line(error), "echo": bool(getattr(error, "seen_from_outside", False))}
        if self._store is not None:
            with suppress(RuntimeError):  # the store is gone: the others will find out by themselves
                _append(self._store, "left", note)

    def failed(self, operation: Operation, error: BaseException) -> CommError:
        """The error to raise for a collective that failed here, after a roll call."""
        seconds = time.monotonic() - operation.started
        how = "timed out" if "timed out" in str(error).lower() else "failed"
        failure = CommError(
            f"{operation} {how} on rank {self.rank} after {seconds:.1f} s (limit {self.timeout:g} s). "
            f"Roll call: {self._roll_call()}. The backend said: {_one_line(error)}"
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
        store = self._store
        assert store is not None
        # Many ranks share one store: a thousand ranks ask it a thousand times a second, not more.
        interval = min(2.0, max(0.2, len(self.ranks) / 1000))
        try:
            while not self._stop.wait(interval):
                self._report_stuck_device()
                if store.check(["incident"]):
                    _append(store, "answers", {"rank": self.rank, "doing": self.describe()})
                    return
        except RuntimeError:
            return  # the store is gone

    def _report_stuck_device(self) -> None:
        """Say which collective a GPU does not get past in time, and end this process, whose main thread may be stuck.

        NCCL's own watchdog ends it too, but only after a minute or more of dumping (torch 2.11).
        """
        last = self._last
        if last is None or time.monotonic() - last[0].started < self.timeout:
            return
        operation, done = last
        if done():
            self._last = None if self._last is last else self._last
            return
        failure = self.failed(operation, RuntimeError(f"timed out: the GPU of rank {self.rank} has not got past it"))
        print(f"longspan: {failure}", file=sys.stderr, flush=True)
        self.leave(failure)
        os.kill(os.getpid(), signal.SIGABRT)

    def _roll_call(self) -> str:
        """Who answers: asked by the first rank that notices, read by the others."""
        store = self._store
        if store is None:
            return "this process has no store to ask through"
        me = str(self.rank)
        try:
            _append(store, "answers", {"rank": self.rank, "doing": self.describe()})
            if store.compare_set("incident", "", me) == me.encode():
                outcome = self._collect(store)
                store.set("outcome", outcome)
                return outcome
            return _read(store, "outcome", CALL_SECONDS + 2) or "another rank asked, and did not tell the outcome"
        except RuntimeError:
            return "the store does not answer, so the rank or launcher that served it is gone"

    def _collect(self, store: Store) -> str:
        deadline = time.monotonic() + CALL_SECONDS
        while True:
            answers = {note["rank"]: note["doing"] for note in _notes(store, "answers")}
            left = {note["rank"]: note for note in _notes(store, "left")}
            missing = [rank for rank in self.ranks if rank not in answers and rank not in left]
            dead = self._deaths(missing)
            if len(dead) == len(missing) or time.monotonic() > deadline:
                return _outcome(answers, left, missing, dead)
            time.sleep(0.05)

    def _deaths(self, missing: Sequence[int]) -> dict[int, str]:
        """How missing ranks died, where a launcher has told."""
        root = self._root
        if root is None:
            return {}
        told = [rank for rank in missing[:64] if root.check([f"{DEAD_KEY}{rank}"])]
        return {rank: root.get(f"{DEAD_KEY}{rank}").decode() for rank in told}


def of_backend(error: BaseException) -> bool:
    """Whether a collective's backend raised this error, of which gloo's are plain RuntimeErrors."""
    known = isinstance(error, dist.DistError) or "gloo" in str(error)
    return isinstance(error, RuntimeError) and not isinstance(error, LongspanError) and known


def short(ranks: Sequence[int]) -> str:
    """A few of the ranks, and how many there are."""
    head = ", ".join(str(rank) for rank in ranks[:NAMED])
    return f"({head}, … {len(ranks)} in all)" if len(ranks) > NAMED else f"({head})"


def _outcome(answers: dict[int, str], left: dict[int, Any], missing: list[int], dead: dict[int, str]) -> str:
    first = [note for note in left.values() if not note["echo"]]
    lines = [f"rank {note['rank']} left with {note['error']}" for note in first[:NAMED]]
    lines += [f"rank {rank} does not answer: it {dead[rank]}" for rank in list(dead)[:NAMED]]
    silent = [rank for rank in missing if rank not in dead]
    if silent:
        lines.append(f"rank(s) {short(silent)} do not answer: killed, cut off or stopped")
    answering = [rank for rank in sorted(answers) if rank not in left]
    lines += [f"rank {rank} is {answers[rank]}" for rank in answering[:NAMED]]
    if len(answering) > NAMED:
        lines.append(f"{len(answering) - NAMED} more ranks answer")
    return "; ".join(lines)


def _notes(store: Store, key: str) -> list[dict[str, Any]]:
    if not store.check([key]):
        return []
    return [json.loads(line) for line in store.get(key).decode().splitlines()]


def _append(store: Store, key: str, note: dict[str, Any]) -> None:
    store.append(key, json.dumps(note) + "\n")  # pyright: ignore[reportAttributeAccessIssue]


def _read(store: Store, key: str, seconds: float) -> str | None:
    """A key once it is there. Asks again and again: a blocking read would keep the answering thread waiting too."""
    deadline = time.monotonic() + seconds
    while not store.check([key]):
        if time.monotonic() > deadline:
            return None
        time.sleep(0.05)
    return store.get(key).decode()


def _one_line(error: BaseException) -> str:
    text = " ".join(str(error).split()).partition(" This is typically caused by")[0]
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
