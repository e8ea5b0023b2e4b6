"""The whole matrix of training, and its record: how many combinations, and the worst errors of each dtype.

    python bench/training/training_matrix.py --out bench/records/training-matrix.json       # forty minutes on two cores
    python bench/training/training_matrix.py --ranks 4 --backend nccl                        # one rank a GPU
    python bench/training/training_matrix.py --own         # only the stock model's own errors in float32, in seconds

The matrix is that of `tests/train/steps/matrix.py`; the tests run every pair of it. Combinations that the record has
already, of the same commit, are not run again.

Limits are of the difference to the stock model in the same dtype. In float32 both have an error of their own, so
beside what is over a limit stands the stock model's, against itself in float64. No limit of losses follows from it: one
that is over is marked, and the script ends with status 1.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import random
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.begun import open_record

from longspan.bench.benches import origin_text, write_record
from longspan.comm import run_local
from tests.train.steps.matrix import (
    DTYPES,
    LIMITS,
    RANKS,
    Combination,
    Errors,
    errors_of_stock,
    every,
    run,
    wanted_of,
    worst_of_ranks,
)

ROOT = Path(__file__).parents[2]
PARTS = Errors._fields
AT_ONCE = 16  # combinations of one call: what a broken run loses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)))
    parser.add_argument("--backend", default="gloo", choices=("gloo", "nccl"))
    parser.add_argument("--out", type=Path)
    parser.add_argument("--own", action="store_true", help="only the stock model's own errors in float32")
    options = parser.parse_args()
    os.environ["LONGSPAN_TEST_BACKEND"] = options.backend  # in which functions of tests open their worlds
    if options.own:
        print("\n".join(_own_lines(_own_errors())))
        return
    record = open_record("training matrix", options.out, options.backend, ROOT)
    record.setdefault("ranks", {})
    record["own"] = _own_errors()
    for ranks in map(int, options.ranks.split(",")):
        _add(record, ranks, options.out)
    print(_text(record))
    sys.exit(any(result["wrong"] for result in record["ranks"].values()))


def _add(record: dict[str, Any], ranks: int, out: Path | None) -> None:
    """Run what the record lacks of the combinations on so many processes, in an order drawn once, piece by piece."""
    there = [c for c in every(ranks) if c.fits]
    refused = len(every(ranks)) - len(there)
    none = {"combinations": 0, "all": len(there), "refused": refused, "wrong": [], "worst": {}, "seconds": 0.0}
    part = record["ranks"].setdefault(str(ranks), none)
    random.Random(ranks).shuffle(there)
    wanted = wanted_of(there)
    for start in range(part["combinations"], len(there), AT_ONCE):
        piece = there[start : start + AT_ONCE]
        began = time.perf_counter()
        piece_errors = worst_of_ranks(run_local(run, ranks, (piece, wanted), timeout=7200))
        part["combinations"] += len(piece)
        part["seconds"] += time.perf_counter() - began
        for combination, errors in zip(piece, piece_errors, strict=True):
            _note(part, combination, errors, wanted[combination.key].own_error)
        if out is not None:
            write_record(record, out, _text(record))
        print(f"{ranks} processes: {part['combinations']} of {len(there)}, {part['seconds']:.0f} s", flush=True)


def _note(part: dict[str, Any], combination: Combination, errors: Errors, own_error: float) -> None:
    if not errors.over_limit(combination.dtype, own_error) <= 1:
        part["wrong"].append({"combination": str(combination), **errors._asdict(), "own": _own_name(combination)})
    worst = part["worst"].setdefault(combination.dtype, dict.fromkeys(PARTS, 0.0))
    worst.update({name: max(worst[name], getattr(errors, name)) for name in PARTS})


def _own_name(combination: Combination) -> str:
    return f"{combination.family}, {combination.layers} layers"


def _own_errors() -> dict[str, dict[str, float]]:
    """By family and layers: errors of the stock model in float32, in one process, against itself in float64."""
    models = {c.key: c for ranks in RANKS for c in every(ranks) if c.dtype == "float32"}
    return {_own_name(c): errors_of_stock(c)._asdict() for c in models.values()}


def _own_lines(own: dict[str, dict[str, float]]) -> list[str]:
    rows = (f"| {' | '.join([name, *(f'{errors[part]:.2g}' for part in PARTS)])} |" for name, errors in own.items())
    return ["| stock model in float32 | loss | gradients | weights |", "| --- " * 4 + "|", *rows]


def _text(record: dict[str, Any]) -> str:
    parts = record["ranks"]
    total = sum(f["combinations"] for f in parts.values())
    wrong = sum(len(f["wrong"]) for f in parts.values())
    refused = sum(result["refused"] for result in parts.values())
    lines = [
        f"# Matrix of training ({record['backend']}): {total} combinations, {wrong} over a limit, {refused} refused",
        "",
        origin_text(record),
        "",
        "Qwen3, Qwen3-MoE, gpt-oss (two layers, four with vpp 2; hidden size 32) × fixed, dynamic plans × tp 1, tp 2, "
        "tp 2 with sequence parallelism × pp 1, pp 2, pp 2 with vpp 2 × ep 1, 2 × FSDP2 that gathers weights and sums "
        "gradients in each micro-batch, sums them there, or neither × float64, float32 "
        "(`tests/train/steps/matrix.py`). Three steps of SGD on three batches, with router losses, against the stock "
        "model in one process that sees the same documents one by one: the loss and gradient norm of each step, every "
        "gradient of the first step, every weight after the last; largest relative differences. Each on as "
        "many processes as make two slots or more: 4, and 8 for tp 2 with pp 2. Refused by name: ep 2 without experts. "
        "Combinations, refused ones and seconds are those of both dtypes.",
        "",
        "| processes | combinations | refused | over | dtype | loss | gradients | weights | seconds |",
        "| --- " * 9 + "|",
    ]
    lines += [_line(ranks, dtype, result) for ranks, result in parts.items() for dtype in DTYPES]
    limits = {dtype: " | ".join(f"{limit:.0e}" for limit in LIMITS[dtype]) for dtype in DTYPES}
    lines += [f"| limit | | | | {dtype} | {limit} | |" for dtype, limit in limits.items()]
    lines += [
        "",
        "Limits are of the difference to the stock model in the same dtype. Gradients in float32 may also be off by "
        "twice the stock model's own error, which is its difference to itself in float64:",
        "",
        *_own_lines(record["own"]),
    ]
    over = [error for result in parts.values() for error in result["wrong"]]
    lines += ["", "Over a limit (and the stock model's own error):", ""] if over else []
    for e in over:
        own = record["own"][e["own"]]
        lines.append(f"- {e['combination']}: {', '.join(f'{p} {e[p]:.2g} ({own[p]:.2g})' for p in PARTS)}")
    return "\n".join(lines) + "\n"


def _line(ranks: str, dtype: str, result: dict[str, Any]) -> str:
    run_of_all = f"{result['combinations']} of {result['all']}"
    over = sum(f"dtype='{dtype}'" in error["combination"] for error in result["wrong"])
    counts = map(str, (result["refused"], over))
    errors = (f"{result['worst'][dtype][name]:.2g}" for name in PARTS)
    return f"| {' | '.join([ranks, run_of_all, *counts, dtype, *errors, format(result['seconds'], '.0f')])} |"


if __name__ == "__main__":
    main()
