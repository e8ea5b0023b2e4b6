"""What torch has recorded of this rank's collectives, for failure reports.

torch's flight recorder keeps the last 2,000 collectives of each process (TORCH_FR_BUFFER_SIZE, 0 turns it off; torch
2.11 to 2.15 have it on). Nothing here raises: a report without these lines is a report still.
"""

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

_c10d: Any = torch._C._distributed_c10d  # pyright: ignore[reportAttributeAccessIssue]

PREFIXES = {"_dump_nccl_trace": "nccl_trace_rank_", "_dump_fr_trace": "gloo_trace_rank_"}  # of files, by function
PATIENCE = 2.0  # seconds in which a recorder answers, next to a device that is stuck


def last_collective() -> str:
    """Return the first collective that NCCL has not completed, else the last that was started; "" for none.

    >>> last_collective()
    'gloo:all_reduce number 4 of the group "control", [8] Float'
    """
    return _call_with_patience(_read_last_collective) or ""


def write_traces(folder: Path, rank: int) -> None:
    """Write what the recorder holds, with Python's stacks, as files that `torchfrtrace --prefix …` reads."""
    _call_with_patience(lambda: _write_trace_files(folder, rank))


def _read_last_collective() -> str:
    """Read the first collective that NCCL has not completed, else the last one of any backend, as text."""
    nccl = _entries("_dump_nccl_trace_json")
    unfinished = next((entry for entry in nccl if entry["state"] != "completed"), None)
    if unfinished is not None:
        return f"{_entry_text(unfinished)}, {unfinished['state']}"
    entries = sorted([*nccl[-1:], *_entries("_dump_fr_trace_json")[-1:]], key=lambda entry: entry["time_created_ns"])
    return _entry_text(entries[-1]) if entries else ""


def _entries(function: str) -> list[dict[str, Any]]:
    """Return the recorded collectives, the oldest first; none where this torch has no such recorder."""
    dump: Callable[[], bytes] | None = getattr(_c10d, function, None)
    return [] if dump is None else json.loads(dump()).get("entries", [])


def _entry_text(entry: dict[str, Any]) -> str:
    """Return one recorded collective in words: its name, number, group and the sizes of its inputs."""
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    sizes = ", ".join(f"{size} {kind}" for size, kind in zip(entry["input_sizes"], entry["input_dtypes"], strict=False))
    return f'{entry["profiling_name"]} number {number} of the group "{entry["process_group"][1]}"' + (
        f", {sizes}" if sizes else ""
    )


def _write_trace_files(folder: Path, rank: int) -> None:
    """Write what torch and NCCL recorded of this rank's collectives into a folder, one file for each recorder."""
    folder.mkdir(parents=True, exist_ok=True)
    for function, prefix in PREFIXES.items():
        dump: Callable[[], bytes] | None = getattr(_c10d, function, None)
        if dump is not None and _entries(f"{function}_json"):
            (folder / f"{prefix}{rank}").write_bytes(dump())


def _call_with_patience(work: Callable[[], str | None]) -> str | None:
    """Behind a stuck device `work` may never return, and then only a thread of its own waits for it."""
    results = list[str | None]()

    def run() -> None:
        with suppress(Exception):
            results.append(work())

    thread = threading.Thread(target=run, name="longspan recorder", daemon=True)
    thread.start()
    thread.join(PATIENCE)
    return results[0] if results else None
