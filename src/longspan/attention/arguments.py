"""The arguments of `attend`: checked, and packed into one AttendCall for all layers of a micro-batch.

`pack_call` checks tensors, masks, numbers and budgets, chooses how each group communicates and which kernel computes,
and finds the members of each group. All of it runs on the host and before any communication, so that every rank can
fail alike. A rank also chooses for groups that it is not in. What "auto" stands for is decided in `plan.Machine`.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from longspan.attention.all_gather import gather_bytes_per_head
from longspan.attention.call import AttendCall, CallPart, Dropout, cache_of
from longspan.attention.kernels import choose_kernel
from longspan.attention.members import Members
from longspan.attention.tiles_between import Mask
from longspan.comm import SequenceShard, ShardPart, world_of
from longspan.errors import AttentionError
from longspan.plan import Group
from longspan.plan.check import COMM_TYPES

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Arguments(NamedTuple):
    """The arguments of `attend` without its tensors and its seed; lists are tuples; `sizes` are (a2a, p2p)."""

    causal: bool = True
    window: int | None = None
    chunk: int | None = None
    softcap: float | None = None
    scale: float | None = None
    dropout: float = 0.0
    cp_comm_type: str | tuple[str, ...] | None = None
    sizes: Any = None
    max_gather_bytes: int | None = None
    layer: int | None = None
    kernel: str | None = None


def check_tensors(q: Tensor, k: Tensor, v: Tensor, shard: SequenceShard) -> None:
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
        _check_plain_tensor(name, x)
    _check_same_type(tensors)
    if q.device != shard.device:
        raise AttentionError(f"q, k and v are on {q.device}, the shard is bound to {shard.device}; move them there")
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in tensors.items())
    rows = {len(x) for x in tensors.values()}
    if rows != {shard.local_rows}:
        got = " and ".join(str(n) for n in sorted(rows))
        raise AttentionError(f"got {got} rows, the shard holds {shard.local_rows}; {shapes}: pass this rank's rows")
    if k.shape[1] != v.shape[1] or k.shape[2] != q.shape[2]:
        raise AttentionError(f"{shapes}: k and v need equal heads, q and k equal head sizes")
    heads, kv_heads = q.shape[1], k.shape[1]
    if not kv_heads or heads % kv_heads or not heads or not q.shape[2] or not v.shape[2]:
        raise AttentionError(f"{shapes}: {kv_heads} key/value heads do not divide {heads} query heads, or a size is 0")


def _check_plain_tensor(name: str, x: Tensor) -> None:
    if isinstance(x, DTensor):
        placements = ", ".join(map(str, x.placements))
        raise AttentionError(f"{name} is a DTensor ({placements}); pass this rank's part of it: {name}.to_local()")


def _check_same_type(tensors: dict[str, Tensor]) -> None:
    """Raise AttentionError unless q, k and v have one device and one dtype that attention computes in."""
    dtypes = {name: str(x.dtype).removeprefix("torch.") for name, x in tensors.items()}
    if len(set(dtypes.values())) > 1:
        raise AttentionError(f"q, k and v need one dtype, got {_values_text(dtypes)}; cast them before attend")
    devices = {name: str(x.device) for name, x in tensors.items()}
    if len(set(devices.values())) > 1:
        raise AttentionError(f"q, k and v need one device, got {_values_text(devices)}; move them before attend")
    if tensors["q"].dtype not in _DTYPES:
        raise AttentionError(f"attend takes float16, bfloat16, float32 or float64 tensors, got {dtypes['q']}")


def _values_text(values: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def check_features(arguments: Arguments) -> None:
    """Raise AttentionError for masks and numbers that cannot be computed exactly.

    A window and a chunk look back from each position, so they need a causal mask. A scale may be negative or 0, a soft
    cap may not.
    """
    dropout = arguments.dropout
    if not isinstance(dropout, Real) or not 0 <= dropout < 1:
        raise AttentionError(
            f"dropout is {dropout!r}; give the probability that a weight is dropped, from 0 to below 1"
        )
    for name, value, meaning in (
        ("window", arguments.window, "how many positions a query sees"),
        ("chunk", arguments.chunk, "how many positions of a document see each other"),
    ):
        if value is not None and not is_count(value):
            raise AttentionError(f"{name} is {value!r}; it is {meaning}, at least 1, or None")
        if value is not None and not arguments.causal:
            raise AttentionError(f"{name} {value} looks back from each position; it needs causal=True")
    for name, value in (("softcap", arguments.softcap), ("scale", arguments.scale)):
        if value is None or (isinstance(value, Real) and math.isfinite(value) and (value > 0 or name == "scale")):
            continue
        raise AttentionError(f"{name} is {value!r}; give a finite number{'' if name == 'scale' else ' above 0'}")


def check_spans(shard: SequenceShard, arguments: Arguments) -> None:
    """Raise AttentionError for spans in chunks: no model defines whether a span reaches over the end of a chunk."""
    if arguments.chunk is not None and shard.has_spans:
        runs = sum(map(len, shard.spans or ()))
        raise AttentionError(
            f"chunk is {arguments.chunk} and the shard has {runs} spans of rows that see each other; give chunks or "
            "spans, not both"
        )


def check_capture(dropout: float) -> None:
    """Raise AttentionError while a CUDA graph is captured: dropout would not be random in its replays."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise AttentionError(
            f"dropout is {dropout!r} while a CUDA graph is captured: the graph holds the seed, so that every replay "
            f"would drop the same weights; capture with dropout=0.0, or call attend outside the graph"
        )


