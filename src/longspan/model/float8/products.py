"""Products of rows and matrices in float8: forward and the gradient of rows; the gradient of matrices in bfloat16.

    y  = x W'    rows of x and rows of W in float8
    dx = dy W    rows of dy and columns of W in float8
    dW = dy' x   without float8: the sum runs over rows, so that row scales cannot be taken out of it

A row of y and dx depends on that row of x or dy and on W alone. Products run by `torch._scaled_mm`, those of experts by
`torch._scaled_grouped_mm`. On CPUs, which `prepare` refuses, the numbers in float8 are multiplied in float64: this is
how tests check the arithmetic.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from longspan.model.float8 import quantise
from longspan.model.float8.quantise import Scaled, multiply, quantise_rows
from longspan.model.float8.weights import Float8Weight


@dataclass(frozen=True)
class ExpertRows:
    """Which rows belong to which of e experts, if rows are sorted by expert.

    `ends` (e,) in int32 is where the rows of each expert end. With `counts`, the rows of each expert, there is one
    product for each expert; without, one grouped product of all. Matrices are (e, N, K), or (e, K, N) if `transposed`.
    """

    ends: Tensor
    counts: Sequence[int] | None
    transposed: bool


def linear_in_float8(x: Tensor, weight: Tensor, bias: Tensor | None, float8_weight: Float8Weight) -> Tensor:
    """Compute x W' + bias of rows x (…, K) and a weight (N, K), as torch's `linear`, in float8.

    >>> y = linear_in_float8(x, layer.weight, layer.bias, Float8Weight())  # (…, N)
    """
    y = _multiply_rows(x.reshape(-1, x.shape[-1]), weight, bias, float8_weight)
    return y.view(*x.shape[:-1], weight.shape[0])


def experts_in_float8(
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    counts: Sequence[int] | None,
    *,
    transposed: bool,
    float8_weight: Float8Weight,
) -> Tensor:
    """Multiply rows x (S, K), sorted by expert (see `ExpertRows`), with their experts' matrices: (S, N).

    >>> y = experts_in_float8(x, experts.up_proj, ends, None, transposed=False, float8_weight=Float8Weight())
    """
    return _multiply_rows(x, weight, None, float8_weight, ExpertRows(ends, counts, transposed))


def _multiply_rows(
    rows: Tensor, weight: Tensor, bias: Tensor | None, float8_weight: Float8Weight, experts: ExpertRows | None = None
) -> Tensor:
    """Multiply rows (S, K) with one matrix, or each with the matrix of its expert: (S, N).

    The graph gets two nodes. `_Product` takes the output of `_Gradients` as an argument, so that dy goes back to
    `_Gradients` too. Nothing reads this output (`unread`): it has the shape of dy, and one number as its memory.
    """
    gradients = None
    if torch.is_grad_enabled() and (weight.requires_grad or (bias is not None and bias.requires_grad)):
        width = weight.shape[-1 if experts is not None and experts.transposed else -2]
        unread = rows.new_empty(()).expand(rows.shape[0], width)
        gradients = _Gradients.apply(rows.detach(), weight, bias, experts, unread)
    plain_bias = None if bias is None else bias.detach()
    return _Product.apply(rows, gradients, weight.detach(), plain_bias, experts, float8_weight)  # pyright: ignore[reportReturnType]


class _Gradients(torch.autograd.Function):
    """Computes nothing forward; backward, the gradients of the weight and the bias from that of the product.

    It is a node of its own, so that a pipeline can compute these gradients later than those of rows. It runs before the
    product and saves the rows, so that a recomputed layer that ends in this product stops here, before multiplying.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, experts: ExpertRows | None, unread: Tensor
    ) -> Tensor:
        """Return a view of `unread`, through which the product's gradient comes back to this node, and keep the rows.

        `unread` has the product's shape and no memory of its own; the rows are kept for the weight's gradient.
        """
        ctx.save_for_backward(x if weight.requires_grad else None)
        ctx.dtype, ctx.experts = weight.dtype, experts
        return unread.view_as(unread)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (x,) = ctx.saved_tensors
        of_weight = _weight_gradient(x, dy, ctx.experts).to(ctx.dtype) if ctx.needs_input_grad[1] else None
        return None, of_weight, dy.sum(0) if ctx.needs_input_grad[2] else None, None, None


