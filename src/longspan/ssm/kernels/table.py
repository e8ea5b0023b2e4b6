"""The kernels of linear recurrences, the first that can do one is used."""

import torch

from longspan.ssm.kernels import decay_fla, delta_fla, fla, kimi_fla
from longspan.ssm.kernels.by_torch import TorchBackward, TorchForward
from longspan.ssm.kernels.call import Kernel, Recurrence

TORCH = Kernel("torch", lambda _: "", TorchForward, TorchBackward)
_KERNELS = (
    Kernel("fla", delta_fla.lacks, delta_fla.DeltaForward, delta_fla.DeltaBackward, half=True),
    Kernel("fla", kimi_fla.lacks, kimi_fla.KimiForward, kimi_fla.KimiBackward, half=True),
    Kernel("fla", decay_fla.lacks, decay_fla.DecayForward, decay_fla.DecayBackward, half=True),
    TORCH,
)


def choose(recurrence: Recurrence) -> Kernel:
    """The first kernel that can do this recurrence."""
    return next(kernel for kernel in _KERNELS if not kernel.lacks(recurrence))


def kernels_here(dtype: torch.dtype, device: torch.device) -> str:
    """By what recurrences run in this dtype on this device, for people; why, where a GPU could do better."""
    if not (lacking := fla.lacks(dtype, device)):
        return "flash-linear-attention's kernels"
    return "torch's operations" + (f" (faster kernels want {lacking})" if device.type == "cuda" else "")
