"""Rows that do not meet: stand-ins for attention and for mixers, by which everything else of a model can be tried.

Each is a function of a row's own query, key and value, or of its own inputs of a scan, and depends on all of them. A
prepared model's attention and mixers call them if `shard=` is a `SeparateRows`; everything else, experts, rotary angles
and tensor parallelism among it, takes that for any other shard.
"""

import torch
from torch import Tensor
from torch.nn import functional as F

from longspan.comm import SequenceShard


class SeparateRows(SequenceShard):
    """A shard whose rows do not meet, neither in attention nor in mixers."""

    __slots__ = ()

    @classmethod
    def of(cls, shard: SequenceShard) -> "SeparateRows":
        """Make a shard with the rows, positions and documents of another, whose rows do not meet: it has its fields."""
        rows = object.__new__(cls)
        rows._set(**{name: getattr(shard, name) for name in SequenceShard.__slots__})
        return rows


def attend_separately(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Attend each row to itself only: query (1, N, T, H), key, value (1, K, T, H) -> (1, T, N, H).

    A row's value gets a weight that depends on its query and key, on their directions and their lengths. Weights are
    0.5 to 2.5 whatever queries and keys are, so that rounding is not made larger.
    """
    groups, wide_dtype = query.shape[1] // key.shape[1], torch.promote_types(query.dtype, torch.float32)
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    q, k = query.to(wide_dtype), key.to(wide_dtype)
    lengths = q.norm(dim=-1, keepdim=True) * k.norm(dim=-1, keepdim=True)  # (1, N, T, 1)
    cosine = (q * k).sum(-1, keepdim=True) / lengths.clamp(min=1e-30)
    size = lengths * (scaling or 1.0)
    weights = 1.5 + 0.5 * cosine * (1 + size / (1 + size))
    return (weights * value).to(value.dtype).transpose(1, 2).contiguous()


def scan_separately(q: Tensor, k: Tensor, v: Tensor, g: Tensor, beta: Tensor | None, scale: float) -> Tensor:
    """Let each row read only itself in place of a scan: q, k (T, H, K), v (T, H, V), g (T, H, 1 or K) -> (T, H, V).

    The formula is no model's: it only has to depend on every input.
    """
    q, k = (x.repeat_interleave(v.shape[1] // x.shape[1], 1) for x in (q, k))
    out = scale * (q * k).sum(-1, keepdim=True) * v * (1 + g.exp().mean(-1, keepdim=True))
    return out if beta is None else out * beta.unsqueeze(-1)


def convolve_separately(x: Tensor, weight: Tensor, bias: Tensor | None, silu: bool) -> Tensor:
    """Weight each channel of a row by itself in place of a mixer's convolution: (T, C) to (T, C)."""
    y = x * weight[:, -1] + (0 if bias is None else bias)
    return F.silu(y) if silu else y
