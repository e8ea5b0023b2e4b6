"""The causal depthwise convolution of state-space layers over a sharded sequence.

Each run of rows reads the rows of its document just before it, from whichever members hold them (several, where shares
are short), and zeros before the document's start. Those rows travel in one exchange a group, their gradients back in
another.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.comm import Handle, SequenceShard
from longspan.comm.graphs import outside_graphs
from longspan.errors import LayoutError
from longspan.ssm.chains import Chains, chains_of
from longspan.ssm.halo import halo_of
from longspan.ssm.kernels.convolutions import Convolution, ConvolutionKernel, Gradients, choose_convolution
from longspan.ssm.state_pass import joined


@outside_graphs
def causal_conv(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    shard: SequenceShard,
    *,
    silu: bool = False,
    kernels: Sequence[str] = (),
) -> Tensor:
    """y_t = Σ_i weight[:, W − 1 − i] · x_{t − i} + bias inside each document: x (T, C), weight (C, W) -> (T, C).

    `silu` applies that activation to y. Half precision on a GPU runs by flash-linear-attention's kernel where it is.
    Every member of a group that has a part here makes the same call, and enters backward. `kernels` names those asked
    for (`kernels/asked.py`). Raises LayoutError for tensors that do not fit the shard or each other, and for a kernel
    that was asked for and cannot, before any communication.
    """
    if x.ndim != 2 or x.shape[0] != shard.local_rows:
        raise LayoutError(f"causal_conv got x of {tuple(x.shape)}; the shard holds {shard.local_rows} rows: (T, C)")
    if weight.ndim != 2 or weight.shape[0] != x.shape[1]:
        raise LayoutError(f"causal_conv got weight of {tuple(weight.shape)} for {x.shape[1]} channels: (C, W)")
    parameters = (weight,) if bias is None else (weight, bias)
    return _Convolved.apply(chains_of(shard), choose_convolution(x, weight, kernels), silu, x, *parameters)  # pyright: ignore[reportReturnType]


class _Convolved(torch.autograd.Function):
    """All parts of a shard; rows before runs travel first, their gradients last."""

    @staticmethod
    def forward(
        ctx: Any, chains: tuple[Chains, ...], kernel: ConvolutionKernel, silu: bool, x: Tensor, *parameters: Tensor
    ) -> Tensor:
        convolution = Convolution(parameters[0], parameters[1] if len(parameters) > 1 else None, silu)
        width = convolution.weight.shape[1] - 1
        started = [_send(x[c.part.start : c.part.stop], c, width) for c in chains]
        arrived = [x.new_empty((0, x.shape[1])) if handle is None else handle.wait() for handle in started]
        outs = [
            kernel.forward(x[c.part.start : c.part.stop], before, convolution, c.local_runs, halo_of(c, width).before)
            if len(c.lengths)
            else x[:0]  # others wait for this member's part of backward
            for c, before in zip(chains, arrived, strict=True)
        ]
        ctx.save_for_backward(x, *parameters, *arrived)
        ctx.chains, ctx.kernel, ctx.silu, ctx.parameters = chains, kernel, silu, len(parameters)
        return joined(outs, x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, *rest = ctx.saved_tensors
        parameters, arrived = rest[: ctx.parameters], rest[ctx.parameters :]
        convolution = Convolution(parameters[0], parameters[1] if len(parameters) > 1 else None, ctx.silu)
        width = convolution.weight.shape[1] - 1
        parts, started = list[Gradients](), list[Handle | None]()
        for chains, before in reversed(list(zip(ctx.chains, arrived, strict=True))):
            here = slice(chains.part.start, chains.part.stop)
            found = _backward(ctx.kernel, gradients[0][here], x[here], before, convolution, chains)
            parts.append(found)
            started.append(_send_back(found[1], chains, width))
        for chains, part, handle in zip(reversed(ctx.chains), parts, started, strict=True):
            if handle is not None:
                part[0].index_add_(0, halo_of(chains, width).rows, handle.wait())
        of_parameters = [_sum([part[2 + i] for part in parts]) for i in range(ctx.parameters)]
        return None, None, None, joined([part[0] for part in reversed(parts)], x), *of_parameters


def _backward(
    kernel: ConvolutionKernel, dout: Tensor, x: Tensor, arrived: Tensor, convolution: Convolution, chains: Chains
) -> Gradients:
    if not len(x):
        return x, arrived, None, None
    before = halo_of(chains, convolution.weight.shape[1] - 1).before
    return kernel.backward(dout, x, arrived, convolution, chains.local_runs, before)


def _sum(gradients: Sequence[Tensor | None]) -> Tensor | None:
    present = [x for x in gradients if x is not None]
    return sum(present[1:], start=present[0]) if present else None


def _send(x: Tensor, chains: Chains, width: int) -> Handle | None:
    halo = halo_of(chains, width)
    if not halo.travels:
        return None
    return chains.channel.all_to_all_rows(
        x.index_select(0, halo.rows), halo.sends, halo.receives, "rows before a run, convolution"
    )


def _send_back(gradient: Tensor, chains: Chains, width: int) -> Handle | None:
    halo = halo_of(chains, width)
    if not halo.travels:
        return None
    what = "gradients of rows before a run, convolution"
    return chains.channel.all_to_all_rows(gradient, halo.receives, halo.sends, what)
