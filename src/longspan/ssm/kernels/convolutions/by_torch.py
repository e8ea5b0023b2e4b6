"""Causal depthwise convolutions in torch's own operations, on any device."""

import torch
from torch import Tensor
from torch.nn import functional as F

from longspan.ssm.kernels.convolutions.call import Before, Convolution, ConvolutionKernel, FirstRows, Gradients
from longspan.ssm.kernels.runs import LocalRuns


def _by_torch(x: Tensor, convolution: Convolution, runs: LocalRuns, alone: Before) -> Tensor:
    return _convolved(x, x[:0], convolution, alone)


def _torch_backward(
    dout: Tensor, x: Tensor, arrived: Tensor, convolution: Convolution, runs: LocalRuns, before: Before
) -> Gradients:
    """The convolution once more, with gradients."""
    weight, bias, silu = convolution
    with torch.enable_grad():
        leaves = [y.detach().requires_grad_(y is x or y.requires_grad) for y in (x, weight)]
        of_bias = None if bias is None else bias.detach().requires_grad_(bias.requires_grad)
        out = _convolved(leaves[0], arrived, Convolution(leaves[1], of_bias, silu), before)
    every = [y if y is not None and y.requires_grad else None for y in (*leaves, of_bias)]
    found = iter(torch.autograd.grad(out, [y for y in every if y is not None], dout))
    dx, dweight, dbias = (None if y is None else next(found) for y in every)
    assert dx is not None
    return dx, dweight, dbias


def _write_first(y: Tensor, x: Tensor, arrived: Tensor, convolution: Convolution, first: FirstRows) -> None:
    y.index_copy_(0, first.rows, _convolved(x.index_select(0, first.rows), arrived, convolution, first.before))


def _owed(dout: Tensor, x: Tensor, arrived: Tensor, convolution: Convolution, first: FirstRows) -> Tensor:
    rows, arrived = x.index_select(0, first.rows), arrived.detach().requires_grad_()
    with torch.enable_grad():
        out = _convolved(rows, arrived, convolution, first.before)
    return torch.autograd.grad(out, arrived, dout.index_select(0, first.rows))[0]


def _convolved(x: Tensor, arrived: Tensor, convolution: Convolution, before: Before) -> Tensor:
    """One convolution over all runs, each behind the rows before it."""
    weight, bias, silu = convolution
    rows = torch.cat([x, arrived, x.new_zeros((1, x.shape[1]))]).index_select(0, before.source)
    y = F.conv1d(rows.t().unsqueeze(0), weight.unsqueeze(1), bias, groups=x.shape[1])
    y = y.squeeze(0).t().index_select(0, before.kept - before.width)
    return F.silu(y) if silu else y


TORCH_CONVOLUTION = ConvolutionKernel("torch", lambda x, weight: "", _by_torch, _torch_backward, _write_first, _owed)
