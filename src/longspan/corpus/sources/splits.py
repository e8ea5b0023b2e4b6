"""Splits and configurations of a data set, as the package datasets finds them: by names of files, or by its README.md.

`data.split` names a split, and perhaps some of its rows. Which files a folder has is in `find_files.py`.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterator
from contextlib import suppress
from fnmatch import filter as match_names
from pathlib import Path
from posixpath import commonpath, dirname
from typing import Any, NamedTuple

from longspan.errors import DataError, plural

# `save_to_disk` of datasets writes this file beside a folder of each split.
SAVED_SPLITS = "dataset_dict.json"
_CARD = "README.md"
_WORD = "train(?:ing)?|test(?:ing)?|validation|valid|val|dev|eval(?:uation)?|held-?out|holdout"
_SPLIT = re.compile(rf"(?:^|[-._ /0-9])((?:{_WORD})(?:_(?:sft|gen|prefs))?)(?=[-._ /0-9]|$)")  # the last one counts
# Before the number of a file stands the whole name of a split.
_SHARD = re.compile(rf"(?:(?:^|(?<=/))(?={_WORD})|(?<=^data/)|(?<=/data/))(\w+(?:\.\w+)*)-\d{{5}}-of-\d{{5}}[^/]*$")
_SAME = {"training": "train", "testing": "test", "eval": "test", "evaluation": "test"}
_SAME |= dict.fromkeys(("valid", "val", "dev"), "validation")
_ROWS = r"(?:-?\d+)?"
_SHARE = r"(?:-?(?:100|\d?\d)%)?"
_PART = re.compile(
    rf"(?P<name>[\w.-]+)(?:\[(?=(?:{_ROWS}:{_ROWS}|{_SHARE}:{_SHARE})\])(?P<start>[^:]*):(?P<stop>[^]]*)\])?"
)


class SplitPart(NamedTuple):
    """A split, and which of its rows are taken, as texts: "", "100", "-100" from the end, or "10%"."""

    name: str
    start: str = ""
    stop: str = ""

    def bounds(self, rows: int) -> tuple[int, int]:
        """Return the first row and the one after the last, of so many; a share is rounded as datasets does it."""
        return _find_end(self.start or "0", rows), _find_end(self.stop or str(rows), rows)


def _find_end(text: str, rows: int) -> int:
    """An end is "100", "-100" from the end, or "10%"."""
    end = round(int(text[:-1]) * rows / 100) if text.endswith("%") else int(text)
    return min(max(end + rows, 0) if end < 0 else end, rows)


def read_split_parts(split: str, key: str) -> list[SplitPart]:
    """Read a value of `data.split`, which errors call `key`, into its parts in their order.

    Raises DataError, with the grammar, for one that is none.
    """
    parts = [match for text in split.split("+") if (match := _PART.fullmatch(text.strip()))]
    # One of the texts around a + is no part.
    if len(parts) <= split.count("+"):
        raise DataError(
            f'{key} is {split!r}; give a split of the data set, as "train", or some of its rows, as "train[:100]", '
            '"train[-50:]" or "train[10%:90%]", or several with + between them, as "train+validation"'
        )
    return [SplitPart(**part.groupdict("")) for part in parts]


class Splits(NamedTuple):
    """The split of each file that has one, and whether the data set itself says so, not only names of files."""

    by_name: dict[str, str]
    is_declared: bool

    @property
    def counts_text(self) -> str:
        """The splits and how many files each has, for messages, training first."""
        counts = sorted(Counter(self.by_name.values()).items(), key=lambda item: not item[0].startswith("train"))
        return ", ".join(f"{split} ({plural(count, 'file')})" for split, count in counts)

    @property
    def are_mixed(self) -> bool:
        """Whether there are several splits. Where only names of files say so, one of them must be one to train on:
        files may be called test for other reasons.
        """
        splits = {_SAME.get(split, split) for split in self.by_name.values()}
        return len(splits) > 1 and (self.is_declared or any(split.startswith("train") for split in splits))

    def find_names(self, split: str) -> list[str]:
        """Return the names of the files of a split; "val" and "dev", say, are one."""
        return [name for name, other in self.by_name.items() if _SAME.get(other, other) == _SAME.get(split, split)]


def find_splits(root: Path, names: Collection[str]) -> Splits:
    """Find the split of each of these files of a data set in `root`; where none names any, all are "train".

    In a saved data set it is the name of the folder. Else it is what README.md says of the file, or what stands before
    the number of a shard, or the last word in the name that is one of a split.
    """
    if (root / SAVED_SPLITS).is_file():
        return Splits({name: name.partition("/")[0] for name in names if "/" in name}, is_declared=True)
    declared = {
        name: split for files in _card_files(root, names).values() for name, split in files.items() if split
    }
    by_name = dict[str, str]()
    for name in names:
        shard = _SHARD.search(name.lower())
        words = ["", *_SPLIT.findall(name.lower())]
        if split := declared.get(name) or (shard[1] if shard else words[-1]):
            by_name[name] = split
    return Splits(by_name or dict.fromkeys(names, "train"), is_declared=bool(declared))


def check_one_configuration(root: Path, names: Collection[str], path: str, key: str) -> None:
    """Raise DataError for files of several configurations, by the README.md of a data set or by its folders.

    Folders beside each other with files of one name are configurations, unless only numbers or names of splits tell
    them apart. If one configuration holds the files of all the others, there is nothing to choose.
    """
    configurations = {name: [*files] for name, files in _card_files(root, names).items()}
    reason = f"by its {_CARD}"
    if not configurations:
        configurations = _sibling_folders(names)
        reason = "by folders that hold files of one name"
    every_name = {name for files in configurations.values() for name in files}
    if any(every_name == {*files} for files in configurations.values()) or not configurations:
        return
    counts = ", ".join(f"{name} ({plural(len(files), 'file')})" for name, files in configurations.items())
    folders = [commonpath(map(dirname, files)) for files in configurations.values()]
    place = f", such as {path.rstrip('/')}/{folders[0]}" if len({*folders}) == len(folders) else ""
    raise DataError(
        f"{key} {path!r} holds several configurations of a data set, {reason}: {counts}; give the folder or file of "
        f"one{place}; several are given as data.sources, and files that belong together have names of their own"
    )


def _sibling_folders(names: Collection[str]) -> dict[str, list[str]]:
    """The first folders beside each other that hold files of one name. Folders that only numbers and names of splits
    tell apart do not count."""
    alike = defaultdict[tuple[str, str], set[str]](set)  # folders, by what stands before and behind them in names
    for name in names:
        parts = name.split("/")
        for i, folder in enumerate(parts[:-1]):
            alike["".join(f"{part}/" for part in parts[:i]), "/".join(parts[i + 1 :])].add(folder)
    for (above, _), siblings in alike.items():
        if len({re.sub(r"\d+", "", _SPLIT.sub("", folder.lower())) for folder in siblings}) > 1:
            folders = [above + folder for folder in sorted(siblings)]
            return {folder: [name for name in names if name.startswith(f"{folder}/")] for folder in folders}
    return {}


def _card_files(root: Path, names: Collection[str]) -> dict[str, dict[str, str]]:
    """A split that is not named is ""."""
    if not names or not (root / _CARD).is_file():
        return {}
    from huggingface_hub.repocard import metadata_load

    configurations = dict[str, dict[str, str]]()
    with suppress(Exception):  # a README.md need not be a data set's, and YAML's errors are of many kinds
        for entry in (metadata_load(root / _CARD) or {}).get("configs", ()):
            folder = str(entry.get("data_dir") or "").strip("/")
            patterns = _card_patterns(entry.get("data_files", "**"))
            pairs = [(f"{folder}/{pattern}".lstrip("/"), split) for pattern, split in patterns]
            files = {name: split for pattern, split in pairs for name in match_names(names, pattern)}
            if files:
                configurations[str(entry.get("config_name", "default"))] = files
    return configurations


def _card_patterns(entry: Any) -> Iterator[tuple[str, str]]:
    if isinstance(entry, str):
        yield entry.removeprefix("./").replace("**/", "*"), ""
    elif isinstance(entry, list):
        for item in entry:
            yield from _card_patterns(item)
    else:
        yield from ((pattern, entry["split"]) for pattern, _ in _card_patterns(entry["path"]))
