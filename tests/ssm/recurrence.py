"""The recurrences row by row and document by document, in float64: what scans and convolutions are compared with."""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

KINDS = {  # decays a head, whether there is a delta term
    "delta": (1, True),
    "delta by channel": (None, True),
    "one number a head": (1, False),
}


def inputs(kind: str, rows: int, heads: int, size: int, width: int, seed: int = 0) -> list[Tensor | None]:
    """q, k, v, g and beta of slow decays, keys of norm 1 under a delta term, all float64 leaves."""
    generator = torch.Generator().manual_seed(seed)
    decays, delta = KINDS[kind]
    draw = [torch.randn(rows, heads, n, generator=generator, dtype=torch.float64) for n in (size, size, width)]
    g = -0.2 * torch.rand(rows, heads, decays or size, generator=generator, dtype=torch.float64)
    beta = 2 * torch.rand(
        rows, heads, generator=generator, dtype=torch.float64
    )  # up to 2, as with negative eigenvalues
    draw[1] = F.normalize(draw[1], dim=-1) if delta else draw[1]
    return [x.requires_grad_() for x in (*draw, g)] + [beta.requires_grad_() if delta else None]


def by_rows(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, lengths: Sequence[int]) -> Tensor:
    """o (S, H, V), one row after another."""
    outs, row = [], 0
    for length in lengths:
        state = v.new_zeros((k.shape[1], k.shape[2], v.shape[2]))
        for _ in range(length):
            state = g[row].exp().unsqueeze(-1) * state
            new = v[row]
            if beta is not None:
                seen = torch.einsum("hk,hkv->hv", k[row], state)
                new = beta[row].unsqueeze(-1) * (v[row] - seen)
            state = state + k[row].unsqueeze(-1) * new.unsqueeze(1)
            outs.append(torch.einsum("hk,hkv->hv", q[row], state))
            row += 1
    return torch.stack(outs) if outs else v[:0]


def convolved(x: Tensor, weight: Tensor, bias: Tensor | None, lengths: Sequence[int]) -> Tensor:
    """The causal convolution of each document alone, from its definition."""
    outs = []
    for document in x.split(list(lengths)):
        padded = torch.cat([x.new_zeros((weight.shape[1] - 1, x.shape[1])), document])
        terms = [padded[i : i + len(document)] * weight[:, i] for i in range(weight.shape[1])]
        outs.append(sum(terms) if bias is None else sum(terms) + bias)
    return torch.cat(outs)
