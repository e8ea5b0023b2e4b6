"""Seconds of what all ranks do together: of whole runs, and of the parts of one run under the profiler.

Parts are intervals of one device's timeline that add up to the run. Where several overlap, attention counts before the
optimizer, before other computation, before communication and copies; the rest of the run is idle.
"""

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch

from longspan.comm import World

Kind = Literal["attention", "optimizer", "other layers", "exposed communication"]
Interval = tuple[float, float]

ORDER: tuple[Kind, ...] = ("attention", "optimizer", "other layers", "exposed communication")
_NAME_LENGTH = 100  # of kernels, whose template arguments run to thousands of characters
# Parts of names of kernels (GPU) and of operators (CPU), in lower case.
_NAMES: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    ("exposed communication", ("nccl", "gloo", "c10d", "htod", "dtoh", "memcpy peer", "memcpy ptop")),
    ("attention", ("flash", "fmha", "attention", "attn", "sdpa")),
    ("optimizer", ("adam", "multi_tensor", "_foreach", "fused_sgd")),
)


def event_part(name: str) -> Kind:
    """Return the part of a step that a kernel or operator belongs to, by its name."""
    low = name.lower()
    for kind, words in _NAMES:
        if any(word in low for word in words):
            return kind
    return "other layers"


def sum_seconds_by_part(events: Iterable[tuple[str, float, float]], seconds: float) -> dict[str, float]:
    """Sum the seconds by part of events (name, start, end) of a step that took so long.

    >>> events = [("flash_fwd", 0.0, 1.0), ("nccl_ring", 0.5, 1.5), ("gemm", 1.25, 2.0)]
    >>> sum_seconds_by_part(events, 2.5)["exposed communication"]
    0.25
    """
    by_kind: dict[Kind, list[Interval]] = {kind: [] for kind in ORDER}
    for name, start, end in events:
        by_kind[event_part(name)].append((start, end))
    seconds_by_kind, seen, covered = dict[str, float](), list[Interval](), 0.0
    for kind in ORDER:
        seen = merge_intervals([*seen, *by_kind[kind]])
        total = sum(end - start for start, end in seen)
        seconds_by_kind[kind], covered = total - covered, total
    return seconds_by_kind | {"idle": max(0.0, seconds - covered)}


def longest_kernels(events: Iterable[tuple[str, float, float]], count: int = 16) -> list[dict[str, Any]]:
    """List name, part, calls and seconds (the sum) of the kernels that take most, among events (name, start, end).

    >>> longest_kernels([("gemm", 0.0, 1.0), ("gemm", 2.0, 3.0), ("adam", 3.0, 3.5)], 1)
    [{'name': 'gemm', 'part': 'other layers', 'calls': 2, 'seconds': 2.0}]
    """
    spent: dict[str, list[float]] = {}
    for name, start, end in events:
        spent.setdefault(name, []).append(end - start)
    kernels = [
        {"name": name[:_NAME_LENGTH], "part": event_part(name), "calls": len(times), "seconds": sum(times)}
        for name, times in spent.items()
    ]
    return sorted(kernels, key=lambda kernel: -kernel["seconds"])[:count]


def merge_intervals(intervals: Sequence[Interval]) -> list[Interval]:
    """Merge the same points of time in intervals that do not touch, in order."""
    disjoint: list[Interval] = []
    for start, end in sorted(intervals):
        if disjoint and start <= disjoint[-1][1]:
            disjoint[-1] = (disjoint[-1][0], max(end, disjoint[-1][1]))
        else:
            disjoint.append((start, end))
    return disjoint


def read_events(profile: Any, *, cuda: bool) -> list[tuple[str, float, float]]:
    """Read (name, start, end) in seconds of what ran: kernels and copies of the GPU, else innermost operators."""
    from torch.autograd import DeviceType

    events: list[tuple[str, float, float]] = []
    for event in profile.events():
        on_gpu = event.device_type == DeviceType.CUDA
        if on_gpu is not cuda or getattr(event, "is_user_annotation", False):
            continue
        if not cuda and (event.name.startswith("autograd::") or not _is_computation(event)):
            continue
        events.append((event.name, event.time_range.start * 1e-6, event.time_range.end * 1e-6))
    return events


def _is_computation(event: Any) -> bool:
    """Return whether an operator of a CPU computes: it has no inner ones, or its name is of a known kind."""
    return not event.cpu_children or (event.name.startswith("aten::") and event_part(event.name) != "other layers")


def time_run(run: Callable[[], object], world: World) -> float:
    """Time one run, from a moment at which all ranks have come and their GPUs are idle."""
    _wait_for_gpu(world)
    world.control.barrier("start of a timed run")
    started = time.perf_counter()
    run()
    _wait_for_gpu(world)
    return time.perf_counter() - started


def profile_run(run: Callable[[], object], world: World) -> tuple[dict[str, float], list[dict[str, Any]], float]:
    """Profile one run: its seconds by part, its longest kernels, and its seconds, which profiling makes more."""
    from torch.profiler import ProfilerActivity, profile

    cuda = world.device.type == "cuda"
    with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as recorded:
        seconds = time_run(run, world)
    events = read_events(recorded, cuda=cuda)
    return sum_seconds_by_part(events, seconds), longest_kernels(events), seconds


def _wait_for_gpu(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize()
