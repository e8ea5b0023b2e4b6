"""What the keys of memory in [train] ask for: whether a plan of memory chooses, and which keys it must follow.

Which measures fit is decided in `longspan.plan.memory`; what a run does with them is in `train/memory/`. No torch.
"""

from typing import Literal

from longspan.config.keys import AUTO
from longspan.config.sections import TrainConfig
from longspan.errors import ConfigError
from longspan.plan.memory.bytes import LEAST_OF_GPU, bytes_hint

Checkpointing = Literal["none", "full", "selective"]


def chooses_measures(train: TrainConfig, *, gpu: bool) -> bool:
    """Return whether a plan of memory chooses how a run saves memory, such as which layers it recomputes.

    On CPUs (no `gpu`) it does so only with `memory_bytes`.

    >>> chooses_measures(TrainConfig(), gpu=True), chooses_measures(TrainConfig(), gpu=False)
    (True, False)
    """
    return train.memory == AUTO and (gpu or train.memory_bytes > 0)


def key_checkpointing(train: TrainConfig) -> Checkpointing | None:
    """Return the `activation_checkpointing` that is given; None: it is left to the plan of memory."""
    return None if train.activation_checkpointing == AUTO else train.activation_checkpointing


def check_measures(train: TrainConfig, *, gpu: bool | None = None) -> None:
    """Raise ConfigError for keys of memory that contradict each other or the devices: GPUs, CPUs, or (None) any."""
    kind = train.activation_checkpointing
    if gpu and 0 < train.memory_bytes < LEAST_OF_GPU:
        raise ConfigError(f"train.memory_bytes is {train.memory_bytes}: {bytes_hint(train.memory_bytes)}")
    if kind == "none":
        _check_keys_of_recomputation(train, '"none"')
    if kind != AUTO:
        return
    if not chooses_measures(train, gpu=gpu is not False):  # None: as on a GPU, where more keys are allowed
        where = "on CPUs without train.memory_bytes" if train.memory == AUTO else 'under train.memory "none"'
        _check_keys_of_recomputation(train, f'"{AUTO}", which is "none" {where}')
    if train.recompute_layers and train.memory == AUTO:
        raise ConfigError(
            f"train.recompute_layers is {train.recompute_layers}: that many layers are recomputed, and under "
            'train.activation_checkpointing "auto" train.memory chooses how many are; use "full" or "selective" with '
            "it, or 0 layers"
        )


def _check_keys_of_recomputation(train: TrainConfig, kind: str) -> None:
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
