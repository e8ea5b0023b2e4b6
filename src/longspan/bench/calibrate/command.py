"""`longspan bench calibrate`: measures a model on this machine, and writes the cost that planners use."""

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from longspan.bench.benches import BenchFlags
from longspan.bench.calibrate.fit import Calibration, Sample, calibrate
from longspan.bench.calibrate.ranks import CalibrationSettings, calibrate_ranks
from longspan.cli.flags import Switch, parse_flags
from longspan.cli.machine import machine, machine_text
from longspan.cli.processes import has_torchrun, ranks_on_this_host, reports_here, run_on_ranks
from longspan.errors import ConfigError, plural
from longspan.plan import Cost
from longspan.report.plain_text import text_table
from longspan.run.result import versions

CPU_RANKS = 2
GPU_DEFAULTS = {"tokens": "2048,4096,8192,16384", "lengths": "2048,8192,16384,32768", "document": 256}
CPU_DEFAULTS = {"tokens": "256,512,1024", "lengths": "256,512,1024,2048", "document": 32}


@dataclass(frozen=True, kw_only=True)
class CalibrateFlags(BenchFlags):
    """Measure whole steps of a model, its attention and its rings on this machine, and fit the constants of a Cost.

    Runs one process for each GPU of this machine, or torchrun's, or --world local processes; all of them
    work at the same time. The constants are written to a file for context.cost of a run and --cost of longspan plan,
    simulate and bench step, and a table compares every measurement with their prediction. The last steps of the table,
    with long documents, are only predicted: nothing is fitted to them. With one process there is no ring to measure,
    and the ring's constants keep their defaults. All processes must run on one host; give --across_gbps for the links
    between hosts.
    """

    preset: str = "qwen3-tiny"
    """Model with random weights."""
    model: str = ""
    """Folder of a Hugging Face model, in place of --preset."""
    dtype: Literal["", "bfloat16", "float16", "float32"] = ""
    """Dtype of the weights; empty: bfloat16 on GPUs, float32 on CPUs."""
    tokens: str = ""
    """Tokens of a slot in a micro-batch, with commas between; empty: 2048 to 16384 on GPUs, 256 to 1024 on CPUs."""
    document: int = 0
    """Length of the documents that make up these tokens; 0: 256 on GPUs, 32 on CPUs."""
    micro_batches: str = "1,2,4"
    """Micro-batches of a step, with commas between."""
    lengths: str = ""
    """Document lengths at which attention is measured; empty: 2048 to 32768 on GPUs, 256 to 2048 on CPUs."""
    across_gbps: float = 0.0
    """Speed of links between hosts, in 1e9 bytes/s; 0: as inside this host, at most 40."""
    warmup: int = 1
    """Rounds through all measurements before the timed ones."""
    repeats: int = 4
    """Timed rounds; each takes as long as the slowest rank, and the fastest counts."""
    out: str = "cost.json"
    """File for the constants."""
    json: Switch = False
    """Print constants, measurements and machine as JSON, and nothing else, on standard output."""


def main(argv: Sequence[str]) -> int:
    """Run the bench; returns the exit code."""
    flags = parse_flags(CalibrateFlags, argv, "longspan bench calibrate")
    ranks, backend = _processes(flags)
    settings = make_settings(flags, ranks, backend)
    samples, ring_bytes, exchange_bytes = run_on_ranks(calibrate_ranks, (settings,), ranks)
    if reports_here():
        row_bytes = {"ring_bytes": ring_bytes, "exchange_bytes": exchange_bytes}
        calibration = calibrate(samples, **row_bytes, across_bytes_per_second=1e9 * flags.across_gbps)
        write_cost(calibration, Path(flags.out))
        record = make_record(calibration, samples, settings, ["longspan", "bench", "calibrate", *argv])
        print(json.dumps(record, indent=1) if flags.json else record_text(record))
        print(f"wrote {flags.out}", file=sys.stderr if flags.json else sys.stdout)
    return 0


