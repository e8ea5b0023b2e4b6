"""The flags of `longspan train`, which are every key of a configuration, and the configuration that they make."""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Annotated, Any, ClassVar

from longspan.cli.flags import OTHER_SPELLING, Groups, Word, parse_flags, split_flags
from longspan.cli.processes import Device, count_ranks
from longspan.config.defaults import resolve_defaults
from longspan.config.file import read_file
from longspan.config.local_folders import with_local_folders
from longspan.config.sections import RunConfig, section_kinds
from longspan.errors import ConfigError

# The keys that most runs set, in the order in which one meets them.
OFTEN = (
    "model.path",
    "data.path",
    "run.dir",
    "lora.rank",
    "train.epochs",
    "train.steps",
    "train.tokens_per_step",
    "optimizer.lr",
    "context.planner",
    "context.context_parallel_size",
    "context.max_tokens_per_slot",
    "evaluation.every",
)


@dataclass(frozen=True)
class TrainFlags(RunConfig):
    """Train a model. Values come from the defaults, then from CONFIG.toml, then from flags.

    Without --world it starts a process for each GPU of this machine, or one where there are none. With --world N it
    starts N processes; under torchrun it uses those of torchrun. Each has a GPU where there are any. The configuration,
    metrics, checkpoints, plans and report.html are written to the run's folder. If the folder holds a run already, that
    run continues from its newest checkpoint.

    longspan train --world 2                     the demo: a tiny model, on 2 CPU processes

    longspan train run.toml --dry-run            what a run would hold, and how long it takes

    longspan train --model.path Qwen3-0.6B --data chats.jsonl --train.epochs 1 --lora.rank 16
    """

    SHOWN: ClassVar[Groups] = {
        "keys that most runs set": tuple(f"--{key}" for key in OFTEN),
        "how it is started": ("--world", "--dry_run", "--show"),
    }
    config: Annotated[str, Word("[CONFIG.toml]")] = ""
    """Configuration file; without one, the demo of `make train`."""
    world: int = 0
    """Processes to start on this machine; 0: one for each GPU (CUDA_VISIBLE_DEVICES), one without GPUs, or those of
    torchrun."""
    device: Device = "auto"
    """auto: a GPU for each process where there are any; cpu: processes on CPUs; cuda: GPUs, or an error."""
    json: bool = False
    """Print the result as one JSON object on standard output; progress goes to standard error."""
    show: int = 0
    """Train nothing: print the first so many rows of each source as tokens, with the targets marked."""
    dry_run: bool = False
    """Train nothing: print what the run would hold on each GPU, with which plan of memory, its steps and hours."""


def _file_sections(flag_names: Collection[str], words: Sequence[str]) -> Mapping[str, Any]:
    """`flag_names` are those that are given: --train.steps alone also ends the epochs of the file."""
    if not words:
        return {}
    file = read_file(words[0])
    if "--train.steps" in flag_names and "--train.epochs" not in flag_names:
        file = file.with_keys("train", epochs=0.0, epochs_of="")
    return vars(file)


def parse_train(argv: Sequence[str]) -> tuple[TrainFlags, RunConfig]:
    """Parse the flags of `train`, and the configuration that file, flags and the number of ranks make together."""
    names = {flag for flag, _, _ in split_flags(argv)}
    for flag, paths, _ in split_flags(argv):
        # --data, by either of its spellings
        if flag in OTHER_SPELLING and len(paths) > 1 and not paths[1].endswith(".toml"):
            raise ConfigError(
                f"{flag} takes one path, and got {' '.join(paths)}; name several in CONFIG.toml, each as path = ... "
                "below a line [[data.sources]], or put the files into one folder"
            )
    flags = parse_flags(TrainFlags, argv, "longspan train", partial(_file_sections, names))
    config = RunConfig(**{section: getattr(flags, section) for section in section_kinds()})
    config = with_local_folders(config, weights=not (flags.dry_run or flags.show))
    return flags, resolve_defaults(config, count_ranks(flags.world, flags.device))
