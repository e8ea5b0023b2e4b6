"""The support table: what each kernel can do, and which one computes a call.

The first kernel of `KERNELS` that can do a call is chosen; naming a kernel that cannot is an error with what
it lacks. Errors and `longspan doctor` read the table; its names, in their order, are in `plan/kernel_names.py`.
"""

from types import ModuleType
from typing import Any

import torch

from longspan.attention.call import AttendCall, HeadSizes, Kernel, unsupported_capability_reason
from longspan.attention.kernels import (
    cpu_flash,
    cudnn,
    fa4,
    reference,
    torch_flash,
    triton_blocks,
    triton_flash,
    triton_gathered,
)
from longspan.errors import AttentionError, import_object
from longspan.plan.kernel_names import KERNEL_NAMES

# That some kernels lack; masks, sinks and scale are everybody's.
FEATURES = ("window", "softcap", "dropout", "indices", "blocks", "latents", "stride")
_HALF = (torch.bfloat16, torch.float16)


def _flash_unsupported_reason(device: torch.device) -> str:
    if not torch.backends.cuda.is_flash_attention_available():
        return f"needs a torch built with flash attention, got {torch.__version__}"
    return unsupported_capability_reason(device, range(8, 100), "8.0")


def _table_row(name: str, module: ModuleType, devices: tuple[str, ...] = ("cuda",), **options: Any) -> Kernel:
    dtypes = _HALF if devices == ("cuda",) else (*_HALF, torch.float32, torch.float64)
    return Kernel(name, devices, dtypes, module.forward, module.backward, **options)


_TRITON: dict[str, Any] = {
    "needs": "compute capability 8.0; triton, which torch's builds for GPUs bring",
    "unsupported_reason": triton_flash.unsupported_reason,
    "takes_deltas": lambda call: True,
}


_ROWS = (
    _table_row(
        "fa4",
        fa4,
        features=frozenset({"window", "softcap"}),
        head_sizes=HeadSizes(largest=256),
        needs="the extra `fa4`; compute capability 9 to 11",
        unsupported_reason=fa4.unsupported_reason,
        takes_deltas=fa4.takes_deltas,
    ),
    _table_row(
        "cudnn",
        cudnn,
        head_sizes=HeadSizes(largest=128, pairs=((192, 128),)),
        deterministic=False,
        one_document_only=True,
        needs="cuDNN 9.11; compute capability 9 or 10",
        unsupported_reason=cudnn.unsupported_reason,
    ),
    _table_row(
        "torch_flash",
        torch_flash,
        features=frozenset({"window"}),
        head_sizes=HeadSizes(largest=256),
        needs="compute capability 8.0",
        unsupported_reason=_flash_unsupported_reason,
    ),
    _table_row(
        "triton_blocks",
        triton_blocks,
        features=frozenset({"window", "indices", "blocks"}),
        required=frozenset({"indices", "blocks"}),
        head_sizes=HeadSizes(largest=triton_blocks.LARGEST),
        pays=triton_blocks.pays,
        **_TRITON,
    ),
    _table_row(
        "triton_flash",
        triton_flash,
        features=frozenset({"window", "softcap", "indices", "blocks", "stride"}),
        head_sizes=HeadSizes(largest=triton_flash.LARGEST),
        **_TRITON,
    ),
    _table_row(
        "triton_gathered",
        triton_gathered,
        features=frozenset({"window", "indices", "latents"}),
        required=frozenset({"indices", "latents"}),
        head_sizes=HeadSizes(largest=triton_gathered.LARGEST),
        deterministic=False,
        **_TRITON,
    ),
    _table_row("cpu_flash", cpu_flash, ("cpu",), features=frozenset({"window"}), needs="nothing"),
    _table_row(
        "reference",
        reference,
        ("cpu", "cuda"),
        features=frozenset(FEATURES),
        needs="nothing",
        takes_deltas=lambda call: True,
    ),
)
_ROW_OF_NAME = {kernel.name: kernel for kernel in _ROWS}
KERNELS: tuple[Kernel, ...] = tuple(_ROW_OF_NAME[name] for name in KERNEL_NAMES)


def choose_kernel(call: AttendCall, name: str | None = None) -> Kernel:
    """Choose the kernel of this name, or without a name the first that suits the call.

    Where the named kernel requires a feature that the call lacks, the first that suits is chosen too: one name may be
    given for all layers. Raises AttentionError where the named kernel is unknown or cannot compute the call, and where
    no kernel can.
    """
    named = None if name is None else find_kernel(name, f"; {_available_kernels_text(call)}")
    if named is not None and not named.required - call.features:
        if reason := named.unsupported_call_reason(call):
            raise AttentionError(f"kernel {name} {reason}; {_available_kernels_text(call)}")
        return named
    kernel = next((kernel for kernel in KERNELS if kernel.suits(call)), None)
    if kernel is None:
        raise AttentionError(
            "no kernel fits: " + "; ".join(f"{k.name} {k.unsupported_call_reason(call)}" for k in KERNELS)
        )
    return kernel


def find_kernel(name: str, hint: str | None = None) -> Kernel:
    """Find the row of the table with this name, or import the `Kernel` of one's own with this dotted name.

    Raises AttentionError if there is none; the message ends with `hint` (None: with all names).
    """
    kernel: Any = _ROW_OF_NAME.get(name)
    if kernel is None and "." in name:
        kernel = import_object(name, f"kernel is {name!r}", AttentionError)
    if isinstance(kernel, Kernel):
        return kernel
    names = f"; use one of {', '.join(kernel.name for kernel in KERNELS)}" if hint is None else hint
    raise AttentionError(f"kernel {name!r} is {'no Kernel' if kernel else 'unknown'}{names}")


def _available_kernels_text(call: AttendCall) -> str:
    able = [kernel.name for kernel in KERNELS if not kernel.unsupported_call_reason(call)]
    return f"available here: {', '.join(able) or 'none'}"
