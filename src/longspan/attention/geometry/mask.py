"""What a query sees of its document, and whether that is little enough to send rows instead of going round a ring."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np


class Mask(NamedTuple):
    """What a query sees of its document: all keys, those up to its own position, or of those the last `window`.

    With `chunk` c it sees those of its own chunk: a query at position p those from p − p mod c on.
    """

    causal: bool = True
    window: int | None = None
    chunk: int | None = None

    def within(self, lengths: Sequence[int]) -> "Mask":
        """The same over documents of these lengths: a window or chunk of the longest's length hides nothing: none."""
        longest = max(lengths, default=0)
        window, chunk = (None if x is None or x >= longest else x for x in (self.window, self.chunk))
        return Mask(self.causal, window, chunk)


def is_narrow(mask: Mask, lengths: Sequence[int], degree: int) -> bool:
    """Whether so little is seen of other members' rows that sending those is cheaper than a ring.

    Judged from lengths alone, and so the same on every member: a document lies in at most 2 · degree runs, each of
    which sees at most window − 1 rows before it, or those from the start of its chunk on (taken for equal runs).
    Narrow: at most half of the rows that would go round a ring, and at most twice the member's own rows, which is what
    a ring holds of others.
    """
    if degree == 1 or (mask.window is None and mask.chunk is None):
        return False
    rows = np.asarray(lengths, dtype=np.int64)
    foreign_rows = (degree - 1) * rows
    if mask.window is not None:
        foreign_rows = np.minimum(foreign_rows, 2 * degree * min(mask.window - 1, int(rows.max())))
    if mask.chunk is not None:
        starts = rows[:, None] * np.arange(1, 2 * degree) // (2 * degree)
        foreign_rows = np.minimum(foreign_rows, (starts % mask.chunk).sum(1))
    return int(foreign_rows.sum()) <= min((degree - 1) / 2, 2) * int(rows.sum())
