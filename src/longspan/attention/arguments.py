"""The arguments of `attend` and whether they are right: tensors, masks, numbers and budgets.

Checks run on the host and before any communication, so that every rank can fail alike.
"""

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from longspan.attention.all_gather import gather_bytes_per_head
from longspan.comm import SequenceShard
from longspan.errors import AttentionError
from longspan.plan import Group

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class Arguments(NamedTuple):
    """The arguments of `attend` as given, but for its tensors and its seed; lists are tuples."""

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
    """Raise AttentionError unless q (T, N, H), k (T, K, H), v (T, K, Hv) fit each other and the shard."""
    if not isinstance(shard, SequenceShard):
        raise AttentionError(f"shard is a {type(shard).__name__}; pass what bind(micro_batch, world) returns")
    named = {"q": q, "k": k, "v": v}
    for name, x in named.items():
        if not isinstance(x, Tensor) or x.ndim != 3:
            what = f"shape {tuple(x.shape)}" if isinstance(x, Tensor) else f"a {type(x).__name__}"
            raise AttentionError(f"{name} has {what}; attend takes (rows, heads, head size), without a batch dim")
        _check_plain(name, x)
    _check_same(named)
    if q.device != shard.device:
        raise AttentionError(f"q, k and v are on {q.device}, the shard is bound to {shard.device}; move them there")
    shapes = ", ".join(f"{name} {tuple(x.shape)}" for name, x in named.items())
    rows = {len(x) for x in named.values()}
    if rows != {shard.local_rows}:
        got = " and ".join(str(n) for n in sorted(rows))
        raise AttentionError(f"got {got} rows, the shard holds {shard.local_rows}; {shapes}: pass this rank's rows")
    if k.shape[1] != v.shape[1] or k.shape[2] != q.shape[2]:
        raise AttentionError(f"{shapes}: k and v need equal heads, q and k equal head sizes")
    heads, kv_heads = q.shape[1], k.shape[1]
    if not kv_heads or heads % kv_heads or not heads or not q.shape[2] or not v.shape[2]:
        raise AttentionError(f"{shapes}: {kv_heads} key/value heads do not divide {heads} query heads, or a size is 0")


def _check_plain(name: str, x: Tensor) -> None:
    if isinstance(x, DTensor):
        placements = ", ".join(map(str, x.placements))
        raise AttentionError(f"{name} is a DTensor ({placements}); pass this rank's part of it: {name}.to_local()")


def _check_same(named: dict[str, Tensor]) -> None:
    dtypes = {name: str(x.dtype).removeprefix("torch.") for name, x in named.items()}
    if len(set(dtypes.values())) > 1:
        raise AttentionError(f"q, k and v need one dtype, got {_listed(dtypes)}; cast them before attend")
    devices = {name: str(x.device) for name, x in named.items()}
    if len(set(devices.values())) > 1:
        raise AttentionError(f"q, k and v need one device, got {_listed(devices)}; move them before attend")
    if named["q"].dtype not in _DTYPES:
        raise AttentionError(f"attend takes float16, bfloat16, float32 or float64 tensors, got {dtypes['q']}")


def _listed(values: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def check_features(arguments: Arguments) -> None:
    """Raise AttentionError for masks and numbers that cannot be computed exactly."""
    dropout = arguments.dropout
    if not isinstance(dropout, Real) or not 0 <= dropout < 1:
        raise AttentionError(
            f"dropout is {dropout!r}; give the probability that a weight is dropped, from 0 to below 1"
        )
    for name, value, what in (
        ("window", arguments.window, "how many positions a query sees"),
        ("chunk", arguments.chunk, "how many positions of a document see each other"),
    ):
        if value is not None and not is_count(value):
            raise AttentionError(f"{name} is {value!r}; it is {what}, at least 1, or None")
        if value is not None and not arguments.causal:
            raise AttentionError(f"{name} {value} looks back from each position; it needs causal=True")
    for name, value in (("softcap", arguments.softcap), ("scale", arguments.scale)):
        if value is None or (isinstance(value, Real) and math.isfinite(value) and (value > 0 or name == "scale")):
            continue
        raise AttentionError(f"{name} is {value!r}; give a finite number{'' if name == 'scale' else ' above 0'}")


def check_spans(shard: SequenceShard, arguments: Arguments) -> None:
    """Raise AttentionError for spans in chunks: whether a span reaches over the end of a chunk, no model says."""
    if arguments.chunk is not None and shard.has_spans:
        runs = sum(map(len, shard.spans or ()))
        raise AttentionError(
            f"chunk is {arguments.chunk} and the shard has {runs} spans of rows that see each other; give chunks or "
            "spans, not both"
        )


def check_capture(dropout: float) -> None:
    """Raise AttentionError inside a CUDA graph, where dropout would not be random."""
    if torch.cuda.is_initialized() and torch.cuda.is_current_stream_capturing():
        raise AttentionError(
            f"dropout is {dropout!r} while a CUDA graph is captured: the graph holds the seed, so that every replay "
            f"would drop the same weights; capture with dropout=0.0, or call attend outside the graph"
        )


def is_count(value: object) -> bool:
    """Whether it is an integer, numpy's among them, of at least 1."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= 1


def check_budget(budget: int | None, k: Tensor, v: Tensor, groups: Sequence[Group]) -> None:
    """Raise AttentionError where a group that gathers cannot hold one head of its rows in the budget."""
    if budget is None:
        return
    if not is_count(budget):
        raise AttentionError(f"max_gather_bytes is {budget!r}; give a number of bytes, or None for no limit")
    rows = max((sum(group.laid_out) for group in groups if group.degree > 1), default=0)
    if (least := gather_bytes_per_head(rows, k, v)) > budget:
        raise AttentionError(
            f"max_gather_bytes {budget} does not hold one key/value head of a group of {rows} rows, which takes "
            f"{least} bytes; raise it, or use p2p"
        )


def check_sinks(sinks: Tensor | None, q: Tensor) -> None:
    """Raise AttentionError unless sinks is None or (N,) floating numbers on q's device."""
    if sinks is None:
        return
    if not isinstance(sinks, Tensor):
        raise AttentionError(f"sinks is a {type(sinks).__name__}; give a tensor of one logit per query head")
    _check_plain("sinks", sinks)
    if tuple(sinks.shape) != (q.shape[1],):
        raise AttentionError(f"sinks has shape {tuple(sinks.shape)}; give one logit per query head: ({q.shape[1]},)")
    if not sinks.is_floating_point() or sinks.device != q.device:
        raise AttentionError(f"sinks is {sinks.dtype} on {sinks.device}; give floating numbers on {q.device}")
