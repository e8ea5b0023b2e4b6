"""One run at a time in a folder: a lock that the run's first rank holds until it ends, however it ends.

The lock is the system's, on the open file `run.lock` (POSIX, also over NFS), so that none is left behind by a process
that was killed. The file says who holds it.
"""

import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

from longspan.comm import World
from longspan.comm.all_ranks import LogLine, is_first_rank, run_on_every_rank
from longspan.errors import RunFolderError
from longspan.files import naming_file

LOCK = "run.lock"


@contextmanager
def run_lock(directory: Path, world: World, log: LogLine) -> Iterator[None]:
    """Hold a run's folder, which is made where it is not there; entered by all ranks.

    Raises RunFolderError on every rank where another process holds it: which one, on which host.
    """
    file = run_on_every_rank(world, lambda: _locked(directory, log) if is_first_rank(world) else None, RunFolderError)
    try:
        yield
    finally:
        if file is not None:
            with suppress(OSError):
                file.truncate(0)
                file.close()


def _locked(directory: Path, log: LogLine) -> TextIO:
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / LOCK
    file = path.open("a+", encoding="utf-8")
    try:
        with naming_file(path):
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EACCES, errno.EAGAIN):
            raise RunFolderError(_taken(directory, file)) from error
        log(f"{path} cannot be locked ({error.strerror}): a second run in this folder would not be noticed")
    with suppress(OSError):  # a full disk: what counts is the lock
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
    return file


def _taken(directory: Path, file: TextIO) -> str:
    with file:
        file.seek(0)
        holder = file.read().strip() or "another process"
    return (
        f"another run is at work in {directory}: {holder}; wait until it has ended, stop it, or set run.dir to "
        "another folder"
    )
