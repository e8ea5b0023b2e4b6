"""The causal depthwise convolution of state-space layers over a sharded sequence.

Each run of rows reads the rows of its document just before it, from whichever members hold them (several, where shares
are short), and zeros before the document's start. Those rows travel in one exchange a group, their gradients back in
another.
"""

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from longspan.comm import Handle, SequenceShard
from longspan.comm.graphs import outside_graphs
from longspan.errors import LayoutError
from longspan.ssm.chains import Chains, chains_of
from longspan.ssm.kernels import fla


@outside_graphs
def causal_conv(x: Tensor, weight: Tensor, bias: Tensor | None, shard: SequenceShard, *, silu: bool = False) -> Tensor:
    """y_t = Σ_i weight[:, W − 1 − i] · x_{t − i} + bias inside each document: x (T, C), weight (C, W) -> (T, C).

    `silu` applies that activation to y. Half precision on a GPU runs by flash-linear-attention's kernel where it is.
    Every member of a group that has a part here makes the same call, and enters backward. Raises LayoutError for
    tensors that do not fit the shard or each other, before any communication.
    """
    if x.ndim != 2 or x.shape[0] != shard.local_rows:
        raise LayoutError(f"causal_conv got x of {tuple(x.shape)}; the shard holds {shard.local_rows} rows: (T, C)")
    if weight.ndim != 2 or weight.shape[0] != x.shape[1]:
        raise LayoutError(f"causal_conv got weight of {tuple(weight.shape)} for {x.shape[1]} channels: (C, W)")
    width = weight.shape[1] - 1
    chains = chains_of(shard)
    arrived = list(_Exchange.apply(x, chains, width))
    parts = []
    for chain, before in zip(chains, arrived, strict=True):
        own = x[chain.part.start : chain.part.stop]
        of_part = _by_fla if len(own) and not fla.lacks(x.dtype, x.device) else _by_torch
        parts.append(of_part(own, before, (weight, bias), chain, silu))
    return torch.cat(parts) if parts else x


Parameters = tuple[Tensor, Tensor | None]  # weight (C, W), bias (C,)


def _by_torch(x: Tensor, before: Tensor, parameters: Parameters, chains: Chains, silu: bool) -> Tensor:
    """One convolution over all runs, each behind the rows before it."""
    weight, bias = parameters
    width = weight.shape[1] - 1
    halo, rows = chains.halo(width), torch.cat([x, before, x.new_zeros((1, x.shape[1]))])
    if not len(x):
        return rows[:0]  # others wait for this member's part of backward
    laid_out = rows.index_select(0, halo.source)
    y = F.conv1d(laid_out.t().unsqueeze(0), weight.unsqueeze(1), bias, groups=x.shape[1])
    y = y.squeeze(0).t().index_select(0, halo.kept - width)
    return F.silu(y) if silu else y


def _by_fla(x: Tensor, before: Tensor, parameters: Parameters, chains: Chains, silu: bool) -> Tensor:
    """The rows before each run are its state, of which the kernel reads all but the first column."""
    weight, bias = parameters
    halo, runs = chains.halo(weight.shape[1] - 1), chains.local_runs
    edge = torch.cat([before, x.new_zeros((1, x.shape[1]))]).index_select(0, halo.before - len(x))  # all of it arrived
    state = F.pad(edge.view(len(runs.lengths), -1, x.shape[1]).transpose(1, 2), (1, 0)).contiguous()
    y, _ = fla.function("modules.causal_conv1d.ops", "causal_conv1d")(
        x.unsqueeze(0),
        weight,
        bias,
        initial_state=state,
        activation="silu" if silu else None,
        cu_seqlens=runs.ends,
        chunk_indices=runs.chunk_indices,
    )
    return y.squeeze(0)


class _Exchange(torch.autograd.Function):
    """For each part of a shard, the rows that its runs need of those before them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, chains: tuple[Chains, ...], width: int) -> tuple[Tensor, ...]:
        ctx.chains, ctx.width, ctx.shape = chains, width, x.shape
        started = [_send(x[c.part.start : c.part.stop], c, width) for c in chains]
        return tuple(x.new_empty((0, x.shape[1])) if handle is None else handle.wait() for handle in started)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        total = gradients[0].new_zeros(ctx.shape)
        pairs = list(zip(ctx.chains, gradients, strict=True))
        started = [(c, _send_back(gradient.contiguous(), c, ctx.width)) for c, gradient in reversed(pairs)]
        for chains, handle in started:
            if handle is not None:
                rows = chains.halo(ctx.width).rows + chains.part.start
                total.index_add_(0, rows, handle.wait())
        return total, None, None


def _send(x: Tensor, chains: Chains, width: int) -> Handle | None:
    halo = chains.halo(width)
    if not halo.travels or not width:
        return None
    return chains.channel.all_to_all_rows(
        x.index_select(0, halo.rows), halo.sends, halo.receives, "rows before a run, convolution"
    )


def _send_back(gradient: Tensor, chains: Chains, width: int) -> Handle | None:
    halo = chains.halo(width)
    if not halo.travels or not width:
        return None
    what = "gradients of rows before a run, convolution"
    return chains.channel.all_to_all_rows(gradient, halo.receives, halo.sends, what)
