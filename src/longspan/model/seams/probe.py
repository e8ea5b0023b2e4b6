"""A probe in place of a shard: attention, mixers and experts that get one give outputs of the right shape alone."""

from dataclasses import dataclass, field

from torch import nn


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


@dataclass(frozen=True, eq=False)
class Probe:
    """Takes the place of a shard in a pass on the meta device: attention appends to `calls`, and does not attend."""

    calls: list[RecordedCall] = field(default_factory=list[RecordedCall])
