"""One block: local query rows against one set of key rows, through the kernel of a call.

The communication patterns (`ring.py`, `all_gather.py`) decide which key rows there are and when; what is computed with
them is here, and is the same for all patterns.
"""

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from longspan.attention.kernels import Kernel
from longspan.attention.kernels.launch import Launch
from longspan.attention.merge import Partial, RowSum
from longspan.attention.tiles import tiles_between
from longspan.comm import ShardPart
from longspan.layout import Segments


@dataclass(frozen=True)
class Rule:
    """What one call of `attend` computes, whatever its communication: mask, scale and kernel.

    `memo` keeps launches and index tensors for as long as the shard lives, so that layers share them.
    """

    kernel: Kernel
    scale: float
    causal: bool = True
    window: int | None = None
    softcap: float | None = None
    memo: dict[Hashable, object] = field(default_factory=dict, compare=False, repr=False)

    def launches(self, part: ShardPart, owner: int | None, device: torch.device) -> tuple[Launch, ...]:
        """The launches of this rank's rows of a part against those of `owner`, or against all (None)."""
        key = ("launches", part.index, owner, self.causal, self.window, device)
        if key not in self.memo:
            q = real_segments(part, part.member)
            k = whole_documents(part) if owner is None else real_segments(part, owner)
            tilings = tiles_between(q, k, causal=self.causal, window=self.window)
            self.memo[key] = tuple(Launch(tiling, device) for tiling in tilings)
        return self.memo[key]  # pyright: ignore[reportReturnType]


def real_segments(part: ShardPart, member: int) -> Segments:
    """The rows of one member without those that pad documents out: padding takes no part in attention."""
    segments = part.segments(member)
    if part.group.pad_to is None:
        return segments
    stop = np.minimum(segments.stop, np.asarray(part.group.lengths)[segments.document])
    keep = segments.start < stop
    return Segments(segments.document[keep], segments.start[keep], stop[keep], segments.offset[keep])


def whole_documents(part: ShardPart) -> Segments:
    """Every document whole, where it lies among the group's rows in document order; without its padding."""
    laid_out = np.asarray(part.group.laid_out, dtype=np.int64)
    lengths = np.asarray(part.group.lengths, dtype=np.int64)
    return Segments(np.arange(len(lengths)), np.zeros_like(lengths), lengths, np.cumsum(laid_out) - laid_out)


def add_block(total: Partial, q: Tensor, k: Tensor, v: Tensor, launches: tuple[Launch, ...], rule: Rule) -> None:
    """Add to `total` the attention of q (T, N, H) to this block's k (Tk, K, H), v (Tk, K, Hv)."""
    for launch in launches:
        rows, keys = launch.q_rows, launch.k_rows
        out, lse = rule.kernel.forward(q[rows], k[keys], v[keys], launch, scale=rule.scale, softcap=rule.softcap)
        total.add(rows, out, lse)


def add_block_gradients(
    dq: RowSum,
    saved: tuple[Tensor, Tensor, Tensor, Tensor],
    k: Tensor,
    v: Tensor,
    launches: tuple[Launch, ...],
    rule: Rule,
) -> tuple[Tensor, Tensor]:
    """Add this block's part of the query's gradient to `dq`; return dk (Tk, K, H) and dv (Tk, K, Hv).

    `saved` is dout (T, N, Hv), q (T, N, H), out (T, N, Hv), lse (T, N), the last two over the keys of all blocks.
    """
    dk, dv = RowSum(tuple(k.shape), k), RowSum(tuple(v.shape), v)
    for launch in launches:
        rows, keys = launch.q_rows, launch.k_rows
        dout, q, out, lse = (x[rows] for x in saved)
        gradients = rule.kernel.backward(
            dout, q, k[keys], v[keys], out, lse, launch, scale=rule.scale, softcap=rule.softcap
        )
        for total, where, gradient in zip((dq, dk, dv), (rows, keys, keys), gradients, strict=True):
            total.add(where, gradient)
    return dk.result(), dv.result()
