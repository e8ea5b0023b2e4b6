"""Parts and kernels of one run under the profiler, for benches of this folder."""

from collections.abc import Callable
from typing import Any

from longspan.bench.timing import time_run
from longspan.comm import World
from longspan.run.profile import longest_kernels, read_events, record_profile, seconds_by_part


def profile_run(run: Callable[[], object], world: World) -> tuple[dict[str, float], list[dict[str, Any]], float]:
    """Profile one run: its seconds by part, its longest kernels, and its seconds, which profiling makes more."""
    with record_profile(world) as (recorded, _):
        seconds = time_run(run, world)
    events = read_events(recorded, cuda=world.device.type == "cuda")
    return seconds_by_part(events, seconds), longest_kernels(events), seconds
