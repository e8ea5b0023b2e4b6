"""What the encoders take of a step, measured and predicted.

On a GPU, parts are timed by events in the order of its work, which are read once the step has waited for it anyway.
"""

import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch

from longspan.comm import World

Part = Literal["phases", "towers"]  # all before and after the language model's passes; in it the encoders alone


@dataclass(frozen=True)
class EncoderTimes:
    """The encoders' part of a step, the same on every rank.

    `seconds` from the step's beginning until the language model has its rows, and from its end until the encoders have
    their gradients: the mean over ranks, exchanges and waiting included. `tower_seconds` of towers and projectors
    only, of the busiest rank; `balance` is that over the mean of all (1: all equally busy), which under FSDP2 holds
    the waiting for each other's parameters as well. The predicted ones are those of the waves' plan: seconds that
    towers and projectors take, and the busiest slot's work over the mean.
    """

    seconds: float
    tower_seconds: float
    balance: float
    predicted_seconds: float
    predicted_balance: float


class PartClock:
    """Adds up what parts of a step take on this rank; parts may lie inside each other.

    >>> with clock.time_part("towers"):
    ...     rows = encoder(images)
    """

    def __init__(self, device: torch.device) -> None:
        """Begin without times: the host's seconds by part, and on a GPU pairs of events, which then count instead."""
        self._gpu = device.type == "cuda"
        self._spans: dict[Part, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = defaultdict(list)
        self._seconds: dict[Part, float] = defaultdict(float)

    @contextmanager
    def time_part(self, part: Part) -> Iterator[None]:
        """Add the time of the `with` block to a part; a block that raises is not counted."""
        started = time.perf_counter()
        start = self._record_event()
        yield
        self._seconds[part] += time.perf_counter() - started
        if start is not None:
            end = self._record_event()
            assert end is not None
            self._spans[part].append((start, end))

    def seconds(self, part: Part) -> float:
        """Return the seconds that a part took in all; waits until the device has finished it."""
        if not self._gpu:
            return self._seconds[part]
        for _, end in self._spans[part]:
            end.synchronize()
        return sum(start.elapsed_time(end) for start, end in self._spans[part]) / 1e3

    def _record_event(self) -> torch.cuda.Event | None:
        """Record an event on the device's stream; None on a CPU."""
        if not self._gpu:
            return None
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def gather_times(clocks: Sequence[PartClock], world: World, predicted: tuple[float, float]) -> EncoderTimes:
    """Gather the times of all ranks, which enter together: mean seconds, the busiest rank's, and its ratio to the mean.

    `clocks` are this rank's, whose times are added; `predicted` are seconds and balance by the plan.
    """
    phases, towers = (sum(clock.seconds(timed_part) for clock in clocks) for timed_part in ("phases", "towers"))
    ranks = len(world.home.ranks)
    all_phases, all_towers = world.control.sum_over_ranks([phases, towers], "times of encoders")
    (busiest,) = world.control.largest_of([towers], "times of encoders")
    balance = busiest * ranks / all_towers if all_towers else 1.0
    return EncoderTimes(all_phases / ranks, busiest, balance, *predicted)
