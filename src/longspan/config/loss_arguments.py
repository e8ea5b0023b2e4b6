"""The arguments of `train.loss`: their names, defaults and bounds."""

from collections.abc import Mapping

from longspan.config.keys import Above, AtLeast
from longspan.config.sections import TrainConfig
from longspan.config.text_values import read_arguments
from longspan.errors import ConfigError

# The arguments of each train.loss, with TRL's names and defaults; simpo's cpo_alpha is that of SimPO itself.
LOSS_ARGUMENTS: Mapping[str, Mapping[str, float]] = {
    "": {"center_rewards_coefficient": 0.0},  # of a model with one score, over pairs
    "dpo": {"beta": 0.1, "label_smoothing": 0.0},
    "sigmoid": {"beta": 0.1, "label_smoothing": 0.0},
    "ipo": {"beta": 0.1},
    "apo_zero": {"beta": 0.1},
    "simpo": {"beta": 0.1, "simpo_gamma": 0.5, "cpo_alpha": 0.0, "label_smoothing": 0.0},
    "orpo": {"beta": 0.1},
    "kto": {"beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0},
}


_BOUNDS = {"beta": Above(0), "label_smoothing": AtLeast(0, below=0.5)}  # of others: at least 0


def loss_arguments(train: TrainConfig) -> dict[str, float]:
    """Return all arguments of train.loss, those of `train.loss_arguments` and defaults.

    Raises ConfigError for names and values that the loss does not take.
    """
    defaults = LOSS_ARGUMENTS[train.loss]
    arguments = read_arguments("train.loss_arguments", train.loss_arguments)
    for name, value in arguments.items():
        if name not in defaults:
            whose = f"train.loss {train.loss!r}" if train.loss else "a model with one score, without train.loss,"
            raise ConfigError(f"train.loss_arguments has {name}, and {whose} takes {', '.join(defaults)}")
        bound = _BOUNDS.get(name, AtLeast(0))
        if isinstance(value, bool) or not isinstance(value, int | float) or not bound.allows(value):
            raise ConfigError(f"train.loss_arguments has {name}={value}; it must be a number {bound}")
    return {**defaults, **arguments}


def loss_text(train: TrainConfig) -> str:
    """Describe a loss of preferences.

    >>> loss_text(TrainConfig(loss="dpo", loss_arguments=("beta=0.2",)))
    'dpo, beta 0.2, label_smoothing 0'
    """
    return ", ".join([train.loss, *(f"{name} {value:g}" for name, value in loss_arguments(train).items())])
