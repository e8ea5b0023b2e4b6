"""Where text comes from: the standard library of the running Python, or a folder or file of .txt, .md, .py, .jsonl.

Files are taken in the order of their names, so that a corpus is the same on every machine that holds the same files.
Nothing is downloaded. Cutting and counting tokens is the corpus's business (`build.py`).
"""

import hashlib
import json
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from longspan.errors import DataError

SUFFIXES = (".txt", ".md", ".py", ".jsonl")
STDLIB = "stdlib"
# Not prose that a person wrote: tests, other people's packages, tables that scripts generated.
_NOT_STDLIB = {"site-packages", "dist-packages", "lib-dynload", "test", "tests", "idle_test", "encodings", "pydoc_data"}


@dataclass(frozen=True)
class Source:
    """One file of a corpus: its name inside the corpus, its size, and what it held when it was read."""

    name: str
    bytes: int
    modified_ns: int
    sha256: str


def find_files(path: str, *, leave_out: Path | None = None, key: str = "data.path") -> dict[str, Path]:
    """The files of a corpus by name, sorted. `leave_out` (the run's own folder) is not searched; messages name `key`.

    Raises DataError for a path that does not exist, a file of another kind, and a folder without a readable file.
    """
    root = Path(sysconfig.get_path("stdlib")) if path == STDLIB else Path(path).expanduser()
    if not root.exists():
        raise DataError(f"{key} {path!r} does not exist; give {STDLIB!r}, or a folder or file of {_kinds()}")
    if root.is_file():
        if root.suffix not in SUFFIXES:
            raise DataError(f"{key} {path!r} ends in {root.suffix!r}; a file must be one of {_kinds()}")
        return {root.name: root}
    walk = _walk(root, stdlib=path == STDLIB, leave_out=leave_out)
    files = dict(sorted((name, file) for name, file in walk if name.endswith(SUFFIXES)))
    if not files:
        raise DataError(f"{key} {path!r} holds no file of {_kinds()}; give a folder that does")
    return files


def files_of_other_kinds(path: str, *, leave_out: Path | None = None) -> dict[str, int]:
    """How many files of a corpus's folder are not read, by the ending of their names, the most frequent first."""
    root = Path(path).expanduser()
    if path == STDLIB or not root.is_dir():
        return {}
    names = [file for _, file in _walk(root, stdlib=False, leave_out=leave_out) if file.suffix not in SUFFIXES]
    return dict(Counter(file.suffix or file.name for file in names).most_common())


def read_texts(name: str, raw: bytes) -> Iterator[str]:
    """The texts of one file: one for each line of a .jsonl ("text"), else the whole file.

    Raises UnicodeDecodeError for a file that is not UTF-8, DataError (file and line) for a line without a text.
    """
    text = raw.decode("utf-8-sig")
    if not name.endswith(".jsonl"):
        yield text
        return
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield _text_of(line, f"{name}, line {number}")


def describe(name: str, file: Path, raw: bytes) -> Source:
    """What the manifest keeps of a file that was just read."""
    return Source(name, len(raw), file.stat().st_mtime_ns, hashlib.sha256(raw).hexdigest())


def read_file(name: str, file: Path) -> bytes:
    """The bytes of a source file. Raises DataError where it cannot be read."""
    try:
        return file.read_bytes()
    except OSError as error:
        raise DataError(f"cannot read {name} of the corpus ({file}): {error.strerror}") from error


def changed_files(known: list[Source], files: dict[str, Path]) -> list[str]:
    """What differs between the files that a corpus was made from and those that are there now, one phrase each."""
    before = {source.name: source for source in known}
    changes = [f"{name} is gone" for name in before.keys() - files.keys()]
    changes += [f"{name} is new" for name in files.keys() - before.keys()]
    for name in before.keys() & files.keys():
        old, stat = before[name], files[name].stat()
        if (stat.st_size, stat.st_mtime_ns) == (old.bytes, old.modified_ns):
            continue
        if stat.st_size != old.bytes:
            changes.append(f"{name} had {old.bytes} bytes and has {stat.st_size}")
        elif hashlib.sha256(read_file(name, files[name])).hexdigest() != old.sha256:
            changes.append(f"{name} has other contents")
    return sorted(changes)


def _walk(root: Path, *, stdlib: bool, leave_out: Path | None) -> Iterator[tuple[str, Path]]:
    hidden = {"__pycache__"} | (_NOT_STDLIB if stdlib else set())
    skip = leave_out.resolve() if leave_out else None
    for folder, folders, names in os.walk(root):
        here = Path(folder)
        folders[:] = [d for d in folders if d not in hidden and d[0] != "." and (here / d).resolve() != skip]
        for name in names:
            is_source = name.endswith(".py") and not name.startswith("_sysconfigdata") if stdlib else name[0] != "."
            if is_source:
                yield (here / name).relative_to(root).as_posix(), here / name


def _text_of(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON ({error.msg} at column {error.colno}): {line[:60]!r}") from error
    if not isinstance(record, dict):
        raise DataError(f'{where}: needs an object with a string "text"; found {_kind(record)}: {line[:60]!r}')
    if "text" not in record:
        raise DataError(f'{where}: needs an object with a string "text"; found keys {sorted(record)}')
    text = record["text"]
    if not isinstance(text, str):
        value = json.dumps(text)[:60]
        raise DataError(f'{where}: needs an object with a string "text"; "text" is {_kind(text)}: {value}')
    _check_characters(text, where)
    return text


def _check_characters(text: str, where: str) -> None:
    """Raise DataError for half of a surrogate pair, which JSON can write and no tokenizer can read."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        code = ord(text[error.start])
        raise DataError(
            f"{where}: character {error.start + 1} of its text is \\u{code:04x}, a lone surrogate, which is half of a "
            "character; write both halves, or leave it out"
        ) from error


def _kind(value: object) -> str:
    """The name of a JSON value's type."""
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    return {str: "a string", list: "a list", dict: "an object"}.get(type(value), "a number")


def _kinds() -> str:
    return " ".join(SUFFIXES)
