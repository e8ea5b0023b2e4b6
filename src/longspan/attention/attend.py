"""`attend`: exact attention over a sharded micro-batch, whatever the degree and the way its groups communicate.

One autograd function per call goes through the parts of a shard (one per group that this slot is in) in plan order, and
in backward in reverse: the one order in which every rank enters its collectives. Backward gets q, k, v, out and the
log-sum-exp of the local rows, or, where heads were exchanged for rows, the exchanged ones, which are as many numbers.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import cache, partial
from numbers import Integral, Real
from typing import Any, Literal, NamedTuple, cast, get_args, overload

import torch
from torch import Tensor, are_deterministic_algorithms_enabled
from torch.autograd.function import once_differentiable
from torch.distributed.tensor import DTensor

from longspan.attention.all_gather import all_gather_backward, all_gather_forward
from longspan.attention.all_to_all import a2a_backward, a2a_forward
from longspan.attention.call import AttendCall, CallPart, Gradients, Saved, cache_of, dtype_name
from longspan.attention.dropout import Dropout, mix_seed
from longspan.attention.kernels import choose_kernel
from longspan.attention.masks import Mask, SpanMask
from longspan.attention.members import Members
from longspan.attention.ring import ring_backward, ring_forward
from longspan.attention.rows import accumulation_dtype, cast_rows, contiguous_heads, deltas, take_rows
from longspan.attention.saved_outputs import active_recording
from longspan.comm import SequenceShard, ShardPart, world_of
from longspan.comm.autograd import break_graphs_around
from longspan.comm.cuda_graphs import Replay, Run
from longspan.errors import AttentionError, import_object
from longspan.plan.check import COMM_TYPES
from longspan.plan.messages import REPLAYED_NUMBERS

REPLAYED_KERNELS = ("fa4", "torch_flash")
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Arguments(NamedTuple):
    """The arguments of `attend` without its tensors and its seed, unchecked; lists are tuples.

    `sizes` is the argument `hierarchical_context_parallel_sizes`.
    """

    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    scale: float | None = None
    dropout: float = 0.0
    cp_comm_type: str | tuple[str, ...] | None = None
    sizes: Any = None
    layer: int | None = None
    kernel: str | None = None
    latents: bool = False
    with_lse: bool = False
    block_size: int = 1
    spans: SpanMask = "later"

    def sees_spans(self, shard: SequenceShard) -> bool:
        """Return whether rows see more by the shard's spans than by the mask."""
        return self.causal and self.spans != "none" and shard.has_spans


def check_tensors(q: Tensor, k: Tensor, v: Tensor, shard: SequenceShard, *, latents: bool) -> None:
    """Raise AttentionError unless q (T, N, H), k (T, K, H), v (T, K, Hv) fit each other and the shard.

    Rows must be those of the shard, on its device, and K must divide N; v may have another head size than q and k.
    """
    if not isinstance(shard, SequenceShard):
        raise AttentionError(f"shard is a {type(shard).__name__}; pass what bind(micro_batch, world) returns")
    tensors = {"q": q, "k": k, "v": v}
    for name, x in tensors.items():
        if not isinstance(x, Tensor) or x.ndim != 3:
            form = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise AttentionError(f"{name} has {form}; attend takes (rows, heads, head size), without a batch dim")
        _refuse_dtensor(name, x)
    dtypes = {name: dtype_name(x.dtype) for name, x in tensors.items()}
    devices = {name: str(x.device) for name, x in tensors.items()}
    for attribute, values, verb in (("dtype", dtypes, "cast"), ("device", devices, "move")):
        if len({*values.values()}) > 1:
            got = ", ".join(f"{name} {value}" for name, value in values.items())
            raise AttentionError(f"q, k and v need one {attribute}, got {got}; {verb} them before attend")
    if q.dtype not in _DTYPES:
        raise AttentionError(f"attend takes float16, bfloat16, float32 or float64 tensors, got {dtypes['q']}")
    if q.device != shard.device:
        raise AttentionError(f"q, k and v are on {q.device}, the shard is bound to {shard.device}; move them there")
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
    rows = {len(x) for x in tensors.values()}
    if rows != {shard.local_rows}:
        got = " and ".join(str(n) for n in sorted(rows))
        raise AttentionError(f"got {got} rows, the shard holds {shard.local_rows}; {shapes}: pass this rank's rows")
    if latents and (k.shape[1] != 1 or v.shape[1] != 1 or q.shape[2] != k.shape[2] + v.shape[2]):
        raise AttentionError(f"{shapes}: latents k and v need one head, and q the head sizes of both together")
    if k.shape[1] != v.shape[1] or (not latents and k.shape[2] != q.shape[2]):
        raise AttentionError(f"{shapes}: k and v need equal heads, q and k equal head sizes")
    heads, kv_heads = q.shape[1], k.shape[1]
    if not kv_heads or heads % kv_heads or not heads or not q.shape[2] or not v.shape[2]:
        raise AttentionError(
            f"{shapes}: {kv_heads} key/value heads do not divide {heads} query heads, or a size is 0"
        )


