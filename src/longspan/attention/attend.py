"""`attend`: exact attention over a sharded micro-batch, whatever the degree and the way its groups communicate.

One autograd function per call walks the parts of a shard (one per group that this slot is in) in plan order, and in
backward in reverse, which is the one order in which every rank enters its collectives. Kept for backward: q, k, v, out
and the log-sum-exp of the local rows.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from longspan.attention.all_gather import all_gather_backward, all_gather_forward
from longspan.attention.all_to_all import a2a_backward, a2a_forward
from longspan.attention.auto import Call
from longspan.attention.block import Rule
from longspan.attention.circle import Circle, Mask
from longspan.attention.kernels import Need, choose
from longspan.attention.kernels.dropout import Dropout, mixed_seed
from longspan.attention.merge import accumulation_dtype
from longspan.attention.ring import ring_backward, ring_forward
from longspan.attention.routes import Asked, Route, routes_of
from longspan.attention.validate import check_budget, check_features, check_sinks, check_tensors
from longspan.comm import SequenceShard, ShardPart, world_of

Function = TypeVar("Function", bound=Callable[..., Any])


class Pattern(NamedTuple):
    """How the members of a group share keys and values; both functions work on one part's local rows."""

    forward: Callable[[Tensor, Tensor, Tensor, Circle, Rule], tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor, Tensor]]


PATTERNS: dict[str, Pattern] = {
    "p2p": Pattern(ring_forward, ring_backward),
    "all_gather": Pattern(all_gather_forward, all_gather_backward),
    "a2a": Pattern(a2a_forward, a2a_backward),
    "a2a+p2p": Pattern(a2a_forward, a2a_backward),
}


def _outside_graphs(fn: Function) -> Function:
    """torch.compile ends its graph before this call and begins another after it."""
    return cast(Function, torch.compiler.disable(fn))


@_outside_graphs
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
    dropout_seed: int | None = None,
    cp_comm_type: str | Sequence[str] | None = None,
    hierarchical_context_parallel_sizes: Sequence[int] | None = None,
    max_gather_bytes: int | None = None,
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
    value. `softcap` c: scores become c · tanh(score / c). `scale` defaults to H ** −0.5. A row that sees no key (one
    that pads a document out) has output and gradient 0.

    `dropout` zeroes weights with this probability, by a hash of `dropout_seed`, head, document and both positions: the
    same weights at every degree and under every type. By default the seed is mixed from `torch.initial_seed()`, the
    world's step and `layer`. Pass 0.0 in evaluation.

    `cp_comm_type` (p2p, all_gather, a2a, a2a+p2p, auto) and `hierarchical_context_parallel_sizes` (a2a, p2p) win over
    the groups' own; of a list with one per layer, `layer` picks. `max_gather_bytes` bounds what all_gather holds of
    other ranks' keys, values and their gradients at a time: it then works through the heads in slices.

    `kernel` names one of the support table (`longspan.attention.KERNELS`); by default the first that can. All sums
    over blocks and ranks are taken in a fixed order, so that a call gives the same bits again wherever its kernel
    does; under `torch.use_deterministic_algorithms(True)` every kernel does.

    Raises AttentionError, before any communication, for tensors that do not fit each other or the shard, and for
    anything that could not be computed exactly.
    """
    check_tensors(q, k, v, shard)
    check_features(causal=causal, window=window, softcap=softcap, scale=scale, dropout=dropout)
    check_sinks(sinks, q)
    asked = Asked.of(cp_comm_type, hierarchical_context_parallel_sizes, layer)
    call = Call(q.shape[1], k.shape[1], q.shape[2], v.shape[2], q.element_size(), causal, window)
    routes = routes_of(shard, asked, call)
    check_budget(
        max_gather_bytes, k, v, [g for i, g in enumerate(shard.micro_batch.groups) if routes[i].kind == "all_gather"]
    )
    features = {"window": window is not None, "softcap": softcap is not None, "dropout": dropout > 0}
    need = Need(q.device, q.dtype, max(q.shape[2], v.shape[2]), frozenset(n for n, asked in features.items() if asked))
    rule = Rule(
        kernel=choose(need, kernel),
        scale=q.shape[2] ** -0.5 if scale is None else float(scale),
        softcap=softcap,
        dropout=Dropout(dropout, _seed(dropout_seed, shard, layer)) if dropout else None,
        max_gather_bytes=max_gather_bytes,
    )
    parts = tuple(_Part.of(part, routes[part.index], Mask(causal, window), shard) for part in shard.parts)
    return _Attend.apply(q, k, v, sinks, _Walk(parts, rule))  # pyright: ignore[reportReturnType]


def _seed(given: int | None, shard: SequenceShard, layer: int | None) -> int:
    if given is not None:
        return mixed_seed(given)
    return mixed_seed(torch.initial_seed(), world_of(shard.world_key).step, -1 if layer is None else layer)


class _Part(NamedTuple):
    """Local rows of one group, how they communicate, and with whom."""

    rows: slice
    pattern: Pattern
    circle: Circle

    @classmethod
    def of(cls, part: ShardPart, route: Route, mask: Mask, shard: SequenceShard) -> "_Part":
        """Circles are kept with the shard, so that layers share their geometry."""
        key = ("circle", part.index, route.inner, mask)
        if key not in shard.memo:
            shard.memo[key] = Circle(part, mask, shard.device, route.inner)
        return cls(slice(part.start, part.stop), PATTERNS[route.kind], shard.memo[key])


@dataclass(frozen=True)
class _Walk:
    """One call: its parts in plan order, and what is computed in each."""

    parts: tuple[_Part, ...]
    rule: Rule


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, walk: _Walk) -> Tensor:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        rule = replace(walk.rule, sinks=sinks)
        with _given_dtypes(q):
            found = [pattern.forward(q[rows], k[rows], v[rows], circle, rule) for rows, pattern, circle in walk.parts]
        dtype = accumulation_dtype(q.dtype)
        out = _joined([out for out, _ in found], q.new_empty((0, q.shape[1], v.shape[2]), dtype=dtype))
        lse = _joined([lse for _, lse in found], q.new_empty((0, q.shape[1]), dtype=dtype))
        out = out.to(q.dtype).contiguous()
        ctx.walk = walk
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        q, k, v, out, lse, sinks = ctx.saved_tensors
        dout = gradients[0].contiguous()
        found: list[list[Tensor]] = [[], [], []]
        for rows, pattern, circle in reversed(ctx.walk.parts):
            local = (x[rows] for x in (dout, q, k, v, out, lse))
            with _given_dtypes(q):
                parts_of_gradients = pattern.backward(*local, circle, ctx.walk.rule)
            for parts, gradient in zip(found, parts_of_gradients, strict=True):
                parts.insert(0, gradient.to(q.dtype))
        dq, dk, dv = (_joined(parts, x[:0]).contiguous() for parts, x in zip(found, (q, k, v), strict=True))
        return dq, dk, dv, None if sinks is None else _sink_gradient(dout, out, lse, sinks), None


def _given_dtypes(x: Tensor) -> torch.autocast:
    """Inside autocast, products of float32 scores would be rounded to half precision."""
    return torch.autocast(x.device.type, enabled=False)


def _joined(parts: list[Tensor], empty: Tensor) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat([empty, *parts])


def _sink_gradient(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """−Σ rows weight of the sink · (dout · out): with lse over keys and sink, softmax's gradient at value 0."""
    weight = torch.exp(sinks.to(lse.dtype) - lse)
    return -(weight * (dout.to(lse.dtype) * out.to(lse.dtype)).sum(-1)).sum(0).to(sinks.dtype)
