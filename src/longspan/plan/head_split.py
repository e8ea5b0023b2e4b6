"""How members that exchange heads deal them out, in integers: attention and plans share this."""

from dataclasses import dataclass
from functools import cache, cached_property
from math import gcd


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
        """Return the number of query heads of a member."""
        return self.heads // self.degree

    @cached_property
    def member_kv_heads(self) -> int:
        """Return the number of key/value heads that a member receives, one for each run of its query heads.

        A run is the longest that divides both the query heads of a key/value head and those of a member.
        """
        return self.member_heads // gcd(self.heads // self.kv_heads, self.member_heads)

    @cached_property
    def kv_copies(self) -> int:
        """Return how often every key/value head is sent."""
        return self.degree * self.member_kv_heads // self.kv_heads

    def q_heads(self, member: int) -> slice:
        """Return the member's query heads."""
        return slice(member * self.member_heads, (member + 1) * self.member_heads)

    def slice_count(self, at_most: int) -> int:
        """Return into how many equal slices the query heads of every member can be cut: the most up to `at_most`.

        >>> [HeadSplit(heads=32, kv_heads=8, degree=degree).slice_count(2) for degree in (4, 8)]
        [2, 2]

        A slice is one or more whole runs, or a part of one: its key/value head is then that of other slices as well.
        """
        return next(n for n in range(min(at_most, self.member_heads), 0, -1) if self._cuts_evenly(n))

    def slices_per_kv_head(self, slices: int) -> int:
        """Return how many of `slices` slices use the same key/value head: several only where slices cut a run."""
        return max(1, slices // self.member_kv_heads)

    def _cuts_evenly(self, slices: int) -> bool:
        """Return whether `slices` slices of a member's query heads can be whole runs each, or equal parts of a run."""
        return self.member_kv_heads % slices == 0 or (
            slices % self.member_kv_heads == 0 and self.member_heads % slices == 0
        )


head_split = cache(HeadSplit)  # worked out once