def _refuse_dtensor(name: str, x: Tensor) -> None:
    if isinstance(x, DTensor):
        placements = ", ".join(map(str, x.placements))
        raise AttentionError(f"{name} is a DTensor ({placements}); pass this rank's part of it: {name}.to_local()")


def _check_shape(name: str, x: Tensor, shape: tuple[int | str, ...], contents: str) -> None:
    """In `shape` "k" stands for any size."""
    if not isinstance(x, Tensor):
        raise AttentionError(f"{name} is a {type(x).__name__}; give a tensor of {contents}")
    _refuse_dtensor(name, x)
    if x.ndim != len(shape) or any(size not in (n, "k") for n, size in zip(x.shape, shape, strict=True)):
        form = str(shape).replace("'", "")
        raise AttentionError(f"{name} has shape {tuple(x.shape)}; give {contents}: {form}")


def check_attention_arguments(arguments: Arguments) -> None:
    """Raise AttentionError for masks and numbers that cannot be computed exactly."""
    dropout = arguments.dropout
    if not isinstance(dropout, Real) or not 0 <= dropout < 1:
        raise AttentionError(
            f"dropout is {dropout!r}; give the probability that a weight is dropped, from 0 to below 1"
        )
    for name, value, meaning in (
        ("window", arguments.window, "how many positions a query sees"),
        ("chunk", arguments.chunk, "how many positions of a document see each other"),
    ):
        if value is not None and not is_positive_integer(value):
            raise AttentionError(f"{name} is {value!r}; it is {meaning}, at least 1, or None")
        if value is not None and not arguments.causal:
            raise AttentionError(f"{name} {value} looks back from each position; it needs causal=True")
    for name, value in (("softcap", arguments.softcap), ("scale", arguments.scale)):
        if value is None or (isinstance(value, Real) and math.isfinite(value) and (value > 0 or name == "scale")):
            continue
        raise AttentionError(f"{name} is {value!r}; give a finite number{'' if name == 'scale' else ' above 0'}")
    if arguments.spans not in get_args(SpanMask):
        raise AttentionError(f"spans is {arguments.spans!r}; use one of {', '.join(get_args(SpanMask))}")


