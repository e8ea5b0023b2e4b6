"""Attention around a ring (`p2p`): key/value blocks travel, queries stay.

While a block is computed the next is in flight; two or three blocks are held at a time, whatever the degree. Backward
walks the ring again instead of keeping the blocks, and each block's gradient travels behind it, home to its owner.

What no query sees is not computed. Under a window, or chunks, narrow against the documents it is not sent either, and
there is no ring: a member's runs of rows need at most window − 1 rows before each, the window rows, which come straight
from their owners (`members.py` finds which). They arrive in one exchange and are laid with the member's own
rows in document order, so that a run sees one band and nothing is merged; their gradients go straight back. A ring
could not leave out much, for in zigzag order one of the two neighbours whose rows are seen comes last in it.
"""

from collections.abc import Sequence

from torch import Tensor

from longspan.attention.call import (
    AttendCall,
    Gradients,
    Saved,
    add_block,
    block_gradients,
    sink_gradient,
    sum_addends,
)
from longspan.attention.members import Members
from longspan.attention.rows import Partial, RowSum, accumulation_dtype, add_addends, concat_heads, join_columns
from longspan.comm import Addend, GradientRing, RingBlocks, split_columns

HALVES_BYTES = 48 << 20  # of a block's gradients: a message that is worth one more launch to hide (H200)


def ring_forward(q: Tensor, k: Tensor, v: Tensor, members: Members, call: AttendCall) -> tuple[Tensor, list[Saved]]:
    """q (T, N, H), k (T, K, H), v (T, K, Hv) of this member's rows."""
    if members.has_narrow_window:
        return window_forward(q, k, v, members, call)
    total = Partial(q.shape[0], q.shape[1], v.shape[2], like=q)
    if members.degree == 1:
        add_block(total, q, k, v, members.launches(0), call)
    else:
        for owner, (block_k, block_v) in RingBlocks(members.channel, (k, v), members.counts, "attention ring forward"):
            add_block(total, q, block_k, block_v, members.launches(owner), call)
    out, lse = total.result_with_sinks(call.sinks)
    return out, [Saved(q, k, v, out, lse)]


def ring_backward(dout: Tensor, saved_slices: Sequence[Saved], members: Members, call: AttendCall) -> Gradients:
    """Gradients of this member's rows."""
    (saved,) = saved_slices
    if members.has_narrow_window:
        return window_backward(dout, saved, members, call)
    dq = RowSum(tuple(saved.q.shape), saved.q)
    if members.degree == 1:
        addends = block_gradients(dq, dout, saved, members.launches(0), call)
        dk, dv = sum_addends(addends, saved.k, saved.v)
    else:
        dk, dv = _ring_gradients(dq, dout, saved, members, call)
    return Gradients(dq.result(), dk, dv, sink_gradient(dout, saved.out, saved.lse, call.sinks))


def _ring_gradients(dq: RowSum, dout: Tensor, saved: Saved, members: Members, call: AttendCall) -> tuple[Tensor, ...]:
    """dk and dv, summed over the members. The own block waits for no one: its work hides the first and last message."""
    channel, keys, dtype = members.channel, (saved.k, saved.v), accumulation_dtype(saved.k.dtype)
    label = "attention ring backward, gradients"
    sums = GradientRing(channel, keys, members.counts, label, add=add_addends, dtype=dtype)
    (first_heads, *later_heads), parts = _slices_of_own_block(saved), list[tuple[Tensor, Tensor]]()
    for owner, (k, v) in RingBlocks(channel, keys, members.counts, "attention ring backward"):
        if owner == members.member:
            parts.append(_own_gradients(dq, dout, saved, members, call, first_heads))
        else:
            sums.add(owner, block_gradients(dq, dout, saved._replace(k=k, v=v), members.launches(owner), call))
    parts += [_own_gradients(dq, dout, saved, members, call, heads) for heads in later_heads]
    dk, dv = zip(*parts, strict=True)
    return sums.finish([Addend(slice(0, len(saved.k)), (concat_heads(dk), concat_heads(dv)))])


