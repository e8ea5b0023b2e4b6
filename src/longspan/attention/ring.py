"""Attention around a ring (`p2p`): key/value blocks travel, queries stay.

While a block is computed the next is in flight; two or three blocks are held at a time, whatever the degree. Backward
walks the ring again instead of keeping the blocks, and each block's gradient travels behind it, home to its owner.

What no query sees is not computed. Under a window, or chunks, narrow against the documents it is not sent either: a
member's runs of rows need at most window − 1 rows before each, which come straight from their owners in one exchange
and are laid with the member's own rows in document order; their gradients go straight back. A ring could not leave out
much: in zigzag order one of the two neighbours whose rows are seen comes last in it.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from longspan.attention.blocks import (
    Partial,
    RowSum,
    add_block,
    backward_head_groups,
    block_gradients,
    sink_gradient,
    sum_addends,
)
from longspan.attention.call import AttendCall, Gradients, Saved
from longspan.attention.members import Members
from longspan.attention.rows import accumulation_dtype, add_addends, concat_heads, join_columns
from longspan.attention.tiles import Launch
from longspan.comm import Addend, GradientRing, RingBlocks, split_columns

# A block whose gradients are larger is worth one more launch to hide its message (H200).
HALVES_BYTES = 48 << 20
KeyBlock = tuple[tuple[Launch, ...], Tensor, Tensor]


class Queries(NamedTuple):
    """Some query heads in backward: their dout, what forward saved of them, their call, and the sum `dq` of their
    gradient, to which each block adds.
    """

    dout: Tensor
    saved: Saved
    call: AttendCall
    dq: RowSum

    def gradients(self) -> tuple[Tensor, Tensor | None]:
        """Return dq and the gradient of these heads' sinks (None: there are none), once every block was added."""
        return self.dq.result(), sink_gradient(self.dout, self.saved, self.call.sinks)


def key_blocks(k: Tensor, v: Tensor, members: Members) -> Iterator[KeyBlock]:
    """Yield the launches, k and v of each of `members.turns` blocks: what this member's rows see of all members' rows.

    The next block is in flight. A block is valid until the next is asked for.
    """
    if members.has_narrow_window:
        seen_k, seen_v = _fetch_rows(members, (k, v), "attention window rows forward")
        yield members.window_rows.launches, seen_k, seen_v
    elif members.degree == 1:
        yield members.launches(0), k, v
    else:
        for owner, (block_k, block_v) in RingBlocks(
            members.channel, (k, v), members.counts, "attention ring forward"
        ):
            yield members.launches(owner), block_k, block_v


def ring_forward(q: Tensor, k: Tensor, v: Tensor, members: Members, call: AttendCall) -> tuple[Tensor, list[Saved]]:
    """Attend from q (T, N, H) to k (T, K, H), v (T, K, Hv), all of this member's rows."""
    total = Partial(q, v.shape[2])
    for launches, block_k, block_v in key_blocks(k, v, members):
        add_block(total, q, block_k, block_v, launches, call)
    out, lse = total.result_with_sinks(call.sinks)
    return out, [Saved(q, k, v, out, lse)]


def ring_backward(dout: Tensor, saved_slices: Sequence[Saved], members: Members, call: AttendCall) -> Gradients:
    """Return the gradients of this member's rows.

    Large queries go in groups of heads, each with a ring of its own: only one group's gradient is held in float32.
    """
    (saved,) = saved_slices
    groups = backward_head_groups(max(members.counts), saved.q, saved.k.shape[1])
    if len(groups) == 1:
        return _backward_of_head_slice(dout, saved, members, call)
    dq = saved.q.new_empty(saved.q.shape)
    group_gradients = list[Gradients]()
    for kv_heads, heads in groups:
        group_saved = Saved(
            saved.q[:, heads],
            saved.k[:, kv_heads].contiguous(),
            saved.v[:, kv_heads].contiguous(),
            saved.out[:, heads],
            saved.lse[:, heads],
        )
        group_call = call.for_heads(heads.start, heads.stop)
        gradients = _backward_of_head_slice(dout[:, heads], group_saved, members, group_call)
        dq[:, heads] = gradients.q
        group_gradients.append(gradients._replace(q=dq))  # so that no group's dq in float32 is kept
    dk, dv = (concat_heads([getattr(gradients, name) for gradients in group_gradients]) for name in "kv")
    dsinks = [gradients.sinks for gradients in group_gradients if gradients.sinks is not None]
    return Gradients(dq, dk, dv, torch.cat(dsinks) if dsinks else None)


