"""Heads for rows (`a2a`, Ulysses): neighbours exchange, so that each holds all their rows for some of the heads.

What is computed in between is a ring of such neighbourhoods: of one block under `a2a`, where the neighbours are the
whole group, and of `p2p` blocks under `a2a+p2p`, where they are the first level. Rows are laid in document order, so
that a neighbourhood's rows of a document are few runs, under zigzag two.

Query heads are split in equal numbers. With fewer key/value heads than neighbours, the same head
goes to several, and their gradients are summed.

Large tensors go in slices of the heads: the next slice travels while one is computed, and the results of one while the
next is. Slices that share a key/value head send it with the first, and the sum of its gradients with the last.

The exchanged q, k, v, out and log-sum-exp are saved for backward, as many numbers as the local ones, which backward
does not need. Forward sends q, k, v and out, backward dout and the gradients.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import gcd

import torch
from torch import Tensor

from longspan.attention.call import AttendCall, Gradients, Saved, sum_addends
from longspan.attention.members import Members
from longspan.attention.ring import ring_backward, ring_forward
from longspan.attention.rows import accumulation_dtype, copy_rows, head_views, join_columns, member_views
from longspan.comm import Addend, Handle, split_columns
from longspan.plan.cost.attention_price import EXCHANGE_SLICE_BYTES, EXCHANGE_SLICES


@dataclass(frozen=True)
class HeadSplit:
    """`heads` query and `kv_heads` key/value heads for `degree` members, which divides the query heads.

    A member computes `member_heads` query heads, in `member_kv_heads` equally long runs that use one key/value head
    each, the only sharing that kernels have. Where members cut through the queries of a key/value head, or where runs
    would differ in length, every key/value head is sent `kv_copies` times, one after another. Member 1 of this example
    computes heads 2 and 3, which use key/value heads 0 and 1:

    >>> split = HeadSplit(heads=12, kv_heads=4, degree=6)
    >>> split.member_heads, split.member_kv_heads, split.kv_copies
    (2, 2, 3)
    """

    heads: int
    kv_heads: int
    degree: int

    @cached_property
    def member_heads(self) -> int:
        """Query heads of a member."""
        return self.heads // self.degree

    @cached_property
    def member_kv_heads(self) -> int:
        """Key/value heads that a member receives."""
        return self.member_heads // gcd(self.heads // self.kv_heads, self.member_heads)

    @cached_property
    def kv_copies(self) -> int:
        """How often every key/value head is sent."""
        return self.degree * self.member_kv_heads // self.kv_heads

    def q_heads(self, member: int) -> slice:
        """The member's query heads."""
        return slice(member * self.member_heads, (member + 1) * self.member_heads)

    def slices(self, at_most: int) -> int:
        """Into how many equal slices, at most so many, the query heads of every member can be cut.

        >>> HeadSplit(heads=32, kv_heads=8, degree=4).slices(2), HeadSplit(heads=32, kv_heads=8, degree=8).slices(2)
        (2, 2)

        A slice is one or more whole runs, or a part of one: its key/value head is then that of other slices as well.
        """
        return next(n for n in range(min(at_most, self.member_heads), 0, -1) if self._cuts_evenly(n))

    def slices_per_kv_head(self, slices: int) -> int:
        """How many of so many slices use the same key/value head."""
        return max(1, slices // self.member_kv_heads)

    def _cuts_evenly(self, slices: int) -> bool:
        return self.member_kv_heads % slices == 0 or (
            slices % self.member_kv_heads == 0 and self.member_heads % slices == 0
        )


head_split = cache(HeadSplit)  # worked out once


SLICES, SLICE_BYTES = EXCHANGE_SLICES, EXCHANGE_SLICE_BYTES  # as they are priced


def a2a_forward(q: Tensor, k: Tensor, v: Tensor, members: Members, call: AttendCall) -> tuple[Tensor, list[Saved]]:
    """q (T, N, H), k (T, K, H), v (T, K, Hv) of one group's local rows; what is saved is of one slice after another."""
    if members.inner == 1:
        return ring_forward(q, k, v, members, call)
    split = head_split(q.shape[1], k.shape[1], members.inner)
    swap, label = _Swap(members, split, _slices(members, split, q)), "attention all-to-all forward"
    copied = (q, *(x if split.kv_copies == 1 else x.repeat_interleave(split.kv_copies, 1) for x in (k, v)))
    sent = [copied if swap.begins(slice_index) else copied[:1] for slice_index in range(swap.slices)]
    arriving = [swap.send_heads(tensors, slice_index, label) for slice_index, tensors in enumerate(sent)]
    leaving, saved, keys = list[Handle](), list[Saved](), list[Tensor]()
    for slice_index, tensors in enumerate(sent):
        q_all, *of_keys = swap.receive_heads(arriving.pop(0), tensors)
        keys = of_keys or keys
        out, (exchanged,) = ring_forward(q_all, keys[0], keys[1], members, swap.slice_call(call, slice_index))
        out = out.to(q.dtype)
        leaving.append(swap.send_rows((out,), f"{label}, back"))
        # Slices that share keys and values save them with the first.
        none = {} if swap.begins(slice_index) else {"k": k.new_empty(0), "v": v.new_empty(0)}
        saved.append(exchanged._replace(out=out, **none))
    out = q.new_empty((*q.shape[:2], v.shape[2]))
    for slice_index in range(swap.slices):
        swap.write_rows(leaving.pop(0), (out,), slice_index)
    return out, saved


def a2a_backward(dout: Tensor, saved: Sequence[Saved], members: Members, call: AttendCall) -> Gradients:
    """Gradients of the local rows."""
    if members.inner == 1:
        return ring_backward(dout, saved, members, call)
    split = head_split(dout.shape[1], call.kv_heads, members.inner)
    swap, label = _Swap(members, split, len(saved)), "attention all-to-all backward"
    arriving = [swap.send_heads((dout,), slice_index, label) for slice_index in range(swap.slices)]
    # Sums over all queries of a head are as exact in the input's dtype; those of one copy of it are not.
    kv_dtype = dout.dtype if split.kv_copies == 1 else accumulation_dtype(dout.dtype)
    leaving, sinks, of_keys = list[Handle](), list[Tensor](), list[Addend]()
    for slice_index in range(swap.slices):
        (dout_all,) = swap.receive_heads(arriving.pop(0), (dout,))
        exchanged = swap.slice_saved(saved, slice_index)
        inside = ring_backward(dout_all, [exchanged], members, swap.slice_call(call, slice_index))
        gradients = [inside.q.to(dout.dtype)]
        of_keys.append(Addend(slice(0, len(inside.k)), (inside.k, inside.v)))
        if swap.ends(slice_index):
            gradients += [x.to(kv_dtype) for x in sum_addends(of_keys, exchanged.k, exchanged.v)]
            of_keys.clear()
        leaving += [swap.send_rows(gradients[some], f"{label}, gradients") for some in swap.messages(slice_index)]
        sinks += [] if inside.sinks is None else [inside.sinks]
        del inside, dout_all, gradients
    dq, dk, dv = totals = _totals(dout, saved[0], split, kv_dtype)
    for slice_index in range(swap.slices):
        for some in swap.messages(slice_index):
            swap.write_rows(leaving.pop(0), totals[some], slice_index)
    if split.kv_copies > 1:
        dk, dv = (x.unflatten(1, (split.kv_heads, split.kv_copies)).sum(2) for x in (dk, dv))
    return Gradients(dq, dk, dv, swap.place_heads(torch.cat(sinks)) if sinks else None)


def _slices(members: Members, split: HeadSplit, q: Tensor) -> int:
    """The same on every member: by the most rows that one holds."""
    worth = max(members.part.counts) * q.shape[1] * q.shape[2] * q.element_size() // max(1, SLICE_BYTES)
    return split.slices(min(worth, SLICES)) if worth > 1 and members.degree == 1 else 1


def _totals(dout: Tensor, saved: Saved, split: HeadSplit, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Where the gradients of q, k and v go: (T, dealt heads, size), those of k and v in `dtype`."""
    kv_heads = split.kv_heads * split.kv_copies
    return (
        dout.new_empty((len(dout), split.heads, saved.q.shape[2])),
        dout.new_empty((len(dout), kv_heads, saved.k.shape[2]), dtype=dtype),
        dout.new_empty((len(dout), kv_heads, saved.v.shape[2]), dtype=dtype),
    )


class _Swap:
    """The exchange inside one neighbourhood of M members: (T, all heads) of the local rows for (R, some heads) of all.

    Heads (N) are M runs of those that a member computes, each cut into `slices` slices; key/value heads into fewer,
    where several slices that follow each other use the same.
    """

    def __init__(self, members: Members, split: HeadSplit, slices: int) -> None:
        self.split, self.slices, self._degree = split, slices, split.degree
        self._shared = split.slices_per_kv_head(slices)
        self._members, self._channel, self._counts = members, members.inner_channel, members.inner_counts
        self._me = self._channel.index
        self._local_counts = (self._counts[self._me],) * self._degree

    def begins(self, slice_index: int) -> bool:
        """Whether a slice is the first with its key/value heads."""
        return slice_index % self._shared == 0

    def ends(self, slice_index: int) -> bool:
        """Whether it is the last with them."""
        return self.begins(slice_index + 1)

    def slice_saved(self, saved: Sequence[Saved], slice_index: int) -> Saved:
        """What is saved of a slice, with its keys and values."""
        first = saved[slice_index - slice_index % self._shared]
        return saved[slice_index]._replace(k=first.k, v=first.v)

    def messages(self, slice_index: int) -> list[slice]:
        """Which of dq, dk and dv leave together once a slice is computed: of one dtype where no head has copies."""
        if not self.ends(slice_index):
            return [slice(0, 1)]
        return [slice(0, 3)] if self.split.kv_copies == 1 else [slice(0, 1), slice(1, 3)]

    def slice_call(self, call: AttendCall, slice_index: int) -> AttendCall:
        """The call for the query heads of a slice that are computed here."""
        count = self.split.member_heads // self.slices
        start = self.split.q_heads(self._me).start + slice_index * count
        return call.for_heads(start, start + count)

    def place_heads(self, x: Tensor) -> Tensor:
        """What belongs to the query heads computed here, among those of all: (N,), zero elsewhere."""
        of_all = x.new_zeros(self.split.heads)
        of_all[self.split.q_heads(self._me)] = x
        return of_all

    def send_heads(self, tensors: Sequence[Tensor], slice_index: int, label: str) -> Handle:
        """Start sending a slice of the heads of tensors (T, N, size), to every member its own."""
        rows, degree = tensors[0].shape[0], self._degree
        places = self._places(tensors, slice_index)
        widths = [x.shape[2] for x in places]
        packed = tensors[0].new_empty((degree * rows, sum(widths)))
        copy_rows(list(zip(places, member_views(packed, degree, widths), strict=True)))
        return self._channel.all_to_all_rows(packed, self._local_counts, self._counts, label)

    def _places(self, tensors: Sequence[Tensor], slice_index: int) -> list[Tensor]:
        """Where this slice of every member's heads lies in tensors (T, N, size)."""
        return [
            head_views(x, self._degree, cuts, slice_index * cuts // self.slices)
            for x, cuts in zip(tensors, map(self._cuts, tensors), strict=True)
        ]

    def _cuts(self, x: Tensor) -> int:
        """Into how many slices a member's heads of x (T, N, size) are cut: query heads, or key/value heads."""
        return self.slices if x.shape[1] == self.split.heads else self.slices // self._shared

    def receive_heads(self, handle: Handle, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """What arrives of `send_heads`: (R, n, size) of all rows in document order, for tensors like those sent."""
        arrived, orders = handle.wait(), self._members.orders
        in_order = arrived if orders is None else join_columns((arrived,), orders[0])
        return split_columns(in_order, [(x.shape[1] // (self._degree * self._cuts(x)), x.shape[2]) for x in like])

    def send_rows(self, tensors: Sequence[Tensor], label: str) -> Handle:
        """Start sending tensors (R, n, size) of one dtype, to every member its rows."""
        orders = self._members.orders
        packed = join_columns(tensors, None if orders is None else orders[1])
        return self._channel.all_to_all_rows(packed, self._counts, self._local_counts, label)

    def write_rows(self, handle: Handle, into: Sequence[Tensor], slice_index: int) -> None:
        """Wait for the rows of `send_rows`, and write them to this slice of every head group of `into` (T, N, size)."""
        places = self._places(into, slice_index)
        arrived = member_views(handle.wait(), self._degree, [x.shape[2] for x in places])
        copy_rows(list(zip(arrived, places, strict=True)))
