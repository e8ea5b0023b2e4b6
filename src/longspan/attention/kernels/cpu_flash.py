"""torch's flash kernel for CPUs, tile by tile: float64, float32, bfloat16, float16, grouped heads, every mask.

Limits of the kernel (torch 2.11 to 2.15) that shape this file: it wants one head size, so the smaller one is padded
with zeros; its causal mask is aligned to the first key, so a causal tile with more keys than rows is a full tile and a
square one; no rows or no keys kill the process, and tiles have both by construction.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from longspan.attention.call import AttendCall, Saved
from longspan.attention.rows import accumulation_dtype, pad_heads
from longspan.attention.tiles import DenseCall, Launch, dense_calls, visible_key_mask

_BAND_ROWS = 256  # query rows of a band whose mask is held at once


def forward(q: Tensor, k: Tensor, v: Tensor, launch: Launch, call: AttendCall) -> tuple[Tensor, Tensor]:
    """Attend from q (Tq, N, H) to k (Tk, K, H), v (Tk, K, Hv): out (Tq, N, Hv), lse (Tq, N)."""
    value_dim = v.shape[2]
    dtype = accumulation_dtype(q.dtype)
    q, k, v = _pad_to_one_size(q, k, v)
    out = q.new_empty(q.shape, dtype=dtype)
    lse = q.new_empty(q.shape[:2], dtype=dtype)
    for dense in _split_into_dense_calls(launch, q.dtype):
        part_out, part_lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            _add_batch_dim(q[dense.rows]),
            _add_batch_dim(k[dense.keys]),
            _add_batch_dim(v[dense.keys]),
            dropout_p=0.0,
            is_causal=dense.causal,
            attn_mask=dense.attn_mask,
            scale=call.scale,
        )
        dense.write_or_merge_result(out, lse, part_out[0].transpose(0, 1), part_lse[0].transpose(0, 1))
    return out[..., :value_dim], lse


def backward(dout: Tensor, saved: Saved, launch: Launch, call: AttendCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return dq (Tq, N, H), dk (Tk, K, H), dv (Tk, K, Hv) of this block.

    torch's kernel takes one dense call at a time, and the lse over all blocks, so that its gradients are parts of the
    whole ones and are added up.
    """
    q, k, v, out, lse = saved
    head_dim = q.shape[2]
    value_dim = v.shape[2]
    q, k, v = _pad_to_one_size(q, k, v)
    dout = pad_heads(dout, q.shape[2])
    out = pad_heads(out, q.shape[2])
    dq, dk, dv = (x.new_zeros(x.shape, dtype=accumulation_dtype(x.dtype)) for x in (q, k, v))
    for dense in _split_into_dense_calls(launch, q.dtype):
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            _add_batch_dim(dout[dense.rows]),
            _add_batch_dim(q[dense.rows]),
            _add_batch_dim(k[dense.keys]),
            _add_batch_dim(v[dense.keys]),
            _add_batch_dim(out[dense.rows]),
            lse[dense.rows].contiguous().transpose(0, 1)[None],
            dropout_p=0.0,
            is_causal=dense.causal,
            attn_mask=dense.attn_mask,
            scale=call.scale,
        )
        for total, rows, x in zip((dq, dk, dv), (dense.rows, dense.keys, dense.keys), gradients, strict=True):
            total[rows] += x[0].transpose(0, 1)
    return dq[..., :head_dim], dk[..., :head_dim], dv[..., :value_dim]


def _split_into_dense_calls(launch: Launch, dtype: torch.dtype) -> Iterator[DenseCall]:
    """A tile without a window gives one or two calls, any other tile one with a mask for each _BAND_ROWS rows."""
    for tile in launch.tiles:
        if tile.left is None and (tile.right in (None, 0) or tile.queries == 1):
            yield from dense_calls(tile)
        else:
            for piece in tile.pieces(_BAND_ROWS):
                rows, keys = slice(piece.q_start, piece.q_stop), slice(piece.k_start, piece.k_stop)
                seen = visible_key_mask(piece, launch.device)
                assert seen is not None, "a tile without limits is a dense call"
                # added to scores
                mask = torch.zeros(seen.shape, dtype=dtype, device=launch.device).masked_fill_(~seen, -torch.inf)
                yield DenseCall(rows, keys, attn_mask=mask)


def _add_batch_dim(x: Tensor) -> Tensor:
    """(T, N, H) to (1, N, T, H)"""
    return x.transpose(0, 1)[None]


def _pad_to_one_size(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """torch's kernel takes one head size."""
    size = max(q.shape[2], v.shape[2])
    return pad_heads(q, size), pad_heads(k, size), pad_heads(v, size)
