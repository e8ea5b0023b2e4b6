"""Metrics of a user's own: functions by the dotted names of train.eval_metrics or of a table [[eval]]."""

from typing import cast

from longspan.errors import ConfigError
from longspan.train.config.eval_set import EvalConfig
from longspan.train.dotted_name import object_named
from longspan.train.evaluation.metrics import Metric


def load_metrics(entry: EvalConfig) -> dict[str, Metric]:
    """The metrics of an evaluation set, by the names of their functions.

    >>> list(load_metrics(EvalConfig(metrics=("my_package.my_metrics.top_five",))))  # doctest: +SKIP
    ['top_five']

    Raises ConfigError for a module that cannot be imported, for one without such a function, and for two of one name.
    """
    key, metrics = entry.metrics_key, dict[str, Metric]()
    for dotted in entry.metrics:
        module, _, name = dotted.rpartition(".")
        function = object_named(dotted, f"{key} has {dotted!r}")
        if not callable(function):
            raise ConfigError(
                f"{key} has {dotted!r}, and {module} has no function {name}; give one of TargetRows to (sum, count)"
            )
        if name in metrics:
            raise ConfigError(
                f"{key} has two functions of the name {name!r} ({', '.join(entry.metrics)}); rows of metrics.jsonl "
                "would have two values for one key: give one of them another name"
            )
        metrics[name] = cast(Metric, function)
    return metrics
