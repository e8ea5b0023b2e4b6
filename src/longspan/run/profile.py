"""What takes the time of a step: seconds by part and by kernel under torch's profiler, and traces of a run's steps.

Parts are intervals of one device's timeline that add up to the step. Where several overlap, attention counts before the
optimizer, before other computation, before communication and copies; the rest is idle. A run profiles the steps of
`train.profile_steps` on every rank, one at a time: RUN/profiles/step-000010/ has rank-0.json.gz and so on (traces for
Perfetto or chrome://tracing), and of the first rank table.txt and parts.json, which the report shows.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any, Literal

import torch

from longspan.comm import World
from longspan.comm.all_ranks import LogLine, is_first_rank, run_on_every_rank
from longspan.errors import RunFolderError
from longspan.files import as_json, write_atomically
from longspan.plain_text import text_table

Interval = tuple[float, float]  # start and end in seconds
Event = tuple[str, float, float]  # name, start and end in seconds
Kind = Literal["attention", "optimizer", "other layers", "exposed communication"]

ORDER: tuple[Kind, ...] = ("attention", "optimizer", "other layers", "exposed communication")
PARTS = (*ORDER, "idle", "step")  # of a row of the table of parts
TITLES = ("part of a profiled step, ms", *PARTS)
KERNEL_TITLES = ("kernel", "part", "calls", "ms")
FOLDER, PARTS_FILE, TABLE_FILE = "profiles", "parts.json", "table.txt"
_NAME_LENGTH = 100  # of kernels, whose template arguments run to thousands of characters
# Parts of names of kernels (GPU) and of operators (CPU), in lower case.
_NAMES: tuple[tuple[Kind, tuple[str, ...]], ...] = (
    ("exposed communication", ("nccl", "gloo", "c10d", "htod", "dtoh", "memcpy peer", "memcpy ptop")),
    ("attention", ("flash", "fmha", "attention", "attn", "sdpa")),
    ("optimizer", ("adam", "multi_tensor", "_foreach", "fused_sgd")),
)


class StepProfiles:
    """Profiles steps of a run, given by their numbers, counted from 1; every rank has the same."""

    def __init__(self, steps: Sequence[int], folder: Path, world: World, log: LogLine) -> None:
        self._steps, self._folder, self._world, self._log = frozenset(steps), folder, world, log
        self._step, self._profile, self._seconds = 0, None, 0.0  # what was profiled, until it is written

    def has_step(self, step: int) -> bool:
        return step in self._steps

    @contextmanager
    def profile_step(self, step: int) -> Iterator[None]:
        """Profile what runs inside if this step is one to profile; `write_files` then writes what was recorded."""
        if not self.has_step(step):
            yield
            return
        with record_profile(self._world, with_host=True) as (profile, seconds):
            yield
        self._step, self._profile, self._seconds = step, profile, seconds()

    def write_files(self) -> None:
        """Write what was recorded of the last step, and log its table; nothing if that step was not profiled.

        Entered by all ranks. Raises RunFolderError on every rank where the disk of one rank refuses a file.
        """
        if self._step:
            text = run_on_every_rank(self._world, self._write_rank_files, RunFolderError)
            self._step, self._profile = 0, None
            if text:
                self._log(text)

    def _write_rank_files(self) -> str:
        folder, world, seconds = self._folder / f"step-{self._step:06d}", self._world, self._seconds
        folder.mkdir(parents=True, exist_ok=True)
        profile: Any = self._profile
        profile.export_chrome_trace(str(folder / f"rank-{world.rank}.json.gz"))
        if not is_first_rank(world):
            return ""
        events = read_events(profile, cuda=world.device.type == "cuda")
        parts = seconds_by_part(events, seconds) | {"step": seconds}
        row: dict[str, Any] = {"step": self._step, "rank": world.rank, "parts": parts}
        row["kernels"] = longest_kernels(events)
        text = profile_text(row)
        write_atomically(folder / PARTS_FILE, as_json(row, indent=1))
        write_atomically(folder / TABLE_FILE, f"{text}\n")
        return f"{text}\ntraces of all ranks: {folder}"


@contextmanager
def record_profile(world: World, *, with_host: bool = False) -> Iterator[tuple[Any, Callable[[], float]]]:
    """Profile what runs inside; yields torch's profile, and a function that returns the seconds after the context.

    On GPUs kernels are recorded, and with `with_host` the host's operators too; on CPUs operators.
    """
    from torch.profiler import ProfilerActivity, profile

    cuda = world.device.type == "cuda"
    activities = [ProfilerActivity.CUDA] if cuda else []
    activities += [ProfilerActivity.CPU] if with_host or not cuda else []
    spent = list[float]()
    with profile(activities=activities) as recorded:
        started = perf_counter()
        yield recorded, lambda: spent[0]
        wait_for_gpu(world)
        spent.append(perf_counter() - started)


def profile_text(row: Mapping[str, Any], most_lines: int = 8) -> str:
    """Write the tables of a profiled step (`row`, what parts.json holds) for a terminal: parts, and longest kernels."""
    parts = text_table(TITLES, [(f"step {row['step']}, rank {row['rank']}", *part_cells(row))])
    return f"{parts}\n\n{text_table(KERNEL_TITLES, kernel_rows(row)[:most_lines], left=2)}"


def part_cells(row: Mapping[str, Any]) -> list[str]:
    return [f"{1e3 * row['parts'][part]:.1f}" for part in PARTS]


def kernel_rows(row: Mapping[str, Any]) -> list[tuple[str, ...]]:
    return [(k["name"], k["part"], str(k["calls"]), f"{1e3 * k['seconds']:.1f}") for k in row["kernels"]]


def kind_of(name: str) -> Kind:
    """Return the part of a step that the time of a kernel or operator belongs to: the first match in _NAMES."""
    lower_name = name.lower()
    for kind, name_parts in _NAMES:
        if any(part in lower_name for part in name_parts):
            return kind
    return "other layers"


def seconds_by_part(events: Iterable[Event], seconds: float) -> dict[str, float]:
    """Return seconds by part, "idle" included, of the events (name, start, end) of a step that took `seconds`.

    A moment counts for one part only: kinds are taken in the order of ORDER.
    """
    by_kind: dict[Kind, list[Interval]] = {kind: [] for kind in ORDER}
    for name, start, end in events:
        by_kind[kind_of(name)].append((start, end))
    seconds_by_kind, covered, covered_seconds = dict[str, float](), list[Interval](), 0.0
    for kind in ORDER:
        covered = merge_intervals([*covered, *by_kind[kind]])
        total = sum(end - start for start, end in covered)
        seconds_by_kind[kind], covered_seconds = total - covered_seconds, total
    return seconds_by_kind | {"idle": max(0.0, seconds - covered_seconds)}


def merge_intervals(intervals: Iterable[Interval]) -> list[Interval]:
    """Return the union of intervals as intervals that do not touch, in order."""
    disjoint: list[Interval] = []
    for start, end in sorted(intervals):
        if disjoint and start <= disjoint[-1][1]:
            disjoint[-1] = (disjoint[-1][0], max(end, disjoint[-1][1]))
        else:
            disjoint.append((start, end))
    return disjoint


def longest_kernels(events: Iterable[Event], count: int = 16) -> list[dict[str, Any]]:
    """Return name, part, calls and summed seconds of the kernels that take most, among events (name, start, end)."""
    seconds_by_name: dict[str, list[float]] = {}
    for name, start, end in events:
        seconds_by_name.setdefault(name, []).append(end - start)
    kernels = [
        {"name": name[:_NAME_LENGTH], "part": kind_of(name), "calls": len(times), "seconds": sum(times)}
        for name, times in seconds_by_name.items()
    ]
    return sorted(kernels, key=lambda kernel: -kernel["seconds"])[:count]


def read_events(profile: Any, *, cuda: bool) -> list[Event]:
    """Read name, start and end in seconds of what ran: kernels and copies of the GPU, or operators of a CPU."""
    from torch.autograd import DeviceType

    events: list[Event] = []
    for event in profile.events():
        on_gpu = event.device_type == DeviceType.CUDA
        if on_gpu is not cuda or getattr(event, "is_user_annotation", False):
            continue
        if not cuda and (event.name.startswith("autograd::") or not _is_work(event)):
            continue
        events.append((event.name, event.time_range.start * 1e-6, event.time_range.end * 1e-6))
    return events


def _is_work(event: Any) -> bool:
    """Without inner operators, or of a kind that names of inner operators may not tell."""
    return not event.cpu_children or (event.name.startswith("aten::") and kind_of(event.name) != "other layers")


def wait_for_gpu(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize()
