"""Errors that a caller can act on. Each says what was asked, what was found and what to do, with the numbers.

LongspanError
├── LayoutError      sizes that do not fit together: ranks, slots, degrees, lengths, partitions
├── PlanError        documents, caps and plans that do not agree
├── CommError        a collective that failed or timed out, a group that does not exist, ranks that disagree
│   └── RankLostError   a rank that was killed, cut off or stopped: the same command may go on from its checkpoint
├── AttentionError   shapes, types and features that `attend` cannot run exactly
├── ModelError       a model that cannot be brought under a home exactly
├── DataError        a corpus or tokenizer that is missing, empty or does not match
├── ConfigError      unknown keys and impossible values of a run's configuration
├── NonFiniteError   a loss or gradients that are not finite
├── LossError        a loss of one's own that fails or gives no losses, a divisor that is none
├── EvaluationError  a metric that gives no sum and count
├── EvaluationStopped  an evaluation that was ended before its last document
├── CheckpointError  a checkpoint that is missing, damaged or of another model
└── RunFolderError   a run's folder that another run holds, or that cannot be written
"""

from importlib import import_module
from typing import Any


def plural(number: int, noun: str, ending: str = "s") -> str:
    """Return a number with its noun, in singular or plural, as messages and reports write them.

    >>> plural(1, "rank"), plural(4096, "micro-batch", "es")
    ('1 rank', '4,096 micro-batches')
    """
    return f"{number:,} {noun}{'' if number == 1 else ending}"


class LongspanError(Exception):
    """Base of every error that longspan raises for a caller's mistake or a failed run.

    `on_all_ranks`: every rank is known to raise it at the same place, so that all still run and may enter collectives.
    """

    on_all_ranks: bool = False


class LayoutError(LongspanError, ValueError):
    """Sizes that do not fit together: ranks, slots, degrees, lengths, partitions."""


class PlanError(LongspanError, ValueError):
    """Documents, caps and plans that do not agree."""


class CommError(LongspanError, RuntimeError):
    """A collective that failed or timed out, a group that does not exist, or ranks that disagree."""


class RankLostError(CommError):
    """A rank that was killed, cut off or stopped, or a collective that failed without an error of any rank's own.

    Starting the command again may help, which it does not after other errors: `longspan` exits with status 3, not 2.
    """


class AttentionError(LongspanError, ValueError):
    """Shapes, types and features that `attend` cannot run exactly."""


class ModelError(LongspanError, ValueError):
    """A model that cannot be brought under a home exactly."""


class DataError(LongspanError, ValueError):
    """A corpus or tokenizer that is missing, empty or does not match."""


class ConfigError(LongspanError, ValueError):
    """Unknown keys and impossible values of a run's configuration."""


class NonFiniteError(LongspanError, ArithmeticError):
    """A loss or gradients that are not finite, found before they reached a weight."""

    # The weights were finite on all ranks before the step.
    weights_are_finite: bool = True


class LossError(LongspanError, ValueError):
    """A loss of one's own that fails or gives no losses, or a divisor that is none."""


class EvaluationError(LongspanError, ValueError):
    """A metric that gives no sum and count."""


class EvaluationStopped(LongspanError, RuntimeError):  # noqa: N818 (it is what was asked for)
    """An evaluation that was ended before its last document; the model is as it was before it."""


class CheckpointError(LongspanError, RuntimeError):
    """A checkpoint that is missing, damaged or of another model."""


class RunFolderError(LongspanError, RuntimeError):
    """A run's folder that another run holds, or that cannot be written."""


def import_object(name: str, opening: str, kind: type[LongspanError] = ConfigError) -> Any:
    """Import the object with a dotted name, such as a class of the user's own; None if its module has no such object.

    Raises an error of this kind, whose text begins with `opening`, if the module cannot be imported.
    """
    module, _, attribute = name.rpartition(".")
    try:
        return getattr(import_module(module), attribute, None)
    except Exception as error:  # whatever the module raises when it is imported
        raise kind(
            f"{opening}, and {module} cannot be imported: {type(error).__name__}: {error}; install it, or put its "
            "folder on PYTHONPATH"
        ) from error
