"""Which files a corpus has: those of the running Python's standard library, a file, or those of a folder.

Files are taken in the order of their names, so that a corpus is the same on every machine that holds the same files.
Symbolic links are followed; a folder to which several lead is read once. Nothing is downloaded, and no row is read here
(`formats/`).
"""

import json
import os
import sysconfig
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from longspan.corpus.formats.row_file import SUFFIXES
from longspan.errors import DataError, counted

STDLIB = "stdlib"
_SPLITS, _STATE = "dataset_dict.json", "state.json"  # which save_to_disk of the package datasets writes
# Not prose that a person wrote: tests, other people's packages, tables that scripts generated.
_NOT_STDLIB = {"site-packages", "dist-packages", "lib-dynload", "test", "tests", "idle_test", "encodings", "pydoc_data"}


def find_files(path: str, *, leave_out: Sequence[Path] = (), key: str = "data.path") -> dict[str, Path]:
    """The files of a corpus by name, sorted. Folders to `leave_out` are not searched; messages name `key`.

    Raises DataError for a path that does not exist, a file of another kind, and a folder without a readable file.
    """
    root = find_root(path, key=key)
    if root.is_file():
        return {root.name: root}
    walk = _walk(root, stdlib=path == STDLIB, leave_out=leave_out)
    files = dict(sorted((name, file) for name, file in walk if name.endswith(SUFFIXES)))
    if not files:
        instead = next(filter(None, map(_instead_of, files_of_other_kinds(path, leave_out=leave_out))), "")
        raise DataError(f"{key} {path!r} holds no file of {_kinds()}{instead}; give a folder that does")
    return files


def find_root(path: str, *, key: str = "data.path") -> Path:
    """The folder or file of a corpus. Raises DataError where it does not exist, or is a file of another kind."""
    root = Path(sysconfig.get_path("stdlib")) if path == STDLIB else Path(path).expanduser()
    if not root.exists():
        raise DataError(f"{key} {path!r} does not exist; give {STDLIB!r}, or a folder or file of {_kinds()}")
    if root.is_file() and not root.name.endswith(SUFFIXES):
        raise DataError(
            f"{key} {path!r} ends in {root.suffix!r}; a file must be one of {_kinds()}{_instead_of(root.name)}"
        )
    return root


def files_of_other_kinds(path: str, *, leave_out: Sequence[Path] = ()) -> dict[str, int]:
    """How many files of a corpus's folder are not read, by the ending of their names, the most frequent first."""
    root = Path(path).expanduser()
    if path == STDLIB or not root.is_dir():
        return {}
    names = [file for _, file in _walk(root, stdlib=False, leave_out=leave_out) if not file.name.endswith(SUFFIXES)]
    return dict(Counter(file.suffix or file.name for file in names).most_common())


def _walk(root: Path, *, stdlib: bool, leave_out: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    """The files of a folder that may be sources, and their names in it."""
    hidden = {"__pycache__"} | (_NOT_STDLIB if stdlib else set())
    skip = {folder.resolve() for folder in leave_out}
    for here, names in _folders(
        root, lambda path: path.name in hidden or path.name[0] == "." or path.resolve() in skip
    ):
        if _SPLITS in names:
            raise DataError(f"{here} holds several splits of a data set; give one of {_splits(here)}")
        for name in _parts(here / _STATE, names) if _STATE in names else names:
            is_source = name.endswith(".py") and not name.startswith("_sysconfigdata") if stdlib else name[0] != "."
            if is_source:
                yield (here / name).relative_to(root).as_posix(), here / name


def _folders(root: Path, is_left_out: Callable[[Path], bool]) -> Iterator[tuple[Path, list[str]]]:
    """A folder and those in it, with the names of their files; each once, those behind symbolic links last."""
    seen, places = set[tuple[int, int]](), [root]
    for place in places:
        for folder, folders, names in os.walk(place, onerror=_raise_unreadable):
            here, stat = Path(folder), Path(folder).stat()
            inside = [] if (stat.st_dev, stat.st_ino) in seen else [n for n in folders if not is_left_out(here / n)]
            places += [here / name for name in sorted(inside) if (here / name).is_symlink()]
            folders[:] = [name for name in inside if not (here / name).is_symlink()]
            if (stat.st_dev, stat.st_ino) not in seen:
                yield here, names
            seen.add((stat.st_dev, stat.st_ino))


def _raise_unreadable(error: OSError) -> None:
    raise DataError(f"cannot list the folder {error.filename} of the corpus: {error.strerror}") from error


def _parts(state: Path, names: list[str]) -> list[str]:
    """Of the `names` in the folder of a data set that datasets saved those of its rows; in another folder all.

    `map`, `shuffle` and `select` leave files of their own there.
    """
    try:
        settings = json.loads(state.read_text(encoding="utf-8"))
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
            f"{state} names {counted(len(parts), 'file')}, of which {len(absent)} are not in its folder: "
            f"{', '.join(absent[:3])}; save the data set again"
        )
    return parts


def _splits(root: Path) -> str:
    """The folders of the splits of a data set."""
    try:
        names: list[str] = json.loads((root / _SPLITS).read_text(encoding="utf-8"))["splits"]
        return ", ".join(str(root / name) for name in names)
    except (ValueError, KeyError, TypeError) as error:
        raise DataError(f"{root / _SPLITS} does not name its splits: {type(error).__name__}: {error}") from error


def _instead_of(name: str) -> str:
    """What to do with a file of which the ending of the name is nearly one that is read."""
    if name.lower().endswith(SUFFIXES):
        return ", in small letters"
    return "; rows of JSON are read one object a line, as .jsonl" if name.lower().endswith(".json") else ""


def _kinds() -> str:
    return " ".join(SUFFIXES)
