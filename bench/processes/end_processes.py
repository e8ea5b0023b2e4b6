"""Ending torchrun and its workers, which are in sessions of their own, so that they hold no GPU any longer."""

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path


def end_with_workers(process: subprocess.Popen[bytes], word: str) -> None:
    """Kill a process that leads a session, if it runs still, and all processes with `word` in command or environment.

    In an environment the word is a whole entry, NAME=VALUE.
    """
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):  # of a process that has ended meanwhile, or of another user
            if word.encode() in [entry for name in ("cmdline", "environ") for entry in _entries(folder / name)]:
                os.kill(int(folder.name), signal.SIGKILL)


def _entries(path: Path) -> list[bytes]:
    return path.read_bytes().split(b"\0")
