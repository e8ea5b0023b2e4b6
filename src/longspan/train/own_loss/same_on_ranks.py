"""Whether a function of documents gave the same on every rank: weighted sums of what it gave, compared after passes."""

import numpy as np

from longspan.comm import World
from longspan.train.own_loss.document_loss import Sums

TOLERANCE = 1e-6  # relative: hosts of other kinds may differ in the last bits


class SameOnRanks:
    """Sums of losses and coefficients: of sets whose sums every rank has, and of those that a last stage alone has."""

    def __init__(self) -> None:
        self._sums = np.full((2, 2), -np.inf)  # (kind of sets, loss or coefficients); -inf: this rank has none
        self._sizes = np.zeros((2, 2))

    def add(self, loss: float, coefficients: Sums, *, inside: bool) -> None:
        """Take the loss of some sets, and the coefficients of all documents (D,)."""
        weights = 1.0 + np.sqrt(np.arange(1, len(coefficients) + 1)) % 1.0  # unlike for every document
        sums, kind = np.array([loss, coefficients @ weights]), int(inside)
        self._sums[kind] = np.where(np.isneginf(self._sums[kind]), 0.0, self._sums[kind]) + sums
        self._sizes[kind] += abs(loss), np.abs(coefficients) @ weights

    def differs(self, world: World) -> bool:
        """Whether a rank that has sums has others than the rest; what is not finite is not compared."""
        known = np.isfinite(self._sums)
        low = np.where(known, -self._sums, -np.inf)
        values = np.concatenate([np.where(known, self._sums, -np.inf), low, np.where(known, self._sizes, 0.0)])
        both = np.array(world.control.largest_of(values.ravel().tolist(), "comparison of losses")).reshape(3, 2, 2)
        apart = both[0] + both[1]  # the largest less the smallest; -inf where no rank has any
        return bool((apart > TOLERANCE * both[2]).any())
