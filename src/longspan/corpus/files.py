"""The source files of a corpus: a file, the files of a folder, or the standard library of the running Python.

Files are in the order of their names, so that equal files give an equal corpus. Symbolic links are followed. A
SHA-256 sum is not taken again for a file of the same size and time. Rows are read in `row_files.py`.
"""

import hashlib
import json
import os
import re
import sysconfig
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from itertools import accumulate, islice
from pathlib import Path
from stat import S_ISREG
from typing import Any

import numpy as np

from longspan.config.sections import MAX_TEXT_BYTES, DataConfig
from longspan.corpus.row_files import (
    SUFFIXES,
    ZSTD,
    RowChunk,
    chunk_rows,
    count_rows,
    import_reader,
    row_file,
    slice_chunks,
)
from longspan.corpus.rows.sample import BadRow, Kind, Row, common_kind, rename_columns, row_kind
from longspan.corpus.splits import SAVED_SPLITS, SplitPart, check_one_configuration, find_splits, read_split_parts
from longspan.data.manifest import SourceFile
from longspan.errors import DataError, plural
from longspan.files import read_json, write_atomically
from longspan.hub import find_local_path

LogLine = Callable[[str], None]

_SETTLED_SECONDS = 2.0  # a file may be written again within the resolution of its time
_NEWS_SECONDS = 5.0  # between two lines of progress


@dataclass(frozen=True)
class CorpusFile:
    """A file to read: the number of its source, its name in the corpus, its path, and which rows (None: all)."""

    source: int
    name: str
    path: Path
    rows: tuple[int, int] | None = None  # the first, and the one after the last

    def read_chunks(self, most_bytes: int) -> Iterator[RowChunk]:
        chunks = row_file(self.name, self.path, most_bytes).read_chunks()
        return chunks if self.rows is None else slice_chunks(chunks, *self.rows)


class FileSums:
    """SHA-256 sums of files that were read before: of `earlier` source files, and those that `file` has a line for.

    A sum is used again for a file with the same path, size and time.
    """

    def __init__(self, file: Path | None = None, earlier: Iterable[SourceFile] = ()) -> None:
        self._file = file
        self._sums = {source.path: source for source in earlier}
        if file is not None:
            with suppress(OSError, ValueError, TypeError):  # without its sums the files are read again
                lines = file.read_text(encoding="utf-8").splitlines()
                self._sums |= {source.path: source for source in (SourceFile(**json.loads(line)) for line in lines)}

    def sums_of_files(self, files: Iterable[CorpusFile], log: LogLine) -> list[SourceFile]:
        """Return size, time and sum of each file, read if necessary. Raises DataError for an unreadable file."""
        last_log_time = time.monotonic()
        sources = list[SourceFile]()
        for file in files:
            sources.append(self._source_file(file))
            if time.monotonic() - last_log_time > _NEWS_SECONDS:
                last_log_time = time.monotonic()
                log(f"read {len(sources):,} files to see what they hold")
        return sources

    def _source_file(self, file: CorpusFile) -> SourceFile:
        path = str(file.path.absolute())
        try:
            stat = file.path.stat()
            path.encode()  # raises for a path that JSON could not keep
            if not S_ISREG(stat.st_mode):
                raise DataError(
                    f"{file.name} of the corpus ({file.path}) is no regular file; give one, or leave it out"
                )
            earlier = self._sums.get(path)
            if earlier is not None and (earlier.bytes, earlier.modified_ns) == (stat.st_size, stat.st_mtime_ns):
                return SourceFile(file.name, earlier.bytes, earlier.modified_ns, earlier.sha256, path)
            with file.path.open("rb") as opened:
                digest = hashlib.file_digest(opened, "sha256").hexdigest()
            return SourceFile(file.name, stat.st_size, stat.st_mtime_ns, digest, path)
        except UnicodeEncodeError as error:
            raise DataError(
                f"the path {path!r} of a file of the corpus is not UTF-8; give it another name"
            ) from error
        except OSError as error:
            raise DataError(f"cannot read {file.name} of the corpus ({file.path}): {error.strerror}") from error

    def save_sums(self, sources: Iterable[SourceFile]) -> None:
        """Write the sums of these files for later starts, if one is new; one just written may change again."""
        if self._file is None:
            return
        settled_before_ns = time.time_ns() - int(_SETTLED_SECONDS * 1e9)
        settled = [source for source in sources if source.modified_ns < settled_before_ns]
        if any(self._sums.get(source.path) != source for source in settled):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(self._file, "".join(json.dumps(asdict(source)) + "\n" for source in settled))


