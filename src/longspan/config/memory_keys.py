"""What the keys of memory in [train] ask for: whether a plan of memory chooses, and which keys it must follow.

Which measures fit is decided in `longspan.plan.memory`; what a run does with them is in `train/memory/`. No torch.
"""

from dataclasses import replace
from typing import Literal

from longspan.config.keys import AUTO
from longspan.config.sections import RunConfig, TrainConfig
from longspan.errors import ConfigError

Checkpointing = Literal["none", "full", "selective"]


def chooses_measures(train: TrainConfig, *, gpu: bool) -> bool:
    """Whether a run on such devices chooses its measures by a plan of memory: on CPUs only within `memory_bytes`.

    >>> chooses_measures(TrainConfig(), gpu=True), chooses_measures(TrainConfig(), gpu=False)
    (True, False)
    """
    return train.memory == AUTO and (gpu or train.memory_bytes > 0)


def checkpointing_by_hand(train: TrainConfig) -> Checkpointing | None:
    """The value of `activation_checkpointing` that is given; None: it is left to the plan of memory."""
    return None if train.activation_checkpointing == AUTO else train.activation_checkpointing


def with_keys_as_written(config: RunConfig, *, gpu: bool) -> RunConfig:
    """The configuration with "none" for an `activation_checkpointing` that nothing chooses on such devices.

    Raises ConfigError where other keys need layers that are recomputed.
    """
    train = config.train
    if chooses_measures(train, gpu=gpu) or train.activation_checkpointing != AUTO:
        return config
    _check_recomputed(train, '"auto", which is "none" ' + _why_none(train))
    return replace(config, train=replace(train, activation_checkpointing="none"))


def check_measures(config: RunConfig) -> None:
    """Raise ConfigError for keys of recomputation that contradict each other on any device."""
    train = config.train
    if train.activation_checkpointing == "none":
        _check_recomputed(train, '"none"')
    if train.activation_checkpointing != AUTO:
        return
    if train.memory == "none":
        _check_recomputed(train, '"auto", which is "none" ' + _why_none(train))
    if train.recompute_layers:
        raise ConfigError(
            f"train.recompute_layers is {train.recompute_layers}: that many layers are recomputed, and under "
            'train.activation_checkpointing "auto" train.memory chooses how many are; use "full" or "selective" with '
            "it, or 0 layers"
        )


def _why_none(train: TrainConfig) -> str:
    return 'under train.memory "none"' if train.memory == "none" else "on CPUs without train.memory_bytes"


def _check_recomputed(train: TrainConfig, kind: str) -> None:
    """Raise ConfigError for keys that need recomputed layers, where there are none because of `kind`."""
    if train.recompute_layers:
        raise ConfigError(
            f"train.recompute_layers is {train.recompute_layers}: that many layers are recomputed, and "
            f'train.activation_checkpointing is {kind}; use "full" or "selective", or 0 layers'
        )
    if train.offload_activations:
        raise ConfigError(
            "train.offload_activations is true: it moves what checkpointed layers keep, and "
            f'train.activation_checkpointing is {kind}; use "full" or "selective"'
        )
