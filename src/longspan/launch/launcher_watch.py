"""What a rank knows of its launcher. Once that is gone, killed or not, the rank stops as at SIGTERM: nobody would see
it train on. Torchrun tells no rank that another has died: the processes that it started on this host are found here.

A run ends its step and saves first: its ranks talk over connections of their own. See `comm/received_signals.py`.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from longspan.launch.output import write_error

PATIENCE = 600.0  # seconds for the step and the save of a rank that heeds SIGTERM
_CHECK_SECONDS = 0.1
_checks: list[Callable[[], bool]] = []


def stop_when_launcher_is_gone(is_gone: Callable[[], bool], *, with_message: bool) -> None:
    """Send this process SIGTERM once `is_gone`, which is called in threads, and SIGKILL PATIENCE seconds later.
    `with_message`: also write what happened to standard error, which one rank of a launch should do.
    """
    _checks.append(is_gone)

    def stop() -> None:
        while not is_gone():
            time.sleep(_CHECK_SECONDS)
        if with_message:
            write_error("longspan: the process that started the ranks is gone: they stop, and a run saves first\n")
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(PATIENCE)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=stop, name="launcher watch", daemon=True).start()


def launcher_is_gone() -> bool:
    """Whether the launcher of this rank is gone now, and with it the store that it served to the ranks of its host."""
    return any(is_gone() for is_gone in _checks)


def stop_when_torchrun_is_gone() -> None:
    """Stop this process once the torchrun that started it is gone; nothing happens if another program started it."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        torchrun = os.getppid()
        stop_when_launcher_is_gone(
            lambda: os.getppid() != torchrun, with_message=os.environ.get("LOCAL_RANK") == "0"
        )


def processes_of_torchrun() -> dict[int, int]:
    """Return the process id of each rank that this process's torchrun started here; empty under other launchers. Ranks
    that have not started yet are missing, so a caller waits for all ranks first. Linux only.
    """
    processes = dict[int, int]()
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        return processes
    torchrun = os.getppid()
    children = list[str]()
    with suppress(OSError):
        children = Path(f"/proc/{torchrun}/task/{torchrun}/children").read_text().split()
    for pid in children:
        # The process may have ended since.
        with suppress(OSError):
            variables = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            ranks = [int(entry.removeprefix(b"RANK=")) for entry in variables if entry.startswith(b"RANK=")]
            processes |= dict.fromkeys(ranks, int(pid))  # a child that is no rank has none
    return processes


def has_ended(pid: int) -> bool:
    """Return whether a process is gone, or has nothing left but its exit status."""
    try:  # the state stands behind the command, which is in brackets; Z: only its exit status is left, X: dead
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True
