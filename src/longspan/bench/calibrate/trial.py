"""What is timed on all ranks together, in rounds, and the clock of a calibration."""

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch

from longspan.bench.calibrate.fit import Sample
from longspan.comm import World


class Trial(NamedTuple):
    """What is timed: a sample without its seconds, what runs, and how often in a row (short messages often)."""

    sample: Sample
    run: Callable[[], object]
    turns: int = 1


class Clock:
    """Times trials on all ranks of a world, until its seconds are over."""

    def __init__(self, world: World, *, most_seconds: float) -> None:
        """Start the clock; after `most_seconds` no round of trials begins."""
        self.world: World = world
        self.most_seconds: float = most_seconds
        self.began: float = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds since the clock started."""
        return time.perf_counter() - self.began

    def print_line(self, line: str) -> None:
        """Print a line of progress, on the first rank."""
        if self.world.rank == self.world.home.ranks[0]:
            print(f"{self.seconds:5.1f} s  {line}", file=sys.stderr, flush=True)

    def time_trials(self, trials: Sequence[Trial], *, warmup: int, repeats: int, label: str) -> list[Sample]:
        """Time trials; returns their samples with the slowest rank's seconds, in the median of rounds.

        All ranks enter; `label` names the trials in lines of progress. Every round has all trials, so that what
        disturbs the machine for a while disturbs no sample in most rounds. No round begins once the time is over,
        except for the first timed one. Seconds are above 0, as errors are relative to them.
        """
        times: list[list[float]] = []
        for i in range(warmup + repeats):
            if i > warmup and self.world.control.any_rank(self.seconds > self.most_seconds):
                self.print_line(f"{label}: {i - warmup} of {repeats} rounds, as the time is over")
                break
            times.append([self._measure_seconds(trial) for trial in trials])
        self.print_line(f"{label}: {len(trials)} measurements, {len(times)} rounds")
        seconds_of_ranks = self.world.control.gather_objects(times[warmup:])  # (ranks, rounds, trials)
        seconds = np.median(np.array(seconds_of_ranks).max(axis=0), axis=0).tolist()
        return [replace(t.sample, seconds=max(s, 1e-9)) for t, s in zip(trials, seconds, strict=True)]

    def time_pairs(self, pivot: int, run: Callable[[int], object], *, repeats: int) -> dict[int, float]:
        """Return the median seconds of a message between the pivot and each other slot, by slot, on every rank.

        The pivot and one other slot at a time enter `run(other)`, where `other` is the partner of the slot that calls.
        """
        measured: dict[int, float] = {}
        own_slot = self.world.slot
        for other_slot in range(self.world.home.slots):
            if other_slot == pivot or own_slot not in (pivot, other_slot):
                continue
            run(pivot + other_slot - own_slot)  # with the partner of this slot; the first message connects the two
            self._wait_for_device()
            times: list[float] = []
            for _ in range(repeats):
                began = time.perf_counter()
                run(pivot + other_slot - own_slot)
                self._wait_for_device()
                times.append(time.perf_counter() - began)
            measured[other_slot] = statistics.median(times)
        return self.world.control.broadcast_object(measured, self.world.home.ranks[pivot])

    def _measure_seconds(self, trial: Trial) -> float:
        """Measure the seconds of one turn of a trial on this rank; all ranks begin together."""
        self.world.control.barrier()
        self._wait_for_device()
        began = time.perf_counter()
        for _ in range(trial.turns):
            trial.run()
        self._wait_for_device()
        return (time.perf_counter() - began) / trial.turns

    def _wait_for_device(self) -> None:
        """Wait until the device has done what was launched; a CPU has when the call returns."""
        if self.world.device.type == "cuda":
            torch.cuda.synchronize(self.world.device)
