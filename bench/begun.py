"""What the benches of this folder share: records that they begin or go on with, seconds and bytes of a GPU."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

from longspan.bench.benches import origin_text, write_record
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
    """The row of a peer that failed with this error: its type and first line, in place of figures."""
    lines = str(error).strip().splitlines() or [""]
    return {"missing": f"{type(error).__name__}: {lines[0][:160]}"}


def write_page(record: dict[str, Any], out: Path | None, title: str, text: str) -> None:
    """Print a text with its origin, and write the record to `out` and the page beside it where that is given."""
    text += f"\n\n{origin_text(record)} Load of the machine {os.getloadavg()[0]:.1f}."
    if out is not None:
        write_record(record, out, f"# {title}\n\n{text}\n")
    print(text)


def seconds_now() -> float:
    """Seconds, once a GPU has done what it was given."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def start_peak() -> None:
    if torch.cuda.is_available():
        torch.cuda.reset_peak_memory_stats()


def peak_bytes() -> int:
    """The most that a GPU gave out since `start_peak`; 0 without one."""
    return torch.cuda.max_memory_allocated() if torch.cuda.is_available() else 0
