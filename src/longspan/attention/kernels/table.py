"""The support table: what each kernel can do, and which one computes a call.

The first kernel of `KERNELS` that can do a call is chosen; naming a kernel that cannot is an error with what
it lacks. Errors, docs/attention.md and `longspan doctor` read the table.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from longspan.attention.call import AttendCall
from longspan.attention.kernels import cpu_flash, cudnn, fa4, reference, torch_flash, triton_flash
from longspan.errors import AttentionError, import_object

FEATURES = ("window", "softcap", "dropout")  # that some kernels lack; masks, sinks and scale are everybody's


@dataclass(frozen=True)
class HeadSizes:
    """Head sizes of queries and values that a kernel takes, padded with zeros where it wants others.

    `largest` bounds both (None: no bound); `pairs` of (query, value) are taken beyond it.
    """

    largest: int | None = None
    pairs: tuple[tuple[int, int], ...] = ()

    def accept(self, query: int, value: int) -> bool:
        """Return whether a kernel takes heads of these sizes."""
        return self.largest is None or max(query, value) <= self.largest or (query, value) in self.pairs

    def __str__(self) -> str:
        """Return the sizes in words, as the support table prints them."""
        if self.largest is None:
            return "any"
        beyond = "".join(f", or {query} with values of {value}" for query, value in self.pairs)
        return f"at most {self.largest}{beyond}"


@dataclass(frozen=True)
class Kernel:
    """A row of the support table: what a kernel can do, and its two functions.

    `packed` describes how it runs several documents, `needs` what it depends on; `device_lack` returns what this
    installation or device lacks of that ("" where nothing). `one_document_only`: by name it
    runs every launch, but without a name it is chosen only for calls with one document in each group. `takes_deltas`
    tells of a call whether backward takes dout · out of each row and head in place of the output.
    """

    name: str
    devices: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    forward: Callable[..., tuple[Tensor, Tensor]] = field(repr=False)
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]] = field(repr=False)
    features: frozenset[str] = frozenset()
    head_sizes: HeadSizes = HeadSizes()
    deterministic: bool = True
    one_document_only: bool = False
    packed: str = ""
    needs: str = ""
    device_lack: Callable[[torch.device], str] = field(default=lambda device: "", repr=False)
    takes_deltas: Callable[[AttendCall], bool] = field(default=lambda call: False, repr=False)

    def lack_for(self, call: AttendCall) -> str:
        """Return why this kernel cannot compute the call, as "needs …, got …"; "" where it can."""
        if call.device.type not in self.devices:
            return f"needs {' or '.join(self.devices)} tensors, got {call.device.type}"
        if call.dtype not in self.dtypes:
            return f"needs {' or '.join(dtype_name(d) for d in self.dtypes)}, got {dtype_name(call.dtype)}"
        if not self.head_sizes.accept(call.head_size, call.value_size):
            got = str(call.head_size)
            got += "" if call.value_size == call.head_size else f" with values of {call.value_size}"
            return f"needs a head size of {self.head_sizes}, got {got}"
        if unsupported := call.features - self.features:
            only_spans = call.spans and call.mask.window is None  # kernels compute spans as windows
            extra = " and ".join("spans" if only_spans and name == "window" else name for name in sorted(unsupported))
            return f"needs a call without {extra}, got {extra}"
        if call.deterministic and not self.deterministic:
            return "needs torch.use_deterministic_algorithms(False), got deterministic mode"
        return self.device_lack(call.device)

    def suits(self, call: AttendCall) -> bool:
        """Return whether the kernel can compute the call and may be chosen without being named."""
        return (call.one_document or not self.one_document_only) and not self.lack_for(call)


def dtype_name(value: Any) -> str:
    """Return the name of a dtype without its module."""
    return str(value).removeprefix("torch.")


_HALF = (torch.bfloat16, torch.float16)
_FULL = (torch.float32, torch.float64)


def _flash_lack(device: torch.device) -> str:
    """Return what torch or this device lacks for torch's FlashAttention 2; "" where nothing."""
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
        head_sizes=HeadSizes(largest=256),
        packed="one variable-length call",
        needs="the extra `fa4`; compute capability 9 to 11",
        device_lack=fa4.device_lack,
        takes_deltas=fa4.takes_deltas,
    ),
    Kernel(
        name="cudnn",
        devices=("cuda",),
        dtypes=_HALF,
        forward=cudnn.forward,
        backward=cudnn.backward,
        head_sizes=HeadSizes(largest=128, pairs=((192, 128),)),
        deterministic=False,
        one_document_only=True,
        packed="a call for each document, and two for a causal tile with more keys than rows",
        needs="cuDNN 9.11; compute capability 9 or 10",
        device_lack=cudnn.device_lack,
    ),
    Kernel(
        name="torch_flash",
        devices=("cuda",),
        dtypes=_HALF,
        forward=torch_flash.forward,
        backward=torch_flash.backward,
        features=frozenset({"window"}),
        head_sizes=HeadSizes(largest=256),
        packed="one variable-length call",
        needs="compute capability 8.0",
        device_lack=_flash_lack,
    ),
    Kernel(
        name="triton_flash",
        devices=("cuda",),
        dtypes=_HALF,
        forward=triton_flash.forward,
        backward=triton_flash.backward,
        features=frozenset({"window", "softcap"}),
        head_sizes=HeadSizes(largest=triton_flash.LARGEST),
        packed="one launch",
        needs="compute capability 8.0; triton, which torch's builds for GPUs bring",
        device_lack=triton_flash.device_lack,
        takes_deltas=lambda call: True,
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
        takes_deltas=lambda call: True,
    ),
)


def choose_kernel(call: AttendCall, name: str | None = None) -> Kernel:
    """Choose the kernel of this name, or the first that suits the call.

    Raises AttentionError where the named kernel is unknown or cannot, or where none can.
    """
    if name is None:
        kernel = next((kernel for kernel in KERNELS if kernel.suits(call)), None)
        if kernel is None:
            raise AttentionError("no kernel fits: " + "; ".join(f"{k.name} {k.lack_for(call)}" for k in KERNELS))
        return kernel
    kernel = find_kernel(name, f"; {_available_text(call)}")
    if lack := kernel.lack_for(call):
        raise AttentionError(f"kernel {name} {lack}; {_available_text(call)}")
    return kernel


def find_kernel(name: str, hint: str | None = None) -> Kernel:
    """Find the row of the table with this name, or the `Kernel` of one's own with this dotted name.

    Raises AttentionError if there is none; the message ends with `hint` (None: with all names).
    """
    kernel = next((kernel for kernel in KERNELS if kernel.name == name), None)
    kernel = import_object(name, f"kernel is {name!r}", AttentionError) if kernel is None and "." in name else kernel
    if isinstance(kernel, Kernel):
        return kernel
    names = f"; use one of {', '.join(kernel.name for kernel in KERNELS)}" if hint is None else hint
    raise AttentionError(f"kernel {name!r} is {'no Kernel' if kernel else 'unknown'}{names}")


def _available_text(call: AttendCall) -> str:
    able = [kernel.name for kernel in KERNELS if not kernel.lack_for(call)]
    return f"available here: {', '.join(able) or 'none'}"
