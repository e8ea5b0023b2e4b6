"""How fast this slot works, over the other slots: timed where it waits for none, in the loss of its rows.

Slots of a step end together, whichever is slow: in layers they wait for each other's rows and parameters. Logits, their
loss and its gradient are made of a slot's own rows only. Under a pipeline only the last stage makes them, so that other
stages are not timed; of a slot's tensor-parallel ranks, which wait for each other, the first one counts.
"""

import time
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longspan.comm import World
from longspan.data.document import NO_TARGET
from longspan.train.loss import Head
from longspan.train.passes import Measure, Passes, Term
from longspan.train.reading.read_rows import LocalBatch

LEAST_LOGITS = 1 << 27  # of a micro-batch that is timed: on fewer the launches of kernels count


class SlotPaceTerm(Term):
    """Times the loss of a step's rows on this slot; on a GPU by events, read once the step has waited for it anyway."""

    def __init__(self, world: World) -> None:
        """Begin with nothing timed: rows, their seconds on a CPU, and pairs of events around each measure on a GPU."""
        self._world = world
        self._rows = 0
        self._seconds = 0.0
        self._spans: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def extend_passes(self, passes: Passes) -> Passes:
        """Return the passes with a measure that times theirs."""
        return replace(passes, measure=partial(self._time_measure, passes.measure))

    def _time_measure(self, measure: Measure, batch: LocalBatch, hidden: Tensor, head: Head, *deeper: Tensor) -> Tensor:
        """Call the measure for a micro-batch, timed if it makes enough logits to show the slot's speed."""
        rows = int((batch.labels != NO_TARGET).sum())
        if rows * head.vocabulary < LEAST_LOGITS:
            return measure(batch, hidden, head, *deeper)
        self._rows += rows
        if hidden.is_cuda:
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            loss = measure(batch, hidden, head, *deeper)
            end.record()
            self._spans.append((start, end))
            return loss
        started = time.perf_counter()
        loss = measure(batch, hidden, head, *deeper)
        self._seconds += time.perf_counter() - started
        return loss

    def sums(self) -> list[float]:
        """Return the seconds and rows that were timed on this slot, after all of them have run on the device."""
        for _, end in self._spans:
            end.synchronize()
        seconds = self._seconds + sum(start.elapsed_time(end) for start, end in self._spans) / 1e3
        self._spans, self._seconds = [], seconds
        return [seconds, float(self._rows)]

    def results(self, sums: Sequence[float]) -> dict[str, Any]:
        """Return this slot's seconds a row over the other slots' seconds a row; None if one of these was not timed.

        Of a slot's tensor-parallel ranks only the first is in the sums; the others return None.
        """
        seconds, rows = sums[0] - self._seconds, sums[1] - self._rows  # of the others
        if self._world.coordinates.tp or not self._rows or rows <= 0 or seconds <= 0:
            return {"slot_ratio": None}
        return {"slot_ratio": self._seconds / self._rows / (seconds / rows)}
