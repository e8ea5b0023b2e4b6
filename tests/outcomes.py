"""Outcomes of tests in a file as they come, from which a run that was ended goes on, and their record.

python -m pytest --resume runs/tests.jsonl ...
python -m tests.outcomes runs/tests.jsonl "Tests over NCCL" "make test-gpu on 4 x H200" > record.md
python -m tests.outcomes runs/tests.jsonl "All tests" "make test-all on 64 cores" --slowest 20 > record.md
"""

import argparse
import hashlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import pytest

from tests.over_nccl import part_of

_ROOT = Path(__file__).parent
LONGEST_REASON = 300  # characters
LONGEST_TEXT = 1500  # of a failure, from its end
Rows = Sequence[dict[str, Any]]


class Resumed:
    """Writes every outcome to a file as it comes, and leaves out what passed there from the same sources."""

    def __init__(self, path: Path) -> None:
        self.path, self.sources = path, _digest()
        path.parent.mkdir(parents=True, exist_ok=True)
        rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
        self.done = {row["test"] for row in rows if row["sources"] == self.sources and row["outcome"] != "failed"}

    def pytest_collection_modifyitems(self, config: pytest.Config, items: list[pytest.Item]) -> None:
        """Leave out what is done, and take the rest part by part."""
        config.hook.pytest_deselected(items=[item for item in items if item.nodeid in self.done])
        items[:] = [item for item in items if item.nodeid not in self.done]
        if config.getoption("--backend") == "nccl":
            items.sort(key=part_of)

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_setup(self, item: pytest.Item) -> None:
        self.cpu_before = _cpu_seconds()

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: pytest.CallInfo[None]) -> None:
        if call.when == "call":
            item.user_properties.append(("cpu_seconds", round(_cpu_seconds() - self.cpu_before, 3)))

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """One line for each test: its call, or what kept it from being called; of a failure, the last lines too.

        Processes of pytest-xdist report to the first one, which writes.
        """
        if "PYTEST_XDIST_WORKER" in os.environ or (report.when != "call" and report.outcome == "passed"):
            return
        row = {
            "test": report.nodeid,
            "outcome": report.outcome,
            "seconds": round(report.duration, 3),
            **dict(report.user_properties),
            "sources": self.sources,
        }
        if report.outcome != "passed":
            row["why"] = _reason(report)
        if report.outcome == "failed":
            row["text"] = report.longreprtext[-LONGEST_TEXT:]
        with self.path.open("a") as file:
            file.write(json.dumps(row) + "\n")


def _cpu_seconds() -> float:
    """Of this process, of those that it waited for, and of the ranks that its fork server started."""
    own = sum(os.times()[:4])
    server: Any = forkserver._forkserver
    if not (server._forkserver_pid and Path("/proc").is_dir()):
        return own
    fields = Path(f"/proc/{server._forkserver_pid}/stat").read_text().rpartition(")")[2].split()
    return own + sum(map(int, fields[11:15])) / os.sysconf("SC_CLK_TCK")  # user and system, its own and its children's


def _reason(report: pytest.TestReport) -> str:
    if isinstance(report.longrepr, tuple):
        return report.longrepr[2]
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr)[:LONGEST_REASON]


def _digest() -> str:
    """Of the package's and the tests' sources: what passed with others counts for nothing."""
    sources = hashlib.sha256()
    for path in sorted([*_ROOT.rglob("*.py"), *(_ROOT.parent / "src").rglob("*.py")]):
        sources.update(path.relative_to(_ROOT.parent).as_posix().encode() + b"\0" + path.read_bytes())
    return sources.hexdigest()[:12]


def record(rows: Rows, title: str, run: str, slowest: int = 0) -> str:
    """The outcomes as Markdown: counts and seconds by folder, what failed, why tests were skipped, and the slowest.

    Without `slowest` every test is named with its outcome.
    """
    last = list({row["test"]: row for row in rows}.values())  # a test that failed may have passed later
    lines = [f"# {title}", "", f"{run}; sources {', '.join(sorted({row['sources'] for row in last}))}.", ""]
    lines += _by_folder(last)
    if not slowest:
        return "\n".join([*lines, "", "| test | outcome | seconds |", "|---|---|---|", *map(_line, last)])
    failed = [row for row in last if row["outcome"] == "failed"]
    lines += ["", "Failed:", "", *(f"- `{_name(row)}`{_because(row)}" for row in failed)] if failed else []
    skipped = Counter(_because(row) for row in last if row["outcome"] == "skipped")
    lines += ["", "Skipped:", "", *(f"- {count}{why}" for why, count in skipped.most_common())] if skipped else []
    longest = sorted(last, key=lambda row: -row["seconds"])[:slowest]
    lines += ["", f"The slowest {slowest}:", "", "| test | outcome | seconds |", "|---|---|---|"]
    return "\n".join([*lines, *map(_line, longest)])


def _by_folder(rows: Iterable[dict[str, Any]]) -> Iterator[str]:
    by_folder = defaultdict[str, list[dict[str, Any]]](list)
    for row in rows:
        by_folder[row["test"].split("/")[1].partition("::")[0]].append(row)
        by_folder["all"].append(row)
    yield from ("| folder | passed | skipped | failed | seconds |", "|---|---|---|---|---|")
    for folder, tests in sorted(by_folder.items(), key=lambda pair: (pair[0] == "all", pair[0])):
        counts = Counter(row["outcome"] for row in tests)
        seconds = sum(row["seconds"] for row in tests)
        yield f"| {folder} | {counts['passed']} | {counts['skipped']} | {counts['failed']} | {seconds:,.0f} |"


def _line(row: dict[str, Any]) -> str:
    name = _name(row).replace("|", "\\|")
    return f"| `{name}` | {row['outcome']}{_because(row)} | {row['seconds']:.1f} |"


def _name(row: dict[str, Any]) -> str:
    return row["test"].removeprefix("tests/")


def _because(row: dict[str, Any]) -> str:
    why = row.get("why", "").removeprefix("Skipped: ")
    return f": {' '.join(why.split())}" if why else ""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("title")
    parser.add_argument("run", help="command and machine")
    parser.add_argument("--slowest", type=int, default=0, help="name so many of the slowest tests alone; 0: all tests")
    flags = parser.parse_args()
    outcomes = [json.loads(line) for line in flags.file.read_text().splitlines()]
    print(record(outcomes, flags.title, flags.run, flags.slowest))
