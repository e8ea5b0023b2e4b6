"""The section of a run's page that shows profiled steps: seconds by part, and the longest kernels of each.

They come from RUN/profiles, which `train.profile_steps` fills (`run/profile.py`); traces are not read here.
"""

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from longspan.report.markup import scrolling_table, section, tag, text
from longspan.run.profile import FOLDER, KERNEL_TITLES, PARTS, PARTS_FILE, TITLES, kernel_rows, part_cells

SHOWN = 8  # profiled steps, the last ones


def profile_section(run_dir: Path) -> str:
    """Return the section, whose note names files that cannot be read; "" for a run without profiled steps."""
    notes = list[str]()
    rows = list(_profile_rows(run_dir / FOLDER, notes))
    if not rows and not notes:
        return ""
    parts = scrolling_table(TITLES, [(folder, *part_cells(row)) for folder, row in rows])
    kernels = (
        tag(
            "details",
            tag("summary", f"Longest kernels of {text(folder)}"),
            scrolling_table(KERNEL_TITLES, kernel_rows(row)),
        )
        for folder, row in rows
    )
    note = (
        f"Milliseconds on the first rank, under the profiler, which makes a step longer. {FOLDER}/ has a trace of each "
        "rank, for Perfetto or chrome://tracing."
    )
    note = ". ".join([note.removesuffix("."), *notes]) + "."
    return section("Profiled steps", tag("p", text(note), class_="note"), parts, *kernels)


def _profile_rows(folder: Path, notes: list[str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the folder's name and the figures of the last SHOWN profiled steps, in order; note damaged files."""
    for file in sorted(folder.glob(f"step-*/{PARTS_FILE}"))[-SHOWN:]:
        try:
            row = json.loads(file.read_text(encoding="utf-8", errors="replace"))
            if not _is_profile(row):
                raise ValueError
        except (OSError, ValueError, RecursionError):
            notes.append(f"{FOLDER}/{file.parent.name}/{PARTS_FILE} could not be read")
        else:
            yield file.parent.name, row


def _is_profile(row: Any) -> bool:
    if not isinstance(row, Mapping) or not isinstance(row.get("parts"), Mapping):
        return False
    kernels = row.get("kernels")
    return (
        all(isinstance(row["parts"].get(part_name), int | float) for part_name in PARTS)
        and isinstance(kernels, list)
        and all(_is_kernel(kernel) for kernel in kernels)
    )


def _is_kernel(kernel: Any) -> bool:
    return (
        isinstance(kernel, Mapping)
        and all(isinstance(kernel.get(name), str) for name in ("name", "part"))
        and isinstance(kernel.get("calls"), int)
        and isinstance(kernel.get("seconds"), int | float)
    )
