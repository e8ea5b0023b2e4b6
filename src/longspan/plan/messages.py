"""What the members of a group send each other in attention, in integers: attention does so, and prices read it.

Of heads that are exchanged, who computes which, and in how many slices; under a narrow window, whether members send
just the rows that others see.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import ceil, gcd

import numpy as np

# Slices of heads, whose messages hide behind each other's work, and from which bytes on (measured on H200s):
EXCHANGE_SLICES = 2  # four took longer
# A slice with less of a member's queries costs more in launches than it hides.
EXCHANGE_SLICE_BYTES = 32 << 20
GATHER_SLICES = 2
# From so many bytes of keys and values of all rows on, slices hide more than they cost.
GATHER_SLICE_BYTES = 128 << 20
# Attention of at most so many numbers of queries is replayed; of more, launches hide behind the device's work.
REPLAYED_NUMBERS = 1 << 24
# A flat buffer, which is summed over slots, has so many numbers of gradients that FSDP2 does not shard.
SUMMED_NUMBERS = 1 << 24

QUERY_GRADIENT_BYTES = 1 << 30
"""The most bytes of a float32 gradient of queries that backward of attention makes at once; of a larger one, heads are
computed in groups, one after another. It is that of 64K rows of Qwen3-8B, with which one key/value head fills a GPU."""


@dataclass(frozen=True)
class HeadSplit:
    """`heads` query and `kv_heads` key/value heads for `degree` members, which divides the query heads.

    A member computes `member_heads` query heads, in `member_kv_heads` equally long runs that use one key/value head
    each, the only sharing that kernels have. Where members cut through the queries of a key/value head, or where runs
    would differ in length, every key/value head is sent `kv_copies` times, one after another. Member 1 of this example
    computes heads 2 and 3, which use key/value heads 0 and 1:

    >>> split = HeadSplit(heads=12, kv_heads=4, degree=6)
    >>> split.member_heads, split.member_kv_heads, split.kv_copies
    (2, 2, 3)
    """

    heads: int
    kv_heads: int
    degree: int

    @cached_property
    def member_heads(self) -> int:
        return self.heads // self.degree

    @cached_property
    def member_kv_heads(self) -> int:
        """The key/value heads that a member receives, one for each run of its query heads; a run is the longest that
        divides both the query heads of a key/value head and those of a member.
        """
        return self.member_heads // gcd(self.heads // self.kv_heads, self.member_heads)

    @cached_property
    def kv_copies(self) -> int:
        return self.degree * self.member_kv_heads // self.kv_heads

    def q_heads(self, member: int) -> slice:
        return slice(member * self.member_heads, (member + 1) * self.member_heads)

    def slice_count(self, at_most: int) -> int:
        """Return into how many equal slices the query heads of every member can be cut: the most up to `at_most`.

        A slice is one or more whole runs, or a part of one: its key/value head is then that of other slices as well.
        """
        heads = self.member_heads
        runs = self.member_kv_heads
        counts = range(min(at_most, heads), 0, -1)
        return next(n for n in counts if runs % n == 0 or (n % runs == 0 and heads % n == 0))

    def slices_per_kv_head(self, slices: int) -> int:
        """Return how many of `slices` slices use the same key/value head: several only where slices are parts of a
        run.
        """
        return max(1, slices // self.member_kv_heads)


head_split: Callable[[int, int, int], HeadSplit] = cache(HeadSplit)  # worked out once


def count_head_groups(query_bytes: float, kv_heads: int) -> int:
    """Return in how many groups, one after another, backward of attention computes the key/value heads: so many that
    the float32 gradient of a group's queries has at most QUERY_GRADIENT_BYTES, or a group for each head. `query_bytes`
    are those of the gradient of all queries.
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
    """Return in how many slices heads are exchanged: one for each `slice_bytes` of queries, but no more than `most`, or
    than the groups of heads that backward computes one after another, if these are more. `query_numbers` are those of
    all query heads of the member with the most rows, so that all members count the same.
    """
    useful_slices = query_numbers * bytes_of_number // max(1, slice_bytes)  # slice_bytes 0: as many as possible
    groups = count_head_groups(4 * query_numbers, split.member_kv_heads)  # 4 bytes: sums are float32
    if useful_slices > 1:
        return split.slice_count(min(useful_slices, max(most, groups)))
    return 1


def fetched_share(lengths: Sequence[int], degree: int, window: int | None, chunk: int | None) -> float:
    """Return the rows that members send, over those that a ring sends.

    It is 1.0 where a ring goes round, and less where members send only the rows that others see: under a window or
    chunks so narrow that these are at most half of a ring's rows, and at most twice the members' rows, as many as a
    ring holds of others.

    A document has at most 2 · degree runs, which here count as equally long. Under a window each run sees window − 1
    rows before it, under chunks those from the start of its first row's chunk on.
    """
    if degree == 1 or (window is None and chunk is None):
        return 1.0
    rows = np.asarray(lengths, dtype=np.int64)
    # Members need so many rows of each document from others: at most what a ring sends.
    foreign = (degree - 1) * rows
    if window is not None:
        before_run = min(window - 1, int(rows.max()))  # a huge window must not overflow
        foreign = np.minimum(foreign, 2 * degree * before_run)
    if chunk is not None:
        # Runs start here, but for a document's first.
        starts = rows[:, None] * np.arange(1, 2 * degree) // (2 * degree)
        foreign = np.minimum(foreign, (starts % chunk).sum(1))
    seen_rows = int(foreign.sum())
    member_rows = int(rows.sum())
    if seen_rows <= min((degree - 1) / 2, 2) * member_rows:
        return seen_rows / ((degree - 1) * member_rows)
    return 1.0
