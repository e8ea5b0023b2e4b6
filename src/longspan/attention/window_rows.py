"""Attention under a narrow window (`p2p`): every member gets the rows that its own see, straight from their owners.

A member's runs of rows need at most window − 1 rows before each, the window rows (`geometry/members.py` says which).
They arrive in one exchange and are laid with the member's own rows in document order, so that a run sees one band and
nothing is merged; their gradients go straight back. A ring could not leave out much, for in zigzag order one of the two
neighbours whose rows are seen comes last in it.
"""

from torch import Tensor

from longspan.attention.block import Gradients, Partial, RowSum, add_block, block_gradients, sink_gradient, summed
from longspan.attention.call import AttentionCall, Saved
from longspan.attention.geometry.members import Members
from longspan.attention.sums.rows import accumulation_dtype, join_columns
from longspan.comm import split_columns


def window_forward(
    q: Tensor, k: Tensor, v: Tensor, members: Members, call: AttentionCall
) -> tuple[Tensor, list[Saved]]:
    """q (T, N, H), k (T, K, H), v (T, K, Hv) of this member's rows."""
    total = Partial(q.shape[0], q.shape[1], v.shape[2], like=q)
    seen_k, seen_v = _fetch(members, (k, v), "attention window rows forward")
    add_block(total, q, seen_k, seen_v, members.window_rows.launches, call)
    out, lse = total.with_sinks(call.sinks)
    return out, [Saved(q, k, v, out, lse)]


def window_backward(dout: Tensor, saved: Saved, members: Members, call: AttentionCall) -> Gradients:
    """Gradients of this member's rows."""
    dq = RowSum(tuple(saved.q.shape), saved.q)
    k, v = _fetch(members, (saved.k, saved.v), "attention window rows backward")
    addends = block_gradients(dq, dout, saved._replace(k=k, v=v), members.window_rows.launches, call)
    dk, dv = _return_gradients(members, summed(addends, k, v), "attention window rows backward, gradients")
    return Gradients(dq.result(), dk, dv, sink_gradient(dout, saved.out, saved.lse, call.sinks))


def _fetch(members: Members, tensors: tuple[Tensor, Tensor], what: str) -> tuple[Tensor, ...]:
    """The members' tensors (T, …) to the rows seen here."""
    rows = members.window_rows
    counts = [len(sent) for sent in rows.sends]
    sent = join_columns(tensors, rows.sent)
    handle = members.channel().all_to_all_rows(sent, counts, rows.receives, what)
    seen = sent.new_empty((rows.rows, sent.shape[1]))
    seen.index_copy_(0, rows.own_places, join_columns(tensors, rows.own_rows))
    seen.index_copy_(0, rows.places, handle.wait())
    return split_columns(seen, [x.shape[1:] for x in tensors])


def _return_gradients(members: Members, gradients: tuple[Tensor, Tensor], what: str) -> tuple[Tensor, ...]:
    """Gradients of the rows seen here to the sums over members of those of the own rows; summed in member order."""
    rows, dtype = members.window_rows, accumulation_dtype(gradients[0].dtype)
    counts = [len(sent) for sent in rows.sends]
    foreign = join_columns(gradients, rows.places, dtype)
    handle = members.channel().all_to_all_rows(foreign, rows.receives, counts, what)
    total = join_columns(gradients, rows.own_places, dtype)
    local_rows = members.counts[members.member]
    if len(total) < local_rows:  # rows that pad documents out see nothing, and nothing sees them
        total = total.new_zeros((local_rows, total.shape[1])).index_copy_(0, rows.own_rows, total)
    for sent, arrived in zip(rows.sends, handle.wait().split(counts), strict=True):
        if len(sent):
            total.index_add_(0, sent, arrived)
    return split_columns(total, [x.shape[1:] for x in gradients])
