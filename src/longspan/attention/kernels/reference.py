"""Attention tile by tile in plain tensor operations: any device, any floating dtype, every mask, softcap, dropout.

Scores are float32 (float64 for float64), and those of a piece of a tile are held at a time, of one query row at least.
"""

from collections.abc import Iterator

import torch
from torch import Tensor

from longspan.attention.call import AttendCall, Saved
from longspan.attention.dropout import Dropout
from longspan.attention.rows import NO_KEY, accumulation_dtype
from longspan.attention.tiles import Launch, Tile, visible_key_mask

# The scores of a piece and all that is made of them take at most this many bytes.
_BYTES_AT_ONCE = 256 << 20
# Numbers that backward holds of a score at most, in the score's dtype: weight, its gradient, slope of softcap, factor.
_NUMBERS_PER_SCORE = 4
# Where dropout hashes a score, it takes two words, and whether the score is kept.
_HASH_BYTES = 2 * 8 + 1


def forward(q: Tensor, k: Tensor, v: Tensor, launch: Launch, call: AttendCall) -> tuple[Tensor, Tensor]:
    """Attend from q (Tq, N, H) to k (Tk, K, H), v (Tk, K, Hv): out (Tq, N, Hv), lse (Tq, N)."""
    dtype = accumulation_dtype(q.dtype)
    out = q.new_empty((len(q), q.shape[1], v.shape[2]), dtype=dtype)  # tiles hold every row once
    lse = q.new_empty(q.shape[:2], dtype=dtype)
    whole_k = _whole_keys(k, v, call)
    for tile in _cut_tiles(launch, q.shape[1], dtype, call.dropout):
        rows, keys = slice(tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop)
        scores = _scores(_group_heads(q[rows], k.shape[1], dtype), whole_k[keys].to(dtype), call)
        scores = _mask_scores_(scores, tile, launch, call)
        largest = scores.amax(-1, keepdim=True).clamp_(min=NO_KEY)  # where a row has no key
        # A piece's scores are large, so the weights are written over them.
        weights = scores.sub_(largest).exp_()
        total = weights.sum(-1, keepdim=True).clamp_(min=1)  # the largest weight is 1
        weights.div_(total)
        row_lse = (largest + total.log()).squeeze(-1)
        if call.dropout is not None:
            weights *= _dropout_factors(call.dropout, launch, tile, weights)
        out[rows] = torch.einsum("kgqs,skh->qkgh", weights, v[keys].to(dtype)).flatten(1, 2)
        lse[rows] = row_lse.permute(2, 0, 1).flatten(1, 2)
    return out, lse


