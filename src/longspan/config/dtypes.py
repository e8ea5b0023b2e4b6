"""The dtype in which a run computes, by [model] and the device. torch is imported only where it is returned."""

from typing import TYPE_CHECKING

from longspan.config.keys import AUTO
from longspan.config.sections import ModelConfig

if TYPE_CHECKING:
    import torch


DTYPE_BYTES = {"float32": 4, "float64": 8, "bfloat16": 2}


def compute_dtype(model: ModelConfig, device: str) -> "torch.dtype":
    """Return the dtype of a run's arithmetic; "auto" is bfloat16 on GPUs over float32, else `model.dtype`."""
    import torch

    return getattr(torch, compute_dtype_name(model, device))


def compute_dtype_name(model: ModelConfig, device: str) -> str:
    """Return the name of the dtype of a run's arithmetic, as `compute_dtype` does; no torch is imported."""
    if model.compute_dtype != AUTO:
        return model.compute_dtype
    return "bfloat16" if device == "cuda" and model.dtype == "float32" else model.dtype
