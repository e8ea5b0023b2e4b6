"""flash-linear-attention (extra `fla`): whether it can be used here, and its functions.

Kernels are called part by part, since states are exchanged between the parts. Source: github.com/fla-org/
flash-linear-attention, `fla.ops` of fla-core 0.6; names moved between versions, so that one is demanded here.
"""

import warnings
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch

NEEDED = (0, 6)
_HALF = (torch.bfloat16, torch.float16)
_LARGEST_KEY = 256
_HOPPER, _WRONG_TRITON = 9, ((3, 4, 0), (3, 7, 1))


@cache
def missing(device: torch.device) -> str:
    """What this installation or device lacks for the kernels; "" where nothing."""
    try:
        found = version("fla-core")
    except PackageNotFoundError:
        return "flash-linear-attention, which is not installed: pip install 'longspan[fla]'"
    if numbers(found)[:2] != NEEDED:
        return f"fla-core {'.'.join(map(str, NEEDED))}, and {found} is installed"
    if find_spec("triton") is None:
        return "Triton, which comes with torch for CUDA"
    triton = version("triton")
    low, high = _WRONG_TRITON
    if torch.cuda.get_device_capability(device)[0] == _HOPPER and low <= numbers(triton) < high:
        return (
            f"Triton {'.'.join(map(str, high))} or later on this GPU, and {triton} is installed, whose code for gated "
            "delta rules gives wrong gradients (github.com/fla-org/flash-linear-attention/issues/640)"
        )
    return ""


def lacks(dtype: torch.dtype, device: torch.device, key_size: int = 2, value_size: int = 2) -> str:
    """What a recurrence of these sizes would need, or what has no heads; "" for nothing."""
    if device.type != "cuda":
        return f"cuda tensors, got {device.type}"
    if dtype not in _HALF:
        return f"bfloat16 or float16, got {str(dtype).removeprefix('torch.')}"
    if key_size > _LARGEST_KEY or key_size % 2 or value_size % 2:
        return f"even sizes of heads, of keys {_LARGEST_KEY} at most, got {key_size} and {value_size}"
    return missing(device)


@cache
def function(module: str, name: str) -> Any:
    """`fla.MODULE.NAME`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ImportWarning)  # it names other packages that it could use
        return getattr(import_module(f"fla.{module}"), name)


def numbers(text: str) -> tuple[int, ...]:
    """The numbers of a version, at most three."""
    return tuple(int(part) for part in text.split("+")[0].split(".")[:3] if part.isdigit())
