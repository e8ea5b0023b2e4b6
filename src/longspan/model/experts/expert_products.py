"""What experts compute from rows (tokens) that are sorted by expert: two linears around the model's gate.

One grouped product does all experts in bfloat16 on GPUs, else one for each; every expert gets a gradient. SiLU gates
are Triton kernels.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.functional import silu
from transformers.activations import ACT2FN
from transformers.integrations import moe

from longspan.model.experts.visits import find_row_kernels
from longspan.model.marks import find_float8_weight
from longspan.model.weights.local_tensors import local_tensor

# Experts have these attributes: peft's module of each adapted parameter by its name, how an adapter's matrix is read,
# and the slice of them that this rank has.
EXPERT_ADAPTERS = "adapters_of_experts"
ADAPTER_VIEW = "adapter_view"
LOCAL_EXPERTS = "local_experts"


# One program of a kernel computes so many columns of a row.
_COLUMNS = 1024
_SILU_CLASSES = (nn.SiLU, type(ACT2FN["silu"]))


def apply_gate(experts: nn.Module, x: Tensor) -> Tensor:
    """Apply the model's gate to rows (S, 2 I) of gates and values: (S, I)."""
    module: Any = experts
    gate = getattr(type(module), "_apply_gate", None)
    if gate is None or gate is not getattr(moe, "_default_apply_gate", None) or find_row_kernels(x) is None:
        return module._apply_gate(x)
    is_silu = isinstance(module.act_fn, _SILU_CLASSES) or module.act_fn is silu  # torch's own in LFM2-MoE
    return apply_silu_gate_kernel(x) if is_silu else module._apply_gate(x)


def apply_silu_gate_kernel(x: Tensor) -> Tensor:
    """Compute SiLU(first half) · second half of rows (S, 2 I), by the kernel: (S, I)."""
    return _SiluGate.apply(x)  # pyright: ignore[reportReturnType]


class _SiluGate(torch.autograd.Function):
    """SiLU(first half) · second half of rows (S, 2 I), forward and backward by one kernel each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        out = x.new_empty(len(x), x.shape[1] // 2)
        _launch_gate_kernel("silu_gate_kernel", x, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        _launch_gate_kernel("silu_gate_backward_kernel", x, gradients[0].contiguous(), dx)
        return dx


def _launch_gate_kernel(name: str, x: Tensor, *others: Tensor) -> None:
    rows = len(x)
    width = x.shape[1] // 2
    if rows and width:
        blocks = rows, -(-width // _COLUMNS)
        getattr(find_row_kernels(x), name)[blocks](x, *others, x.stride(0), width, COLUMNS=_COLUMNS)


# the one compute capability for which torch 2.11 has grouped float8 products with row scales
_GROUPS_FLOAT8 = (9, 0)
_ALIGNED_ELEMENTS = 8  # rows of bfloat16 operands begin at multiples of 16 bytes


@dataclass(frozen=True)
class ExpertLoads:
    """How many rows each of e local experts got: on the device, and on the host if they have been read from it."""

    device: Tensor  # (e,) int64
    host: Sequence[int] | None = None

    def host_counts(self) -> Sequence[int]:
        """Return the counts on the host; waits for the device if they have not been read yet."""
        return self.device.tolist() if self.host is None else self.host


def run_experts(experts: nn.Module, x: Tensor, loads: ExpertLoads) -> Tensor:
    """Run experts over rows (S, D) that are sorted by local expert: (S, D), not yet weighted.

    `loads` are the rows of each local expert; without a grouped product, which runs on the device alone, the host waits
    for them. Slots without rows give their weights gradients of zeros.
    """
    module: Any = experts
    first_name = "gate_up_proj" if module.has_gate else "up_proj"
    up, up_bias = _local_weight_and_bias(module, first_name)
    down, down_bias = _local_weight_and_bias(module, "down_proj")
    float8_up = find_float8_weight(module, first_name)
    float8_down = find_float8_weight(module, "down_proj")
    up_adapter = _find_expert_adapter(module, first_name, x)
    down_adapter = _find_expert_adapter(module, "down_proj", x)
    adapters = [matrix for adapter in (up_adapter, down_adapter) if adapter for matrix in adapter[:2]]
    if not len(x):  # a slot of padding alone
        weights = [weight for weight in (up, up_bias, down, down_bias, *adapters) if weight is not None]
        return _NoRows.apply(x, *weights)  # pyright: ignore[reportReturnType]
    grouped = can_group_products(x, up, down, *adapters, in_float8=float8_up is not None)
    # Both layers need the counts, so the device is read once.
    if not grouped:
        loads = ExpertLoads(loads.device, loads.host_counts())
    multiply = partial(_multiply_by_experts, loads=loads, grouped=grouped)

    def multiply_and_adapt(
        x: Tensor, weight: Tensor, bias: Tensor | None, codes: Any, adapter: _Adapter | None
    ) -> Tensor:
        """Multiply by one of the experts' two matrices, and add what an adapter adds."""
        y = multiply(x, weight, bias, codes, transposed=module.is_transposed)
        if adapter is None:
            return y
        first, second, scaling = adapter
        inner = multiply(x, first, None, None, transposed=False)
        return y + scaling * multiply(inner, second, None, None, transposed=False)

    inner = multiply_and_adapt(x, up, up_bias, float8_up, up_adapter)  # (S, 2 I), or (S, I) without a gate
    inner = apply_gate(module, inner) if module.has_gate else module.act_fn(inner)
    return multiply_and_adapt(inner, down, down_bias, float8_down, down_adapter)


