"""Attention at the size of models, on GPUs: errors of every type and kernel against dense float32, and their record.

    python bench/attention/attention_full_size.py --ranks 4 --out bench/records/attention-full-size.json

Two documents of 4096 rows (whole, and unequal), bfloat16; the bound is twice the error of the same kernel on whole
documents on one GPU. The configurations are those of `tests/attention/full_size.py`.
"""

import argparse
import os
import sys
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from longspan.bench.record import origin_text, write_record
from longspan.cli.machine import machine_facts
from longspan.comm import run_local
from longspan.versions import versions
from tests.attention.full_size import CONFIGURATIONS, NAMES, Measured, measure


def main() -> int:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--ranks", type=int, default=4)
    flags.add_argument("--backend", default="nccl", choices=("gloo", "nccl"))
    flags.add_argument("--names", default=",".join(CONFIGURATIONS))
    flags.add_argument("--kernels", default="", help="names of the support table; empty: all that can")
    flags.add_argument("--dtype", default="bfloat16", choices=("bfloat16", "float16"))
    flags.add_argument("--rows", type=int, default=0, help="of a document, in place of the configuration's")
    flags.add_argument("--out", type=Path)
    options = flags.parse_args()
    os.environ["LONGSPAN_TEST_BACKEND"] = options.backend
    kernels = tuple(name for name in options.kernels.split(",") if name)
    args = (
        options.ranks,
        tuple(options.names.split(",")),
        options.dtype,
        options.rows,
        kernels,
        partial(_keep, options),
    )
    measured: list[Measured] = run_local(measure, options.ranks, args, timeout=3600)[0]
    _keep(options, measured)
    print(_text(_record(options, measured)))
    return 0 if all(m.good for m in measured) else 1


def _keep(options: argparse.Namespace, measured: list[Measured]) -> None:
    if options.out is not None:
        record = _record(options, measured)
        write_record(record, options.out, _text(record))


def _record(options: argparse.Namespace, measured: list[Measured]) -> dict[str, Any]:
    about = {"machine": machine_facts(), "versions": versions(), "command": " ".join(["python", *sys.argv])}
    rows = [asdict(m) | {"good": m.good} for m in measured]
    return {"bench": "attention full size", **about, "ranks": options.ranks, "dtype": options.dtype, "rows": rows}


def _text(record: dict[str, Any]) -> str:
    rows = record["rows"]
    header = ["configuration", "lengths", "type", "kernel", *(f"{name} (one GPU)" for name in NAMES), "good"]
    lines = [
        f"# Attention at the size of models: {record['ranks']} ranks, {record['dtype']}, {len(rows)} comparisons, "
        f"{sum(not row['good'] for row in rows)} beyond their bound",
        "",
        origin_text(record),
        "",
        "Relative 2-norms against dense attention in float32; in brackets those of the kernel on whole documents on "
        "one GPU. The bound is twice that.",
        "",
        f"| {' | '.join(header)} |",
        "| --- " * len(header) + "|",
        *(_line(row) for row in rows),
    ]
    return "\n".join(lines) + "\n"


def _line(row: dict[str, Any]) -> str:
    pairs = [f"{e:.1e} ({one:.1e})" for e, one in zip(row["errors"], row["alone"], strict=True)]
    pairs += ["–"] * (len(NAMES) - len(pairs))
    lengths = " + ".join(map(str, row["lengths"]))
    return f"| {' | '.join([row['name'], lengths, row['cp_comm_type'], row['kernel'], *pairs])} | {row['good']} |"


if __name__ == "__main__":
    sys.exit(main())
