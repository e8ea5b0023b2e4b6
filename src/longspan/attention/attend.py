"""`attend`: exact attention over a sharded micro-batch, whatever the degree and the way its groups communicate.

One autograd function per call goes through the parts of a shard (one per group that this slot is in) in plan order, and
in backward in reverse, which is the one order in which every rank enters its collectives. Backward gets q,
k, v, out and the log-sum-exp of the local rows, or, where heads were exchanged for rows, the exchanged ones, which are
as many numbers (inside a recording, whose layers are recomputed, the local ones: `saved_outputs.py`).
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, are_deterministic_algorithms_enabled
from torch.autograd.function import once_differentiable

from longspan.attention.all_gather import all_gather_backward, all_gather_forward
from longspan.attention.all_to_all import a2a_backward, a2a_forward
from longspan.attention.arguments import Arguments, check_capture, pack_call
from longspan.attention.call import AttendCall, Dropout, Gradients, Saved, cache_of, mix_seed
from longspan.attention.members import Members
from longspan.attention.ring import ring_backward, ring_forward
from longspan.attention.rows import accumulation_dtype, cast_rows, take_rows
from longspan.attention.saved_outputs import active_recording
from longspan.comm import SequenceShard
from longspan.comm.shard import outside_graphs

Forward = Callable[[Tensor, Tensor, Tensor, Members, AttendCall], tuple[Tensor, list[Saved]]]
Backward = Callable[[Tensor, Sequence[Saved], Members, AttendCall], Gradients]

_SAVED = len(Saved._fields)
# How the members of a group share keys and values; both functions work on one part's local rows.
PATTERNS: dict[str, tuple[Forward, Backward]] = {
    "p2p": (ring_forward, ring_backward),
    "all_gather": (all_gather_forward, all_gather_backward),
    "a2a": (a2a_forward, a2a_backward),
    "a2a+p2p": (a2a_forward, a2a_backward),
}


@outside_graphs
def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shard: SequenceShard,
    *,
    causal: bool = True,
    window: int | None = None,
    chunk: int | None = None,
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

    `window` w: position p sees p − w + 1 … p; one as long as the longest document of the micro-batch hides nothing.
    `chunk` c: each c positions of a document are as a document of their own, as in Llama 4's chunked layers.
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
    arguments = Arguments(
        causal=causal,
        window=window,
        chunk=chunk,
        softcap=softcap,
        scale=scale,
        dropout=dropout,
        cp_comm_type=_hashable_argument(cp_comm_type),
        sizes=_hashable_argument(hierarchical_context_parallel_sizes),
        max_gather_bytes=max_gather_bytes,
        layer=layer,
        kernel=kernel,
    )
    call = _find_call(q, k, v, sinks, shard, arguments)
    if dropout:
        check_capture(dropout)
        call = replace(call, dropout=Dropout(dropout, _layer_seed(dropout_seed, shard, layer), first_head))
    q = q if call.sign == 1 else q * call.sign
    if not torch.is_grad_enabled() and active_recording.get() is None:  # a node of autograd would only cost the host
        q, k, v = _contiguous_heads(q, k, v)
        return _attend_parts(q, k, v, _put_sinks(call, sinks))[0]
    return _Attend.apply(q, k, v, sinks, call)  # pyright: ignore[reportReturnType]


def _hashable_argument(argument: Any) -> Any:
    """Return the argument as a part of a dictionary key: lists become tuples."""
    return tuple(argument) if isinstance(argument, Iterable) and not isinstance(argument, str) else argument


def _find_call(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, shard: SequenceShard, arguments: Arguments
) -> AttendCall:
    """Return the packed call, from the shard's cache if there: all layers make the same call, and checks take time.

    The layer's index is a part of the key only where it decides the communication type.
    """
    tensors = (q, k, v, sinks)
    if not isinstance(shard, SequenceShard) or not all(x is None or isinstance(x, Tensor) for x in tensors):
        return pack_call(q, k, v, sinks, shard, arguments)  # raises
    cache, types = cache_of(shard), arguments.cp_comm_type
    by_layer = cache.listed_by_layer if types is None else not isinstance(types, str)
    arguments = arguments if by_layer else arguments._replace(layer=None)
    shapes = [None if x is None else (type(x), x.shape, x.dtype, x.device) for x in tensors]
    # The types of arguments too: True equals 1, and only one of them may be a valid window.
    key = (*shapes, arguments, *map(type, arguments), are_deterministic_algorithms_enabled())
    try:
        call = cache.calls.get(key)
    except TypeError:  # an argument that is not hashable, which no check accepts
        return pack_call(q, k, v, sinks, shard, arguments)
    if call is None:
        call = cache.calls[key] = pack_call(q, k, v, sinks, shard, arguments)
    return call


def _layer_seed(seed: int | None, shard: SequenceShard, layer: int | None) -> int:
    """Return the seed of dropout: mixed from the caller's seed alone, else from the shard's and the layer's index."""
    return mix_seed(*shard.seed, -1 if layer is None else layer) if seed is None else mix_seed(seed)


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, call: AttendCall) -> Tensor:
        """Return the output (T, N, Hv) and save what backward needs; a recomputed layer takes both from its recording.

        None in `saved` stands for the output of a part, whose rows `out` has: `out` is saved once then. `slices` has
        for each part in how many slices of heads it ran.
        """
        q, k, v = _contiguous_heads(q, k, v)
        recording, with_sinks = active_recording.get(), _put_sinks(call, sinks)
        if recording is None:
            out, saved, slices = _attend_parts(q, k, v, with_sinks)
        else:
            save_local = not recording.keep_exchanged
            out, saved, slices = recording.output(lambda: _attend_parts(q, k, v, with_sinks, save_local), (q, k, v))
        ctx.call, ctx.slices = call, slices
        ctx.shapes = [x.shape[1:] for x in (q, k, v)]
        ctx.save_for_backward(sinks, out if any(x is None for x in saved) else None, *saved)
        # A view, for autograd refuses writes into a view that a function returns. A write into `out` would change what
        # backward reads, and in a checkpoint, where saved tensors are not checked for writes, without an error.
        return out.view_as(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of q, k, v and the sinks.

        It goes through parts of the shard from the last to the first, as every member does. What forward saved lies in
        one list: _SAVED tensors for each slice of each part; None stands for the rows of the output, which are saved
        once.
        """
        sinks, out, *saved = ctx.saved_tensors
        dout, call = gradients[0].contiguous(), _put_sinks(ctx.call, sinks)
        parts: list[Gradients] = []
        for (rows, cp_comm_type, members), slices in zip(reversed(call.parts), reversed(ctx.slices), strict=True):
            part_tensors = [take_rows(out, rows) if x is None else x for x in saved[-_SAVED * slices :]]
            del saved[-_SAVED * slices :]
            saved_slices = [Saved(*part_tensors[i : i + _SAVED]) for i in range(0, len(part_tensors), _SAVED)]
            with _disable_autocast(dout):
                parts.insert(0, PATTERNS[cp_comm_type][1](take_rows(dout, rows), saved_slices, members, call))
        dq, dk, dv = _join_rows_of_parts(
            [(part_gradients.q, part_gradients.k, part_gradients.v) for part_gradients in parts], dout, ctx.shapes
        )
        return (
            dq,
            dk,
            dv,
            None if sinks is None else _sum_sink_gradients([part_gradients.sinks for part_gradients in parts], sinks),
            None,
        )


def _contiguous_heads(*tensors: Tensor) -> list[Tensor]:
    """Return tensors (T, N, H), copied where the numbers of a head are not contiguous, as kernels want them."""
    return [x if x.stride(-1) == 1 else x.contiguous() for x in tensors]


def _put_sinks(call: AttendCall, sinks: Tensor | None) -> AttendCall:
    """Return the call with these sinks, which the shard's cache must not keep: each layer has others."""
    return call if sinks is None else replace(call, sinks=sinks)


def _attend_parts(
    q: Tensor, k: Tensor, v: Tensor, call: AttendCall, save_local: bool = False
) -> tuple[Tensor, list[Tensor | None], list[int]]:
    """Attend in all parts: return the output (T, N, Hv), what is saved for backward, and each part's number of slices.

    In what is saved None stands for the output of a part: the whole output is saved. With `save_local` the own rows' q,
    k, v and out are saved under every type, in place of what was exchanged: backward exchanges them once more.
    """
    parts = list[tuple[Tensor, Sequence[Saved]]]()
    with _disable_autocast(q):
        for rows, cp_comm_type, members in call.parts:
            part_inputs = take_rows(q, rows), take_rows(k, rows), take_rows(v, rows)
            part_out, slices = PATTERNS[cp_comm_type][0](*part_inputs, members, call)
            parts.append((part_out, [Saved(*part_inputs, part_out, x.lse) for x in slices] if save_local else slices))
    (out,) = _join_rows_of_parts([(part_out,) for part_out, _ in parts], q, [(q.shape[1], v.shape[2])])
    saved = [None if x is part_out else x for part_out, slices in parts for saved_slice in slices for x in saved_slice]
    return out, saved, [len(slices) for _, slices in parts]


def _disable_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Make a context without autocast, which would round products of float32 scores to half precision."""
    return torch.autocast(x.device.type, enabled=False) if torch.is_autocast_enabled(x.device.type) else nullcontext()


def _join_rows_of_parts(
    parts: Sequence[Sequence[Tensor]], like: Tensor, shapes: Sequence[Sequence[int]]
) -> list[Tensor]:
    """Join the rows of all parts, tensor by tensor: (rows, *shape) in the dtype of `like`, contiguous.

    A slot without a part gets tensors of no rows.
    """
    if len(parts) == 1:
        return cast_rows(parts[0], like.dtype)
    no_rows = [like.new_empty((0, *shape)) for shape in shapes]
    return [torch.cat([x.to(like.dtype) for x in rows]) for rows in zip(no_rows, *parts, strict=True)]


def _sum_sink_gradients(parts: Sequence[Tensor | None], sinks: Tensor) -> Tensor:
    """Sum the gradients of the sinks over the parts in the accumulation dtype; return the sum in the sinks' dtype."""
    total = torch.zeros_like(sinks, dtype=accumulation_dtype(sinks.dtype))
    for part_gradient in parts:
        assert part_gradient is not None
        total += part_gradient
    return total.to(sinks.dtype)
