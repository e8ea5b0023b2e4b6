"""How good and how fast planners are: five distributions of lengths, many slots, two caps. Needs no GPU.

    python bench/plans/planner.py --out bench/records/planner.json             # everything: several minutes
    python bench/plans/planner.py --slots 64,256 --names lognorm,uniform       # a part
    python bench/plans/planner.py --sweep all --slots 32,256 --caps 8192 --out bench/records/planner-sweep.json
                                       # values around a constant of lockstep.py or free.py (its NAME), beside its own

Every plan is priced by the same cost model (`Cost()`), and every time is divided by the same lower bound, area and
longest document. Plans of one degree have the fastest of three degrees and of all communication types; the others are
rings. Planning times are CPU seconds of this process on one core (`time.process_time`), so that other load
on the machine counts as little as it can; the first plan of the process is not counted.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from longspan import Layout, plan_dynamic, plan_fixed
from longspan.cli.machine import machine_facts, machine_text
from longspan.plain_text import markdown_table
from longspan.plan import Cost, PlanOptions, lower_bound_seconds
from longspan.plan.distributions import sample_lengths
from longspan.plan.dynamic import free, lockstep
from longspan.resolve.evaluation import options_by_comm_type, plan_type_text

NAMES = ("lognorm", "bimodal", "uniform", "files", "expo")
LONGEST = 131072
TOKENS_PER_SLOT = 32768
COST = Cost()
HEADS = 32  # query heads of Qwen3-8B, which the cost is of


def lengths_of(name: str, slots: int, cap: int, seed: int, per_slot: int) -> NDArray[np.int64]:
    """Lengths that hold `per_slot` tokens a slot together, at most 128K each and at most what all slots hold."""
    longest = min(LONGEST, slots * cap)
    tokens = slots * per_slot
    return sample_lengths(name, tokens, seed=seed, longest=longest)


def padded_seconds(lengths: NDArray[np.int64], slots: int, cp: int) -> float:
    """One document a row, padded to the longest, cp slots each."""
    longest = int(lengths.max())
    seconds = float(COST.group_seconds(longest, longest**2, cp, cp <= 8)) + COST.micro_batch_seconds
    return seconds * math.ceil(len(lengths) / (slots // cp))


def static_plan(lengths: list[int], slots: int, cap: int) -> tuple[float, int, str]:
    """The fastest of packed plans of one degree, under all communication types: seconds, degree and type."""
    least = min(slots, max(1, LONGEST // cap))
    options = PlanOptions(cp_comm_type="auto", heads=HEADS, cost=COST, max_tokens_per_slot=cap)
    home = Layout(slots)
    plans = (
        plan_fixed(lengths, home, cp, options=typed)
        for cp in (least, 2 * least, 4 * least)
        if slots % cp == 0
        for typed in options_by_comm_type(options, home, cp)
    )
    best = min(plans, key=lambda plan: plan.predicted_seconds)
    return best.predicted_seconds, best.micro_batches[0].groups[0].degree, plan_type_text(best)


def measured(lengths: list[int], slots: int, cap: int, **arguments: Any) -> tuple[dict[str, float], Any]:
    begun = time.process_time()
    plan = plan_dynamic(lengths, Layout(slots), max_tokens_per_slot=cap, **arguments)
    seconds = time.process_time() - begun
    return {"ratio": plan.ratio, "seconds": seconds, "micro_batches": len(plan.micro_batches)}, plan


def row(name: str, slots: int, cap: int, seed: int, per_slot: int) -> dict[str, Any]:
    rows = lengths_of(name, slots, cap, seed, per_slot)
    lengths = rows.tolist()
    cp = min(slots, max(1, LONGEST // cap))
    bound = lower_bound_seconds(lengths, slots, cap, COST).seconds
    figures: dict[str, Any] = {"lengths": name, "slots": slots, "cap": cap, "documents": len(lengths), "bound": bound}
    figures["padded"] = padded_seconds(rows, slots, cp) / bound
    seconds, static_cp, kind = static_plan(lengths, slots, cap)
    figures["static"] = {"cp": static_cp, "type": kind, "ratio": seconds / bound}
    figures["lockstep"], _ = measured(lengths, slots, cap)
    figures["fast"], _ = measured(lengths, slots, cap, effort="fast")
    figures["free"], _ = measured(lengths, slots, cap, mode="free")
    return figures


# What `--sweep` tries of each constant of a planner; a plan's mode is its module's.
SWEEPS: dict[str, tuple[Any, tuple[Any, ...]]] = {
    "GOALS": (free, ((1.003,), (1.01,), (1.003, 1.01, 1.02), (1.01, 1.03, 1.06))),
    "FILLED": (free, (0.6, 0.8, 0.9, 1.0)),
    "LARGE": (free, (0.01, 0.03, 0.1)),
    "MOST_QUEUES": (free, (4, 8, 16, 32)),
    "WORTH_TRYING": (free, (1.1, 1.5, 2.5)),
    "STEEPNESS": (lockstep, ((0.0, 0.2, 0.4, 0.6), (0.0, 0.4, 0.7, 1.0), (0.3, 0.6, 0.8, 1.0))),
    "SLACK": (lockstep, ((1.001, 1.01), (1.005, 1.03), (1.02, 1.08))),
    "CLASSES": (lockstep, (48, 192, 768)),
    "LITTLE_MORE": (lockstep, (1.0, 1.03, 1.1)),
    "GAP_LOST": (lockstep, (0.0, 0.15, 0.3, 0.6)),
    "SHOWN_LATENCY": (lockstep, (0.0, 0.5, 1.0)),
    "SHORT_FROM": (lockstep, ((1, 2), (3, 4), (9, 10))),
    "AS_THEY_CAME": (lockstep, ((0.95, 0.05), (0.985, 0.02), (1.0, 0.02))),
    "ONE_DURATION": (lockstep, ((0.95, 0.1), (0.9, 0.2), (0.7, 0.6))),
    "MOVED_SHARE": (lockstep, ((-0.02, 0.04), (-0.05, 0.1), (-0.2, 0.4))),
    "ALL_DURATIONS": (lockstep, ((0.99, 0.02), (0.98, 0.04), (0.9, 0.2))),
}


def sweep(name: str, batches: list[tuple[list[int], int, int]]) -> list[dict[str, Any]]:
    """The mean and the worst step over its bound, and the seconds of planning, with each value of a constant."""
    module, values = SWEEPS[name]
    usual = getattr(module, name)
    mode = module.__name__.rsplit(".", 1)[1]
    rows: list[dict[str, Any]] = []
    for value in values:
        setattr(module, name, value)
        figures = [measured(lengths, slots, cap, mode=mode)[0] for lengths, slots, cap in batches]
        setattr(module, name, usual)
        ratios = [figure["ratio"] for figure in figures]
        seconds = sum(figure["seconds"] for figure in figures)
        rows.append({"name": f"{mode}.{name}", "value": value, "is_used": value == usual, "seconds": seconds})
        rows[-1] |= {"mean": float(np.mean(ratios)), "worst": max(ratios)}
        print(*_sweep_cells(rows[-1]), flush=True)
    return rows


def _sweep_cells(r: dict[str, Any]) -> list[str]:
    value = f"**{r['value']}**" if r["is_used"] else f"{r['value']}"
    return [r["name"], value, f"{r['mean']:.4f}", f"{r['worst']:.3f}", f"{r['seconds']:.1f}"]


def run_sweeps(flags: argparse.Namespace) -> None:
    sizes = [(cap, slots) for cap in map(int, flags.caps.split(",")) for slots in map(int, flags.slots.split(","))]
    batches = [
        (lengths_of(name, slots, cap, flags.seed, flags.tokens_per_slot).tolist(), slots, cap)
        for cap, slots in sizes
        for name in flags.names.split(",")
    ]
    names = list(SWEEPS) if flags.sweep == "all" else flags.sweep.split(",")
    record = {
        "bench": "planner sweep",
        "machine": machine_facts(),
        "command": f"python bench/plans/planner.py --sweep {flags.sweep} --slots {flags.slots} --caps {flags.caps} "
        f"--names {flags.names} --tokens-per-slot {flags.tokens_per_slot}",
        "note": f"{len(batches)} batches as in planner.md; a value in bold is the planner's. One constant changes at a "
        "time. Plans of lockstep are compared with those of one degree, as always.",
        "rows": [row for name in names for row in sweep(name, batches)],
    }
    if flags.out:
        head = ("constant", "value", "mean", "worst", "seconds")
        page = markdown_table(head, [_sweep_cells(row) for row in record["rows"]])
        title = "Constants of planners: step time over the lower bound, and CPU seconds to plan"
        origin = f"Machine: {machine_text(record['machine'])}. Command: `{record['command']}`."
        flags.out.with_suffix(".md").write_text(f"# {title}\n\n{origin}\n\n{record['note']}\n\n{page}\n")


def markdown(record: dict[str, Any]) -> str:
    origin = (
        f"Machine: {machine_text(record['machine'])}. Versions: {record['versions']}. Command: `{record['command']}`."
    )
    parts = ["# Planners: step time over the lower bound, and CPU seconds to plan", origin, record["note"]]
    head = ["slots", "lengths", "padded", "one degree, packed", "lockstep (s)", "fast (s)", "free (s)"]
    for cap in sorted({r["cap"] for r in record["rows"]}):
        rows = [_cells(r) for r in record["rows"] if r["cap"] == cap]
        parts.append(f"## At most {cap} tokens a slot")
        parts.append(markdown_table(head, rows))
    return "\n\n".join(parts) + "\n"


def _cells(r: dict[str, Any]) -> list[str]:
    static = f"{r['static']['ratio']:.3f} (cp {r['static']['cp']}, {r['static']['type']})"
    timed = (f"{r[key]['ratio']:.3f} ({r[key]['seconds']:.2f})" for key in ("lockstep", "fast", "free"))
    return [f"{r['slots']}", r["lengths"], f"{r['padded']:.1f}", static, *timed]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--slots", default="8,32,64,256,1024,8192")
    parser.add_argument("--caps", default="8192,16384")
    parser.add_argument("--names", default=",".join(NAMES))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tokens-per-slot", type=int, default=TOKENS_PER_SLOT)
    parser.add_argument("--sweep", help=f"constants to try other values of: all, or of {', '.join(SWEEPS)}")
    parser.add_argument("--out", type=Path, help="a .json file; the table goes beside it")
    flags = parser.parse_args()
    if flags.sweep:
        run_sweeps(flags)
        return
    plan_dynamic([5000, 300], Layout(8), max_tokens_per_slot=1024)
    rows: list[dict[str, Any]] = []
    for cap in map(int, flags.caps.split(",")):
        for slots in map(int, flags.slots.split(",")):
            for name in flags.names.split(","):
                rows.append(row(name, slots, cap, flags.seed, flags.tokens_per_slot))
                print(*_cells(rows[-1]), flush=True)
    record = {
        "bench": "planner",
        "machine": machine_facts(),
        "versions": f"python {'.'.join(map(str, __import__('sys').version_info[:3]))}, numpy {np.__version__}",
        "command": "python bench/plans/planner.py",
        "note": (
            f"Batches of {flags.tokens_per_slot} tokens a slot, longest {LONGEST}, seed {flags.seed}; `files` are "
            "those of this Python's library. The bound is area and longest document. Plans of one degree (plan_fixed) "
            "have the fastest of three degrees and of all communication types, of a model with "
            f"{HEADS} query heads; the others "
            "are rings. In brackets, CPU seconds of one core; other jobs may have shared the caches."
        ),
        "rows": rows,
    }
    if flags.out:
        flags.out.write_text(json.dumps(record, indent=1) + "\n")
        flags.out.with_suffix(".md").write_text(markdown(record))


if __name__ == "__main__":
    main()
