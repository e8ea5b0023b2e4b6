"""Losses that every rank computes by itself: whether they are the same everywhere."""

import numpy as np

from longspan.comm import World
from longspan.layout import Floats

TOLERANCE = 1e-6  # relative: hosts of other kinds may differ in the last bits


class SameOnRanks:
    """Sums of losses and coefficients: of sets whose sums every rank has, and of those that only a last stage has."""

    def __init__(self) -> None:
        self._sums = np.full((2, 2), -np.inf)  # (kind of sets, loss or coefficients); -inf: this rank has none
        self._sizes = np.zeros((2, 2))

    def add_sums(self, loss: float, coefficients: Floats, *, inside: bool) -> None:
        """Add the loss of some sets, and the coefficients of all documents, of any shape; `inside` sets are in one
        micro-batch.

        Coefficients are added with a weight for each, so that swapped ones do not give the same sum.
        """
        coefficients = coefficients.ravel()
        weights = 1.0 + np.sqrt(np.arange(1, len(coefficients) + 1)) % 1.0
        sums = np.array([loss, coefficients @ weights])
        kind = int(inside)
        sums_before = np.where(np.isneginf(self._sums[kind]), 0.0, self._sums[kind])  # -inf: none yet
        self._sums[kind] = sums_before + sums
        self._sizes[kind] += abs(loss), np.abs(coefficients) @ weights

    def differ_on_ranks(self, world: World) -> bool:
        """Return whether the ranks that have sums differ in them.

        Sums that are not finite are not compared: a step with an optimizer raises NonFiniteError for them.
        One collective gives the largest sums, the largest negated sums (so the smallest), and the largest sizes.
        """
        finite = np.isfinite(self._sums)
        low = np.where(finite, -self._sums, -np.inf)
        values = np.concatenate([np.where(finite, self._sums, -np.inf), low, np.where(finite, self._sizes, 0.0)])
        extremes = np.array(
            world.control.largest_over_ranks(values.ravel().tolist(), "comparison of losses")
        ).reshape(3, 2, 2)
        spread = extremes[0] + extremes[1]  # the largest less the smallest; -inf where no rank has any
        return bool((spread > TOLERANCE * extremes[2]).any())
