"""Ending torchrun and its workers, which are in sessions of their own, so that they hold no GPU any longer."""

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path


def end_with_workers(process: subprocess.Popen[bytes], word: str) -> None:
    """Kill a process that leads a session, if it runs still, and all processes that have `word` in their command."""
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # of a process that has ended meanwhile
            if word.encode() in command.read_bytes().split(b"\0"):
                os.kill(int(command.parent.name), signal.SIGKILL)
