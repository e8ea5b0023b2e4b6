"""Attention over gathered keys and values (`all_gather`): every member receives all rows of its group at once.

Gathered rows are laid in document order, so that a local run of query rows sees one prefix of its document. Backward
gathers again instead of keeping the rows, and sums the gradients of keys and values with a reduce-scatter.

Under a byte budget this is done for a few key/value heads at a time, with the query heads that use them: the next
heads are gathered, and the gradients of those before summed, while the current ones are computed.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longspan.attention.block import Rule, add_block, add_block_gradients
from longspan.attention.circle import Circle
from longspan.attention.merge import Partial, RowSum, accumulation_dtype
from longspan.comm import Handle

_Pair = tuple[Tensor, Tensor]


class HeadSlice(NamedTuple):
    """Key/value heads that are gathered together, and the query heads that use them."""

    kv: slice
    q: slice


def gather_bytes_per_head(rows: int, k: Tensor, v: Tensor) -> int:
    """What one key/value head of a group of this many rows takes at the fullest moment, which is in backward.

    Its keys and values twice (as they arrive and in document order), and three times their gradients in the
    accumulation dtype (in document order, and those of the head before by member, as they leave and arrive).
    """
    width = rows * (k.shape[2] + v.shape[2])
    return width * (2 * k.element_size() + 3 * accumulation_dtype(k.dtype).itemsize)


def head_slices(q: Tensor, k: Tensor, v: Tensor, rows: int, budget: int | None) -> list[HeadSlice]:
    """Slices of equal numbers of heads (the last may have fewer) that fit the budget; at least one head each."""
    heads, kv_heads = q.shape[1], k.shape[1]
    fit = kv_heads if budget is None else budget // max(1, gather_bytes_per_head(rows, k, v))
    at_once, each = max(1, min(fit, kv_heads)), heads // kv_heads
    bounds = [(start, min(start + at_once, kv_heads)) for start in range(0, kv_heads, at_once)]
    return [HeadSlice(slice(a, b), slice(a * each, b * each)) for a, b in bounds]


def all_gather_forward(q: Tensor, k: Tensor, v: Tensor, circle: Circle, rule: Rule) -> tuple[Tensor, Tensor]:
    """q (T, N, H), k (T, K, H), v (T, K, Hv) of one group's local rows -> out (T, N, Hv), lse (T, N)."""
    slices = head_slices(q, k, v, sum(circle.counts), rule.max_gather_bytes)
    found: list[_Pair] = []
    for heads, (all_k, all_v) in _gathered(circle, (k, v), slices, "attention all-gather forward"):
        q_part, part = q[:, heads.q], rule.for_heads(heads.q.start, heads.q.stop)
        total = Partial(q_part.shape[0], q_part.shape[1], v.shape[2], like=q)
        add_block(total, q_part, all_k, all_v, circle.launches(None), part)
        found.append(part.finish(total))
        del all_k, all_v
    out, lse = (_joined(parts) for parts in zip(*found, strict=True))
    return out, lse


def all_gather_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, circle: Circle, rule: Rule
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k, v in the accumulation dtype; those of k and v are summed over the group."""
    slices = head_slices(q, k, v, sum(circle.counts), rule.max_gather_bytes)
    dq_parts, home = list[Tensor](), _Home(circle)
    for heads, (all_k, all_v) in _gathered(circle, (k, v), slices, "attention all-gather backward"):
        saved = (dout[:, heads.q], q[:, heads.q], out[:, heads.q], lse[:, heads.q])
        dq, part = RowSum(tuple(saved[1].shape), q), rule.for_heads(heads.q.start, heads.q.stop)
        home.send(add_block_gradients(dq, saved, all_k, all_v, circle.launches(None), part))
        dq_parts.append(dq.result())
        del all_k, all_v
    dk, dv = home.finish()
    return _joined(dq_parts), dk, dv


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts), 1)


def _gathered(
    circle: Circle, tensors: _Pair, slices: Sequence[HeadSlice], what: str
) -> Iterator[tuple[HeadSlice, _Pair]]:
    """(heads, their keys and values of all rows of the group in document order); the next slice is on its way."""
    channel, places = circle.channel(), circle.places_of_members()

    def start(heads: HeadSlice) -> list[Handle]:
        return [channel.all_gather(x[:, heads.kv].contiguous(), circle.counts, what) for x in tensors]

    def in_order(x: Tensor, heads: HeadSlice, handle: Handle) -> Tensor:
        full = x.new_empty((sum(circle.counts), heads.kv.stop - heads.kv.start, x.shape[2]))
        for rows, share in zip(places, handle.wait(), strict=True):
            full.index_copy_(0, rows, share)
        return full

    started = start(slices[0])
    for i, heads in enumerate(slices):
        k, v = (in_order(x, heads, started.pop(0)) for x in tensors)
        started = start(slices[i + 1]) if i + 1 < len(slices) else []
        yield heads, (k, v)
        del k, v


class _Home:
    """Sums each slice's gradients over the members, to each its own rows, while the next slice is computed."""

    def __init__(self, circle: Circle) -> None:
        self._channel, self._places = circle.channel(), circle.places_of_members()
        self._started: list[Handle] = []
        self._done: list[list[Tensor]] = []

    def send(self, gradients: _Pair) -> None:
        """Start with the gradients of all rows, each (S, heads, …), after the slice before has arrived."""
        self._collect()
        what = "attention all-gather backward, gradients"
        by_member = [[x[rows] for rows in self._places] for x in gradients]
        self._started = [self._channel.reduce_scatter(parts, what) for parts in by_member]

    def finish(self) -> _Pair:
        """The summed gradients of the own rows, of all heads."""
        self._collect()
        dk, dv = (_joined(parts) for parts in zip(*self._done, strict=True))
        return dk, dv

    def _collect(self) -> None:
        if self._started:
            self._done.append([handle.wait() for handle in self._started])
            self._started = []