def backward(dout: Tensor, saved: Saved, launch: Launch, call: AttendCall) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of this block: dq (Tq, N, H), dk (Tk, K, H), dv (Tk, K, Hv).

    Weights are w = exp(score − lse), times factors d of dropout. dv = Σ rows d w dout; a score's gradient is w (d (dout
    · v) − delta) · scale, with delta = dout · out, times the soft cap's slope 1 − (score / cap)²; dq and dk are its
    products with k and q.
    """
    q, k, v, _, lse = saved
    dtype = accumulation_dtype(q.dtype)
    deltas = saved.deltas(dout)
    kv_heads = k.shape[1]
    whole_k = _whole_keys(k, v, call)
    dq, dk, dv = (x.new_zeros(x.shape, dtype=dtype) for x in (q, whole_k, v))
    for tile in _cut_tiles(launch, q.shape[1], dtype, call.dropout):
        rows, keys = slice(tile.q_start, tile.q_stop), slice(tile.k_start, tile.k_stop)
        q_rows, dout_rows = (_group_heads(x[rows], kv_heads, dtype) for x in (q, dout))
        k_rows, v_rows = whole_k[keys].to(dtype), v[keys].to(dtype)
        weights = _scores(q_rows, k_rows, call)  # scores at first: they become weights in place, to be held once
        # The cap is a tanh, whose slope is 1 − tanh².
        slope = None if call.softcap is None else weights.div(call.softcap).square_().neg_().add_(1)
        row_lse, delta = (x[rows].unflatten(1, (kv_heads, -1)).permute(1, 2, 0) for x in (lse, deltas))
        weights = _mask_scores_(weights, tile, launch, call).sub_(row_lse.unsqueeze(-1)).exp_()
        factors = None if call.dropout is None else _dropout_factors(call.dropout, launch, tile, weights)
        dv[keys] += torch.einsum("kgqs,qkgh->skh", weights if factors is None else weights * factors, dout_rows)
        dscores = torch.einsum("qkgh,skh->kgqs", dout_rows, v_rows)
        if factors is not None:
            dscores *= factors
        dscores.sub_(delta.unsqueeze(-1)).mul_(weights).mul_(call.scale)
        if slope is not None:
            dscores *= slope
        dq[rows] = torch.einsum("kgqs,skh->qkgh", dscores, k_rows).flatten(1, 2)
        dk[keys] += torch.einsum("kgqs,qkgh->skh", dscores, q_rows)
    if call.latents:  # the first numbers of a whole key are its value
        value_share, dk = dk.split([v.shape[2], k.shape[2]], -1)
        dv += value_share
    return dq, dk, dv


def _whole_keys(k: Tensor, v: Tensor, call: AttendCall) -> Tensor:
    """With latents the keys are the numbers of v and then those of k."""
    return torch.cat((v, k), -1) if call.latents else k


def _cut_tiles(launch: Launch, heads: int, dtype: torch.dtype, dropout: Dropout | None) -> Iterator[Tile]:
    """The scores of a piece, and what is made of them, take at most _BYTES_AT_ONCE, or the piece is one row."""
    bytes_of_score = _NUMBERS_PER_SCORE * dtype.itemsize + (0 if dropout is None else _HASH_BYTES)
    for tile in launch.tiles:
        yield from tile.pieces(max(1, _BYTES_AT_ONCE // (bytes_of_score * heads * tile.keys)))


def _dropout_factors(dropout: Dropout, launch: Launch, tile: Tile, weights: Tensor) -> Tensor:
    kv_heads, per_head = weights.shape[:2]
    return dropout.factors(launch, tile, kv_heads * per_head, weights.dtype).view_as(weights)


def _group_heads(x: Tensor, kv_heads: int, dtype: torch.dtype) -> Tensor:
    """(T, N, H) to (T, K, N / K, H)"""
    return x.to(dtype).unflatten(1, (kv_heads, x.shape[1] // kv_heads))


def _scores(q: Tensor, k: Tensor, call: AttendCall) -> Tensor:
    """(K, G, Tq, Tk), scaled and soft-capped; those that the mask hides are among them."""
    scores = torch.einsum("qkgh,skh->kgqs", q, k).mul_(call.scale)
    if call.softcap is None:
        return scores
    return scores.div_(call.softcap).tanh_().mul_(call.softcap)


def _mask_scores_(scores: Tensor, tile: Tile, launch: Launch, call: AttendCall) -> Tensor:
    for seen in (visible_key_mask(tile, scores.device), _chosen_key_mask(tile, launch, call)):
        if seen is not None:
            scores.masked_fill_(~seen, -torch.inf)
    return scores


def _chosen_key_mask(tile: Tile, launch: Launch, call: AttendCall) -> Tensor | None:
    """(queries, keys) bool, or (K, 1, queries, keys); `chosen` marks block b of the document in column b + 1: −1 marks
    column 0."""
    if call.indices is None:
        return None
    rows = call.indices[tile.q_start : tile.q_stop].long()
    _, _, positions = launch.row_identities
    blocks = positions[tile.k_start : tile.k_stop] // call.block_size
    size = int(torch.maximum(blocks.amax(), rows.amax() if rows.numel() else blocks.amax())) + 2
    chosen = torch.zeros((*rows.shape[:-1], size), dtype=torch.bool, device=rows.device).scatter_(
        -1, rows + 1, True
    )
    mask = chosen[..., blocks + 1]
    return mask.transpose(0, 1).unsqueeze(1) if call.by_head else mask
