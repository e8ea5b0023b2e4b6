"""Steps of a run under torch's profiler (`train.profile_steps`), on every rank, one at a time.

RUN/profiles/step-000010/ has rank-0.json.gz and so on (traces for Perfetto or chrome://tracing), and of the first rank
table.txt, torch's table of what took most time, which the report shows.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from longspan.comm import World
from longspan.comm.all_ranks import LogLine, is_first_rank, run_on_every_rank
from longspan.errors import RunFolderError
from longspan.files import write_atomically

FOLDER = "profiles"
TABLE_FILE = "table.txt"
LONGEST = 16  # kernels or operators that the table has


@dataclass(eq=False)
class StepProfiles:
    """Profiles steps of a run, given by their numbers, counted from 1; every rank has the same."""

    steps: Sequence[int]
    folder: Path
    world: World
    log: LogLine
    _step: int = 0
    # The profile stays here until it is written.
    _profile: Any = None

    @contextmanager
    def profile_step(self, step: int) -> Iterator[None]:
        """Profile what runs inside if this step is one to profile; `write_files` then writes what was recorded."""
        if step not in self.steps:
            yield
            return
        from torch.profiler import ProfilerActivity, profile

        gpu = [ProfilerActivity.CUDA] if self.world.device.type == "cuda" else []
        with profile(activities=[ProfilerActivity.CPU, *gpu]) as self._profile:
            yield
            wait_for_gpu(self.world)
        self._step = step

    def write_files(self) -> None:
        """Write what was recorded of the last step, and log its table; all ranks call it together. It does nothing if
        that step was not profiled.
        """
        if self._step:
            text = run_on_every_rank(self.world, self._write_rank_files, RunFolderError)
            self._step = 0
            self._profile = None
            if text:
                self.log(text)

    def _write_rank_files(self) -> str:
        """The first rank returns the table, others ""."""
        folder = self.folder / f"step-{self._step:06d}"
        world = self.world
        profile = self._profile
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
    """Wait until this rank's GPU has done all its work; on a CPU nothing is waited for."""
    if world.device.type == "cuda":
        torch.cuda.synchronize()
