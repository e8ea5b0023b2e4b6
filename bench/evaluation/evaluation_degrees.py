"""Seconds of an evaluation at another degree than training, on the same ranks and weights, next to published figures.

    python bench/evaluation/evaluation_degrees.py --out bench/records/eval.json  # a rank for each GPU
    python bench/evaluation/evaluation_degrees.py                                # on CPUs, a tiny model

The exit code is 1 if the losses at two degrees differ by more than rounding explains. `--help` shows the flags.
"""

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.evaluation.degree_cases import DEGREES, KNOWN_DOCUMENTS, KNOWN_RANKS, EvalBenchFlags, make_settings
from bench.evaluation.degree_ranks import eval_ranks

from longspan.bench.record import origin_text, show_record
from longspan.cli.flags import parse_flags
from longspan.cli.processes import print_note, run_on_ranks
from longspan.plain_text import bytes_text, markdown_table, text_table

_SUMMARY = (
    "case",
    "published 1 → 2, ms",
    "ratio",
    "after training at 1: 1 → 2, ms",
    "ratio",
    "after training at 2: 1 → 2, ms",
    "ratio",
    "planned, ms",
    "ratio",
    "loss difference",
)
_RUNS = ("case", "run", "mean ms", "median", "deviation", "peak memory", "activations", "micro-batches", "loss")
_PARTS = ("case", "degree", "attention", "other layers", "exposed communication", "idle", "evaluation")


def record_text(record: dict[str, Any]) -> str:
    """A record for a terminal."""
    tables = [text_table(_SUMMARY, _summary(record)), text_table(_RUNS, _runs(record), left=2)]
    if parts := _parts(record):
        tables.append(text_table(_PARTS, parts, left=2))
    return "\n\n".join([_title(record), *tables, _cases_left_out(record)]).rstrip()


def record_markdown(record: dict[str, Any]) -> str:
    """A record for people who read bench/records."""
    documents, ranks = record["documents"], record["ranks"]
    work = (documents / ranks) / (KNOWN_DOCUMENTS / KNOWN_RANKS)
    shapes = [
        (r["name"], r["preset"], f"{r['tokens']:,}", *(str(r[name]) for name in ("layers", "tp", "pp")))
        for r in record["rows"]
    ]
    parts = (
        f"Parts of a profiled evaluation, ms:\n\n{markdown_table(_PARTS, rows)}\n\n" if (rows := _parts(record)) else ""
    )
    return (
        f"# {_title(record)}\n\n"
        f"{origin_text(record)}\n\n"
        f"{markdown_table(_SUMMARY, _summary(record))}\n\n"
        f"Whole evaluations of {documents} documents, the slowest rank of each, means over {record['repeats']} after "
        f"{record['warmup']}: planning, agreement of the ranks, reading, forward passes under FSDP2, loss, token "
        "accuracy, and sums over ranks. Both degrees run on the same ranks and weights, after a training step at one "
        "of them. At a fixed degree each group of slots has one document in a micro-batch; a ratio is the time at "
        "degree 1 over that at degree 2, or over the planned one. Loss difference: of the same documents, at degrees "
        f"1 and 2. Published: {KNOWN_DOCUMENTS} documents on {KNOWN_RANKS} × H100, weights not sharded, loss alone; "
        f"here each GPU has {work:g} × that work.\n\n"
        f"{markdown_table(('case', 'shape', 'tokens', 'layers', 'TP', 'PP'), shapes)}\n\n"
        f"{markdown_table(_RUNS, _runs(record))}\n\n{parts}{_cases_left_out(record)}\n"
    )


def _title(record: dict[str, Any]) -> str:
    return (
        f"Evaluation at degrees 1 and 2 over {record['ranks']} ranks ({record['backend']}): {record['documents']} "
        f"documents, {record['cp_comm_type']}, vocabulary {record['vocabulary']:,}"
    )


def _cases_left_out(record: dict[str, Any]) -> str:
    names = record["left_out"]
    return f"Left out, for they need another number of ranks: {', '.join(names)}." if names else ""


def _summary(record: dict[str, Any]) -> list[tuple[str, ...]]:
    lines: list[tuple[str, ...]] = []
    for row in record["rows"]:
        times = {(run.get("trained"), run.get("degree")): 1e3 * run["mean"] for run in row["runs"]}
        planned, cells = 1e3 * planned_run(row)["mean"], [row["name"]]
        for pair in (row["known"], *([times.get((trained, degree)) for degree in DEGREES] for trained in DEGREES)):
            cells += _pair(pair)
        best = times[DEGREES[0], DEGREES[0]]
        lines.append((*cells, f"{planned:.1f}", f"{best / planned:.2f}", f"{row['difference']:.1e}"))
    return lines


def planned_run(row: dict[str, Any]) -> dict[str, Any]:
    """The run of a case whose plan longspan chose."""
    return next(run for run in row["runs"] if "trained" not in run)


def _pair(times: Sequence[float | None] | None) -> tuple[str, str]:
    first, second = times or (None, None)
    if first is None or second is None:
        return "" if first is None else f"{first:.1f}", ""
    return f"{first:.1f} → {second:.1f}", f"{first / second:.2f}"


def _runs(record: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            row["name"],
            run["name"],
            *(f"{1e3 * run[name]:.2f}" for name in ("mean", "median", "deviation")),
            *(bytes_text(run[name]) if run[name] else "" for name in ("peak_bytes", "activation_bytes")),
            str(run["micro_batches"]),
            f"{run['loss']:.6f}",
        )
        for row in record["rows"]
        for run in row["runs"]
    ]


def _parts(record: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (row["name"], degree, *(f"{1e3 * parts['seconds'][name]:.1f}" for name in _PARTS[2:]))
        for row in record["rows"]
        for degree, parts in row.get("parts", {}).items()
    ]


CPU_RANKS = 4
PROGRAM = "bench/evaluation/evaluation_degrees.py"


def main(argv: Sequence[str]) -> int:
    """Run the bench. Returns 0, or 1 where the losses at two degrees differ by more than rounding explains."""
    flags = parse_flags(EvalBenchFlags, argv, PROGRAM)
    ranks, backend = flags.processes(CPU_RANKS)
    settings = make_settings(flags, ranks, backend, ["python", PROGRAM, *argv])
    for case in settings.left_out:
        print_note(f"{case.name} is left out: it runs on multiples of {case.ranks} ranks, here are {ranks}", sys.stderr)
    record = run_on_ranks(eval_ranks, (settings,), ranks)
    show_record(record, flags, text=record_text(record), markdown=record_markdown(record))
    return 0 if all(row["good"] for row in record["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
