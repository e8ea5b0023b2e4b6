"""The record of a bench on disk, while it runs and when it is done."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from longspan.cli.machine import machine, machine_text
from longspan.errors import ConfigError
from longspan.train.versions import versions


def write_record(record: dict[str, Any], path: Path, markdown: str) -> None:
    """Write a record as JSON, and what it says in Markdown beside it. Raises ConfigError where that cannot be."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        path.with_suffix(".md").write_text(markdown, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def keep_so_far(record: dict[str, Any], out: str) -> None:
    """A bench that is interrupted has its finished rows on disk; "": nowhere."""
    if out:
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        Path(out).write_text(json.dumps(record, indent=1), encoding="utf-8")


def begin_or_go_on(bench: str, out: Path | None, backend: str, source: Path) -> dict[str, Any]:
    """The record at `out` where it is of the same commit of `source` and the same backend, otherwise a new one."""
    words = ["git", "rev-parse", "--short", "HEAD"]
    commit = subprocess.run(words, cwd=source, capture_output=True, text=True, check=False).stdout.strip()
    if out is not None and out.exists():
        before = json.loads(out.read_text(encoding="utf-8"))
        if before["commit"] == commit and before["backend"] == backend:
            return before
    command = " ".join(["python", *sys.argv])
    about = {"machine": machine(), "versions": versions(), "commit": commit, "command": command, "backend": backend}
    return {"bench": bench, **about}


def where_it_ran(record: dict[str, Any]) -> str:
    """Machine, versions and command of a record, for people, and its commit where it is known."""
    found = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    commit = f" Commit {record['commit']}." if "commit" in record else ""
    return f"Machine: {machine_text(record['machine'])}. Versions: {found}.{commit} Command: `{record['command']}`."


def said_of(error: Exception) -> dict[str, str]:
    """A row of a record in place of figures: why a peer did not run."""
    lines = str(error).strip().splitlines() or [""]
    return {"missing": f"{type(error).__name__}: {lines[0][:160]}"}
