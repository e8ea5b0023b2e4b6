"""Records that benches of this folder begin or go on with, and rows of peers that failed."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from longspan.cli.machine import machine_facts
from longspan.errors import ConfigError
from longspan.versions import versions


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
    origin = {"machine": machine_facts(), "versions": versions(), "commit": commit}
    return {"bench": bench, **origin, "command": " ".join(["python", *sys.argv]), "backend": backend, **about}


def missing_row(error: Exception) -> dict[str, str]:
    """Return the row of a peer that failed with this error: its type and first line, in place of figures."""
    lines = str(error).strip().splitlines() or [""]
    return {"missing": f"{type(error).__name__}: {lines[0][:160]}"}
