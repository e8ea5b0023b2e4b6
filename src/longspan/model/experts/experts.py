"""What experts compute from rows (tokens) sorted by expert: two linear layers around the model's own gate.

On GPUs in bfloat16 one grouped matrix product does all experts of a layer; everything else (CPUs, other dtypes, sizes
that the kernel cannot align) takes one matrix product for each expert. Both give every expert a gradient, zeros if it
got no row. The gate SiLU(first half) · second half runs as one Triton kernel where a model has transformers' default
of it; any other gate is the model's own code, as everything is on CPUs. Which rows go to which expert is in `moe.py`.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F
from torch.nn.functional import silu
from transformers.integrations import moe

from longspan.model.experts.rows import find_kernels
from longspan.model.float8.products import experts_in_float8
from longspan.model.float8.weights import Float8Weight, find_float8_weight
from longspan.model.weights.local_tensors import local_tensor

_COLUMNS = 1024  # of a row, which one program of a kernel computes


def apply_gate(experts: nn.Module, x: Tensor) -> Tensor:
    """Apply the model's gate to rows (S, 2 I) of gates and values: (S, I)."""
    module: Any = experts
    return gate_in_one_pass(x) if _has_default_gate(module) and find_kernels(x) is not None else module._apply_gate(x)


def gate_in_one_pass(x: Tensor) -> Tensor:
    """Compute SiLU(first half) · second half of rows (S, 2 I), by the kernel: (S, I)."""
    return _Gated.apply(x)  # pyright: ignore[reportReturnType]


def _has_default_gate(experts: Any) -> bool:
    by_default = getattr(moe, "_default_apply_gate", None)
    gate = getattr(type(experts), "_apply_gate", None)
    return gate is not None and gate is by_default and _is_silu(experts.act_fn)


