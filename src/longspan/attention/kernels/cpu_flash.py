"""torch's flash kernel for CPUs, tile by tile: float64, float32, bfloat16, float16, grouped heads, every mask.

Limits of the kernel (torch 2.11 to 2.13) that shape this file: it wants one head size, so the smaller one is padded
with zeros; its causal mask is aligned to the first key, so a causal tile with more keys than rows is a full tile and a
square one; no rows or no keys kill the process, and tiles have both by construction.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from longspan.attention.geometry.launch import Launch, visible
from longspan.attention.geometry.tiles import Tile
from longspan.attention.sums.merge import accumulation_dtype, merge_

_BAND_ROWS = 256  # query rows of a band whose mask is held at once


class _Call(NamedTuple):
    rows: slice
    keys: slice
    is_causal: bool
    attn_mask: Tensor | None
    first: bool  # whether no call before had these rows


def forward(
    q: Tensor, k: Tensor, v: Tensor, launch: Launch, *, scale: float, softcap: float | None = None
) -> tuple[Tensor, Tensor]:
    """q (Tq, N, H), k (Tk, K, H), v (Tk, K, Hv) -> out (Tq, N, Hv), lse (Tq, N)."""
    assert softcap is None
    head_size, dtype = v.shape[2], accumulation_dtype(q.dtype)
    q, k, v = _one_head_size(q, k, v)
    out = q.new_empty(q.shape, dtype=dtype)
    lse = q.new_empty(q.shape[:2], dtype=dtype)
    for call in _calls(launch, q.dtype):
        part_out, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            _batched(q[call.rows]),
            _batched(k[call.keys]),
            _batched(v[call.keys]),
            0.0,
            call.is_causal,
            attn_mask=call.attn_mask,
            scale=scale,
        )
        part_out, part_lse = part_out[0].transpose(0, 1), part_lse[0].transpose(0, 1)
        if call.first:
            out[call.rows], lse[call.rows] = part_out, part_lse
        else:
            merge_(out, lse, call.rows, part_out, part_lse)
    return out[..., :head_size], lse


def backward(
    dout: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    launch: Launch,
    *,
    scale: float,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this block, where out (Tq, N, Hv) and lse (Tq, N) are over the keys of all blocks."""
    assert softcap is None
    sizes = q.shape[2], v.shape[2]
    q, k, v = _one_head_size(q, k, v)
    dout, out = _padded(dout, q.shape[2]), _padded(out, q.shape[2])
    dq, dk, dv = (x.new_zeros(x.shape, dtype=accumulation_dtype(x.dtype)) for x in (q, k, v))
    for call in _calls(launch, q.dtype):
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _batched(dout[call.rows]),
            _batched(q[call.rows]),
            _batched(k[call.keys]),
            _batched(v[call.keys]),
            _batched(out[call.rows]),
            lse[call.rows].contiguous().transpose(0, 1)[None],
            0.0,
            call.is_causal,
            attn_mask=call.attn_mask,
            scale=scale,
        )
        for total, rows, x in zip((dq, dk, dv), (call.rows, call.keys, call.keys), gradients, strict=True):
            total[rows] += x[0].transpose(0, 1)
    return dq[..., : sizes[0]], dk[..., : sizes[0]], dv[..., : sizes[1]]


def _calls(launch: Launch, dtype: torch.dtype) -> Iterator[_Call]:
    for tile in launch.tiles:
        rows, keys = slice(tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop)
        if tile.left is None and (tile.right is None or tile.queries == 1):
            yield _Call(rows, keys, False, None, True)
        elif tile.left is None and tile.right == 0:
            diagonal = tile.k_stop - tile.queries
            yield _Call(rows, slice(diagonal, tile.k_stop), True, None, True)
            if tile.keys > tile.queries:
                yield _Call(rows, slice(tile.k_start, diagonal), False, None, False)
        else:
            for piece in tile.pieces(_BAND_ROWS):
                rows, keys = slice(piece.q_start, piece.q_stop), slice(piece.k_start, piece.k_stop)
                yield _Call(rows, keys, False, _float_mask(piece, launch.device, dtype), True)


def _float_mask(tile: Tile, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    seen = visible(tile, device)
    if seen is None:
        return None
    return torch.zeros(seen.shape, dtype=dtype, device=device).masked_fill_(~seen, -torch.inf)


def _batched(x: Tensor) -> Tensor:
    """(T, N, H) to (1, N, T, H)."""
    return x.transpose(0, 1)[None]


def _one_head_size(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    size = max(q.shape[2], v.shape[2])
    return _padded(q, size), _padded(k, size), _padded(v, size)


def _padded(x: Tensor, size: int) -> Tensor:
    return x if x.shape[2] == size else pad(x, (0, size - x.shape[2]))
