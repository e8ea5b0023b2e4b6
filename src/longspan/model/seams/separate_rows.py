"""Rows that see only themselves, for trials: a shard that says so, and an attention for it."""

import torch
from torch import Tensor

from longspan.comm import SequenceShard

# ---- rows that see only themselves


class SeparateRows(SequenceShard):
    """A shard whose rows do not meet, neither in attention nor in mixers."""

    __slots__ = ()

    @classmethod
    def from_shard(cls, shard: SequenceShard) -> "SeparateRows":
        """Make a shard with the rows, positions and documents of another, whose rows do not meet, in spans neither."""
        rows = object.__new__(cls)
        rows._set(**{name: getattr(shard, name) for name in SequenceShard.__slots__} | {"spans": ()})
        return rows


def attend_separately(query: Tensor, key: Tensor, value: Tensor, scaling: float | None) -> Tensor:
    """Attend from each row to itself, for trials: query (1, N, T, H), key, value (1, K, T, H) to (1, T, N, H).

    Softmax would give the value alone. These weights depend on query and key, so that a change of either shows; they
    are 0.5 to 2.5, so that rounding is not made larger.
    """
    groups = query.shape[1] // key.shape[1]
    wide_dtype = torch.promote_types(query.dtype, torch.float32)
    key, value = (x.repeat_interleave(groups, 1) for x in (key, value))
    q, k = query.to(wide_dtype), key.to(wide_dtype)
    lengths = q.norm(dim=-1, keepdim=True) * k.norm(dim=-1, keepdim=True)  # (1, N, T, 1)
    cosine = (q * k).sum(-1, keepdim=True) / lengths.clamp(min=1e-30)
    size = lengths * (scaling or 1.0)
    weights = 1.5 + 0.5 * cosine * (1 + size / (1 + size))
    return (weights * value).to(value.dtype).transpose(1, 2).contiguous()
