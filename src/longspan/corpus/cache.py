"""The cache of tokenized documents, in a folder that runs share: what one run builds, others open."""

import fcntl
import os
import shutil
import uuid
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from longspan.files import name_file_in_errors
from longspan.plain_text import LogLine


def cache_folder() -> Path:
    """Return longspan/corpora in the user's cache (XDG_CACHE_HOME), where runs keep their tokens."""
    return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser().absolute() / "longspan" / "corpora"


class Cache:
    """The cache in a folder, which is created. Raises OSError if it cannot be written."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(13, "not writable for this user", str(folder))  # 13: EACCES

    def open_or_build_documents(
        self, key: str, is_whole: Callable[[Path], bool], build: Callable[[Path], object], log: LogLine
    ) -> tuple[Path, bool]:
        """Return the folder of the documents with this key, and whether it was built now; other runs wait meanwhile.

        `build` writes the documents into the folder that it is given, which gets its final name afterwards. A folder
        that is there already, and of which `is_whole` is false, is removed and built again.
        """
        # 40 of 64 hexadecimal digits are enough to be different.
        folder = self.folder / key[:40]
        if folder.is_dir() and is_whole(folder):
            return folder, False
        with folder.with_suffix(".lock").open("a") as file:
            has_lock = False
            # Without locks in the file system other runs may build the same documents.
            with suppress(OSError):
                try:
                    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    log("another run tokenizes the same corpus: waiting for it")
                    fcntl.flock(file, fcntl.LOCK_EX)
                has_lock = True
            # Another run may have made the folder in the meantime.
            if folder.is_dir() and is_whole(folder):
                return folder, False
            if has_lock:  # then no other run builds, and what is unfinished is left of one that ended
                for unfinished in self.folder.glob(f"{folder.name}.partial*"):
                    shutil.rmtree(unfinished, ignore_errors=True)
            if folder.is_dir():
                log(f"{folder} is damaged: its documents are made again")
                shutil.rmtree(folder)
            partial = folder.with_name(f"{folder.name}.partial-{uuid.uuid4().hex[:8]}")
            try:
                with name_file_in_errors(partial):
                    build(partial)
                    try:
                        partial.rename(folder)
                    except OSError:
                        # Without locks another run may have made the folder first.
                        if not folder.is_dir():
                            raise
            finally:
                shutil.rmtree(partial, ignore_errors=True)
        return folder, True
