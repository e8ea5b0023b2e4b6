"""Checkpoints in a store that fsspec knows, such as `s3://bucket/run`: paths with the methods that checkpoints use.

A store has no folders to rename and nothing to sync. A checkpoint is written under its own name there, and is complete
once its `manifest.json` is there, which is written last. A folder without it is an unfinished save.
"""

import posixpath
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any, cast

from longspan.errors import CheckpointError


def as_root(root: str | Path) -> Path:
    """Return the folder of this name, or the place in a store where it is a URL.

    >>> as_root("runs/mine"), as_root("s3://bucket/mine")
    (PosixPath('runs/mine'), s3://bucket/mine)

    Raises CheckpointError where fsspec, or the package of the store, is not installed.
    """
    if isinstance(root, str) and "://" in root:
        return cast(Path, StorePath.of(root))
    return root if isinstance(root, StorePath) else Path(root)  # pyright: ignore[reportReturnType]


def checkpoints_root(run_dir: Path, named: str) -> Path:
    """Return where a run's checkpoints are: at `named` (`run.checkpoints`), or if "" in its folder `checkpoints`."""
    return as_root(named) if named else run_dir / "checkpoints"


class StorePath:
    """A place in a store of fsspec, with those methods of `pathlib.Path` that checkpoints need."""

    def __init__(self, store: Any, path: str) -> None:
        self._store, self._path = store, path.rstrip("/")

    @classmethod
    def of(cls, url: str) -> "StorePath":
        """Return the place that a URL names. Raises CheckpointError where a package for it is missing."""
        try:
            from fsspec.core import url_to_fs

            return cls(*url_to_fs(url))
        except (ImportError, ValueError) as error:
            scheme = url.partition("://")[0]
            raise CheckpointError(
                f"{url} cannot be opened: {error}; install fsspec (pip install longspan[stores]) and the package of "
                f"the store, such as s3fs for s3://, or name a folder instead of {scheme}://"
            ) from error

    def __str__(self) -> str:
        return self._store.unstrip_protocol(self._path)

    __repr__ = __str__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StorePath) and str(self) == str(other)

    def __hash__(self) -> int:
        return hash(str(self))

    def __truediv__(self, name: str) -> "StorePath":
        return StorePath(self._store, f"{self._path}/{name}")

    @property
    def name(self) -> str:
        """The last part."""
        return posixpath.basename(self._path)

    @property
    def parent(self) -> "StorePath":
        """The place without the last part."""
        return StorePath(self._store, posixpath.dirname(self._path))

    def exists(self) -> bool:
        """Whether something is there."""
        return self._store.exists(self._path)

    def is_file(self) -> bool:
        """Whether a file is there."""
        return self._store.isfile(self._path)

    def is_dir(self) -> bool:
        """Whether files are under it, or it is a folder."""
        return self._store.isdir(self._path)

    def stat(self) -> Any:
        """Return the size of a file in bytes as `st_size`, and nothing else of what `os.stat` returns."""
        return SimpleNamespace(st_size=int(self._store.size(self._path)))

    def iterdir(self) -> "Iterator[StorePath]":
        """Yield the places directly under this one, as the store lists them now, not as fsspec remembers them."""
        self._store.invalidate_cache()
        for path in self._store.ls(self._path, detail=False):
            if path.rstrip("/") != self._path:
                yield StorePath(self._store, path)

    def mkdir(self, *_: Any, **__: Any) -> None:
        """Make a folder at this place, if the store has folders; one that exists is no error."""
        self._store.makedirs(self._path, exist_ok=True)

    def open(self, mode: str = "r") -> IO[Any]:
        """Open a file; what is written is in the store once the file is closed."""
        return self._store.open(self._path, mode)

    def read_text(self, encoding: str = "utf-8") -> str:
        """All text of a file."""
        return self._store.cat_file(self._path).decode(encoding)

    def write_text(self, text: str, encoding: str = "utf-8") -> None:
        """Write a file that has this text, in one call."""
        self._store.pipe_file(self._path, text.encode(encoding))

    def unlink(self, missing_ok: bool = False) -> None:
        """Remove a file."""
        if self.exists() or not missing_ok:
            self._store.rm_file(self._path)

    def remove(self) -> None:
        """Remove this place with everything under it, if there is anything, as the store lists it now."""
        self._store.invalidate_cache()
        if self.exists():
            self._store.rm(self._path, recursive=True)