def is_positive_integer(value: object) -> bool:
    """Whether a value is an integer, numpy's among them, of at least 1."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


LevelSizes = tuple[int, int]
CommChoice = tuple[str, int]  # how a group communicates, and how many neighbours exchange heads for rows (1: none)


def choose_communication(shard: SequenceShard, arguments: Arguments, call: AttendCall) -> list[CommChoice]:
    """Return how each group of the micro-batch communicates.

    Raises AttentionError, naming the group, for a type that is unknown, a2a and p2p sizes whose product is not the
    degree, or heads that members cannot exchange.
    """
    types = arguments.cp_comm_type
    sizes = arguments.sizes
    if not isinstance(types, str | tuple | None):
        raise AttentionError(f"cp_comm_type is {types!r}; use one of {', '.join(COMM_TYPES)}, or one per layer")
    if sizes is not None:
        if not isinstance(sizes, tuple) or len(sizes) != 2 or not all(map(is_positive_integer, sizes)):
            raise AttentionError(f"hierarchical_context_parallel_sizes is {sizes!r}; give (a2a, p2p), two sizes")
        arguments = arguments._replace(sizes=(int(sizes[0]), int(sizes[1])))
    return [_choose_for_group(shard, index, arguments, call) for index in range(len(shard.micro_batch.groups))]


def _choose_for_group(shard: SequenceShard, index: int, arguments: Arguments, call: AttendCall) -> CommChoice:
    """The call's type wins over the group's; a group of one member is ("p2p", 1), after the same checks of the type."""
    group = shard.micro_batch.groups[index]
    where = f" of group {index}"
    # Messages say whose types they are.
    owner = ""
    types = arguments.cp_comm_type
    if types is None:
        owner = where
        types = group.cp_comm_type
    if isinstance(types, str):
        comm_type = types
    else:
        layer = arguments.layer
        if not isinstance(layer, Integral) or not 0 <= layer < len(types):
            raise AttentionError(
                f"cp_comm_type{owner} has {len(types)} entries, one per layer; got layer={layer!r}: "
                f"pass the global layer index, 0 to {len(types) - 1}"
            )
        comm_type = types[layer]
    if comm_type != "auto":
        find_comm_pattern(comm_type, owner)  # raises for an unknown one
    if group.degree == 1:  # nobody to communicate with
        return "p2p", 1
    sizes = arguments.sizes or group.hierarchical_context_parallel_sizes
    if comm_type == "auto" and call.with_lse:
        comm_type = "p2p"
    elif comm_type == "auto" and call.indexed:
        comm_type = "all_gather"  # queries and their indices stay where they are
    elif comm_type == "auto":
        world = world_of(shard.world_key)
        fastest = world.machine.fastest_type_price(group, call.sizes, node_size=world.node_size)
        comm_type, sizes = fastest.cp_comm_type, fastest.sizes
    if call.with_lse and comm_type not in PATTERNS:
        raise AttentionError(
            f"with_lse=True is for cp_comm_type {', '.join(PATTERNS)}, got {comm_type!r}{where}, which need not bring "
            "the log-sum-exp and its gradient back to the rows; pass one of them"
        )
    inner = group.degree if comm_type == "a2a" else 1
    if comm_type == "a2a+p2p":
        inner = _hierarchical_sizes(sizes, group.degree, where)[0]
    if call.heads % inner:
        fit = [size for size in range(1, group.degree + 1) if call.heads % size == 0 and group.degree % size == 0]
        level = ", ".join(f"({size}, {group.degree // size})" for size in fit)
        raise AttentionError(
            f"{call.heads} query heads cannot be dealt to the {inner} members that cp_comm_type {comm_type!r}{where} "
            f"exchanges heads between; sizes that divide both the heads and cp {group.degree}: "
            f"{', '.join(map(str, fit))} (a2a+p2p with hierarchical_context_parallel_sizes {level}), or use p2p or "
            "all_gather"
        )
    return comm_type, inner


def _hierarchical_sizes(sizes: LevelSizes | None, degree: int, where: str) -> LevelSizes:
    if sizes is not None and sizes[0] * sizes[1] == degree:
        return sizes
    fit = ", ".join(f"({a}, {degree // a})" for a in range(1, degree + 1) if degree % a == 0)
    if sizes is None:
        raise AttentionError(
            f"cp_comm_type 'a2a+p2p'{where} needs hierarchical_context_parallel_sizes=(a2a, p2p) with product "
            f"{degree}: one of {fit}"
        )
    raise AttentionError(
        f"hierarchical_context_parallel_sizes {sizes}{where} multiply to {sizes[0] * sizes[1]}, but the group has cp "
        f"{degree}; use one of {fit}"
    )


def check_indices(
    indices: Tensor | None, q: Tensor, kv_heads: int, shard: SequenceShard, arguments: Arguments
) -> None:
    """Raise AttentionError unless indices is None, or (T, k) or (T, K, k) integers on q's device, for a causal mask
    without spans, with a whole block size.
    """
    size = arguments.block_size
    if not is_positive_integer(size) or (size > 1 and indices is None):
        given = "no indices" if indices is None else "indices"
        raise AttentionError(
            f"block_size is {size!r} with {given}; it is how many keys each of the blocks has whose numbers `indices` "
            "has, at least 1, and 1 without indices"
        )
    if indices is None:
        return
    contents = "positions for each row" if size == 1 else "numbers of blocks for each row"
    if isinstance(indices, Tensor) and indices.ndim == 3:
        _check_shape("indices", indices, (len(q), kv_heads, "k"), f"{contents} and key/value head")
    else:
        _check_shape("indices", indices, (len(q), "k"), contents)
    if indices.dtype not in (torch.int32, torch.int64) or indices.device != q.device:
        raise AttentionError(f"indices is {indices.dtype} on {indices.device}; give int32 on {q.device}")
    if indices.device.type == "cpu" and indices.numel() and (least := int(indices.min())) < -1:  # a GPU would wait
        raise AttentionError(
            f"indices has {least}; give positions in the row's own document from 0, or -1 for none"
        )
    if not arguments.causal or arguments.sees_spans(shard):
        got = "causal=False" if not arguments.causal else "a shard with spans"
        raise AttentionError(f"indices choose among earlier keys, got {got}; call without indices")


def check_shared_prefixes(arguments: Arguments, shard: SequenceShard, *, indexed: bool) -> None:
    """Raise AttentionError for what is not defined, or not exact, where documents share a prefix: called only for such
    micro-batches.
    """
    has_feature = {
        "causal=False": not arguments.causal,
        f"chunk {arguments.chunk}": arguments.chunk is not None,
        "indices": indexed,
        f"dropout {arguments.dropout:g}": arguments.dropout > 0,
        "a shard with spans": arguments.sees_spans(shard),
    }
    if features := [name for name, is_present in has_feature.items() if is_present]:
        raise AttentionError(
            f"documents of the micro-batch share prefixes (Group.parents), and attend got {', '.join(features)}, which "
            "it has for separate documents alone; plan the documents without share_prefixes"
        )


def pack_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    shard: SequenceShard,
    arguments: Arguments,
    indices: Tensor | None,
) -> AttendCall:
    """Check the arguments of `attend` and pack them into one call: mask, scale, kernel, and how each part of the shard
    communicates.

    Raises AttentionError for whatever could not be computed exactly. A window that hides nothing is dropped. Kernels
    take positive scales, so the sign is kept apart, and a scale of 0 is a sign of 0. A part of padding rows belongs to
    no group (index −1), and any communication type will do. The call has no `sinks`, `indices` and seed of dropout yet:
    layers with the same shapes and arguments share it.
    """
    check_tensors(q, k, v, shard, latents=arguments.latents)
    check_attention_arguments(arguments)
    if sinks is not None:
        _check_shape("sinks", sinks, (q.shape[1],), "one logit per query head")
        if not sinks.is_floating_point() or sinks.device != q.device:
            raise AttentionError(f"sinks is {sinks.dtype} on {sinks.device}; give floating numbers on {q.device}")
    check_indices(indices, q, k.shape[1], shard, arguments)
    groups = shard.micro_batch.groups
    scale = q.shape[2] ** -0.5 if arguments.scale is None else float(arguments.scale)
    window, chunk = (None if x is None else int(x) for x in (arguments.window, arguments.chunk))
    spans = arguments.spans if shard.has_spans else "later"  # without spans calls of all kinds share their masks
    mask = Mask(arguments.causal, window, chunk, spans).for_lengths(shard.micro_batch.path_lengths)
    if any(group.parents is not None for group in groups):
        check_shared_prefixes(arguments, shard, indexed=indices is not None)
    # no model defines whether a span reaches over a chunk's end
    if arguments.chunk is not None and arguments.sees_spans(shard):
        raise AttentionError(
            f"chunk is {arguments.chunk} and the shard has {sum(map(len, shard.spans or ()))} spans of rows that see "
            "each other; give chunks or spans, not both"
        )
    call = AttendCall(
        heads=q.shape[1],
        kv_heads=k.shape[1],
        head_dim=q.shape[2],
        value_dim=v.shape[2],
        dtype=q.dtype,
        device=q.device,
        mask=mask,
        scale=abs(scale) or 1.0,
        sign=(scale > 0) - (scale < 0),
        softcap=None if arguments.softcap is None else float(arguments.softcap),
        dropout=Dropout(arguments.dropout, seed=0) if arguments.dropout > 0 else None,
        one_document=mask.chunk is None and all(len(group.documents) == 1 for group in groups),
        spans=arguments.sees_spans(shard),
        indexed=indices is not None,
        block_size=int(arguments.block_size),
        by_head=indices is not None and indices.ndim == 3,
        chosen_keys=0 if indices is None else indices.shape[-1] * int(arguments.block_size),
        longest=max(shard.micro_batch.lengths, default=0),
        latents=arguments.latents,
        with_lse=arguments.with_lse,
    )
    choices = choose_communication(shard, arguments, call)
    kernel = choose_kernel(call, arguments.kernel)
    parts = list[CallPart]()
    for part in shard.parts:
        comm_type, inner = choices[part.index] if part.index >= 0 else ("p2p", 1)
        members = cached_members(part, shard, mask, inner)
        rows = slice(part.start, part.stop)
        parts.append(CallPart(rows, comm_type, members, v_rows=rows))
    replays = None
    if kernel.name in REPLAYED_KERNELS and 0 < q.numel() <= REPLAYED_NUMBERS:
        node_size = world_of(shard.world_key).node_size
        groups_here = [part.group for part in shard.parts if part.index >= 0]
        # graphs whose exchanges go between hosts were never tried
        if all(len({slot // node_size for slot in group.slots}) == 1 for group in groups_here):
            replays = dict[Any, Replay]()
    return replace(call, kernel=kernel, parts=tuple(parts), replays=replays)


def cached_members(part: ShardPart, shard: SequenceShard, mask: Mask, inner: int = 1) -> Members:
    """Return the members of a part's group under this mask; made at the first call for a shard, and kept in its cache
    for all layers.
    """
    mask = mask.for_lengths(part.group.path_lengths)
    cache = cache_of(shard)
    key = (part.index, inner, mask)
    if key not in cache.members:
        cache.members[key] = Members(part, mask, shard.device, inner, shard.spans_of(part))
    return cache.members[key]


PatternForward = Callable[[Tensor, Tensor, Tensor, Members, AttendCall], tuple[Tensor, list[Saved]]]
PatternBackward = Callable[[Tensor, Sequence[Saved], Members, AttendCall], Gradients]

_SAVED = len(Saved._fields)
# How the members of a group share keys and values; both functions work on one part's local rows.
PATTERNS: dict[str, tuple[PatternForward, PatternBackward]] = {
    "p2p": (ring_forward, ring_backward),
    "all_gather": (all_gather_forward, all_gather_backward),
    "a2a": (a2a_forward, a2a_backward),
    "a2a+p2p": (a2a_forward, a2a_backward),
}


@cache
def find_comm_pattern(cp_comm_type: str, where: str = "") -> tuple[PatternForward, PatternBackward]:
    """Find the two functions of a communication type, or import the pair of one's own with this dotted name.

    Raises AttentionError if there is none; `where`, as " of group 0", stands in the message behind the key.
    """
    pattern = PATTERNS.get(cp_comm_type)
    if isinstance(cp_comm_type, str) and "." in cp_comm_type:
        pattern = import_object(cp_comm_type, f"cp_comm_type{where} is {cp_comm_type!r}", AttentionError)
    if isinstance(pattern, tuple) and len(pattern) == 2 and all(map(callable, pattern)):
        return pattern
    raise AttentionError(
        f"cp_comm_type {cp_comm_type!r}{where} is unknown; use one of {', '.join(COMM_TYPES)}, or the dotted name of a "
        "pair of functions of your own: forward and backward (CONTRIBUTING.md)"
    )


@overload
def attend(
    q: Tensor, k: Tensor, v: Tensor, shard: SequenceShard, *, with_lse: Literal[True], **arguments: Any
) -> tuple[Tensor, Tensor]: ...


@overload
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
    indices: Tensor | None = None,
    block_size: int = 1,
    latents: bool = False,
    softcap: float | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    dropout_seed: int | None = None,
    first_head: int = 0,
    cp_comm_type: str | Sequence[str] | None = None,
    hierarchical_context_parallel_sizes: Sequence[int] | None = None,
    layer: int | None = None,
    kernel: str | None = None,
    spans: SpanMask = "later",
    with_lse: Literal[False] = False,
) -> Tensor: ...


@break_graphs_around
def attend(  # pyright: ignore[reportInconsistentOverload]
    q: Tensor,
    k: Tensor,
    v: Tensor,
    shard: SequenceShard,
    *,
    causal: bool = True,
    window: int | None = None,
    chunk: int | None = None,
    sinks: Tensor | None = None,
    indices: Tensor | None = None,
    block_size: int = 1,
    latents: bool = False,
    softcap: float | None = None,
    scale: float | None = None,
    dropout: float = 0.0,
    dropout_seed: int | None = None,
    first_head: int = 0,
    cp_comm_type: str | Sequence[str] | None = None,
    hierarchical_context_parallel_sizes: Sequence[int] | None = None,
    layer: int | None = None,
    kernel: str | None = None,
    spans: SpanMask = "later",
    with_lse: bool = False,
) -> Tensor | tuple[Tensor, ...]:
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
    c · tanh(score / c). `scale` is any finite number, H ** −0.5 by default. `indices` (T, k): positions, in the row's
    own document, of the keys that it may see, distinct, in any order, −1 for none; of these it sees what causal, window
    and chunk leave. `block_size` m: these are numbers of blocks instead, block b being positions b m … b m + m − 1.
    Indices (T, K, k) are a choice for each key/value head. `latents`: a key is the Hv numbers of its value and then
    those of k (T, 1, H − Hv), as in the absorbed form of multi-head latent attention. A row that sees no key (one that
    pads a document out) has output and gradient 0.

    `dropout` zeroes weights with this probability, by a hash of `dropout_seed`, head, document and both positions: the
    same weights at every degree and under every type. By default the seed is mixed from the world's seed and step, as
    they were when the shard was bound, and `layer`: the same on all ranks, and again in recomputation. `first_head` is
    the index of q's first head among all of the layer's, where tensor parallelism gives each rank some. Pass 0.0 in
    evaluation, and in a CUDA graph, whose replays would drop the same weights.

    `cp_comm_type` (p2p, all_gather, a2a, a2a+p2p, auto) and `hierarchical_context_parallel_sizes` (a2a, p2p) win over
    the groups' own; of a list with one per layer, `layer` picks.

    `spans`: a row in a span of the shard (`with_spans`) sees the later rows of its span besides; with "whole" all rows
    of it, those before its window too; with "none" what it sees without spans.

    `with_lse` returns (out, lse): the log-sum-exp (T, N) of each row's scores, sinks among them, in float32 (float64
    for float64), −inf for a row that sees nothing. Both have gradients, so that attention to further keys can be joined
    under one softmax.

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
        layer=layer,
        kernel=kernel,
        latents=latents,
        with_lse=with_lse,
        spans=spans,
        block_size=block_size,
    )
    call = _cached_or_packed_call(q, k, v, sinks, shard, arguments, indices)
    if dropout:
        if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
            raise AttentionError(
                f"dropout is {dropout!r} while a CUDA graph is captured: it holds the seed, so that every replay would "
                "drop the same weights; capture with dropout=0.0, or call attend outside the graph"
            )
        layer_word = -1 if layer is None else layer
        words = (*shard.seed, layer_word) if dropout_seed is None else (dropout_seed,)
        call = replace(call, dropout=Dropout(dropout, mix_seed(*words), first_head))
    q = q if call.sign == 1 else q * call.sign  # the call's scale has no sign
    results = run_call(q, k, v, sinks, indices, call)
    return results if with_lse else results[0]


def run_call(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, indices: Tensor | None, call: AttendCall
) -> tuple[Tensor, ...]:
    """Run a packed call, with a node of autograd where gradients may be asked for: (out,), or (out, lse)."""
    # A node of autograd would only cost the host.
    if not torch.is_grad_enabled() and active_recording.get() is None:
        q, k, v = map(contiguous_heads, (q, k, v))
        out, saved, slice_counts = _attend_parts(q, k, v, _add_layer_tensors(call, sinks, indices))
        return (out, _join_lse(saved, slice_counts)) if call.with_lse else (out,)
    results: Any = _Attend.apply(q, k, v, sinks, indices, call)
    return results if call.with_lse else (results,)


def _join_lse(saved: Sequence[Tensor | None], slice_counts: Sequence[int]) -> Tensor:
    """Each slice of a part has the log-sum-exp of the part's rows."""
    last_slices = itertools.accumulate(slice_counts)
    parts = [x for stop in last_slices if (x := saved[_SAVED * stop - 1]) is not None]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _hashable_argument(argument: Any) -> Any:
    if isinstance(argument, Iterable) and not isinstance(argument, str):
        return tuple(argument)
    return argument


