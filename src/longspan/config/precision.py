"""What a run holds its parameters in and what it computes in: the keys `model.dtype` and `model.compute_dtype`.

Parameters and optimizer states are of `dtype`, and so are checkpoints; FSDP2 casts parameters to the compute dtype as
it gathers them, and sums gradients in float32. torch is imported where it is needed: `--help` does without.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING

from longspan.config.bounds import AUTO
from longspan.config.sections import ModelConfig, RunConfig
from longspan.errors import ConfigError

if TYPE_CHECKING:
    import torch

_COMPUTE = {"float32": ("float32", "bfloat16"), "bfloat16": ("bfloat16",), "float64": ("float64",)}
_BITS = {"float64": 53, "float32": 24, "bfloat16": 8}  # of a number's significand


def check_precision(config: RunConfig) -> None:
    """Raise ConfigError for a compute dtype that makes no sense over parameters of `model.dtype`."""
    dtype, compute = config.model.dtype, config.model.compute_dtype
    if compute in (AUTO, *_COMPUTE[dtype]):
        return
    bits = f"{compute} has {_BITS[compute]} significant bits, parameters and optimizer states in {dtype} {_BITS[dtype]}"
    cure = f'model.dtype = "{compute}"' if _BITS[compute] > _BITS[dtype] else 'model.dtype = "float32"'
    raise ConfigError(
        f'model.compute_dtype is "{compute}" and model.dtype is "{dtype}": {bits}, which only costs memory or time; '
        f"use {cure}, or model.compute_dtype = {' or '.join(map(repr, _COMPUTE[dtype]))}"
    )


def warn_of_lost_updates(config: RunConfig, log: Callable[[str], None]) -> None:
    """Say what a run in pure bfloat16 loses."""
    if config.model.dtype == "bfloat16" and not config.train.stochastic_rounding and not config.lora.rank:
        log(
            'caution: model.dtype is "bfloat16": updates below 1/512 of a weight are rounded away, and so the model '
            'learns less (docs/precision.md); use model.dtype = "float32" with model.compute_dtype = "bfloat16", or '
            "train.stochastic_rounding = true"
        )


def compute_dtype(model: ModelConfig, device: str) -> "torch.dtype":
    """What a run computes in on a kind of device: of "auto", bfloat16 on GPUs over float32, else as `model.dtype`.

    >>> compute_dtype(ModelConfig(), "cuda")
    torch.bfloat16
    """
    import torch

    name = model.compute_dtype
    if name == AUTO:
        name = "bfloat16" if device == "cuda" and model.dtype == "float32" else model.dtype
    return getattr(torch, name)
