"""Seconds of what all ranks do together."""

import time
from collections.abc import Callable
from itertools import pairwise

from longspan.comm import World
from longspan.run.profile import wait_for_gpu


def time_run(run: Callable[[], object], world: World) -> float:
    """Time one run, from a moment at which all ranks have come and their GPUs are idle."""
    wait_for_gpu(world)
    world.control.barrier("start of a timed run")
    started = time.perf_counter()
    run()
    wait_for_gpu(world)
    return time.perf_counter() - started


def time_in_turn(run: Callable[[], object], repeats: int, world: World) -> list[float]:
    """Time runs one after another, as steps of a training come: the host waits for the GPU only where a run does. A
    run's seconds are those from the return of the call before to the return of its own, so an untimed call is first.
    """
    wait_for_gpu(world)
    world.control.barrier("start of timed runs")
    ends = list[float]()
    for _ in range(1 + repeats):
        run()
        ends.append(time.perf_counter())
    wait_for_gpu(world)
    return [end - end_before for end_before, end in pairwise(ends)]
