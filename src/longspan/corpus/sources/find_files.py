"""Finds the source files of a corpus: a file, the files of a folder, or the standard library of the running Python.

Files are in the order of their names, so that equal files give an equal corpus. Symbolic links are followed.
"""

import os
import re
import sysconfig
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from pathlib import Path

from longspan.config.sections import MAX_TEXT_BYTES
from longspan.corpus.sources.row_chunks import RowChunk, count_rows, slice_chunks
from longspan.corpus.sources.row_files import SUFFIXES, ZSTD, JsonFile, import_reader, make_row_file
from longspan.corpus.sources.splits import (
    SAVED_SPLITS,
    SplitPart,
    check_one_configuration,
    find_splits,
    read_split_parts,
)
from longspan.errors import DataError, plural
from longspan.files import read_json
from longspan.hub import find_local_path


@dataclass(frozen=True)
class CorpusFile:
    """A file to read: the number of its source, its name in the corpus, its path, and which rows (None: all)."""

    source: int
    name: str
    path: Path
    rows: tuple[int, int] | None = None  # the first, and the one after the last

    def read_chunks(self, most_bytes: int) -> Iterator[RowChunk]:
        """Yield the chunks of the rows that are taken; a row of more than `most_bytes` (0: any) is a bad one."""
        chunks = make_row_file(self.name, self.path, most_bytes).read_chunks()
        return chunks if self.rows is None else slice_chunks(chunks, *self.rows)