def _cached_or_packed_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    sinks: Tensor | None,
    shard: SequenceShard,
    arguments: Arguments,
    indices: Tensor | None,
) -> AttendCall:
    """The key has the shapes, types, dtypes and devices of tensors, not their values; the layer only where it decides
    the type."""
    tensors = (q, k, v, sinks, indices)
    if not isinstance(shard, SequenceShard) or not all(x is None or isinstance(x, Tensor) for x in tensors):
        return pack_call(q, k, v, sinks, shard, arguments, indices)  # raises
    cache = cache_of(shard)
    types = arguments.cp_comm_type
    by_layer = cache.listed_by_layer if types is None else not isinstance(types, str)
    arguments = arguments if by_layer else arguments._replace(layer=None)
    shapes = [None if x is None else (type(x), x.shape, x.dtype, x.device) for x in tensors]
    # The types of arguments too: True equals 1, and only one of them may be a valid window.
    key = (*shapes, arguments, *map(type, arguments), are_deterministic_algorithms_enabled())
    try:
        call = cache.calls.get(key)
    except TypeError:  # an argument that is not hashable, which no check accepts
        call = None
    if call is None:
        call = pack_call(q, k, v, sinks, shard, arguments, indices)
        cache.calls[key] = call
    return call


class _Attend(torch.autograd.Function):
    """Autograd's node of one call: forward and backward over all parts of the shard, in opposite orders."""

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, indices: Tensor | None, call: AttendCall
    ) -> Any:
        """Return the output (T, N, Hv), with `with_lse` the log-sum-exp too, and save what backward needs; a recomputed
        layer takes them from its recording.

        `saved` and `slice_counts` are those of `_attend_parts`.
        """
        q, k, v = map(contiguous_heads, (q, k, v))
        recording = active_recording.get()
        layer_call = _add_layer_tensors(call, sinks, indices)
        if recording is None:
            out, saved, slice_counts = _attend_parts(q, k, v, layer_call)
        else:
            save_local = not recording.keep_exchanged
            out, saved, slice_counts = recording.record_or_replay(
                lambda: _attend_parts(q, k, v, layer_call, save_local), (q, k, v), indices
            )
        ctx.call = call
        ctx.slice_counts = slice_counts
        ctx.shapes = [x.shape[1:] for x in (q, k, v)]
        # `out` is saved once, for all the parts whose output is None in `saved`
        ctx.save_for_backward(sinks, indices, out if any(x is None for x in saved) else None, *saved)
        # Views, for autograd refuses writes into a view that a function returns. A write into `out` would change what
        # backward reads, and in a checkpoint, where saved tensors are not checked for writes, without an error.
        if not call.with_lse:
            return out.view_as(out)
        lse = _join_lse(saved, slice_counts)
        return out.view_as(out), lse.view_as(lse)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        """Return the gradients of q, k, v and sinks, in the inputs' dtypes, and None for indices and call.

        Parts go from the last to the first, as on every member.
        """
        sinks, indices, *saved = ctx.saved_tensors
        call = _add_layer_tensors(ctx.call, sinks, indices)
        slice_counts = ctx.slice_counts
        shapes = ctx.shapes
        dout_and_saved = [gradients[0].contiguous(), *saved]  # dout, the whole out or None, `saved` of `forward`
        if call.with_lse:
            # A score's gradient is w · (dout · value − delta + dlse): that of the log-sum-exp is one of the deltas.
            dout_and_saved[1] = deltas(*dout_and_saved[:2]).sub_(gradients[1])

        # It gets the tensors of `dout_and_saved` that are not None, in order: a recorded replay takes tensors only.
        def run(call: AttendCall, *tensors: Tensor) -> list[Any]:
            remaining = iter(tensors)
            dout, out, *unread = cast(list[Any], [x if x is None else next(remaining) for x in dout_and_saved])
            parts: list[Gradients] = []
            for (rows, cp_comm_type, members, _), count in zip(
                reversed(call.parts), reversed(slice_counts), strict=True
            ):
                # the part's own tensors, which are the last unread ones; None is its output
                part_tensors = [take_rows(out, rows) if x is None else x for x in unread[-_SAVED * count :]]
                del unread[-_SAVED * count :]
                saved_slices = [Saved(*part_tensors[i : i + _SAVED]) for i in range(0, len(part_tensors), _SAVED)]
                with _disable_autocast(dout):
                    pattern_backward = find_comm_pattern(cp_comm_type)[1]
                    part_call = call.for_rows(rows)
                    parts.insert(0, pattern_backward(take_rows(dout, rows), saved_slices, members, part_call))
            dq, dk, dv = _join_rows_of_parts([part_gradients[:3] for part_gradients in parts], dout, shapes)
            dsinks = None
            if call.sinks is not None:
                dsinks = torch.zeros_like(call.sinks, dtype=accumulation_dtype(call.sinks.dtype))
                for part_gradients in parts:
                    assert part_gradients.sinks is not None
                    dsinks += part_gradients.sinks
                dsinks = dsinks.to(call.sinks.dtype)
            return [dq, dk, dv, dsinks]

        present = [x for x in dout_and_saved if x is not None]
        key = (*slice_counts, *(x is None for x in dout_and_saved))
        return *_run_or_replay(run, present, call, "backward", key), None, None


