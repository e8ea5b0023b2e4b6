"""How the ranks' own files of a checkpoint are written and read: torch's file system storage, with three additions.

A file is hashed while it is written, so that no rank reads it again for that. Reading and writing are not under the
time-out of collectives (`waiting_for_all`). An error of the disk names its file.
"""

import hashlib
import io
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.futures import Future

from longspan.checkpoint.files import Digest
from longspan.comm import World, waiting_for_all
from longspan.errors import CheckpointError
from longspan.files import naming_file, os_error_text


class HashingWriter(FileSystemWriter):
    """Writes this rank's files; `digests` are those of all that it wrote, by name."""

    def __init__(self, path: Path, world: World) -> None:
        super().__init__(path)
        self.fs = self._files = _HashingFiles()
        self._world = world

    @property
    def digests(self) -> dict[str, Digest]:
        """Size and hash of every file that was written here."""
        return dict(self._files.digests)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        """As torch writes; entered by all ranks."""
        with waiting_for_all(self._world):
            return super().write_data(plan, planner)


class PatientReader(FileSystemReader):
    """Reads what this rank needs of all files."""

    def __init__(self, path: Path, world: World) -> None:
        super().__init__(path)
        self._world = world

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """As torch reads, but not under the time-out of collectives, and with the path in an OSError.

        Entered by all ranks.
        """
        with waiting_for_all(self._world), naming_file(Path(self.path)):
            return super().read_data(plan, planner)


class _HashingFiles(FileSystem):
    """Files on disk, hashed as they are written."""

    def __init__(self) -> None:
        super().__init__()
        self.digests: dict[str, Digest] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[Any]:
        """A stream to write a new file with. Raises CheckpointError for what the disk refuses."""
        assert mode == "wb", mode
        file = None
        try:
            with naming_file(Path(path)):
                file = _HashedFile(path, "wb")
                with io.BufferedWriter(file) as stream:
                    yield stream
        except Exception as error:  # torch's writer of tensors replaces the disk's error by its own
            refused = file.refused if file is not None else None
            refused = refused or (error if isinstance(error, OSError) else None)
            if refused is None:
                raise
            refused.filename = str(path)
            raise CheckpointError(os_error_text(refused)) from error
        self.digests[Path(path).name] = file.size, file.sha256.hexdigest()

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Give a file that was written another name."""
        super().rename(path, new_path)
        self.digests[Path(new_path).name] = self.digests.pop(Path(path).name)


class _HashedFile(io.FileIO):
    """A new file with the hash of the bytes that the system took, and the error with which it refused more."""

    def __init__(self, path: str | os.PathLike[str], mode: str) -> None:
        super().__init__(path, mode)
        self.size, self.sha256 = 0, hashlib.sha256()
        self.refused: OSError | None = None

    def write(self, data: Any) -> int | None:
        """Write what the system takes of `data`; returns how many bytes."""
        try:
            written = super().write(data)
        except OSError as error:
            self.refused = error
            raise
        self.sha256.update(memoryview(data).cast("B")[:written])
        self.size += written or 0
        return written