# Matrices A (e, rank, inputs) and B (e, outputs, rank) of this rank's experts, and the scaling of B A.
_Adapter = tuple[Tensor, Tensor, float]


def _find_expert_adapter(experts: nn.Module, name: str, x: Tensor) -> _Adapter | None:
    """In peft's matrices for all experts, rows of A are sorted by expert, columns of B by rank, then by expert."""
    wrapper = vars(experts).get(EXPERT_ADAPTERS, {}).get(name)
    if wrapper is None or wrapper.disable_adapters:
        return None
    (adapter,) = wrapper.lora_A
    count = wrapper.num_experts
    view = vars(experts).get(ADAPTER_VIEW, local_tensor)
    matrix_a = view(wrapper.lora_A[adapter].weight).unflatten(0, (count, -1))
    matrix_b = view(wrapper.lora_B[adapter].weight).unflatten(1, (-1, count)).permute(2, 0, 1)
    part = vars(experts).get(LOCAL_EXPERTS, slice(None))
    return matrix_a[part].to(x.dtype), matrix_b[part].to(x.dtype).contiguous(), wrapper.scaling[adapter]


class _NoRows(torch.autograd.Function):
    """The output of experts without rows, with gradients of zeros for each weight.

    Products with no rows, one for each expert, would keep the host busy while other slots wait for its messages.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        """Return a copy of x (0, D) in the type of products with rows; only shapes of the weights are kept."""
        ctx.weights = [(weight.shape, weight.dtype) for weight in weights]
        ctx.dtype = x.dtype
        kind = x.device.type
        # Products with rows are cast in the same way.
        is_cast = torch.is_autocast_enabled(kind) and x.dtype != torch.float64
        return x.to(torch.get_autocast_dtype(kind) if is_cast else x.dtype, copy=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return gradients of zeros for each weight that needs one."""
        needed = zip(ctx.weights, ctx.needs_input_grad[1:], strict=True)
        zeros = (
            gradients[0].new_zeros(shape, dtype=dtype) if is_needed else None
            for (shape, dtype), is_needed in needed
        )
        return gradients[0].to(ctx.dtype), *zeros


def _multiply_by_experts(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    float8_weight: Any,
    *,
    loads: ExpertLoads,
    grouped: bool,
    transposed: bool,
) -> Tensor:
    """Rows (S, inputs) are sorted by expert; matrices (e, outputs, inputs), or (e, inputs, outputs) if `transposed`."""
    counts = None if grouped else loads.host_counts()
    if float8_weight is None and counts is not None:
        biases = [None] * weight.shape[0] if bias is None else bias.unbind()
        pieces: list[Tensor] = []
        for rows, matrix, offset in zip(x.split(list(counts)), weight.unbind(), biases, strict=True):
            piece = rows @ (matrix if transposed else matrix.T)
            pieces.append(piece if offset is None else piece + offset)
        return torch.cat(pieces)
    ends = loads.device.cumsum(0).to(torch.int32)
    if float8_weight is not None:
        from longspan.model.float8.products import ExpertRows, multiply_in_float8

        y = multiply_in_float8(x, weight, None, float8_weight, ExpertRows(ends, counts, transposed))
    else:
        y = F.grouped_mm(x, weight if transposed else weight.transpose(-2, -1), offs=ends)
    if bias is None:
        return y
    rows = torch.arange(len(x), device=ends.device, dtype=torch.int32)
    return y + bias[torch.searchsorted(ends, rows, right=True)]


def can_group_products(x: Tensor, *weights: Tensor, in_float8: bool = False) -> bool:
    """Return whether one product does all experts for these rows (S, D) and weights (e, …, …), in float8 or not."""
    if not x.is_cuda or (in_float8 and torch.cuda.get_device_capability(x.device) != _GROUPS_FLOAT8):
        return False
    in_bfloat16 = all(tensor.dtype == torch.bfloat16 for tensor in (x, *weights))
    aligned = all(size % _ALIGNED_ELEMENTS == 0 for weight in weights for size in weight.shape[1:])
    return in_bfloat16 and aligned


def _local_weight_and_bias(module: Any, name: str) -> tuple[Tensor, Tensor | None]:
    bias = local_tensor(getattr(module, f"{name}_bias")) if module.has_bias else None
    return local_tensor(getattr(module, name)), bias
