"""flash-linear-attention (extra `fla`): whether it can be used here, and its functions.

Kernels are called part by part, since states are exchanged between the parts. Source: github.com/fla-org/
flash-linear-attention, `fla.ops` of fla-core 0.6; names moved between versions, so that one is demanded here.
"""

import warnings
from collections.abc import Sequence
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from longspan.errors import LayoutError
from longspan.ssm.kernels.call import Inputs
from longspan.ssm.kernels.runs import CHUNK, LocalRuns


def batch_of_one(inputs: Inputs) -> tuple[Tensor, ...]:
    """All of them (1, T, ·, ·)."""
    return tuple(x.unsqueeze(0) for x in inputs if x is not None)


def of_inputs(found: tuple[Tensor, ...], inputs: Inputs) -> tuple[Tensor, ...]:
    """Gradients (1, T, ·, ·) as those of the inputs, in their dtypes."""
    given = (x for x in inputs if x is not None)
    return tuple(gradient.squeeze(0).to(x.dtype) for gradient, x in zip(found, given, strict=True))


def cumulative(g: Tensor, runs: LocalRuns, *, reverse: bool = False) -> Tensor:
    """(1, T, H, …) of (T, H, …): sums inside chunks, in base 2; `reverse`: gradients of such sums."""
    sums = fla_function("ops.utils", "chunk_local_cumsum")
    base = {"reverse": True} if reverse else {"scale": fla_function("ops.utils.constant", "RCP_LN2")}
    return sums(g.unsqueeze(0).contiguous(), chunk_size=CHUNK, **base, **indices(runs))


def indices(runs: LocalRuns) -> dict[str, Tensor]:
    """Where runs and their chunks lie, as the kernels' arguments."""
    return {"cu_seqlens": runs.ends, "chunk_indices": runs.chunk_indices}


NEEDED = (0, 6)
_HALF = (torch.bfloat16, torch.float16)
_LARGEST_KEY = 256
_HOPPER, _WRONG_TRITON = 9, ((3, 4, 0), (3, 7, 1))


@cache
def fla_missing(device: torch.device) -> str:
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


def fla_lacks(dtype: torch.dtype, device: torch.device, key_size: int = 2, value_size: int = 2) -> str:
    """What a recurrence of these sizes would need, or what has no heads; "" for nothing."""
    if device.type != "cuda":
        return f"cuda tensors, got {device.type}"
    if dtype not in _HALF:
        return f"bfloat16 or float16, got {str(dtype).removeprefix('torch.')}"
    if key_size > _LARGEST_KEY or key_size % 2 or value_size % 2:
        return f"even sizes of heads, of keys {_LARGEST_KEY} at most, got {key_size} and {value_size}"
    return fla_missing(device)


@cache
def fla_function(module: str, name: str) -> Any:
    """`fla.MODULE.NAME`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ImportWarning)  # it names other packages that it could use
        return getattr(import_module(f"fla.{module}"), name)


def numbers(text: str) -> tuple[int, ...]:
    """The numbers of a version, at most three."""
    return tuple(int(part) for part in text.split("+")[0].split(".")[:3] if part.isdigit())


TORCH_ALONE = "torch"
# Of scans without a delta term, and of convolutions: where each was tried.
PACKAGES = {
    "mamba_ssm": "tried on one H200",
    "causal_conv1d": "its CUDA code untried",
}


def lacks_package(name: str, needed: tuple[int, int], device: torch.device) -> str:
    """What is missing for a package's kernels: CUDA, the package, or that version of it; "" for nothing."""
    if device.type != "cuda":
        return f"cuda tensors, got {device.type}"
    return _installed(name, needed)


@cache
def _installed(name: str, needed: tuple[int, int]) -> str:
    wanted = ".".join(map(str, needed))
    try:
        found = version(name)
    except PackageNotFoundError:
        return f"{name} {wanted}, which is not installed: pip install '{name}=={wanted}.*'"
    return "" if numbers(found)[:2] == needed else f"{name} {wanted}, and {found} is installed"


def refuse(name: str, lacking: str) -> None:
    """Raises LayoutError where a kernel that was asked for lacks something."""
    if lacking:
        raise LayoutError(f"the kernel {name} of state-space layers was asked for and needs {lacking}; leave it out")


def check_names(asked: Sequence[str]) -> None:
    """Raises LayoutError for names that are no kernels, or that exclude each other."""
    known = (TORCH_ALONE, *PACKAGES)
    for name in asked:
        if name not in known:
            raise LayoutError(f"{name!r} is no kernel of state-space layers; use {', '.join(known)}")
    if TORCH_ALONE in asked and len(set(asked)) > 1:
        raise LayoutError(f"kernels of state-space layers are {', '.join(asked)}; give torch alone, or without it")
