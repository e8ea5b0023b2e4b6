"""`attend`: exact attention over a sharded micro-batch, whatever the degree and the way its groups communicate.

One autograd function per call walks the parts of a shard (one per group that this slot is in) in plan order, and in
backward in reverse, which is the one order in which every rank enters its collectives. Kept for backward are q, k, v,
out and the log-sum-exp of the local rows, or, where heads were exchanged for rows, as many numbers of those exchanged.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, are_deterministic_algorithms_enabled
from torch.autograd.function import once_differentiable

from longspan.attention.all_gather import all_gather_backward, all_gather_forward
from longspan.attention.all_to_all import a2a_backward, a2a_forward
from longspan.attention.auto import Call
from longspan.attention.block import Attended, Gradients, Kept, Rule
from longspan.attention.checks import check_budget, check_capture, check_features, check_sinks, check_tensors
from longspan.attention.comm_choice import Asked, Route, routes_of
from longspan.attention.geometry.members import Circle, Mask
from longspan.attention.kernels import Need, choose
from longspan.attention.kernels.dropout import Dropout, mixed_seed
from longspan.attention.ring import ring_backward, ring_forward
from longspan.attention.saved_outputs import recalled
from longspan.attention.sums.merge import accumulation_dtype
from longspan.attention.sums.rows import as_dtype, taken
from longspan.comm import SequenceShard, ShardPart

Function = TypeVar("Function", bound=Callable[..., Any])


class Pattern(NamedTuple):
    """How the members of a group share keys and values; both functions work on one part's local rows."""

    forward: Callable[[Tensor, Tensor, Tensor, Circle, Rule], Attended]
    backward: Callable[[Tensor, Kept, Circle, Rule], Gradients]


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
    first_head: int = 0,
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
    All members enter backward, or none: where an input of one needs a gradient, one of each does (`q.requires_grad_()`
    where none would), or that member waits for the others until it times out.

    >>> shard = bind(plan.micro_batches[0], world)
    >>> out = attend(q, k, v, shard, window=4096, layer=3)

    `window` w: position p sees p − w + 1 … p; one that reaches over the longest document of the micro-batch is none.
    `sinks` (N,): one logit per query head that takes weight and gives no value. `softcap` c: scores become
    c · tanh(score / c). `scale` is any finite number, H ** −0.5 by default. A row that sees no key (one that pads a
    document out) has output and gradient 0.

    `dropout` zeroes weights with this probability, by a hash of `dropout_seed`, head, document and both positions: the
    same weights at every degree and under every type. By default the seed is mixed from the world's seed and step, as
    they were when the shard was bound, and `layer`: the same on all ranks, and again in recomputation. `first_head` is
    the index of q's first head among all of the layer's, where tensor parallelism gives each rank some. Pass 0.0 in
    evaluation, and in a CUDA graph, whose replays would drop the same weights.

    `cp_comm_type` (p2p, all_gather, a2a, a2a+p2p, auto) and `hierarchical_context_parallel_sizes` (a2a, p2p) win over
    the groups' own; of a list with one per layer, `layer` picks. `max_gather_bytes` bounds what all_gather holds of
    other ranks' keys, values and their gradients at a time: it then works through the heads in slices.

    `kernel` names one of the support table (`longspan.attention.KERNELS`); by default the first that can. All sums
    over blocks and ranks are taken in a fixed order, so that a call gives the same bits again wherever its kernel
    does; under `torch.use_deterministic_algorithms(True)` every kernel does.

    Raises AttentionError, before any communication, for tensors that do not fit each other or the shard, and for
    anything that could not be computed exactly.
    """
    asked = _Call(
        causal=causal,
        window=window,
        softcap=softcap,
        scale=scale,
        dropout=dropout,
        cp_comm_type=_listed(cp_comm_type),
        sizes=_listed(hierarchical_context_parallel_sizes),
        max_gather_bytes=max_gather_bytes,
        layer=layer,
        kernel=kernel,
    )
    walk = _remembered(q, k, v, sinks, shard, asked)
    if dropout:
        check_capture(dropout)
        seeded = Dropout(dropout, _seed(dropout_seed, shard, layer), first_head)
        walk = replace(walk, rule=replace(walk.rule, dropout=seeded))
    q = q if walk.sign == 1 else q * walk.sign
    return _Attend.apply(q, k, v, sinks, walk)  # pyright: ignore[reportReturnType]


class _Call(NamedTuple):
    """The arguments of a call but for its tensors and its seed."""

    causal: bool
    window: int | None
    softcap: float | None
    scale: float | None
    dropout: float
    cp_comm_type: str | tuple[str, ...] | None
    sizes: tuple[int, ...] | None
    max_gather_bytes: int | None
    layer: int | None
    kernel: str | None


def _listed(argument: Any) -> Any:
    """An argument that may be a list, as a value that can be a key."""
    return tuple(argument) if isinstance(argument, Iterable) and not isinstance(argument, str) else argument


def _remembered(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, shard: SequenceShard, call: _Call) -> "_Walk":
    """What `_checked` says, kept with the shard: a model asks the same in every layer, and checks take their time."""
    try:
        call = call if _by_layer(call, shard) else call._replace(layer=None)
        tensors = [None if x is None else (type(x), x.shape, x.dtype, x.device) for x in (q, k, v, sinks)]
        key = ("walk", *tensors, call, *map(type, call), are_deterministic_algorithms_enabled())  # True is no window
        walk = shard.memo.get(key)
        if walk is None:
            walk = shard.memo[key] = _checked(q, k, v, sinks, shard, call)
        return walk
    except (AttributeError, TypeError):  # no tensor, no shard, or no value that could be a key: an error says which
        return _checked(q, k, v, sinks, shard, call)


def _by_layer(call: _Call, shard: SequenceShard) -> bool:
    """Whether what the call does depends on its layer: where a type that it goes by is a list with one per layer."""
    if call.cp_comm_type is not None:
        return not isinstance(call.cp_comm_type, str)
    if "by layer" not in shard.memo:
        shard.memo["by layer"] = any(not isinstance(g.cp_comm_type, str) for g in shard.micro_batch.groups)
    return shard.memo["by layer"]


def _checked(q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, shard: SequenceShard, asked: _Call) -> "_Walk":
    check_tensors(q, k, v, shard)
    check_features(
        causal=asked.causal, window=asked.window, softcap=asked.softcap, scale=asked.scale, dropout=asked.dropout
    )
    check_sinks(sinks, q)
    mask = Mask(asked.causal, None if asked.window is None else int(asked.window)).within(shard.micro_batch.lengths)
    call = Call(q.shape[1], k.shape[1], q.shape[2], v.shape[2], q.element_size(), *mask)
    routes = routes_of(shard, Asked.of(asked.cp_comm_type, asked.sizes, asked.layer), call)
    gathering = [g for i, g in enumerate(shard.micro_batch.groups) if routes[i].kind == "all_gather"]
    check_budget(asked.max_gather_bytes, k, v, gathering)
    scale = q.shape[2] ** -0.5 if asked.scale is None else float(asked.scale)
    rule = Rule(
        kernel=choose(_need(q, v, shard, asked, mask), asked.kernel),
        scale=abs(scale) or 1.0,
        kv_heads=k.shape[1],
        softcap=None if asked.softcap is None else float(asked.softcap),
        max_gather_bytes=asked.max_gather_bytes,
    )
    parts = tuple(_Part.of(part, routes[part.index], mask, shard) for part in shard.parts)
    return _Walk(parts, rule, sign=(scale > 0) - (scale < 0))


def _need(q: Tensor, v: Tensor, shard: SequenceShard, asked: _Call, mask: Mask) -> Need:
    features = {"window": mask.window is not None, "softcap": asked.softcap is not None, "dropout": asked.dropout > 0}
    return Need(
        q.device,
        q.dtype,
        q.shape[2],
        frozenset(name for name, given in features.items() if given),
        v.shape[2],
        dense=all(len(group.documents) == 1 for group in shard.micro_batch.groups),
    )


def _seed(given: int | None, shard: SequenceShard, layer: int | None) -> int:
    if given is not None:
        return mixed_seed(given)
    return mixed_seed(*shard.seed, -1 if layer is None else layer)


class _Part(NamedTuple):
    """Local rows of one group, how they communicate, and with whom."""

    rows: slice
    pattern: Pattern
    circle: Circle

    @classmethod
    def of(cls, part: ShardPart, route: Route, mask: Mask, shard: SequenceShard) -> "_Part":
        """Circles are kept with the shard, so that layers share their geometry."""
        mask = mask.within(part.group.lengths)
        key = ("circle", part.index, route.inner, mask)
        if key not in shard.memo:
            shard.memo[key] = Circle(part, mask, shard.device, route.inner)
        return cls(slice(part.start, part.stop), PATTERNS[route.kind], shard.memo[key])


@dataclass(frozen=True)
class _Walk:
    """One call: its parts in plan order, and what is computed in each, of q times `sign`.

    Kernels take a scale above 0 alone, for they find the largest score before they scale: the sign of another is q's.
    """

    parts: tuple[_Part, ...]
    rule: Rule
    sign: int = 1


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, walk: _Walk) -> Tensor:
        q, k, v = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k, v))
        rule = walk.rule if sinks is None else replace(walk.rule, sinks=sinks)
        out, kept, sizes = recalled(lambda: _attended(q, k, v, walk, rule), (q, k, v))
        ctx.walk, ctx.sizes = walk, sizes
        ctx.shapes = [x.shape[1:] for x in (q, k, v)]
        ctx.save_for_backward(sinks, out if any(x is None for x in kept) else None, *kept)
        # A view: autograd refuses writes into it, which a checkpoint would not notice in what backward needs.
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        sinks, out, *kept = ctx.saved_tensors
        dout, walk = gradients[0].contiguous(), ctx.walk
        rule = walk.rule if sinks is None else replace(walk.rule, sinks=sinks)
        found: list[Gradients] = []
        for (rows, pattern, circle), size in zip(reversed(walk.parts), reversed(ctx.sizes), strict=True):
            own, kept = kept[len(kept) - size :], kept[: len(kept) - size]
            own = [taken(out, rows) if x is None else x for x in own]
            with _given_dtypes(dout):
                found.insert(0, pattern.backward(taken(dout, rows), own, circle, rule))
        dq, dk, dv = _joined([(part.q, part.k, part.v) for part in found], dout, ctx.shapes)
        return dq, dk, dv, None if sinks is None else _sum_of([part.sinks for part in found], sinks), None


def _attended(
    q: Tensor, k: Tensor, v: Tensor, walk: _Walk, rule: Rule
) -> tuple[Tensor, list[Tensor | None], list[int]]:
    """Output (T, N, Hv) of all parts, and what they keep for backward, so many tensors each."""
    with _given_dtypes(q):
        found = [
            pattern.forward(taken(q, rows), taken(k, rows), taken(v, rows), circle, rule)
            for rows, pattern, circle in walk.parts
        ]
    (out,) = _joined([(part.out,) for part in found], q, [(q.shape[1], v.shape[2])])
    return out, [x for part in found for x in part.kept], [len(part.kept) for part in found]


def _given_dtypes(x: Tensor) -> AbstractContextManager[object]:
    """Inside autocast, products of float32 scores would be rounded to half precision."""
    return torch.autocast(x.device.type, enabled=False) if torch.is_autocast_enabled(x.device.type) else nullcontext()


def _joined(parts: Sequence[Sequence[Tensor]], like: Tensor, shapes: Sequence[Sequence[int]]) -> list[Tensor]:
    """Of each tensor of the parts, the rows of all parts: (rows, *shape) in the dtype of `like`, contiguous."""
    if len(parts) == 1:
        return as_dtype(parts[0], like.dtype)
    none = [like.new_empty((0, *shape)) for shape in shapes]
    return [torch.cat([x.to(like.dtype) for x in rows]) for rows in zip(none, *parts, strict=True)]


def _sum_of(parts: Sequence[Tensor | None], sinks: Tensor) -> Tensor:
    total = torch.zeros_like(sinks, dtype=accumulation_dtype(sinks.dtype))
    for part in parts:
        assert part is not None
        total += part
    return total.to(sinks.dtype)
