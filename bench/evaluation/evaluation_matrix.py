"""The whole matrix of evaluation, and its record: how many combinations, and the worst errors of each home.

    python bench/evaluation/evaluation_matrix.py --out bench/records/evaluation-matrix.json  # an hour on two cores
    python bench/evaluation/evaluation_matrix.py --homes "8 slots" --most 4  # four runs
    python bench/evaluation/evaluation_matrix.py --homes "tp 2" --out parts/1.json  # beside commands for others
    python bench/evaluation/evaluation_matrix.py --merge parts/*.json --out bench/records/evaluation-matrix.json

The matrix is that of `tests/evaluation/matrix.py`; `make test-all` runs it too. Runs that the record has already,
of the same commit, are not made again.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import random
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.begun import open_record
from bench.matrix_flags import matrix_flags

from longspan.bench.record import origin_text, write_record
from longspan.comm import run_local
from tests.evaluation.matrix import (
    DTYPES,
    FAMILIES,
    HOMES,
    LIMITS,
    RANKS,
    STEPS,
    WAYS,
    Errors,
    Run,
    stock_answers,
    take,
    whole,
    worst_of_ranks,
)

ROOT = Path(__file__).parents[2]
AT_ONCE = 2  # runs of one call: what a broken one loses


def main() -> None:
    options = matrix_flags(__doc__, _add_flags)
    record = _merged(options.merge, options.out) if options.merge else _made(options)
    print(_text(record))
    sys.exit(any(part["wrong"] for part in record["homes"].values()))


def _made(options: argparse.Namespace) -> dict[str, Any]:
    """The record at `--out`, with what it lacked."""
    record = open_record("evaluation matrix", options.out, options.backend, ROOT)
    record.setdefault("date", datetime.now(UTC).date().isoformat())
    record.setdefault("homes", {})
    for home in options.homes:
        _add(record, home, options.most, options.out)
    return record


def _add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--homes", nargs="*", default=list(HOMES))
    parser.add_argument("--merge", nargs="+", type=Path, help="records of some homes each, to be one; nothing is run")


def _merged(paths: list[Path], out: Path | None) -> dict[str, Any]:
    """One record of the homes of several, which commands made at the same time."""
    records: list[dict[str, Any]] = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    for name in ("commit", "machine", "versions", "backend"):
        if len({json.dumps(record.get(name)) for record in records}) > 1:
            sys.exit(f"--merge takes records of one {name}, and these have several: make those that differ again")
    homes = [home for record in records for home in record["homes"]]
    if twice := {home for home in homes if homes.count(home) > 1}:
        sys.exit(f"--merge takes every home once; more than one record has {', '.join(sorted(twice))}")
    parts = {home: part for record in records for home, part in record["homes"].items()}
    record = records[0] | {"homes": {home: parts[home] for home in HOMES if home in parts}}
    if out is not None:
        write_record(record, out, _text(record))
    return record


def _add(record: dict[str, Any], home: str, most: int, out: Path | None) -> None:
    """Make what the record lacks of the runs under one home, in an order drawn once, piece by piece."""
    runs = [run for run in whole() if run.home == home]
    random.Random(home).shuffle(runs)
    none = {"runs": 0, "all": len(runs), "combinations": 0, "evaluations": 0, "wrong": [], "worst": {}, "seconds": 0.0}
    part = record["homes"].setdefault(home, none)
    for start in range(part["runs"], min(most, len(runs)), AT_ONCE):
        piece, began = runs[start : min(start + AT_ONCE, most)], time.perf_counter()
        piece_errors = worst_of_ranks(run_local(take, RANKS, (piece, stock_answers(piece)), timeout=7200))
        part["seconds"] += time.perf_counter() - began
        for run, errors in zip(piece, piece_errors, strict=True):
            _note(part, run, errors)
        if out is not None:
            write_record(record, out, _text(record))
        print(f"{home}: {part['runs']} of {len(runs)} runs, {part['seconds']:.0f} s", flush=True)


def _note(part: dict[str, Any], run: Run, errors: Errors) -> None:
    part["runs"] += 1
    part["combinations"] += len(set(run.steps))
    part["evaluations"] += len(run.steps)
    if not errors.over_limit(run.dtype) <= 1:
        part["wrong"].append({"run": str(run), **errors._asdict()})
    worst = part["worst"].setdefault(run.dtype, dict.fromkeys(Errors._fields, 0.0))
    worst.update({name: max(worst[name], getattr(errors, name)) for name in worst})


def _text(record: dict[str, Any]) -> str:
    parts = record["homes"].values()
    combinations, evaluations = (sum(part[name] for part in parts) for name in ("combinations", "evaluations"))
    wrong = sum(len(part["wrong"]) for part in parts)
    lines = [
        f"# Matrix of evaluation ({record['backend']}): {combinations} combinations, {evaluations} evaluations, "
        f"{wrong} runs wrong",
        "",
        f"{record['date']}. {origin_text(record)}",
        "",
        f"A combination is a model ({', '.join(FAMILIES)}), a home of {RANKS} processes, a dtype, a degree of training "
        f"and one of evaluation, and a way of evaluating ({', '.join(WAYS)}); placements (FSDP2 with and without "
        "resharding, recomputation, free mode, torch.compile) take turns (`tests/evaluation/matrix.py`). A run "
        f"trains {STEPS} steps at one degree and evaluates after each, each time at another degree or in another way. "
        "document: the largest relative difference of any document's loss, in any evaluation, from the stock model "
        "trained in one process on the same batches; training: of any step's loss. changed: steps, and weights at the "
        "end, that differ by a bit from the same run without evaluations.",
        "",
        "| home | runs | combinations | evaluations | wrong | dtype | document | training | changed | seconds |",
        "| --- " * 10 + "|",
    ]
    lines += [_line(home, dtype, part) for home, part in record["homes"].items() for dtype in DTYPES]
    lines += [f"| limit | | | | | {dtype} | {LIMITS[dtype]:.0e} | {LIMITS[dtype]:.0e} | 0 | |" for dtype in DTYPES]
    return "\n".join(lines) + "\n"


def _line(home: str, dtype: str, part: dict[str, Any]) -> str:
    counts = [f"{part['runs']} of {part['all']}", *map(str, (part["combinations"], part["evaluations"]))]
    worst = part["worst"].get(dtype)
    errors = [f"{worst['document']:.2g}", f"{worst['training']:.2g}", f"{worst['changed']:.0f}"] if worst else [""] * 3
    cells = [home, *counts, str(len(part["wrong"])), dtype, *errors, format(part["seconds"], ".0f")]
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
