"""What a kernel of causal depthwise convolutions over a rank's own runs is given, and what it gives."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

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

    `lacks(x, weight)` says what it would need and does not have for rows x (T, C) and weight (C, W), "" for nothing.
    `forward(x, arrived, convolution, runs, before)` gives y (T, C) from x (T, C) of at least one row and the arrived
    rows; `backward(dout, x, ...)` gives gradients, of parameters that require none perhaps None.
    """

    name: str
    lacks: Callable[[Tensor, Tensor], str]
    forward: Callable[[Tensor, Tensor, Convolution, LocalRuns, Before], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor, Convolution, LocalRuns, Before], Gradients]
