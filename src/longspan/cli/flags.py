"""Flags of `train` and `eval`: every key of the configuration as `--section.key value`, from the same dataclasses.

Help texts are the docstrings of the configuration's fields.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Annotated

import tyro
from tyro.conf import FlagConversionOff, FlagCreatePairsOff, Positional

from longspan.cli.parse import parse_flags
from longspan.train.config.file import load_config
from longspan.train.config.sections import ContextConfig, ParallelConfig, RunConfig, TrainConfig

Switch = Annotated[bool, FlagCreatePairsOff]


@dataclass(frozen=True)
class TrainFlags(RunConfig):
    """Train a model. Values come from the defaults, then from CONFIG.toml, then from flags.

    Without --world it runs one process. With --world N it starts N processes on this machine; under torchrun it uses
    those of torchrun. The configuration, metrics, checkpoints, plans and report.html are written to the run's folder.
    If the folder holds a run already, that run continues from its newest checkpoint.
    """

    parallel: FlagConversionOff[ParallelConfig] = field(default_factory=ParallelConfig)
    train: FlagConversionOff[TrainConfig] = field(default_factory=TrainConfig)
    config: Annotated[Positional[str], tyro.conf.arg(metavar="CONFIG.toml")] = ""
    """Configuration file; without one, the defaults of `make train`."""
    world: int = 0
    """CPU processes to start on this machine; 0: one process, or those of torchrun."""
    json: Switch = False
    """Print the result as one JSON object on standard output; progress goes to standard error."""


@dataclass(frozen=True)
class EvalFlags:
    """Evaluate a checkpoint on the run's held-out documents, at any degree that divides the slots.

    The run's own configuration applies, except for the flags given here. Nothing in the run's folder changes.
    """

    run: Annotated[Positional[str], tyro.conf.arg(metavar="RUN_OR_CHECKPOINT")]
    """A run's folder (its newest good checkpoint), or the folder of one checkpoint."""
    context: ContextConfig = field(default_factory=ContextConfig)
    world: int = 0
    """CPU processes to start on this machine; 0: one process, or torchrun's."""
    json: Switch = False
    """Print the result as one JSON object."""


def parse_train(argv: Sequence[str]) -> tuple[TrainFlags, RunConfig]:
    """The flags of `train`, and the configuration that file and flags make together."""
    flags = parse_flags(TrainFlags, argv, "longspan train", TrainFlags())
    if flags.config:
        file = load_config(flags.config)
        sections = {f.name: getattr(file, f.name) for f in fields(RunConfig)}
        flags = parse_flags(TrainFlags, argv, "longspan train", replace(TrainFlags(), **sections))
    return flags, RunConfig(**{f.name: getattr(flags, f.name) for f in fields(RunConfig)})


def parse_eval(argv: Sequence[str], context: ContextConfig | None = None) -> EvalFlags:
    """The flags of `eval`; `context` holds the defaults of its section, those of the run."""
    default = EvalFlags(run=tyro.MISSING, context=context or ContextConfig())
    return parse_flags(EvalFlags, argv, "longspan eval", default)
