"""Metrics of a user's own: functions by dotted names, of train.eval_metrics, of a table [[eval]] or of a flag."""

from collections.abc import Sequence
from typing import cast

from longspan.config.keys import object_named
from longspan.errors import ConfigError
from longspan.evaluation.metrics import Metric


def load_metrics(names: Sequence[str], key: str) -> dict[str, Metric]:
    """The metrics that a key of the configuration names, by the last part of their names.

    >>> list(load_metrics(("my_package.my_metrics.top_five",), "train.eval_metrics"))  # doctest: +SKIP
    ['top_five']

    Raises ConfigError for a module that cannot be imported, for one without such a function, and for two of one name.
    """
    metrics = dict[str, Metric]()
    for dotted in names:
        module, _, name = dotted.rpartition(".")
        if not module:
            raise ConfigError(f"{key} has {dotted!r}; give a function with its module, as in package.module.function")
        function = object_named(dotted, f"{key} has {dotted!r}")
        if not callable(function):
            raise ConfigError(
                f"{key} has {dotted!r}, and {module} has no function {name}; give one of TargetRows to (sum, count)"
            )
        if name in metrics:
            raise ConfigError(
                f"{key} has two functions of the name {name!r} ({', '.join(names)}); rows of metrics.jsonl "
                "would have two values for one key: give one of them another name"
            )
        metrics[name] = cast(Metric, function)
    return metrics