@cache
@torch.no_grad()
def _is_silu(activation: Callable[[Tensor], Tensor]) -> bool:
    """Return whether an activation is SiLU by its numbers: transformers has several classes, LFM2-MoE torch's own."""
    if isinstance(activation, nn.Module) and next(activation.parameters(), None) is not None:
        return False  # what is learnt may be SiLU only at first
    x = torch.linspace(-20.0, 20.0, 81)
    return torch.allclose(activation(x), silu(x), rtol=1e-6)


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
    rows, width = len(x), x.shape[1] // 2
    if rows and width:
        blocks = rows, -(-width // _COLUMNS)
        getattr(find_kernels(x), name)[blocks](x, *others, x.stride(0), width, COLUMNS=_COLUMNS)


# torch 2.10 made the private name public.
_grouped_mm: Callable[..., Tensor] | None = getattr(F, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
_GROUPS_FLOAT8 = (9, 0)  # the one compute capability for which torch 2.11 has grouped float8 products with row scales
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
    """Run experts over rows (S, D) that are sorted by local expert: (S, D), not yet weighted.

    Each expert has a first linear, for gate and values together if it has a gate, and a second one, `down_proj`.
    """
    module: Any = experts
    first_name = "gate_up_proj" if module.has_gate else "up_proj"
    up, up_bias = _layer_weights(module, first_name)
    down, down_bias = _layer_weights(module, "down_proj")
    float8_up, float8_down = find_float8_weight(module, first_name), find_float8_weight(module, "down_proj")
    if not len(x):  # a slot of padding alone
        weights = [weight for weight in (up, up_bias, down, down_bias) if weight is not None]
        return _NoRows.apply(x, *weights)  # pyright: ignore[reportReturnType]
    grouped = expert_kernel(x, up, down, float8=float8_up is not None) == "grouped_mm"
    if not grouped:  # both layers need the counts: read them from the device once
        loads = Loads(loads.device, loads.host_counts())
    linear = partial(_multiply_by_experts, loads=loads, grouped=grouped, transposed=module.is_transposed)
    inner = linear(x, up, up_bias, float8_up)  # (S, 2 I), or (S, I) without a gate
    inner = apply_gate(module, inner) if module.has_gate else module.act_fn(inner)
    return linear(inner, down, down_bias, float8_down)


class _NoRows(torch.autograd.Function):
    """What experts make of no rows: none, and zeros as the gradient of each weight.

    Products with no rows, one for each expert, would keep the host busy while the other slots wait for its messages.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.weights = [(weight.shape, weight.dtype) for weight in weights]
        ctx.dtype, kind = x.dtype, x.device.type
        is_cast = torch.is_autocast_enabled(kind) and x.dtype != torch.float64  # as products with rows are
        return x.to(torch.get_autocast_dtype(kind) if is_cast else x.dtype, copy=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        needed = zip(ctx.weights, ctx.needs_input_grad[1:], strict=True)
        zeros = (
            gradients[0].new_zeros(shape, dtype=dtype) if is_needed else None for (shape, dtype), is_needed in needed
        )
        return gradients[0].to(ctx.dtype), *zeros


def _multiply_by_experts(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    float8_weight: Float8Weight | None,
    *,
    loads: Loads,
    grouped: bool,
    transposed: bool,
) -> Tensor:
    """Multiply rows by the matrices of their experts, in float8 with a `float8_weight`, and add the experts' biases.

    Matrices are (e, outputs, inputs), or (e, inputs, outputs) if `transposed`; `grouped`: in one product.
    """
    if float8_weight is None:
        return (_multiply_grouped_rows if grouped else _multiply_one_by_one)(x, weight, bias, loads, transposed)
    ends = loads.device.cumsum(0).to(torch.int32)
    counts = None if grouped else loads.host_counts()
    y = experts_in_float8(x, weight, ends, counts, transposed=transposed, float8_weight=float8_weight)
    return y if bias is None else y + bias[_row_experts(ends, len(x))]


def expert_kernel(x: Tensor, *weights: Tensor, float8: bool = False) -> Literal["grouped_mm", "loop"]:
    """Return how `run_experts` multiplies these rows (S, D) and weights (e, …, …), with `float8` in float8.

    torch's grouped product takes bfloat16 on GPUs, sizes of whole 16 bytes, and float8 on GPUs of one generation;
    anything else is a loop over experts.
    """
    can_group = _grouped_mm is not None and x.is_cuda
    can_group = can_group and not (float8 and torch.cuda.get_device_capability(x.device) != _GROUPS_FLOAT8)
    in_bfloat16 = all(tensor.dtype == torch.bfloat16 for tensor in (x, *weights))
    aligned = all(size % _ALIGNED_ELEMENTS == 0 for weight in weights for size in weight.shape[1:])
    return "grouped_mm" if can_group and in_bfloat16 and aligned else "loop"


def _layer_weights(module: Any, name: str) -> tuple[Tensor, Tensor | None]:
    bias = local_tensor(getattr(module, f"{name}_bias")) if module.has_bias else None
    return local_tensor(getattr(module, name)), bias


def _multiply_one_by_one(x: Tensor, weight: Tensor, bias: Tensor | None, loads: Loads, transposed: bool) -> Tensor:
    biases = [None] * weight.shape[0] if bias is None else bias.unbind()
    pieces: list[Tensor] = []
    for rows, matrix, offset in zip(x.split(list(loads.host_counts())), weight.unbind(), biases, strict=True):
        piece = rows @ (matrix if transposed else matrix.T)
        pieces.append(piece if offset is None else piece + offset)
    return torch.cat(pieces)


def _multiply_grouped_rows(x: Tensor, weight: Tensor, bias: Tensor | None, loads: Loads, transposed: bool) -> Tensor:
    assert _grouped_mm is not None
    ends = loads.device.cumsum(0).to(torch.int32)
    y = _grouped_mm(x, weight if transposed else weight.transpose(-2, -1), offs=ends)
    if bias is None:
        return y
    return y + bias[_row_experts(ends, len(x))]


def _row_experts(ends: Tensor, rows: int) -> Tensor:
    return torch.searchsorted(ends, torch.arange(rows, device=ends.device, dtype=torch.int32), right=True)
