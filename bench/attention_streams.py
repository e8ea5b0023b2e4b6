"""What streams of high priority for messages gain in sharded attention: with and without, in turn, on the same GPUs.

    torchrun --nproc-per-node 4 bench/attention_streams.py --out bench/records/attention-streams.json

A message that is sent ahead runs beside a kernel. Where both wait for a place on the device, the stream of higher
priority goes first. Each round opens a world of either kind and times forward and backward of every type and length;
the record has every round's median, so that what the machine does by itself can be told from what the streams do.
Needs GPUs.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from attention_time import settings_of, settled

from longspan import Layout, World
from longspan.cli.bench_attention_cases import own_cases, tensors_of
from longspan.cli.bench_attention_ranks import forward_flops
from longspan.cli.bench_record import where_it_ran
from longspan.cli.machine import machine
from longspan.comm import groups
from longspan.report.text_table import markdown_table
from longspan.train.versions import versions

AHEAD = {"high": groups.AHEAD, "equal": frozenset[str]()}


def main() -> None:
    """Measure in rounds, print a line for each, and write the record."""
    flags = _flags()
    about = {"machine": machine(), "versions": versions(), "command": " ".join(["torchrun", *sys.argv])}
    record: dict[str, Any] = {"bench": "attention streams", **about, "rows": []}
    first = int(os.environ["RANK"]) == 0
    for turn in range(flags.rounds):
        for name in AHEAD if turn % 2 else reversed(AHEAD):
            for row in _round(flags, name):
                record["rows"].append(row | {"round": turn})
                if first:
                    print(record["rows"][-1], flush=True)
    if first and flags.out:
        Path(flags.out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        Path(flags.out).with_suffix(".md").write_text(_text(record), encoding="utf-8")


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default="p2p,all_gather,a2a")
    parser.add_argument("--lengths", default="65536,131072", help="rows of all ranks together")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", default="", help="record: FILE.json and FILE.md")
    return parser.parse_args(namespace=argparse.Namespace(documents=1, partition="zigzag", window=0, kernel=""))


def _round(flags: argparse.Namespace, name: str) -> Iterator[dict[str, Any]]:
    """Seconds of every type and length in a world whose messages have streams of that priority."""
    groups.AHEAD = AHEAD[name]
    with World(Layout(int(torch.cuda.device_count()))) as world:
        settings = settings_of(flags, len(world.home.ranks))
        for length in settings.lengths:
            for case in own_cases(settings):
                with case.prepare(settings, tensors_of(settings, length, world), world) as run:
                    seconds = max(world.gather_objects(settled(run)))
                tflops = 3.5 * forward_flops(settings, length) / seconds / settings.ranks / 1e12
                yield {"priority": name, "name": case.name, "length": length, "seconds": seconds, "tflops": tflops}


def _text(record: dict[str, Any]) -> str:
    found: dict[tuple[str, int], dict[str, list[float]]] = {}
    for row in record["rows"]:
        by_name = found.setdefault((row["name"], row["length"]), {name: [] for name in AHEAD})
        by_name[row["priority"]].append(row["tflops"])
    rows = [
        (case, f"{length:,}", *(", ".join(f"{x:.0f}" for x in by_name[name]) for name in AHEAD))
        for (case, length), by_name in found.items()
    ]
    return (
        "# Streams of high priority for messages, and equal ones, in turn\n\n"
        f"{where_it_ran(record)}\n\n"
        f"{markdown_table(('attention', 'length', *(f'{name} priority' for name in AHEAD)), rows)}\n\n"
        "TFLOP/s per device, forward and backward, of every round, on the slowest rank.\n"
    )


if __name__ == "__main__":
    main()
