"""The record of a bench: on disk while the bench runs, on disk and on the terminal when it is done."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from longspan.bench.benches import BenchFlags
from longspan.cli.machine import machine_facts, machine_text
from longspan.cli.processes import is_reporting
from longspan.errors import ConfigError
from longspan.versions import versions


def show_record(record: dict[str, Any], flags: BenchFlags, *, text: str, markdown: str) -> None:
    """Print a finished record, as JSON with --json, and write it to the file of --out; on the reporting rank only."""
    if not is_reporting():
        return
    if flags.out:
        write_record(record, Path(flags.out), markdown)
    print(json.dumps(record, indent=1) if flags.json else text)


def write_record(record: dict[str, Any], path: Path, markdown: str) -> None:
    """Write a record as JSON, and as Markdown next to it. Raises ConfigError if it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text(markdown, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def write_unfinished(record: dict[str, Any], out: str) -> None:
    """Write what has been measured so far, for a bench that may be interrupted; with out "" nothing is written."""
    if out:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        Path(out).write_text(json.dumps(record, indent=1), encoding="utf-8")


def open_record(bench: str, out: Path | None, backend: str, source: Path, **about: Any) -> dict[str, Any]:
    """Open the record at `out` if it has the same commit of `source` and the same backend, otherwise a new one.

    `about` are facts that all figures of a record share, such as ranks. Raises ConfigError if the record at `out` has
    another value of one of them. `source` is a folder of the repository.
    """
    git_command = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(git_command, cwd=source, capture_output=True, text=True, check=False).stdout.strip()
    if out is not None and out.exists():
        recorded = json.loads(out.read_text(encoding="utf-8"))
        if recorded["commit"] == commit and recorded["backend"] == backend:
            for name, value in about.items():
                if recorded.get(name, value) != value:
                    raise ConfigError(
                        f"{out} has figures of {name} {recorded[name]}, asked for {value}: give another --out"
                    )
            return recorded
    command = " ".join(["python", *sys.argv])
    origin = {
        "machine": machine_facts(),
        "versions": versions(),
        "commit": commit,
        "command": command,
        "backend": backend,
    }
    return {"bench": bench, **origin, **about}


def origin_text(record: dict[str, Any]) -> str:
    """Write machine, versions, command and, if known, commit of a record."""
    packages = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    commit = f" Commit {record['commit']}." if "commit" in record else ""
    return f"Machine: {machine_text(record['machine'])}. Versions: {packages}.{commit} Command: `{record['command']}`."


def missing_row(error: Exception) -> dict[str, str]:
    """Return the row of a peer that failed with this error: its type and first line, in place of figures."""
    lines = str(error).strip().splitlines() or [""]
    return {"missing": f"{type(error).__name__}: {lines[0][:160]}"}
