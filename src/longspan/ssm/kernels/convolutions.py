"""Causal depthwise convolutions over a rank's own runs of rows: by flash-linear-attention where it can, else by torch.

A kernel first convolves a rank's rows with zeros before each run, and once the rows before the runs have arrived
(`ssm/conv.py`), it writes the first rows of those runs again.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from longspan.ssm.kernels.fla import fla_function, fla_unsupported_call_reason, triton_kernel
from longspan.ssm.kernels.local_runs import LocalRuns


class RunInputs(NamedTuple):
    """Where the `width` rows before each run lie, and the run's own (`layout.rows_before`).

    `source` (T + runs · width,) lists for each run the rows before it, then its own, as indices into [local rows |
    arrived rows | one zero row]; `local` (T,) are the indices of local rows in that list. For each arrived row, `run`
    is the run that it lies before, and `column` where, of width + 1 columns of which the first stays empty.
    """

    width: int
    source: Tensor
    local: Tensor
    run: Tensor
    column: Tensor


class Convolution(NamedTuple):
    """weight (C, W), bias (C,) or None, and whether SiLU follows."""

    weight: Tensor
    bias: Tensor | None
    silu: bool


class FirstRows(NamedTuple):
    """The rows of runs that read rows which arrive: of each such run the first, `width` at most.

    `rows` (N,) are their local indices, and `before` treats them as runs of their own. For each of R runs, `starts` is
    its first row, `counts` how many are meant, `arrived` (R, width) which arrived rows lie before it, −1 for none.
    """

    rows: Tensor
    before: RunInputs
    starts: Tensor
    counts: Tensor
    arrived: Tensor


# These are the gradients of x, weight and bias.
ConvolutionGradients = tuple[Tensor, Tensor | None, Tensor | None]


@dataclass(frozen=True)
class ConvolutionKernel:
    """A kernel by its name.

    `forward(x, convolution, runs, before)` gives y (T, C) from x (T, C) of at least one row, zeros before every run;
    `write_first_outputs(y, x, arrived, convolution, first)` writes into it the first rows of runs that rows arrive for.
    `arrived_gradients(dout, x, arrived, convolution, first)` gives the gradients of arrived rows,
    `backward(dout, x, arrived, convolution, runs, before)` those of x, weight and bias. A parameter that requires no
    gradient may get None.
    """

    name: str
    forward: Callable[[Tensor, Convolution, LocalRuns, RunInputs], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor, Convolution, LocalRuns, RunInputs], ConvolutionGradients]
    write_first_outputs: Callable[[Tensor, Tensor, Tensor, Convolution, FirstRows], None]
    arrived_gradients: Callable[[Tensor, Tensor, Tensor, Convolution, FirstRows], Tensor]


def _torch_forward(x: Tensor, convolution: Convolution, runs: LocalRuns, before: RunInputs) -> Tensor:
    return _convolve_runs(x, x.new_zeros((len(before.run), x.shape[1])), convolution, before)


def _torch_backward(
    dout: Tensor, x: Tensor, arrived: Tensor, convolution: Convolution, runs: LocalRuns, before: RunInputs
) -> ConvolutionGradients:
    """Rows always get a gradient; parameters that need none get None. `arrived` rows got theirs before."""
    weight, bias, silu = convolution
    x_leaf = x.detach().requires_grad_()
    weight_leaf = weight.detach().requires_grad_(weight.requires_grad)
    bias_leaf = None if bias is None else bias.detach().requires_grad_(bias.requires_grad)
    with torch.enable_grad():
        out = _convolve_runs(x_leaf, arrived, Convolution(weight_leaf, bias_leaf, silu), before)
    leaves = [y if y is not None and y.requires_grad else None for y in (x_leaf, weight_leaf, bias_leaf)]
    gradients = iter(torch.autograd.grad(out, [y for y in leaves if y is not None], dout))
    dx, dweight, dbias = (None if y is None else next(gradients) for y in leaves)
    assert dx is not None
    return dx, dweight, dbias


def _torch_write_first_outputs(
    y: Tensor, x: Tensor, arrived: Tensor, convolution: Convolution, first: FirstRows
) -> None:
    y.index_copy_(0, first.rows, _convolve_runs(x.index_select(0, first.rows), arrived, convolution, first.before))


def _torch_arrived_gradients(
    dout: Tensor, x: Tensor, arrived: Tensor, convolution: Convolution, first: FirstRows
) -> Tensor:
    rows = x.index_select(0, first.rows)
    arrived = arrived.detach().requires_grad_()
    with torch.enable_grad():
        out = _convolve_runs(rows, arrived, convolution, first.before)
    return torch.autograd.grad(out, arrived, dout.index_select(0, first.rows))[0]


def _convolve_runs(x: Tensor, arrived: Tensor, convolution: Convolution, before: RunInputs) -> Tensor:
    """Output j reads inputs j to j + width, so the output of the row at index i of the layout is number i − width."""
    weight, bias, silu = convolution
    rows = torch.cat([x, arrived, x.new_zeros((1, x.shape[1]))]).index_select(0, before.source)
    y = F.conv1d(rows.t().unsqueeze(0), weight.unsqueeze(1), bias, groups=x.shape[1])
    y = y.squeeze(0).t().index_select(0, before.local - before.width)
    return F.silu(y) if silu else y


TORCH_CONVOLUTION = ConvolutionKernel(
    "torch", _torch_forward, _torch_backward, _torch_write_first_outputs, _torch_arrived_gradients
)

_BLOCK = 256  # channels of a program


def write_first_outputs(y: Tensor, x: Tensor, arrived: Tensor, convolution: Convolution, first: FirstRows) -> None:
    """Do what `ConvolutionKernel.write_first_outputs` says by our Triton kernel, beside fla's, which convolves whole
    runs.
    """
    grid, arguments, sizes = _launch_arguments(y, x, arrived, convolution, first)
    triton_kernel("write_first_rows_kernel")[grid](*arguments, **sizes)


def arrived_gradients(
    dout: Tensor, x: Tensor, arrived: Tensor, convolution: Convolution, first: FirstRows
) -> Tensor:
    """Do what `ConvolutionKernel.arrived_gradients` says by our Triton kernel; each arrived row is read by one run, and
    so written once.
    """
    columns = 1 << (first.arrived.shape[1] - 1).bit_length()  # a power of two, as Triton's blocks have
    gradients = torch.empty_like(arrived)
    grid, arguments, sizes = _launch_arguments(dout, x, arrived, convolution, first)
    triton_kernel("arrived_gradients_kernel")[grid](gradients, *arguments, **sizes, COLUMNS=columns)
    return gradients


def _launch_arguments(
    y: Tensor, x: Tensor, arrived: Tensor, convolution: Convolution, first: FirstRows
) -> tuple[tuple[int, int], tuple[Any, ...], dict[str, Any]]:
    """The grid is (blocks of channels, runs); `y` is the output or its gradient."""
    weight, bias, silu = convolution
    runs, width = first.arrived.shape
    channels = x.shape[1]
    # The kernels do not read the last tensor without a bias.
    tensors = (y, x, arrived, weight.contiguous(), weight if bias is None else bias)
    places = (first.starts, first.counts, first.arrived, *y.stride(), *x.stride())
    sizes = {"CHANNELS": channels, "BEFORE": width, "BIAS": bias is not None, "SILU": silu, "BLOCK": _BLOCK}
    return (-(-channels // _BLOCK), runs), (*tensors, *places), sizes


_FLA_MODULE = "modules.causal_conv1d.ops"


def _fla_arguments(convolution: Convolution, runs: LocalRuns, state: Tensor | None) -> dict[str, object]:
    """`state` are the rows before runs, None for zeros."""
    return {
        "weight": convolution.weight.contiguous(),
        "bias": convolution.bias,
        "residual": None,
        "initial_state": state,
        "activation": "silu" if convolution.silu else None,
        "cu_seqlens": runs.ends,
        "chunk_indices": runs.chunk_indices,
    }


def _fla_forward(x: Tensor, convolution: Convolution, runs: LocalRuns, before: RunInputs) -> Tensor:
    arguments = _fla_arguments(convolution, runs, None)
    return fla_function(_FLA_MODULE, "causal_conv1d_fwd")(x=x.unsqueeze(0), **arguments)[0].squeeze(0)


def _fla_backward(
    dout: Tensor, x: Tensor, arrived: Tensor, convolution: Convolution, runs: LocalRuns, before: RunInputs
) -> ConvolutionGradients:
    """The gradient of `arrived` rows, the state before runs, was computed before and is left out."""
    state = None
    if len(arrived):  # (R, C, W), of which the first column is not read
        state = x.new_zeros((len(runs.lengths), x.shape[1], before.width + 1))
        state[before.run, :, before.column] = arrived
    arguments = _fla_arguments(convolution, runs, state)
    backward = fla_function(_FLA_MODULE, "causal_conv1d_bwd")
    dx, dweight, dbias, *_ = backward(x=x.unsqueeze(0), dy=dout.unsqueeze(0), dht=None, **arguments)
    return dx.squeeze(0), dweight, dbias


FLA_CONVOLUTION = ConvolutionKernel("fla", _fla_forward, _fla_backward, write_first_outputs, arrived_gradients)


def choose_convolution(x: Tensor) -> ConvolutionKernel:
    """Return fla's convolution where it can run for tensors like x, else torch's."""
    if fla_unsupported_call_reason(x.dtype, x.device):
        return TORCH_CONVOLUTION
    return FLA_CONVOLUTION
