"""Heads for rows (`a2a`, Ulysses): neighbours exchange, so that each holds all their rows for some of the heads.

Such neighbourhoods form a ring, in which each is one member: it has one member under `a2a`, and as many as the p2p size
under `a2a+p2p`. Rows are laid in document order: a neighbourhood's rows of a document are few runs. With fewer
key/value heads than neighbours the same head goes to several, and their gradients are summed.

Large tensors go in slices of the heads: the next slice travels while one is computed. Slices that share a key/value
head send it with the first, and the sum of its gradients with the last. Around a ring of several blocks the slices take
turns, a block each; slices that share a key/value head share a ring.

The exchanged q, k, v, out and log-sum-exp are saved for backward, as many numbers as the local ones. Where the local
ones are saved instead, backward sends them along with dout; in place of out it sends its products with dout, a number
for each row and head, if the kernel takes those. So it is where the call returns the log-sum-exp, which is local too.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import gcd

import torch
from torch import Tensor

from longspan.attention.blocks import Partial, RowSum, add_block, sum_addends
from longspan.attention.call import AttendCall, Gradients, Saved
from longspan.attention.members import Members
from longspan.attention.ring import Queries, RingGradients, key_blocks, ring_backward, ring_forward
from longspan.attention.rows import (
    ALIGNED_BYTES,
    accumulation_dtype,
    copy_rows,
    head_slice_by_member,
    join_columns,
    views_by_member,
)
from longspan.comm import Addend, Handle, split_columns
from longspan.plan.messages import (
    EXCHANGE_SLICE_BYTES as SLICE_BYTES,
    EXCHANGE_SLICES as SLICES,
    HeadSplit,
    count_exchange_slices,
    count_head_groups,
    head_split,
)


class HeadSwap:
    """The exchange inside one neighbourhood of M members: (T, all heads) of the local rows for (R, some heads) of all.

    The query heads (N) are M runs, one for each member (`split`), and every run is cut into `slices` slices. Key/value
    heads are cut into fewer slices if neighbouring slices of query heads use the same one.
    """

    def __init__(self, members: Members, split: HeadSplit, slices: int) -> None:
        self.split = split
        self.slices = slices
        self._degree = split.degree
        self._shared = split.slices_per_kv_head(slices)  # slices in a row that use the same key/value head
        self.heads_of_slice: int = split.member_heads // slices
        self.members = members
        self._channel = members.inner_channel
        self._counts = members.inner_counts
        self._local_counts = (self._counts[self._channel.index],) * self._degree
        self.own_heads: slice = split.q_heads(self._channel.index)  # query heads that are computed here

    @property
    def kv_runs(self) -> list[range]:
        """The runs of slices that share key/value heads: one ring brings them to a whole run."""
        return [range(first, first + self._shared) for first in range(0, self.slices, self._shared)]

    def opens_run(self, slice_index: int) -> bool:
        """Whether a slice of query heads is the first of those that share its key/value heads."""
        return slice_index % self._shared == 0

    def closes_run(self, slice_index: int) -> bool:
        """Whether a slice of query heads is the last of those that share its key/value heads."""
        return self.opens_run(slice_index + 1)

    def tensors_to_send(self, q: Tensor, k: Tensor, v: Tensor) -> list[tuple[Tensor, ...]]:
        """Return for each slice the tensors (T, all heads) of which it sends some heads: q, k and v, or q alone where
        the slice before has brought its keys and values. Heads of k and v are repeated for the members that share them.
        """
        copies = self.split.kv_copies
        tensors = (q, *(x if copies == 1 else x.repeat_interleave(copies, 1) for x in (k, v)))
        return [tensors if self.opens_run(slice_index) else tensors[:1] for slice_index in range(self.slices)]

    def saved_of_slice(self, saved: Sequence[Saved], slice_index: int) -> Saved:
        """Return what forward saved of a slice, with the keys and values that the first slice of its run
        saved for all.
        """
        first = saved[slice_index - slice_index % self._shared]
        return saved[slice_index]._replace(k=first.k, v=first.v)

    def slice_call(self, call: AttendCall, slice_index: int) -> AttendCall:
        """Return the call for a slice of the query heads that are computed here: sinks and dropout go by head."""
        start = self.own_heads.start + slice_index * self.heads_of_slice
        return call.for_heads(start, start + self.heads_of_slice)

    def send_heads(self, tensors: Sequence[Tensor], slice_index: int, label: str) -> Handle:
        """Start sending every member its heads of this slice, side by side, of the local rows of tensors (T, N, size).

        `receive_heads` takes the handle.
        """
        rows = tensors[0].shape[0]
        degree = self._degree
        slice_views = self._slice_views(tensors, slice_index)
        widths = [x.shape[2] for x in slice_views]
        packed = tensors[0].new_empty((degree * rows, sum(widths)))
        copy_rows(list(zip(slice_views, views_by_member(packed, degree, widths), strict=True)))
        return self._channel.all_to_all_rows(packed, self._local_counts, self._counts, label)

    def _slice_views(self, tensors: Sequence[Tensor], slice_index: int) -> list[Tensor]:
        """(T, members, columns); key/value heads may be cut into fewer slices, each of which serves several slices of
        query heads."""
        return [
            head_slice_by_member(x, self._degree, cuts, slice_index * cuts // self.slices)
            for x, cuts in zip(tensors, map(self._slice_count, tensors), strict=True)
        ]

    def _slice_count(self, x: Tensor) -> int:
        if x.shape[1] == self.split.heads:
            return self.slices
        return self.slices // self._shared

    def receive_heads(self, handle: Handle, like: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Wait for what the members sent by `send_heads`: of each tensor this member's n heads of all the members' R
        rows, (R, n, size), in document order. `like` are the tensors that this member sent.
        """
        arrived = handle.wait()
        orders = self.members.arrival_orders
        in_order = arrived if orders is None else join_columns((arrived,), orders[0])
        return split_columns(
            in_order, [(x.shape[1] // (self._degree * self._slice_count(x)), x.shape[2]) for x in like]
        )

    def send_rows(self, tensors: Sequence[Tensor], label: str) -> Handle:
        """Start sending every member its rows of tensors (R, n, size) of one dtype: the way back of `receive_heads`."""
        orders = self.members.arrival_orders
        packed = join_columns(tensors, None if orders is None else orders[1])
        return self._channel.all_to_all_rows(packed, self._counts, self._local_counts, label)

    def write_rows(self, handle: Handle, into: Sequence[Tensor], slice_index: int) -> None:
        """Wait for what the members sent by `send_rows`, and write it into `into` (T, N, size): the local rows, of each
        member this slice of its heads.
        """
        slice_views = self._slice_views(into, slice_index)
        arrived = views_by_member(handle.wait(), self._degree, [x.shape[2] for x in slice_views])
        copy_rows(list(zip(arrived, slice_views, strict=True)))


_Pair = tuple[Tensor, Tensor]
_FORWARD = "attention all-to-all forward"
_BACKWARD = "attention all-to-all backward"


def a2a_forward(q: Tensor, k: Tensor, v: Tensor, members: Members, call: AttendCall) -> tuple[Tensor, list[Saved]]:
    """Attend from q (T, N, H) to k (T, K, H), v (T, K, Hv), this rank's rows of one group: out (T, N, Hv).

    What backward needs is returned slice after slice. Without neighbours to exchange heads with it is a plain ring.
    """
    if members.inner == 1:
        return ring_forward(q, k, v, members, call)
    split = head_split(q.shape[1], k.shape[1], members.inner)
    call = _gather_indices(call, members, split)
    # Alike on all members, by the one with the most rows. Under a narrow window rows are fetched in one exchange:
    # slices would have no other blocks to take turns on.
    query_numbers = max(members.part.counts) * q.shape[1] * q.shape[2]
    slices = count_exchange_slices(split, query_numbers, q.element_size(), most=SLICES, slice_bytes=SLICE_BYTES)
    swap = HeadSwap(members, split, 1 if members.has_narrow_window else slices)
    work = _SlicedForward(q, k, v, swap, call)
    _advance_rings_in_turn([work.ring_turns(run) for run in swap.kv_runs])
    out = q.new_empty((*q.shape[:2], v.shape[2]))
    for slice_index in range(swap.slices):
        swap.write_rows(work.leaving.pop(0), (out,), slice_index)
    if not call.with_lse:
        return out, work.saved
    lse = q.new_empty((*q.shape[:2], 1), dtype=accumulation_dtype(q.dtype))
    for slice_index in range(swap.slices):
        swap.write_rows(work.leaving_lse.pop(0), (lse,), slice_index)
    return out, [Saved(q, k, v, out, lse.squeeze(2))] * swap.slices


def _gather_indices(call: AttendCall, members: Members, split: HeadSplit) -> AttendCall:
    """Choices by head are repeated as key/value heads are."""
    if call.indices is None:
        return call
    channel = members.inner_channel
    counts = members.inner_counts
    columns = call.indices.flatten(1)
    gathered = channel.all_gather_rows(columns.contiguous(), counts, "attention all-to-all, indices").wait()
    parts = [
        gathered[start : start + count] for start, count in zip(channel.row_starts(counts), counts, strict=True)
    ]
    arrived = torch.cat(parts).unflatten(1, call.indices.shape[1:])
    orders = members.arrival_orders
    arrived = arrived if orders is None else arrived[orders[0]]
    if call.by_head:
        arrived = arrived.repeat_interleave(split.kv_copies, 1)
    return replace(call, indices=arrived, kv_heads=split.kv_heads * split.kv_copies)


def _advance_rings_in_turn(rings: Sequence[Iterator[None]]) -> None:
    """All members do so in this order, so that they post their messages in the same one."""
    for _ in zip(*rings, strict=True):  # strict: once the first ring ends, zip runs the others to their ends too
        pass


class _SlicedForward:
    """Forward of one call, a slice of heads at a time: receives a slice, computes it and sends its output back.

    `saved` is what backward needs of each slice. `_arriving` are the slices on their way here, `leaving` the outputs on
    their way back, and `leaving_lse` their log-sum-exps where the call returns that.
    """

    def __init__(self, q: Tensor, k: Tensor, v: Tensor, swap: HeadSwap, call: AttendCall) -> None:
        self.saved: list[Saved] = []
        self._swap = swap
        self._call = call
        self._sent = swap.tensors_to_send(q, k, v)
        self._arriving = [swap.send_heads(tensors, i, _FORWARD) for i, tensors in enumerate(self._sent)]
        self.leaving = list[Handle]()
        self.leaving_lse = list[Handle]()

    def ring_turns(self, run: range) -> Iterator[None]:
        """Run the ring of slices that share keys and values: a turn for each block, in which all slices attend to it.

        A slice is received right before its first block; only the first of the run brings keys and values. After its
        last block its output is on the way back (`leaving`) and `saved` has it. Yields between turns.
        """
        members = self._swap.members
        first_q, own_k, own_v = self._receive_slice(run.start)
        blocks = key_blocks(own_k, own_v, members)
        # Each slice has its queries, the sum of their blocks, and its call.
        totals = list[tuple[Tensor, Partial, AttendCall]]()
        for turn in range(members.turns):
            launches, k, v = next(blocks)
            for slice_index in run:
                if turn == 0:
                    arrived_q = first_q if slice_index == run.start else self._receive_slice(slice_index)[0]
                    total = Partial(arrived_q, v.shape[2])
                    totals.append((arrived_q, total, self._swap.slice_call(self._call, slice_index)))
                q, total, slice_call = totals[slice_index - run.start]
                add_block(total, q, k, v, launches, slice_call)
                if turn + 1 == members.turns:
                    total_out, lse = total.result_with_sinks(slice_call.sinks)
                    out = total_out.to(q.dtype)
                    self.leaving.append(self._swap.send_rows((out,), f"{_FORWARD}, back"))
                    if self._call.with_lse:
                        label = f"{_FORWARD}, log-sum-exp back"
                        self.leaving_lse.append(self._swap.send_rows((lse.unsqueeze(2),), label))
                    self.saved.append(Saved(q, own_k, own_v, out, lse))
                    own_k = own_v = q.new_empty(0)  # the other slices of the run save no keys and values
            if turn + 1 < members.turns:
                yield

    def _receive_slice(self, slice_index: int) -> tuple[Tensor, ...]:
        """(q,), or (q, k, v) of the first slice in its run."""
        return self._swap.receive_heads(self._arriving.pop(0), self._sent[slice_index])


def a2a_backward(dout: Tensor, saved: Sequence[Saved], members: Members, call: AttendCall) -> Gradients:
    """Return the gradients of the local rows.

    Around a ring of several members the slices of heads take turns. Turns hold the float32 sums of all slices; where
    these are too large, slices are computed one after another, and only the next one is in flight.
    """
    if members.inner == 1:
        return ring_backward(dout, saved, members, call)
    split = head_split(dout.shape[1], call.kv_heads, members.inner)
    call = _gather_indices(call, members, split)
    swap = HeadSwap(members, split, len(saved))
    # A complete dk or dv may travel in the input's dtype; the parts that copies of a head give are still to be summed.
    kv_dtype = dout.dtype if split.kv_copies == 1 else accumulation_dtype(dout.dtype)
    query_numbers = max(members.part.counts) * members.inner * split.member_heads * saved[0].q.shape[2]
    one_by_one = count_head_groups(4 * query_numbers, swap.slices) > 1  # 4 bytes: sums are float32
    work = _SlicedBackward(dout, saved, swap, call, kv_dtype, in_flight=1 if one_by_one else swap.slices)
    if members.degree > 1 and swap.slices > 1 and not one_by_one:
        _advance_rings_in_turn([work.ring_turns(run) for run in swap.kv_runs])
    else:
        for slice_index in range(swap.slices):
            work.compute_slice(slice_index)
    dq, dk, dv = work.receive_gradients()
    if split.kv_copies > 1:
        dk, dv = (x.unflatten(1, (split.kv_heads, split.kv_copies)).sum(2) for x in (dk, dv))
    return Gradients(dq, dk, dv, work.sink_gradients())


class _SlicedBackward:
    """Backward of one call, a slice of heads at a time: receives a slice, computes it and sends its gradients back.

    `in_flight` slices of heads are sent first: dout and, where the local q, k, v and out were saved, these too. With a
    kernel that takes deltas (dout · out of each row) these travel in place of the output, which is larger.
    `_leaving` are the gradients on their way, as (index of the slice, which of dq, dk and dv, handle).
    """

    def __init__(
        self,
        dout: Tensor,
        saved: Sequence[Saved],
        swap: HeadSwap,
        call: AttendCall,
        kv_dtype: torch.dtype,
        *,
        in_flight: int,
    ) -> None:
        self._leaving: list[tuple[int, slice, Handle]] = []
        # dq, dk and dv of the local rows, once the first slices have arrived
        self._received: tuple[Tensor, ...] = ()
        self._dout = dout
        self._saved = saved
        self._swap = swap
        self._call = call
        self._kv_dtype = kv_dtype
        self._is_local = saved[0].q.shape[1] == swap.split.heads  # forward saved the own rows with all heads
        self._sent: list[tuple[Tensor, ...]] = [(dout,)] * swap.slices
        self._takes_deltas = call.kernel is not None and call.kernel.takes_deltas(call)
        if self._is_local:
            q, k, v, out, lse = saved[0]
            output_or_deltas = (
                pack_numbers_as_heads(saved[0].deltas(dout), dout.dtype, swap.heads_of_slice)
                if self._takes_deltas
                else out
            )
            of_lse = (pack_numbers_as_heads(lse, dout.dtype, swap.heads_of_slice),) if call.with_lse else ()
            self._sent = [(*tensors, dout, output_or_deltas, *of_lse) for tensors in swap.tensors_to_send(q, k, v)]
        self._in_flight = in_flight
        self._arriving = list[Handle]()
        for slice_index in range(min(in_flight, swap.slices)):
            self._send_output_gradients(slice_index)
        # The first of the slices that share keys and values brings them.
        self._shared_kv: tuple[Tensor, ...] = ()
        self._dsinks: dict[int, Tensor | None] = {}
        # dk and dv of each slice so far that shares the current keys and values
        self._kv_addends: list[Addend] = []

    def compute_slice(self, slice_index: int) -> None:
        """Compute one slice with a ring of its own, send its gradients back, and keep dk and dv for the slices that
        share them.
        """
        swap = self._swap
        queries = self._receive_queries(slice_index)
        slice_gradients = ring_backward(queries.dout, [queries.saved], swap.members, queries.call)
        self._dsinks[slice_index] = slice_gradients.sinks
        gradients = [slice_gradients.q.to(self._dout.dtype)]
        self._kv_addends.append(Addend(slice(0, len(slice_gradients.k)), (slice_gradients.k, slice_gradients.v)))
        if swap.closes_run(slice_index):
            k, v = queries.saved.k, queries.saved.v
            gradients += [x.to(self._kv_dtype) for x in sum_addends(self._kv_addends, k, v)]
            self._kv_addends.clear()
        if self._in_flight < swap.slices:  # memory is short: those of the slice before have travelled meanwhile
            self.receive_gradients()
        messages = [slice(0, 1)]  # dq alone
        if swap.closes_run(slice_index):
            # dk and dv leave with the last slice that shares them. A message has one dtype: where heads have copies,
            # these two are in the accumulation dtype, and leave in one of their own.
            messages = [slice(0, 3)] if swap.split.kv_copies == 1 else [slice(0, 1), slice(1, 3)]
        for gradient_slice in messages:
            self._send_gradients(slice_index, gradient_slice, gradients[gradient_slice])

    def ring_turns(self, run: range) -> Iterator[None]:
        """Run the ring of slices that share keys and values; yields after each turn, so that other rings advance too.

        Work on the own block waits for nobody, so it fills gaps: that of the first half of all slices is done before
        the first block arrives, that of the others while the last gradients travel.
        """
        queries = list[Queries]()
        own_pairs = list[_Pair]()
        if self._is_local:  # keys and values arrive with the first queries; exchanged ones are at hand
            queries.append(self._receive_queries(run.start))
        first_saved = queries[0].saved if queries else self._swap.saved_of_slice(self._saved, run.start)
        ring = RingGradients(first_saved.k, first_saved.v, self._swap.members)
        early = [index for index in run if 2 * index < self._swap.slices]
        for slice_index in run:
            if slice_index >= run.start + len(queries):  # not received yet
                queries.append(self._receive_queries(slice_index))
            if slice_index in early:
                own_pairs.append(ring.own_block_gradients(queries[-1]))
        for _ in range(1, self._swap.members.degree):
            yield
            ring.compute_next_block(queries)
        self._send_query_gradients(early, queries[: len(early)])
        yield
        own_pairs += [ring.own_block_gradients(later_queries) for later_queries in queries[len(early) :]]
        self._send_query_gradients(run[len(early) :], queries[len(early) :])
        yield
        self._send_gradients(run[-1], slice(1, 3), [x.to(self._kv_dtype) for x in ring.finish(own_pairs)])

    def receive_gradients(self) -> tuple[Tensor, ...]:
        """Wait for all gradients on their way, and return dq, dk and dv (T, heads, size) of the local rows, with every
        copy of a key/value head.

        They are complete once all slices were sent; before, heads that are not here yet hold anything.
        """
        if not self._received and self._leaving:
            dout = self._dout
            saved = self._saved[0]
            split = self._swap.split
            shapes = [(len(dout), split.kv_heads * split.kv_copies, x.shape[2]) for x in (saved.k, saved.v)]
            dk, dv = (dout.new_empty(shape, dtype=self._kv_dtype) for shape in shapes)
            self._received = dout.new_empty((len(dout), split.heads, saved.q.shape[2])), dk, dv
        for slice_index, gradient_slice, handle in self._leaving:
            self._swap.write_rows(handle, self._received[gradient_slice], slice_index)
        self._leaving.clear()
        return self._received

    def sink_gradients(self) -> Tensor | None:
        """Return the sinks' gradient (N,) over the rows of this neighbourhood."""
        dsinks = [x for _, x in sorted(self._dsinks.items()) if x is not None]
        if not dsinks:
            return None
        all_heads = dsinks[0].new_zeros(self._swap.split.heads)
        all_heads[self._swap.own_heads] = torch.cat(dsinks)
        return all_heads

    def _send_output_gradients(self, slice_index: int) -> None:
        self._arriving.append(self._swap.send_heads(self._sent[slice_index], slice_index, _BACKWARD))

    def _receive_queries(self, slice_index: int) -> Queries:
        """The slice after those in flight is sent, to travel while this one is computed."""
        swap = self._swap
        arrived = swap.receive_heads(self._arriving.pop(0), self._sent[slice_index])
        if slice_index + self._in_flight < swap.slices:
            self._send_output_gradients(slice_index + self._in_flight)
        if self._is_local:
            # k and v come only with the first of the slices that share them; `out` may be the packed deltas
            *arrived, lse = (
                (*arrived[:-1], unpack_numbers(arrived[-1]))
                if self._call.with_lse
                else (*arrived, self._saved[slice_index].lse)
            )
            q, *kv, dout, out = arrived
            k, v = self._shared_kv = tuple(kv) or self._shared_kv
            saved = Saved(q, k, v, unpack_numbers(out) if self._takes_deltas else out, lse)
        else:
            (dout,) = arrived
            saved = swap.saved_of_slice(self._saved, slice_index)
        return Queries(dout, saved, swap.slice_call(self._call, slice_index), RowSum(saved.q))

    def _send_query_gradients(self, indices: Sequence[int], queries: Sequence[Queries]) -> None:
        for slice_index, slice_queries in zip(indices, queries, strict=True):
            dq, self._dsinks[slice_index] = slice_queries.gradients()
            self._send_gradients(slice_index, slice(0, 1), [dq.to(self._dout.dtype)])

    def _send_gradients(self, slice_index: int, gradient_slice: slice, gradients: Sequence[Tensor]) -> None:
        self._leaving.append(
            (slice_index, gradient_slice, self._swap.send_rows(gradients, f"{_BACKWARD}, gradients"))
        )


def pack_numbers_as_heads(numbers: Tensor, dtype: torch.dtype, heads_of_slice: int) -> Tensor:
    """View numbers of rows and heads (T, N) bit by bit as heads (T, N, size) of `dtype`, to travel with such heads.

    Behind each number come zeros, so many that the numbers of a slice of `heads_of_slice` heads take a multiple of 16
    bytes: kernels want rows at such addresses.
    """
    aligned = ALIGNED_BYTES // numbers.itemsize
    wide = numbers.new_zeros((*numbers.shape, aligned // gcd(aligned, heads_of_slice)))
    wide[..., 0] = numbers
    return wide.view(dtype)


def unpack_numbers(heads: Tensor) -> Tensor:
    """Return the numbers (R, n) that `pack_numbers_as_heads` made these heads of, in the accumulation dtype."""
    return (
        heads.clone(memory_format=torch.contiguous_format)
        .view(accumulation_dtype(heads.dtype))[..., 0]
        .contiguous()
    )
