"""`longspan doctor --zoo`: runs the checks of silent errors of other systems, and prints a table or JSON."""

import json
import sys
import time
from collections.abc import Sequence
from typing import Any

from longspan.doctor.zoo.run import ZooResult, run_zoo
from longspan.errors import plural
from longspan.plain_text import text_table


def check_zoo(*, as_json: bool, timeout: float) -> int:
    """Run every check and print what was found. Returns 0 if all pass, otherwise 1."""
    began = time.perf_counter()
    if sys.stderr.isatty():
        print("running a check for each silent error on 2 processes (gloo) …", file=sys.stderr)
    results = run_zoo(timeout=timeout)
    seconds = time.perf_counter() - began
    if as_json:
        cases = [zoo_row(result) for result in results]
        good = all(result.good for result in results)
        print(json.dumps({"good": good, "seconds": seconds, "cases": cases}, indent=1, ensure_ascii=False))
    else:
        print(zoo_text(results, seconds))
    return 0 if all(result.good for result in results) else 1


def zoo_row(result: ZooResult) -> dict[str, Any]:
    """Return a result as a JSON object; an infinite error is the text "inf", for JSON has no such number."""
    error = "inf" if result.error == float("inf") else result.error  # None: the check ended without one
    return {
        "name": result.known.name,
        "thread": result.known.thread,
        "link": result.known.link,
        "passed": result.good,
        "error": error,
        "seconds": result.seconds,
        "message": result.message,
    }


def zoo_text(results: Sequence[ZooResult], seconds: float) -> str:
    """Write the results as a table, with a verdict below it and what to do where a check failed."""
    rows = [
        (
            "✓" if result.good else "✗",
            result.known.name,
            result.known.thread,
            _error_text(result),
            f"{result.seconds:.1f}",
        )
        for result in results
    ]
    table = text_table(("", "silent error", "thread", "relative error", "seconds"), rows, left=4)
    failed = [result for result in results if not result.good]
    verdict = f"all {plural(len(results), 'check')} pass: none of these errors happens here"
    if failed:
        verdict = f"{len(failed)} of {plural(len(results), 'check')} failed; please report it, with this table"
    return f"{table}\n\n{verdict} ({seconds:.0f} s)"


def _error_text(result: ZooResult) -> str:
    """Write the relative error of a check, or the beginning of its message where it ended without an error."""
    if result.error is None:
        return " ".join(result.message.split())[:100]
    return "none" if result.error == 0 else f"{result.error:.0e}"
