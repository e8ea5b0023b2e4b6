"""The lock of a run's folder, run.lock, which keeps a second run out."""

import errno
import fcntl
import os
import shutil
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from longspan.comm import World
from longspan.comm.all_ranks import LogLine, is_first_rank, run_on_every_rank
from longspan.errors import RunFolderError
from longspan.files import name_file_in_errors
from longspan.run.facts import LOCK


@contextmanager
def run_lock(directory: Path, world: World, log: LogLine) -> Iterator[None]:
    """Hold the lock of a run's folder, creating the folder if needed; entered by all ranks.

    Raises RunFolderError on every rank if another process holds it. A new folder goes where an error comes before
    run.json, unless it has checkpoints: a folder that was removed meanwhile, into which the run has saved again.
    """
    to_remove = is_first_rank(world) and not directory.exists()
    file = run_on_every_rank(
        world, lambda: _lock_file(directory, log) if is_first_rank(world) else None, RunFolderError
    )
    try:
        yield
        to_remove = False
    finally:
        if file is not None:
            with suppress(OSError):
                file.truncate(0)
                file.close()
        if to_remove and not any((directory / name).exists() for name in ("run.json", "checkpoints")):
            shutil.rmtree(directory, ignore_errors=True)


def _lock_file(directory: Path, log: LogLine) -> TextIO:
    """Make a run's folder and lock its run.lock, which then names this process; returns the file, which stays open.

    Raises RunFolderError where another process has the lock. A file system without locks is only logged.
    """
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / LOCK
    file = path.open("a+", encoding="utf-8")
    try:
        with name_file_in_errors(path):
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            with file:
                file.seek(0)
                holder = file.read().strip() or "another process"
            raise RunFolderError(
                f"another run is at work in {directory}: {holder}; wait until it has ended, stop it, or set run.dir to "
                "another folder"
            ) from error
        log(f"{path} cannot be locked ({error.strerror}): a second run in this folder would not be noticed")
    with suppress(OSError):  # a full disk: what counts is the lock
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
    return file
