"""The loggers of a session together: made before its first step, given every row, and left out where they fail."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from longspan.errors import ConfigError
from longspan.run.loggers.logger import Logger, LoggerClass, RunStart, logger_class


class RunLoggers:
    """Hands rows to loggers; the first exception of one is said, and it is left out from then on.

    >>> with RunLoggers.open(logger_classes(("tensorboard",)), start, print) as loggers:
    ...     loggers.log({"step": 1, "loss": 7.6})
    """

    def __init__(self, loggers: Mapping[str, Logger], say: Callable[[str], None]) -> None:
        self._loggers, self._say = dict(loggers), say

    @classmethod
    def open(cls, classes: Mapping[str, LoggerClass], start: RunStart, say: Callable[[str], None]) -> "RunLoggers":
        """The loggers, made one after another. Raises ConfigError, with what it says, where one cannot start."""
        opened = cls({}, say)
        for name, make in classes.items():
            try:
                opened._loggers[name] = make(start)
            except Exception as error:
                opened.close()
                said = f"{type(error).__name__}: {error}"
                raise ConfigError(f"the logger {name} of run.loggers cannot start: {said}; or leave it out") from error
        return opened

    def __enter__(self) -> "RunLoggers":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def log(self, row: Mapping[str, Any]) -> None:
        """Give a row to all that are left."""
        for name, logger in list(self._loggers.items()):
            try:
                logger.log(row, row["step"])
            except Exception as error:
                del self._loggers[name]
                self._say(
                    f"the logger {name} failed at step {row['step']} and gets no further row (metrics.jsonl has all): "
                    f"{type(error).__name__}: {error}"
                )

    def close(self) -> None:
        """Close all that are left."""
        while self._loggers:
            name, logger = self._loggers.popitem()
            try:
                logger.close()
            except Exception as error:
                self._say(f"the logger {name} could not be closed: {type(error).__name__}: {error}")


def logger_classes(names: Sequence[str]) -> dict[str, LoggerClass]:
    """The classes of loggers by name, each once. Raises ConfigError where one cannot be imported."""
    return {name: logger_class(name) for name in names}
