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
# About so many programs share the rows of all experts with biases, each with its own sum of a bias's gradient.
_PROGRAMS = 2048


class ExpertBiases(NamedTuple):
    """What is added to rows that are sorted by expert: `values` (e, D), of which expert i's go to rows up to `ends[i]`.

    The rows of the first expert begin at 0; `ends` (e,) is int64.
    """

    values: Tensor
    ends: Tensor

    def experts(self, rows: int) -> Tensor:
        """Return the expert of each row (S,)."""
        numbers = torch.arange(rows, device=self.ends.device)
        return torch.searchsorted(self.ends, numbers, right=True, out_int32=True)

    def add_to(self, x: Tensor) -> Tensor:
        """Return rows (S, D) with their experts' biases, as torch's operations add them."""
        return x + self.values[self.experts(len(x))]

    @property
    def splits(self) -> int:
        """Return how many programs share the rows of an expert."""
        return -(-_PROGRAMS // len(self.ends))

    def make_parts(self) -> Tensor:
        """Make memory for each program's sum of the gradient of `values`."""
        return self.values.new_empty((len(self.ends), self.splits, self.values.shape[1]), dtype=torch.float32)


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

    @property
    def rows(self) -> Tensor:
        """Return the row of each visit, in the order of visits (R · top_k,)."""
        return self.order if self.top_k == 1 else self.order // self.top_k


def spread_rows(x: Tensor, visits: Visits) -> Tensor:
    """Copy rows (R, D) once for each visit, in their order: (R · top_k, D)."""
    return _SpreadRows.apply(x, *visits)  # pyright: ignore[reportReturnType]


def sum_visits(
    outputs: Tensor, weights: Tensor | None, visits: Visits, biases: ExpertBiases | None = None
) -> Tensor:
    """Sum the experts' `outputs` (R · top_k, D), to which biases are added, of each row's visits: (R, D).

    Weights (R, top_k) multiply them.
    """
    if biases is not None and find_row_kernels(outputs, weights, biases.values) is None:
        outputs = biases.add_to(outputs)
        biases = None
    return _SumVisits.apply(outputs, weights, *visits, *(biases or (None, None)))  # pyright: ignore[reportReturnType]


class _SpreadRows(torch.autograd.Function):
    """Copies of rows for each visit; backward sums over a row's visits."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, order: Tensor, place: Tensor, top_k: int) -> Tensor:
        visits = ctx.visits = Visits(order, place, top_k)
        return x.index_select(0, visits.rows)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return _compute_visit_sums(gradients[0], None, ctx.visits, None), None, None, None


class _SumVisits(torch.autograd.Function):
    """Weighted sums over each row's visits; the outputs of experts are saved for the gradients of weights."""

    @staticmethod
    def forward(
        ctx: Any,
        outputs: Tensor,
        weights: Tensor | None,
        order: Tensor,
        place: Tensor,
        top_k: int,
        bias: Tensor | None,
        ends: Tensor | None,
    ) -> Tensor:
        ctx.visits = Visits(order, place, top_k)
        ctx.save_for_backward(outputs if weights is not None else None, weights, bias, ends)
        ctx.dtype = outputs.dtype
        biases = None if bias is None or ends is None else ExpertBiases(bias, ends)
        return _compute_visit_sums(outputs, weights, ctx.visits, biases)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of the visits' outputs (R · top_k, D), weights (R, top_k) and biases (e, D)."""
        dout = gradients[0].contiguous()  # (R, D)
        outputs, weights, bias, ends = ctx.saved_tensors
        visits: Visits = ctx.visits
        biases = None if bias is None else ExpertBiases(bias, ends)
        if (kernels := find_row_kernels(outputs, weights, dout)) is None:
            dout_rows = dout.index_select(0, visits.rows)
            if weights is None:
                return dout_rows, *[None] * 6
            output_gradients = (dout_rows * weights.flatten()[visits.order].unsqueeze(1)).to(outputs.dtype)
            products = (dout_rows * outputs).sum(1)[visits.place]
            weight_gradients = products.unflatten(0, (-1, visits.top_k)).to(weights.dtype)
            return output_gradients, weight_gradients, *[None] * 5
        rows = len(visits.order)
        width = dout.shape[1]
        output_gradients = dout.new_empty((rows, width), dtype=ctx.dtype)
        weight_gradients = (
            None if weights is None else torch.empty_like(weights, memory_format=torch.contiguous_format)
        )
        parts = biases.make_parts() if biases is not None and ctx.needs_input_grad[5] else None
        if programs := rows if biases is None else len(ends) * biases.splits:
            columns = _columns_of_row(width)
            kernels.visit_gradients_kernel[(programs,)](
                *(output_gradients, weight_gradients, parts, dout, outputs),
                *(None if weights is None else weights.contiguous(), bias, ends, visits.order, width),
                0 if outputs is None else outputs.stride(0),
                TOP_K=visits.top_k,
                WEIGHTED=weights is not None,
                BIASED=biases is not None,
                SPLITS=1 if biases is None else biases.splits,
                SUMS_BIAS=parts is not None,
                COLUMNS=columns,
                num_warps=min(16, max(4, columns // 512)),
            )
        bias_gradient = None if parts is None or biases is None else parts.sum(1).to(biases.values.dtype)
        return output_gradients, weight_gradients, None, None, None, bias_gradient, None


def _compute_visit_sums(
    outputs: Tensor, weights: Tensor | None, visits: Visits, biases: ExpertBiases | None
) -> Tensor:
    """The sums (R, D) are of `outputs` (R · top_k, D), with weights (R, top_k) or without; biases need kernels."""
    if (kernels := find_row_kernels(outputs, weights)) is None:
        by_row = outputs.index_select(0, visits.place).unflatten(0, (-1, visits.top_k))
        return (by_row if weights is None else by_row * weights.unsqueeze(2)).sum(1)
    rows = len(visits.place) // visits.top_k
    width = outputs.shape[1]
    columns = min(_MOST_COLUMNS, _columns_of_row(width))
    dtype = outputs.dtype if weights is None else torch.promote_types(outputs.dtype, weights.dtype)
    bias = experts = None
    if biases is not None:
        bias = biases.values.contiguous()
        experts = biases.experts(len(outputs))
        dtype = torch.promote_types(dtype, bias.dtype)
    out = outputs.new_empty((rows, width), dtype=dtype)
    if out.numel():
        row_weights = None if weights is None else weights.contiguous()
        arguments = (out, outputs, row_weights, bias, experts, visits.place, width, outputs.stride(0))
        flags = {"WEIGHTED": weights is not None, "BIASED": bias is not None}
        kernels.sum_visits_kernel[rows, -(-width // columns)](
            *arguments, TOP_K=visits.top_k, COLUMNS=columns, **flags
        )
    return out


def _columns_of_row(width: int) -> int:
    return max(_LEAST_COLUMNS, 1 << (width - 1).bit_length())
