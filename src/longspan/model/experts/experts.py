"""What experts compute from rows (tokens): copies for every visit, two linears around the model's gate, weighted sums.

One grouped product does all experts in bfloat16 on GPUs, else one for each; every expert gets a gradient. Copies, sums
and SiLU gates are Triton kernels, without atomic sums: gradients do not depend on the order of blocks.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.functional import silu
from transformers.activations import ACT2FN
from transformers.integrations import moe

from longspan.attention.rows import kernel_module
from longspan.model.marks import find_float8_weight
from longspan.model.weights.local_tensors import local_tensor

EXPERT_ADAPTERS = "adapters_of_experts"  # of experts: peft's module of each adapted parameter, by its name
ADAPTER_VIEW = "adapter_view"  # of experts: how an adapter's matrix is read
LOCAL_EXPERTS = "local_experts"  # of experts: which of them this rank has, a slice

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)  # whose sums may be in float32


def find_row_kernels(*tensors: Tensor | None) -> Any:
    """Find the kernels' module if they take these tensors (GPU, `_DTYPES`, contiguous in the last dim); else None."""
    for x in tensors:
        if x is not None and not (x.is_cuda and x.dtype in _DTYPES and x.stride(-1) == 1):
            return None
    return kernel_module("longspan.model.experts.row_kernels")


_MOST_COLUMNS = 2048
_LEAST_COLUMNS = 16


class Visits(NamedTuple):
    """The order of the visits of R rows: visit j of row r has number r · top_k + j.

    `order` (R · top_k,) has the number at each index of the sorted visits; `place` is its inverse.
    """

    order: Tensor
    place: Tensor
    top_k: int

    @classmethod
    def from_order(cls, order: Tensor, top_k: int) -> "Visits":
        """Make the visits from their order, a permutation of their numbers."""
        place = torch.empty_like(order)
        place[order] = torch.arange(len(order), device=order.device)
        return cls(order, place, top_k)

    def inverse(self) -> "Visits":
        """Return the inverse order, which brings rows back; for one visit a row."""
        return Visits(self.place, self.order, self.top_k)

    @property
    def rows(self) -> Tensor:
        """The row of each visit, in the order of visits (R · top_k,)."""
        return self.order if self.top_k == 1 else self.order // self.top_k


def spread_rows(x: Tensor, visits: Visits) -> Tensor:
    """Copy rows (R, D) once for each visit, in their order: (R · top_k, D)."""
    return _SpreadRows.apply(x, *visits)  # pyright: ignore[reportReturnType]


def sum_visits(outputs: Tensor, weights: Tensor, visits: Visits) -> Tensor:
    """Sum the experts' `outputs` (R · top_k, D) of each row's visits, with weights (R, top_k): (R, D)."""
    return _SumVisits.apply(outputs, weights, *visits)  # pyright: ignore[reportReturnType]


