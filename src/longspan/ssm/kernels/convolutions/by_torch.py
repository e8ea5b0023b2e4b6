"""Causal depthwise convolutions in torch's own operations, on any device."""

import torch
from torch import Tensor
from torch.nn import functional as F

from longspan.ssm.kernels.convolutions.call import Before, Convolution, ConvolutionKernel, Gradients
from longspan.ssm.kernels.runs import LocalRuns


def _by_torch(x: Tensor, arrived: Tensor, convolution: Convolution, runs: LocalRuns, before: Before) -> Tensor:
    """One convolution over all runs, each behind the rows before it."""
    weight, bias, silu = convolution
    rows = torch.cat([x, arrived, x.new_zeros((1, x.shape[1]))]).index_select(0, before.source)
    y = F.conv1d(rows.t().unsqueeze(0), weight.unsqueeze(1), bias, groups=x.shape[1])
    y = y.squeeze(0).t().index_select(0, before.kept - before.width)
    return F.silu(y) if silu else y


def _torch_backward(
    dout: Tensor, x: Tensor, arrived: Tensor, convolution: Convolution, runs: LocalRuns, before: Before
) -> Gradients:
    """The convolution once more, with gradients."""
    weight, bias, silu = convolution
    with torch.enable_grad():
        leaves = [y.detach().requires_grad_(y is x or y is arrived or y.requires_grad) for y in (x, arrived, weight)]
        of_bias = None if bias is None else bias.detach().requires_grad_(bias.requires_grad)
        out = _by_torch(leaves[0], leaves[1], Convolution(leaves[2], of_bias, silu), runs, before)
    every = [y if y is not None and y.requires_grad else None for y in (*leaves, of_bias)]
    found = iter(torch.autograd.grad(out, [y for y in every if y is not None], dout))
    dx, darrived, dweight, dbias = (None if y is None else next(found) for y in every)
    assert dx is not None and darrived is not None
    return dx, darrived, dweight, dbias


TORCH_CONVOLUTION = ConvolutionKernel("torch", lambda x, weight: "", _by_torch, _torch_backward)
