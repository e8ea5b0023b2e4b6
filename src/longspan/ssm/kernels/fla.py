"""flash-linear-attention (extra `fla`), used where it can be: whether that is here, calls of its functions, and ours.

Its kernels are called part by part, since states are exchanged between the parts. Source: github.com/fla-org/
flash-linear-attention, `fla.ops` of fla-core 0.6; names moved between versions, so this one is required.
"""

import warnings
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor

from longspan.lazy import import_triton_kernels
from longspan.ssm.kernels.interface import Inputs
from longspan.ssm.kernels.local_runs import CHUNK, LocalRuns


def add_batch_dim(inputs: Inputs) -> tuple[Tensor, ...]:
    """Return the inputs that are not None as the kernels take them: (1, T, ·, ·)."""
    return tuple(x.unsqueeze(0) for x in inputs if x is not None)


def gradients_like_inputs(gradients: tuple[Tensor, ...], inputs: Inputs) -> tuple[Tensor, ...]:
    """Return the kernels' gradients (1, T, ·, ·) as those of the inputs that are not None: (T, ·, ·), in the input's
    dtype.
    """
    tensors = (x for x in inputs if x is not None)
    return tuple(gradient.squeeze(0).to(x.dtype) for gradient, x in zip(gradients, tensors, strict=True))


def chunk_cumsum(g: Tensor, runs: LocalRuns, *, reverse: bool = False) -> Tensor:
    """Sum log-decays (T, H, …) from each chunk's start to (1, T, H, …), in base 2, which the kernels take.

    `reverse` gives the gradients of log-decays from the kernels' gradients of such sums: it sums to the chunk's end,
    and changes no base, since the kernels' gradients are those of natural log-decays.
    """
    sum_in_chunks = fla_function("ops.utils", "chunk_local_cumsum")
    options = {"reverse": True} if reverse else {"scale": fla_function("ops.utils.constant", "RCP_LN2")}
    return sum_in_chunks(g.unsqueeze(0).contiguous(), **options, **chunk_arguments(runs))


def run_index_arguments(runs: LocalRuns) -> dict[str, Tensor]:
    """Return where runs begin and which run each chunk is of, as keywords of fla's functions."""
    return {"cu_seqlens": runs.ends, "chunk_indices": runs.chunk_indices}


def chunk_arguments(runs: LocalRuns) -> dict[str, Any]:
    """Return `run_index_arguments` and the rows of a chunk, as keywords of fla's functions that work by chunks."""
    return {"chunk_size": CHUNK, **run_index_arguments(runs)}


NEEDED = (0, 6)  # version of fla-core
_HALF = (torch.bfloat16, torch.float16)
_LARGEST_KEY = 256  # numbers of a key in fla's kernels, at most
# On GPUs of compute capability 9 these versions of Triton, from the first to before the second, give wrong gradients.
_HOPPER = 9
_WRONG_TRITON = ((3, 4, 0), (3, 7, 1))


@cache
def fla_unsupported_reason(device: torch.device) -> str:
    """Return what this installation or CUDA device lacks for fla's kernels, for an error; "" for nothing."""
    try:
        installed = version("fla-core")
    except PackageNotFoundError:
        return "flash-linear-attention, which is not installed: pip install 'longspan[fla]'"
    if version_numbers(installed)[:2] != NEEDED:
        return f"fla-core {'.'.join(map(str, NEEDED))}, and {installed} is installed"
    if find_spec("triton") is None:
        return "Triton, which comes with torch for CUDA"
    triton = version("triton")
    low, high = _WRONG_TRITON
    if torch.cuda.get_device_capability(device)[0] == _HOPPER and low <= version_numbers(triton) < high:
        return (
            f"Triton {'.'.join(map(str, high))} or later on this GPU, and {triton} is installed, whose code for gated "
            "delta rules gives wrong gradients (github.com/fla-org/flash-linear-attention/issues/640)"
        )
    return ""


def fla_unsupported_call_reason(
    dtype: torch.dtype, device: torch.device, key_size: int = 2, value_size: int = 2
) -> str:
    """Return what a recurrence would need to be run by fla's kernels; "" for nothing. Default sizes suit
    each kernel.
    """
    if device.type != "cuda":
        return f"cuda tensors, got {device.type}"
    if dtype not in _HALF:
        return f"bfloat16 or float16, got {str(dtype).removeprefix('torch.')}"
    if key_size > _LARGEST_KEY or key_size % 2 or value_size % 2:
        return f"even sizes of heads, of keys {_LARGEST_KEY} at most, got {key_size} and {value_size}"
    return fla_unsupported_reason(device)


@cache
def fla_function(module: str, name: str) -> Any:
    """Return `fla.MODULE.NAME`; imported on first use, since the package may not be installed."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ImportWarning)  # fla warns of other packages that it could use
        return getattr(import_module(f"fla.{module}"), name)


def triton_kernel(name: str) -> Any:
    """Return one of our Triton kernels of this name; imported on first use, since Triton may not be installed."""
    return getattr(import_triton_kernels("longspan.ssm.kernels.triton_kernels"), name)


def version_numbers(text: str) -> tuple[int, ...]:
    """The first three numbers of a version, without a local part ("+cu126") and parts that are no numbers."""
    return tuple(int(part) for part in text.split("+")[0].split(".")[:3] if part.isdecimal())
