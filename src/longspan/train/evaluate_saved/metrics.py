"""A user's own metrics, by their dotted names: those of --metrics, otherwise those of the run."""

from collections.abc import Sequence
from typing import cast

from longspan.errors import ConfigError
from longspan.train.config.eval_set import EvalConfig
from longspan.train.dotted_name import object_named
from longspan.train.evaluation.metrics import Metric
from longspan.train.run.evaluations.user_metrics import load_metrics


def metrics_of(names: Sequence[str], entry: EvalConfig) -> dict[str, Metric]:
    """Functions of TargetRows to (sum, count), by the last part of their names: those named, or those of the set.

    Raises ConfigError for a module that cannot be imported, one without such a function, and two of one name.
    """
    if not names:
        return load_metrics(entry)
    metrics = dict[str, Metric]()
    for name in names:
        module, _, attribute = name.rpartition(".")
        if not module:
            raise ConfigError(f"--metrics is {name!r}; give a function with its module, as in package.module.function")
        function = object_named(name, f"--metrics is {name!r}")
        if not callable(function):
            raise ConfigError(f"--metrics is {name!r}, and {module} has no function {attribute!r}")
        if attribute in metrics:
            raise ConfigError(f"--metrics names two functions {attribute!r}; give them different names")
        metrics[attribute] = cast(Metric, function)
    return metrics
