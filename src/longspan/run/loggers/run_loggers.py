"""Loggers of a run: created at the start of a session, called with every row of metrics, closed at its end.

A logger of your own is any class with these two methods; `run.loggers` names it with its module:

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

from longspan.config.file import nearest_hint
from longspan.errors import ConfigError, import_object


@dataclass(frozen=True)
class RunStart:
    """The argument of a logger's constructor: the run's folder, its configuration by section, and the facts of
    run.json.

    `done` steps were done before this session. `rows` are the rows of metrics.jsonl from earlier sessions; steps after
    `done` are repeated, although loggers have already received their rows.
    """

    dir: Path
    config: Mapping[str, Any]
    facts: Mapping[str, Any]
    done: int
    rows: Sequence[Mapping[str, Any]]


class Logger(Protocol):
    """Receives the rows of a run, on its first rank only. An exception ends the logger, not the run."""

    def log(self, row: Mapping[str, Any], step: int) -> None:
        """A row of metrics.jsonl: of a training step (`loss` and others), or of an evaluation (`eval_loss`, `cp`)."""
        ...

    def close(self) -> None:
        """Called at the end of the session, however it ends."""
        ...


LoggerClass = Callable[[RunStart], Logger]
# longspan's own loggers: their classes by the name of the package and extra that they need.
BUILT_IN = {
    "tensorboard": "longspan.run.loggers.services.TensorBoardLogger",
    "wandb": "longspan.run.loggers.services.WandbLogger",
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
                f"run.loggers has {name!r}; {nearest_hint(name, BUILT_IN)}, or a class of your own with its module, as "
                "in 'my_package.my_module.MyLogger'"
            )


def logger_class(name: str) -> LoggerClass:
    """Return the class of a logger. Raises ConfigError if it cannot be imported, or has no methods of a logger."""
    module, _, attribute = BUILT_IN.get(name, name).rpartition(".")
    kind = import_object(BUILT_IN.get(name, name), f"run.loggers has {name!r}")
    if not all(callable(getattr(kind, method, None)) for method in ("log", "close")):
        lack = "has no such class" if kind is None else f"has {attribute} without log(row, step) and close()"
        raise ConfigError(f"run.loggers has {name!r}, and {module} {lack}; see longspan.run.loggers.Logger")
    return kind


def scalars(row: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers of a row by display name; an evaluation's names contain its set and its degree.

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


class RunLoggers:
    """Hands rows to loggers; after its first exception, which is logged, a logger receives nothing more.

    >>> with RunLoggers.open(logger_classes(("tensorboard",)), start, print) as loggers:
    ...     loggers.log({"step": 1, "loss": 7.6})
    """

    def __init__(self, loggers: Mapping[str, Logger], log_line: Callable[[str], None]) -> None:
        """Take open loggers by name; `log_line` logs a line about one that fails."""
        self._loggers, self._log_line = dict(loggers), log_line

    @classmethod
    def open(cls, classes: Mapping[str, LoggerClass], start: RunStart, log_line: Callable[[str], None]) -> "RunLoggers":
        """Create the loggers in order. Raises ConfigError if one cannot start; loggers before it are closed."""
        loggers = cls({}, log_line)
        for name, make in classes.items():
            try:
                loggers._loggers[name] = make(start)
            except Exception as error:
                loggers.close()
                reason = f"{type(error).__name__}: {error}"
                raise ConfigError(
                    f"the logger {name} of run.loggers cannot start: {reason}; or leave it out"
                ) from error
        return loggers

    def __enter__(self) -> "RunLoggers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log(self, row: Mapping[str, Any]) -> None:
        """Hand a row to all open loggers."""
        for name, logger in list(self._loggers.items()):
            try:
                logger.log(row, row["step"])
            except Exception as error:
                del self._loggers[name]
                self._log_line(
                    f"the logger {name} failed at step {row['step']} and gets no further row (metrics.jsonl has all): "
                    f"{type(error).__name__}: {error}"
                )

    def close(self) -> None:
        """Close all open loggers."""
        while self._loggers:
            name, logger = self._loggers.popitem()
            try:
                logger.close()
            except Exception as error:
                self._log_line(f"the logger {name} could not be closed: {type(error).__name__}: {error}")


def logger_classes(names: Sequence[str]) -> dict[str, LoggerClass]:
    """The classes of loggers by name, without duplicates. Raises ConfigError if one cannot be imported."""
    return {name: logger_class(name) for name in names}