def file_differences(before: Iterable[SourceFile], now: Iterable[SourceFile]) -> list[str]:
    """Describe how the files of a corpus differ from those that it was built from, one phrase per file."""
    old_files, new_files = _index_by_name(before), _index_by_name(now)
    changes = [f"{name} is gone" for name, _ in old_files.keys() - new_files.keys()]
    changes += [f"{name} is new" for name, _ in new_files.keys() - old_files.keys()]
    for key in old_files.keys() & new_files.keys():
        old_file, new_file = old_files[key], new_files[key]
        if old_file.bytes != new_file.bytes:
            changes.append(f"{old_file.name} had {old_file.bytes} bytes and has {new_file.bytes}")
        elif old_file.sha256 != new_file.sha256:
            changes.append(f"{old_file.name} has other contents")
    return sorted(changes)


def _index_by_name(sources: Iterable[SourceFile]) -> Mapping[tuple[str, int], SourceFile]:
    """By name and the number of files of this name before, as files of two sources may share one."""
    by_name = dict[tuple[str, int], SourceFile]()
    counts = Counter[str]()
    for source in sources:
        by_name[source.name, counts[source.name]] = source
        counts[source.name] += 1
    return by_name


STDLIB = "stdlib"
_KINDS = " ".join(SUFFIXES)
_TABLES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow")  # files of many rows
_ROWS = (*_TABLES, ".txt")  # files that may be splits; a train.py beside a test.py is code
_NOTICE = re.compile(r"(readme|licen[cs]e|notice|citation|changelog|copying)([-._ ].*)?")
_STATE = "state.json"  # which save_to_disk of the package datasets writes
# Not prose that a person wrote: tests, other people's packages, tables that scripts generated.
_NOT_STDLIB = {
    "site-packages",
    "dist-packages",
    "lib-dynload",
    "test",
    "tests",
    "idle_test",
    "encodings",
    "pydoc_data",
}


def find_files(
    path: str, *, split: str = "", leave_out: Sequence[Path] = (), key: str = "data.path"
) -> dict[str, Path]:
    """Find the files of a corpus by name, sorted, of a `split` if it is given. Folders to `leave_out` are not searched.

    Messages name `key`. Raises DataError for a path that does not exist, a file of another kind, a folder without files
    to read, of several configurations, or of several splits of which none is given, and a file whose reader is not
    installed.
    """
    root = find_root(path, key=key)
    split_key = f"{key.removesuffix('path')}split"
    walked = {root.name: root}
    if not root.is_file():
        walked = dict(_walk_sources(root, stdlib=path == STDLIB, leave_out=leave_out))
    names = _names_to_read(walked)
    if tables := [name for name in names if name.endswith(_TABLES)]:
        check_one_configuration(root, tables, path, key)
    rows = [name for name in names if name.endswith(_ROWS)]
    if split:
        splits = find_splits(root, rows or names)
        by_part = {part.name: splits.find_names(part.name) for part in read_split_parts(split, split_key)}
        if absent := [name for name, of_part in by_part.items() if not of_part]:
            raise DataError(f"{split_key} is {split!r}, and {path!r} has no {absent[0]}; it has {splits.counts}")
        names = sorted({name for of_part in by_part.values() for name in of_part})
    elif rows and (splits := find_splits(root, rows)).are_mixed:
        reason = "as it says itself" if splits.is_declared else "by the names of its files"
        raise DataError(
            f"{key} {path!r} holds several splits of a data set, {reason}: {splits.counts}; give one "
            f'with {split_key}, as {split_key} = "train" ("train[:100]" for some rows, "train+test" for two)'
        )
    if not names:
        raise DataError(f"{key} {path!r} holds no file of {_KINDS}; give a folder that does")
    table = next((name for name in names if name.endswith((ZSTD, ".parquet", ".arrow"))), None)
    if table is not None:
        import_reader("pyarrow.parquet", table)  # before a file is read
    return {name: walked[name] for name in names}


