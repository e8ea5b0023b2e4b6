"""Steps of a run under torch's profiler (`train.profile_steps`), on every rank, one at a time.

RUN/profiles/step-000010/ has rank-0.json.gz and so on (traces for Perfetto or chrome://tracing), and of the first rank
table.txt, torch's table of what took most time, which the report shows.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import torch

from longspan.comm import World
from longspan.comm.all_ranks import LogLine, is_first_rank, run_on_every_rank
from longspan.errors import RunFolderError
from longspan.files import write_atomically

FOLDER = "profiles"
TABLE_FILE = "table.txt"
LONGEST = 16  # kernels or operators that the table has


class StepProfiles:
    """Profiles steps of a run, given by their numbers, counted from 1; every rank has the same."""

    def __init__(self, steps: Sequence[int], folder: Path, world: World, log: LogLine) -> None:
        self._steps = frozenset(steps)
        self._folder = folder
        self._world = world
        self._log = log
        self._step = 0
        self._profile = None  # what was profiled, until it is written

    def has_step(self, step: int) -> bool:
        return step in self._steps

    @contextmanager
    def profile_step(self, step: int) -> Iterator[None]:
        """Profile what runs inside if this step is one to profile; `write_files` then writes what was recorded."""
        if not self.has_step(step):
            yield
            return
        from torch.profiler import ProfilerActivity, profile

        gpu = [ProfilerActivity.CUDA] if self._world.device.type == "cuda" else []
        with profile(activities=[ProfilerActivity.CPU, *gpu]) as self._profile:
            yield
            wait_for_gpu(self._world)
        self._step = step

    def write_files(self) -> None:
        """Write what was recorded of the last step, and log its table; nothing if that step was not profiled."""
        if self._step:
            text = run_on_every_rank(self._world, self._write_rank_files, RunFolderError)
            self._step = 0
            self._profile = None
            if text:
                self._log(text)

    def _write_rank_files(self) -> str:
        folder = self._folder / f"step-{self._step:06d}"
        world = self._world
        profile = self._profile
        assert profile is not None
        folder.mkdir(parents=True, exist_ok=True)
        profile.export_chrome_trace(str(folder / f"rank-{world.rank}.json.gz"))
        if not is_first_rank(world):
            return ""
        order = f"self_{world.device.type}_time_total"
        table = profile.key_averages().table(sort_by=order, row_limit=LONGEST, max_name_column_width=60)
        text = f"step {self._step}, rank {world.rank}\n{table}"
        write_atomically(folder / TABLE_FILE, text)
        return f"{text}traces of all ranks: {folder}"


def wait_for_gpu(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize()
