"""`longspan bench NAME`: the list of benches, the flags that all of them have, and their records."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from longspan.cli.flags import write_text_file
from longspan.cli.machine import machine_text
from longspan.cli.processes import Device, choose_processes, print_note, prints_results
from longspan.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


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
        """Raise ConfigError for numbers of runs, and for a file of the record, that are impossible."""
        if self.repeats < 1 or self.warmup < 0:
            raise ConfigError(f"--repeats {self.repeats} --warmup {self.warmup}: at least 1 and 0")
        if self.out and Path(self.out).is_dir():
            raise ConfigError(
                f"--out {self.out} is a folder; give a file in it, such as {Path(self.out, 'out.json')}"
            )
        if self.out.endswith(".md"):
            raise ConfigError(
                f"--out {self.out}: the record is JSON, its table goes beside it; give {self.out[:-3]}.json"
            )

    def choose_processes(self, on_cpus: int) -> tuple[int, str]:
        """Choose the processes, set the environment that GPUs need, and print a note; return (ranks, backend).

        `on_cpus` is the number where neither --world, torchrun nor GPUs decide it. Raises ConfigError as
        `choose_processes`.
        """
        processes = choose_processes(self.world, self.device, on_cpus=on_cpus)
        print_note(processes.note, sys.stderr)
        return processes.ranks, processes.backend


BENCHES = {
    "calibrate": "what this machine and its network sustain, for run.machine and plan --machine",
    "step": "whole training steps of a model under padded, fixed and dynamic plans, next to their predictions",
}


def main(argv: Sequence[str]) -> int:
    """Run the bench that the first word names, or print their list; returns the exit code."""
    if not argv or argv[0] in ("-h", "--help", "--help-all", "--list"):
        lines = "\n".join(f"  {name:<11}{text}" for name, text in BENCHES.items())
        print(
            f"usage: longspan bench NAME [flags]\n\n{lines}\n\n"
            "longspan bench NAME --help shows a bench's flags. Records that back a claim are kept in bench/records."
        )
        return 0
    name, *arguments = argv
    if name not in BENCHES:
        raise ConfigError(f"longspan bench has no {name!r}; it has {', '.join(BENCHES)}")
    return import_module(f"longspan.bench.{name}").main(arguments)


def show_record(record: dict[str, Any], flags: BenchFlags, *, text: str, markdown: str) -> None:
    """Print a finished record, as JSON with --json, and write it to the file of --out; on the reporting rank only."""
    if prints_results():
        write_record(record, flags.out, markdown)
        print(json.dumps(record, indent=1) if flags.json else text)


def write_record(record: dict[str, Any], out: str | Path, markdown: str = "") -> None:
    """Write what has been measured so far, for a bench that may be interrupted, and at its end the page next to the
    record; with out "" nothing is written."""
    if not out:
        return
    path = Path(out)
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text_file(path, json.dumps(record, indent=1) + "\n")
    if markdown:
        write_text_file(path.with_suffix(".md"), markdown)


def origin_text(record: dict[str, Any]) -> str:
    """Say by which machine, versions and command a record was made, and at which commit if it says."""
    packages = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    commit = f" Commit {record['commit']}." if "commit" in record else ""
    return (
        f"Machine: {machine_text(record['machine'])}. Versions: {packages}.{commit} Command: `{record['command']}`."
    )


def change_layer_count(configuration: "PreTrainedConfig", count: int) -> "PreTrainedConfig":
    """Give a configuration, in place, `count` layers, whose kinds (full attention, window) repeat in the model's order;
    returns it.
    """
    text = configuration.get_text_config()
    types = getattr(text, "layer_types", None) or ["full_attention"] * text.num_hidden_layers
    text.num_hidden_layers = count
    text.layer_types = [types[layer % len(types)] for layer in range(count)]
    return configuration
