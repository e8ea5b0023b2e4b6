"""The targets of a command: a run, a checkpoint or a Hugging Face folder, distinguished by files; texts by sets."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from longspan.checkpoint.files import step_of
from longspan.errors import CheckpointError, ConfigError

_SAVED = "give RUN, RUN/checkpoints/step-NNNNNN, or a folder with config.json and safetensors"


@dataclass(frozen=True)
class SavedWeights:
    """Weights on disk: those of a checkpoint of `run_dir` (None: the newest good one), or of the folder `path`.

    `base`: of a run that trains an adapter, the weights without it.
    """

    path: Path
    run_dir: Path | None = None
    checkpoint: Path | None = None
    base: bool = False

    @property
    def title(self) -> str:
        """The name of the weights in results."""
        return f"{self.path} without adapter" if self.base else str(self.path)

    @property
    def kind(self) -> Literal["run", "checkpoint", "folder"]:
        """What `path` is."""
        return "folder" if self.run_dir is None else "run" if self.checkpoint is None else "checkpoint"


def saved_weights(target: str) -> SavedWeights:
    """Find the weights that a run's folder, a checkpoint or a Hugging Face folder holds.

    A folder with config.toml is a run, also where it keeps its model's config.json. Raises CheckpointError for a path
    that is none of the three.
    """
    path = Path(target)  # step_of gives −1 for a path that is not named as a checkpoint
    if step_of(path) < 0 and path.is_dir() and not (path / "config.toml").is_file():
        if not (path / "config.json").is_file():
            from longspan.model.weights.hf_folder import adapter_folder_advice  # which imports torch

            raise CheckpointError(
                f"{path} is neither the folder of a run (it has no config.toml) nor a Hugging Face folder (no "
                f"config.json); {adapter_folder_advice(path) or _SAVED}"
            )
        return SavedWeights(path)
    run_dir, checkpoint = split_target(path)
    return SavedWeights(path, run_dir, checkpoint)


def split_target(target: Path) -> tuple[Path, Path | None]:
    """Split a target into the run's folder, and the checkpoint if the target is one.

    Raises CheckpointError if there is no run.
    """
    is_checkpoint = step_of(target) >= 0
    run_dir = target.resolve().parent.parent if is_checkpoint else target
    if not target.is_dir():
        kind = "checkpoint" if is_checkpoint else "run"
        raise CheckpointError(f"there is no {kind} {target}; give a run's folder, or RUN/checkpoints/step-NNNNNN")
    if not (run_dir / "config.toml").is_file():
        raise CheckpointError(f"{run_dir} is not the folder of a run: it has no config.toml")
    return run_dir, target if is_checkpoint else None


def named_paths(words: Sequence[str]) -> dict[str, str]:
    """Read the paths of --data by the name of their set: NAME=PATH, or PATH, which is named by its last part.

    >>> named_paths(["wiki=/data/enwiki.jsonl", "notes/code"])
    {'wiki': '/data/enwiki.jsonl', 'code': 'notes/code'}

    Raises ConfigError for a name that is missing or stands twice.
    """
    paths = dict[str, str]()
    for word in words:
        name, equals, path = word.partition("=")
        if not equals or Path(word).exists():  # a path may have "=" in it
            name, path = Path(word).stem or word, word
        if not name or not path:
            raise ConfigError(f"--data is {word!r}; give NAME=PATH, or PATH")
        if name in paths:
            raise ConfigError(f"--data {paths[name]} and {path} are both named {name!r}; give each a name: NAME=PATH")
        paths[name] = path
    return paths
