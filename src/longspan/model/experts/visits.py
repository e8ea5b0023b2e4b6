"""Visits of experts: rows (tokens) are copied once for each of their k experts, and the outputs summed with weights.

On GPUs sums are a Triton kernel, without atomic sums: gradients do not depend on the order of blocks.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.lazy import import_triton_kernels

# Sums of rows in these types may be in float32.
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def find_row_kernels(*tensors: Tensor | None) -> Any:
    """Find the kernels' module if they take these tensors (GPU, `_DTYPES`, contiguous in the last dim); else None."""
    for x in tensors:
        if x is not None and not (x.is_cuda and x.dtype in _DTYPES and x.stride(-1) == 1):
            return None
    return import_triton_kernels("longspan.model.experts.row_kernels")


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
        """Return the row of each visit, in the order of visits (R · top_k,)."""
        return self.order if self.top_k == 1 else self.order // self.top_k


def spread_rows(x: Tensor, visits: Visits) -> Tensor:
    """Copy rows (R, D) once for each visit, in their order: (R · top_k, D)."""
    return _SpreadRows.apply(x, *visits)  # pyright: ignore[reportReturnType]


def sum_visits(outputs: Tensor, weights: Tensor, visits: Visits) -> Tensor:
    """Sum the experts' `outputs` (R · top_k, D) of each row's visits, with weights (R, top_k): (R, D)."""
    return _SumVisits.apply(outputs, weights, *visits)  # pyright: ignore[reportReturnType]


class _SpreadRows(torch.autograd.Function):
    """Copies of rows for each visit; backward sums over a row's visits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor, top_k: int) -> Tensor:
        visits = ctx.visits = Visits(order, place, top_k)
        return x.index_select(0, visits.rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _compute_visit_sums(gradients[0], None, ctx.visits), None, None, None


class _SumVisits(torch.autograd.Function):
    """Weighted sums over each row's visits; the outputs of experts are saved for the gradients of weights."""

    @staticmethod
    def forward(ctx: Any, outputs: Tensor, weights: Tensor, order: Tensor, place: Tensor, top_k: int) -> Tensor:
        ctx.visits = Visits(order, place, top_k)
        ctx.save_for_backward(outputs, weights)
        return _compute_visit_sums(outputs, weights, ctx.visits)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of the visits' outputs (R · top_k, D) and weights (R, top_k)."""
        (dout,) = gradients  # (R, D)
        outputs, weights = ctx.saved_tensors
        visits: Visits = ctx.visits
        if (kernels := find_row_kernels(outputs, weights, dout)) is None:
            dout_rows = dout.index_select(0, visits.rows)
            output_gradients = (dout_rows * weights.flatten()[visits.order].unsqueeze(1)).to(outputs.dtype)
            products = (dout_rows * outputs).sum(1)[visits.place]
            weight_gradients = products.unflatten(0, (-1, visits.top_k)).to(weights.dtype)
            return output_gradients, weight_gradients, None, None, None
        dout = dout.contiguous()
        weights = weights.contiguous()
        width = outputs.shape[1]
        output_gradients = outputs.new_empty(outputs.shape)
        weight_gradients = torch.zeros_like(weights)
        if outputs.numel():  # else the weights' gradients stay zeros
            results = output_gradients, weight_gradients
            inputs = dout, outputs, weights, visits.order, width, outputs.stride(0)
            kernels.visit_gradients_kernel[(len(outputs),)](
                *results, *inputs, TOP_K=visits.top_k, COLUMNS=_program_columns(width)
            )
        return output_gradients, weight_gradients, None, None, None


def _compute_visit_sums(outputs: Tensor, weights: Tensor | None, visits: Visits) -> Tensor:
    """The sums (R, D) are of `outputs` (R · top_k, D), with weights (R, top_k) or without."""
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


def _program_columns(width: int) -> int:
    return min(_MOST_COLUMNS, max(_LEAST_COLUMNS, 1 << (width - 1).bit_length()))
