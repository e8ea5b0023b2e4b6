"""State-space layers over several GPUs: a gated delta net and a Mamba 2 layer, forward and backward, beside two others.

    python bench/mixers/mixers.py --ranks 4 --out bench/records/mixers.json

Layers of Qwen3-Next-80B and of Granite 4 hybrid (small), bfloat16, at full size, over one long document or eight
packed ones, contiguous rows. Ours: states pass. Beside it, as other systems do: every rank gathers the rows of all and
scans them all (`gather`); heads for rows and back (`heads`). Efficiency: the time of one GPU alone at its share of the
rows, over the time together. Errors: of the output and of the worst gradient, of a short document, from the same layer
in float64 on one rank. The record is written after each part; a second run goes on with what is missing.
"""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench.begun import open_record
from mixer_designs import Layer, baseline, errors, flags_of, layers, ours, scan_alone
from torch import Tensor

from longspan import Group, Layout, MicroBatch, World, bind, plan_fixed
from longspan.bench.record import origin_text, write_record
from longspan.comm import SequenceShard
from longspan.testing import run_ranks

SHARES = (96, 64, 32, 24, 19, 13, 6, 2)  # of 256, documents of a packed case
PASSES = 5
DESIGNS = ("ours", "alone", "heads", "gather", "scan", "scan alone")


def main() -> None:
    """Measure what the record lacks."""
    flags = flags_of(__doc__)
    flags.add_argument("--ranks", type=int, default=4)
    flags.add_argument("--rows", default="65536,131072", help="of all ranks together")
    options = flags.parse_args()
    record = run_ranks(measure, options.ranks, vars(options), timeout=options.timeout)[0]
    print(text_of(record))


