"""Where documents are kept for all runs: a folder for each key, which is there in full or not at all.

Of two runs that start at once one builds while the other waits. Where a file system has no locks each builds its own,
and the first that is done is kept.
"""

import fcntl
import hashlib
import os
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from longspan.corpus.files import LogLine
from longspan.errors import DataError
from longspan.files import naming_file

NONE = "none"  # as data.cache: nothing is kept
_POLL_SECONDS, _NEWS_SECONDS = 0.2, 30.0


def cache_folder(setting: str) -> Path:
    """The folder that `data.cache` names: longspan/corpora in the user's cache (XDG_CACHE_HOME) where it is empty."""
    if setting:
        return Path(setting).expanduser().absolute()
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "longspan" / "corpora"


class Cache:
    """The cache in a folder, which is made. Raises OSError where that cannot be."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, "not writable for this user", str(folder))

    def sums_of(self, path: str) -> Path:
        """The file in which SHA-256 sums of the files at a path are kept."""
        name = hashlib.sha256(str(Path(path).absolute()).encode()).hexdigest()[:32]
        return self.folder / "files" / f"{name}.jsonl"

    def documents(
        self, key: str, whole: Callable[[Path], bool], build: Callable[[Path], object], log: LogLine
    ) -> tuple[Path, bool]:
        """The folder of these documents; whether `build` made it now, as it was not there or not `whole`."""
        folder = self.folder / key[:40]
        if folder.is_dir() and whole(folder):
            return folder, False
        with self._lock(folder, log) as locked:
            if folder.is_dir() and whole(folder):  # another run has made it meanwhile
                return folder, False
            if locked:
                for old in self.folder.glob(f"{folder.name}.partial*"):
                    shutil.rmtree(old, ignore_errors=True)
            if folder.is_dir():
                log(f"{folder} is damaged: its documents are made again")
                shutil.rmtree(folder)
            partial = folder.with_name(f"{folder.name}.partial-{uuid.uuid4().hex[:8]}")
            try:
                with naming_file(partial):
                    build(partial)
                    _move(partial, folder)
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        return folder, True

    @contextmanager
    def _lock(self, folder: Path, log: LogLine) -> Iterator[bool]:
        """Hold these documents alone, as soon as no other run does; whether they are held."""
        said = 0.0
        with folder.with_suffix(".lock").open("a") as file:
            while True:
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    if time.monotonic() - said > _NEWS_SECONDS:
                        log("another run tokenizes the same corpus: waiting for it")
                        said = time.monotonic()
                    time.sleep(_POLL_SECONDS)
                except OSError:
                    yield False
                    return
            yield True


def _move(partial: Path, folder: Path) -> None:
    """Give a folder its name, unless another run was faster."""
    try:
        partial.rename(folder)
    except OSError:
        if not folder.is_dir():
            raise


def cannot_keep(folder: Path, error: OSError) -> DataError:
    """What to tell of a cache that cannot be written."""
    free = ""
    with suppress(OSError):
        free = f" ({shutil.disk_usage(folder).free:,} bytes are free)"
    return DataError(
        f"the corpus cannot be kept in {folder}: {error.strerror or error}{free}; set data.cache to a folder with room "
        'for its tokens, or to "none", with which rows are tokenized again when they are read'
    )