STDLIB = "stdlib"
_KINDS = " ".join(SUFFIXES)
# Read from a folder only where it has no other files to read: there they may be settings, or figures.
_READ_ALONE = (".json", ".json.gz", ".json.zst", ".csv")
_TABLES = (".jsonl", ".jsonl.gz", ".jsonl.zst", ".parquet", ".arrow", *_READ_ALONE)  # files of many rows
_ROWS = (*_TABLES, ".txt")  # files that may be splits; a train.py beside a test.py is code
_NOTICE = re.compile(r"(readme|licen[cs]e|notice|citation|changelog|copying)([-._ ].*)?")
# `save_to_disk` of the package datasets writes this file.
_STATE = "state.json"
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

    Messages name `key`. Raises DataError for a path that does not exist, a file of another kind, and a file whose
    reader is not installed; also for a folder without files to read, with several configurations, or with several
    splits if no `split` is given.
    """
    root = find_root(path, key=key)
    walked = {root.name: root}
    names = [root.name]
    if not root.is_file():
        walked = dict(_walk_sources(root, stdlib=path == STDLIB, leave_out=leave_out))
        names = _names_to_read(walked)
    if tables := [name for name in names if name.endswith(_TABLES)]:
        check_one_configuration(root, tables, path, key)
    split_key = f"{key.removesuffix('path')}split"
    row_files = [name for name in names if name.endswith(_ROWS)]
    if split:
        splits = find_splits(root, row_files or names)
        names_by_part = {part.name: splits.find_names(part.name) for part in read_split_parts(split, split_key)}
        if absent := [name for name, part_names in names_by_part.items() if not part_names]:
            raise DataError(
                f"{split_key} is {split!r}, and {path!r} has no {absent[0]}; it has {splits.counts_text}"
            )
        names = sorted({name for part_names in names_by_part.values() for name in part_names})
    elif row_files and (splits := find_splits(root, row_files)).are_mixed:
        reason = "as it says itself" if splits.is_declared else "by the names of its files"
        raise DataError(
            f"{key} {path!r} holds several splits of a data set, {reason}: {splits.counts_text}; give one "
            f'with {split_key}, as {split_key} = "train" ("train[:100]" for some rows, "train+test" for two)'
        )
    if not names:
        objects = "; its .json files hold no list of rows" if any(map(_is_json, walked)) else ""
        raise DataError(f"{key} {path!r} holds no file of {_KINDS}{objects}; give a folder that does")
    arrow_file = next((name for name in names if name.endswith((ZSTD, ".parquet", ".arrow"))), None)
    if arrow_file is not None:
        # A reader that is missing raises before a file is read.
        import_reader("pyarrow.parquet", arrow_file)
    return {name: walked[name] for name in names}


def find_rows(
    path: str, split: str, *, leave_out: Sequence[Path] = (), key: str = "data.path"
) -> Iterator[CorpusFile]:
    """Yield the files of the parts of a split, in order, each with the rows that are taken; its `source` is 0.

    Files are read to count their rows where a part takes only some. Raises DataError, while it is iterated, as
    `find_files` does, and for a part that takes no row.
    """
    for part in read_split_parts(split, f"{key.removesuffix('path')}split") if split else [SplitPart("")]:
        paths = find_files(path, split=part.name, leave_out=leave_out, key=key)
        files = [CorpusFile(0, name, file) for name, file in paths.items()]
        if not part.start and not part.stop:
            yield from files
            continue
        counts = [sum(map(count_rows, file.read_chunks(MAX_TEXT_BYTES))) for file in files]
        first, stop = part.bounds(sum(counts))
        if first >= stop:
            raise DataError(f"{key} {path!r}: {split!r} takes no row of {sum(counts):,} in {part.name}")
        for file, before, count in zip(files, accumulate(counts, initial=0), counts, strict=False):
            # The rows count in this file, before which there are `before` rows.
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


def count_files_of_other_kinds(path: str, *, leave_out: Sequence[Path] = ()) -> dict[str, int]:
    """Count the files of a folder that are not read, by the endings of their names, the most frequent first.

    In the standard library only modules are meant to be read, so that nothing is counted there.
    """
    root = find_root(path)
    if path == STDLIB or not root.is_dir():
        return {}
    walked = dict(_walk_sources(root, stdlib=False, leave_out=leave_out))
    walked.pop(SAVED_SPLITS, None)
    others = (walked[name] for name in walked.keys() - {*_names_to_read(walked)})
    return dict(Counter(file.suffix or file.name for file in sorted(others)).most_common())


def _names_to_read(files: Mapping[str, Path]) -> list[str]:
    """Files that describe a data set (README.md) are left out beside files of rows. A .json or .csv is read where there
    is nothing else to read, and a .json only if it holds rows."""
    readable = sorted(name for name in files if name.endswith(SUFFIXES))
    described = [name for name in readable if not _NOTICE.fullmatch(name.rpartition("/")[-1].lower())]
    if others := [name for name in described if not name.endswith(_READ_ALONE)]:
        has_rows = any(name.endswith(_TABLES) for name in others)
        return others if has_rows else [name for name in readable if not name.endswith(_READ_ALONE)]
    rows = [name for name in described if not _is_json(name) or _has_rows(name, files[name])]
    return rows or [name for name in readable if name not in described]


def _has_rows(name: str, path: Path) -> bool:
    # A pipe is not opened, as this would wait for its other end.
    return path.is_file() and JsonFile(name, path, MAX_TEXT_BYTES).has_rows()


def _is_json(name: str) -> bool:
    return name.endswith(_READ_ALONE) and not name.endswith(".csv")


def _walk_sources(root: Path, *, stdlib: bool, leave_out: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """In a saved data set only files of rows count. In Python's standard library only modules do, except the one that
    describes the build of this Python, which differs between machines."""
    skipped_names = {"__pycache__"} | (_NOT_STDLIB if stdlib else set())
    skipped_folders = {folder.resolve() for folder in leave_out}
    entered = set[tuple[int, int]]()  # device and inode of folders, as links may form a circle
    roots = [root]
    for walk_root in roots:  # links to folders, which are met on the way, are appended, and so followed last
        for folder, subfolders, names in os.walk(walk_root, onerror=_raise_unreadable):
            directory = Path(folder)
            stat = directory.stat()
            identity = (stat.st_dev, stat.st_ino)
            if identity in entered:
                subfolders.clear()  # os.walk enters only folders that are left in this list
                continue
            entered.add(identity)
            inside = [
                name
                for name in subfolders
                if name not in skipped_names
                and name[0] != "."
                and (directory / name).resolve() not in skipped_folders
            ]
            links = [name for name in inside if (directory / name).is_symlink()]
            roots += [directory / name for name in sorted(links)]
            subfolders[:] = [name for name in inside if name not in links]
            for name in _files_with_rows(directory / _STATE, names) if _STATE in names else names:
                is_module = name.endswith(".py") and not name.startswith("_sysconfigdata")
                may_be_source = is_module if stdlib else name[0] != "."
                if may_be_source:
                    yield (directory / name).relative_to(root).as_posix(), directory / name


def _raise_unreadable(error: OSError) -> None:
    raise DataError(f"cannot list the folder {error.filename} of the corpus: {error.strerror}") from error


def _files_with_rows(state: Path, names: list[str]) -> list[str]:
    """`save_to_disk` of datasets lists them there: `map`, `shuffle` and `select` may leave others. All `names` if
    `state` is not of datasets."""
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
