"""Whole steps of a vision-language model: images dealt out to all ranks, beside an encoder replicated on every rank.

    python bench/vision/vision_step.py --ranks 4 --out bench/records/vision-step-4xH200.json
    python bench/vision/vision_step.py --ranks 4 --small            # on a CPU, in a minute: the path, and equal losses

Qwen3-VL-8B's widths and whole tower with fewer decoder layers, random weights in bfloat16 (float64 with --small), and
documents of 4, 16, 64, and 4 to 64 images, packed to 64K rows a micro-batch on four ranks. Each case under a fixed
and a dynamic plan, with the images *planned* (by their cost, over all ranks, rows to their owners) or *replicated*
(every rank encodes all images of its group's documents, as plain context parallelism does). The tower is copied to
every rank (--shard-encoder: FSDP2, whose waiting hides the balance), its blocks recomputed in backward. Parameters
never change, so that all variants have one loss and one gradient norm, which are compared. The record is written after
each part; a second run goes on with what is missing.
"""

import argparse
import statistics
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench.begun import open_record
from torch.optim import Optimizer
from vision_cases import CASES, Made, Sizes, VisionDocuments
from vision_record import text_of
from vision_replicated import replicated

from longspan import EncoderHome, Layout, MultimodalModel, Plan, World, load_model, plan_dynamic, plan_fixed, prepare
from longspan.bench.record import write_record
from longspan.bench.timing import time_run
from longspan.doctor.stock import whole_float64
from longspan.plan import Cost, Machine, PlanOptions
from longspan.plan.planners.fixed import smallest_degree
from longspan.testing import run_ranks
from longspan.train import build_optimizer, run_step
from longspan.train.step import StepResult

PLANS = ("fixed", "dynamic")
WAYS = ("planned", "replicated")
FAR = {True: 1e-10, False: 2e-2}  # how far losses of variants may be apart, relative: small (float64) or not