def _backward_of_head_slice(dout: Tensor, saved: Saved, members: Members, call: AttendCall) -> Gradients:
    """Around the ring, computing the own block, which waits for no one, hides the first and the last message."""
    queries = Queries(dout, saved, call, RowSum(saved.q))
    if members.has_narrow_window:
        k, v = _fetch_rows(members, (saved.k, saved.v), "attention window rows backward")
        block = saved._replace(k=k, v=v)
        addends = block_gradients(queries.dq, dout, block, members.window_rows.launches, call)
        dk, dv = _send_gradients_back(members, sum_addends(addends, k, v))
    elif members.degree == 1:
        addends = block_gradients(queries.dq, dout, saved, members.launches(0), call)
        dk, dv = sum_addends(addends, saved.k, saved.v)
    else:
        ring = RingGradients(saved.k, saved.v, members)
        rows, kv_heads, head_dim = saved.k.shape
        # Where messages are large, the first half hides the first one, the second the last. They are in float32.
        is_large = rows * kv_heads * (head_dim + saved.v.shape[2]) * 4 >= HALVES_BYTES
        first_heads = kv_heads // 2 if is_large and kv_heads > 1 else kv_heads
        own_pairs = [_own_block_gradients(queries, members, slice(0, first_heads))]
        for _ in range(1, members.degree):
            ring.compute_next_block([queries])
        if first_heads < kv_heads:
            own_pairs.append(_own_block_gradients(queries, members, slice(first_heads, kv_heads)))
        own_dk, own_dv = zip(*own_pairs, strict=True)
        dk, dv = ring.finish([(concat_heads(own_dk), concat_heads(own_dv))])
    dq, dsinks = queries.gradients()
    return Gradients(dq, dk, dv, dsinks)


class RingGradients:
    """Backward around a ring, a block at a time, so that rings of several slices of heads can take turns.

    `k` and `v` are this member's, of one slice of key/value heads. Call `compute_next_block` for each other member,
    then `finish` with what `own_block_gradients` gives for the own block, which may be computed at any time.
    """

    def __init__(self, k: Tensor, v: Tensor, members: Members) -> None:
        channel = members.channel
        keys = (k, v)
        dtype = accumulation_dtype(k.dtype)
        label = "attention ring backward, gradients"
        self._members = members
        self._sums = GradientRing(channel, keys, members.counts, label, add=add_addends, dtype=dtype)
        self._blocks = iter(RingBlocks(channel, keys, members.counts, "attention ring backward"))
        next(self._blocks)  # the own block: the first of another member is on its way

    def compute_next_block(self, queries: Sequence[Queries]) -> None:
        """Receive the next member's block, add to the dq of all `queries`, and send the sums of its dk and dv on behind
        it.
        """
        owner, (k, v) = next(self._blocks)
        launches = self._members.launches(owner)
        addends = list[Addend]()
        for dout, saved, call, dq in queries:
            addends += block_gradients(dq, dout, saved._replace(k=k, v=v), launches, call)
        self._sums.add(owner, addends)

    def own_block_gradients(self, queries: Queries) -> tuple[Tensor, Tensor]:
        """Return dk and dv of the own block, whose part of dq is added to `queries`; it may be called at any time."""
        return _own_block_gradients(queries, self._members, slice(0, queries.saved.k.shape[1]))

    def finish(self, own_pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return this member's dk and dv, summed over all members; the own block's, `own_pairs`, are added last."""
        dk, dv = self._sums.finish([Addend(slice(0, len(pair[0])), pair) for pair in own_pairs])
        return dk, dv


def _own_block_gradients(queries: Queries, members: Members, kv_heads: slice) -> tuple[Tensor, Tensor]:
    """dk and dv are in the accumulation dtype; their part of dq is added to `queries`."""
    dout, (q, k, v, out, lse), call, dq = queries
    per_kv_head = q.shape[1] // k.shape[1]
    heads = slice(kv_heads.start * per_kv_head, kv_heads.stop * per_kv_head)
    saved_heads = Saved(q[:, heads], k[:, kv_heads], v[:, kv_heads], out[:, heads], lse[:, heads])
    dq_part = RowSum(saved_heads.q)
    launches = members.launches(members.member)
    addends = block_gradients(
        dq_part, dout[:, heads], saved_heads, launches, call.for_heads(heads.start, heads.stop)
    )
    gradients = sum_addends(addends, saved_heads.k, saved_heads.v)
    dq.add_heads(heads, dq_part.result())
    return gradients


def _fetch_rows(members: Members, tensors: tuple[Tensor, Tensor], label: str) -> tuple[Tensor, ...]:
    window_rows = members.window_rows
    send_counts = [len(rows) for rows in window_rows.rows_to_send]
    sent = join_columns(tensors, window_rows.all_rows_to_send)
    handle = members.channel.all_to_all_rows(sent, send_counts, window_rows.receive_counts, label)
    seen = sent.new_empty((window_rows.row_count, sent.shape[1]))
    seen.index_copy_(0, window_rows.own_places, join_columns(tensors, window_rows.own_rows))
    seen.index_copy_(0, window_rows.received_places, handle.wait())
    return split_columns(seen, [x.shape[1:] for x in tensors])


def _send_gradients_back(members: Members, gradients: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    window_rows = members.window_rows
    label = "attention window rows backward, gradients"
    dtype = accumulation_dtype(gradients[0].dtype)
    # Each member sends back the gradients of the rows that it got from here.
    counts = [len(rows) for rows in window_rows.rows_to_send]
    others_gradients = join_columns(gradients, window_rows.received_places, dtype)
    handle = members.channel.all_to_all_rows(others_gradients, window_rows.receive_counts, counts, label)
    total = join_columns(gradients, window_rows.own_places, dtype)
    local_rows = members.counts[members.member]
    if len(total) < local_rows:  # rows that pad documents out see nothing, and nothing sees them
        total = total.new_zeros((local_rows, total.shape[1])).index_copy_(0, window_rows.own_rows, total)
    for rows, arrived in zip(window_rows.rows_to_send, handle.wait().split(counts), strict=True):
        if len(rows):
            total.index_add_(0, rows, arrived)
    return split_columns(total, [x.shape[1:] for x in gradients])
