"""`attend`: exact attention over a sharded micro-batch, whatever the degree and the way its groups communicate.

One autograd function per call walks the parts of a shard (one per group that this slot is in) in plan order, and in
backward in reverse, which is the one order in which every rank enters its collectives. Kept for backward: q, k, v, out
and the log-sum-exp of the local rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.attention.all_gather import all_gather_backward, all_gather_forward
from longspan.attention.block import Rule
from longspan.attention.kernels import Need, choose
from longspan.attention.merge import accumulation_dtype
from longspan.attention.ring import ring_backward, ring_forward
from longspan.attention.validate import check_features, check_sinks, check_tensors
from longspan.comm import SequenceShard, ShardPart
from longspan.errors import AttentionError


class Pattern(NamedTuple):
    """How the members of a group share keys and values; both functions work on one part's local rows."""

    forward: Callable[[Tensor, Tensor, Tensor, ShardPart, Rule], tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


PATTERNS: dict[str, Pattern] = {
    "p2p": Pattern(ring_forward, ring_backward),
    "all_gather": Pattern(all_gather_forward, all_gather_backward),
}
_OF_LATER_RELEASES = ("a2a", "a2a+p2p")


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shard: SequenceShard,
    *,
    causal: bool = True,
    window: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    cp_comm_type: str | Sequence[str] | None = None,
    layer: int | None = None,
    kernel: str | None = None,
) -> Tensor:
    """Attend from this rank's rows to all rows of their documents, wherever those are.

    q (T, N, H), k (T, K, H), v (T, K, Hv) -> (T, N, Hv), for the shard's T rows; query head n uses key/value head
    n // (N / K). Every member of a group that has a part here makes the same call. Differentiable: the gradients of k
    and v include what other ranks' queries contribute; the gradient of `sinks` is *partial*, over this rank's rows.

    >>> shard = bind(plan.micro_batches[0], world)
    >>> out = attend(q, k, v, shard, window=4096, layer=3)

    `window` w: position p sees p − w + 1 … p. `sinks` (N,): one logit per query head that takes weight and gives no
    value. `softcap` c: scores become c · tanh(score / c). `scale` defaults to H ** −0.5. `cp_comm_type` wins over the
    groups' own; where there is one per layer, `layer` picks. `kernel` names one of the support table
    (`longspan.attention.KERNELS`); by default the first that can.

    Raises AttentionError, before any communication, for tensors that do not fit each other or the shard, and for
    anything that could not be computed exactly.
    """
    check_tensors(q, k, v, shard)
    check_features(causal=causal, window=window, softcap=softcap, scale=scale, dropout=dropout)
    check_sinks(sinks, q)
    kinds = _kinds(shard.parts, cp_comm_type, layer)
    features = frozenset(n for n, asked in (("window", window), ("softcap", softcap)) if asked is not None)
    need = Need(q.device, q.dtype, max(q.shape[2], v.shape[2]), features)
    rule = Rule(
        kernel=choose(need, kernel),
        scale=q.shape[2] ** -0.5 if scale is None else float(scale),
        causal=causal,
        window=window,
        softcap=softcap,
        memo=shard.memo,
    )
    return _Attend.apply(q, k, v, sinks, _Call(shard.parts, kinds, rule))  # pyright: ignore[reportReturnType]


def _kinds(parts: Sequence[ShardPart], asked: str | Sequence[str] | None, layer: int | None) -> tuple[str, ...]:
    """The communication type of each part; what was asked for is checked also where there is no part."""
    if asked is None:
        return tuple(_known(part.cp_comm_type(layer), f" of group {part.index}") for part in parts)
    if not isinstance(asked, str):
        if layer is None or not 0 <= layer < len(asked):
            raise AttentionError(f"cp_comm_type has {len(asked)} entries, one per layer; got layer={layer}")
        asked = asked[layer]
    return (_known(asked, ""),) * len(parts)


def _known(kind: str, where: str) -> str:
    if kind in PATTERNS:
        return kind
    state = "is not in this release" if kind in _OF_LATER_RELEASES else "is unknown"
    known = " or ".join(repr(name) for name in PATTERNS)
    raise AttentionError(f"cp_comm_type {kind!r}{where} {state}; use {known}")


@dataclass(frozen=True)
class _Call:
    parts: tuple[ShardPart, ...]
    kinds: tuple[str, ...]
    rule: Rule

    def walk(self) -> list[tuple[slice, ShardPart, Pattern]]:
        """Rows, part and pattern, in plan order."""
        return [
            (slice(part.start, part.stop), part, PATTERNS[kind])
            for part, kind in zip(self.parts, self.kinds, strict=True)
        ]


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: _Call) -> Tensor:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        found = [pattern.forward(q[rows], k[rows], v[rows], part, call.rule) for rows, part, pattern in call.walk()]
        dtype = accumulation_dtype(q.dtype)
        out = _joined([out for out, _ in found], q.new_empty((0, q.shape[1], v.shape[2]), dtype=dtype))
        lse = _joined([lse for _, lse in found], q.new_empty((0, q.shape[1]), dtype=dtype))
        if sinks is not None:
            out, lse = _with_sinks(out, lse, sinks)
        out = out.to(q.dtype).contiguous()
        ctx.call = call
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse, sinks = ctx.saved_tensors
        dout = gradients[0].contiguous()
        found: list[list[Tensor]] = [[], [], []]
        for rows, part, pattern in reversed(ctx.call.walk()):
            local = (x[rows] for x in (dout, q, k, v, out, lse))
            for parts, gradient in zip(found, pattern.backward(*local, part, ctx.call.rule), strict=True):
                parts.insert(0, gradient.to(q.dtype))
        dq, dk, dv = (_joined(parts, x[:0]).contiguous() for parts, x in zip(found, (q, k, v), strict=True))
        return dq, dk, dv, None if sinks is None else _sink_gradient(dout, out, lse, sinks), None


def _joined(parts: list[Tensor], empty: Tensor) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([empty, *parts])


def _with_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """A sink is one more key with value 0: it joins the log-sum-exp of each row and thins the output."""
    total = torch.logaddexp(lse, sinks.to(lse.dtype))
    return out * torch.exp(lse - total).unsqueeze(-1), total


def _sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """−Σ rows weight of the sink · (dout · out): with lse over keys and sink, softmax's gradient at value 0."""
    weight = torch.exp(sinks.to(lse.dtype) - lse)
    return -(weight * (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)).sum(0).to(sinks.dtype)
