"""Kernels: attention of some query rows to some key rows: forward to (out, lse), backward from the global out and lse.

`KERNELS` is the support table: the first kernel that can do what is asked is chosen, and a kernel that is asked for by
name and cannot is an error that says what it lacks. Kernels know nothing of ranks and communication.
"""

import torch

from longspan.attention.kernels import cpu_flash, cudnn, fa4, reference, torch_flash
from longspan.attention.kernels.kernel import FEATURES, HeadSizes, Kernel, Need
from longspan.errors import AttentionError

__all__ = ["FEATURES", "KERNELS", "HeadSizes", "Kernel", "Need", "choose", "named"]

_HALF = (torch.bfloat16, torch.float16)
_FULL = (torch.float32, torch.float64)


def _flash_missing(device: torch.device) -> str:
    if not torch.backends.cuda.is_flash_attention_available():
        return f"needs a torch built with flash attention, got {torch.__version__}"
    capability = torch.cuda.get_device_capability(device)
    return "" if capability >= (8, 0) else f"needs compute capability 8.0, got {capability[0]}.{capability[1]}"


KERNELS: tuple[Kernel, ...] = (
    Kernel(
        name="fa4",
        devices=("cuda",),
        dtypes=_HALF,
        forward=fa4.forward,
        backward=fa4.backward,
        features=frozenset({"window", "softcap"}),
        head_sizes=HeadSizes(multiple=32, largest=128),  # 192 and 256 were not compared with dense attention
        packed="one variable-length call",
        needs="the extra `fa4`; compute capability 9 to 11",
        missing=fa4.missing,
    ),
    Kernel(
        name="cudnn",
        devices=("cuda",),
        dtypes=_HALF,
        forward=cudnn.forward,
        backward=cudnn.backward,
        head_sizes=HeadSizes(multiple=8, largest=128, pairs=((192, 128),)),
        deterministic=False,
        dense_only=True,
        packed="a call for each document, and two for a causal tile with more keys than rows",
        needs="cuDNN 9.11; compute capability 9 or 10",
        missing=cudnn.missing,
    ),
    Kernel(
        name="torch_flash",
        devices=("cuda",),
        dtypes=_HALF,
        forward=torch_flash.forward,
        backward=torch_flash.backward,
        features=frozenset({"window"}),
        head_sizes=HeadSizes(multiple=8, largest=256),
        packed="one variable-length call",
        needs="compute capability 8.0",
        missing=_flash_missing,
    ),
    Kernel(
        name="cpu_flash",
        devices=("cpu",),
        dtypes=_HALF + _FULL,
        forward=cpu_flash.forward,
        backward=cpu_flash.backward,
        features=frozenset({"window"}),
        packed="a call for each document",
        needs="nothing",
    ),
    Kernel(
        name="reference",
        devices=("cpu", "cuda"),
        dtypes=_HALF + _FULL,
        forward=reference.forward,
        backward=reference.backward,
        features=frozenset(FEATURES),
        packed="document by document, some query rows at a time",
        needs="nothing",
    ),
)


def choose(need: Need, name: str | None = None) -> Kernel:
    """The kernel of this name, or the first that suits what is needed.

    Raises AttentionError where the named kernel is unknown or cannot, or where none can.
    """
    if name is None:
        found = next((kernel for kernel in KERNELS if kernel.suits(need)), None)
        if found is None:
            raise AttentionError("no kernel fits: " + "; ".join(f"{k.name} {k.lacks(need)}" for k in KERNELS))
        return found
    found = named(name, f"; {_available(need)}")
    if lack := found.lacks(need):
        raise AttentionError(f"kernel {name} {lack}; {_available(need)}")
    return found


def named(name: str, hint: str | None = None) -> Kernel:
    """The row of the table with this name. Raises AttentionError where there is none."""
    for kernel in KERNELS:
        if kernel.name == name:
            return kernel
    names = f"; use one of {', '.join(kernel.name for kernel in KERNELS)}" if hint is None else hint
    raise AttentionError(f"kernel {name!r} is unknown{names}")


def _available(need: Need) -> str:
    able = [kernel.name for kernel in KERNELS if not kernel.lacks(need)]
    return f"available here: {', '.join(able) or 'none'}"
