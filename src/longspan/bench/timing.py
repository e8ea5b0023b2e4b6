"""How benches time what all ranks do together: whole runs of it, and one run under the profiler."""

import time
from collections.abc import Callable
from typing import Any

import torch

from longspan.bench.profile_parts import longest_kernels, parts_of, profiled_events
from longspan.comm import World


def seconds_of(run: Callable[[], object], world: World) -> float:
    """Seconds of one run, from a moment at which all ranks are there and their GPUs have nothing left to do."""
    _wait_for_gpu(world)
    world.control.barrier("start of a timed run")
    started = time.perf_counter()
    run()
    _wait_for_gpu(world)
    return time.perf_counter() - started


def profile_of(run: Callable[[], object], world: World) -> tuple[dict[str, float], list[dict[str, Any]], float]:
    """Seconds by part and by kernel of one run, and its seconds; the profiler itself takes some time."""
    from torch.profiler import ProfilerActivity, profile

    cuda = world.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as recorded:
        seconds = seconds_of(run, world)
    events = profiled_events(recorded, cuda=cuda)
    return parts_of(events, seconds), longest_kernels(events), seconds


def _wait_for_gpu(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize()
