"""Attention tile by tile in plain tensor operations: any device, any floating dtype, every mask, softcap, dropout.

Scores are float32 (float64 for float64) and never held for more than a bounded piece of a tile.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from longspan.attention.kernels.dropout import Dropout
from longspan.attention.kernels.launch import Launch, visible
from longspan.attention.merge import accumulation_dtype
from longspan.attention.tiles import Tile

_SCORES_AT_ONCE = 1 << 23  # elements: 32 MiB in float32


def forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    launch: Launch,
    *,
    scale: float,
    softcap: float | None = None,
    dropout: Dropout | None = None,
) -> tuple[Tensor, Tensor]:
    """q (Tq, N, H), k (Tk, K, H), v (Tk, K, Hv) -> out (Tq, N, Hv), lse (Tq, N)."""
    dtype = accumulation_dtype(q.dtype)
    out = q.new_empty((len(q), q.shape[1], v.shape[2]), dtype=dtype)
    lse = q.new_empty(q.shape[:2], dtype=dtype)
    for tile in _pieces(launch, q.shape[1]):
        rows, keys = slice(tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop)
        scores, _ = _scores(_grouped(q[rows], k.shape[1], dtype), k[keys].to(dtype), tile, scale, softcap)
        row_lse = scores.logsumexp(-1)  # (K, G, Tq)
        weights = torch.exp(scores - row_lse.unsqueeze(-1))
        if dropout is not None:
            weights *= _factors(dropout, launch, tile, weights)
        out[rows] = torch.einsum("kgqs,skh->qkgh", weights, v[keys].to(dtype)).flatten(1, 2)
        lse[rows] = row_lse.permute(2, 0, 1).flatten(1, 2)
    return out, lse


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
    dropout: Dropout | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of this block, where out (Tq, N, Hv) and lse (Tq, N) are over the keys of all blocks."""
    dtype = accumulation_dtype(q.dtype)
    dq, dk, dv = (x.new_zeros(x.shape, dtype=dtype) for x in (q, k, v))
    for tile in _pieces(launch, q.shape[1]):
        rows, keys = slice(tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop)
        q_rows, dout_rows, out_rows = (_grouped(x[rows], k.shape[1], dtype) for x in (q, dout, out))
        k_rows, v_rows = k[keys].to(dtype), v[keys].to(dtype)
        scores, slope = _scores(q_rows, k_rows, tile, scale, softcap)
        row_lse = lse[rows].unflatten(1, (k.shape[1], -1)).permute(1, 2, 0)
        weights = torch.exp(scores - row_lse.unsqueeze(-1))
        dweights = torch.einsum("qkgh,skh->kgqs", dout_rows, v_rows)
        used = weights
        if dropout is not None:
            factors = _factors(dropout, launch, tile, weights)
            used, dweights = weights * factors, dweights * factors
        dv[keys] += torch.einsum("kgqs,qkgh->skh", used, dout_rows)
        delta = (dout_rows * out_rows).sum(-1).permute(1, 2, 0)
        dscores = weights * (dweights - delta.unsqueeze(-1)) * scale
        dscores = dscores if slope is None else dscores * slope
        dq[rows] = torch.einsum("kgqs,skh->qkgh", dscores, k_rows).flatten(1, 2)
        dk[keys] += torch.einsum("kgqs,qkgh->skh", dscores, q_rows)
    return dq, dk, dv


def _pieces(launch: Launch, heads: int) -> Iterator[Tile]:
    for tile in launch.tiles:
        yield from tile.pieces(max(1, _SCORES_AT_ONCE // (heads * tile.keys)))


def _factors(dropout: Dropout, launch: Launch, tile: Tile, weights: Tensor) -> Tensor:
    """(K, G, Tq, Tk)."""
    kv_heads, per_head = weights.shape[:2]
    return dropout.factors(launch, tile, kv_heads * per_head, weights.dtype).view_as(weights)


def _grouped(x: Tensor, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """(T, N, H) to (T, K, N / K, H)."""
    return x.to(dtype).unflatten(1, (kv_heads, x.shape[1] // kv_heads))


def _scores(q: Tensor, k: Tensor, tile: Tile, scale: float, softcap: float | None) -> tuple[Tensor, Tensor | None]:
    """Masked scores (K, G, Tq, Tk), and under softcap their slope by the uncapped ones."""
    scores, slope = torch.einsum("qkgh,skh->kgqs", q, k) * scale, None
    if softcap is not None:
        bent = torch.tanh(scores / softcap)
        scores, slope = softcap * bent, 1 - bent * bent
    seen = visible(tile, q.device)
    return (scores if seen is None else scores.masked_fill(~seen, -torch.inf)), slope