def _run_or_replay(run: Run, tensors: Sequence[Tensor], call: AttendCall, *key: object) -> list[Any]:
    """`key` tells apart the runs of one call, and must determine the shapes of `tensors`; indices and dropout vary
    between runs, so such calls are never recorded."""
    varies = call.indices is not None or call.dropout is not None
    if call.replays is None or varies or torch.cuda.is_current_stream_capturing():
        return run(call, *tensors)
    # a recording of inference mode has tensors of its own that nothing outside of that mode may write to
    key = torch.is_inference_mode_enabled(), *key
    if key not in call.replays:
        watch = world_of(call.parts[0].members.part.world_key).watch
        call.replays[key] = Replay(watch, "attention, replayed")
    if call.sinks is None:
        return call.replays[key](partial(run, call), tensors)
    tensors_and_sinks = [*tensors, call.sinks]
    return call.replays[key](lambda *inputs: run(replace(call, sinks=inputs[-1]), *inputs[:-1]), tensors_and_sinks)


def _add_layer_tensors(call: AttendCall, sinks: Tensor | None, indices: Tensor | None) -> AttendCall:
    """The call in the shard's cache, which all layers share, must keep neither sinks nor indices."""
    if sinks is None and indices is None:
        return call
    return replace(call, sinks=sinks, indices=indices)


