"""A user's own metrics, by their dotted names."""

from collections.abc import Sequence
from importlib import import_module
from typing import cast

from longspan.errors import ConfigError
from longspan.train.evaluation.metrics import Metric


def metrics_by_name(names: Sequence[str]) -> dict[str, Metric]:
    """Functions of TargetRows to (sum, count), by the last part of their dotted names. Raises ConfigError.

    >>> metrics_by_name(["my_package.metrics.top_five"])  # doctest: +SKIP
    """
    metrics = dict[str, Metric]()
    for name in names:
        module, _, attribute = name.rpartition(".")
        if not module:
            raise ConfigError(f"--metrics is {name!r}; give a function with its module, as in package.module.function")
        try:
            function = getattr(import_module(module), attribute, None)
        except Exception as error:  # whatever the module raises when it is imported
            raise ConfigError(
                f"--metrics {name!r}: {module} cannot be imported: {type(error).__name__}: {error}; install it, or put "
                "its folder on PYTHONPATH"
            ) from error
        if not callable(function):
            raise ConfigError(f"--metrics {name!r}: {module} has no function {attribute!r}")
        if attribute in metrics:
            raise ConfigError(f"--metrics names two functions {attribute!r}; give them different names")
        metrics[attribute] = cast(Metric, function)
    return metrics
