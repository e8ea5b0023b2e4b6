"""`longspan examples`: lists the examples that come with the package, and copies one, a folder of them, or all."""

import difflib
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import longspan
from longspan.cli.flags import Word, parse_flags
from longspan.errors import ConfigError, RunFolderError, plural
from longspan.files import as_json
from longspan.plain_text import nearest_hint, nearest_name

ALL = "all"


@dataclass(frozen=True)
class ExamplesFlags:
    """List the examples that come with longspan, or copy them: configurations, recipes, programs, a Slurm script.

    The commands in them name paths in examples/, so they are copied to a folder of that name in the current folder.
    """

    name: Annotated[str, Word("[NAME]")] = ""
    """A file or folder of the list, such as first.toml or recipes, or all of them: all. Without it they are listed."""
    folder: Annotated[str, Word("[FOLDER]")] = "examples"
    """Where to copy them; it is made if it is not there."""
    overwrite: bool = False
    """Replace files of these names; other files in the folder stay."""
    json: bool = False
    """Print the list, or the files that were written, as one JSON object."""


def main(argv: Sequence[str]) -> int:
    """Run the verb."""
    flags = parse_flags(ExamplesFlags, argv, "longspan examples")
    root = examples_folder()
    files = [path for path in root.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    paths = sorted(files, key=lambda path: (path.parent != root, path.relative_to(root).as_posix()))
    if not flags.name:
        names = [path.relative_to(root).as_posix() for path in paths]
        print(as_json({"examples": names}) if flags.json else "\n".join(names))
        return 0
    chosen = _choose_examples(flags.name, root, paths)
    folder = Path(flags.folder)
    written = [folder / path.relative_to(root) for path in chosen]
    if (older := [copy for copy in written if copy.exists()]) and not flags.overwrite:
        raise RunFolderError(
            f"{older[0]} is there{f', and {len(older) - 1} more' if older[1:] else ''}; name another folder, or "
            "replace files with --overwrite"
        )
    try:
        for path, copy in zip(chosen, written, strict=True):
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
            copy.chmod(path.stat().st_mode & 0o777 | 0o200)  # installed files may be read-only, copies are edited
    except OSError as error:
        raise RunFolderError(f"cannot copy examples to {folder}: {error.strerror} ({error.filename})") from error
    if flags.json:
        print(as_json({"written": [str(path) for path in written]}))
    else:
        print("\n".join(map(str, written)))
        print(f"{plural(len(written), 'file')} written", file=sys.stderr)
    return 0


def examples_folder() -> Path:
    """Return the folder of the examples, which is in the package, or next to `src` of a checkout.

    Raises ConfigError where neither has it.
    """
    package = Path(longspan.__file__).parent
    for folder in (package / "_examples", package.parents[1] / "examples"):
        if (folder / "first.toml").is_file():
            return folder
    raise ConfigError(f"there are no examples with the longspan in {package}; install its wheel, or use a checkout")


def _choose_examples(name: str, root: Path, paths: Sequence[Path]) -> list[Path]:
    name = name.removeprefix("examples/").rstrip("/")
    choice = [path for path in paths if name == ALL or (root / name) in (path, *path.parents)]
    if not name or not choice or (root / name) == root:
        names = [path.relative_to(root) for path in paths]
        folders = {parent.as_posix() for path in names for parent in path.parents if parent != Path()}
        known_names = [*sorted(folders), *(path.as_posix() for path in names)]
        hint = nearest_hint(name, [ALL, *known_names])
        if nearest_name(name, [ALL, *known_names]) is None:  # the hint would be the whole list
            nearest = difflib.get_close_matches(name, known_names, n=3, cutoff=0.0)
            hint = f"the nearest are {', '.join(nearest)}; longspan examples lists all"
        raise ConfigError(f"longspan has no example {name!r}: {hint}")
    return choice
