"""The whole matrix of training, and its record: how many combinations, and the worst errors of each dtype.

    python bench/training_matrix.py --out bench/records/training-matrix.json               # half an hour on two cores
    python bench/training_matrix.py --ranks 4 --every 5                                    # a fifth of a part
    python bench/training_matrix.py --ranks 4 --backend nccl                               # one rank a GPU

The matrix is that of `tests/train/matrix.py`; `make test-all` runs it too. Numbers of processes that the record has
already, of the same commit, are not run again.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import random
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from longspan.cli.machine import machine, machine_text
from longspan.comm import run_local
from longspan.train.versions import versions
from tests.train.matrix import DTYPES, LIMITS, RANKS, Combination, Errors, every, run, wanted_of, worst_of_ranks

ROOT = Path(__file__).parents[1]
PARTS = Errors._fields


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--ranks", default=",".join(map(str, RANKS)))
    flags.add_argument("--backend", default="gloo", choices=("gloo", "nccl"))
    flags.add_argument("--every", type=int, default=1, help="of so many combinations one, drawn")
    flags.add_argument("--out", type=Path)
    given = flags.parse_args()
    os.environ["LONGSPAN_TEST_BACKEND"] = given.backend
    record = _begun(given.out, given.backend)
    for ranks in map(int, given.ranks.split(",")):
        if str(ranks) not in record["ranks"]:
            record["ranks"][str(ranks)] = _part(ranks, given.every)
            _keep(record, given.out)
    print(_text(record))
    sys.exit(any(found["wrong"] for found in record["ranks"].values()))


def _begun(out: Path | None, backend: str) -> dict[str, Any]:
    done = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    commit = done.stdout.strip()
    if out is not None and out.exists():
        before = json.loads(out.read_text(encoding="utf-8"))
        if before["commit"] == commit and before["backend"] == backend:
            return before
    command = " ".join(["python", *sys.argv])
    about = {"machine": machine(), "versions": versions(), "commit": commit, "command": command, "backend": backend}
    return {"bench": "training matrix", **about, "ranks": {}}


def _part(ranks: int, every_nth: int) -> dict[str, Any]:
    """All combinations on so many processes, those of one home on the same ones."""
    entries = every(ranks)
    there = [c for c in entries if c.refusal is None]
    there = random.Random(ranks).sample(there, len(there) // every_nth)
    homes: dict[Any, list[Combination]] = {}
    for combination in there:
        homes.setdefault(combination.home, []).append(combination)
    began, found = time.perf_counter(), dict[Combination, Errors]()
    wanted = wanted_of(there)
    for home, chosen in homes.items():
        found.update(zip(chosen, worst_of_ranks(run_local(run, ranks, (chosen, wanted), timeout=7200)), strict=True))
        print(f"{len(found)} of {len(there)}, {time.perf_counter() - began:.0f} s, {home}", flush=True)
    return {
        "one of": every_nth,
        "combinations": len(there),
        "refused": sum(c.refusal is not None for c in entries),
        "wrong": [{"combination": str(c), **e._asdict()} for c, e in found.items() if not e.over_limit(c.dtype) <= 1],
        "worst": {dtype: _worst([e for c, e in found.items() if c.dtype == dtype]) for dtype in DTYPES},
        "seconds": time.perf_counter() - began,
    }


def _worst(errors: list[Errors]) -> dict[str, float]:
    return {name: max((getattr(error, name) for error in errors), default=0.0) for name in PARTS}


def _keep(record: dict[str, Any], out: Path | None) -> None:
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(record, indent=1), encoding="utf-8")
        out.with_suffix(".md").write_text(_text(record), encoding="utf-8")


def _text(record: dict[str, Any]) -> str:
    parts = record["ranks"]
    names = ", ".join(f"{name} {text}" for name, text in record["versions"].items())
    total, wrong = sum(f["combinations"] for f in parts.values()), sum(len(f["wrong"]) for f in parts.values())
    refused = sum(found["refused"] for found in parts.values())
    lines = [
        f"# Matrix of training ({record['backend']}): {total} combinations, {wrong} wrong, {refused} refused",
        "",
        f"Machine: {machine_text(record['machine'])}. Versions: {names}. Commit {record['commit']}. Command: "
        f"`{record['command']}`.",
        "",
        "Qwen3, Qwen3-MoE, gpt-oss (four layers, hidden size 32) × fixed, dynamic plans × tp 1, tp 2, tp 2 with "
        "sequence parallelism × pp 1, pp 2, pp 2 with vpp 2 × ep 1, 2 × FSDP2 resharding or not × float64, float32 "
        "(`tests/train/matrix.py`). Three steps of SGD on three batches, with router losses, against the stock model "
        "in one process that sees the same documents one by one: the loss and gradient norm of each step, every "
        "gradient of the first step, every weight after the last; largest relative differences. Each on as "
        "many processes as make two slots or more: 4, and 8 for tp 2 with pp 2. Refused by name: ep 2 without experts.",
        "",
        "| processes | part | combinations | refused | wrong | dtype | loss | gradients | weights | seconds |",
        "| --- " * 10 + "|",
    ]
    lines += [_line(ranks, dtype, found) for ranks, found in parts.items() for dtype in DTYPES]
    lines += [_limits(dtype) for dtype in DTYPES]
    return "\n".join(lines) + "\n"


def _line(ranks: str, dtype: str, found: dict[str, Any]) -> str:
    part = "all" if found["one of"] == 1 else f"1 of {found['one of']}"
    counts = map(str, (found["combinations"], found["refused"], len(found["wrong"])))
    errors = (f"{found['worst'][dtype][name]:.2g}" for name in PARTS)
    return f"| {' | '.join([ranks, part, *counts, dtype, *errors, format(found['seconds'], '.0f')])} |"


def _limits(dtype: str) -> str:
    return f"| limit | | | | | {dtype} | {' | '.join(f'{limit:.0e}' for limit in LIMITS[dtype])} | |"


if __name__ == "__main__":
    main()