def is_count(value: object) -> bool:
    """Return whether the value is an integer, numpy's among them, of at least 1."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def check_budget(budget: int | None, k: Tensor, v: Tensor, groups: Sequence[Group]) -> None:
    """Raise AttentionError where a group that gathers cannot hold one head of its rows in the budget."""
    if budget is None:
        return
    if not is_count(budget):
        raise AttentionError(f"max_gather_bytes is {budget!r}; give a number of bytes, or None for no limit")
    rows = max((sum(group.laid_out) for group in groups if group.degree > 1), default=0)
    if (head_bytes := gather_bytes_per_head(rows, k, v)) > budget:
        raise AttentionError(
            f"max_gather_bytes {budget} does not hold one key/value head of a group of {rows} rows, which takes "
            f"{head_bytes} bytes; raise it, or use p2p"
        )


def check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    """Raise AttentionError unless sinks is None or (N,) floating numbers on q's device."""
    if sinks is None:
        return
    if not isinstance(sinks, Tensor):
        raise AttentionError(f"sinks is a {type(sinks).__name__}; give a tensor of one logit per query head")
    _check_plain_tensor("sinks", sinks)
    if tuple(sinks.shape) != (q.shape[1],):
        raise AttentionError(f"sinks has shape {tuple(sinks.shape)}; give one logit per query head: ({q.shape[1]},)")
    if not sinks.is_floating_point() or sinks.device != q.device:
        raise AttentionError(f"sinks is {sinks.dtype} on {sinks.device}; give floating numbers on {q.device}")


Sizes = tuple[int, int]


class CommChoice(NamedTuple):
    """How a group communicates, and how many neighbours exchange heads for rows (1: none)."""

    cp_comm_type: str
    inner: int = 1


def comm_choices(shard: SequenceShard, arguments: Arguments, call: AttendCall) -> list[CommChoice]:
    """Return how each group of the micro-batch communicates.

    Raises AttentionError, naming the group, for a type that is unknown, a2a and p2p sizes whose product is not the
    degree, or heads that members cannot exchange.
    """
    types, sizes = arguments.cp_comm_type, arguments.sizes
    if not isinstance(types, str | tuple | None):
        raise AttentionError(f"cp_comm_type is {types!r}; use one of {', '.join(COMM_TYPES)}, or one per layer")
    if sizes is not None:
        if not isinstance(sizes, tuple) or len(sizes) != 2 or not all(map(is_count, sizes)):
            raise AttentionError(f"hierarchical_context_parallel_sizes is {sizes!r}; give (a2a, p2p), two sizes")
        arguments = arguments._replace(sizes=(int(sizes[0]), int(sizes[1])))
    if types is not None:
        _check_type(_layer_comm_type(types, arguments.layer, "cp_comm_type"), "")
    return [_comm_choice(shard, index, arguments, call) for index in range(len(shard.micro_batch.groups))]


def _comm_choice(shard: SequenceShard, index: int, arguments: Arguments, call: AttendCall) -> CommChoice:
    """Return how one group communicates: by the call's type, else the group's; from a list of types, the layer's."""
    group, where = shard.micro_batch.groups[index], f" of group {index}"
    if arguments.cp_comm_type is None:
        kind = _layer_comm_type(group.cp_comm_type, arguments.layer, f"cp_comm_type{where}")
        _check_type(kind, where)
    else:  # checked by the caller
        kind = _layer_comm_type(arguments.cp_comm_type, arguments.layer, "cp_comm_type")
    if group.degree == 1:  # nobody to communicate with
        return CommChoice("p2p")
    if kind == "auto":
        return _resolve_automatic_type(shard, index, call)
    sizes = arguments.sizes or group.hierarchical_context_parallel_sizes
    if kind == "a2a+p2p":
        _check_levels(sizes, group.degree, where)
    choice = _make_choice(kind, group, sizes)
    if call.heads % choice.inner:
        raise AttentionError(_describe_uneven_heads(choice, group, call.heads, where))
    return choice


def _make_choice(kind: str, group: Group, sizes: Sizes | None) -> CommChoice:
    """Return the choice with its a2a degree: that of the levels, of the whole group for a2a, 1 for other types."""
    if kind == "a2a+p2p":
        assert sizes is not None
        return CommChoice(kind, sizes[0])
    return CommChoice(kind, group.degree if kind == "a2a" else 1)


