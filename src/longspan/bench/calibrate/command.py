"""`longspan bench calibrate`: measures this machine and its network, and writes the Machine that prices plans."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any, Literal

from longspan.bench.benches import BenchFlags
from longspan.bench.calibrate.fit import Calibration, fit_samples
from longspan.bench.calibrate.trials import CalibrationSettings, Measured, calibrate_ranks
from longspan.cli.flags import Switch, parse_flags, write_text
from longspan.cli.machine import machine_facts, machine_text
from longspan.cli.processes import is_reporting, run_on_ranks
from longspan.errors import ConfigError, plural
from longspan.plain_text import text_table
from longspan.plan import Machine
from longspan.plan.cost.links import LEVELS
from longspan.plan.cost.machine import find_device
from longspan.versions import versions

CPU_RANKS = 2
GPU_DEFAULTS: dict[str, Any] = {
    "preset": "qwen3-8b",
    "layers": 2,
    "tokens": "2048,4096,8192,16384",
    "lengths": "2048,8192,16384,32768",
    "document": 256,
}
CPU_DEFAULTS: dict[str, Any] = {
    "preset": "qwen3-tiny",
    "layers": 0,
    "tokens": "256,512,768,1024",
    "lengths": "128,256,512,1024",
    "document": 32,
}


@dataclass(frozen=True, kw_only=True)
class CalibrateFlags(BenchFlags):
    """Measure what this machine and its network sustain, and write it to a file: a Machine, which prices any model.

    Runs one process for each GPU of this machine, or torchrun's on any number of hosts, or --world local processes; all
    of them work at the same time. Measured are steps of a model with random weights, what the host takes to launch a
    layer, a group and a document, attention by the length of documents, passes over memory, and messages of each kind
    inside a host and between hosts. Which ranks share a host is what the launcher says. The file is for run.machine of
    a run and --machine of longspan plan; a run on another device, or on hosts of another size, refuses it.
    """

    preset: str = ""
    """Model with random weights whose steps are measured; empty: qwen3-8b on GPUs, qwen3-tiny on CPUs."""
    model: str = ""
    """Folder of a Hugging Face model, in place of --preset."""
    layers: int = 0
    """Layers of the preset; 0: 2 of qwen3-8b on GPUs, all of another."""
    dtype: Literal["", "bfloat16", "float16", "float32"] = ""
    """Dtype of the weights; empty: bfloat16 on GPUs, float32 on CPUs."""
    tokens: str = ""
    """Tokens of a slot in a micro-batch, with commas between; empty: 2048 to 16384 on GPUs, 256 to 1024 on CPUs."""
    document: int = 0
    """Length of the documents that make up these tokens; 0: 256 on GPUs, 32 on CPUs."""
    micro_batches: str = "1,2,4"
    """Micro-batches of a step, with commas between."""
    lengths: str = ""
    """Document lengths at which attention is measured; empty: 2048 to 32768 on GPUs, 128 to 1024 on CPUs."""
    warmup: int = 1
    """Rounds through all measurements before the timed ones."""
    repeats: int = 5
    """Timed rounds; each takes as long as the slowest rank, and the median counts."""
    out: str = "machine.json"
    """File for the machine."""
    json: Switch = False
    """Print machine, measurements and errors as JSON, and nothing else, on standard output."""


def main(argv: Sequence[str]) -> int:
    """Run the bench; returns the exit code."""
    flags = parse_flags(CalibrateFlags, argv, "longspan bench calibrate")
    ranks, backend = flags.processes(CPU_RANKS)
    settings = make_calibration_settings(flags, ranks, backend)
    measured = run_on_ranks(calibrate_ranks, (settings,), ranks)
    if is_reporting():
        calibration = fit_machine(measured, settings)
        write_text(flags.out, json.dumps(calibration.machine.to_json(), indent=1) + "\n")
        record = make_record(calibration, measured, settings, ["longspan", "bench", "calibrate", *argv])
        print(json.dumps(record, indent=1) if flags.json else calibration_text(record))
        print(f"wrote {flags.out}", file=sys.stderr if flags.json else sys.stdout)
    return 0


def make_calibration_settings(flags: CalibrateFlags, ranks: int, backend: str) -> CalibrationSettings:
    """Make the settings that the ranks receive. Raises ConfigError for sizes from which no figures can be fitted."""
    defaults = GPU_DEFAULTS if backend == "nccl" else CPU_DEFAULTS
    flags.check_flags()
    if flags.layers < 0 or flags.document < 0:
        raise ConfigError(f"--layers {flags.layers} --document {flags.document}: at least 0")
    if flags.layers and flags.model:
        raise ConfigError(f"--layers {flags.layers} and the weights of {flags.model}: use --preset")
    if not Path(flags.out).absolute().parent.is_dir():
        raise ConfigError(f"--out {flags.out}: there is no folder {Path(flags.out).absolute().parent}")
    return CalibrationSettings(
        preset=flags.preset or defaults["preset"],
        # 0: all layers of a preset or model that flags name
        layers=flags.layers or (0 if flags.preset or flags.model else defaults["layers"]),
        dtype=flags.dtype or ("bfloat16" if backend == "nccl" else "float32"),
        document=flags.document or defaults["document"],
        ranks=ranks,
        backend=backend,
        **{name: _parse_counts(f"--{name}", getattr(flags, name) or defaults[name]) for name in ("tokens", "lengths")},
        micro_batches=_parse_counts("--micro_batches", flags.micro_batches),
        **{name: getattr(flags, name) for name in ("model", "warmup", "repeats", "timeout_seconds")},
    )


def _parse_counts(flag: str, text: str) -> tuple[int, ...]:
    """Parse counts with commas between, and sort them. Raises ConfigError unless two or more are different.

    From two counts the seconds of one more and the seconds that are always there are fitted apart.
    """
    try:
        counts = sorted({int(word) for word in text.split(",")})
    except ValueError:
        counts = []
    if len(counts) < 2 or counts[0] < 1:
        raise ConfigError(f"{flag} {text!r} is not a list of two or more different counts, such as 256,512")
    return tuple(counts)


def fit_machine(measured: Measured, settings: CalibrationSettings) -> Calibration:
    """Fit a machine to the samples; figures that were not measured are those known of this device.

    For an unknown device they are those of an H200 on GPUs, and orders of magnitude on CPUs.
    """
    known = find_device(measured.device)
    base = known or (Machine.known("H200") if settings.backend == "nccl" else Machine.cpus())
    base = replace(
        base,
        device=measured.device,
        node_size=measured.node_size,
        source=f"the model on {measured.device}, as measured",
        world=settings.ranks,
        date=date.today().isoformat(),
    )
    return fit_samples(measured.samples, base, known=known is not None)


def make_record(
    calibration: Calibration, measured: Measured, settings: CalibrationSettings, command: Sequence[str]
) -> dict[str, Any]:
    """Make the record as a JSON object: what was measured, and where, and the machine that was fitted."""
    return {
        "bench": "calibrate",
        "model": settings.model or settings.preset,
        **{name: getattr(settings, name) for name in ("layers", "dtype", "ranks", "backend", "repeats")},
        "command": " ".join(command),
        "machine": machine_facts(),
        "versions": versions(),
        "node_size": measured.node_size,
        "seconds": measured.seconds,
        "measured": calibration.machine.to_json(),
        "mean_error": calibration.mean_error,
        "samples": [
            {"what": sample.name, "part": sample.part, "measured_seconds": sample.seconds, "fitted_seconds": seconds}
            for sample, seconds in zip(calibration.samples, calibration.fitted_seconds, strict=True)
        ],
    }


def calibration_text(record: dict[str, Any]) -> str:
    """Write a record for a terminal: measured and fitted seconds, the machine with what is assumed, and the error."""
    layers = f" ({plural(record['layers'], 'layer')})" if record["layers"] else ""
    head = (
        f"{record['model']}{layers} in {record['dtype']} on {plural(record['ranks'], 'rank')} ({record['backend']}), "
        f"hosts of {record['node_size']} as the launcher counts them, {machine_text(record['machine'])}"
    )
    names = ("measured_seconds", "fitted_seconds")
    rows = [(row["what"], *(f"{1e3 * row[name]:.3f}" for name in names)) for row in record["samples"]]
    machine = Machine.from_json(record["measured"])
    figures = [(name, f"{value:.4g}") for name, value in machine.rates().items()]
    for level in LEVELS:
        for kind, wire in getattr(machine, level).wires().items():
            figures.append((f"{level} {kind}", f"{wire.bytes_per_second:.4g} bytes/s, {1e6 * wire.latency:.4g} µs"))
    marked = [(*row, "assumed" * (row[0].split()[0] in machine.assumed_parts)) for row in figures]
    error = f"mean error of the fit {100 * record['mean_error']:.1f} %, measured in {record['seconds']:.0f} s"
    tables = text_table(("what", "measured ms", "fitted ms"), rows), text_table(("figure", "value", ""), marked)
    return "\n\n".join([head, *tables, error])
