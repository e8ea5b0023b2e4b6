"""Flags of `train` and `eval`: every key of the configuration as `--section.key value`, from the same dataclasses.

Help texts are the docstrings of the configuration's fields. A flag that does not exist is refused with the nearest one.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from typing import Annotated, Any, TypeVar, get_args, get_origin, get_type_hints

import tyro
from tyro.conf import FlagConversionOff, FlagCreatePairsOff, Positional

from longspan.errors import ConfigError
from longspan.train.config import ContextConfig, ParallelConfig, RunConfig, TrainConfig
from longspan.train.config_file import load_config, nearest

Switch = Annotated[bool, FlagCreatePairsOff]


@dataclass(frozen=True)
class TrainFlags(RunConfig):
    """Train a model: from defaults, then CONFIG.toml, then flags.

    Alone it runs one process. With --world N it starts N processes on this machine; under torchrun it uses those.
    The run's folder gets its configuration, metrics, checkpoints, plans and report.html; a run that is found there
    is gone on with.
    """

    parallel: FlagConversionOff[ParallelConfig] = field(default_factory=ParallelConfig)
    train: FlagConversionOff[TrainConfig] = field(default_factory=TrainConfig)
    config: Annotated[Positional[str], tyro.conf.arg(metavar="CONFIG.toml")] = ""
    """Configuration file; without one, the defaults of `make train`."""
    world: int = 0
    """CPU processes to start on this machine; 0: one process, or torchrun's."""
    json: Switch = False
    """Print the outcome as one JSON object on standard output; progress goes to standard error."""


@dataclass(frozen=True)
class EvalFlags:
    """Evaluate a checkpoint on the run's held-out documents, at any degree that divides the slots.

    The run's own configuration holds, but for the flags given here. Nothing in the run's folder changes.
    """

    run: Annotated[Positional[str], tyro.conf.arg(metavar="RUN_OR_CHECKPOINT")]
    """A run's folder (its newest good checkpoint), or the folder of one checkpoint."""
    context: ContextConfig = field(default_factory=ContextConfig)
    world: int = 0
    """CPU processes to start on this machine; 0: one process, or torchrun's."""
    json: Switch = False
    """Print the result as one JSON object."""


Flags = TypeVar("Flags", TrainFlags, EvalFlags)


def parse_train(argv: Sequence[str]) -> tuple[TrainFlags, RunConfig]:
    """The flags of `train`, and the configuration that file and flags make together."""
    given = _parse(TrainFlags, argv, "longspan train", TrainFlags())
    if given.config:
        file = load_config(given.config)
        sections = {f.name: getattr(file, f.name) for f in fields(RunConfig)}
        given = _parse(TrainFlags, argv, "longspan train", replace(TrainFlags(), **sections))
    return given, RunConfig(**{f.name: getattr(given, f.name) for f in fields(RunConfig)})


def parse_eval(argv: Sequence[str], context: ContextConfig | None = None) -> EvalFlags:
    """The flags of `eval`; `context` holds the defaults of its section, those of the run."""
    default = EvalFlags(run=tyro.MISSING, context=context or ContextConfig())
    return _parse(EvalFlags, argv, "longspan eval", default)


def flag_types(kind: type) -> dict[str, Any]:
    """Every flag of a flags dataclass, as written on the command line, with the type of its value."""
    found: dict[str, Any] = {}
    for name, hint in get_type_hints(kind).items():
        if is_dataclass(hint):
            found |= {f"--{name}.{key}": t for key, t in get_type_hints(hint).items()}
        elif not _is_positional(kind, name):
            found[f"--{name}"] = hint
    return found


def _parse(kind: type[Flags], argv: Sequence[str], prog: str, default: Flags) -> Flags:
    words = _checked_words(argv, flag_types(kind), prog)
    return tyro.cli(kind, prog=prog, args=words, default=default, use_underscores=True)


def _checked_words(argv: Sequence[str], types: dict[str, Any], prog: str) -> list[str]:
    """The words with true and false as Python writes them. Raises ConfigError for a flag that does not exist."""
    words: list[str] = []
    flag = ""
    for word in argv:
        if word.startswith("--"):
            flag, _, value = word.partition("=")
            flag = "--" + flag[2:].replace("-", "_")
            _check_name(flag, types, prog)
            word = f"{flag}={_as_python(value, types.get(flag))}" if "=" in word else word
        else:
            word = _as_python(word, types.get(flag))
        words.append(word)
    return words


def _check_name(flag: str, known: dict[str, Any], prog: str) -> None:
    if flag in known or flag == "--help":
        return
    owners = [name for name in known if name.endswith("." + flag[2:])]
    hint = f"did you mean {owners[0]!r}?" if owners else nearest(flag, known)
    raise ConfigError(f"{prog} has no flag {flag}: {hint}")


def _as_python(value: str, kind: Any) -> str:
    return value.capitalize() if kind is bool and value in ("true", "false") else value


def _is_positional(kind: type, name: str) -> bool:
    hint = get_type_hints(kind, include_extras=True)[name]
    return get_origin(hint) is Annotated and any("Positional" in repr(mark) for mark in get_args(hint)[1:])
