"""What a choice inside sharded attention gains: one way and another in turn, on the same GPUs.

    torchrun --nproc-per-node 4 bench/attention/attention_choices.py --choice slices --documents 1,8 --out FILE.json

A GPU slows down as it warms up, by as much as most choices gain. So each round opens a world of every way, and times
forward and backward of every type and length in it; the record has every round. Choices:

- streams: messages on streams of high priority (as they are), or of equal priority. A message that is sent ahead runs
  beside a kernel; where both wait for a place on the device, the stream of higher priority goes first.
- slices: the most slices of the heads that `a2a` cuts large tensors into.

Needs GPUs.
"""

import argparse
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench.attention.attention_time import settings_of, settled
from bench.attention.type_cases import own_cases, tensors_of
from bench.attention.type_ranks import forward_flops

from longspan import Layout, World
from longspan.attention import all_to_all
from longspan.bench.record import origin_text
from longspan.cli.machine import machine_facts
from longspan.comm.groups import process_groups
from longspan.plain_text import markdown_table
from longspan.versions import versions

CHOICES: dict[str, dict[str, Callable[[], None]]] = {
    "streams": {
        "high": partial(setattr, process_groups, "AHEAD", process_groups.AHEAD),
        "equal": partial(setattr, process_groups, "AHEAD", frozenset[str]()),
    },
    "slices": {f"at most {n}": partial(setattr, all_to_all, "SLICES", n) for n in (4, 2, 1)},
}


def main() -> None:
    """Measure in rounds, print a line for each, and write the record."""
    flags = _flags()
    about = {"machine": machine_facts(), "versions": versions(), "command": " ".join(["torchrun", *sys.argv])}
    options = {name: getattr(flags, name) for name in ("choice", "partition", "key_value_heads")}
    record: dict[str, Any] = {"bench": "attention choices", **options, **about, "rows": []}
    ways, first = list(CHOICES[flags.choice]), int(os.environ["RANK"]) == 0
    for turn in range(flags.rounds):
        for way in ways if turn % 2 else reversed(ways):
            for row in _round(flags, way):
                record["rows"].append(row | {"round": turn})
                if first:
                    print(record["rows"][-1], flush=True)
    if first and flags.out:
        Path(flags.out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        Path(flags.out).with_suffix(".md").write_text(_text(record), encoding="utf-8")


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--choice", choices=list(CHOICES), required=True)
    parser.add_argument("--types", default="p2p,all_gather,a2a")
    parser.add_argument("--lengths", default="65536,131072", help="rows of all ranks together")
    parser.add_argument("--documents", default="1", help="equal packed documents, with commas between")
    parser.add_argument("--key_value_heads", type=int, default=8, help="with fewer, slices share them")
    parser.add_argument("--partition", default="zigzag", choices=("zigzag", "contiguous"))
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--out", default="", help="record: FILE.json and FILE.md")
    flags = parser.parse_args(namespace=argparse.Namespace(window=0, kernel=""))
    if "RANK" not in os.environ or not torch.cuda.is_available():
        surroundings = (
            f"{torch.cuda.device_count()} GPUs, {'no RANK' if 'RANK' not in os.environ else 'RANK'} in the environment"
        )
        parser.error(f"start it on a machine with GPUs by torchrun --nproc-per-node GPUS; found {surroundings}")
    return flags


def _round(flags: argparse.Namespace, way: str) -> Iterator[dict[str, Any]]:
    """Seconds of every type and length in a world that goes this way."""
    CHOICES[flags.choice][way]()
    with World(Layout(int(torch.cuda.device_count()))) as world:
        for documents in flags.documents.split(","):
            case_flags = argparse.Namespace(**(vars(flags) | {"documents": int(documents)}))
            settings = replace(settings_of(case_flags, len(world.home.ranks)), key_value_heads=flags.key_value_heads)
            for length in settings.lengths:
                for case in own_cases(settings):
                    with case.prepare(settings, tensors_of(settings, length, world), world) as run:
                        seconds = max(world.control.gather_objects(settled(run)))
                    tflops = 3.5 * forward_flops(settings, length) / seconds / settings.ranks / 1e12
                    what = {"way": way, "name": case.name, "documents": settings.documents, "length": length}
                    yield what | {"seconds": seconds, "tflops": tflops}


def _text(record: dict[str, Any]) -> str:
    ways = list(CHOICES[record["choice"]])
    seconds: dict[tuple[str, int, int], dict[str, list[float]]] = {}
    for row in record["rows"]:
        by_way = seconds.setdefault((row["name"], row["documents"], row["length"]), {way: [] for way in ways})
        by_way[row["way"]].append(row["tflops"])
    rows = [
        (name, str(documents), f"{length:,}", *(", ".join(f"{x:.0f}" for x in by_way[way]) for way in ways))
        for (name, documents, length), by_way in seconds.items()
    ]
    return (
        f"# Sharded attention, {record['choice']}: one way and another in turn\n\n"
        f"{origin_text(record)}\n\n"
        f"{markdown_table(('attention', 'documents', 'length', *ways), rows)}\n\n"
        "TFLOP/s per device, forward and backward, of every round, on the slowest rank.\n"
    )


if __name__ == "__main__":
    main()