def _resolve_automatic_type(shard: SequenceShard, index: int, call: AttendCall) -> CommChoice:
    """Return the type that the machine model expects to be fastest for this group and call, cached by shard."""
    automatic, key = cache_of(shard).automatic, (index, call)
    if key not in automatic:
        group, world = shard.micro_batch.groups[index], world_of(shard.world_key)
        fastest = world.machine.fastest_type(group, call.sizes, node_size=world.node_size)
        automatic[key] = _make_choice(fastest.cp_comm_type, group, fastest.sizes)
    return CommChoice(*automatic[key])


def _layer_comm_type(types: str | Sequence[str], layer: int | None, name: str) -> str:
    """Return a layer's cp_comm_type, from one for all or a list `name`; raise AttentionError if it lacks the layer."""
    if isinstance(types, str):
        return types
    if not isinstance(layer, Integral) or not 0 <= layer < len(types):
        raise AttentionError(
            f"{name} has {len(types)} entries, one per layer; got layer={layer!r}: "
            f"pass the global layer index, 0 to {len(types) - 1}"
        )
    return types[layer]


def _check_type(kind: str, where: str) -> None:
    """Raise AttentionError for an unknown communication type; `where` says of what it is, in the message."""
    if kind not in COMM_TYPES:
        raise AttentionError(f"cp_comm_type {kind!r}{where} is unknown; use one of {', '.join(COMM_TYPES)}")


def _check_levels(sizes: Sizes | None, degree: int, where: str) -> None:
    """Raise AttentionError unless the a2a and p2p sizes of a2a+p2p multiply to the group's degree."""
    if sizes is not None and sizes[0] * sizes[1] == degree:
        return
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


def _describe_uneven_heads(choice: CommChoice, group: Group, heads: int, where: str) -> str:
    """Return the message for query heads that do not divide among members, with the sizes that would fit."""
    fit = [size for size in range(1, group.degree + 1) if heads % size == 0 and group.degree % size == 0]
    level = ", ".join(f"({size}, {group.degree // size})" for size in fit)
    return (
        f"{heads} query heads cannot be dealt to the {choice.inner} members that cp_comm_type "
        f"{choice.cp_comm_type!r}{where} exchanges heads between; sizes that divide both the heads and cp "
        f"{group.degree}: {', '.join(map(str, fit))} (a2a+p2p with hierarchical_context_parallel_sizes {level}), or "
        f"use p2p or all_gather"
    )


def pack_call(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, shard: SequenceShard, arguments: Arguments
) -> AttendCall:
    """Pack the call of `attend` with these tensors and arguments. Raises AttentionError where it cannot be exact.

    A window that hides nothing is dropped. Kernels take positive scales, so the sign is kept apart, and a scale of 0 is
    a sign of 0. The kernel is chosen for the whole call; each part of the shard, the rows of one group, gets its
    communication type and members. A part of padding rows belongs to no group (index −1), and any type will do.
    """
    check_tensors(q, k, v, shard)
    check_features(arguments)
    check_sinks(sinks, q)
    groups, scale = shard.micro_batch.groups, q.shape[2] ** -0.5 if arguments.scale is None else float(arguments.scale)
    window, chunk = (None if x is None else int(x) for x in (arguments.window, arguments.chunk))
    mask = Mask(arguments.causal, window, chunk).for_lengths(shard.micro_batch.lengths)
    check_spans(shard, arguments)
    call = AttendCall(
        *(q.shape[1], k.shape[1], q.shape[2], v.shape[2], q.dtype, q.device),
        mask=mask,
        scale=abs(scale) or 1.0,
        sign=(scale > 0) - (scale < 0),
        softcap=None if arguments.softcap is None else float(arguments.softcap),
        dropout=Dropout(arguments.dropout, seed=0) if arguments.dropout > 0 else None,
        max_gather_bytes=arguments.max_gather_bytes,
        one_document=mask.chunk is None and all(len(group.documents) == 1 for group in groups),
        spans=mask.causal and shard.has_spans,
    )
    choices = comm_choices(shard, arguments, call)
    gathering = [group for group, choice in zip(groups, choices, strict=True) if choice.cp_comm_type == "all_gather"]
    check_budget(arguments.max_gather_bytes, k, v, gathering)
    kernel = choose_kernel(call, arguments.kernel)
    parts = (
        _pack_part(shard_part, choices[shard_part.index] if shard_part.index >= 0 else CommChoice("p2p"), call, shard)
        for shard_part in shard.parts
    )
    return replace(call, kernel=kernel, parts=tuple(parts))


def _pack_part(part: ShardPart, choice: CommChoice, call: AttendCall, shard: SequenceShard) -> CallPart:
    """Return a part of the shard with its type and members; members with the same mask are made once for a shard."""
    mask, cache = call.mask.for_lengths(part.group.lengths), cache_of(shard)
    key = (part.index, choice.inner, mask)
    if key not in cache.members:
        cache.members[key] = Members(part, mask, shard.device, choice.inner, shard.spans_of(part))
    return CallPart(slice(part.start, part.stop), choice.cp_comm_type, cache.members[key])
