"""`longspan bench NAME`: the list of benches, and flags that all of them have. Records are written by `record.py`."""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

from longspan.cli.processes import Device, choose_processes, print_note
from longspan.errors import ConfigError


@dataclass(frozen=True, kw_only=True)
class BenchFlags:
    """The flags that all benches have; a bench may set other defaults."""

    warmup: int = 1
    """Number of runs before the timed ones."""
    repeats: int = 1
    """Number of timed runs; their median counts."""
    world: int = 0
    """Number of local processes to start; 0: one for each GPU, those of torchrun, or a few without GPUs."""
    device: Device = "auto"
    """auto: a GPU for each process where there are any; cpu: processes on CPUs; cuda: GPUs, or an error."""
    out: str = ""
    """Write the record to this JSON file as rows are finished, and at the end a table to the .md file next to it."""
    timeout_seconds: float = 180.0
    """Seconds that a rank waits for the others."""
    json: bool = False
    """Print the record as JSON, and nothing else, on standard output."""

    def check_flags(self) -> None:
        """Raise ConfigError if nothing would be timed, or if the record could not be written."""
        if self.repeats < 1 or self.warmup < 0:
            raise ConfigError(f"--repeats {self.repeats} --warmup {self.warmup}: at least 1 and 0")
        if self.out and Path(self.out).is_dir():
            raise ConfigError(f"--out {self.out} is a folder; give a file in it, such as {Path(self.out, 'out.json')}")
        if self.out.endswith(".md"):
            raise ConfigError(
                f"--out {self.out}: the record is JSON, its table goes beside it; give {self.out[:-3]}.json"
            )

    def processes(self, without_gpus: int) -> tuple[int, str]:
        """Return how many processes there are, and their backend.

        Without --world and torchrun there is one for each GPU, or on CPUs `without_gpus` of them.
        """
        processes = choose_processes(self.world, self.device, on_cpus=without_gpus)
        print_note(processes.note, sys.stderr)
        return processes.ranks, processes.backend


BENCHES = {
    "calibrate": "what this machine and its network sustain, for run.machine and plan --machine",
    "step": "whole training steps of a model under padded, fixed and dynamic plans, next to their predictions",
}
SCRIPTS = {  # benches that the package does not have, and where they are
    "attention": "bench/attention/attention_types.py",
    "eval": "bench/evaluation/evaluation_degrees.py",
}


def main(argv: Sequence[str]) -> int:
    """Run the bench that the first argument names, with the others as its flags; returns the exit code."""
    if not argv or argv[0] in ("-h", "--help", "--help-all", "--list"):
        print(usage_text())
        return 0
    name, *arguments = argv
    if name in SCRIPTS:
        raise ConfigError(f"bench {name} is a script of the repository: python {SCRIPTS[name]} [flags]")
    if name not in BENCHES:
        raise ConfigError(f"longspan bench has no {name!r}; it has {', '.join(BENCHES)}")
    return import_module(f"longspan.bench.{name}.command").main(arguments)


def usage_text() -> str:
    """Write what `longspan bench` prints."""
    lines = "\n".join(f"  {name:<11}{text}" for name, text in BENCHES.items())
    return (
        f"usage: longspan bench NAME [flags]\n\n{lines}\n\n"
        "longspan bench NAME --help shows a bench's flags. Records that back a claim are kept in bench/records."
    )