def measure(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    """The record; the first rank writes it after every part."""
    out: Path | None = options["out"]
    record = open_record("mixers", out, options["backend"], Path(__file__).parent, ranks=options["ranks"])
    rows = record.setdefault("rows", [])
    with World(Layout(ranks=options["ranks"]), backend=options["backend"], timeout=options["timeout"]) as world:
        done = world.control.broadcast_object([(row["layer"], row["total"], row["case"]) for row in rows])
        for name, layer in layers(world.device, options["layers"], small=options["small"]).items():
            if (name, 0, "errors") not in done:
                found = errors(layer, world)
                rows.append({"layer": name, "total": 0, "case": "errors", "errors": found})
                _keep(record, out, rank)
            for total in map(int, options["rows"].split(",")):
                for case, lengths in (("one", (total,)), ("packed", tuple(total * s // 256 for s in SHARES))):
                    if (name, total, case) not in done:
                        rows.append({"layer": name, "total": total, "case": case, **times(layer, lengths, world)})
                        _keep(record, out, rank)
    return record


def times(layer: Layer, lengths: tuple[int, ...], world: World) -> dict[str, Any]:
    """Milliseconds of forward and of both passes, and GiB, of each design; the slowest rank's."""
    slots, total = world.home.slots, sum(lengths)
    everyone = tuple(range(slots))
    plan = plan_fixed(lengths, world.home, slots, partition="contiguous", max_tokens_per_slot=total // slots)
    world.prepare(plan)  # as a run does: the group has communicators of its own
    (batch,) = plan.micro_batches
    together = bind(batch, world)
    own = bind(MicroBatch(tuple(Group((s,), (s,), (total // slots,), partition="contiguous") for s in everyone)), world)
    all_rows = bind(_whole_on_each(lengths, slots), world)
    designs: dict[str, tuple[Callable[[Tensor], Tensor], SequenceShard]] = {
        "ours": (ours(layer, together), together),
        "alone": (ours(layer, own), own),
        "heads": (baseline(layer, together, all_rows, world, by_heads=True), together),
        "gather": (baseline(layer, together, all_rows, world, by_heads=False), together),
        "scan": (scan_alone(layer, together), together),
        "scan alone": (scan_alone(layer, own), own),
    }
    found: dict[str, Any] = {}
    for name, (run, shard) in designs.items():
        try:
            found[name] = _times(run, layer, shard.local_rows, world)
        except torch.OutOfMemoryError:
            found[name] = {"forward": None, "both": None, "gib": None}
        torch.cuda.empty_cache()
    if world.rank == 0:
        print(json.dumps({"layer": layer.name, "lengths": lengths, **found}), flush=True)
    return found


def _whole_on_each(lengths: tuple[int, ...], slots: int) -> MicroBatch:
    """The documents again for each slot, all of them whole."""
    count = len(lengths)
    ids = [tuple(range(s * count, (s + 1) * count)) for s in range(slots)]
    return MicroBatch(tuple(Group((s,), ids[s], lengths, partition="contiguous") for s in range(slots)))


def _times(run: Callable[[Tensor], Tensor], layer: Layer, rows: int, world: World) -> dict[str, float]:
    x = torch.randn(1, rows, layer.hidden, device=world.device, dtype=torch.bfloat16).requires_grad_()
    dout = torch.randn_like(run(x))
    for _ in range(2):
        run(x).backward(dout)
    if world.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    forward = _milliseconds(lambda: run(x), world)
    both = _milliseconds(lambda: run(x).backward(dout), world)
    peak = torch.cuda.max_memory_allocated() / 2**30 if world.device.type == "cuda" else 0.0
    slowest = world.control.largest_of([forward, both, peak], "times")
    return dict(zip(("forward", "both", "gib"), slowest, strict=True))


def _milliseconds(run: Callable[[], object], world: World) -> float:
    """The least of three means."""
    best = float("inf")
    for _ in range(3):
        world.control.barrier("start of a timed part")
        if world.device.type != "cuda":
            run()
            continue
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(PASSES):
            run()
        end.record()
        end.synchronize()
        best = min(best, start.elapsed_time(end) / PASSES)
    return best if best < float("inf") else 0.0


def _keep(record: dict[str, Any], out: Path | None, rank: int) -> None:
    if rank == 0 and out is not None:
        write_record(record, out, text_of(record))


def text_of(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    lines = ["# State-space layers over several GPUs", "", origin_text(record), ""]
    lines += [
        f"Milliseconds of forward and backward together (forward alone), and GiB, of the slowest of {record['ranks']} "
        "ranks. Efficiency: one GPU alone at its share of the rows, over ours. Scan: without the layer's rest.",
        "",
        "| layer | rows | documents | ours | one GPU, its share | efficiency | heads for rows | gathered rows "
        "| scan | its share |",
        "| --- " * 10 + "|",
    ]
    for row in record["rows"]:
        if row["case"] == "errors":
            continue
        cells = [_cell(row[design]) for design in DESIGNS]
        efficiency = f"{row['alone']['both'] / row['ours']['both']:.2f}" if row["ours"]["both"] else ""
        documents = 1 if row["case"] == "one" else len(SHARES)
        lines.append(
            f"| {row['layer']} | {row['total']:,} | {documents} | {cells[0]} | {cells[1]} | {efficiency} | "
            f"{' | '.join(cells[2:])} |"
        )
    lines += [
        "",
        "Errors beside float64: of the output, of the worst gradient; one rank alone in bfloat16 in brackets.",
        "",
    ]
    for row in record["rows"]:
        if row["case"] == "errors":
            (out, worst), (alone, alone_worst) = row["errors"]["ours"], row["errors"]["alone"]
            lines.append(f"- {row['layer']}: {out:.1e} ({alone:.1e}), {worst:.1e} ({alone_worst:.1e})")
    return "\n".join(lines) + "\n"


def _cell(found: dict[str, float | None]) -> str:
    if found["both"] is None:
        return "out of memory"
    return f"{found['both']:.2f} ({found['forward']:.2f}), {found['gib']:.1f}"


if __name__ == "__main__":
    main()
