"""How the ranks' own files of a checkpoint are written and read: torch's file system storage, with four additions.

A file is hashed while it is written, so that no rank reads it again for that. Reading and writing are not under the
time-out of collectives (`leave_together`). An error of the disk names its file. What is read is data: tensors and
plain values, never an object that runs code while it is made.
"""

import hashlib
import io
import os
import pickle
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import WriteResult
from torch.futures import Future

from longspan.checkpoint.files import Digest
from longspan.checkpoint.metadata import METADATA, metadata_text
from longspan.checkpoint.store_path import StorePath
from longspan.comm import World, leave_together
from longspan.errors import CheckpointError
from longspan.files import name_file_in_errors, os_error_text


class HashingWriter(FileSystemWriter):
    """Writes this rank's files; `digests` are those of all that it wrote, by name.

    With a world its ranks wait for each other while they write.
    """

    def __init__(self, path: Path, world: World | None) -> None:
        in_store = isinstance(path, StorePath)
        super().__init__(".", sync_files=not in_store)  # "." stands in: torch would make a plain Path of a StorePath
        self.path, self.fs = path, _HashingFiles()
        self._files = self.fs  # with its own type: torch declares fs as another
        self._world = world

    @property
    def checkpoint_id(self) -> str | os.PathLike[str]:
        """The folder as torch's `.metadata` names it."""
        return str(self.path) if isinstance(self.path, StorePath) else self.path

    @property
    def digests(self) -> dict[str, Digest]:
        """Size and hash of every file that was written here."""
        return dict(self._files.digests)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        """Write the tensors as torch's writer does, with a hash of each file; entered by all ranks."""
        assert self._world is not None  # writers without a world override this method (saver.py)
        with leave_together(self._world):
            return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Write which tensor is in which file: torch's `.metadata`, and `metadata.json`, which longspan reads.

        torch calls this on one rank, with the `results` of all ranks.
        """
        super().finish(metadata, results)
        places = {result.index: result.storage_data for rank_results in results for result in rank_results}
        with self._files.create_stream(self.path / METADATA, "wb") as stream:  # pyright: ignore[reportOperatorIssue]
            stream.write(metadata_text(metadata.state_dict_metadata, places).encode())
            stream.flush()
            if self.sync_files:
                os.fsync(stream.fileno())


class DataReader(FileSystemReader):
    """Reads the files of a checkpoint as `metadata` (`read_metadata`) describes them; to use with a `DataPlanner`.

    Raises CheckpointError for a file with something else in it than tensors and plain values.
    """

    def __init__(self, path: Path, metadata: Metadata) -> None:
        super().__init__(".")  # "." stands in: torch would make a plain Path of a StorePath
        self.path, self.fs = path, _Files()
        self._folder, self._metadata = path, metadata
        self._file = ""  # the name of the file that is being read, for errors

    def read_metadata(self, *_: Any, **__: Any) -> Metadata:
        """Return the metadata that was read before; torch's reader would unpickle `.metadata`."""
        return self._metadata

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the tensors as torch's reader does, without running anything that is in the files."""
        try:
            return super().read_data(plan, planner)
        except pickle.UnpicklingError as error:
            raise CheckpointError(not_data_text(self._folder / self._file, error)) from error

    def _slice_file(self, file: Any, sinfo: Any) -> Any:
        self._file = sinfo.relative_path
        return super()._slice_file(file, sinfo)


class PatientReader(DataReader):
    """Reads what this rank needs of all files, however long that takes."""

    def __init__(self, path: Path, metadata: Metadata, world: World) -> None:
        super().__init__(path, metadata)
        self._world = world

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read the tensors as `DataReader` does, but not under the time-out of collectives; entered by all ranks.

        An OSError names the path.
        """
        with leave_together(self._world), name_file_in_errors(self._folder):
            return super().read_data(plan, planner)


class DataPlanner(DefaultLoadPlanner):
    """torch's planner of loading, which takes plain values only where torch's would unpickle anything."""

    def create_local_plan(self) -> LoadPlan:
        """Plan as torch does. Raises CheckpointError where a checkpoint has another value in place of a tensor."""
        assert self.metadata is not None
        stored = self.metadata.state_dict_metadata
        for name, value in self.state_dict.items():
            if isinstance(value, Tensor) and isinstance(stored.get(name), BytesStorageMetadata):
                raise CheckpointError(
                    f"{name} is no tensor in the checkpoint, and one of {list(value.shape)} here; load it with the "
                    "model and the optimizer that it was saved from"
                )
        return super().create_local_plan()

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take up a value that is no tensor, such as a count of steps.

        torch (2.11 to 2.15) unpickles such a value unchecked. It gets a copy, made of what was read as plain data.
        """
        plain = io.BytesIO()
        torch.save(torch.load(value, weights_only=True), plain)
        plain.seek(0)
        super().load_bytes(read_item, plain)