def make_settings(flags: CalibrateFlags, ranks: int, backend: str) -> CalibrationSettings:
    """The settings that the ranks receive. Raises ConfigError for sizes from which no constants can be fitted."""
    defaults: dict[str, Any] = GPU_DEFAULTS if backend == "nccl" else CPU_DEFAULTS
    flags.check_runs()
    if flags.across_gbps < 0 or flags.document < 0:
        raise ConfigError(f"--across_gbps {flags.across_gbps} --document {flags.document}: at least 0")
    if not Path(flags.out).absolute().parent.is_dir():
        raise ConfigError(f"--out {flags.out}: there is no folder {Path(flags.out).absolute().parent}")
    return CalibrationSettings(
        dtype=flags.dtype or ("bfloat16" if backend == "nccl" else "float32"),
        document=flags.document or defaults["document"],
        ranks=ranks,
        backend=backend,
        **{name: _sizes(f"--{name}", getattr(flags, name) or defaults[name]) for name in ("tokens", "lengths")},
        micro_batches=_sizes("--micro_batches", flags.micro_batches),
        **{name: getattr(flags, name) for name in ("preset", "model", "warmup", "repeats", "timeout_seconds")},
    )


def _sizes(flag: str, text: str) -> tuple[int, ...]:
    """Different counts in rising order; two at least, to tell the cost of one more from a cost that is always there."""
    try:
        counts = sorted({int(word) for word in text.split(",")})
    except ValueError:
        counts = []
    if len(counts) < 2 or counts[0] < 1:
        raise ConfigError(f"{flag} {text!r} is not a list of two or more different counts, such as 256,512")
    return tuple(counts)


def write_cost(calibration: Calibration, path: Path) -> None:
    """Write the constants to the file that --cost reads."""
    try:
        path.write_text(json.dumps(calibration.cost.to_json(), indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}") from error


def make_record(
    calibration: Calibration, samples: Sequence[Sample], settings: CalibrationSettings, command: Sequence[str]
) -> dict[str, Any]:
    """The constants, the measurements and the machine, as a JSON object."""
    rows = [
        {
            "what": sample.name,
            "measured_seconds": sample.seconds,
            "predicted_seconds": calibration.predict(sample),
            "relative_error": calibration.relative_error(sample),
            "fitted": sample.fitted,
        }
        for sample in samples
    ]
    overheads = {name: getattr(calibration, name) for name in ("step_seconds", "call_seconds", "wire_step_seconds")}
    return {
        "bench": "calibrate",
        "model": settings.model or settings.preset,
        "dtype": settings.dtype,
        "ranks": settings.ranks,
        "backend": settings.backend,
        "repeats": settings.repeats,
        "command": " ".join(command),
        "machine": machine(),
        "versions": versions(),
        "cost": calibration.cost.to_json(),
        "ring_measured": calibration.ring_measured,
        "beside": overheads,
        "samples": rows,
    }


def record_text(record: dict[str, Any]) -> str:
    """A record for a terminal: predicted against measured, then the constants."""
    head = (
        f"{record['model']} in {record['dtype']} on {plural(record['ranks'], 'rank')} ({record['backend']}), "
        f"{machine_text(record['machine'])}"
    )
    rows = [
        (row["what"], *(f"{1e3 * row[name]:.2f}" for name in ("measured_seconds", "predicted_seconds")), _percent(row))
        for row in record["samples"]
    ]
    values = Cost.from_json(record["cost"]).constants()
    constants = text_table(("constant", "value"), [(name, f"{value:.4g}") for name, value in values.items()])
    notes = [] if record["ring_measured"] else ["no ring was measured: the ring's constants are Cost's defaults"]
    table = text_table(("what", "measured ms", "predicted ms", "error"), rows)
    return "\n\n".join([head, table, _summary(record["samples"]), constants, *notes])


def _percent(row: dict[str, Any]) -> str:
    return f"{100 * row['relative_error']:+.1f} %"


def _summary(rows: Sequence[dict[str, Any]]) -> str:
    lines = []
    for fitted, name in ((True, "fitted"), (False, "predicted alone")):
        errors = sorted(abs(row["relative_error"]) for row in rows if row["fitted"] == fitted)
        middle = errors[len(errors) // 2]
        lines.append(
            f"{name}: {len(errors)} measurements, error {100 * middle:.1f} % median, {100 * errors[-1]:.1f} % most"
        )
    return "\n".join(lines)


def _processes(flags: CalibrateFlags) -> tuple[int, str]:
    """The number of processes and their backend. Raises ConfigError for processes on several hosts."""
    ranks, backend = flags.processes(CPU_RANKS)
    if has_torchrun() and (local := ranks_on_this_host()) != ranks:
        raise ConfigError(
            f"torchrun has started {ranks} processes, {local} of them on this host; calibrate on one host, and give "
            "--across_gbps for the links between hosts"
        )
    return ranks, backend
