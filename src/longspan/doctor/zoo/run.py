"""Runs the checks of the zoo over two fresh local processes on the CPU; an error of a check becomes its result.

>>> all(result.good for result in run_zoo())
True
"""

import json
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

from longspan.comm import World
from longspan.doctor.zoo import KNOWN_ERRORS
from longspan.doctor.zoo.known_error import LIMIT, RANKS, KnownError
from longspan.launch.launch import run_local

SECONDS_PER_CHECK = 30.0


@dataclass(frozen=True)
class ZooResult:
    """What a check returned: the worst relative error of all ranks (None: it raised, as `message` says)."""

    known: KnownError
    error: float | None
    seconds: float
    message: str = ""

    @property
    def good(self) -> bool:
        """Whether the silent error does not happen here."""
        return self.error is not None and self.error <= LIMIT


def run_zoo(
    numbers: Sequence[int] | None = None, *, timeout: float = 30.0, show: Callable[[ZooResult], None] | None = None
) -> list[ZooResult]:
    """Run the checks of these numbers of KNOWN_ERRORS (None: all), in their order.

    `timeout` is how long a rank waits for the other, in seconds; `show` gets the results when their processes have
    ended. The first check without a result is the one that ended the processes: its result has no `error` but their
    message, and the checks after it run in new processes.
    """
    pending = list(range(len(KNOWN_ERRORS)) if numbers is None else numbers)
    results = list[ZooResult]()
    with tempfile.TemporaryDirectory(prefix="longspan-zoo-") as folder:
        record = Path(folder) / "results.jsonl"
        while pending:
            record.unlink(missing_ok=True)
            failure: Exception | None = None
            try:
                run_local(
                    _run_checks, RANKS, (pending, str(record), timeout), timeout=SECONDS_PER_CHECK * len(pending) + 30
                )
            except Exception as error:  # of a check, or of a rank that ended
                failure = error
            finished = _read_results(record)
            pending = pending[len(finished) :]
            if pending:
                text = f"{type(failure).__name__}: {failure}" if failure else "a rank ended without a result"
                finished.append(ZooResult(KNOWN_ERRORS[pending.pop(0)], None, 0.0, text))
            results += finished
            if show is not None:
                for result in finished:
                    show(result)
    return results


def measure_error(known: KnownError, world: World) -> float:
    """Return the worst relative error that a check finds on any rank; infinite for one that is no number."""
    errors = world.control.gather_objects(known.check(world), "errors of a check")
    return max(error if error == error else float("inf") for error in errors)


def _run_checks(rank: int, numbers: Sequence[int], record: str, timeout: float) -> None:
    """Run checks on this rank, in a world for each run of checks with one home; rank 0 writes their errors down.

    `record` is the file, which gets a line as soon as a check has ended.
    """
    for home, group in groupby(numbers, key=lambda number: KNOWN_ERRORS[number].home):
        with World(home, backend="gloo", timeout=timeout) as world:
            for number in group:
                began = time.perf_counter()
                row = {"number": number, "error": measure_error(KNOWN_ERRORS[number], world)}
                if rank == 0:
                    with Path(record).open("a", encoding="utf-8") as file:
                        file.write(json.dumps({**row, "seconds": time.perf_counter() - began}) + "\n")


def _read_results(record: Path) -> list[ZooResult]:
    """Read the results that the first rank wrote, in the order of the checks; none without a file."""
    lines = record.read_text(encoding="utf-8").splitlines() if record.exists() else []
    rows = [json.loads(line) for line in lines]
    return [ZooResult(KNOWN_ERRORS[row["number"]], row["error"], row["seconds"]) for row in rows]
