"""A call of `attend` as one value: what it computes, by which kernel, and with whom. Patterns and kernels take it.

Its arguments are checked and packed in `arguments.py`, once for all layers of a micro-batch.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from longspan.attention.dropout import Dropout
from longspan.attention.geometry.members import Mask, Members

_CPU, _CAUSAL = torch.device("cpu"), Mask()


class Saved(NamedTuple):
    """What backward needs of forward: q (T, N, H), k (Tk, K, H), v (Tk, K, Hv), out (T, N, Hv) and lse (T, N).

    `out` and `lse` are over the keys of all blocks, whichever block k and v are.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor


class BlockKernel(Protocol):
    """What computes one launch: a row of the support table (`kernels/table.py`)."""

    @property
    def forward(self) -> Callable[..., tuple[Tensor, Tensor]]:
        """(q, k, v, launch, call) -> out, lse."""
        ...

    @property
    def backward(self) -> Callable[..., tuple[Tensor, Tensor, Tensor]]:
        """(dout, saved, launch, call) -> dq, dk, dv."""
        ...


class CallPart(NamedTuple):
    """The local rows of one group, how the group communicates, and who its members are."""

    rows: slice
    cp_comm_type: str
    members: Members


@dataclass(frozen=True)
class AttentionCall:
    """What `attend` does for q (T, N, H), k (T, K, H) and v (T, K, Hv) over a shard.

    N, K, H and Hv are `heads`, `kv_heads`, `head_size` and `value_size`. `scale` is above 0: the sign of another is in
    `sign`, which q is multiplied by, for kernels find the largest score before they scale. `sinks` (N,) and `dropout`
    are those of the heads at hand. `one_document`: every group has one document, so that a launch has few tiles.
    `deterministic`: the same bits again; torch's own switch by default. Who asks for a kernel or a communication type
    alone leaves out the rest:

    >>> choose(AttentionCall(32, 8, 192, 128, torch.float32)).name
    'cpu_flash'
    """

    heads: int
    kv_heads: int
    head_size: int
    value_size: int
    dtype: torch.dtype = torch.bfloat16
    device: torch.device = _CPU
    mask: Mask = _CAUSAL
    scale: float = 1.0
    sign: int = 1
    softcap: float | None = None
    dropout: Dropout | None = None
    max_gather_bytes: int | None = None
    one_document: bool = False
    deterministic: bool = field(default_factory=torch.are_deterministic_algorithms_enabled)
    kernel: BlockKernel | None = None
    parts: tuple[CallPart, ...] = ()
    sinks: Tensor | None = field(default=None, compare=False)

    @property
    def features(self) -> frozenset[str]:
        """What it asks for that some kernels lack: of "window", "softcap" and "dropout"."""
        asked_for = {"window": self.mask.window, "softcap": self.softcap, "dropout": self.dropout}
        return frozenset(name for name, value in asked_for.items() if value is not None)

    def for_heads(self, start: int, stop: int) -> "AttentionCall":
        """The same for query heads start to stop of the tensors at hand."""
        if self.sinks is None and self.dropout is None:
            return self
        sinks = None if self.sinks is None else self.sinks[start:stop]
        return replace(self, sinks=sinks, dropout=self.dropout and self.dropout.from_head(start))


class AttentionCache:
    """What attention derives from a shard, for all layers: `shard.derived.attention`.

    `calls` by what they are made of, `members` by the group's index, the neighbours that act as one and the mask, and
    the type that "auto" stands for by the group's index and the call's sizes.
    """

    def __init__(self, listed_by_layer: bool) -> None:
        self.listed_by_layer = listed_by_layer  # whether a group's types are a list with one per layer
        self.calls: dict[Any, AttentionCall] = {}
        self.members: dict[tuple[int, int, Mask], Members] = {}
        self.automatic: dict[Any, tuple[str, int]] = {}
