"""Which heads a member computes where heads are dealt out: integers alone."""

from dataclasses import dataclass
from math import gcd


@dataclass(frozen=True)
class Deal:
    """`heads` query and `kv_heads` key/value heads for `members`, which divide the query heads.

    >>> deal = Deal(heads=12, kv_heads=4, members=6)
    >>> [(deal.q(m).start, deal.kv(m).start, deal.uses(m)) for m in (0, 1)]
    [(0, 0, [0, 0]), (2, 0, [0, 1])]
    """

    heads: int
    kv_heads: int
    members: int

    def q(self, member: int) -> slice:
        """The member's query heads."""
        each = self.heads // self.members
        return slice(member * each, (member + 1) * each)

    def kv(self, member: int) -> slice:
        """The key/value heads that those use."""
        group, mine = self.heads // self.kv_heads, self.q(member)
        return slice(mine.start // group, (mine.stop - 1) // group + 1)

    def uses(self, member: int) -> list[int]:
        """Which of `kv(member)` its query heads use, one entry for each run of them, all runs equally long.

        Kernels know no other sharing of heads, so where members cut through the queries of a head it appears twice.
        """
        group, mine = self.heads // self.kv_heads, self.q(member)
        run = gcd(group, mine.stop - mine.start)
        return [head // group - self.kv(member).start for head in range(mine.start, mine.stop, run)]

    @property
    def shares(self) -> bool:
        """Whether some key/value head goes to several members."""
        return sum(self.kv(m).stop - self.kv(m).start for m in range(self.members)) > self.kv_heads
