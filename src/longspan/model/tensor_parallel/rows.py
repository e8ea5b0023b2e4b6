"""Which rows of a parameter a tensor-parallel rank has: equal slices, those of its heads' groups, or several in one."""

import itertools
import math
from dataclasses import dataclass


@dataclass(frozen=True)
class EvenRows:
    """Rows that are divided into equal slices, one per rank; tp divides `size`."""

    size: int

    def runs(self, tp: int, rank: int) -> tuple[range, ...]:
        """Return this rank's rows, a single run."""
        part = self.size // tp
        return (range(rank * part, (rank + 1) * part),)


@dataclass(frozen=True)
class GroupRows:
    """Rows of groups of heads, `width` for each group: a rank has the rows of its heads' groups, in their order.

    `heads` are all heads, of which each of the `groups` serves equally many; tp divides them. A group whose heads are
    on several ranks is on each of these.
    """

    groups: int
    width: int
    heads: int

    @property
    def size(self) -> int:
        """All rows."""
        return self.groups * self.width

    def heads_together(self, tp: int) -> int:
        """Return the largest n for which every n neighbouring heads of a rank, from its first on, share a group."""
        return math.gcd(self.heads // tp, self.heads // self.groups)

    def runs(self, tp: int, rank: int) -> tuple[range, ...]:
        """Return this rank's rows: its group's `width` rows for every `heads_together` neighbouring heads."""
        first = rank * (self.heads // tp)
        together = self.heads_together(tp)
        heads = range(first, first + self.heads // tp, together)
        groups = [head // (self.heads // self.groups) for head in heads]
        return tuple(range(group * self.width, (group + 1) * self.width) for group in groups)


@dataclass(frozen=True)
class FusedRows:
    """Rows of several things, one after another in one dim of a parameter."""

    parts: tuple[EvenRows | GroupRows, ...]

    @property
    def size(self) -> int:
        """All rows."""
        return sum(part.size for part in self.parts)

    def runs(self, tp: int, rank: int) -> tuple[range, ...]:
        """Return this rank's rows, part after part, counted from the first row of the first part."""
        runs = list[range]()
        start = 0
        for rows_part in self.parts:
            runs += [range(start + run.start, start + run.stop) for run in rows_part.runs(tp, rank)]
            start += rows_part.size
        return tuple(runs)

    def cut_pieces(self, tp: int, rank: int) -> tuple[list[int], list[int]]:
        """Cut all rows wherever a run of this rank begins or ends, for `torch.split`.

        Returns the sizes of all pieces, and the indices of those that the rank has, in its order.
        """
        runs = self.runs(tp, rank)
        cuts = sorted({0, self.size, *(run.start for run in runs), *(run.stop for run in runs)})
        order = [i for run in runs for i in range(cuts.index(run.start), cuts.index(run.stop))]
        return [end - start for start, end in itertools.pairwise(cuts)], order
