"""How many communicators dynamic plans over 8 slots come to, and what they take of each rank.

    python bench/plans/communicators.py --out bench/records/communicators.json
    python bench/plans/communicators.py --backend nccl --ranks 8 --steps 40      # on GPUs: MiB instead of descriptors

Plans of different documents, one after the other, each prepared and used once, as a training run does. Counted at each
`max_groups`: the communicators that a rank is in, and what they hold: descriptors, threads and resident MiB of a
process over gloo, MiB of a GPU over NCCL.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from longspan import Layout, Plan, World, bind, plan_dynamic
from longspan.attention import attend
from longspan.bench.record import origin_text, write_record
from longspan.cli.machine import machine_facts
from longspan.comm import run_local
from longspan.plan.distributions import sample_lengths
from longspan.versions import versions


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--backend", default="gloo", choices=("gloo", "nccl"))
    flags.add_argument("--ranks", type=int, default=8)
    flags.add_argument("--steps", type=int, default=200)
    flags.add_argument("--max-groups", default="0,4,8")
    flags.add_argument("--out", type=Path)
    settings = flags.parse_args()
    rows = []
    for most in map(int, settings.max_groups.split(",")):
        args = (settings.ranks, settings.backend, settings.steps, most)
        rows.append({"max_groups": most, "by_rank": run_local(_measured, settings.ranks, args, timeout=3600)})
        print(_row(rows[-1]), flush=True)
    about = {"machine": machine_facts(), "versions": versions(), "command": " ".join(["python", *sys.argv])}
    options = {name: getattr(settings, name) for name in ("backend", "ranks", "steps")}
    record = {"bench": "communicators", **about, **options, "groups": _groups(settings), "rows": rows}
    if settings.out is not None:
        write_record(record, settings.out, _text(record))
    print(_text(record))


def _plans(ranks: int, steps: int) -> list[Plan]:
    """Dynamic plans of long-tailed lengths over all ranks, at most 512 rows a slot: documents of 16 to 4096 rows."""
    home = Layout(ranks=ranks)
    return [plan_dynamic(_lengths(ranks, step), home, max_tokens_per_slot=512, node_size=4) for step in range(steps)]


def _lengths(ranks: int, step: int) -> list[int]:
    lengths = np.asarray(sample_lengths("lognorm", 512 * 64 * ranks, seed=step))
    return np.clip(lengths // 64, 2, 512 * ranks).tolist()


def _groups(settings: argparse.Namespace) -> dict[str, Any]:
    """The groups of several slots in all plans: how many different ones, and how often the most frequent recur."""
    batches = [batch for plan in _plans(settings.ranks, settings.steps) for batch in plan.micro_batches]
    uses = Counter(tuple(sorted(g.slots)) for batch in batches for g in batch.groups if g.degree > 1)
    several = sum(len(batch.groups_of(slot)) > 1 for batch in batches for slot in range(settings.ranks))
    return {
        "different": len(uses),
        "used": sum(uses.values()),
        "most frequent": uses.most_common(1)[0][1] if uses else 0,
        "micro_batches": len(batches),
        "slots in several groups": several,
    }


def _measured(rank: int, ranks: int, backend: str, steps: int, most: int) -> dict[str, Any]:
    with World(Layout(ranks=ranks), backend=backend, max_groups=most) as world:
        before = _resources(world)
        for plan in _plans(ranks, steps):
            world.prepare(plan)
            for batch in plan.micro_batches[:1]:
                shard = bind(batch, world)
                q = torch.zeros((shard.local_rows, 2, 8), device=world.device, dtype=torch.float32)
                attend(q, q, q, shard, cp_comm_type="all_gather")
        after = _resources(world)
        kinds = Counter(record.kind for record in world.process_groups.made)
        seconds = sum(r.seconds for r in world.process_groups.made if r.kind == "communicator")
    return {"kinds": dict(kinds), "seconds": seconds, "before": before, "after": after}


def _resources(world: World) -> dict[str, float]:
    """What this process holds: descriptors and threads, resident MiB, and MiB in use on its GPU."""
    resources: dict[str, float] = {}
    if Path("/proc/self/fd").exists():
        status = Path("/proc/self/status").read_text(encoding="utf-8")
        words = {line.split(":")[0]: line.split()[1] for line in status.splitlines() if len(line.split()) > 1}
        resources |= {"descriptors": len(list(Path("/proc/self/fd").iterdir())), "threads": int(words["Threads"])}
        resources["resident MiB"] = round(int(words["VmRSS"]) / 1024, 1)
    if world.device.type == "cuda":
        torch.cuda.synchronize()
        free, total = torch.cuda.mem_get_info(world.device)
        resources["GPU MiB"] = round((total - free - torch.cuda.memory_reserved(world.device)) / 2**20, 1)
    return resources


def _row(row: dict[str, Any]) -> str:
    ranks = row["by_rank"]
    made = [r["kinds"].get("communicator", 0) for r in ranks]
    grown = {name: max(r["after"][name] - r["before"][name] for r in ranks) for name in ranks[0]["after"]}
    all_kinds = max(sum(r["kinds"].values()) for r in ranks)
    cells = (row["max_groups"], f"{min(made)} to {max(made)}", all_kinds, *(f"{g:+.0f}" for g in grown.values()))
    return f"| {' | '.join(map(str, cells))} |"


def _text(record: dict[str, Any]) -> str:
    groups, resources = record["groups"], record["rows"][0]["by_rank"][0]["after"]
    header = ["max_groups", "of their own, by rank", "in all, most of a rank", *resources]
    lines = [
        f"# Communicators of {record['steps']} dynamic plans over {record['ranks']} slots ({record['backend']})",
        "",
        origin_text(record),
        "",
        f"The plans have {groups['micro_batches']} micro-batches and use groups of several slots {groups['used']} "
        f"times, {groups['different']} different ones: so many communicators there would be with one for each. "
        f"{groups['slots in several groups']} times a slot is in several groups of a micro-batch.",
        "",
        f"| {' | '.join(header)} |",
        "| --- " * len(header) + "|",
        *(_row(row) for row in record["rows"]),
        "",
        "Descriptors, threads and MiB are what a rank holds after the last plan less what it held after opening the "
        "world, of the rank with the most. Groups without a communicator of their own talk point to point on the "
        "parent group of all slots, which every world has; besides it there are one for the host's integers and, in "
        "training, FSDP2's.",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