class _SpreadRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor, top_k: int) -> Tensor:
        visits = ctx.visits = Visits(order, place, top_k)
        return x.index_select(0, visits.rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _compute_visit_sums(gradients[0], None, ctx.visits), None, None, None


class _SumVisits(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, outputs: Tensor, weights: Tensor, order: Tensor, place: Tensor, top_k: int) -> Tensor:
        ctx.visits = Visits(order, place, top_k)
        ctx.save_for_backward(outputs, weights)
        return _compute_visit_sums(outputs, weights, ctx.visits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        outputs, weights = ctx.saved_tensors
        return *_visit_gradients(gradients[0], outputs, weights, ctx.visits), None, None, None


def _compute_visit_sums(outputs: Tensor, weights: Tensor | None, visits: Visits) -> Tensor:
    """Sum the `outputs` (R · top_k, D) of each row's visits, with weights (R, top_k) or without: (R, D)."""
    if (kernels := find_row_kernels(outputs, weights)) is None:
        by_row = outputs.index_select(0, visits.place).unflatten(0, (-1, visits.top_k))
        return (by_row if weights is None else by_row * weights.unsqueeze(2)).sum(1)
    rows = len(visits.place) // visits.top_k
    width = outputs.shape[1]
    columns = _program_columns(width)
    dtype = outputs.dtype if weights is None else torch.promote_types(outputs.dtype, weights.dtype)
    out = outputs.new_empty((rows, width), dtype=dtype)
    if out.numel():
        row_weights = None if weights is None else weights.contiguous()
        arguments = (out, outputs, row_weights, visits.place, width, outputs.stride(0))
        programs = rows, -(-width // columns)
        kernels.sum_visits_kernel[programs](
            *arguments, TOP_K=visits.top_k, WEIGHTED=weights is not None, COLUMNS=columns
        )
    return out


def _visit_gradients(dout: Tensor, outputs: Tensor, weights: Tensor, visits: Visits) -> tuple[Tensor, Tensor]:
    """Return the gradients of the visits' outputs (R · top_k, D) and weights (R, top_k), from `dout` (R, D)."""
    if (kernels := find_row_kernels(outputs, weights, dout)) is None:
        dout_rows = dout.index_select(0, visits.rows)
        output_gradients = dout_rows * weights.flatten()[visits.order].unsqueeze(1)
        weight_gradients = (dout_rows * outputs).sum(1)[visits.place]
        return output_gradients.to(outputs.dtype), weight_gradients.unflatten(0, (-1, visits.top_k)).to(
            weights.dtype
        )
    dout = dout.contiguous()
    weights = weights.contiguous()
    width = outputs.shape[1]
    output_gradients = outputs.new_empty(outputs.shape)
    weight_gradients = torch.zeros_like(weights)
    if outputs.numel():  # else the weights' gradients stay zeros
        arguments = (
            output_gradients,
            weight_gradients,
            dout,
            outputs,
            weights,
            visits.order,
            width,
            outputs.stride(0),
        )
        kernels.visit_gradients_kernel[(len(outputs),)](
            *arguments, TOP_K=visits.top_k, COLUMNS=_program_columns(width)
        )
    return output_gradients, weight_gradients


def _program_columns(width: int) -> int:
    return min(_MOST_COLUMNS, max(_LEAST_COLUMNS, 1 << (width - 1).bit_length()))


_COLUMNS = 1024  # of a row, which one program of a kernel computes
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
    return _Gated.apply(x)  # pyright: ignore[reportReturnType]


class _Gated(torch.autograd.Function):
    """SiLU(first half) · second half of rows (S, 2 I), forward and backward by one kernel each."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        out = x.new_empty(len(x), x.shape[1] // 2)
        _launch_kernel("gated_kernel", x, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        _launch_kernel("gated_backward_kernel", x, gradients[0].contiguous(), dx)
        return dx


def _launch_kernel(name: str, x: Tensor, *others: Tensor) -> None:
    rows = len(x)
    width = x.shape[1] // 2
    if rows and width:
        blocks = rows, -(-width // _COLUMNS)
        getattr(find_row_kernels(x), name)[blocks](x, *others, x.stride(0), width, COLUMNS=_COLUMNS)


# the one compute capability for which torch 2.11 has grouped float8 products with row scales
_GROUPS_FLOAT8 = (9, 0)
_ALIGNED_ELEMENTS = 8  # rows of bfloat16 operands begin at multiples of 16 bytes


@dataclass(frozen=True)
class Loads:
    """How many rows each of e local experts got: on the device, and on the host if they have been read from it."""

    device: Tensor  # (e,) int64
    host: Sequence[int] | None = None

    def host_counts(self) -> Sequence[int]:
        """Return the counts on the host; waits for the device if they have not been read yet."""
        return self.device.tolist() if self.host is None else self.host


def run_experts(experts: nn.Module, x: Tensor, loads: Loads) -> Tensor:
    """Run experts over rows (S, D) that are sorted by local expert: (S, D), not yet weighted."""
    module: Any = experts
    first_name = "gate_up_proj" if module.has_gate else "up_proj"
    up, up_bias = _local_weight_and_bias(module, first_name)
    down, down_bias = _local_weight_and_bias(module, "down_proj")
    float8_up = find_float8_weight(module, first_name)
    float8_down = find_float8_weight(module, "down_proj")
    up_adapter = _find_adapter(module, first_name, x)
    down_adapter = _find_adapter(module, "down_proj", x)
    adapters = [matrix for adapter in (up_adapter, down_adapter) if adapter for matrix in adapter[:2]]
    if not len(x):  # a slot of padding alone
        weights = [weight for weight in (up, up_bias, down, down_bias, *adapters) if weight is not None]
        return _NoRows.apply(x, *weights)  # pyright: ignore[reportReturnType]
    grouped = expert_product_kind(x, up, down, *adapters, float8=float8_up is not None) == "grouped_mm"
    if not grouped:  # both layers need the counts: read them from the device once
        loads = Loads(loads.device, loads.host_counts())
    multiply = partial(_multiply_by_experts, loads=loads, grouped=grouped)

    def linear(x: Tensor, weight: Tensor, bias: Tensor | None, float8: Any, adapter: _Adapter | None) -> Tensor:
        y = multiply(x, weight, bias, float8, transposed=module.is_transposed)
        if adapter is None:
            return y
        first, second, scaling = adapter
        inner = multiply(x, first, None, None, transposed=False)
        return y + scaling * multiply(inner, second, None, None, transposed=False)

    inner = linear(x, up, up_bias, float8_up, up_adapter)  # (S, 2 I), or (S, I) without a gate
    inner = apply_gate(module, inner) if module.has_gate else module.act_fn(inner)
    return linear(inner, down, down_bias, float8_down, down_adapter)


# Matrices A (e, rank, inputs) and B (e, outputs, rank) of this rank's experts, and the scaling of B A.
_Adapter = tuple[Tensor, Tensor, float]


def _find_adapter(experts: nn.Module, name: str, x: Tensor) -> _Adapter | None:
    """Find what peft adds to this parameter, if it adapts it: rows of A are sorted by expert, columns of B by rank."""
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
    """Products with no rows, one for each expert, would keep the host busy while other slots wait for its messages."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.weights = [(weight.shape, weight.dtype) for weight in weights]
        ctx.dtype = x.dtype
        kind = x.device.type
        is_cast = torch.is_autocast_enabled(kind) and x.dtype != torch.float64  # as products with rows are
        return x.to(torch.get_autocast_dtype(kind) if is_cast else x.dtype, copy=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
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
    loads: Loads,
    grouped: bool,
    transposed: bool,
) -> Tensor:
    """Matrices are (e, outputs, inputs), or (e, inputs, outputs) if `transposed`; `grouped`: in one product."""
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


def expert_product_kind(x: Tensor, *weights: Tensor, float8: bool = False) -> Literal["grouped_mm", "loop"]:
    """Return how `run_experts` multiplies these rows (S, D) and weights (e, …, …), with `float8` in float8."""
    can_group = x.is_cuda and not (float8 and torch.cuda.get_device_capability(x.device) != _GROUPS_FLOAT8)
    in_bfloat16 = all(tensor.dtype == torch.bfloat16 for tensor in (x, *weights))
    aligned = all(size % _ALIGNED_ELEMENTS == 0 for weight in weights for size in weight.shape[1:])
    return "grouped_mm" if can_group and in_bfloat16 and aligned else "loop"


def _local_weight_and_bias(module: Any, name: str) -> tuple[Tensor, Tensor | None]:
    bias = local_tensor(getattr(module, f"{name}_bias")) if module.has_bias else None
    return local_tensor(getattr(module, name)), bias
