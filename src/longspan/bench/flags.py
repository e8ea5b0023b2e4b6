"""Flags that every bench has, and the processes that it runs on."""

import os
from dataclasses import dataclass
from pathlib import Path

from longspan.cli.flags import Switch
from longspan.cli.processes import ranks_wanted, under_torchrun
from longspan.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class BenchFlags:
    """How a bench runs, whatever it measures; each has its own defaults."""

    warmup: int = 1
    """Runs before the timed ones."""
    repeats: int = 1
    """Timed runs; their median counts."""
    world: int = 0
    """Local processes on the CPU; 0: one for each GPU, or torchrun's, or a few where there is no GPU."""
    out: str = ""
    """Write the record to this JSON file, row by row, and at the end as a table to the .md file beside it."""
    timeout_seconds: float = 180.0
    """How long a rank waits for the others."""
    json: Switch = False
    """Print the record as JSON, and nothing else, on standard output."""

    def check_runs(self) -> None:
        """Raise ConfigError where nothing would be timed, or where what is timed could not be written."""
        if self.repeats < 1 or self.warmup < 0:
            raise ConfigError(f"--repeats {self.repeats} --warmup {self.warmup}: at least 1 and 0")
        if self.out and Path(self.out).is_dir():
            raise ConfigError(f"--out {self.out} is a folder; give a file in it, such as {Path(self.out, 'out.json')}")
        if self.out.endswith(".md"):
            raise ConfigError(
                f"--out {self.out}: the record is JSON, its table goes beside it; give {self.out[:-3]}.json"
            )

    def processes(self, without_gpus: int) -> tuple[int, str]:
        """How many processes there will be, `without_gpus` where nothing else says so, and what they talk through."""
        import torch

        gpus, ranks = torch.cuda.device_count(), ranks_wanted(self.world)
        if under_torchrun():
            return ranks, "nccl" if gpus >= ranks_on_this_host(ranks) else "gloo"
        return (gpus, "nccl") if gpus and not self.world else (self.world or without_gpus, "gloo")


def ranks_on_this_host(ranks: int) -> int:
    """How many of torchrun's processes run here."""
    return int(os.environ.get("LOCAL_WORLD_SIZE", ranks))
