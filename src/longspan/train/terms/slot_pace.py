"""Times of parts of a step on this rank, and the pace of a slot by them."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from longspan.comm import World
from longspan.data.document import NO_TARGET
from longspan.train.loss import Head
from longspan.train.passes import LossFn, Passes, Term
from longspan.train.rows.read_rows import LocalBatch

# longspan times a micro-batch of so many logits: with fewer, most of the time is that of launching kernels.
LEAST_LOGITS = 1 << 27


class DeviceClock:
    """Adds up the seconds of blocks by the host's clock, on a GPU by its events, read once the step has waited."""

    def __init__(self, device: torch.device) -> None:
        self._gpu = device.type == "cuda"
        self._spans = list[tuple[torch.cuda.Event, torch.cuda.Event]]()
        self._seconds = 0.0

    @contextmanager
    def add_time(self) -> Iterator[None]:
        """Add the time of the `with` block; a block that raises is not counted."""
        started = time.perf_counter()
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)] if self._gpu else []
        if events:
            events[0].record()
        yield
        self._seconds += time.perf_counter() - started
        if events:
            events[1].record()
            self._spans.append((events[0], events[1]))

    def seconds(self) -> float:
        """Return the seconds of all blocks so far; on a GPU it waits for the end of the last one."""
        if not self._gpu:
            return self._seconds
        for _, end in self._spans:
            end.synchronize()
        return sum(start.elapsed_time(end) for start, end in self._spans) / 1e3


class SlotPaceTerm(Term):
    """The pace of a slot: its seconds for the loss of its rows, over those of the other slots for as many."""

    def __init__(self, world: World) -> None:
        """Begin with no time and no rows, on this rank's device."""
        self._world = world
        self._clock = DeviceClock(world.device)
        self._rows = 0
        self._seconds = 0.0

    def extend_passes(self, passes: Passes) -> Passes:
        return replace(passes, loss_fn=partial(self._time_loss, passes.loss_fn))

    def _time_loss(self, loss_fn: LossFn, batch: LocalBatch, hidden: Tensor, head: Head, *deeper: Tensor) -> Tensor:
        rows = int((batch.labels != NO_TARGET).sum())
        if rows * head.vocabulary < LEAST_LOGITS:
            return loss_fn(batch, hidden, head, *deeper)
        self._rows += rows
        with self._clock.add_time():
            return loss_fn(batch, hidden, head, *deeper)

    def sums(self) -> list[float]:
        self._seconds = self._clock.seconds()
        return [self._seconds, float(self._rows)]

    def results(self, sums: Sequence[float]) -> dict[str, Any]:
        """Return this slot's seconds per row over the other slots' seconds per row; None where either was not timed.

        Of a slot's tensor-parallel ranks only the first is in the sums; the others return None.
        """
        other_seconds = sums[0] - self._seconds
        other_rows = sums[1] - self._rows
        if self._world.coordinates.tp or not self._rows or other_rows <= 0 or other_seconds <= 0:
            return {"slot_ratio": None}
        return {"slot_ratio": self._seconds / self._rows / (other_seconds / other_rows)}
