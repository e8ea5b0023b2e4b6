"""The last collective of this process by torch's flight recorder, in words for failure reports."""

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import torch

_c10d: Any = torch._C._distributed_c10d  # pyright: ignore[reportAttributeAccessIssue]
RECORDER_SECONDS = 2.0  # in which a recorder answers; next to a device that is stuck it may never


def last_collective_text() -> str:
    """Return the first collective that NCCL has not completed, else the last that was started; "" for none.

    torch's flight recorder keeps the last 2,000 of each process (TORCH_FR_BUFFER_SIZE, 0 turns it off; torch 2.11 to
    2.15 have it on). Nothing is raised here: a report without this is a report still. Behind a stuck device a recorder
    may never answer, and then only a thread of its own waits for it.

    >>> last_collective_text()
    'gloo:all_reduce number 4 of the group "control", [8] Float'
    """
    results = list[str]()

    def read() -> None:
        with suppress(Exception):
            results.append(_read_last_collective_text())

    thread = threading.Thread(target=read, name="longspan recorder", daemon=True)
    thread.start()
    thread.join(RECORDER_SECONDS)
    return results[0] if results else ""


def _read_last_collective_text() -> str:
    """As `last_collective_text`, but waits for the recorders however long they take."""
    nccl = _entries("_dump_nccl_trace_json")
    unfinished = next((entry for entry in nccl if entry["state"] != "completed"), None)
    if unfinished is not None:
        return f"{_collective_text(unfinished)}, {unfinished['state']}"
    entries = sorted(
        [*nccl[-1:], *_entries("_dump_fr_trace_json")[-1:]], key=lambda entry: entry["time_created_ns"]
    )
    return _collective_text(entries[-1]) if entries else ""


def _entries(function: str) -> list[dict[str, Any]]:
    """Return what one of torch's recorders holds, the oldest first; nothing where this torch has no such recorder."""
    dump: Callable[[], bytes] | None = getattr(_c10d, function, None)
    return [] if dump is None else json.loads(dump()).get("entries", [])


def _collective_text(entry: dict[str, Any]) -> str:
    """Return a recorded collective in words: backend, kind, its number in its group, and sizes."""
    number = entry["p2p_seq_id"] if entry["is_p2p"] else entry["collective_seq_id"]
    sizes = ", ".join(
        f"{size} {kind}" for size, kind in zip(entry["input_sizes"], entry["input_dtypes"], strict=False)
    )
    return f'{entry["profiling_name"]} number {number} of the group "{entry["process_group"][1]}"' + (
        f", {sizes}" if sizes else ""
    )
