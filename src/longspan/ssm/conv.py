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

from longspan.comm import Handle, to_device
from longspan.comm.autograd import break_graphs_around
from longspan.comm.shard import SequenceShard, check_is_shard
from longspan.errors import LayoutError
from longspan.layout.segments import Integers, expand_runs
from longspan.ssm.chains import Chains, shard_chains
from longspan.ssm.kernels.convolutions import (
    Convolution,
    ConvolutionGradients,
    ConvolutionKernel,
    FirstRows,
    RowsBefore,
    choose_convolution,
)
from longspan.ssm.state_pass import join_part_rows


class Halo:
    """The rows before each run of a member, `width` of them where its document has as many: who sends which to whom.

    `rows` are the local rows that leave, `sends[m]` of them to member m, one member after another; `receives[m]` rows
    arrive from m. A row that this member needs and holds itself goes the same way. `before` says where arrived rows lie
    before each run; `first` are the first rows of runs, which read the arrived ones and are written again. `travels`:
    some member of the group sends a row. Every member works out the needs of all, in one order, so that no member has
    to ask.
    """

    def __init__(self, chains: Chains, width: int) -> None:
        self._runs = chains.runs
        self._group = chains.part.group
        # the first position of each run, counted from the first row of all that its document continues
        self._starts = chains.runs.start
        if self._group.parents is not None:
            self._starts = self._starts + np.asarray(self._group.bases)[chains.runs.document]
        self._width = width
        self._device = chains.device
        needs = [self._rows_to_fetch(member) for member in range(chains.degree)]
        me = chains.member
        runs = self._runs
        owners = [runs.member[run] for run, _ in needs]
        # This member sends these rows to each member.
        needs_here = [np.flatnonzero(owner == me) for owner in owners]
        self.sends: list[int] = [len(index) for index in needs_here]
        self.receives: list[int] = np.bincount(owners[me], minlength=chains.degree).tolist()
        rows = [
            runs.offset[run[index]] + position[index] - runs.start[run[index]]
            for (run, position), index in zip(needs, needs_here, strict=True)
        ]
        self.rows: Tensor = to_device(np.concatenate(rows), chains.device)
        self.travels: bool = width > 0 and bool((runs.place > 0).any())
        arrived = self._list_arrivals(owners[me], chains.local_indices)
        self.before: RowsBefore = self._lay_out_runs(chains.lengths, arrived)
        readers = np.flatnonzero((arrived >= 0).any(1))
        start = (np.cumsum(chains.lengths) - chains.lengths)[readers]
        count = np.minimum(chains.lengths[readers], width)
        read_rows = np.ascontiguousarray(arrived[readers])
        first_rows = to_device(expand_runs(start, start + count), chains.device)
        places = (to_device(x, chains.device) for x in (start, count, read_rows))
        self.first: FirstRows = FirstRows(first_rows, self._lay_out_runs(count, read_rows), *places)

    def _list_arrivals(self, owners: Integers, local_runs: Integers) -> Integers:
        """(runs, width), −1 for none. Rows arrive ordered by owner; a run near its document's start has fewer rows
        before it: these take its last columns."""
        number = np.empty(len(owners), dtype=np.int64)
        number[np.argsort(owners, kind="stable")] = np.arange(len(owners))
        arrived = np.full((len(local_runs), self._width), -1, dtype=np.int64)
        sizes = np.minimum(self._starts[local_runs], self._width)
        arrived[np.arange(self._width) >= self._width - sizes[:, None]] = number
        return arrived

    def _rows_to_fetch(self, member: int) -> tuple[Integers, Integers]:
        """One sorted search finds the run that has a row: `document · stride + position` is in the order of both."""
        runs = self._runs
        local = self._runs.member_runs(member)
        stop = self._starts[local]
        start = np.maximum(stop - self._width, 0)
        position = expand_runs(start, stop)
        document = np.repeat(runs.document[local], stop - start)
        # The rows may be in documents that the run's document continues.
        if self._group.parents is not None:
            bases = np.asarray(self._group.bases)
            parents = np.asarray(self._group.parents)
            while (is_before := position < bases[document]).any():
                document = np.where(is_before, parents[document], document)
            position = position - bases[document]
        stride = int(runs.stop.max(initial=0)) + 1
        owner_run = (
            np.searchsorted(runs.document * stride + runs.start, document * stride + position, side="right") - 1
        )
        return owner_run, position

    def _lay_out_runs(self, lengths: Integers, arrived: Integers) -> RowsBefore:
        """Sources count the local rows, then the arriving ones, then one row of zeros for what no member has. The
        columns of arriving rows are counted from 1: kernels take width + 1 columns, of which they do not read the
        first."""
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
        run, column = np.divmod(filled_cells[np.argsort(arrived.reshape(-1)[filled_cells])], max(self._width, 1))
        indices = source, np.flatnonzero(source < rows), run, column + 1
        return RowsBefore(self._width, *(to_device(x, self._device) for x in indices))


