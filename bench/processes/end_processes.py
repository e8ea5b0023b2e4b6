"""Ending a command and all that it has started, so that nothing holds a GPU or writes files any longer.

Ranks lead groups of their own, compilers and torchrun's workers sessions of their own: all of them are children of the
command, or of its children. Ranks whose launcher alone is killed stop by themselves, but finish their step and save
first.
"""

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

PATIENCE = 30.0  # seconds in which a killed process leaves


def end_with_workers(process: subprocess.Popen[bytes], word: str) -> None:
    """Kill a process, if it runs still, with all that descend from it, and all with `word` in command or environment.

    In an environment the word is a whole entry, NAME=VALUE. Returns once these have ended: none of them writes then.
    """
    killed = _kill_tree(process.pid) if process.poll() is None else set[int]()
    process.wait()
    for pid in _all_processes():
        with suppress(OSError):  # of a process that has ended meanwhile, or of another user
            names = (Path(f"/proc/{pid}/{name}") for name in ("cmdline", "environ"))
            if word.encode() in [entry for name in names for entry in name.read_bytes().split(b"\0")]:
                killed |= _kill_tree(pid)
    deadline = time.monotonic() + PATIENCE
    while any(_status(pid)[0] not in ("", "Z", "X") for pid in killed) and time.monotonic() < deadline:
        time.sleep(0.02)


def _kill_tree(first: int) -> set[int]:
    """Kill a process and all that descend from it; returns their numbers. A stopped process starts no others."""
    stopped = {first}
    os.kill(first, signal.SIGSTOP)
    while children := {pid for pid in _all_processes() if int(_status(pid)[1]) in stopped} - stopped:
        for pid in children:
            with suppress(OSError):  # it has ended meanwhile
                os.kill(pid, signal.SIGSTOP)
        stopped |= children
    for pid in stopped:
        with suppress(OSError):
            os.kill(pid, signal.SIGKILL)
    return stopped


def _all_processes() -> Iterator[int]:
    return (int(folder.name) for folder in Path("/proc").glob("[0-9]*"))


def _status(pid: int) -> tuple[str, str]:
    """The state and the parent of a process; "" and "0" where it is gone."""
    try:
        state, parent = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[:2]
    except OSError:
        return "", "0"
    return state, parent
