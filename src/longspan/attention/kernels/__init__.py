"""Kernels: attention of some query rows to some key rows: forward to (out, lse), backward from the global out and lse.

`KERNELS` is the support table: the first kernel that can do what is asked is chosen, and a kernel that is asked for by
name and cannot is an error that says what it lacks. Kernels know nothing of ranks and communication.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from longspan.attention.kernels import cpu_flash, fa4, reference, torch_flash
from longspan.errors import AttentionError

_HALF = (torch.bfloat16, torch.float16)
_FULL = (torch.float32, torch.float64)


@dataclass(frozen=True)
class Need:
    """What a call asks of a kernel. `features`: of "window", "softcap", "dropout"."""

    device: torch.device
    dtype: torch.dtype
    head_size: int  # the larger of the query's and the value's
    features: frozenset[str] = frozenset()


@dataclass(frozen=True)
class Kernel:
    """A row of the support table: what a kernel can do, and its two functions.

    `missing` says what this installation or device lacks for it ("" where nothing).
    """

    name: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    forward: Callable[..., tuple[Tensor, Tensor]] = field(repr=False)
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = field(repr=False)
    features: frozenset[str] = frozenset()
    max_head_size: int | None = None
    missing: Callable[[torch.device], str] = field(default=lambda device: "", repr=False)

    def lacks(self, need: Need) -> str:
        """Why this kernel cannot do it, as "needs …, got …"; "" where it can."""
        if need.device.type not in self.devices:
            return f"needs {' or '.join(self.devices)} tensors, got {need.device.type}"
        if need.dtype not in self.dtypes:
            return f"needs {' or '.join(_short(d) for d in self.dtypes)}, got {_short(need.dtype)}"
        if self.max_head_size is not None and need.head_size > self.max_head_size:
            return f"needs a head size of at most {self.max_head_size}, got {need.head_size}"
        if need.features - self.features:
            extra = " and ".join(sorted(need.features - self.features))
            return f"needs a call without {extra}, got {extra}"
        return self.missing(need.device)


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
        features=frozenset({"window"}),
        max_head_size=128,  # 32, 64 and 128 were compared with dense attention; 192 and 256 were not
        missing=fa4.missing,
    ),
    Kernel(
        name="torch_flash",
        devices=("cuda",),
        dtypes=_HALF,
        forward=torch_flash.forward,
        backward=torch_flash.backward,
        features=frozenset({"window"}),
        max_head_size=256,
        missing=_flash_missing,
    ),
    Kernel(
        name="cpu_flash",
        devices=("cpu",),
        dtypes=_HALF + _FULL,
        forward=cpu_flash.forward,
        backward=cpu_flash.backward,
        features=frozenset({"window"}),
    ),
    Kernel(
        name="reference",
        devices=("cpu", "cuda"),
        dtypes=_HALF + _FULL,
        forward=reference.forward,
        backward=reference.backward,
        features=frozenset({"window", "softcap", "dropout"}),
    ),
)


def choose(need: Need, name: str | None = None) -> Kernel:
    """The kernel of this name, or the first that can do what is needed.

    Raises AttentionError where the named kernel is unknown or cannot, or where none can.
    """
    if name is None:
        found = next((kernel for kernel in KERNELS if not kernel.lacks(need)), None)
        if found is None:
            raise AttentionError("no kernel fits: " + "; ".join(f"{k.name} {k.lacks(need)}" for k in KERNELS))
        return found
    found = next((kernel for kernel in KERNELS if kernel.name == name), None)
    if found is None:
        raise AttentionError(f"kernel {name!r} is unknown; {_available(need)}")
    if lack := found.lacks(need):
        raise AttentionError(f"kernel {name} {lack}; {_available(need)}")
    return found


def _available(need: Need) -> str:
    able = [kernel.name for kernel in KERNELS if not kernel.lacks(need)]
    return f"available here: {', '.join(able) or 'none'}"


def _short(value: Any) -> str:
    return str(value).removeprefix("torch.")
