"""Attention over gathered keys and values (`all_gather`): every member receives all rows of its group at once.

Gathered rows are laid in document order, so that a local run of query rows sees one prefix of its document. Backward
gathers again instead of keeping the rows, and sums the gradients of keys and values with a reduce-scatter. Large heads
go in slices: the next is gathered while the current one is computed.
"""

from collections.abc import Iterator, Sequence

from torch import Tensor

from longspan.attention.blocks import (
    HeadSlice,
    Partial,
    RowSum,
    add_block,
    backward_head_groups,
    block_gradients,
    cut_heads,
    sink_gradient,
)
from longspan.attention.call import AttendCall, Gradients, Saved
from longspan.attention.members import Members
from longspan.attention.rows import accumulation_dtype, concat_heads, join_columns, sum_rows
from longspan.comm import Addend, Handle, split_columns
from longspan.plan.messages import GATHER_SLICE_BYTES as SLICE_BYTES, GATHER_SLICES as SLICES

_Pair = tuple[Tensor, Tensor]


def cut_large_heads(q: Tensor, k: Tensor, v: Tensor, rows: int) -> list[HeadSlice]:
    """Cut large heads into two slices (the last may have fewer): one travels while the other is computed."""
    kv_heads = k.shape[1]
    is_large = rows * kv_heads * (k.shape[2] + v.shape[2]) * k.element_size() >= SLICE_BYTES
    return cut_heads(q.shape[1], kv_heads, -(-kv_heads // SLICES) if is_large else kv_heads)


def all_gather_forward(
    q: Tensor, k: Tensor, v: Tensor, members: Members, call: AttendCall
) -> tuple[Tensor, list[Saved]]:
    """Attend from q (T, N, H) to k (T, K, H), v (T, K, Hv), this member's rows of one group: out (T, N, Hv)."""
    slices = cut_large_heads(q, k, v, sum(members.counts))
    parts: list[_Pair] = []
    for heads, (all_k, all_v) in _gather_slices(members, (k, v), slices, "attention all-gather forward"):
        q_part = q[:, heads.q]
        slice_call = call.for_heads(heads.q.start, heads.q.stop)
        total = Partial(q_part, v.shape[2])
        add_block(total, q_part, all_k, all_v, members.launches(None), slice_call)
        parts.append(total.result_with_sinks(slice_call.sinks))
        del all_k, all_v  # freed before the next slice is laid in order
    out, lse = (concat_heads(x) for x in zip(*parts, strict=True))
    return out, [Saved(q, k, v, out, lse)]


def all_gather_backward(
    dout: Tensor, saved_slices: Sequence[Saved], members: Members, call: AttendCall
) -> Gradients:
    """Return the gradients of the local rows; those of k and v in the accumulation dtype."""
    (saved,) = saved_slices
    q, k, v, out, lse = saved
    slices = cut_large_heads(q, k, v, sum(members.counts))
    # the finer cut: it keeps within the memory for float32 sums
    slices = max(slices, backward_head_groups(max(members.counts), q, k.shape[1]), key=len)
    dq_parts = list[Tensor]()
    own_pairs = list[_Pair]()  # dk and dv of this member's rows
    # The gradients of the slice before travel while this one is computed.
    travelling: Handle | None = None
    for heads, (all_k, all_v) in _gather_slices(members, (k, v), slices, "attention all-gather backward"):
        saved_slice = Saved(q[:, heads.q], all_k, all_v, out[:, heads.q], lse[:, heads.q])
        dq = RowSum(saved_slice.q)
        slice_call = call.for_heads(heads.q.start, heads.q.stop)
        addends = block_gradients(dq, dout[:, heads.q], saved_slice, members.launches(None), slice_call)
        # This wait leaves one message at a time in memory.
        if travelling is not None:
            own_pairs.append(travelling.wait())
        travelling = _send_gradients(addends, all_k, all_v, members)
        dq_parts.append(dq.result().to(q.dtype))
        del all_k, all_v, saved_slice
    assert travelling is not None
    own_pairs.append(travelling.wait())
    dk, dv = (concat_heads(parts) for parts in zip(*own_pairs, strict=True))
    return Gradients(concat_heads(dq_parts), dk, dv, sink_gradient(dout, saved, call.sinks))


def _gather_slices(
    members: Members, tensors: _Pair, slices: Sequence[HeadSlice], label: str
) -> Iterator[tuple[HeadSlice, _Pair]]:
    """The next slice travels meanwhile. A caller that drops a pair before it asks for the next has one in memory."""
    channel = members.gather_channel
    order = members.document_order(channel.row_starts(members.counts))

    def start_gather(heads: HeadSlice) -> Handle:
        return channel.all_gather_rows(join_columns([x[:, heads.kv] for x in tensors]), members.counts, label)

    # The one gather in flight; it is popped, so that its result is freed once laid in order.
    started = [start_gather(slices[0])]
    for i, heads in enumerate(slices):
        in_order = join_columns((started.pop().wait(),), order)
        started += [start_gather(following) for following in slices[i + 1 : i + 2]]
        k, v = split_columns(in_order, [(heads.kv.stop - heads.kv.start, x.shape[2]) for x in tensors])
        del in_order
        yield heads, (k, v)
        del k, v  # freed before the next slice is laid in order


def _send_gradients(addends: list[Addend], k: Tensor, v: Tensor, members: Members) -> Handle:
    """Empty `addends`, which frees them. On their way dk and dv lie side by side: (S, columns) in the accumulation
    dtype, rows member after member."""
    row_shapes = [x.shape[1:] for x in (k, v)]
    widths = [shape.numel() for shape in row_shapes]
    packed = k.new_empty((len(k), sum(widths)), dtype=accumulation_dtype(k.dtype))
    indices = members.key_indices_by_launch
    for i, into in enumerate(packed.split(widths, 1)):
        # no name for this zip, which would keep the addend that it gave last
        sum_rows(into, [(x.tensors[i].flatten(1), index) for x, index in zip(addends, indices, strict=True)])
    addends.clear()
    receives = [members.counts[members.member]] * members.degree
    label = "attention all-gather backward, gradients"

    def own_sums(arrived: Tensor) -> tuple[Tensor, ...]:
        # Every member's gradients of the own rows, one after another; unflatten refuses a tensor without rows.
        total = arrived.unflatten(0, (members.degree, -1)).sum(0) if len(arrived) else arrived
        return split_columns(total, row_shapes)

    return members.gather_channel.all_to_all_rows(packed, members.counts, receives, label).then(own_sums)
