"""What stands for a shard in trials: a probe, and rows that see only themselves, with an attention for these."""

from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

from longspan.comm import SequenceShard


@dataclass(frozen=True)
class RecordedCall:
    """One call of attention: its layer, the features it needs, and the tensors for which `attend` has no argument."""

    module: nn.Module
    causal: bool
    softcap: float | None
    unknown: tuple[str, ...]
    head_dim: int = 0
    value_dim: int = 0
    window: int | None = None
    chunk: int | None = None
    indexed: bool = False
    block_size: int = 1
    # There is an entry for so many rows, beside the window; 0: none.
    entries: int = 0
    entries_chosen: bool = False


@dataclass(frozen=True, eq=False)
class Probe:
    """Takes the place of a shard in a pass on the meta device: attention appends to `calls`, and does not attend.

    Mixers and experts that get one give outputs of the right shape alone.
    """

    calls: list[RecordedCall] = field(default_factory=list[RecordedCall])


class SeparateRows(SequenceShard):
    """A shard whose rows do not meet, neither in attention nor in mixers."""

    __slots__ = ()

    @classmethod
    def from_shard(cls, shard: SequenceShard) -> "SeparateRows":
        """Make a shard with the rows, positions and documents of another, whose rows do not meet, not even in spans."""
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
