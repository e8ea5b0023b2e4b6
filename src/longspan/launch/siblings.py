"""The other ranks that the torchrun of this process started on this machine, and whether they live.

torchrun tells no rank that another has died, as the local launcher does (`local_ranks.py`). Linux only.
"""

import os
from contextlib import suppress
from pathlib import Path


def processes_of_torchrun() -> dict[int, int]:
    """Return the process id of each rank that this process's torchrun started here; empty under other launchers.

    Ranks that have not started yet are missing, so a caller waits for all ranks first.

    >>> processes_of_torchrun()
    {0: 4711, 1: 4712}
    """
    processes = dict[int, int]()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        torchrun = os.getppid()
        children = list[str]()
        with suppress(OSError):
            children = Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split()
        for pid in children:
            with suppress(OSError):  # it has ended since
                variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                ranks = [int(entry[5:]) for entry in variables if entry.startswith(b"RANK=")]
                processes |= dict.fromkeys(ranks, int(pid))
    return processes


def has_ended(pid: int) -> bool:
    """Return whether a process is gone, or has nothing left but its exit status."""
    try:  # the state stands behind the command, which is in brackets; Z: only its exit status is left, X: dead
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