def main() -> None:
    """Measure what the record lacks."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--ranks", type=int, default=4)
    flags.add_argument("--backend", default="", help="nccl, or gloo where there is no GPU")
    flags.add_argument("--layers", type=int, default=8, help="decoder layers of the language model")
    flags.add_argument("--depth", type=int, default=27, help="layers of the tower")
    flags.add_argument(
        "--cases", default="", help=f"images of a document, of {', '.join(CASES)}; all, with --small two"
    )
    flags.add_argument("--repeats", type=int, default=3)
    flags.add_argument("--shard-encoder", action="store_true", help="shard the tower too (FSDP2)")
    flags.add_argument("--small", action="store_true", help="tiny, in float64: the path, and equal losses")
    flags.add_argument("--timeout", type=float, default=570.0, help="seconds, after which another run goes on")
    flags.add_argument("--out", type=Path)
    options = vars(flags.parse_args())
    options["cases"] = options["cases"] or ("4,4 to 64" if options["small"] else ",".join(CASES))
    options["backend"] = options["backend"] or ("nccl" if torch.cuda.is_available() else "gloo")
    record = run_ranks(measure, options["ranks"], options, timeout=options["timeout"])[0]
    print(text_of(record))
    if far := [row["documents"] for row in record["rows"] if row["difference"] > FAR[options["small"]]]:
        raise SystemExit(f"losses of variants differ: documents with {', '.join(dict.fromkeys(far))} images")


def measure(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    """The record; the first rank writes it after every part."""
    sizes = Sizes.tiny() if options["small"] else Sizes(layers=options["layers"], depth=options["depth"])
    out: Path | None = options["out"]
    about = {name: options[name] for name in ("ranks", "small", "shard_encoder", "repeats")}
    about |= {name: getattr(sizes, name) for name in ("layers", "depth", "rows_of_slot")}
    record = open_record("vision step", out, options["backend"], Path(__file__).parent, **about)
    rows: list[dict[str, Any]] = record.setdefault("rows", [])
    home, exact = Layout(options["ranks"]), whole_float64() if options["small"] else nullcontext()
    with exact, World(home, backend=options["backend"], timeout=options["timeout"]) as world:
        done = world.control.broadcast_object([_key(row) for row in rows])
        model, optimizer = _model(sizes, world, shard=options["shard_encoder"])
        for key in _keys(options["cases"].split(",")):
            if key not in done:
                row = _measured(key, sizes, model, optimizer, world, options["repeats"])
                rows.append(row | _difference(rows, row))
                if rank == 0 and out is not None:
                    write_record(record, out, text_of(record))
    return record


def _keys(cases: list[str]) -> Iterator[tuple[str, str, str]]:
    yield from ((case, plan, way) for case in cases for plan in PLANS for way in WAYS)


def _key(row: dict[str, Any]) -> tuple[str, str, str]:
    return row["documents"], row["plan"], row["encoder"]


def _difference(rows: list[dict[str, Any]], row: dict[str, Any]) -> dict[str, float]:
    """How far loss and gradient norm are from those of the first variant of the same documents, relative."""
    first = next((other for other in rows if other["documents"] == row["documents"]), row)
    return {"difference": max(abs(row[name] - first[name]) / first[name] for name in ("loss", "grad_norm"))}


def _model(sizes: Sizes, world: World, *, shard: bool) -> tuple[MultimodalModel, Optimizer]:
    """The prepared model, and an optimizer that takes whole steps of length 0."""
    home = EncoderHome(
        home=world.home,
        max_rows_per_slot=sizes.max_image_rows,
        activation_checkpointing=True,
        shard_parameters=shard,
    )
    dtype = "float64" if sizes.small else "bfloat16"
    loaded = load_model(config=sizes.configuration(), dtype=dtype, images=True, sharded=True)
    model = prepare(loaded, world, encoder=home)
    return model, build_optimizer(model, lr=0.0)


def _measured(
    key: tuple[str, str, str], sizes: Sizes, model: MultimodalModel, optimizer: Optimizer, world: World, repeats: int
) -> dict[str, Any]:
    """One variant: whole steps, after some that are not timed."""
    case, kind, way = key
    row: dict[str, Any] = {"documents": case, "plan": kind, "encoder": way}
    drawn = VisionDocuments.drawn(case, sizes, world.home.slots)
    dtype = torch.float64 if sizes.small else torch.bfloat16
    documents = drawn.as_items(sizes, world.device, dtype)
    plan, results = _plan(kind, documents, sizes, world), list[StepResult]()

    def step() -> None:
        results.append(run_step(model, plan, documents, world, optimizer=optimizer))

    with replicated() if way == "replicated" else nullcontext():
        for _ in range(1 if sizes.small else 2):
            step()
        if world.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
        seconds = [time_run(step, world) for _ in range(repeats)]
    peak = torch.cuda.max_memory_allocated() / 2**30 if world.device.type == "cuda" else 0.0
    slowest, most = world.control.largest_of([statistics.median(seconds), peak], "times")
    about = {"images": len(drawn.rows), "image_rows": sum(drawn.rows), "tokens": plan.tokens}
    return row | about | _figures(plan, results, repeats) | {"seconds": slowest, "gib": most}


def _figures(plan: Plan, results: list[StepResult], repeats: int) -> dict[str, Any]:
    """What the steps say of themselves: of the timed ones, the median."""
    encoders = [result.encoders for result in results[-repeats:] if result.encoders is not None]
    names = ("seconds", "tower_seconds", "balance", "predicted_seconds", "predicted_balance")
    figures = {f"encoder_{n}": statistics.median(getattr(each, n) for each in encoders) for n in names}
    return figures | {
        "loss": results[0].loss,
        "grad_norm": results[0].grad_norm,
        "predicted_seconds": plan.predicted_seconds + figures["encoder_predicted_seconds"],
        "micro_batches": len(plan.micro_batches),
        "widest": max(group.degree for batch in plan.micro_batches for group in batch.groups),
    }


def _plan(kind: str, documents: Made, sizes: Sizes, world: World) -> Plan:
    config = sizes.configuration()
    cost: Cost = Machine.known("H200").cost(config) if world.device.type == "cuda" else Machine.cpus().cost(config)
    options = PlanOptions(max_tokens_per_slot=sizes.rows_of_slot, cost=cost, targets=documents.targets)
    if kind == "dynamic":
        return plan_dynamic(documents.lengths, world.home, options=options)
    degree = smallest_degree(documents.lengths, world.home, options)
    return plan_fixed(documents.lengths, world.home, degree, options=options)


if __name__ == "__main__":
    main()
