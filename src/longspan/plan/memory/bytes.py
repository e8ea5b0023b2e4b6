"""Bytes of one rank by what they are for, and how tables write them."""

from dataclasses import dataclass
from math import ceil

from longspan.plan.cost.cost import EXCHANGE_SLICE_BYTES, EXCHANGE_SLICES
from longspan.plan.head_split import HeadSplit

LEAST_OF_GPU = 1 << 30  # a CUDA context takes more: fewer bytes are GiB or MiB, written as bytes
QUERY_GRADIENT_BYTES = 1 << 30
"""The most bytes of a float32 gradient of queries that backward of attention makes at once; of a larger one, heads are
computed in groups, one after another. It is that of 64K rows of Qwen3-8B, with which one key/value head fills a GPU."""


@dataclass(frozen=True, kw_only=True)
class Bytes:
    """Bytes of one rank at the moment at which it needs most.

    >>> Bytes(weights=3, kept=4).total
    7

    `weights`, `gradients` and `states` are this rank's shards, without those on the host; `gathered` are weights of
    layers that are whole, and gradients of layers before they are summed; `kept` is what layers hold for their backward
    passes, `work` what the layer that runs holds besides; `logits` are those of a chunk and what is computed from them;
    `communicators` the buffers of NCCL and the CUDA context.
    """

    weights: int = 0
    gradients: int = 0
    states: int = 0
    gathered: int = 0
    kept: int = 0
    work: int = 0
    logits: int = 0
    communicators: int = 0

    @property
    def total(self) -> int:
        """The sum."""
        return sum(vars(self).values())

    def to_json(self) -> dict[str, int]:
        """Return all by name, and their "total"."""
        return vars(self) | {"total": self.total}


def gib_text(size: float) -> str:
    """Return bytes in GiB, with one decimal."""
    return f"{size / 2**30:,.1f} GiB"


def bytes_hint(size: int) -> str:
    """Return the hint for too small a number of bytes; one from 1 to 4096 was probably meant in GiB.

    >>> bytes_hint(80)
    'it is a number of bytes, and fewer than a CUDA context takes; 80 GiB are 85899345920'
    """
    meant = size if 0 < size <= 4096 else 80
    return f"it is a number of bytes, and fewer than a CUDA context takes; {meant} GiB are {meant << 30}"


def count_head_groups(query_bytes: float, kv_heads: int) -> int:
    """Return in how many groups, one after another, backward of attention computes the key/value heads.

    `query_bytes` are those of the float32 gradient of all queries, of which a group has at most QUERY_GRADIENT_BYTES if
    it has more than one head.

    >>> count_head_groups(5 << 29, 8)
    3
    """
    return max(1, min(kv_heads, ceil(query_bytes / max(1, QUERY_GRADIENT_BYTES))))


def count_exchange_slices(
    split: HeadSplit,
    query_numbers: int,
    bytes_of_number: int,
    *,
    most: int = EXCHANGE_SLICES,
    slice_bytes: int = EXCHANGE_SLICE_BYTES,
) -> int:
    """Return in how many slices heads are exchanged: one for each `slice_bytes` of queries, `most` at most.

    `query_numbers` are those of all query heads of the member with the most rows, so that all members count the same.
    Each group of heads that backward computes one after another may be a slice, even of more than `most`.

    >>> split = HeadSplit(heads=32, kv_heads=8, degree=2)
    >>> [count_exchange_slices(split, rows * 32 * 128, 2) for rows in (4096, 65536, 360448)]
    [1, 2, 4]
    """
    useful_slices = query_numbers * bytes_of_number // max(1, slice_bytes)  # slice_bytes 0: as many as can be
    groups = count_head_groups(4 * query_numbers, split.member_kv_heads)  # 4 bytes: sums are float32
    return split.slice_count(min(useful_slices, max(most, groups))) if useful_slices > 1 else 1
