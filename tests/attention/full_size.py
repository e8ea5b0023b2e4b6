"""Configurations at the size of models: two documents of 4096 rows, in half precision, against dense float32.

Those of TransformerEngine's tests of attention with context parallelism (`tests/pytorch/attention/
test_attention_with_cp.py`, commit d0067d0) whose masks are offered here; its window (w, 0) is ours of w + 1.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from longspan import Group, Layout, MicroBatch, World, attend, bind
from longspan.attention import KERNELS, AttendCall, Mask
from longspan.comm import SequenceShard
from longspan.testing import backend

TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")
NAMES = ("out", "dq", "dk", "dv", "dsinks")
AT_ONCE = 1 << 28  # bytes of float32 scores of the dense reference


@dataclass(frozen=True)
class Configuration:
    """Heads and mask; `sinks`: "zero" (off by one) or "learnt". Two documents of `rows`."""

    heads: int
    kv_heads: int
    size: int
    v_size: int
    causal: bool = True
    window: int | None = None
    sinks: str = ""
    rows: int = 4096


CONFIGURATIONS = {
    "flash 1_0": Configuration(12, 12, 128, 128),
    "flash 1_1": Configuration(12, 12, 128, 128, causal=False),
    "flash 1_2": Configuration(12, 12, 128, 128, window=513),
    "flash 2_0": Configuration(32, 4, 128, 128),
    "flash 2_1": Configuration(12, 2, 128, 128, causal=False),
    "flash 2_2": Configuration(32, 32, 128, 128, window=129),
    "flash 3_0": Configuration(128, 128, 192, 128),
    "flash 3_1": Configuration(12, 12, 192, 128, causal=False),
    "flash 3_2": Configuration(12, 12, 192, 128, window=513),
    "fused 2_6": Configuration(12, 2, 128, 128, window=513),
    "fused 3_0": Configuration(12, 12, 128, 64),
    "fused 4_0": Configuration(64, 8, 64, 64),
    "fused 4_1": Configuration(64, 8, 64, 64, sinks="zero"),
    "fused 4_2": Configuration(64, 8, 64, 64, sinks="learnt"),
    "fused 4_3": Configuration(64, 64, 64, 64, window=129, sinks="learnt"),
    "fused 5_0": Configuration(16, 16, 256, 256, rows=1024),
    "fused 5_1": Configuration(16, 16, 256, 256, window=129, rows=1024),
}


@dataclass(frozen=True)
class Measured:
    """Relative errors of out, dq, dk, dv (and dsinks), and those of the same kernel on whole documents on one rank."""

    name: str
    lengths: tuple[int, ...]
    cp_comm_type: str
    kernel: str
    errors: tuple[float, ...]
    alone: tuple[float, ...]

    @property
    def good(self) -> bool:
        """Whether each error is at most twice that of one rank; NaN is not."""
        return all(error <= 2 * one for error, one in zip(self.errors, self.alone, strict=True))


def lengths_of(configuration: Configuration) -> list[tuple[int, ...]]:
    """Two whole documents, and two that are shorter and unequal, as packed ones are."""
    rows = configuration.rows
    return [(rows, rows), (rows * 2 // 3 + 1, rows // 4 + 3)]


def measure(
    rank: int,
    slots: int,
    names: tuple[str, ...],
    dtype: str = "bfloat16",
    rows: int = 0,
    kernels: tuple[str, ...] = (),
    keep: Callable[[list[Measured]], None] | None = None,
) -> list[Measured]:
    """Every configuration with every type and every kernel (or those named) that can; the same on every rank.

    The first rank gives `keep` what it has so far.
    """
    torch.backends.cuda.matmul.allow_tf32 = False
    with World(Layout(ranks=slots), backend=backend(), timeout=300) as world:
        measured: list[Measured] = []
        for name in names:
            configuration = CONFIGURATIONS[name]
            configuration = replace(configuration, rows=rows) if rows else configuration
            for lengths in lengths_of(configuration):
                measured += _compare(name, configuration, lengths, getattr(torch, dtype), world, kernels)
                if keep is not None and rank == 0:
                    keep(measured)
        return measured


def _compare(
    name: str,
    configuration: Configuration,
    lengths: tuple[int, ...],
    dtype: torch.dtype,
    world: World,
    kernels: tuple[str, ...],
) -> Iterator[Measured]:
    tensors = _tensors(configuration, sum(lengths), dtype, world.device)
    expected = dense(configuration, lengths, tensors)
    slots = world.home.slots
    sizes = (2, slots // 2) if slots % 2 == 0 else (slots, 1)
    everyone = bind(_batch(tuple(range(slots)), lengths, sizes), world)
    one = SequenceShard(_batch((world.slot,), lengths, None), world.slot, world.key, world.device)
    c = configuration
    call = AttendCall(c.heads, c.kv_heads, c.size, c.v_size, dtype, world.device, Mask(window=c.window))
    for kernel in (k.name for k in KERNELS if not k.lack_for(call) and (not kernels or k.name in kernels)):
        alone = _errors(_run(configuration, tensors, one, "p2p", kernel), expected, one, None)
        for kind in TYPES:
            if kind == "a2a" and configuration.heads % slots:
                continue
            errors = _errors(_run(configuration, tensors, everyone, kind, kernel), expected, everyone, world)
            yield Measured(name, lengths, kind, kernel, errors, alone)


def _batch(slots: tuple[int, ...], lengths: tuple[int, ...], sizes: tuple[int, int] | None) -> MicroBatch:
    ids = tuple(range(len(lengths)))
    return MicroBatch((Group(slots, ids, lengths, hierarchical_context_parallel_sizes=sizes),))


def _tensors(configuration: Configuration, rows: int, dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    """q, k, v, dout in [−1, 1] and sinks in float32, the same on every rank."""
    c, generator = configuration, torch.Generator().manual_seed(rows)
    shapes = ((c.heads, c.size), (c.kv_heads, c.size), (c.kv_heads, c.v_size), (c.heads, c.v_size))
    made = [torch.randn(rows, *shape, generator=generator).clamp_(-1, 1).to(device, dtype) for shape in shapes]
    sinks = torch.randn(c.heads, generator=generator) if c.sinks == "learnt" else torch.zeros(c.heads)
    return [*made, sinks.to(device)]


def _run(c: Configuration, tensors: list[Tensor], shard: SequenceShard, kind: str, kernel: str) -> list[Tensor]:
    """out, dq, dk, dv of the rows here, and this rank's part of dsinks where there are sinks."""
    *qkv, dout, sinks = tensors
    leaves = [shard.scatter(x).requires_grad_() for x in qkv]
    sink_leaf = sinks.clone().requires_grad_() if c.sinks else None
    options: dict[str, Any] = {"causal": c.causal, "window": c.window, "sinks": sink_leaf, "kernel": kernel}
    out = attend(*leaves, shard, cp_comm_type=kind, **options)
    out.backward(shard.scatter(dout))
    results = [out.detach(), *(x.grad for x in leaves)]
    return results if sink_leaf is None else [*results, sink_leaf.grad]  # pyright: ignore[reportReturnType]


