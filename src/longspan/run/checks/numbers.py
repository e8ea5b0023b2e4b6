"""Whether each value alone is possible: bounds of numbers, and what is no number."""

import math
from collections.abc import Collection
from typing import Any

from longspan.config.bounds import AUTO, NOT_GIVEN, Above, AtLeast, bounds_of
from longspan.config.eval_set import EvalConfig
from longspan.config.sections import RunConfig, section_kinds
from longspan.errors import ConfigError


def check_numbers(config: RunConfig, *, training: bool) -> None:
    """Raise ConfigError for a number outside its bounds, and for a word that stands for none."""
    for section, kind in section_kinds().items():
        leave_out = _left_out(config, section, training=training)
        _check_bounds(getattr(config, section), kind, f"{section}.", leave_out)
    for entry in config.eval:
        _check_bounds(entry, EvalConfig, entry.prefix)
    if not 0 < config.train.memory_fraction <= 1:
        raise ConfigError(f"train.memory_fraction is {config.train.memory_fraction}; it must be above 0, at most 1")
    if config.train.min_lr_ratio > 1:
        raise ConfigError(f"train.min_lr_ratio is {config.train.min_lr_ratio}; it must be between 0 and 1")
    if -1 < config.train.router_balance_loss < 0:
        raise ConfigError(
            f"train.router_balance_loss is {config.train.router_balance_loss}; it must be at least 0, or -1 for what "
            "the model's configuration says"
        )
    if config.run.stopped_status > 255:
        raise ConfigError(f"run.stopped_status is {config.run.stopped_status}; a process ends with 0 to 255")
    if not config.run.dir:
        raise ConfigError('run.dir is empty; name a folder, as in dir = "runs/first"')


def _left_out(config: RunConfig, section: str, *, training: bool) -> Collection[str]:
    """Keys whose value is not needed, or is known later."""
    if section != "train":
        return ()
    of_epochs = config.train.epochs and config.train.warmup_steps == NOT_GIVEN  # it follows from the corpus
    return ("warmup_steps",) * bool(of_epochs) + ("lr",) * (not training)


def _check_bounds(values: Any, kind: type[Any], prefix: str, leave_out: Collection[str] = ()) -> None:
    for key, bound in bounds_of(kind).items():
        value = getattr(values, key)
        if key == "max_document_tokens" and value == 1:
            raise ConfigError(f"{prefix}{key} is 1; a document of one token predicts nothing: use 2 or more")
        if isinstance(value, str):
            if value != AUTO:
                what = {"eval_documents": "a number of documents"}.get(key, "a number of rows")
                what = "a degree" if key.endswith("parallel_size") else what
                raise ConfigError(f'{prefix}{key} is {value!r}; give {what}, or "{AUTO}"')
            continue
        if key in leave_out:
            continue
        if isinstance(bound, AtLeast) and not bound.value <= value < math.inf:
            raise ConfigError(f"{prefix}{key} is {value}; it must be at least {bound.value}")
        if isinstance(bound, Above) and not bound.value < value < math.inf:
            raise ConfigError(f"{prefix}{key} is {value}; it must be above {bound.value}")
