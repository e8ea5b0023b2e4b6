"""Layers of the benches here, their flags, how they run over a sharded sequence, and how other systems run them."""

import argparse
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.models.granitemoehybrid.modeling_granitemoehybrid import GraniteMoeHybridMambaLayer
from transformers.models.qwen3_next.modeling_qwen3_next import Qwen3NextGatedDeltaNet

from longspan import Group, MicroBatch, World, bind
from longspan.comm import SequenceShard
from longspan.errors import ConfigError
from longspan.model.seams.mixer_calls import MixerOps, ShardedMixerOps, set_mixer_ops
from longspan.ssm import linear_scan

Move = Callable[[Tensor], Tensor]
SHORT = 3000  # rows of the document that errors are measured on


@dataclass(frozen=True)
class Layer:
    """A mixer as transformers has it; each design gives it functions of its own."""

    name: str
    module: nn.Module
    hidden: int

    def with_ops(self, ops: MixerOps) -> Callable[[Tensor], Tensor]:
        """The layer as a function of hidden states (1, T, hidden), with these operations across rows."""

        def run(x: Tensor) -> Tensor:
            set_mixer_ops(self.module, lambda shard, batch, count: ops)
            return self.module(x)

        return run


def flags_of(description: str | None) -> argparse.ArgumentParser:
    """The flags that the benches of these layers share."""
    flags = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--layers", default="gated delta net,mamba 2")
    flags.add_argument("--backend", default="nccl")
    flags.add_argument("--small", action="store_true", help="narrow layers, to try this on a CPU")
    flags.add_argument("--timeout", type=float, default=500.0)
    flags.add_argument("--out", type=Path)
    return flags


def layers(device: torch.device, asked: str, *, small: bool) -> dict[str, Layer]:
    """Those asked for of Qwen3-Next-80B's gated delta net and Granite 4 hybrid's (small) Mamba 2 layer.

    Raises ConfigError for another name.
    """
    delta: dict[str, Any] = {"hidden_size": 2048, "linear_num_key_heads": 16, "linear_num_value_heads": 32}
    mamba: dict[str, Any] = {"hidden_size": 4096, "mamba_n_heads": 128, "mamba_d_head": 64, "mamba_d_state": 128}
    if small:
        delta |= {"hidden_size": 64, "linear_num_key_heads": 4, "linear_num_value_heads": 8}
        delta |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
        mamba |= {"hidden_size": 32, "mamba_n_heads": 8, "mamba_d_head": 8, "mamba_d_state": 8}
    torch.manual_seed(0)
    made = {
        "gated delta net": (Qwen3NextGatedDeltaNet, CONFIG_MAPPING["qwen3_next"](**delta)),
        "mamba 2": (GraniteMoeHybridMambaLayer, CONFIG_MAPPING["granitemoehybrid"](mamba_n_groups=1, **mamba)),
    }
    if unknown := [name for name in asked.split(",") if name not in made]:
        raise ConfigError(
            f"--layers has {', '.join(map(repr, unknown))}; use {' and '.join(made)}, with a comma between"
        )
    found = {}
    for name, (kind, config) in made.items():
        if name not in asked.split(","):
            continue
        module = kind(config, layer_idx=0)
        for parameter in module.parameters():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=0.02)
        found[name] = Layer(name, module.to(device, torch.bfloat16), config.hidden_size)
    return found


def ours(layer: Layer, shard: SequenceShard) -> Callable[[Tensor], Tensor]:
    """States pass between the ranks of the shard."""
    return layer.with_ops(ShardedMixerOps(shard))


def scan_alone(layer: Layer, shard: SequenceShard) -> Callable[[Tensor], Tensor]:
    """The layer's scan without the rest of it, over what the layer gives it for random hidden states."""
    given = list[Any]()

    def keep(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, scale: float) -> Tensor:
        given.extend(x if x is None else x.detach().requires_grad_() for x in (q, k, v, g, beta))
        given.extend((shard, scale))
        return v

    with torch.no_grad():
        parameter = next(layer.module.parameters())
        x = torch.randn(1, shard.local_rows, layer.hidden, device=parameter.device, dtype=parameter.dtype)
        layer.with_ops(_OtherScan(shard, chosen=keep))(x)
    return lambda _: linear_scan(*given)


@dataclass(frozen=True)
class _OtherScan(ShardedMixerOps):
    """Our convolution over a shard, with another scan."""

    chosen: Callable[..., Tensor] = linear_scan

    def scan(self, q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, scale: float) -> Tensor:
        return self.chosen(q, k, v, g, beta, scale)


