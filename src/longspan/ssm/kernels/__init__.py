"""Kernels of linear recurrences over a rank's own runs of rows: the first that can is used."""

import torch
from torch import Tensor

from longspan.ssm.kernels import decay, delta
from longspan.ssm.kernels.fla import fla_unsupported_call_reason
from longspan.ssm.kernels.interface import Inputs, ScanKernel
from longspan.ssm.kernels.local_runs import LocalRuns
from longspan.ssm.kernels.scan import TorchBackward, TorchForward

TORCH = ScanKernel("torch", TorchForward, TorchBackward)
# The keys are `delta` and `by_channel`.
_FLA_KERNELS = {
    (True, False): ScanKernel("fla", delta.DeltaForward, delta.DeltaBackward, half=True),
    (True, True): ScanKernel("fla", delta.KimiForward, delta.KimiBackward, half=True),
    (False, False): ScanKernel("fla", decay.DecayForward, decay.DecayBackward, half=True),
}


def scan_kernel(v: Tensor, key_size: int, *, delta: bool, by_channel: bool = False) -> ScanKernel:
    """Return the kernel that `linear_scan` takes for values like v (T, H, V).

    `delta`: whether there is a beta; `by_channel`: whether each key number has a decay of its own.
    """
    unsupported = fla_unsupported_call_reason(v.dtype, v.device, key_size, v.shape[-1])
    return TORCH if unsupported else _FLA_KERNELS.get((delta, by_channel), TORCH)


def describe_kernels(dtype: torch.dtype, device: torch.device) -> str:
    """Return in words which kernels scan rows of this dtype here, and what the faster ones would need."""
    if not (lacking := fla_unsupported_call_reason(dtype, device)):
        return "flash-linear-attention's kernels"
    faster = f" (faster kernels, which prices suppose, want {lacking})" if device.type == "cuda" else ""
    return f"torch's operations{faster}"


__all__ = ["TORCH", "Inputs", "LocalRuns", "ScanKernel", "describe_kernels", "scan_kernel"]
