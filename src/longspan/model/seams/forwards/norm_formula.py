"""What RMS norms compute, and one pass over memory that computes it, forward and backward.

The formula is (offset + weight) · x / √(mean x² + eps), the mean over groups of features; some norms multiply x by a
gate before, or the result by one after. A Triton kernel does all of it in float32 and rounds once, where models round
between; transformers' own code takes a pass over memory for each operation, and more backward.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WIDEST = 16384  # features of a group, which a program holds
_TILE = 4096  # features that a program of four warps has at a time
_PROGRAMS = 512  # at most in backward, each with its own sum of the weight's gradient


@dataclass(frozen=True)
class NormFormula:
    """`offset` is added to weights (1 in Gemma's norms); the mean is taken over each of `groups` groups of features.

    `gate`, through its `activation`, stands before the norm, after it, or nowhere ("").
    """

    offset: float = 0.0
    groups: int = 1
    gate: Literal["", "first", "last"] = ""
    activation: Literal["silu", "sigmoid"] = "silu"

    def __call__(self, x: Tensor, weight: Tensor, eps: float, gate: Tensor | None = None) -> Tensor:
        """Compute the norm (…, n) of features (…, n), in torch's operations."""
        gates = getattr(torch.nn.functional, self.activation)(gate) if gate is not None else 1.0
        y = x * gates if self.gate == "first" else x
        in_groups = y.unflatten(-1, (self.groups, -1))
        normed = in_groups * torch.rsqrt(in_groups.square().mean(-1, keepdim=True) + eps)
        y = normed.flatten(-2) * (self.offset + weight)
        return y * gates if self.gate == "last" else y

    def run_kernel(self, x: Tensor, weight: Tensor, eps: float, gate: Tensor | None = None) -> Tensor | None:
        """Compute the norm by the kernel; None if the kernel cannot take these tensors.

        The kernel takes tensors on GPUs, of the types in _DTYPES, with groups of _WIDEST features at most and at least
        one row, and a gate only if the formula has one.
        """
        tensors = (x, weight) if gate is None else (x, weight, gate)
        if not are_on_gpus(tensors) or any(t.dtype not in _DTYPES for t in tensors) or _norm_kernels() is None:
            return None
        if weight.numel() // self.groups > _WIDEST or bool(self.gate) != (gate is not None) or not x.numel():
            return None
        return _OnePass.apply(x, weight, gate, eps, self)  # pyright: ignore[reportReturnType]


def are_on_gpus(tensors: Sequence[Tensor]) -> bool:
    """Return whether kernels can read these tensors."""
    return all(x.is_cuda for x in tensors)


class _OnePass(torch.autograd.Function):
    """A norm by one Triton kernel in forward and one in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, gate: Tensor | None, eps: float, formula: NormFormula) -> Tensor:
        rows, gates = _flatten_rows(x), None if gate is None else _flatten_rows(gate)
        out = rows.new_empty(rows.shape)
        inverse = rows.new_empty((len(rows), formula.groups), dtype=torch.float32)  # of the root
        block = _Block.of(len(rows), rows.shape[1] // formula.groups)
        arguments = (rows, gates, weight, out, inverse, len(rows), block.width, rows.stride(0), _row_stride(gates), eps)
        _norm_kernels().norm_rows_kernel[block.count, formula.groups](*arguments, **_kernel_constants(formula, block))
        ctx.save_for_backward(x, weight, gate, inverse)
        ctx.formula, ctx.gate_shape = formula, None if gate is None else gate.shape
        return out.view(x.shape)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x, weight, gate, inverse), formula = ctx.saved_tensors, ctx.formula
        rows, gates, dout = _flatten_rows(x), None if gate is None else _flatten_rows(gate), _flatten_rows(gradients[0])
        dx, dgate = rows.new_empty(rows.shape), None if gates is None else gates.new_empty(gates.shape)
        block = _Block.of(len(rows), rows.shape[1] // formula.groups)
        programs = min(block.count, _PROGRAMS)
        parts = rows.new_empty((programs, rows.shape[1]), dtype=torch.float32)
        strides = (rows.stride(0), _row_stride(gates), dout.stride(0))
        arguments = (rows, gates, weight, inverse, dout, dx, dgate, parts, len(rows), block.width, *strides)
        _norm_kernels().norm_rows_backward_kernel[programs, formula.groups](
            *arguments, **_kernel_constants(formula, block)
        )
        dweight = parts.sum(0).to(weight.dtype).view(weight.shape)
        return dx.view(x.shape), dweight, None if dgate is None else dgate.view(ctx.gate_shape), None, None


@dataclass(frozen=True)
class _Block:
    """What a program has at a time: `rows` rows of one group of `width` features, and `count` such blocks in all.

    Triton wants a power of two: a row takes `columns`, the next one above `width`.
    """

    rows: int
    width: int
    columns: int
    count: int

    @classmethod
    def of(cls, rows: int, width: int) -> "_Block":
        columns = max(16, 1 << (width - 1).bit_length())
        at_once = max(1, _TILE // 2 // columns)
        return cls(at_once, width, columns, -(-rows // at_once))


def _kernel_constants(formula: NormFormula, block: _Block) -> dict[str, Any]:
    sizes = {"ROWS": block.rows, "COLUMNS": block.columns, "GROUPS": formula.groups, "OFFSET": formula.offset}
    kinds = {"GATE_FIRST": formula.gate == "first", "GATE_LAST": formula.gate == "last"}
    # four warps for every _TILE features
    warps = 4 * max(1, block.rows * block.columns // _TILE)
    return {**sizes, **kinds, "SILU": formula.activation == "silu", "num_warps": min(16, warps)}


def _flatten_rows(x: Tensor) -> Tensor:
    """Return x as (rows, features), with rows at equal distances and features one after another.

    It is a view of x where x lies so, and otherwise a copy.
    """
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(1) == 1 else rows.contiguous()


def _row_stride(rows: Tensor | None) -> int:
    """Return the distance between rows in elements; 0 for a gate that is not there, which no kernel reads."""
    return 0 if rows is None else rows.stride(0)


@cache
def _norm_kernels() -> Any:
    return None if find_spec("triton") is None else import_module("longspan.model.seams.forwards.norm_kernels")
