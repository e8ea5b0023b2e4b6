"""Causal depthwise convolutions by the CUDA kernel of the package causal_conv1d, where that is asked for.

Source: github.com/Dao-AILab/causal-conv1d, `causal_conv1d.cpp_functions` of 1.6. Backward, a single run takes the rows
before it as an initial state; that and several runs in one row exclude each other there, so that several are laid out
with the rows before each between them (forward: with zeros, see `conv.py`).
"""

from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from longspan.ssm.kernels.asked import lacks_package
from longspan.ssm.kernels.convolutions.call import Before, Convolution, ConvolutionKernel, Gradients
from longspan.ssm.kernels.convolutions.first_rows import owed, write_first
from longspan.ssm.kernels.runs import LocalRuns

_NEEDED = (1, 6)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
_WIDTHS = range(2, 5)
_CHANNELS = 8  # their number is a multiple of it


def _lacks(x: Tensor, weight: Tensor) -> str:
    channels, width = weight.shape
    if x.dtype not in _DTYPES:
        return f"bfloat16, float16 or float32, got {str(x.dtype).removeprefix('torch.')}"
    if width not in _WIDTHS:
        return f"a convolution of width {_WIDTHS.start} to {_WIDTHS.stop - 1}, got {width}"
    if channels % _CHANNELS:
        return f"channels in multiples of {_CHANNELS}, got {channels}"
    return lacks_package("causal-conv1d", _NEEDED, x.device)


def _forward(x: Tensor, convolution: Convolution, runs: LocalRuns, alone: Before) -> Tensor:
    rows, state = _given(x, x[:0], runs, alone)
    weight, bias, silu = convolution
    y = _package().causal_conv1d_fwd_function(_channels_last(rows), weight.contiguous(), bias, None, state, None, silu)
    y = y.squeeze(0).t()
    return y if len(runs.lengths) == 1 else y.index_select(0, alone.kept)


def _backward(
    dout: Tensor, x: Tensor, arrived: Tensor, convolution: Convolution, runs: LocalRuns, before: Before
) -> Gradients:
    rows, state = _given(x, arrived, runs, before)
    weight, bias, silu = convolution
    one = len(runs.lengths) == 1
    of_rows = dout.contiguous() if one else torch.zeros_like(rows).index_copy_(0, before.kept, dout)
    given = (_channels_last(rows), weight.contiguous(), bias, _channels_last(of_rows), None, state, None, None)
    drows, dweight, dbias, _ = _package().causal_conv1d_bwd_function(*given, False, silu)
    drows = drows.squeeze(0).t()
    return drows if one else drows.index_select(0, before.kept), dweight, dbias


def _given(x: Tensor, arrived: Tensor, runs: LocalRuns, before: Before) -> tuple[Tensor, Tensor | None]:
    """The rows to convolve and their initial state (1, C, width): local rows of one run, or all laid out."""
    x = x if x.is_contiguous() else x.contiguous()
    if len(runs.lengths) > 1:
        return torch.cat([x, arrived, x.new_zeros((1, x.shape[1]))]).index_select(0, before.source), None
    if not len(arrived):
        return x, None
    state = x.new_zeros((before.width, x.shape[1]))
    state[before.column - 1] = arrived
    return x, state.t().unsqueeze(0)


def _channels_last(rows: Tensor) -> Tensor:
    """(L, C) as (1, C, L), channels next to each other."""
    return rows.t().unsqueeze(0)


def _package() -> Any:
    return import_module("causal_conv1d.cpp_functions")


PACKAGE_CONVOLUTION = ConvolutionKernel("causal_conv1d", _lacks, _forward, _backward, write_first, owed)
