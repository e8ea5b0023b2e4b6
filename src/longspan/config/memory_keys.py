"""What the keys of memory in [train] say together: whether a plan of memory chooses, and what is left to it."""

from typing import Any, Literal

from longspan.config.keys import AUTO
from longspan.config.sections import TrainConfig
from longspan.errors import ConfigError
from longspan.plan.memory.settings import LEAST_OF_GPU, bytes_hint

Checkpointing = Literal["none", "full", "selective"]
# With this behind a policy, the inputs of layers wait in the host's memory.
ON_HOST = "+host"


def chooses_measures(train: TrainConfig, *, gpu: bool) -> bool:
    """Return whether a plan of memory chooses how a run saves memory; on CPUs only with `device_memory_limit`."""
    return train.plan_memory and (gpu or train.device_memory_limit > 0)


def given_checkpointing(train: TrainConfig) -> Checkpointing | None:
    """Return what layers recompute by train.activation_checkpointing; None ("auto"): the plan of memory decides."""
    word: Any = train.activation_checkpointing.removesuffix(ON_HOST)
    return None if word == AUTO else word


def check_gpu_memory_limit(train: TrainConfig) -> None:
    """Raise ConfigError for a `device_memory_limit` that is too small for any GPU, as one given in gigabytes is."""
    if 0 < train.device_memory_limit < LEAST_OF_GPU:
        raise ConfigError(
            f"train.device_memory_limit is {train.device_memory_limit}: {bytes_hint(train.device_memory_limit)}"
        )
