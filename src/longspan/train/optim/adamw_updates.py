"""Updates of AdamW in one pass over parameters, gradients and moments.

On GPUs a Triton kernel updates many tensors in one launch; elsewhere torch does the same operations with the same bits.
"""

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from importlib import import_module
from struct import Struct
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from longspan.comm import to_device
from longspan.lazy import import_triton_kernels
from longspan.train.optim.moment_codes import PackedMoments, nearest_root
from longspan.train.optim.stochastic_rounding import (
    Places,
    RandomKey,
    random_words,
    round_stochastically,
    rounding_noise,
)


def numbers_per_chunk(device: torch.device) -> int:
    """Return how many numbers are worked on at a time: on a CPU as many as its caches hold."""
    return 1 << 15 if device.type == "cpu" else 1 << 24


_KERNELS = "longspan.train.optim.adamw_kernels"
BLOCK = 1024  # numbers that a program updates at a time
WARPS = 4
# The largest tensor has sixteen programs on each of an H200's multiprocessors.
PROGRAMS = 2112
ALIGNMENT = 16  # bytes that one load of a thread takes
COLUMNS = 20  # columns of the table, of eight bytes each: adamw_kernels.py says what is in them
_ROW = Struct("=16q8f")
# Where numbers are rounded to the nearest, zeros stand for a key (2) and places (6).
_NEAREST = (0,) * 8
_DTYPES = {torch.float32: "float32", torch.bfloat16: "bfloat16", torch.uint8: "uint8"}


class Factors(NamedTuple):
    """What the numbers of a parameter are multiplied with in one update, in the order of the kernel's table."""

    decay: float  # 1 − lr · weight decay
    mean_weight: float  # 1 − β₁
    square_decay: float  # β₂
    square_weight: float  # 1 − β₂
    root_scale: float  # 1 / √(1 − β₂ᵗ)
    eps: float
    rate: float  # lr / (1 − β₁ᵗ)
    # Gradients are multiplied by it: −1 to maximize.
    sign: float

    @classmethod
    def from_parameter_group(cls, group: Mapping[str, Any], step: float) -> "Factors":
        """Return the factors of update `step`. Bias corrections are in `rate` and `root_scale`, so that the kernel
        computes no powers of β.
        """
        beta1, beta2 = group["betas"]
        lr = float(group["lr"])
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
    """One parameter's update: local tensors of one shape, and the key and places by which it is rounded, if it is.

    With `moments_rounding`, the key and the first place by which they are rounded, moments are packed in eight bits
    (moment_codes.py).
    """

    parameter: Tensor
    gradient: Tensor
    mean: Tensor
    square: Tensor
    factors: Factors
    key: RandomKey | None = None
    places: Places | None = None
    moments_rounding: tuple[RandomKey, int] | None = None


def kernel_supports(update: Update) -> bool:
    """Return whether the kernel updates these tensors: contiguous ones of a GPU, in float32 or bfloat16.

    `places` may only have rows of fewer than 2³¹ numbers, as the kernel divides by their length in 32 bits.
    """
    tensors = update[:4]
    parameter, gradient, mean, square = tensors
    return (
        parameter.is_cuda
        and all(tensor.dtype in _DTYPES and tensor.is_contiguous() for tensor in tensors)
        and mean.dtype == square.dtype
        and parameter.shape == gradient.shape
        and (update.places is None or update.places.is_flat or update.places.inner < 1 << 31)
        and import_triton_kernels(_KERNELS) is not None
    )


def launch_update_kernels(updates: Sequence[Update], scale: Tensor | None) -> int:
    """Update all these tensors of one GPU; returns the number of launches, one for each kind of tensors.

    The kernel is compiled for types, alignment, rounding and kind of places; factors and addresses are in its table.
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
        import_triton_kernels(_KERNELS).adamw_kernel[min(blocks, PROGRAMS), len(alike)](
            to_device(kernel_table(alike), first.device),
            scale,
            *(getattr(import_module("triton.language"), _DTYPES[dtype]) for dtype in dtypes),
            SCALED=scale is not None,
            BY_CHANCE=by_chance,
            FLAT=flat,
            ALIGNMENT=ALIGNMENT if aligned else 2,  # the bytes of a bfloat16 number
            BLOCK=BLOCK,
            num_warps=WARPS,
            enable_fp_fusion=False,  # the same bits as the reference, which rounds every product
            enable_reflect_ftz=False,
        )
    return len(by_launch)


def kernel_table(updates: Sequence[Update]) -> Any:
    """Return the kernel's table (tensors, COLUMNS) of int64, whose last columns are pairs of factors in float32."""
    table = bytearray(_ROW.size * len(updates))
    for row, update in enumerate(updates):
        rounding = (
            (*update.key, *update.places) if update.key is not None and update.places is not None else _NEAREST
        )
        addresses = [tensor.data_ptr() for tensor in update[:4]]
        key, first = update.moments_rounding or ((0, 0), 0)
        numbers = (update.parameter.numel(), *rounding, *key, first)
        _ROW.pack_into(table, _ROW.size * row, *addresses, *numbers, *update.factors)
    return np.frombuffer(table, np.int64).reshape(len(updates), COLUMNS)


