"""Which heads a member computes where heads are dealt out: integers alone."""

from dataclasses import dataclass
from functools import cache, cached_property
from math import gcd


@dataclass(frozen=True)
class Deal:
    """`heads` query and `kv_heads` key/value heads for `members`, which divide the query heads.

    A member computes `each` query heads, in `runs` equally long runs that use one key/value head each: kernels know no
    other sharing. Where members cut through the queries of a key/value head, or runs would be unlike, every key/value
    head is dealt out `copies` times, one after another.

    >>> deal = Deal(heads=12, kv_heads=4, members=6)
    >>> deal.each, deal.runs, deal.copies  # member 1 computes heads 2 and 3, which use key/value heads 0 and 1
    (2, 2, 3)
    """

    heads: int
    kv_heads: int
    members: int

    @cached_property
    def each(self) -> int:
        """Query heads of a member."""
        return self.heads // self.members

    @cached_property
    def runs(self) -> int:
        """Key/value heads that a member receives."""
        return self.each // gcd(self.heads // self.kv_heads, self.each)

    @cached_property
    def copies(self) -> int:
        """How often every key/value head is dealt out."""
        return self.members * self.runs // self.kv_heads

    def q(self, member: int) -> slice:
        """The member's query heads."""
        return slice(member * self.each, (member + 1) * self.each)

    def slices(self, at_most: int) -> int:
        """Into how many equal slices, at most so many, the query heads of every member can be cut.

        >>> Deal(heads=32, kv_heads=8, members=4).slices(2), Deal(heads=32, kv_heads=8, members=8).slices(2)
        (2, 2)

        A slice is one or more whole runs, or a part of one: its key/value head is then that of other slices as well.
        """
        return next(n for n in range(min(at_most, self.each), 0, -1) if self._cuts_evenly(n))

    def shared(self, slices: int) -> int:
        """How many of so many slices use the same key/value head."""
        return max(1, slices // self.runs)

    def _cuts_evenly(self, slices: int) -> bool:
        return self.runs % slices == 0 or (slices % self.runs == 0 and self.each % slices == 0)


@cache
def dealt(heads: int, kv_heads: int, members: int) -> Deal:
    """`Deal(heads, kv_heads, members)`, worked out once."""
    return Deal(heads, kv_heads, members)
