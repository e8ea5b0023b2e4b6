"""Files: JSON and lines that are read, texts that are written whole or not at all, errors of the disk in words."""

import errno
import json
import math
import os
import shutil
import stat
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

Stamp = tuple[int, int]  # bytes of a file, and its modification time in ns


def file_stamp(path: str | Path) -> Stamp:
    """Return the bytes of a file and its modification time in ns, which tell whether it changed. Raises OSError if it
    is gone.
    """
    status = Path(path).stat()
    return status.st_size, status.st_mtime_ns


def as_json(value: Mapping[str, Any] | Sequence[Any], indent: int | None = None) -> str:
    """Return a record as JSON.

    >>> as_json({"step": 3, "loss": float("nan")})
    '{"step": 3, "loss": null}'
    """
    return json.dumps(json_safe_values(value), indent=indent, allow_nan=False)


def json_safe_values(value: Any) -> Any:
    """Return a record with None in place of every number that is not finite."""
    if isinstance(value, Mapping):
        return {key: json_safe_values(inner) for key, inner in value.items()}
    if isinstance(value, list | tuple):
        return [json_safe_values(inner) for inner in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def parse_json(text: str | bytes) -> Any:
    """Parse JSON that somebody else wrote; whatever is wrong with the text, too deep nesting too, is a ValueError.

    >>> parse_json('{"step": 3}')
    {'step': 3}
    """
    try:
        return json.loads(text)
    except RecursionError as error:
        raise ValueError("lists and objects stand too deeply in each other") from error


def read_lines(file: Path, most: int) -> Iterator[bytes | None]:
    """Yield each line of a file, with its newline; None in place of a line of more than `most` bytes before that."""
    with file.open("rb") as stream:
        while line := stream.readline(most + 1):
            if len(line) > most and not line.endswith(b"\n"):
                # the rest of the line is skipped, a piece at a time
                while (part := stream.readline(1 << 20)) and not part.endswith(b"\n"):
                    pass
                yield None
            else:
                yield line


def read_json(file: Path) -> Any:
    """Return the value in a JSON file. Raises OSError where it cannot be read, ValueError for no JSON in UTF-8."""
    return parse_json(file.read_text(encoding="utf-8"))


@contextmanager
def name_file_in_errors(path: Path) -> Iterator[None]:
    """Set the name of a file in an OSError that is raised inside without one.

    >>> with name_file_in_errors(path), path.open("w") as file:  # doctest: +SKIP
    ...     file.write(text)
    """
    try:
        yield
    except OSError as error:
        if error.filename is None:
            error.filename = str(path)
        raise


def os_error_text(error: OSError) -> str:
    """Write the file and what is wrong with it; for a full disk or quota also the bytes free there and what to do."""
    text = f"{error.filename or 'a file'}: {error.strerror or error}"
    if error.errno not in (errno.ENOSPC, errno.EDQUOT):
        return text
    path = Path(str(error.filename or ".")).absolute()
    nearest = next((folder for folder in (path, *path.parents) if folder.exists()), None)
    free = "" if nearest is None else f" ({shutil.disk_usage(nearest).free:,} bytes are free)"
    return f"{text}{free}; make room there and start the same command again, or write to another disk"


def write_durably(path: Path, text: str, *, named: Path | None = None) -> None:
    """Write a file, and return once the disk has it; errors name `path`, or `named` if it is given."""
    with name_file_in_errors(named or path), path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def write_atomically(path: Path, text: str) -> None:
    """Write a file so that it is there in full or not at all, also where several processes write it at once. A link of
    that name is replaced, and what it leads to stays.
    """
    partial = _partial_file(path)
    try:
        write_durably(partial, text, named=path)
    except OSError:
        partial.unlink(missing_ok=True)
        raise
    partial.replace(path)


def own_file(path: Path) -> Path:
    """Return the path of a file that is to be changed in place. If it has other names (hard links), they keep what it
    holds, and `path` gets a copy. Raises OSError for a symbolic link and for what is no file.
    """
    with suppress(FileNotFoundError):
        status = path.lstat()
        if not stat.S_ISREG(status.st_mode):
            kind = "a link" if stat.S_ISLNK(status.st_mode) else "no file"
            raise OSError(errno.EINVAL, f"it is {kind}, through which nothing is written; remove it", str(path))
        if status.st_nlink > 1:
            copy = _partial_file(path)
            shutil.copy2(path, copy)
            copy.replace(path)
    return path


def _partial_file(path: Path) -> Path:
    return path.with_name(f"{path.name}.partial-{uuid.uuid4().hex[:8]}")
