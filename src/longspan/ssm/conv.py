"""The causal depthwise convolution of state-space layers over a sharded sequence.

Each run of rows reads the rows of its document just before it, from whichever members hold them, and zeros before the
document's start. Those rows travel in one exchange a group, their gradients back in another. A member convolves its own
rows meanwhile, with zeros before its runs; the first rows of each run are written once these are here. Backward works
out the gradients of rows that arrived first.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.comm import to_device
from longspan.comm.autograd import break_graphs_around
from longspan.comm.row_fetch import RowFetch, part_rows_before
from longspan.comm.shard import SequenceShard, check_is_shard
from longspan.errors import LayoutError
from longspan.layout.segments import Integers, expand_runs
from longspan.ssm.chains import Chains, shard_chains
from longspan.ssm.kernels.convolutions import (
    Convolution,
    ConvolutionGradients,
    ConvolutionKernel,
    FirstRows,
    RunInputs,
    choose_convolution,
)
from longspan.ssm.state_pass import join_part_rows

_LABEL = "rows before a run, convolution"


class ConvolutionReads(NamedTuple):
    """The rows that a convolution of one width reads: `fetch` brings those before runs.

    `runs` says where arrived rows lie before each run; `first` are the first rows of runs, which read the arrived ones
    and are written again.
    """

    fetch: RowFetch
    runs: RunInputs
    first: FirstRows


def cached_reads(chains: Chains, width: int) -> ConvolutionReads:
    """Return what a convolution with `width` rows before its own reads of a group's chains; made at the first call, and
    kept in them for all layers.
    """
    if width not in chains.convolution_reads:
        fetch = RowFetch(chains.part, part_rows_before(chains.part, width), chains.device)
        arrived = fetch.before.arrived
        runs = _lay_out_runs(chains.lengths, arrived, chains.device)
        readers = np.flatnonzero((arrived >= 0).any(1))
        start = (np.cumsum(chains.lengths) - chains.lengths)[readers]
        count = np.minimum(chains.lengths[readers], width)
        read_rows = np.ascontiguousarray(arrived[readers])
        first_rows = to_device(expand_runs(start, start + count), chains.device)
        places = (to_device(x, chains.device) for x in (start, count, read_rows))
        first = FirstRows(first_rows, _lay_out_runs(count, read_rows, chains.device), *places)
        chains.convolution_reads[width] = ConvolutionReads(fetch, runs, first)
    return chains.convolution_reads[width]


def _lay_out_runs(lengths: Integers, arrived: Integers, device: torch.device) -> RunInputs:
    """Sources count the local rows, then the arriving ones, then one row of zeros for what no member has. The columns
    of arriving rows are counted from 1: kernels take width + 1 columns, of which they do not read the first."""
    width = arrived.shape[1]
    rows = int(lengths.sum())
    ends = np.cumsum(lengths)
    count = int((arrived >= 0).sum())
    source_before = np.where(arrived >= 0, rows + arrived, rows + count)
    pieces = [
        x for i, end in enumerate(ends.tolist()) for x in (source_before[i], np.arange(end - lengths[i], end))
    ]
    source = np.concatenate([np.zeros(0, dtype=np.int64), *pieces])
    # Each arriving row stands once in the table.
    filled_cells = np.flatnonzero(arrived >= 0)
    run, column = np.divmod(filled_cells[np.argsort(arrived.reshape(-1)[filled_cells])], max(width, 1))
    indices = source, np.flatnonzero(source < rows), run, column + 1
    return RunInputs(width, *(to_device(x, device) for x in indices))


@break_graphs_around
def causal_conv(
    x: Tensor, weight: Tensor, bias: Tensor | None, shard: SequenceShard, *, silu: bool = False
) -> Tensor:
    """Compute y_t = Σ_i weight[:, W − 1 − i] · x_{t − i} + bias in each document: x (T, C), weight (C, W) -> (T, C).

    `silu` applies that activation to y. Half precision on a GPU uses flash-linear-attention's kernel if installed.
    Every member of a group that has a part here makes the same call, and enters backward. Raises LayoutError for
    tensors that do not fit the shard or each other, before any communication.
    """
    parameters = (weight,) if bias is None else (weight, bias)
    check_is_shard("causal_conv", shard)
    if x.ndim != 2 or x.shape[0] != shard.local_rows:
        raise LayoutError(f"causal_conv got x of {tuple(x.shape)}; the shard holds {shard.local_rows} rows: (T, C)")
    channels = x.shape[1]
    if weight.ndim != 2 or weight.shape[0] != channels or not weight.shape[1]:
        raise LayoutError(f"causal_conv got weight of {tuple(weight.shape)} for {channels} channels: (C, W)")
    if bias is not None and tuple(bias.shape) != (channels,):
        raise LayoutError(f"causal_conv got bias of {tuple(bias.shape)} for {channels} channels: (C,)")
    if len({y.device for y in (x, *parameters)}) > 1:
        devices = ", ".join(str(y.device) for y in (x, *parameters))
        raise LayoutError(f"causal_conv got x, weight and bias on {devices}; put them on one device")
    kernel = choose_convolution(x)
    if kernel.name == "torch" and len({y.dtype for y in (x, *parameters)}) > 1:
        dtypes = ", ".join(str(y.dtype).removeprefix("torch.") for y in (x, *parameters))
        raise LayoutError(f"causal_conv got x, weight and bias of {dtypes}; torch's convolution needs one dtype")
    return _CausalConv.apply(shard_chains(shard), kernel, silu, x, weight, bias)  # pyright: ignore[reportReturnType]


class _CausalConv(torch.autograd.Function):
    """The convolution of all parts of a shard: rows before runs, and their gradients, travel while own rows are
    convolved.
    """

    @staticmethod
    def forward(
        ctx: Any,
        chains: tuple[Chains, ...],
        kernel: ConvolutionKernel,
        silu: bool,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
    ) -> Tensor:
        convolution = Convolution(weight, bias, silu)
        width = weight.shape[1] - 1
        rows = [x[part_chains.part.start : part_chains.part.stop] for part_chains in chains]
        reads = [cached_reads(part_chains, width) for part_chains in chains]
        handles = [part_reads.fetch.send(x_part, _LABEL) for x_part, part_reads in zip(rows, reads, strict=True)]
        outs = list[Tensor]()
        arrived = list[Tensor]()
        for x_part, part_chains, part_reads, handle in zip(rows, chains, reads, handles, strict=True):
            # Kernels take at least one row, so a part without rows stays as it is.
            y = x_part
            if len(x_part):
                y = kernel.forward(x_part, convolution, part_chains.local_runs, part_reads.runs)
            arrived_rows = x.new_empty((0, x.shape[1])) if handle is None else handle.wait()
            if len(arrived_rows):
                kernel.write_first_outputs(y, x_part, arrived_rows, convolution, part_reads.first)
            outs.append(y)
            arrived.append(arrived_rows)
        ctx.save_for_backward(x, weight, bias, *arrived)
        ctx.chains = chains
        ctx.kernel = kernel
        ctx.silu = silu
        return join_part_rows(outs, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """The gradients of rows that arrived for the forward pass leave first, while the rest is computed; those that
        arrive here are added to the rows that were sent. Parts go in reverse, as in every backward pass: all members
        meet in one order.
        """
        x, weight, bias, *arrived = ctx.saved_tensors
        convolution = Convolution(weight, bias, ctx.silu)
        parts = list[_ConvPart]()
        for part_chains, arrived_rows in reversed(list(zip(ctx.chains, arrived, strict=True))):
            rows = slice(part_chains.part.start, part_chains.part.stop)
            parts.append(_ConvPart(gradients[0][rows], x[rows], arrived_rows, convolution, part_chains))
        handles = [part.reads.fetch.send_back(part.arrived_gradients(ctx.kernel), _LABEL) for part in parts]
        part_gradients = [part.gradients(ctx.kernel) for part in parts]
        for part, gradients_of_part, handle in zip(parts, part_gradients, handles, strict=True):
            if handle is not None:
                gradients_of_part[0].index_add_(0, part.reads.fetch.rows, handle.wait())
        dxs, dweights, dbiases = zip(*part_gradients, strict=True) if part_gradients else ((), (), ())
        dx = join_part_rows(dxs[::-1], x)
        return None, None, None, dx, _sum_gradients(dweights), _sum_gradients(dbiases)


class _ConvPart(NamedTuple):
    """The backward pass over one part of a shard: x (T, C), arrived rows, and the output's gradient `dout` (T, C)."""

    dout: Tensor
    x: Tensor
    arrived: Tensor
    convolution: Convolution
    chains: Chains

    @property
    def reads(self) -> ConvolutionReads:
        return cached_reads(self.chains, self.convolution.weight.shape[1] - 1)

    def arrived_gradients(self, kernel: ConvolutionKernel) -> Tensor:
        """Return the gradients of the arrived rows, which go back to their owners; none where none arrived."""
        if not len(self.arrived):
            return self.arrived
        return kernel.arrived_gradients(self.dout, self.x, self.arrived, self.convolution, self.reads.first)

    def gradients(self, kernel: ConvolutionKernel) -> ConvolutionGradients:
        """Return this part's gradients of x, weight and bias. That of x is partial: rows that were sent to other
        members get the rest from them. A part without rows gives None for weight and bias.
        """
        if not len(self.x):
            return self.x, None, None  # no rows, and kernels take at least one; exchanges are entered all the same
        return kernel.backward(
            self.dout, self.x, self.arrived, self.convolution, self.chains.local_runs, self.reads.runs
        )


def _sum_gradients(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """None where no part has a gradient."""
    present = [x for x in gradients if x is not None]
    return sum(present[1:], start=present[0]) if present else None
