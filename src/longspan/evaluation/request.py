"""What `longspan eval` evaluates: weights on disk, and documents by name. No torch here."""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from longspan.adapter_folder import adapter_folder_advice
from longspan.checkpoint.files import (
    checkpoints_root,
    complete_checkpoints,
    find_run_and_checkpoint,
    read_state,
    step_of,
)
from longspan.config.file import load_config
from longspan.config.keys import NOT_GIVEN
from longspan.config.sections import RunConfig
from longspan.errors import CheckpointError, ConfigError
from longspan.evaluation.fit_layout import Change, take_plans_of_run
from longspan.hub import find_local_path


@dataclass(frozen=True)
class SavedWeights:
    """Weights on disk: those of a checkpoint of `run_dir` (None: that of the step that it hands out), or of the
    folder `path`.

    `base`: the weights that the run began with; of a run that trains an adapter, those without it.
    """

    path: Path
    run_dir: Path | None = None
    checkpoint: Path | None = None
    base: bool = False

    @property
    def title(self) -> str:
        """What results call the weights."""
        return f"{self.path} without adapter" if self.base else str(self.path)

    @property
    def kind(self) -> Literal["run", "checkpoint", "folder"]:
        """What the user named: a run (the checkpoint that it hands out), one checkpoint, or a Hugging Face folder."""
        if self.run_dir is None:
            return "folder"
        return "run" if self.checkpoint is None else "checkpoint"


@dataclass(frozen=True)
class Subject:
    """Weights that are evaluated, and the configuration under which: that of their run, or one for a folder."""

    weights: SavedWeights
    config: RunConfig

    @property
    def folder(self) -> Path:
        """The folder that has the model's configuration and tokenizer."""
        return self.weights.run_dir or self.weights.path


@dataclass(frozen=True, kw_only=True)
class EvalRequest:
    """One call of `longspan eval`: the `subjects`, one or two that are compared, and the documents.

    `flag_keys` are keys that flags set; `home_changes` those of the first subject that were changed to fit the ranks.
    """

    subjects: tuple[Subject, ...]
    paths: tuple[tuple[str, str], ...] = ()  # name and path of each set of texts; none: what the run holds out
    # The sets of texts are this split of their data.
    split: str = ""
    max_document_tokens: int = NOT_GIVEN
    tokenizer: str = ""
    # These degrees are compared; none stands for the configuration's.
    degrees: tuple[int, ...] = ()
    metrics: tuple[str, ...] = ()
    flag_keys: frozenset[str] = frozenset()
    home_changes: tuple[Change, ...] = ()


def find_saved_weights(target: str) -> SavedWeights:
    """Find the weights of `target`: a run's folder, a checkpoint, a Hugging Face folder, or a model's name on the hub.

    Raises CheckpointError for a folder that is none of these.
    """
    local = target if Path(target).parent.is_dir() else find_local_path(target, "the model", weights=True)
    path = Path(local)
    # step_of gives −1 for a path that is not named as a checkpoint
    if step_of(path) >= 0 or not path.is_dir() or (path / "config.toml").is_file():
        return SavedWeights(path, *find_run_and_checkpoint(path))
    if (path / "config.json").is_file():
        return SavedWeights(path)
    advice = "give RUN, RUN/checkpoints/step-NNNNNN, or a folder with config.json and safetensors"
    raise CheckpointError(
        f"{path} is neither the folder of a run (it has no config.toml) nor a Hugging Face folder (no config.json); "
        f"{adapter_folder_advice(path) or advice}"
    )


def load_saved_config(weights: SavedWeights, ranks: int) -> RunConfig:
    """Load the configuration of a run's weights, with the plans of evaluation that the run has had.

    A run writes what it chose for open keys into each checkpoint. Without a checkpoint that can be read they stay open.
    """
    assert weights.run_dir is not None
    config = load_config(weights.run_dir / "config.toml")
    with suppress(CheckpointError, ConfigError, OSError, KeyError):
        root = checkpoints_root(weights.run_dir, config.checkpoint.dir)
        if checkpoints := [weights.checkpoint] if weights.checkpoint else complete_checkpoints(root):
            state = read_state(checkpoints[0])
            chosen = load_config(None, state["config"])
            config = take_plans_of_run(config, chosen, same_ranks=state["ranks"] == ranks)
    return config


def parse_named_paths(words: Sequence[str]) -> dict[str, str]:
    """Read the paths of --data by the name of their set: NAME=PATH, or PATH, which is named by its last part.

    >>> parse_named_paths(["wiki=/data/enwiki.jsonl", "notes/code"])
    {'wiki': '/data/enwiki.jsonl', 'code': 'notes/code'}

    Raises ConfigError for a name that is missing or stands twice.
    """
    paths = dict[str, str]()
    for word in words:
        name, equals, path = word.partition("=")
        if not equals or Path(word).exists():  # a path may have "=" in it
            name = Path(word).stem or word
            path = word
        if not name or not path:
            raise ConfigError(f"--data is {word!r}; give NAME=PATH, or PATH")
        if name in paths:
            raise ConfigError(
                f"--data {paths[name]} and {path} are both named {name!r}; give each a name: NAME=PATH"
            )
        paths[name] = path
    return paths
