"""`longspan bench calibrate`: measures this machine and its network, and writes the Machine that prices plans."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

from longspan.bench.benches import BenchFlags
from longspan.bench.calibrate.fit import Calibration, fit_samples
from longspan.bench.calibrate.trials import LAYERS, CalibrationSettings, Measured, calibrate_ranks
from longspan.cli.flags import parse_flags, write_text
from longspan.cli.machine import machine_facts, machine_text
from longspan.cli.processes import is_reporting, run_on_ranks
from longspan.errors import ConfigError, plural
from longspan.plain_text import text_table
from longspan.plan import Machine
from longspan.plan.cost.links import LEVELS
from longspan.plan.cost.machine import find_device
from longspan.versions import versions

CPU_RANKS = 2


@dataclass(frozen=True, kw_only=True)
class CalibrateFlags(BenchFlags):
    """Measure what this machine and its network sustain, and write it to a file: a Machine, which prices any model.

    Runs one process for each GPU of this machine, or torchrun's on any number of hosts, or --world local processes; all
    of them work at the same time. Measured are steps of a model with random weights, what the host takes to launch a
    layer, a group and a document, attention by the length of documents, passes over memory, and messages of each kind
    inside a host and between hosts. Which ranks share a host is what the launcher says. The file is for run.machine of
    a run and --machine of longspan plan; a run on another device, or on hosts of another size, refuses it.
    """

    warmup: int = 1
    """Rounds through all measurements before the timed ones."""
    repeats: int = 5
    """Timed rounds; each takes as long as the slowest rank, and the median counts."""
    out: str = "machine.json"
    """File for the machine."""
    json: bool = False
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
    """Make the settings that the ranks receive. Raises ConfigError where nothing would be timed or written."""
    flags.check_flags()
    if not Path(flags.out).absolute().parent.is_dir():
        raise ConfigError(f"--out {flags.out}: there is no folder {Path(flags.out).absolute().parent}")
    return CalibrationSettings(flags.warmup, flags.repeats, ranks, backend, flags.timeout_seconds)


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
        "model": settings.sizes.preset,
        "layers": LAYERS,
        "dtype": settings.sizes.dtype,
        **{name: getattr(settings, name) for name in ("ranks", "backend", "repeats")},
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
    head = (
        f"{record['model']} ({record['layers']} layers) in {record['dtype']} on {plural(record['ranks'], 'rank')} "
        f"({record['backend']}), hosts of {record['node_size']} as the launcher counts them, "
        f"{machine_text(record['machine'])}"
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
