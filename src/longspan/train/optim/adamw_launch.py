"""Updates of AdamW as values, and launches of its kernel: a table of many tensors for each, and which go together."""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from longspan.comm import to_device
from longspan.train.optim.rounding_bits import Key, Places

BLOCK, WARPS = 1024, 4  # numbers that a program updates at a time, by so many warps
PROGRAMS = 2112  # of the largest tensor: sixteen on each of an H200's multiprocessors
ALIGNMENT = 16  # bytes that one load of a thread takes
COLUMNS = 20  # columns of the table, of eight bytes each: as in adamw_kernels.py
_ROW = Struct("=13q24x8f")  # addresses, count, key and places; from the column FACTORS of the kernels on, factors
_NEAREST = (0,) * 8  # in place of a key (2) and places (6), where numbers are rounded to the nearest
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}


class Factors(NamedTuple):
    """What the numbers of a parameter are multiplied with in one update, in the order of the kernel's table."""

    decay: float  # 1 − lr · weight decay
    mean_weight: float  # 1 − β₁
    square_decay: float  # β₂
    square_weight: float  # 1 − β₂
    root_scale: float  # 1 / √(1 − β₂ᵗ)
    eps: float
    rate: float  # lr / (1 − β₁ᵗ)
    sign: float  # of gradients: −1 to maximize

    @classmethod
    def of(cls, group: Mapping[str, Any], step: float) -> "Factors":
        """Return the factors of a group's parameters at their step, counted from 1.

        Bias corrections of both moments are in `rate` and `root_scale`, so that the kernel computes no powers of β.
        """
        (beta1, beta2), lr = group["betas"], float(group["lr"])
        return cls(
            decay=1 - lr * group["weight_decay"],
            mean_weight=1 - beta1,
            square_decay=beta2,
            square_weight=1 - beta2,
            root_scale=1 / math.sqrt(1 - beta2**step),
            eps=group["eps"],
            rate=lr / (1 - beta1**step),
            sign=-1.0 if group["maximize"] else 1.0,
        )


class Update(NamedTuple):
    """One parameter's update: local tensors of one shape, and the key and places by which it is rounded, if it is."""

    parameter: Tensor
    gradient: Tensor
    mean: Tensor
    square: Tensor
    factors: Factors
    key: Key | None = None
    places: Places | None = None


def kernel_takes(update: Update) -> bool:
    """Return whether the kernel updates these tensors: contiguous ones of a GPU, in float32 or bfloat16.

    `places` may only have rows of fewer than 2³¹ numbers, as the kernel divides by their length in 32 bits.
    """
    parameter, gradient, mean, square = tensors = update[:4]
    return (
        on_gpu(parameter)
        and all(tensor.dtype in _DTYPES and tensor.is_contiguous() for tensor in tensors)
        and mean.dtype == square.dtype
        and parameter.shape == gradient.shape
        and (update.places is None or update.places.is_flat or update.places.inner < 1 << 31)
        and _kernels() is not None
    )


def on_gpu(tensor: Tensor) -> bool:
    """Return whether a tensor is on a GPU."""
    return tensor.device.type == "cuda"


def launch_updates(updates: Sequence[Update], scale: Tensor | None) -> int:
    """Update all these tensors of one GPU; returns the number of launches.

    Tensors share a launch if they have the same types, alignment, rounding and kind of places, which the kernel is
    compiled for: a few launches at most. Factors and addresses are in the kernel's table. Of tensors that are not
    aligned for wide loads the kernel only assumes 2 bytes, the size of a bfloat16 number.
    """
    by_launch = defaultdict[Any, list[Update]](list)
    for update in updates:
        aligned = all(tensor.data_ptr() % ALIGNMENT == 0 for tensor in update[:4])
        dtypes = tuple(tensor.dtype for tensor in update[:3])
        flat = update.places is None or update.places.is_flat
        by_launch[dtypes, aligned, update.key is not None, flat].append(update)
    for (dtypes, aligned, by_chance, flat), alike in by_launch.items():
        first = alike[0].parameter
        blocks = -(-max(update.parameter.numel() for update in alike) // BLOCK)
        _kernels().adamw_kernel[min(blocks, PROGRAMS), len(alike)](
            to_device(make_table(alike), first.device),
            scale,
            *map(_triton_type, dtypes),
            SCALED=scale is not None,
            BY_CHANCE=by_chance,
            FLAT=flat,
            ALIGNMENT=ALIGNMENT if aligned else 2,
            BLOCK=BLOCK,
            num_warps=WARPS,
            enable_fp_fusion=False,  # the same bits as the reference, which rounds every product
            enable_reflect_ftz=False,
        )
    return len(by_launch)


def make_table(updates: Sequence[Update]) -> Any:
    """Return the kernel's table (tensors, COLUMNS) of int64, whose last columns are pairs of factors in float32."""
    table = bytearray(_ROW.size * len(updates))
    for row, update in enumerate(updates):
        rounding = (*update.key, *update.places) if update.key is not None and update.places is not None else _NEAREST
        addresses = [tensor.data_ptr() for tensor in update[:4]]
        _ROW.pack_into(table, _ROW.size * row, *addresses, update.parameter.numel(), *rounding, *update.factors)
    return np.frombuffer(table, np.int64).reshape(len(updates), COLUMNS)


def _triton_type(dtype: torch.dtype) -> Any:
    """Return Triton's name of a type, which its kernels take as a constant."""
    return getattr(import_module("triton.language"), _DTYPES[dtype])


@cache
def _kernels() -> Any:
    """Return the module of Triton kernels; None where Triton is not installed."""
    return None if find_spec("triton") is None else import_module("longspan.train.optim.adamw_kernels")
