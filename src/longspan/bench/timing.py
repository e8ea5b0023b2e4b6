"""Seconds of what all ranks do together: of whole runs, and of parts of one run under the profiler (`run/profile`)."""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from longspan.comm import World
from longspan.run.profile import Event, longest_kernels, read_events, record_profile, seconds_by_part, wait_for_gpu


def time_run(run: Callable[[], object], world: World) -> float:
    """Time one run, from a moment at which all ranks have come and their GPUs are idle."""
    wait_for_gpu(world)
    world.control.barrier("start of a timed run")
    started = time.perf_counter()
    run()
    wait_for_gpu(world)
    return time.perf_counter() - started


def profile_run(run: Callable[[], object], world: World) -> tuple[dict[str, float], list[dict[str, Any]], float]:
    """Profile one run: its seconds by part, its longest kernels, and its seconds, which profiling makes more."""
    with record_profile(world) as (recorded, _):
        seconds = time_run(run, world)
    events = read_events(recorded, cuda=world.device.type == "cuda")
    return seconds_by_part(events, seconds), longest_kernels(events), seconds


def time_in_turn(run: Callable[[], object], repeats: int, world: World) -> list[float]:
    """Time runs one after another, as steps of a training come: the host waits for the GPU only where a run does.

    A run's seconds are those from the return of the call before to the return of its own, so an untimed call is first.
    """
    wait_for_gpu(world)
    world.control.barrier("start of timed runs")
    ends = list[float]()
    for _ in range(1 + repeats):
        run()
        ends.append(time.perf_counter())
    wait_for_gpu(world)
    return [end - end_before for end_before, end in pairwise(ends)]


MARK = "spin_kernel"  # of torch.cuda._sleep


def profile_in_turn(
    run: Callable[[], object], world: World, repeats: int = 3
) -> tuple[dict[str, float], list[dict[str, Any]], float]:
    """Profile runs one after another, behind one that does not count; returns what `profile_run` does, of the mean run.

    On a GPU, a run lasts from the end of the kernels of the run before to the end of its own kernels. On a CPU, where
    a run is over when it returns, one run is profiled.
    """
    if world.device.type != "cuda":
        return profile_run(run, world)
    wait_for_gpu(world)
    world.control.barrier("start of profiled runs")
    with record_profile(world) as (recorded, _):
        for _ in range(1 + repeats):
            run()
            torch.cuda._sleep(1)  # a mark on the GPU's timeline; the first run's is where the counted runs begin
    return mean_run(read_events(recorded, cuda=True))


def mean_run(events: Sequence[Event]) -> tuple[dict[str, float], list[dict[str, Any]], float]:
    """Cut events (name, start, end) at marks, and return the seconds by part, the kernels and the seconds of a run.

    >>> mean_run([("spin_kernel", 1.0, 1.1), ("gemm", 1.5, 2.5), ("spin_kernel", 3.0, 3.1)])[2]
    2.0
    """
    marks = sorted(end for name, _, end in events if MARK in name)
    first, last, repeats = marks[0], marks[-1], len(marks) - 1
    inside = [
        (name, max(start, first), min(end, last))
        for name, start, end in events
        if MARK not in name and end > first and start < last
    ]
    parts = {part: seconds / repeats for part, seconds in seconds_by_part(inside, last - first).items()}
    kernels = [
        kernel | {"calls": round(kernel["calls"] / repeats), "seconds": kernel["seconds"] / repeats}
        for kernel in longest_kernels(inside)
    ]
    return parts, kernels, (last - first) / repeats
