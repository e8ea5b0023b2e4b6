"""Rows in float8 (e4m3) with one scale each, and the columns of matrices as such rows.

A row's scale is the largest of its absolute values divided by 448, the largest number of e4m3. So the float8 row
depends on that row alone, not on its neighbours or on how rows are split over ranks. On GPUs with Triton a row is read
once; elsewhere torch's operations do the same arithmetic.
"""

from functools import cache
from importlib import import_module
from importlib.util import find_spec
from typing import Any, NamedTuple

import torch
from torch import Tensor

FLOAT8 = torch.float8_e4m3fn
# torch's operations below repeat these as digits: torch.compile treats a number with a name as one that may change.
LARGEST = 448.0  # number of e4m3
_LEAST = 1e-30  # of a row's largest number: below, rows become zeros, and the factor stays finite
_MOST_COLUMNS = 16384  # of a row that a program holds at once
_TILE = 64  # rows and columns of a block of a matrix
_PARTS = 32  # at most so many parts of a matrix's rows look for the largest numbers of columns at the same time


class Scaled(NamedTuple):
    """Rows in float8, `values` (…, R, C), and the factor of each row, `scales` (…, R) in float32."""

    values: Tensor
    scales: Tensor

    def dequantise(self) -> Tensor:
        """Return the rows in float64."""
        return self.values.double() * self.scales.double().unsqueeze(-1)


def quantise_rows(x: Tensor) -> Scaled:
    """Convert rows (…, R, C) to float8, each by its own scale.

    >>> quantise_rows(torch.tensor([[1.0, -896.0]])).scales
    tensor([2.])
    """
    if (kernels := _find_kernels(x)) is None:
        return quantise_by_torch(x)
    rows = x.reshape(-1, x.shape[-1])
    values = torch.empty(x.shape, dtype=FLOAT8, device=x.device)
    scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    if rows.numel():
        width = rows.shape[1]
        columns = min(_MOST_COLUMNS, 1 << (width - 1).bit_length())
        kernels.quantise_rows_kernel[(len(rows),)](
            *(rows, values, scales, width, rows.stride(0)),
            LARGEST=LARGEST,
            OF_LARGEST=1 / LARGEST,
            LEAST=_LEAST,
            COLUMNS=columns,
            IN_ONE=width <= columns,
            num_warps=min(16, max(1, columns // 1024)),  # a warp for every 1024 columns
        )
    return Scaled(values, scales)


def quantise_by_torch(x: Tensor) -> Scaled:
    """Convert rows (…, R, C) to float8 by torch's operations; a row of zeros stays zeros.

    >>> quantise_by_torch(torch.tensor([[1.0, -896.0]])).values.dtype
    torch.float8_e4m3fn
    """
    largest = x.abs().amax(-1, keepdim=True).float().clamp_min(1e-30)  # so that factors stay finite
    return Scaled((x.float() * _factors(largest)).to(FLOAT8), _scales(largest).squeeze(-1))


def quantise_columns(x: Tensor) -> Scaled:
    """Convert the columns of matrices (…, R, C) to float8, each by its own scale, as the rows of (…, C, R).

    >>> quantise_columns(torch.tensor([[1.0, 2.0], [-448.0, 3.0]])).values.shape
    torch.Size([2, 2])

    One kernel finds the largest absolute values of columns, in each of several parts of the rows; a column's is the
    largest over the parts. A second kernel scales.
    """
    if (kernels := _find_kernels(x)) is None:
        return quantise_rows(x.transpose(-2, -1).contiguous())
    rows, width = x.shape[-2:]
    matrices = x.reshape(-1, rows, width)
    count = len(matrices)
    values = torch.empty((*x.shape[:-2], width, rows), dtype=FLOAT8, device=x.device)
    if not matrices.numel():
        return Scaled(values, torch.zeros(values.shape[:-1], device=x.device))
    across, down = -(-width // _TILE), -(-rows // _TILE)  # tiles
    sizes = rows, width, matrices.stride(1), matrices.stride(0)
    parts = torch.empty((count, min(_PARTS, down), width), device=x.device)
    tile = {"ROWS": _TILE, "COLUMNS": _TILE}
    kernels.largest_of_columns_kernel[(across, parts.shape[1], count)](matrices, parts, *sizes, **tile)
    largest = parts.amax(1).clamp_min(_LEAST)  # so that factors stay finite
    kernels.quantise_columns_kernel[(down, across, count)](matrices, values, _factors(largest), *sizes, **tile)
    return Scaled(values, _scales(largest).view(values.shape[:-1]))


def _scales(most: Tensor) -> Tensor:
    return most * (1 / 448.0)


def _factors(most: Tensor) -> Tensor:
    """Return the factors that bring the largest absolute values of rows to 448.

    A true quotient: `448.0 / most` would be torch's rounded reciprocal times 448.
    """
    return torch.full_like(most, 448.0) / most


def _find_kernels(x: Tensor) -> Any:
    if not x.is_cuda or x.stride(-1) != 1:
        return None
    return kernel_module()


@cache
def kernel_module() -> Any:
    """Return the module of the kernels; None without Triton."""
    return None if find_spec("triton") is None else import_module("longspan.model.float8.quantise_kernels")


# ---- products of scaled values


FAST_SUMS = True
"""Whether tensor cores sum products in their own precision, without moving sums to float32 after every 128 products.

The difference is far smaller than the rounding of float8, and does not depend on neighbouring rows."""


def multiply(x: Scaled, w: Scaled, dtype: torch.dtype, bias: Tensor | None = None) -> Tensor:
    """Multiply rows x (S, K) with the rows of w (N, K), and add a bias (N,): (S, N)."""
    if not x.values.is_cuda:
        y = x.dequantise() @ w.dequantise().t()
        return (y if bias is None else y + bias).to(dtype)
    if not x.values.numel():
        return x.scales.new_zeros((len(x.values), len(w.values)), dtype=dtype)
    y = torch._scaled_mm(
        x.values,
        w.values.t(),
        scale_a=x.scales.unsqueeze(1),
        scale_b=w.scales.unsqueeze(0),
        bias=bias,
        out_dtype=torch.bfloat16,
        use_fast_accum=FAST_SUMS,
    )
    return y.to(dtype)