def read_values(file: Path) -> Any:
    """Return the tensors and plain values in a file of `torch.save`.

    >>> read_values(Path("checkpoint-8/scheduler.pt"))["last_epoch"]
    8

    Raises CheckpointError for a file that is damaged or holds anything else, which is not run.
    """
    try:
        return torch.load(file, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except Exception as error:  # a damaged file raises anything
        raise CheckpointError(not_data_text(file, error)) from error


def first_failure_text(error: BaseException) -> str:
    """Return the text of the failure on the first rank that failed; torch's own text has the tracebacks of all ranks.

    An error that is of no rank in particular has its own text.
    """
    failures = error.failures if isinstance(error, CheckpointException) else {}
    if not failures:
        return str(error)
    rank, (failure, _) = next(iter(failures.items()))  # _: the traceback
    return f"{failure} (on rank {rank})"


def not_data_text(file: Path, error: Exception) -> str:
    """Return why a file of tensors and plain values is not read, and what to do; torch advises to run what is in it."""
    reason = " ".join(str(error).split())
    if match := re.search(r"GLOBAL (\S+)", reason):
        return (
            f"{file} names {match[1]}, which is neither a tensor nor a plain value and may be code; it was not run. "
            "Use a checkpoint that longspan wrote, from who saved it"
        )
    return (
        f"{file} holds something else than tensors and plain values, or is damaged ({type(error).__name__}); nothing "
        "of it was run. Copy it again from where it was saved, or use another checkpoint"
    )


class _Files(FileSystem):
    """Files of a folder or of a store; torch's own takes every path for one of the disk."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        with path.open(mode) as stream:
            yield stream

    def concat_path(self, path: Any, suffix: str) -> Any:
        return path / suffix

    def mkdir(self, path: Any) -> None:
        path.mkdir(parents=True, exist_ok=True)

    def exists(self, path: Any) -> bool:
        return path.exists()

    def rm_file(self, path: Any) -> None:
        path.unlink()

    def rename(self, path: Any, new_path: Any) -> None:
        path.rename(new_path)


class _HashingFiles(_Files):
    """Files that are hashed as they are written."""

    def __init__(self) -> None:
        super().__init__()
        self.digests: dict[str, Digest] = {}

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        """Open a new file to write it, and note its size and hash once it is closed.

        Raises CheckpointError for what the disk or the store refuses. torch's writer of tensors may raise an error of
        its own then, so the file remembers the refusal.
        """
        assert mode == "wb", mode
        file = None
        try:
            with name_file_in_errors(path):
                file = _StoreFile(path) if isinstance(path, StorePath) else _HashedFile(path, "wb")
                with io.BufferedWriter(file) as stream:
                    yield stream
        except Exception as error:
            refused = file.refused if file is not None else None
            refused = refused or (error if isinstance(error, OSError) else None)
            if refused is None:  # the disk or store refused nothing: an error of the writer itself
                raise
            if not isinstance(refused, OSError):  # of a store's own package
                raise CheckpointError(f"{path}: {type(refused).__name__}: {refused}") from error
            refused.filename = str(path)
            raise CheckpointError(os_error_text(refused)) from error
        self.digests[path.name] = file.size, file.sha256.hexdigest()

    def rename(self, path: Any, new_path: Any) -> None:
        super().rename(path, new_path)
        self.digests[new_path.name] = self.digests.pop(path.name)


class _StoreFile(io.RawIOBase):
    """A new file of a store with the hash of its bytes, and the error with which it was refused."""

    def __init__(self, path: StorePath) -> None:
        super().__init__()
        self.size, self.sha256, self._file = 0, hashlib.sha256(), path.open("wb")
        self.refused: Exception | None = None

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self.size

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        try:
            self._file.write(view)
        except Exception as error:  # of any package
            self.refused = error
            raise
        self.sha256.update(view)
        self.size += len(view)
        return len(view)

    def close(self) -> None:
        """Close the file, after which the store has it; the store's file is closed even if a last write fails."""
        if not self.closed:
            try:
                super().close()
            finally:
                self._file.close()


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
