"""Seconds of what all ranks do together: of whole runs, and of parts of one run under the profiler (`run/profile`)."""

import time
from collections.abc import Callable
from typing import Any

from longspan.comm import World
from longspan.run.profile import longest_kernels, read_events, record_profile, seconds_by_part, wait_for_gpu


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