def find_rows(
    path: str, split: str, *, leave_out: Sequence[Path] = (), key: str = "data.path"
) -> Iterator[CorpusFile]:
    """Yield the files of the parts of a split, in order, each with the rows that are taken; numbers count from 0.

    Files are read to count their rows where a part takes some. Raises DataError as `find_files` does, and for no row.
    """
    for part in read_split_parts(split, f"{key.removesuffix('path')}split") if split else [SplitPart("")]:
        found = find_files(path, split=part.name, leave_out=leave_out, key=key)
        files = [CorpusFile(0, name, file) for name, file in found.items()]
        if not part.start and not part.stop:
            yield from files
            continue
        counts = [sum(map(count_rows, file.read_chunks(MAX_TEXT_BYTES))) for file in files]
        first, stop = part.bounds(sum(counts))
        if first >= stop:
            raise DataError(f"{key} {path!r}: {split!r} takes no row of {sum(counts):,} in {part.name}")
        for file, before, count in zip(files, accumulate(counts, initial=0), counts, strict=False):
            rows = max(first - before, 0), min(stop - before, count)
            if rows[0] < rows[1]:
                yield replace(file, rows=rows)


def find_root(path: str, *, key: str = "data.path") -> Path:
    """Find the folder or file of a corpus. Raises DataError if it does not exist or is a file of another kind."""
    root = (
        Path(sysconfig.get_path("stdlib"))
        if path == STDLIB
        else Path(find_local_path(path, key, "dataset")).expanduser()
    )
    if not root.exists():
        raise DataError(f"{key} {path!r} does not exist; give {STDLIB!r}, or a folder or file of {_KINDS}")
    if root.is_file() and not root.name.endswith(SUFFIXES):
        raise DataError(f"{key} {path!r} ends in {root.suffix!r}; a file must be one of {_KINDS}, in small letters")
    return root


def files_of_other_kinds(path: str, *, leave_out: Sequence[Path] = ()) -> dict[str, int]:
    """Count the files of a folder that are not read, by the endings of their names, the most frequent first."""
    root = find_root(path)
    if not root.is_dir():
        return {}
    walked = dict(_walk_sources(root, stdlib=False, leave_out=leave_out))
    walked.pop(SAVED_SPLITS, None)
    others = (walked[name] for name in walked.keys() - set(_names_to_read(walked)))
    return dict(Counter(file.suffix or file.name for file in sorted(others)).most_common())


def _names_to_read(names: Iterable[str]) -> list[str]:
    """Sorted; beside rows, what describes a data set (README.md) is no row."""
    read = sorted(name for name in names if name.endswith(SUFFIXES))
    has_rows = any(name.endswith(_TABLES) for name in read)
    return [name for name in read if not (has_rows and _NOTICE.fullmatch(name.rpartition("/")[-1].lower()))]