def _attend_parts(
    q: Tensor, k: Tensor, v: Tensor, call: AttendCall, save_local: bool = False
) -> tuple[Tensor, list[Tensor | None], list[int]]:
    """What is saved are the tensors of each `Saved`, slice after slice and part after part; None stands for an output
    that is the part's rows of the output. With `save_local` backward exchanges the own rows once more."""

    def run(call: AttendCall, q: Tensor, k: Tensor, v: Tensor) -> list[Any]:
        parts = list[tuple[Tensor, Sequence[Saved]]]()
        with _disable_autocast(q):
            for rows, cp_comm_type, members, v_rows in call.parts:
                part_inputs = take_rows(q, rows), take_rows(k, rows), take_rows(v, v_rows)
                part_out, slices = find_comm_pattern(cp_comm_type)[0](*part_inputs, members, call.for_rows(rows))
                if save_local:
                    slices = [Saved(*part_inputs, part_out, x.lse) for x in slices]
                parts.append((part_out, slices))
        (out,) = _join_rows_of_parts([(part_out,) for part_out, _ in parts], q, [(q.shape[1], v.shape[2])])
        saved = [None if x is part_out else x for part_out, slices in parts for one in slices for x in one]
        return [out, [len(slices) for _, slices in parts], *saved]

    out, slice_counts, *saved = _run_or_replay(run, (q, k, v), call, "forward", save_local)
    return out, saved, slice_counts


def _disable_autocast(x: Tensor) -> AbstractContextManager[object]:
    """Autocast would round products of float32 scores to half precision."""
    return (
        torch.autocast(x.device.type, enabled=False) if torch.is_autocast_enabled(x.device.type) else nullcontext()
    )


def _join_rows_of_parts(
    parts: Sequence[Sequence[Tensor]], like: Tensor, shapes: Sequence[Sequence[int]]
) -> list[Tensor]:
    if len(parts) == 1:
        return cast_rows(parts[0], like.dtype)
    no_rows = [like.new_empty((0, *shape)) for shape in shapes]
    return [torch.cat([x.to(like.dtype) for x in rows]) for rows in zip(no_rows, *parts, strict=True)]
