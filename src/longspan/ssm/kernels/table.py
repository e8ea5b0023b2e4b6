"""The kernels of linear recurrences: the first that can is used, except for one that must be named."""

from collections.abc import Sequence

import torch

from longspan.ssm.kernels import by_mamba_ssm, decay, delta
from longspan.ssm.kernels.call import Recurrence, ScanKernel
from longspan.ssm.kernels.convolutions import PACKAGE_CONVOLUTION
from longspan.ssm.kernels.packages import PACKAGES, TORCH_ONLY, check_kernel_names, fla_lack, refuse_kernel
from longspan.ssm.kernels.scan import TorchBackward, TorchForward

TORCH = ScanKernel("torch", lambda _: "", TorchForward, TorchBackward)
MAMBA = ScanKernel(
    by_mamba_ssm.NAME, by_mamba_ssm.mamba_lack, by_mamba_ssm.MambaForward, by_mamba_ssm.MambaBackward, half=True
)
_KERNELS = (
    ScanKernel("fla", delta.delta_lack, delta.DeltaForward, delta.DeltaBackward, half=True),
    ScanKernel("fla", delta.kimi_lack, delta.KimiForward, delta.KimiBackward, half=True),
    ScanKernel("fla", decay.decay_lack, decay.DecayForward, decay.DecayBackward, half=True),
    TORCH,
)


def choose_scan_kernel(recurrence: Recurrence, kernel_names: Sequence[str] = ()) -> ScanKernel:
    """Choose the named kernel, or the first that can do this recurrence.

    `kernel_names` are those of all kernels of a mixer, of which "torch" concerns every recurrence, and "mamba_ssm"
    those without a delta term. Raises LayoutError for an unknown name, or where mamba_ssm is named and cannot be used.
    """
    check_kernel_names(kernel_names)
    if TORCH_ONLY in kernel_names:
        return TORCH
    if MAMBA.name in kernel_names and not recurrence.delta:
        refuse_kernel(MAMBA.name, MAMBA.lacks(recurrence))
        return MAMBA
    return next(kernel for kernel in _KERNELS if not kernel.lacks(recurrence))


def check_mixer_kernels(kernel_names: Sequence[str], dtype: torch.dtype, device: torch.device) -> None:
    """Raise LayoutError for the names of a mixer's kernels unless all of them can be used here, in this dtype.

    These are kernels of recurrences and of convolutions. Names that are no kernels are refused too, and names that
    exclude each other: "torch" and a package.
    """
    check_kernel_names(kernel_names)
    if MAMBA.name in kernel_names:
        # Sizes here are ones that the kernels take; those of a model are checked when it runs.
        refuse_kernel(MAMBA.name, MAMBA.lacks(Recurrence(dtype, device, 2, 2, delta=False, by_channel=False)))
    if PACKAGE_CONVOLUTION.name in kernel_names:
        rows, weight = (torch.empty(n, dtype=dtype, device=device) for n in ((1, 8), (8, 4)))
        refuse_kernel(PACKAGE_CONVOLUTION.name, PACKAGE_CONVOLUTION.lacks(rows, weight))


def describe_kernels(dtype: torch.dtype, device: torch.device, kernel_names: Sequence[str] = ()) -> str:
    """Describe the kernels of recurrences in this dtype on this device, and what a GPU needs for faster ones."""
    if TORCH_ONLY in kernel_names:
        return "torch's operations, as asked for"
    packages_text = " and ".join(f"{name} ({trial})" for name, trial in PACKAGES.items() if name in kernel_names)
    by_name = f"{packages_text}, as asked for, and " if packages_text else ""
    if not (lacking := fla_lack(dtype, device)):
        return f"{by_name}flash-linear-attention's kernels"
    faster = f" (faster kernels, which prices suppose, want {lacking})" if device.type == "cuda" else ""
    return f"{by_name}torch's operations{faster}"