def _slices_of_own_block(saved: Saved) -> list[slice]:
    """Key/value heads that are computed at once: half of them first and the others last, where messages are large."""
    rows, kv_heads, head_size = saved.k.shape
    message = rows * kv_heads * (head_size + saved.v.shape[2]) * 4
    half = kv_heads // 2 if message >= HALVES_BYTES else 0
    return [slice(0, half), slice(half, kv_heads)] if half else [slice(0, kv_heads)]


def _own_gradients(
    dq: RowSum, dout: Tensor, saved: Saved, members: Members, call: AttendCall, kv_heads: slice
) -> tuple[Tensor, Tensor]:
    """dk and dv of the own block, of some key/value heads; what their queries get is added to `dq`."""
    per_kv_head = saved.q.shape[1] // saved.k.shape[1]
    heads = slice(kv_heads.start * per_kv_head, kv_heads.stop * per_kv_head)
    q, k, v, out, lse = saved
    part = Saved(q[:, heads], k[:, kv_heads], v[:, kv_heads], out[:, heads], lse[:, heads])
    dq_part, launches = RowSum(tuple(part.q.shape), part.q), members.launches(members.member)
    addends = block_gradients(dq_part, dout[:, heads], part, launches, call.for_heads(heads.start, heads.stop))
    gradients = sum_addends(addends, part.k, part.v)
    dq.add_heads(heads, dq_part.result())
    return gradients


def window_forward(q: Tensor, k: Tensor, v: Tensor, members: Members, call: AttendCall) -> tuple[Tensor, list[Saved]]:
    """q (T, N, H), k (T, K, H), v (T, K, Hv) of this member's rows."""
    total = Partial(q.shape[0], q.shape[1], v.shape[2], like=q)
    seen_k, seen_v = _fetch(members, (k, v), "attention window rows forward")
    add_block(total, q, seen_k, seen_v, members.window_rows.launches, call)
    out, lse = total.result_with_sinks(call.sinks)
    return out, [Saved(q, k, v, out, lse)]


def window_backward(dout: Tensor, saved: Saved, members: Members, call: AttendCall) -> Gradients:
    """Gradients of this member's rows."""
    dq = RowSum(tuple(saved.q.shape), saved.q)
    k, v = _fetch(members, (saved.k, saved.v), "attention window rows backward")
    addends = block_gradients(dq, dout, saved._replace(k=k, v=v), members.window_rows.launches, call)
    dk, dv = _return_gradients(members, sum_addends(addends, k, v), "attention window rows backward, gradients")
    return Gradients(dq.result(), dk, dv, sink_gradient(dout, saved.out, saved.lse, call.sinks))


def _fetch(members: Members, tensors: tuple[Tensor, Tensor], label: str) -> tuple[Tensor, ...]:
    """The members' tensors (T, …) to the rows seen here."""
    rows = members.window_rows
    counts = [len(sent) for sent in rows.sends]
    sent = join_columns(tensors, rows.sent)
    handle = members.channel.all_to_all_rows(sent, counts, rows.receives, label)
    seen = sent.new_empty((rows.rows, sent.shape[1]))
    seen.index_copy_(0, rows.own_places, join_columns(tensors, rows.own_rows))
    seen.index_copy_(0, rows.places, handle.wait())
    return split_columns(seen, [x.shape[1:] for x in tensors])


def _return_gradients(members: Members, gradients: tuple[Tensor, Tensor], label: str) -> tuple[Tensor, ...]:
    """Gradients of the rows seen here to the sums over members of those of the own rows; summed in member order."""
    rows, dtype = members.window_rows, accumulation_dtype(gradients[0].dtype)
    counts = [len(sent) for sent in rows.sends]
    foreign = join_columns(gradients, rows.places, dtype)
    handle = members.channel.all_to_all_rows(foreign, rows.receives, counts, label)
    total = join_columns(gradients, rows.own_places, dtype)
    local_rows = members.counts[members.member]
    if len(total) < local_rows:  # rows that pad documents out see nothing, and nothing sees them
        total = total.new_zeros((local_rows, total.shape[1])).index_copy_(0, rows.own_rows, total)
    for sent, arrived in zip(rows.sends, handle.wait().split(counts), strict=True):
        if len(sent):
            total.index_add_(0, sent, arrived)
    return split_columns(total, [x.shape[1:] for x in gradients])
