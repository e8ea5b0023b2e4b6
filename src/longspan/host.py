"""What this process may use of its host: cores, and free memory that arenas, models and plans of memory may take.

A container's control group may leave less than Linux has. How the ranks of a host share it is not decided here.
"""

import os
import re
from contextlib import suppress
from pathlib import Path

# /proc and /sys are below this folder.
_ROOT = Path("/")


def usable_cores() -> int:
    """Return on how many cores this process may run."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def free_host_bytes(*, swap: bool = False) -> int | None:
    """Return the bytes of the host's memory that this process may still take; None where they are not known.

    It is the least of what Linux and the process's control groups leave. With `swap`, free swap of the host counts too.
    """
    figures = list[int]()
    with suppress(OSError, ValueError):
        text = (_ROOT / "proc/meminfo").read_text(encoding="utf-8")
        sizes = dict(re.findall(r"^(\w+): +(\d+) kB$", text, flags=re.MULTILINE))
        names = ("MemAvailable", "SwapFree") if swap else ("MemAvailable",)
        if "MemAvailable" in sizes:
            figures.append(1024 * sum(int(sizes.get(name, 0)) for name in names))
    # What is left in each control group of memory, of version 2 and of version 1, that has a limit. File pages that
    # were not used lately count as used there, but Linux takes them back when memory is short.
    groups = _ROOT / "sys/fs/cgroup"
    for base, limit, used, files in (
        (groups, "memory.max", "memory.current", "inactive_file"),
        (groups / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        with suppress(OSError, ValueError):  # no such group, or "max"
            limit_bytes = int((base / limit).read_text())
            used_bytes = int((base / used).read_text())
            statistics = dict(line.split() for line in (base / "memory.stat").read_text().splitlines())
            figures.append(limit_bytes - used_bytes + int(statistics.get(files, 0)))
    return max(0, min(figures)) if figures else None
