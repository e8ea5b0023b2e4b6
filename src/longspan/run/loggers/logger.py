"""What a logger of a run is: made with the start of a session, given every row of metrics, closed at its end.

One of your own is any class with these two methods; `run.loggers` names it with its module:

    class Printer:
        def __init__(self, start: RunStart) -> None: ...
        def log(self, row: Mapping[str, Any], step: int) -> None: print(step, row)
        def close(self) -> None: ...

Needs no torch: the names are checked before any process starts.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from longspan.config.file import nearest
from longspan.config.keys import object_named
from longspan.errors import ConfigError


@dataclass(frozen=True)
class RunStart:
    """What a logger is made with: the run's folder, its configuration by section, and the facts of run.json.

    `done` steps were done before this session. `rows` are those of metrics.jsonl that earlier sessions wrote: those of
    steps after `done` are made again, and loggers were given them already.
    """

    dir: Path
    config: Mapping[str, Any]
    facts: Mapping[str, Any]
    done: int
    rows: Sequence[Mapping[str, Any]]


class Logger(Protocol):
    """Takes the rows of a run, on its first rank alone. An exception ends the logger and not the run."""

    def log(self, row: Mapping[str, Any], step: int) -> None:
        """A row of metrics.jsonl: of a training step (`loss` and others), or of an evaluation (`eval_loss`, `cp`)."""
        ...

    def close(self) -> None:
        """The session is over, by whatever end."""
        ...


LoggerClass = Callable[[RunStart], Logger]
# Those that longspan has, each with its class and the package that it needs, which is the name of its extra too.
BUILT_IN = {
    "tensorboard": "longspan.run.loggers.tensorboard.TensorBoardLogger",
    "wandb": "longspan.run.loggers.wandb.WandbLogger",
}


def check_loggers(names: Sequence[str]) -> None:
    """Raise ConfigError for a logger that is not known, or whose package is not installed."""
    for name in names:
        if name in BUILT_IN and find_spec(name) is None:
            raise ConfigError(
                f"run.loggers has {name!r}, and {name} is not installed; pip install 'longspan[{name}]', or leave it "
                "out"
            )
        if name not in BUILT_IN and "." not in name:
            raise ConfigError(
                f"run.loggers has {name!r}; {nearest(name, BUILT_IN)}, or a class of your own with its module, as in "
                "'my_package.my_module.MyLogger'"
            )


def logger_class(name: str) -> LoggerClass:
    """The class of a logger. Raises ConfigError where it cannot be imported."""
    module, _, attribute = BUILT_IN.get(name, name).rpartition(".")
    kind = object_named(BUILT_IN.get(name, name), f"run.loggers has {name!r}")
    if not all(callable(getattr(kind, method, None)) for method in ("log", "close")):
        lack = "has no such class" if kind is None else f"has {attribute} without log(row, step) and close()"
        raise ConfigError(f"run.loggers has {name!r}, and {module} {lack}; see longspan.run.loggers.Logger")
    return kind


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """The numbers of a row by the names that loggers show them under; an evaluation's name its set and its degree.

    >>> scalars({"step": 2, "loss": 3.5, "lr": 0.1})
    {'train/loss': 3.5, 'train/lr': 0.1}
    >>> scalars({"step": 2, "eval_loss": 3.5, "cp": 4, "seconds": 1.0})
    {'eval/loss_cp4': 3.5, 'eval/seconds_cp4': 1.0}
    >>> scalars({"step": 2, "eval_name": "books", "eval_loss": 3.5, "cp": 4})
    {'eval/books/loss_cp4': 3.5}
    """
    numbers = {
        key: value
        for key, value in row.items()
        if key not in ("step", "cp") and isinstance(value, int | float) and not isinstance(value, bool)
    }
    if "eval_loss" not in row:
        return {f"train/{key}": value for key, value in numbers.items()}
    chart = f"eval/{row['eval_name']}" if "eval_name" in row else "eval"
    return {f"{chart}/{key.removeprefix('eval_')}_cp{row['cp']}": value for key, value in numbers.items()}