def _walk_sources(root: Path, *, stdlib: bool, leave_out: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """Yield the files of a folder that may be sources, with their names in it; hidden ones are none.

    In a saved data set only files of rows count. In Python's standard library only modules do, except the one that
    describes the build of this Python, which differs between machines.
    """
    skipped_names = {"__pycache__"} | (_NOT_STDLIB if stdlib else set())
    skipped_folders = {folder.resolve() for folder in leave_out}

    def is_left_out(path: Path) -> bool:
        return path.name in skipped_names or path.name[0] == "." or path.resolve() in skipped_folders

    for directory, names in _walk_folders(root, is_left_out):
        for name in _files_with_rows(directory / _STATE, names) if _STATE in names else names:
            is_module = name.endswith(".py") and not name.startswith("_sysconfigdata")
            if is_module if stdlib else name[0] != ".":
                yield (directory / name).relative_to(root).as_posix(), directory / name


def _walk_folders(root: Path, is_left_out: Callable[[Path], bool]) -> Iterator[tuple[Path, list[str]]]:
    """A folder is known by its device and inode, as links may form a circle; links to folders are followed last."""
    seen = set[tuple[int, int]]()
    roots = [root]
    for walk_root in roots:  # links that are met on the way are appended
        for folder, subfolders, names in os.walk(walk_root, onerror=_raise_unreadable):
            directory = Path(folder)
            stat = Path(folder).stat()
            identity = (stat.st_dev, stat.st_ino)
            if identity in seen:
                subfolders.clear()  # os.walk enters only folders that are left in this list
                continue
            seen.add(identity)
            inside = [name for name in subfolders if not is_left_out(directory / name)]
            links = [name for name in inside if (directory / name).is_symlink()]
            roots += [directory / name for name in sorted(links)]
            subfolders[:] = [name for name in inside if name not in links]
            yield directory, names


def _raise_unreadable(error: OSError) -> None:
    raise DataError(f"cannot list the folder {error.filename} of the corpus: {error.strerror}") from error


def _files_with_rows(state: Path, names: list[str]) -> list[str]:
    """Return the names of the files with rows in a folder with this file `state`; all `names` if it is not of datasets.

    `save_to_disk` of datasets lists them there: `map`, `shuffle` and `select` may leave others. Raises DataError for a
    selection of rows by indices, and for a listed file that is gone.
    """
    try:
        settings = read_json(state)
        parts = [str(part["filename"]) for part in settings["_data_files"]]
    except (ValueError, KeyError, TypeError):
        return names
    if settings.get("_indices_data_files"):
        raise DataError(
            f"{state.parent} holds a selection of rows, as datasets before 2.0 saved it; load it and save it again: "
            "datasets.load_from_disk(…).flatten_indices().save_to_disk(…)"
        )
    if absent := [part for part in parts if Path(part).name != part or not (state.parent / part).is_file()]:
        raise DataError(
            f"{state} names {plural(len(parts), 'file')}, of which {len(absent)} are not in its folder: "
            f"{', '.join(absent[:3])}; save the data set again"
        )
    return parts


FIRST_ROWS = 20
FIRST_FILES = 5
SAMPLE_CHARACTERS = 4_000_000  # at most so many train the byte-pair tokenizer


def kind_of_files(files: Sequence[CorpusFile], data: DataConfig) -> Kind:
    """Return the kind of rows of these files, by the first rows of the first files; "text" if there are no rows.

    Where bad rows are skipped, they and rows of no kind do not count; else they raise DataError.
    """
    rows = list[Row]()
    bad = list[BadRow]()
    for file in files[:FIRST_FILES]:
        for row in islice(rows_of_file(file, data.max_text_bytes), FIRST_ROWS):
            if data.rename_columns and not isinstance(row, BadRow):
                row = rename_columns(row, data.rename_columns)
            if data.on_bad_row == "skip" and not _tells_kind(row):
                continue
            if isinstance(row, BadRow):
                bad.append(row)  # raised below: first rows of other files are read, as their kind may differ
                break
            rows.append(row)
    kind = common_kind(rows) if rows else "text"  # different kinds are reported before a bad row
    if bad:
        raise DataError(f"{bad[0].where}: {bad[0].reason}")
    return kind


def texts_for_tokenizer(files: Sequence[CorpusFile], most_bytes: int = MAX_TEXT_BYTES) -> Iterator[str]:
    """Yield texts to train a tokenizer on, up to SAMPLE_CHARACTERS, of files in a fixed shuffled order."""
    budget = SAMPLE_CHARACTERS
    order = np.argsort(np.random.PCG64(0).random_raw(len(files)), kind="stable")
    for number in order:
        for row in rows_of_file(files[number], most_bytes):
            text = "" if isinstance(row, BadRow) else _texts_in(row.values)
            yield text[:budget]
            budget -= len(text)
            if budget <= 0:
                return


def text_sizes(files: Sequence[CorpusFile], most_bytes: int = 0) -> Iterator[int]:
    """Yield the bytes of the texts of each row. Raises DataError for a bad one, as of over `most_bytes` (0: any)."""
    for file in files:
        for row in rows_of_file(file, most_bytes):
            if isinstance(row, BadRow):
                raise DataError(f"{row.where}: {row.reason}")
            yield len(_texts_in(row.values).encode())


def rows_of_file(file: CorpusFile, most_bytes: int) -> Iterator[Row | BadRow]:
    """Yield the rows of a file; a text that is not UTF-8, which is a whole file, has none."""
    for chunk in file.read_chunks(most_bytes):
        try:
            for placed in chunk_rows(chunk):
                yield placed.row
        except UnicodeDecodeError:
            return


def _tells_kind(row: Row | BadRow) -> bool:
    try:
        return isinstance(row, Row) and bool(row_kind(row))
    except DataError:
        return False


def _texts_in(value: Any) -> str:
    """Lone surrogates, which no tokenizer can read, are left out."""
    if isinstance(value, dict):
        text = value.get("text")
        return _texts_in(text) if isinstance(text, str) else "\n".join(filter(None, map(_texts_in, value.values())))
    if isinstance(value, list):
        return "\n".join(_texts_in(inner) for inner in value if isinstance(inner, dict | str))
    return value.encode(errors="ignore").decode() if isinstance(value, str) else ""
