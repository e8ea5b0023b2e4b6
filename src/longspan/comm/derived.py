"""What others work out from a shard, and keep with it."""

from typing import Any

from torch import Tensor


class Derived:
    """What is worked out from a shard once and freed with it; it is no part of the shard's value.

    `attention` and `chains` belong to the rooms of attention and state-space layers and `recorded_calls` to the model's
    seams: only they know their types.
    `spliced` are rows that take the places of token embeddings: (local rows (n,), rows (n, D)) of every modality, by
    how many tokens further on than the local rows the embedded tokens are; `added` by decoder
    layer those that are added to what the layer returns; `leaves` are what collects the gradients of both.
    """

    __slots__ = (
        "added",
        "attention",
        "chains",
        "leaves",
        "packed_order",
        "real_rows",
        "recorded_calls",
        "spliced",
    )

    def __init__(self) -> None:
        self.packed_order: tuple[tuple[int, ...], Tensor] | None = None  # for these starts of the slots' rows
        self.real_rows: Tensor | None = None
        self.attention: Any = None
        self.chains: Any = None
        self.recorded_calls: Any = None
        self.spliced: dict[int, tuple[tuple[Tensor, Tensor], ...]] = {}
        self.leaves: tuple[Tensor, ...] = ()
        self.added: dict[int, tuple[tuple[Tensor, Tensor], ...]] = {}