class _Product(torch.autograd.Function):
    """The product of rows and a weight, both in float8; backward, the gradient of the rows."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        gradients: Tensor | None,
        weight: Tensor,
        bias: Tensor | None,
        experts: ExpertRows | None,
        float8_weight: Float8Weight,
    ) -> Tensor:
        # Not by save_for_backward: a recomputed layer would have to run this product too, to save the weight again.
        ctx.weight, ctx.version, ctx.float8_weight, ctx.experts = weight, weight._version, float8_weight, experts
        # A transposed matrix has in its columns what another one has in its rows.
        w = float8_weight.columns(weight) if experts is not None and experts.transposed else float8_weight.rows(weight)
        return _multiply_scaled(quantise_rows(x), w, x.dtype, bias, experts)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        of_rows, experts = None, ctx.experts
        if ctx.needs_input_grad[0]:
            weight, float8_weight = _read_weight(ctx), ctx.float8_weight
            transposed = experts is not None and experts.transposed  # whose rows are then the columns of W
            w = float8_weight.rows(weight) if transposed else float8_weight.columns(weight)
            of_rows = _multiply_scaled(quantise_rows(dy.contiguous()), w, dy.dtype, None, experts)
        return of_rows, dy if ctx.needs_input_grad[1] else None, None, None, None, None


def _read_weight(ctx: Any) -> Tensor:
    weight, version = ctx.weight, ctx.weight._version
    if version != ctx.version:
        raise RuntimeError(
            f"a weight {tuple(weight.shape)} that backward needs was changed in place since the forward pass: it is at "
            f"version {version}, and was at {ctx.version}; take the optimizer's step after backward"
        )
    return weight


def _multiply_scaled(
    x: Scaled, w: Scaled, dtype: torch.dtype, bias: Tensor | None, experts: ExpertRows | None
) -> Tensor:
    """Multiply rows x (S, K) with the rows of w (N, K), and add a bias; of experts, w is (e, N, K), without bias."""
    if experts is None:
        return multiply(x, w, dtype, bias)
    return multiply_experts(x, w, experts.ends, experts.counts, dtype)


def _weight_gradient(x: Tensor, dy: Tensor, experts: ExpertRows | None) -> Tensor:
    """Return the gradient of a weight (N, K), or of experts' weights (e, N, K), from rows x (S, K) and dy (S, N).

    It is dyᵀ x over all rows, or over each expert's rows; for transposed weights (e, K, N) xᵀ dy.
    """
    if experts is None:
        return dy.t() @ x
    left, right = (x, dy.contiguous()) if experts.transposed else (dy.contiguous(), x)
    return _outer_products(left, right, experts.ends, experts.counts)


# ---- experts


def multiply_experts(x: Scaled, w: Scaled, ends: Tensor, counts: Sequence[int] | None, dtype: torch.dtype) -> Tensor:
    """Multiply rows x (S, K) with the rows of their expert's matrix, of w (e, N, K): (S, N).

    `ends` (e,) is where each expert's rows end. If `counts` has the number of rows of each, there is one product for
    each expert; if it is None, one grouped product of all.
    """
    if counts is not None:
        pieces = zip(x.values.split(list(counts)), x.scales.split(list(counts)), w.values, w.scales, strict=True)
        # cuBLAS has no product whose scales do not begin at a multiple of 16 bytes, as those of a piece may not.
        return torch.cat(
            [
                multiply(Scaled(rows, row_scales.clone()), Scaled(matrix, matrix_scales), dtype)
                for rows, row_scales, matrix, matrix_scales in pieces
            ]
        )
    values = w.values.transpose(-2, -1)
    sums = {"out_dtype": torch.bfloat16, "use_fast_accum": quantise.FAST_SUMS}
    return torch._scaled_grouped_mm(x.values, values, x.scales, w.scales, offs=ends, **sums).to(dtype)


def _outer_products(left: Tensor, right: Tensor, ends: Tensor, counts: Sequence[int] | None) -> Tensor:
    """Compute leftᵀ right over the rows of each expert: left (S, A) and right (S, B) to (e, A, B).

    `ends` and `counts` are those of `ExpertRows`: without counts there is one grouped product.
    """
    if counts is None:
        return torch._grouped_mm(left.t(), right, offs=ends)  # pyright: ignore[reportAttributeAccessIssue]
    pieces = zip(left.split(list(counts)), right.split(list(counts)), strict=True)
    return torch.stack([a.t() @ b for a, b in pieces])
