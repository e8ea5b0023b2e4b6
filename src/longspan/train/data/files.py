"""Which files a corpus has: those of the running Python's standard library, a file, or those of a folder.

Files are taken in the order of their names, so that a corpus is the same on every machine that holds the same files.
Nothing is downloaded, and nothing is read here (`formats/`).
"""

import json
import os
import sysconfig
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

from longspan.errors import DataError
from longspan.train.data.formats.row_file import SUFFIXES

STDLIB = "stdlib"
_SPLITS = "dataset_dict.json"  # what save_to_disk of the package datasets writes for a DatasetDict
# Not prose that a person wrote: tests, other people's packages, tables that scripts generated.
_NOT_STDLIB = {"site-packages", "dist-packages", "lib-dynload", "test", "tests", "idle_test", "encodings", "pydoc_data"}


def find_files(path: str, *, leave_out: Sequence[Path] = (), key: str = "data.path") -> dict[str, Path]:
    """The files of a corpus by name, sorted. Folders to `leave_out` are not searched; messages name `key`.

    Raises DataError for a path that does not exist, a file of another kind, and a folder without a readable file.
    """
    root = Path(sysconfig.get_path("stdlib")) if path == STDLIB else Path(path).expanduser()
    if not root.exists():
        raise DataError(f"{key} {path!r} does not exist; give {STDLIB!r}, or a folder or file of {_kinds()}")
    if root.is_file():
        if not root.name.endswith(SUFFIXES):
            raise DataError(f"{key} {path!r} ends in {root.suffix!r}; a file must be one of {_kinds()}")
        return {root.name: root}
    if (root / _SPLITS).is_file():
        raise DataError(f"{key} {path!r} holds several splits of a data set; give one of {_splits(root)}")
    walk = _walk(root, stdlib=path == STDLIB, leave_out=leave_out)
    files = dict(sorted((name, file) for name, file in walk if name.endswith(SUFFIXES)))
    if not files:
        raise DataError(f"{key} {path!r} holds no file of {_kinds()}; give a folder that does")
    return files


def files_of_other_kinds(path: str, *, leave_out: Sequence[Path] = ()) -> dict[str, int]:
    """How many files of a corpus's folder are not read, by the ending of their names, the most frequent first."""
    root = Path(path).expanduser()
    if path == STDLIB or not root.is_dir():
        return {}
    names = [file for _, file in _walk(root, stdlib=False, leave_out=leave_out) if not file.name.endswith(SUFFIXES)]
    if (root / "state.json").is_file():  # written by save_to_disk of the package datasets, beside the rows
        names = [file for file in names if file.name not in ("state.json", "dataset_info.json")]
    return dict(Counter(file.suffix or file.name for file in names).most_common())


def _walk(root: Path, *, stdlib: bool, leave_out: Sequence[Path]) -> Iterator[tuple[str, Path]]:
    hidden = {"__pycache__"} | (_NOT_STDLIB if stdlib else set())
    skip = {folder.resolve() for folder in leave_out}
    for folder, folders, names in os.walk(root):
        here = Path(folder)
        folders[:] = [d for d in folders if d not in hidden and d[0] != "." and (here / d).resolve() not in skip]
        for name in names:
            is_source = name.endswith(".py") and not name.startswith("_sysconfigdata") if stdlib else name[0] != "."
            if is_source:
                yield (here / name).relative_to(root).as_posix(), here / name


def _splits(root: Path) -> str:
    """The folders of the splits of a data set."""
    names: list[str] = json.loads((root / _SPLITS).read_text(encoding="utf-8")).get("splits", [])
    return ", ".join(str(root / name) for name in names)


def _kinds() -> str:
    return " ".join(SUFFIXES)
