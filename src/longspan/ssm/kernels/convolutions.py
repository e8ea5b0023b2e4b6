"""Kernels of causal depthwise convolutions over a rank's own runs, and their gradients."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn import functional as F

from longspan.ssm.kernels import fla
from longspan.ssm.kernels.runs import LocalRuns


class Before(NamedTuple):
    """Where the rows before runs lie; see `Halo`.

    `source` (T + runs · width,) for each run the rows before it, then its own, as rows of [local rows | arrived rows |
    one zero row]; `kept` (T,) the places of the local rows in it; `run`, `column` (arrived,): the run before which each
    arrived row lies, and its column of width + 1, of which the first stays empty.
    """

    width: int
    source: Tensor
    kept: Tensor
    run: Tensor
    column: Tensor


class Convolution(NamedTuple):
    """weight (C, W), bias (C,) or None, and whether SiLU follows."""

    weight: Tensor
    bias: Tensor | None
    silu: bool


Gradients = tuple[Tensor, Tensor, Tensor | None, Tensor | None]  # of x, arrived rows, weight and bias


@dataclass(frozen=True)
class ConvolutionKernel:
    """A kernel by its name.

    `forward(x, arrived, convolution, runs, before)` gives y (T, C) from x (T, C) of at least one row and the arrived
    rows; `backward(dout, x, ...)` gives gradients, of parameters that require none perhaps None.
    """

    name: str
    forward: Callable[[Tensor, Tensor, Convolution, LocalRuns, Before], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor, Convolution, LocalRuns, Before], Gradients]


def choose_convolution(x: Tensor) -> ConvolutionKernel:
    """The kernel for rows like these, (T, C)."""
    return TORCH_CONVOLUTION if fla.lacks(x.dtype, x.device) else _FLA


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


def _edge(x: Tensor, arrived: Tensor, runs: LocalRuns, before: Before) -> Tensor | None:
    """The rows before each run as its state (R, C, W), of which the kernel reads all but the first column."""
    if not len(arrived):
        return None
    state = x.new_zeros((len(runs.lengths), x.shape[1], before.width + 1))
    state[before.run, :, before.column] = arrived
    return state


def _given(convolution: Convolution, runs: LocalRuns, state: Tensor | None) -> dict[str, object]:
    return {
        "weight": convolution.weight.contiguous(),
        "bias": convolution.bias,
        "residual": None,
        "initial_state": state,
        "activation": "silu" if convolution.silu else None,
        "cu_seqlens": runs.ends,
        "chunk_indices": runs.chunk_indices,
    }


_MODULE = "modules.causal_conv1d.ops"


def _by_fla(x: Tensor, arrived: Tensor, convolution: Convolution, runs: LocalRuns, before: Before) -> Tensor:
    given = _given(convolution, runs, _edge(x, arrived, runs, before))
    return fla.function(_MODULE, "causal_conv1d_fwd")(x=x.unsqueeze(0), **given)[0].squeeze(0)


def _fla_backward(
    dout: Tensor, x: Tensor, arrived: Tensor, convolution: Convolution, runs: LocalRuns, before: Before
) -> Gradients:
    given = _given(convolution, runs, _edge(x, arrived, runs, before))
    backward = fla.function(_MODULE, "causal_conv1d_bwd")
    dx, dweight, dbias, _, dstate = backward(x=x.unsqueeze(0), dy=dout.unsqueeze(0), dht=None, **given)
    darrived = arrived if dstate is None else dstate[before.run, :, before.column]
    return dx.squeeze(0), darrived, dweight, dbias


TORCH_CONVOLUTION = ConvolutionKernel("torch", _by_torch, _torch_backward)
_FLA = ConvolutionKernel("fla", _by_fla, _fla_backward)
