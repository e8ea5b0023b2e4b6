"""What a part of the dynamic planner brings: plans of a handful of documents. Needs no GPU.

    python bench/plans/planner_parts.py --out bench/records/planner-parts.json      # about two minutes

`few_documents` is left out by taking it away from the planner; everything else is the same. Batches are those of
`planner.py` (32K tokens a slot), and, as these hold few documents on few slots only, batches of 2 to 32 documents on up
to 64 slots. Ratios are step times over the lower bound, seconds are CPU seconds of one core to plan.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
from planner import NAMES, TOKENS_PER_SLOT, lengths_of

from longspan import Layout, Plan, plan_dynamic
from longspan.cli.machine import machine_facts, machine_text
from longspan.plan.dynamic import planner

SEEDS = 10
plan_few = planner.plan_few_items


def plan(lengths: list[int], slots: int, cap: int, *, few: bool = True) -> tuple[Plan, float]:
    """The lockstep plan of a batch and the seconds to make it, with or without plans of a handful of documents."""
    planner.plan_few_items = plan_few if few else lambda _: None
    begun = time.process_time()
    made = plan_dynamic(lengths, Layout(slots), max_tokens_per_slot=cap)
    return made, time.process_time() - begun


def compare_few(batches: list[list[int]], slots: int, cap: int) -> dict[str, Any]:
    """How often plans of these batches are other ones without `few_documents`, and by how much slower."""
    pairs = [(plan(lengths, slots, cap), plan(lengths, slots, cap, few=False)) for lengths in batches]
    gains = [without.predicted_seconds / usual.predicted_seconds - 1 for (usual, _), (without, _) in pairs]
    return {
        "slots": slots,
        "cap": cap,
        "documents": [min(map(len, batches)), max(map(len, batches))],
        "batches": len(batches),
        "slower": sum(gain > 0 for gain in gains),
        "mean": float(np.mean(gains)),
        "most": max(gains),
        "ratio": [max(pair[side][0].ratio for pair in pairs) for side in (0, 1)],
        "seconds": [float(np.mean([pair[side][1] for pair in pairs])) for side in (0, 1)],
    }


def few_of_distributions() -> list[dict[str, Any]]:
    """`compare_few` over the batches of planner.py."""
    rows: list[dict[str, Any]] = []
    for cap in (8192, 16384):
        for slots in (8, 16, 32, 64):
            for name in NAMES:
                batches = [lengths_of(name, slots, cap, seed, TOKENS_PER_SLOT).tolist() for seed in range(SEEDS)]
                rows.append({"lengths": name} | compare_few(batches, slots, cap))
                print(rows[-1], flush=True)
    return rows


def few_of_handfuls() -> list[dict[str, Any]]:
    """`compare_few` over batches of so many documents of 1,000 to 60,000 rows, evenly drawn."""
    rows: list[dict[str, Any]] = []
    for slots in (4, 8, 16, 32, 64):
        for documents in (2, 4, 8, 16, 32):
            drawn = [np.random.default_rng([slots, documents, seed]) for seed in range(SEEDS)]
            batches = [random.integers(1000, min(60000, slots * 8192), documents).tolist() for random in drawn]
            rows.append({"lengths": f"{documents} documents"} | compare_few(batches, slots, 8192))
            print(rows[-1], flush=True)
    return rows


def few_table(rows: list[dict[str, Any]]) -> list[str]:
    """Only rows in which a plan changed, after a line that counts all."""
    batches, slower = sum(row["batches"] for row in rows), sum(row["slower"] for row in rows)
    lines = [f"Without it {slower} of {batches} plans are slower, the others the same.", ""]
    lines += ["| slots | cap | lengths | documents | slower | mean | at most | worst ratio | CPU s |"]
    lines += ["| --- " * 9 + "|"]
    for row in rows:
        if row["slower"]:
            (least, most), (ratio, without) = row["documents"], row["ratio"]
            lines += [
                f"| {row['slots']} | {row['cap']} | {row['lengths']} | {least}–{most} | {row['slower']} of "
                f"{row['batches']} | {row['mean']:.2%} | {row['most']:.2%} | {ratio:.3f}; without {without:.3f} | "
                f"{row['seconds'][0]:.3f}; without {row['seconds'][1]:.3f} |"
            ]
    return [*lines, ""]


def markdown(record: dict[str, Any]) -> str:
    """The record as a page."""
    lines = ["# A part of the dynamic planner: a handful of documents", ""]
    lines += [f"Machine: {machine_text(record['machine'])}. Command: `{record['command']}`. {record['note']}", ""]
    lines += ["## few_documents, distributions of planner.md", "", *few_table(record["distributions"])]
    lines += ["## few_documents, 2 to 32 documents of 1,000 to 60,000 rows", "", *few_table(record["handfuls"])]
    return "\n".join(lines).rstrip("\n") + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", type=Path, help="a .json file; the page goes next to it")
    flags = parser.parse_args()
    plan([5000, 300], 8, 1024)
    record = {
        "bench": "planner-parts",
        "machine": machine_facts(),
        "command": "python bench/plans/planner_parts.py",
        "note": f"{SEEDS} batches a row; lockstep.",
        "distributions": few_of_distributions(),
        "handfuls": few_of_handfuls(),
    }
    if flags.out:
        flags.out.write_text(json.dumps(record, indent=1) + "\n")
        flags.out.with_suffix(".md").write_text(markdown(record))


if __name__ == "__main__":
    main()
