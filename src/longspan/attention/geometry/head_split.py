"""Which heads a member computes where heads are split over members: integers alone."""

from dataclasses import dataclass
from functools import cache, cached_property
from math import gcd


@dataclass(frozen=True)
class HeadSplit:
    """`heads` query and `kv_heads` key/value heads for `degree` members, which divides the query heads.

    A member computes `member_heads` query heads, in `member_kv_heads` equally long runs that use one key/value head
    each: kernels know no other sharing. Where members cut through the queries of a key/value head, or where runs would
    differ in length, every key/value head is sent `kv_copies` times, one after another. Member 1 of this example
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
        """Query heads of a member."""
        return self.heads // self.degree

    @cached_property
    def member_kv_heads(self) -> int:
        """Key/value heads that a member receives."""
        return self.member_heads // gcd(self.heads // self.kv_heads, self.member_heads)

    @cached_property
    def kv_copies(self) -> int:
        """How often every key/value head is sent."""
        return self.degree * self.member_kv_heads // self.kv_heads

    def q_heads(self, member: int) -> slice:
        """The member's query heads."""
        return slice(member * self.member_heads, (member + 1) * self.member_heads)

    def slices(self, at_most: int) -> int:
        """Into how many equal slices, at most so many, the query heads of every member can be cut.

        >>> HeadSplit(heads=32, kv_heads=8, degree=4).slices(2), HeadSplit(heads=32, kv_heads=8, degree=8).slices(2)
        (2, 2)

        A slice is one or more whole runs, or a part of one: its key/value head is then that of other slices as well.
        """
        return next(n for n in range(min(at_most, self.member_heads), 0, -1) if self._cuts_evenly(n))

    def slices_per_kv_head(self, slices: int) -> int:
        """How many of so many slices use the same key/value head."""
        return max(1, slices // self.member_kv_heads)

    def _cuts_evenly(self, slices: int) -> bool:
        return self.member_kv_heads % slices == 0 or (
            slices % self.member_kv_heads == 0 and self.member_heads % slices == 0
        )


@cache
def head_split(heads: int, kv_heads: int, degree: int) -> HeadSplit:
    """`HeadSplit(heads, kv_heads, degree)`, worked out once."""
    return HeadSplit(heads, kv_heads, degree)