def _errors(
    results: list[Tensor], expected: list[Tensor], shard: SequenceShard, world: World | None
) -> tuple[float, ...]:
    """Relative 2-norms over the rows of all ranks; of this rank alone without a world."""
    squares = [
        (x - shard.scatter(w)).double().square().sum().item() for x, w in zip(results[:4], expected, strict=False)
    ]
    sums = [*squares, *(results[4].double().tolist() if len(results) > 4 else [])]
    sums = world.control.sum_over_slots(sums) if world is not None else sums
    errors = [s**0.5 / w.double().norm().item() for s, w in zip(sums[:4], expected, strict=False)]
    if len(results) > 4:
        off = torch.tensor(sums[4:], dtype=torch.float64) - expected[4].double().cpu()
        errors.append((off.norm() / expected[4].double().cpu().norm()).item())
    return tuple(errors)


def dense(c: Configuration, lengths: tuple[int, ...], tensors: list[Tensor]) -> list[Tensor]:
    """out, dq, dk, dv and dsinks in float32, document by document and a few key/value heads at a time."""
    *qkv, dout, sinks = tensors
    totals = [torch.zeros(x.shape, device=x.device) for x in (dout, *qkv, sinks)]
    group, start = c.heads // c.kv_heads, 0
    for length in lengths:
        rows, at_once = slice(start, start + length), max(1, AT_ONCE // (4 * group * length * length))
        start += length
        for first in range(0, c.kv_heads, at_once):
            kv = slice(first, min(first + at_once, c.kv_heads))
            q = slice(kv.start * group, kv.stop * group)
            inputs = (qkv[0][rows, q], qkv[1][rows, kv], qkv[2][rows, kv], sinks[q])
            leaves = [x.float().detach().requires_grad_() for x in inputs]
            out = _dense_heads(c, *leaves)
            out.backward(dout[rows, q].float())
            totals[0][rows, q], totals[1][rows, q] = out.detach(), leaves[0].grad  # pyright: ignore
            totals[2][rows, kv], totals[3][rows, kv] = leaves[1].grad, leaves[2].grad  # pyright: ignore
            if c.sinks:
                totals[4][q] += leaves[3].grad  # pyright: ignore
    return totals


def _dense_heads(c: Configuration, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor) -> Tensor:
    """q (L, n, H), k (L, m, H), v (L, m, Hv) -> (L, n, Hv) of one document."""
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qnh,knh->nqk", q, k) * q.shape[2] ** -0.5
    if c.causal:
        seen = torch.ones(len(q), len(q), dtype=torch.bool, device=q.device).tril()
        seen = seen if c.window is None else seen.triu(1 - c.window)
        scores = scores.masked_fill(~seen, -torch.inf)
    if c.sinks:
        scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(q), 1)], -1)
    return torch.einsum("nqk,knh->qnh", scores.softmax(-1)[..., : len(k)], v)