def apply_updates(updates: Sequence[Update], scale: Tensor | None) -> None:
    """Update all parameters and moments: on a GPU in a few launches, elsewhere one after another.

    Versions are raised by hand, for autograd does not see what the kernel writes.
    """
    kernel_updates = list[Update]()
    torch_updates = list[Update]()
    for update in updates:
        if update.parameter.numel():
            (kernel_updates if kernel_supports(update) else torch_updates).append(update)
    launch_update_kernels(kernel_updates, scale)
    # A scale that is not a number changes nothing; the kernel sees to that itself.
    if torch_updates and (scale is None or not bool(scale.isnan())):
        for update in torch_updates:
            apply_update_by_torch(update, scale)
    torch.autograd.graph.increment_version([tensor for u in updates for tensor in (u.parameter, u.mean, u.square)])


def apply_update_by_torch(update: Update, scale: Tensor | None = None) -> None:
    """Update one parameter and its moments, in place, by operations of torch: the reference of the kernel, in bounded
    chunks.

    With a key, bfloat16 results are rounded by random words that a number's place in the whole tensor gives. Moments in
    eight bits are unpacked and packed again chunk by chunk.
    """
    tensors = (update.parameter, update.gradient, update.mean, update.square)
    packed = (
        PackedMoments(update.mean, update.square, update.parameter.numel()) if update.moments_rounding else None
    )
    flat_tensors = [tensor.contiguous().view(-1) for tensor in tensors]
    flat_parameter, _, flat_mean, flat_square = flat_tensors
    device = flat_parameter.device
    wide = torch.promote_types(update.parameter.dtype, torch.float32)
    scale = None if scale is None else scale.to(wide)
    chunk = numbers_per_chunk(device)
    for start in range(0, len(flat_parameter), chunk):
        stop = min(start + chunk, len(flat_parameter))
        outputs = [flat_parameter[start:stop], flat_mean[start:stop], flat_square[start:stop]]
        inputs = [tensor[start:stop].to(wide) for tensor in flat_tensors]
        if packed is not None:
            inputs[2:] = packed.read(start, stop)
        results = _compute_update(inputs, update.factors, scale)
        if update.key is not None and update.places is not None:
            words = random_words(update.key, update.places.indices(start, stop, device))
            results = [
                round_stochastically(result, rounding_noise(words, stream))
                if output.dtype == torch.bfloat16
                else result
                for stream, (output, result) in enumerate(zip(outputs, results, strict=True))
            ]
        if packed is not None and update.moments_rounding is not None:
            key, first = update.moments_rounding
            words = random_words(key, first + torch.arange(start, stop, device=device))
            noise = [rounding_noise(words, stream) for stream in (0, 1)]
            packed.write(start, stop, results[1], results[2], noise)
            outputs = outputs[:1]  # the parameter is left to write
            results = results[:1]
        for output, result in zip(outputs, results, strict=True):
            output.copy_(result)
    # `contiguous` made copies of the other tensors.
    for tensor, result in zip(tensors, flat_tensors, strict=True):
        if tensor is not update.gradient and not tensor.is_contiguous():
            tensor.copy_(result.view(tensor.shape))


def _compute_update(tensors: Sequence[Tensor], factors: Factors, scale: Tensor | None) -> list[Tensor]:
    """Every operation rounds once, as the kernel's do."""
    parameter, gradient, mean, square = tensors
    if scale is not None:
        gradient = gradient * scale
    gradient = gradient * factors.sign
    mean = mean + (gradient - mean) * factors.mean_weight
    square = square * factors.square_decay + gradient * gradient * factors.square_weight
    denominator = nearest_root(square) * factors.root_scale + factors.eps
    return [parameter * factors.decay - mean / denominator * factors.rate, mean, square]
