"""The arguments of `train.loss`: their names, defaults and bounds."""

from collections.abc import Mapping

from longspan.config.keys import Above, AtLeast
from longspan.config.preference_losses import LOSSES
from longspan.config.sections import TrainConfig
from longspan.config.text_values import read_arguments
from longspan.errors import ConfigError

# Without train.loss: the arguments of a model with one score, over pairs.
SCORE_ARGUMENTS: Mapping[str, float] = {"center_rewards_coefficient": 0.0}
# An argument that is not here must be at least 0.
_BOUNDS = {"beta": Above(0), "label_smoothing": AtLeast(0, below=0.5)}


def loss_arguments(train: TrainConfig) -> dict[str, float]:
    """Return all arguments of train.loss, those of `train.loss_arguments` and defaults.

    Raises ConfigError for names and values that the loss does not take.
    """
    defaults = LOSSES[train.loss].arguments if train.loss else SCORE_ARGUMENTS
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
