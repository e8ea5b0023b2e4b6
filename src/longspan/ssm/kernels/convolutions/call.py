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


class FirstRows(NamedTuple):
    """The rows of runs that read rows which arrive: of each such run the first, `width` at most.

    `rows` (N,) of the local rows, `before` of them as runs of their own; `starts` (R,) the first of each run and
    `counts` (R,) how many; `arrived` (R, width) which arrived rows lie before each, −1 where none does.
    """

    rows: Tensor
    before: Before
    starts: Tensor
    counts: Tensor
    arrived: Tensor


Gradients = tuple[Tensor, Tensor | None, Tensor | None]  # of x, weight and bias


@dataclass(frozen=True)
class ConvolutionKernel:
    """A kernel by its name.

    `lacks(x, weight)` says what it would need and does not have for rows x (T, C) and weight (C, W), "" for nothing.
    `forward(x, convolution, runs, alone)` gives y (T, C) from x (T, C) of at least one row, zeros before every run;
    `write_first(y, x, arrived, convolution, first)` writes into it the first rows of runs that rows arrive for.
    `owed(dout, x, arrived, convolution, first)` gives the gradients of arrived rows,
    `backward(dout, x, arrived, convolution, runs, before)` all others, of parameters that require none perhaps None.
    """

    name: str
    lacks: Callable[[Tensor, Tensor], str]
    forward: Callable[[Tensor, Convolution, LocalRuns, Before], Tensor]
    backward: Callable[[Tensor, Tensor, Tensor, Convolution, LocalRuns, Before], Gradients]
    write_first: Callable[[Tensor, Tensor, Tensor, Convolution, FirstRows], None]
    owed: Callable[[Tensor, Tensor, Tensor, Convolution, FirstRows], Tensor]
