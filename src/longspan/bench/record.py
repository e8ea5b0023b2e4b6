"""The record of a bench: on disk while the bench runs, on disk and on the terminal when it is done."""

import json
from pathlib import Path
from typing import Any

from longspan.bench.benches import BenchFlags
from longspan.cli.flags import write_text
from longspan.cli.machine import machine_text
from longspan.cli.processes import is_reporting


def show_record(record: dict[str, Any], flags: BenchFlags, *, text: str, markdown: str) -> None:
    """Print a finished record, as JSON with --json, and write it to the file of --out; on the reporting rank only."""
    if not is_reporting():
        return
    if flags.out:
        write_record(record, Path(flags.out), markdown)
    print(json.dumps(record, indent=1) if flags.json else text)


def write_record(record: dict[str, Any], path: Path, markdown: str) -> None:
    """Write a record as JSON, and as Markdown next to it. Raises ConfigError if they cannot be written."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, json.dumps(record, indent=1) + "\n")
    write_text(path.with_suffix(".md"), markdown)


def write_unfinished(record: dict[str, Any], out: str) -> None:
    """Write what has been measured so far, for a bench that may be interrupted; with out "" nothing is written."""
    if out:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        write_text(out, json.dumps(record, indent=1))


def origin_text(record: dict[str, Any]) -> str:
    """Write machine, versions, command and, if known, commit of a record."""
    packages = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    commit = f" Commit {record['commit']}." if "commit" in record else ""
    return f"Machine: {machine_text(record['machine'])}. Versions: {packages}.{commit} Command: `{record['command']}`."
