"""Whether the keys of optimizer and schedule fit together; before any process group exists."""

from longspan.config.sections import RunConfig, TrainConfig
from longspan.errors import ConfigError
from longspan.train.optim.schedule import Schedule

_OF_ADAMW = ("betas", "eps")


def check_optimizer(config: RunConfig) -> None:
    """Raise ConfigError for an optimizer that cannot train here, for its arguments, and for steps of the schedule."""
    train = config.train
    if not train.epochs:  # otherwise the corpus says how many steps there are
        Schedule.of(train)
    if not all(0 <= beta < 1 for beta in train.betas):
        raise ConfigError(f"train.betas is {list(train.betas)}; both must be at least 0 and below 1")
    for key in _OF_ADAMW:
        if train.optimizer != "adamw" and getattr(train, key) != getattr(TrainConfig(), key):
            raise ConfigError(
                f"train.{key} is {getattr(train, key)}, a key of adamw, and train.optimizer is {train.optimizer!r}; "
                f'give "{key}=…" in train.optimizer_arguments'
            )
    if train.stochastic_rounding and config.model.dtype != "bfloat16":
        raise ConfigError(
            f'train.stochastic_rounding rounds updates of parameters in bfloat16, and model.dtype is "'
            f'{config.model.dtype}"; leave it out, or use model.dtype = "bfloat16"'
        )
    if train.optimizer != "adamw" or train.optimizer_arguments:
        _try(train)


def _try(train: TrainConfig) -> None:
    """Raise ConfigError for an optimizer that refuses its arguments over a matrix, which every model has."""
    from torch import nn  # which --help does without

    from longspan.train.optim.optimizer import OptimizerChoice, parameter_groups

    OptimizerChoice.of(train).over(parameter_groups(nn.Linear(2, 2, bias=False), train.optimizer, train.weight_decay))
