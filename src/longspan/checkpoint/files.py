"""The files of a checkpoint: where they are, whether they are complete by its manifest, and which one is the newest."""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from longspan.errors import CheckpointError
from longspan.files import parse_json, write_atomically, write_durably
from longspan.plain_text import LogLine


def require_local_root(root: str | Path) -> Path:
    """Return the folder of this name. Raises CheckpointError for the URL of a store."""
    if "://" in str(root):
        raise CheckpointError(
            f"{root} is no folder: mount the store on all machines, and name the folder of the mount"
        )
    return Path(root)


def checkpoints_root(run_dir: Path, named: str) -> Path:
    """Return `named` (`checkpoint.dir`), or the run's folder `checkpoints` if it is ""."""
    return require_local_root(named) if named else run_dir / "checkpoints"


def refuse_linked_root(root: Path) -> None:
    """Raise CheckpointError where the folder `checkpoints` of a run is a link: saves would be written, and what an
    interrupted one left removed, in the folder that it leads to.
    """
    if root.is_symlink():
        raise CheckpointError(
            f"{root} is a link, and nothing is written or removed through a link in a run's folder; set checkpoint.dir "
            f"to {root.resolve()}, or move that folder here"
        )


# What is written here has this format; longspan 0.2 wrote format 1.
FORMAT = 2
PARTIAL = ".partial"
_NAME = re.compile(rf"step-([0-9]+)(?:{re.escape(PARTIAL)})?")
MANIFEST = "manifest.json"
STATE = "state.json"
OPTIMIZER = "optimizer.json"
DAMAGED = "damaged.txt"
Digest = tuple[int, str]  # bytes, SHA-256
Check = Callable[[Path], object]  # raises CheckpointError


def checkpoint_path(root: Path, step: int) -> Path:
    """Return the folder of the checkpoint of a step."""
    return root / f"step-{step:06d}"


def step_of(path: Path) -> int:
    """Return the step of a checkpoint folder, complete or not; −1 for another name."""
    name = _NAME.fullmatch(path.name)
    return int(name[1]) if name else -1


def find_run_and_checkpoint(target: Path) -> tuple[Path, Path | None]:
    """Find the folder of the run that a path names, and the checkpoint where it names one (None: it names the run).
    Raises CheckpointError where either is missing.
    """
    is_checkpoint = step_of(target) >= 0
    run_dir = target.resolve().parent.parent if is_checkpoint else target
    if not target.is_dir():
        kind = "checkpoint" if is_checkpoint else "run"
        raise CheckpointError(f"there is no {kind} {target}; give a run's folder, or RUN/checkpoints/step-NNNNNN")
    if not (run_dir / "config.toml").is_file():
        raise CheckpointError(f"{run_dir} is not the folder of a run: it has no config.toml")
    return run_dir, target if is_checkpoint else None


def create_partial_folder(partial: Path) -> None:
    """Create an empty folder to write a checkpoint into; what an interrupted save left is removed."""
    remove_folder(partial)
    partial.mkdir(parents=True)


def partial_path(path: Path) -> Path:
    """Return the folder in which a checkpoint is written before it is complete."""
    return path.with_name(path.name + PARTIAL)


def is_unfinished(path: Path) -> bool:
    """Return whether a folder is of a save that did not end, by its name."""
    return path.name.endswith(PARTIAL)


def remove_folder(path: Path) -> None:
    """Remove a checkpoint, whole or not, as far as the disk lets it; of a link the link alone."""
    if path.is_symlink():
        with suppress(OSError):
            path.unlink()
    shutil.rmtree(path, ignore_errors=True)


