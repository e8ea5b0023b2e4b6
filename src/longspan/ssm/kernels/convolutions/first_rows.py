"""The first rows of runs, behind rows that arrived while the others were convolved; in Triton, one launch each way."""

from functools import cache
from typing import Any

import torch
from torch import Tensor

from longspan.ssm.kernels.convolutions.call import Convolution, FirstRows

_BLOCK = 256  # channels of a program


def write_first(y: Tensor, x: Tensor, arrived: Tensor, convolution: Convolution, first: FirstRows) -> None:
    """See `ConvolutionKernel`."""
    grid, given, sizes = _given(y, x, arrived, convolution, first)
    _kernel("write_first_kernel")[grid](*given, **sizes)


def owed(dout: Tensor, x: Tensor, arrived: Tensor, convolution: Convolution, first: FirstRows) -> Tensor:
    """See `ConvolutionKernel`."""
    found, columns = torch.empty_like(arrived), 1 << (first.arrived.shape[1] - 1).bit_length()
    grid, given, sizes = _given(dout, x, arrived, convolution, first)
    _kernel("owed_kernel")[grid](found, *given, **sizes, COLUMNS=columns)
    return found


def _given(
    y: Tensor, x: Tensor, arrived: Tensor, convolution: Convolution, first: FirstRows
) -> tuple[tuple[int, int], tuple[Any, ...], dict[str, Any]]:
    """Programs, arguments and sizes of a kernel; `y` is the output, or its gradient."""
    weight, bias, silu = convolution
    (runs, width), channels = first.arrived.shape, x.shape[1]
    tensors = (y, x, arrived, weight.contiguous(), weight if bias is None else bias)
    places = (first.starts, first.counts, first.arrived, *y.stride(), *x.stride())
    sizes = {"CHANNELS": channels, "BEFORE": width, "BIAS": bias is not None, "SILU": silu, "BLOCK": _BLOCK}
    return (-(-channels // _BLOCK), runs), (*tensors, *places), sizes


@cache
def _kernel(name: str) -> Any:
    from longspan.ssm.kernels.convolutions import first_rows_kernels

    return getattr(first_rows_kernels, name)
