"""The members of one group played by one process: what every pattern computes, without communication."""

from collections.abc import Sequence
from functools import lru_cache

import torch
from torch import Tensor

from longspan.attention.call import AttendCall, Saved, add_block, block_gradients, sum_addends
from longspan.attention.rows import Partial, RowSum, accumulation_dtype
from longspan.attention.tiles import Launch, Mask, tiles_between
from longspan.layout import Partition


def simulate(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dout: Tensor,
    lengths: Sequence[int],
    degree: int,
    call: AttendCall,
    *,
    with_deltas: bool = False,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """out, dq, dk, dv of packed rows (S, …), where every member meets every member's block, its own first.

    Sums over members accumulate as those that travel a ring do. With `with_deltas` backward gets dout · out.
    """
    rows, launches_between = _geometry(tuple(lengths), degree, call.mask, q.device)
    out = torch.zeros((*q.shape[:2], v.shape[2]), dtype=q.dtype, device=q.device)
    dq, dk, dv = (torch.zeros_like(x, dtype=accumulation_dtype(x.dtype)) for x in (q, k, v))
    for member in range(degree):
        mine = rows[member]
        blocks = [(rows[owner], launches_between[member][owner]) for owner in _ring(member, degree)]
        total = Partial(len(mine), q.shape[1], v.shape[2], like=q)
        for theirs, launches in blocks:
            add_block(total, q[mine], k[theirs], v[theirs], launches, call)
        total_out, lse = total.result()
        out[mine] = total_out.to(q.dtype)
        part = RowSum(tuple(q[mine].shape), q)
        for theirs, launches in blocks:
            saved = Saved(q[mine], k[theirs], v[theirs], out[mine], lse)
            saved = saved._replace(out=saved.deltas(dout[mine])) if with_deltas else saved
            addends = block_gradients(part, dout[mine], saved, launches, call)
            block = sum_addends(addends, k[theirs], v[theirs])
            dk[theirs] += block[0]
            dv[theirs] += block[1]
        dq[mine] = part.result().to(dq.dtype)
    return out, dq, dk, dv


def _ring(member: int, degree: int) -> list[int]:
    return [(member - step) % degree for step in range(degree)]


@lru_cache(maxsize=4)
def _geometry(
    lengths: tuple[int, ...], degree: int, mask: Mask, device: torch.device
) -> tuple[list[Tensor], list[list[tuple[Launch, ...]]]]:
    """The rows of every member, and the launches between any two: the same for all kernels, 4096 pairs at degree 64."""
    shares, members = Partition.zigzag(lengths, degree), range(degree)
    rows = [torch.from_numpy(shares.rows(member).copy()).to(device) for member in members]
    segments = [shares.segments(member) for member in members]
    launches = [
        [
            tuple(Launch(tiling, device) for tiling in tiles_between(segments[a], segments[b], **mask._asdict()))
            for b in members
        ]
        for a in members
    ]
    return rows, launches