def publish_checkpoint(
    partial: Path, path: Path, contents: Mapping[str, Mapping[str, Any]], digests: Iterable[Mapping[str, Digest]]
) -> int:
    """Write JSON files and, last, the manifest of a checkpoint into `partial`, durably; then name the folder `path`.

    `contents` are values by the name of their file, and `digests` those of the files that each rank wrote. Returns the
    bytes of the ranks' files.
    """
    files = {name: digest for rank_digests in digests for name, digest in rank_digests.items()}
    written = sum(size for size, _ in files.values())
    for name, values in contents.items():
        write_durably(partial / name, json.dumps(values, indent=1))
        files[name] = _file_digest(partial / name)
    write_durably(partial / MANIFEST, json.dumps({"format": FORMAT, "files": files}, indent=1))
    sync_to_disk(partial)
    remove_folder(path)  # a damaged checkpoint of the same step, over which rename would fail
    partial.rename(path)
    sync_to_disk(path.parent)
    return written


def remove_old_checkpoints(root: Path, keep: int, *, best: int = 0) -> None:
    """Remove unfinished checkpoints, and those older than the newest `keep` good ones (0: older ones stay).

    A checkpoint whose sizes are wrong, or that `write_damage_notes` marked, is no good one. That of step `best` stays.
    """
    remove_unfinished_saves(root)
    good = [path for path in complete_checkpoints(root) if _looks_good(path)]
    if keep and len(good) > keep:
        oldest = step_of(good[keep - 1])
        for path in (
            path for path in complete_checkpoints(root) if step_of(path) < oldest and step_of(path) != best
        ):
            remove_folder(path)


def remove_unfinished_saves(root: Path, log: LogLine = lambda _: None) -> None:
    """Remove what interrupted saves left, and log each; no other process may be saving there meanwhile."""
    for path in _list_checkpoints(root):
        if is_unfinished(path):
            log(f"removing {path}: its save was interrupted")
            remove_folder(path)


def complete_checkpoints(root: Path, log: LogLine = lambda _: None) -> list[Path]:
    """Return the checkpoints under `root` that were saved to the end, the newest first; unfinished ones are logged."""
    paths = _list_checkpoints(root)
    unfinished = [path for path in paths if is_unfinished(path)]
    for path in unfinished:
        log(f"skipping {path}: its save was interrupted")
    return [path for path in paths if path not in unfinished]


def newest_good_checkpoint(
    paths: Sequence[Path], check: Check, log: LogLine
) -> tuple[Path | None, dict[Path, str]]:
    """Return the first of `paths` (the newest first) that passes `check`, and what is wrong with each before it.

    Those before it are logged. For no paths, it is None. Raises CheckpointError if there are paths and none passes.
    """
    damage: dict[Path, str] = {}
    for path in paths:
        try:
            check(path)
        except CheckpointError as error:
            damage[path] = str(error)
            log(f"skipping a damaged checkpoint: {error}")
        else:
            return path, damage
    if damage:
        raise CheckpointError(
            f"no good checkpoint is left in {paths[0].parent}: {'; '.join(list(damage.values())[:3])}; "
            "restore one, or start in a new run.dir"
        )
    return None, damage


def write_damage_notes(damage: Mapping[Path, str], good: Path | None) -> None:
    """Write into each damaged checkpoint what is wrong, so that it does not count as good when older ones are removed.

    An earlier note in `good` is removed: its files may have been restored.
    """
    # On a full disk the run goes on.
    with suppress(OSError):
        if good is not None:
            (good / DAMAGED).unlink(missing_ok=True)
        for path, text in damage.items():
            write_atomically(path / DAMAGED, text + "\n")


def read_checked_manifest(path: Path) -> dict[str, Digest]:
    """Return the manifest of a checkpoint, the size and hash of each file by name, once the sizes of its files are
    compared with it.

    Raises CheckpointError for a file that is missing or of another size, and for another version of the format.
    """
    files = _read_manifest(path)
    for name, (size, _) in files.items():
        if not (path / name).is_file():
            raise CheckpointError(f"checkpoint {path}: {name} is missing")
        if (size_on_disk := (path / name).stat().st_size) != size:
            raise CheckpointError(f"checkpoint {path}: {name} has {size_on_disk} bytes, {size} were written")
    return files


