"""Steps while a checkpoint is written: how long training stands for a save, and whether steps next to it are slower.

python bench/training/saves.py --out bench/records/saves.json                                          # CPUs
torchrun --nproc-per-node 2 bench/training/saves.py --preset qwen3-8b --steps 60 --every 20 --out saves-2-gpus.json

Steps of one plan, a save every `--every` of them, first in the background and then while training waits. A step next to
a save is one that ran while files were written; after `--steps` of them more follow until the last save is written.
Without torchrun it starts `--world` processes.
"""

import argparse
import os
import shutil
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench.begun import open_record, seconds_now, write_page

from longspan import Layout, World, load_model, plan_fixed, prepare, run_step
from longspan.checkpoint import CheckpointSaver
from longspan.comm import run_local
from longspan.plain_text import markdown_table
from longspan.train import build_optimizer

WAYS = ("background", "waits")  # in a thread; or training waits


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="", help="a folder of Hugging Face's; none: random weights of --preset")
    parser.add_argument("--preset", default="qwen3-tiny", help="of random weights, without --model")
    parser.add_argument("--ways", nargs="+", default=WAYS, choices=WAYS)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--world", type=int, default=2)
    parser.add_argument("--steps", type=int, default=120)
    parser.add_argument("--every", type=int, default=50, help="steps between saves")
    parser.add_argument("--tokens", type=int, default=2048, help="of a step")
    parser.add_argument("--folder", type=Path, default=None, help="for the checkpoints, which are removed")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if "RANK" in os.environ:
        rank = int(os.environ["RANK"])
        ranks = int(os.environ["WORLD_SIZE"])
        results = [measure(rank, ranks, options)]
        if rank:
            return
    else:
        ranks = options.world
        results = run_local(measure, ranks, (ranks, options), timeout=None)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    record = open_record("saves", None, device, Path(__file__).parent)
    record |= {name: str(value) for name, value in vars(options).items() if name != "out"} | {"rows": results[0]}
    write_page(record, options.out, "Saves while training goes on", describe(results[0]))


def measure(rank: int, ranks: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    rows = list[dict[str, Any]]()
    with World(Layout(ranks)) as world:
        loaded = load_model(
            options.model or None,
            None if options.model else options.preset,
            dtype=options.dtype,
            seed=0,
            vocab_size=32768 if not options.model and options.preset.endswith("tiny") else None,
            sharded=True,
        )
        compute = torch.bfloat16 if world.device.type == "cuda" else None  # as a run computes
        model = prepare(loaded, world, compute_dtype=compute)
        optimizer = build_optimizer(model, lr=1e-4)
        lengths = [options.tokens // 8] * 8
        plan = plan_fixed(lengths, world.home, cp=1, max_tokens_per_slot=options.tokens // ranks)
        documents = [[(7 * i + j) % 250 for j in range(n)] for i, n in enumerate(lengths)]
        for way in options.ways:
            background = way == WAYS[0]
            folder = world.control.broadcast_object(tempfile.mkdtemp(dir=options.folder))
            saver = CheckpointSaver(folder, world, keep=1, background=background)
            seconds = list[float]()
            beside = list[bool]()
            figures = list[Any]()
            step = 0
            while step < options.steps or world.control.flag_on_any_rank(bool(saver.activity())):
                step += 1
                started = seconds_now()
                run_step(model, plan, documents, world, optimizer=optimizer, step=step)
                seconds.append(seconds_now() - started)
                figures += filter(None, [saver.take_figures()])
                beside.append(bool(saver.activity()))
                if step == 2:
                    saver.prepare(model, optimizer)
                if step % options.every == 0 and step <= options.steps:
                    saver.save(model, optimizer, step=step)
            saver.wait()
            figures += filter(None, [saver.take_figures()])
            saver.close()
            rows.append(row_of(background, seconds[3:], beside[3:], figures, options.every))
            world.control.barrier()
            shutil.rmtree(folder, ignore_errors=True)
    return rows


def row_of(
    background: bool, seconds: list[float], beside: list[bool], figures: list[Any], every: int
) -> dict[str, Any]:
    apart = [s for s, saving in zip(seconds, beside, strict=True) if not saving]
    next_to = [s for s, saving in zip(seconds, beside, strict=True) if saving]
    median = statistics.median(apart)
    shown = statistics.median(f.shown_seconds for f in figures)
    return {
        "way": "background" if background else "training waits",
        "median_step": median,
        "p90_over_median": sorted(apart)[int(0.9 * len(apart))] / median,
        "steps_next_to": len(next_to),
        "median_next_to": statistics.median(next_to) if next_to else None,
        "slowest_next_to": max(next_to, default=None),
        "over_a_tenth_next_to": sum(s > 1.1 * median for s in next_to),
        "shown_seconds": [f.shown_seconds for f in figures],
        "save_seconds": [f.seconds for f in figures],
        "save_bytes": figures[-1].bytes,
        "share_of_training": shown / (every * median),
    }


def describe(rows: list[dict[str, Any]]) -> str:
    head = ["saves", "step, s", "90th of 100 steps / median", "steps while files are written", "their median / median"]
    head += ["slowest / median", "of them over 1.1 times the median", "shown, s", "written in, s", "GB"]
    head += ["shown, share of the steps between saves"]
    lines = list[list[str]]()
    for row in rows:
        median = row["median_step"]
        ratios = [row[name] and row[name] / median for name in ("median_next_to", "slowest_next_to")]
        shown, seconds = (statistics.median(row[name]) for name in ("shown_seconds", "save_seconds"))
        lines.append(
            [
                row["way"],
                f"{median:.4f}",
                f"{row['p90_over_median']:.2f}",
                str(row["steps_next_to"]),
                *("" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
                str(row["over_a_tenth_next_to"]),
                f"{shown:.3f}",
                f"{seconds:.2f}",
                f"{row['save_bytes'] / 1e9:.3f}",
                f"{100 * row['share_of_training']:.2f} %",
            ]
        )
    return markdown_table(head, lines)


if __name__ == "__main__":
    main()