def baseline(
    layer: Layer, together: SequenceShard, whole: SequenceShard, world: World, *, by_heads: bool
) -> Callable[[Tensor], Tensor]:
    """The convolution as ours; the scan over all rows, of a part of the heads or of all, and its own rows back."""
    ranks, rank = world.home.slots, world.rank

    def scan(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, scale: float) -> Tensor:
        given = [q, k, v, g, *([] if beta is None else [beta.unsqueeze(-1)])]
        exchanged = [by_heads and x.shape[1] % ranks == 0 for x in given]
        moves = [(_to_heads, _to_rows) if heads else (_gathered, _summed) for heads in exchanged]
        moved = [_Moved.apply(x, *move) for x, move in zip(given, moves, strict=True)]
        q, k, v, g, *rest = (x.contiguous() for x in moved)  # pyright: ignore[reportOptionalMemberAccess]
        out = linear_scan(q, k, v, g, rest[0].squeeze(-1) if rest else None, whole, scale)
        if by_heads:
            return _Moved.apply(out, _to_rows, _to_heads)  # pyright: ignore[reportReturnType]
        return out.view(ranks, -1, *out.shape[1:])[rank]

    return layer.with_ops(_OtherScan(together, chosen=scan))


class _Moved(torch.autograd.Function):
    """A move of rows between ranks; gradients go the way back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, move: Move, back: Move) -> Tensor:
        ctx.back = back
        return move(x)

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, None, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return ctx.back(dx), None, None


def _gathered(x: Tensor) -> Tensor:
    """(T / n, ·, ·) of some rows to all rows."""
    out = x.new_empty((dist.get_world_size() * len(x), *x.shape[1:]))
    dist.all_gather_into_tensor(out, x.contiguous())
    return out


def _summed(dx: Tensor) -> Tensor:
    """All rows to the sums of this rank's."""
    own = dx.new_empty((len(dx) // dist.get_world_size(), *dx.shape[1:]))
    dist.reduce_scatter_tensor(own, dx.contiguous())
    return own


def _to_heads(x: Tensor) -> Tensor:
    """(T / n, H, d) of some rows to (T, H / n, d) of some heads."""
    ranks = dist.get_world_size()
    rows, heads, size = x.shape
    sent = x.view(rows, ranks, heads // ranks, size).transpose(0, 1).contiguous()
    received = torch.empty_like(sent)
    dist.all_to_all_single(received, sent)
    return received.view(ranks * rows, heads // ranks, size)


def _to_rows(x: Tensor) -> Tensor:
    """The way back."""
    ranks = dist.get_world_size()
    rows, heads, size = x.shape
    received = torch.empty_like(x)
    dist.all_to_all_single(received, x.contiguous())
    return received.view(ranks, rows // ranks, heads, size).transpose(0, 1).reshape(rows // ranks, ranks * heads, size)


def errors(layer: Layer, world: World) -> dict[str, tuple[float, float]]:
    """Relative errors of output and worst gradient beside float64 on one rank: of ours in bfloat16, of one rank's."""
    everyone = tuple(range(world.home.slots))
    together = bind(MicroBatch((Group(everyone, (0, 1), (SHORT, 700), partition="contiguous"),)), world)
    alone = bind(MicroBatch(tuple(Group((s,), (2 * s, 2 * s + 1), (SHORT, 700)) for s in everyone)), world)
    generator = torch.Generator().manual_seed(1)
    x, dout = (torch.randn(SHORT + 700, layer.hidden, generator=generator).to(world.device) for _ in range(2))
    exact = _gradients(layer, alone, x, dout, torch.float64)
    found = {}
    for name, shard in (("ours", together), ("alone", alone)):
        results = _gradients(layer, shard, x, dout, torch.bfloat16)
        sums = shard is together
        local = [shard.scatter(w) if i < 2 and sums else w for i, w in enumerate(exact)]
        if sums:
            for gradient in results[2:]:
                dist.all_reduce(gradient)
        differences = [(a.double() - b).norm() / b.norm() for a, b in zip(results, local, strict=True) if b.norm()]
        worst = world.control.largest_of([value.item() for value in differences], "errors")
        found[name] = (worst[0], max(worst[1:]))
    return found


def _gradients(layer: Layer, shard: SequenceShard, x: Tensor, dout: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """Output, and the gradients of the hidden states and of every parameter."""
    module = layer.module
    module.to(dtype)
    whole = shard.local_rows == len(x)
    leaf, weight = (y if whole else shard.scatter(y) for y in (x.bfloat16().to(dtype), dout.to(dtype)))
    leaf = leaf.requires_grad_()
    out = ours(layer, shard)(leaf.unsqueeze(0)).squeeze(0)
    parameters = list(module.parameters())
    gradients = torch.autograd.grad(out, [leaf, *parameters], weight)
    module.to(torch.bfloat16)
    return [out.detach(), *gradients]
