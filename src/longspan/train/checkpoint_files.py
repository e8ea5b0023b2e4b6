"""The files of a checkpoint: where they stand, whether they are whole, which one is the newest that is good.

No torch and no ranks here: a folder is judged by its manifest alone.
"""

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from longspan.errors import CheckpointError

PARTIAL = ".partial"
MANIFEST, STATE = "manifest.json", "state.json"
Digest = tuple[int, str]  # bytes, SHA-256


def checkpoint_path(root: Path, step: int) -> Path:
    """Where the checkpoint of a step stands."""
    return root / f"step-{step:06d}"


def step_of(path: Path) -> int:
    """The step of a checkpoint folder; −1 for another name."""
    digits = path.name.removesuffix(PARTIAL).removeprefix("step-")
    return int(digits) if digits.isdigit() and path.name.startswith("step-") else -1


def begin(partial: Path) -> None:
    """An empty folder to write into, whatever an interrupted save left there."""
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)


def digest_own_files(partial: Path, rank: int, *, first: bool) -> dict[str, Digest]:
    """Size and hash of the files that a rank wrote; the first rank's include the common index."""
    own = [path for path in sorted(partial.iterdir()) if path.name.startswith(f"__{rank}_")]
    common = [partial / ".metadata"] if first else []
    return {path.name: _digest(path) for path in own + common}


def finish(partial: Path, path: Path, state: Mapping[str, Any], digests: Sequence[Mapping[str, Digest]]) -> None:
    """Write the state and, last, the manifest; make it durable; give the folder its name."""
    _write_durably(partial / STATE, json.dumps(state, indent=1))
    files = {name: digest for part in digests for name, digest in part.items()}
    files[STATE] = _digest(partial / STATE)
    _write_durably(partial / MANIFEST, json.dumps({"files": files}, indent=1))
    _sync_folder(partial)
    shutil.rmtree(path, ignore_errors=True)  # a damaged one of the same step
    partial.rename(path)
    _sync_folder(path.parent)


def prune(root: Path, keep: int) -> None:
    """Remove unfinished checkpoints and all but the newest `keep` (0: all are kept)."""
    whole = sorted((p for p in root.iterdir() if step_of(p) >= 0 and not p.name.endswith(PARTIAL)), key=step_of)
    stale = [p for p in root.iterdir() if p.name.endswith(PARTIAL)]
    for path in stale + (whole[:-keep] if keep else []):
        shutil.rmtree(path, ignore_errors=True)


def latest_checkpoint(root: Path, say: Callable[[str], None]) -> Path | None:
    """The newest good checkpoint under `root`, None where none was ever finished.

    Unfinished and damaged ones are skipped and told to `say`. Raises CheckpointError where some were finished and all
    are damaged: starting over would lose a run.
    """
    if not root.is_dir():
        return None
    damage: list[str] = []
    for path in sorted((p for p in root.iterdir() if step_of(p) >= 0), key=step_of, reverse=True):
        if path.name.endswith(PARTIAL):
            say(f"skipping {path}: its save was interrupted")
            continue
        try:
            check_files(path)
        except CheckpointError as error:
            damage.append(str(error))
            say(f"skipping a damaged checkpoint: {error}")
        else:
            return path
    if damage:
        raise CheckpointError(
            f"no good checkpoint is left in {root}: {'; '.join(damage[:3])}; restore one, or start in a new run.dir"
        )
    return None


def check_files(path: Path) -> None:
    """Raise CheckpointError, saying which file is wrong and how, unless every file is as it was written."""
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint {path}")
    files = _manifest(path)
    for name, (size, _) in files.items():
        if not (path / name).is_file():
            raise CheckpointError(f"checkpoint {path}: {name} is missing")
        if (found := (path / name).stat().st_size) != size:
            raise CheckpointError(f"checkpoint {path}: {name} has {found} bytes, {size} were written")
    with ThreadPoolExecutor(max_workers=4) as pool:
        found = pool.map(_digest, [path / name for name in files])
        for (name, (_, sha256)), (_, now) in zip(files.items(), found, strict=True):
            if now != sha256:
                raise CheckpointError(f"checkpoint {path}: {name} has other contents than were written")


def read_state(path: Path) -> dict[str, Any]:
    """The state that was saved with a checkpoint. Raises CheckpointError where it is missing or damaged."""
    if not path.is_dir():
        raise CheckpointError(f"there is no checkpoint {path}")
    return _json(path / STATE, path)


def _manifest(path: Path) -> dict[str, Digest]:
    files = _json(path / MANIFEST, path).get("files")
    if not isinstance(files, dict) or not files:
        raise CheckpointError(f"checkpoint {path}: {MANIFEST} names no files")
    if not all(isinstance(digest, list) and len(digest) == 2 for digest in files.values()):
        raise CheckpointError(f"checkpoint {path}: {MANIFEST} is damaged (no size and hash for each file)")
    return files


def _json(file: Path, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(file.read_text(encoding="utf-8"))
    except OSError as error:
        raise CheckpointError(f"checkpoint {path}: {file.name} cannot be read ({error.strerror})") from error
    except ValueError as error:
        raise CheckpointError(f"checkpoint {path}: {file.name} is damaged ({error})") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"checkpoint {path}: {file.name} is damaged (not an object)")
    return value


def _digest(path: Path) -> Digest:
    with path.open("rb") as file:
        return path.stat().st_size, hashlib.file_digest(file, "sha256").hexdigest()


def _write_durably(path: Path, text: str) -> None:
    with path.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