def cached_halo(chains: Chains, width: int) -> Halo:
    """Return the halo of this width of a group's chains, made at the first call and kept in them for all layers."""
    if width not in chains.halos:
        chains.halos[width] = Halo(chains, width)
    return chains.halos[width]


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
        handles = [_send_halo(x_part, part_chains, width) for x_part, part_chains in zip(rows, chains, strict=True)]
        outs = list[Tensor]()
        arrived = list[Tensor]()
        for x_part, part_chains, handle in zip(rows, chains, handles, strict=True):
            halo = cached_halo(part_chains, width)
            # Kernels take at least one row, so a part without rows stays as it is.
            y = x_part
            if len(x_part):
                y = kernel.forward(x_part, convolution, part_chains.local_runs, halo.before)
            arrived_rows = x.new_empty((0, x.shape[1])) if handle is None else handle.wait()
            if len(arrived_rows):
                kernel.write_first_outputs(y, x_part, arrived_rows, convolution, halo.first)
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
        width = weight.shape[1] - 1
        parts = list[_ConvPart]()
        for part_chains, arrived_rows in reversed(list(zip(ctx.chains, arrived, strict=True))):
            rows = slice(part_chains.part.start, part_chains.part.stop)
            parts.append(_ConvPart(gradients[0][rows], x[rows], arrived_rows, convolution, part_chains))
        handles = [_send_halo(part.arrived_gradients(ctx.kernel), part.chains, width, back=True) for part in parts]
        part_gradients = [part.gradients(ctx.kernel) for part in parts]
        for part, gradients_of_part, handle in zip(parts, part_gradients, handles, strict=True):
            if handle is not None:
                gradients_of_part[0].index_add_(0, cached_halo(part.chains, width).rows, handle.wait())
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
    def halo(self) -> Halo:
        return cached_halo(self.chains, self.convolution.weight.shape[1] - 1)

    def arrived_gradients(self, kernel: ConvolutionKernel) -> Tensor:
        """Return the gradients of the arrived rows, which go back to their owners; none where none arrived."""
        if not len(self.arrived):
            return self.arrived
        return kernel.arrived_gradients(self.dout, self.x, self.arrived, self.convolution, self.halo.first)

    def gradients(self, kernel: ConvolutionKernel) -> ConvolutionGradients:
        """Return this part's gradients of x, weight and bias. That of x is partial: rows that were sent to other
        members get the rest from them. A part without rows gives None for weight and bias.
        """
        if not len(self.x):
            return self.x, None, None  # no rows, and kernels take at least one; exchanges are entered all the same
        return kernel.backward(
            self.dout, self.x, self.arrived, self.convolution, self.chains.local_runs, self.halo.before
        )


def _sum_gradients(gradients: Sequence[Tensor | None]) -> Tensor | None:
    """None where no part has a gradient."""
    present = [x for x in gradients if x is not None]
    return sum(present[1:], start=present[0]) if present else None


def _send_halo(x: Tensor, chains: Chains, width: int, *, back: bool = False) -> Handle | None:
    """None where no member of the group sends any. With `back`, x are gradients of the rows that arrived."""
    halo = cached_halo(chains, width)
    label = "rows before a run, convolution"
    if not halo.travels:
        return None
    if back:  # x are gradients of the rows that arrived
        return chains.channel.all_to_all_rows(x, halo.receives, halo.sends, f"gradients of {label}")
    return chains.channel.all_to_all_rows(x.index_select(0, halo.rows), halo.sends, halo.receives, label)
