"""The linear in float8 inside code that torch.compile traces: custom operators, as it cannot trace `products.py`.

(torch 2.13 fails if the output of an autograd.Function goes into another one and its number of rows changes.)
Rows are converted to float8 by torch's operations, which the compiler fuses with the norm or gate before, and computes
once for all linears of the same rows. Weights are converted by the kernels, in each pass, or once for several passes
(`weights.quantise_once`).
"""

from typing import Any

import torch
from torch import Tensor

from longspan.model.float8.quantise import Scaled, quantise_by_torch
from longspan.model.float8.scaled_products import multiply
from longspan.model.float8.weights import find_kept_weight


def trace_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute x W' + bias of rows x (…, K) and a weight (N, K) in float8, within a graph.

    The operator gets the rows in float8 for the product, and as they are for the gradients.

    >>> y = trace_linear(x, layer.weight, layer.bias)  # (…, N)
    """
    rows = x.reshape(-1, x.shape[-1])
    y = _linear(rows, *quantise_by_torch(rows.detach()), weight, bias)
    return y.view(*x.shape[:-1], weight.shape[0])


@torch.library.custom_op("longspan::float8_linear", mutates_args=())
def _linear(x: Tensor, values: Tensor, scales: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply rows x (S, K), which are `values` times `scales` in float8, with a weight (N, K), and add a bias."""
    return multiply(Scaled(values, scales), find_kept_weight(weight).rows(weight), x.dtype, bias)


@torch.library.custom_op("longspan::float8_row_gradient", mutates_args=())
def _row_gradient(dy: Tensor, values: Tensor, scales: Tensor, weight: Tensor) -> Tensor:
    """Multiply gradients of rows dy (S, N), which are `values` times `scales`, with the columns of a weight (N, K).

    Only the dtype of dy is read.
    """
    return multiply(Scaled(values, scales), find_kept_weight(weight).columns(weight), dy.dtype)


@_linear.register_fake
def _(x: Tensor, values: Tensor, scales: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Return the shape of `_linear` to the compiler: (S, N)."""
    return x.new_empty((x.shape[0], weight.shape[0]))


@_row_gradient.register_fake
def _(dy: Tensor, values: Tensor, scales: Tensor, weight: Tensor) -> Tensor:
    """Return the shape of `_row_gradient` to the compiler: (S, K)."""
    return dy.new_empty((dy.shape[0], weight.shape[1]))


def _save_inputs(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save for backward the weight and, only if the weight needs a gradient, the rows."""
    x, _, _, weight, _ = inputs
    ctx.save_for_backward(x if weight.requires_grad else None, weight)


def _input_gradients(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    """Return the gradients of the operator's five inputs; None for `values` and `scales`, which follow from the rows.

    The gradient of rows is a product in float8, that of the weight is computed without float8.
    """
    x, weight = ctx.saved_tensors
    needs_rows, needs_weight, needs_bias = (ctx.needs_input_grad[i] for i in (0, 3, 4))
    return (
        _row_gradient(dy, *quantise_by_torch(dy), weight) if needs_rows else None,
        None,
        None,
        (dy.t() @ x).to(weight.dtype) if needs_weight else None,
        dy.sum(0) if needs_bias else None,
    )


_linear.register_autograd(_input_gradients, setup_context=_save_inputs)