def check_file_hashes(path: Path, files: Mapping[str, Digest]) -> None:
    """Raise CheckpointError for the first of these files of a checkpoint that holds other bytes than were written."""
    with ThreadPoolExecutor(max_workers=4) as pool:
        digests = pool.map(_file_digest, [path / name for name in files])
        for (name, (_, sha256)), (_, digest) in zip(files.items(), digests, strict=True):
            if digest != sha256:
                raise CheckpointError(f"checkpoint {path}: {name} has other contents than were written")


def read_state(path: Path) -> dict[str, Any]:
    """Read `state.json` of a checkpoint.

    Raises CheckpointError for a state that is missing or damaged, or of another format.
    """
    _read_manifest(path)
    state = read_checkpoint_json(path / STATE)
    tables = state.get("config", {})
    if type(state.get("step")) is not int or not isinstance(tables, dict):
        raise CheckpointError(f"checkpoint {path}: {STATE} is damaged (no number of steps, or no tables in config)")
    if section := next((name for name, table in tables.items() if not isinstance(table, dict)), ""):
        raise CheckpointError(f"checkpoint {path}: {STATE} is damaged ({section} of config is no table)")
    return state


def state_value(path: Path, state: Mapping[str, Any], *names: str) -> Any:
    """Return a value of the state of the checkpoint `path`, by the names of the tables that it is in and its own.

    Raises CheckpointError where the state lacks it.

    >>> state_value(path, {"config": {"train": {"steps": 8}}}, "config", "train", "steps")
    8
    """
    value: Any = state
    for name in names:
        if not isinstance(value, Mapping) or name not in value:
            raise CheckpointError(f"checkpoint {path}: {STATE} is damaged (no {'.'.join(names)})")
        value = value[name]
    return value


def _list_checkpoints(root: Path) -> list[Path]:
    """Newest first, unfinished ones too."""
    paths = [path for path in root.iterdir() if step_of(path) >= 0] if root.is_dir() else []
    return sorted(paths, key=lambda path: (step_of(path), path.name), reverse=True)


def _looks_good(path: Path) -> bool:
    """Sizes are compared, contents are not read."""
    try:
        read_checked_manifest(path)
    except CheckpointError:
        return False
    return not (path / DAMAGED).exists()


def _read_manifest(path: Path) -> dict[str, Digest]:
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint {path}")
    manifest = read_checkpoint_json(path / MANIFEST)
    if (stored := manifest.get("format")) != FORMAT:
        raise CheckpointError(
            f"checkpoint {path}: it has format {stored!r}, and this version of longspan reads format {FORMAT}; "
            "resume it with the version that wrote it, or export its model there (longspan export), to begin from that"
        )
    files = manifest.get("files")
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"checkpoint {path}: {MANIFEST} names no files")
    if not all(isinstance(digest, list) and len(digest) == 2 for digest in files.values()):
        raise CheckpointError(f"checkpoint {path}: {MANIFEST} is damaged (no size and hash for each file)")
    if outside := [name for name in files if Path(name).name != name]:
        raise CheckpointError(
            f"checkpoint {path}: {MANIFEST} names {outside[0]!r}, which is not a file of this folder and is not read; "
            "copy the checkpoint again from where it was saved"
        )
    return files


def read_checkpoint_json(file: Path) -> dict[str, Any]:
    """Return the JSON object in a file of a checkpoint. Raises CheckpointError for a file that is none."""
    try:
        value = parse_json(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"checkpoint {file.parent}: {file.name} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise CheckpointError(f"checkpoint {file.parent}: {file.name} is damaged ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"checkpoint {file.parent}: {file.name} is damaged (not an object)")
    return value


def _file_digest(path: Path) -> Digest:
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def sync_to_disk(path: Path) -> None:
    """Return when the disk has a file, or the entries of a folder."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
