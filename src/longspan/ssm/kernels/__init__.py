"""Kernels of linear recurrences over a rank's own runs of rows: the first that can is used."""

import torch

from longspan.ssm.kernels import decay, delta
from longspan.ssm.kernels.call import Inputs, LocalRuns, Recurrence, ScanKernel
from longspan.ssm.kernels.packages import fla_unsupported_call_reason
from longspan.ssm.kernels.scan import TorchBackward, TorchForward

TORCH = ScanKernel("torch", lambda _: "", TorchForward, TorchBackward)
_KERNELS = (
    ScanKernel("fla", delta.delta_unsupported_reason, delta.DeltaForward, delta.DeltaBackward, half=True),
    ScanKernel("fla", delta.kimi_unsupported_reason, delta.KimiForward, delta.KimiBackward, half=True),
    ScanKernel("fla", decay.decay_unsupported_reason, decay.DecayForward, decay.DecayBackward, half=True),
    TORCH,
)


def choose_scan_kernel(recurrence: Recurrence) -> ScanKernel:
    return next(kernel for kernel in _KERNELS if not kernel.unsupported_reason(recurrence))


def describe_kernels(dtype: torch.dtype, device: torch.device) -> str:
    if not (lacking := fla_unsupported_call_reason(dtype, device)):
        return "flash-linear-attention's kernels"
    faster = f" (faster kernels, which prices suppose, want {lacking})" if device.type == "cuda" else ""
    return f"torch's operations{faster}"


__all__ = ["TORCH", "Inputs", "LocalRuns", "Recurrence", "ScanKernel", "choose_scan_kernel", "describe_kernels"]
