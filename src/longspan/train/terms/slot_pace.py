"""The pace of a slot: its seconds for the loss of its rows, over those of the other slots for as many."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from longspan.comm import World
from longspan.data.document import NO_TARGET
from longspan.train.device_clock import DeviceClock
from longspan.train.loss import Head
from longspan.train.passes import LossFn, Passes, Term
from longspan.train.rows.read_rows import LocalBatch

LEAST_LOGITS = 1 << 27  # of a micro-batch that is timed: on fewer the launches of kernels count


class SlotPaceTerm(Term):
    """Times the loss of a step's rows on this slot; on a GPU by events, read once the step has waited for it anyway."""

    def __init__(self, world: World) -> None:
        """Begin with no time and no rows, on this rank's device."""
        self._world = world
        self._clock = DeviceClock(world.device)
        self._rows = 0
        self._seconds = 0.0

    def extend_passes(self, passes: Passes) -> Passes:
        return replace(passes, loss_fn=partial(self._time_loss, passes.loss_fn))

    def _time_loss(self, measure: LossFn, batch: LocalBatch, hidden: Tensor, head: Head, *deeper: Tensor) -> Tensor:
        """Return the loss of `loss_fn`, timed where the micro-batch has enough logits for its kernels to count."""
        rows = int((batch.labels != NO_TARGET).sum())
        if rows * head.vocabulary < LEAST_LOGITS:
            return measure(batch, hidden, head, *deeper)
        self._rows += rows
        with self._clock.add_time():
            return measure(batch, hidden, head, *deeper)

    def sums(self) -> list[float]:
        self._seconds = self._clock.seconds()
        return [self._seconds, float(self._rows)]

    def results(self, sums: Sequence[float]) -> dict[str, Any]:
        """Return this slot's seconds a row over the other slots' seconds a row; None if one of these was not timed.

        Of a slot's tensor-parallel ranks only the first is in the sums; the others return None.
        """
        # of the others
        seconds = sums[0] - self._seconds
        rows = sums[1] - self._rows
        if self._world.coordinates.tp or not self._rows or rows <= 0 or seconds <= 0:
            return {"slot_ratio": None}
        return {"slot_ratio": self._seconds / self._rows / (seconds / rows)}
