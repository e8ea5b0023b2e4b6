"""The whole parity table of attention, and its record: how many combinations, the worst error of each way and dtype.

    python bench/attention/attention_parity.py --out bench/records/attention-parity.json   # an hour or two on two cores
    python bench/attention/attention_parity.py --degrees 2,4                                # a part
    python bench/attention/attention_parity.py --every 5                                    # a fifth of the tensors
    python bench/attention/attention_parity.py --backend nccl --degrees 2,4                 # one rank a GPU

The table is that of `tests/attention/parity.py`; `make test-all` runs it too. Degrees that the record has already, of
the same commit, are not run again.
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

from longspan.bench.record import origin_text, write_record
from longspan.comm import run_local
from tests.attention.parity import DEGREES, DTYPES, REFUSED, WAYS, Combination, run, whole

ROOT = Path(__file__).parents[2]
AT_ONCE = 1500  # combinations of one call: what a broken run loses


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--degrees", default=",".join(map(str, DEGREES)))
    flags.add_argument("--backend", default="gloo", choices=("gloo", "nccl"))
    flags.add_argument("--every", type=int, default=1, help="of so many questions one, drawn, in every way")
    flags.add_argument("--out", type=Path)
    options = flags.parse_args()
    os.environ["LONGSPAN_TEST_BACKEND"] = options.backend
    record = open_record("attention parity", options.out, options.backend, ROOT)
    record.setdefault("degrees", {})
    for degree in map(int, options.degrees.split(",")):
        if str(degree) not in record["degrees"]:
            record["degrees"][str(degree)] = _degree(degree, options.every)
            _keep(record, options.out)
    print(_text(record))


def _degree(degree: int, every: int) -> dict[str, Any]:
    combinations, questions = whole(degree), len({c.seed for c in whole(degree)})
    chosen = set(random.Random(degree).sample(range(questions), questions // every))
    combinations = [c for c in combinations if c.seed in chosen]
    began, errors = time.perf_counter(), list[float]()
    for start in range(0, len(combinations), AT_ONCE):
        piece = combinations[start : start + AT_ONCE]
        errors += run_local(run, degree, (degree, piece), timeout=7200)[0]
        print(f"degree {degree}: {len(errors)} of {len(combinations)}, {time.perf_counter() - began:.0f} s", flush=True)
    pairs = list(zip(combinations, errors, strict=True))
    wrong = [{"combination": str(c), "error over limit": e} for c, e in pairs if not e <= 1]
    refused = sum(error == REFUSED for error in errors)
    worst = {f"{way}; {dtype}": _worst(pairs, way, dtype) for way in WAYS for dtype in DTYPES}
    return {
        "one of": every,
        "combinations": len(errors) - refused,
        "refused": refused,
        "wrong": wrong,
        "worst": {name: error for name, error in worst.items() if error is not None},
        "seconds": time.perf_counter() - began,
    }


def _worst(pairs: list[tuple[Combination, float]], way: str, dtype: str) -> float | None:
    errors = [error for c, error in pairs if (c.way, c.dtype) == (way, dtype) and error != REFUSED]
    return max(errors) if errors else None


def _keep(record: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        write_record(record, out, _text(record))


def _text(record: dict[str, Any]) -> str:
    degrees = record["degrees"]
    total = sum(figures["combinations"] for figures in degrees.values())
    refused, wrong = sum(f["refused"] for f in degrees.values()), sum(len(f["wrong"]) for f in degrees.values())
    lines = [
        f"# Parity of attention ({record['backend']}): {total} combinations, {wrong} wrong, {refused} refused",
        "",
        origin_text(record),
        "",
        "Types × degrees × features × lengths × head shapes × dtypes (`tests/attention/parity.py`), each against "
        "dense attention in float64: out, dq, dk, dv and the gradient of sinks, relative 2-norms. In the tables, the "
        "worst error over its limit: 1e-12 in float64, 1e-5 in float32, in bfloat16 twice the error of the same kernel "
        "on whole documents in one process. Refused are calls whose query heads cannot be dealt out, by name.",
        "",
        "| degree | part | combinations | refused | wrong | " + " | ".join(DTYPES) + " | seconds |",
        "| --- " * (6 + len(DTYPES)) + "|",
    ]
    lines += [_line(degree, figures) for degree, figures in degrees.items()]
    lines += ["", "| way | " + " | ".join(DTYPES) + " |", "| --- " * (1 + len(DTYPES)) + "|"]
    lines += [_way_line(way, degrees) for way in WAYS]
    return "\n".join(lines) + "\n"


def _line(degree: str, figures: dict[str, Any]) -> str:
    none = float("nan")  # of a dtype that was not drawn
    errors = (
        max((e for name, e in figures["worst"].items() if name.endswith(dtype)), default=none) for dtype in DTYPES
    )
    counts = (figures["combinations"], figures["refused"], len(figures["wrong"]))
    part = "all" if figures["one of"] == 1 else f"1 of {figures['one of']}"
    cells = [degree, part, *map(str, counts), *(f"{e:.2g}" for e in errors), f"{figures['seconds']:.0f}"]
    return f"| {' | '.join(cells)} |"


def _way_line(way: str, degrees: dict[str, Any]) -> str:
    cells = []
    for dtype in DTYPES:
        errors = [
            figures["worst"][name] for figures in degrees.values() if (name := f"{way}; {dtype}") in figures["worst"]
        ]
        cells.append(f"{max(errors):.2g}" if errors else "–")
    return f"| {way} | {' | '.join(cells)} |"


if __name__ == "__main__":
    main()
