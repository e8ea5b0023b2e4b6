"""Dense attention in float64 on one process: what every distributed result is compared with."""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor


def dense_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lengths: Sequence[int],
    *,
    causal: bool = True,
    window: int | None = None,
    chunk: int | None = None,
    sinks: Tensor | None = None,
    softcap: float | None = None,
    scale: float | None = None,
    factors: Callable[[int, int, int], Tensor] | None = None,
    spans: Mapping[int, Sequence[tuple[int, int]]] | None = None,
    whole_spans: bool = False,
    indices: Tensor | None = None,
    dtype: torch.dtype = torch.float64,
) -> Tensor:
    """Attention inside each document of packed rows; differentiable, in float64, or in another type to see its error.

    q (S, N, H), k (S, K, H), v (S, K, Hv), sinks (N,) -> (S, N, Hv). `factors` (of document, rows, heads) gives what
    dropout multiplies its weights by: (N, rows, rows). Rows of a document's `spans` see the later rows of their span,
    or all of it with `whole_spans`, those before a window too. Of what it may see, a row sees the positions `indices`
    (S, k), −1 for none; one that sees nothing gets zeros.
    """
    scale = q.shape[-1] ** -0.5 if scale is None else scale
    documents = zip(*(x.to(dtype).split(list(lengths)) for x in (q, k, v)), strict=True)
    chosen = [None] * len(lengths) if indices is None else indices.split(list(lengths))
    out = [
        _document(
            *qkv,
            _hidden(len(qkv[0]), causal, window, chunk, (spans or {}).get(d, ()), whole_spans, chosen[d]).to(q.device),
            sinks,
            softcap,
            scale,
            factors and factors(d, len(qkv[0]), q.shape[1]),
        )
        for d, qkv in enumerate(documents)
    ]
    return torch.cat(out) if out else q.new_zeros((0, q.shape[1], v.shape[2]), dtype=dtype)


def _document(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    hidden: Tensor,
    sinks: Tensor | None,
    softcap: float | None,
    scale: float,
    factors: Tensor | None,
) -> Tensor:
    k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    scores = torch.einsum("qnh,knh->nqk", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        extra = sinks.to(q.dtype)[:, None, None].expand(-1, len(q), 1)
        scores = torch.cat([scores, extra], dim=-1)
    weights = scores.softmax(-1).masked_fill((scores == -torch.inf).all(-1, keepdim=True), 0.0)[..., : len(k)]
    if factors is not None:
        weights = weights * factors.to(weights.device)
    return torch.einsum("nqk,knh->qnh", weights, v)


def _hidden(
    length: int,
    causal: bool,
    window: int | None,
    chunk: int | None,
    spans: Sequence[tuple[int, int]],
    whole_spans: bool,
    indices: Tensor | None,
) -> Tensor:
    """Which keys each row of a document does not see: (rows, rows) bool."""
    rows = torch.arange(length)
    ago = rows[:, None] - rows  # how far back the key is
    hidden = torch.zeros_like(ago, dtype=torch.bool)
    if causal or window is not None:
        hidden |= ago < 0
    if window is not None:
        hidden |= ago >= window
    for start, stop in spans:
        hidden[start:stop, start:stop] &= (ago[start:stop, start:stop] >= 0) & (not whole_spans)
    if chunk is not None:
        hidden |= rows[:, None] // chunk != rows // chunk
    if indices is not None:
        hidden |= ~(indices[:, :, None] == rows).any(1)
    return hidden


def relative_error(result: Tensor, exact: Tensor) -> float:
    """Norm of the difference over the norm of what is wanted (over 1 where nothing is wanted)."""
    result, exact = result.detach().double(), exact.detach().double()
    assert result.shape == exact.shape, f"shape {tuple(result.shape)}, wanted {tuple(exact.shape)}"
    norm = exact.norm().item()
    return ((result - exact).norm() / (norm or 1.0)).item()
