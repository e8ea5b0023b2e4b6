"""Milliseconds of optimizers' updates alone: of a model's weights in float32, sharded over the ranks, without a pass.

    torchrun --nproc_per_node 2 bench/training/updates.py --out bench/records/updates.json   # a rank for each GPU
    python bench/training/updates.py --kinds adamw 8bit

Gradients are random. Each matrix's FLOPs under muon are those of its iteration with full products, of all ranks.
"""

import argparse
import os
import statistics
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench.begun import missing_row, open_record, peak_bytes, seconds_now, start_peak, write_page

from longspan import Layout, World, load_model, prepare
from longspan.bench.benches import change_layer_count
from longspan.cli.machine import set_gpu_environment
from longspan.model import preset_config
from longspan.model.weights.local_tensors import local_tensor
from longspan.plain_text import markdown_table
from longspan.train import build_optimizer
from longspan.train.optim.muon import is_layer_matrix

KINDS: dict[str, dict[str, Any]] = {
    "adamw": {},
    "8bit": {"moments": "8bit"},
    "muon": {"name": "muon"},
}
STEPS = 5  # of Newton-Schulz's iteration


def newton_schulz_flops(model: Any) -> float:
    """FLOPs of one update: in each step a product of short x short x short and two of short x short x long sides."""
    flops = 0.0
    for name, parameter in model.named_parameters():
        if is_layer_matrix(name, parameter):
            short, long = sorted(parameter.shape[-2:])
            matrices = parameter.numel() / (short * long)
            flops += STEPS * matrices * (4 * short**2 * long + 2 * short**3)
    return flops


def measure(model: Any, kind: str, steps: int, world: World) -> dict[str, Any]:
    """Median milliseconds of updates after two, the slowest rank's, and the most bytes during them."""
    optimizer = build_optimizer(model, lr=1e-6, **KINDS[kind])
    seconds = list[float]()
    for _ in range(steps + 2):
        start_peak()
        world.control.gather_objects(None)  # all begin together
        started = seconds_now()
        optimizer.step()
        seconds.append(seconds_now() - started)
    of_ranks = world.control.gather_objects((1e3 * statistics.median(seconds[2:]), peak_bytes()))
    return {"ms": max(x[0] for x in of_ranks), "peak": max(x[1] for x in of_ranks)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="qwen3-8b")
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--kinds", nargs="+", default=list(KINDS), choices=list(KINDS))
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--out", type=Path)
    flags = parser.parse_args()
    if torch.cuda.is_available():
        set_gpu_environment()
    config = change_layer_count(preset_config(flags.preset, vocab_size=10240), flags.layers)
    with World(Layout(ranks=int(os.environ.get("WORLD_SIZE", "1")))) as world:
        about = {"ranks": world.home.slots, "preset": flags.preset, "layers": flags.layers}
        record = open_record("updates", None, world.backend, Path(__file__).parent, **about)
        model = prepare(load_model(config=config, dtype="float32", sharded=True), world)
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
            local_tensor(parameter.grad).normal_(std=1e-3)
        record["tflop"] = newton_schulz_flops(model) / 1e12
        for kind in flags.kinds:
            try:
                record[kind] = measure(model, kind, flags.steps, world)
            except torch.OutOfMemoryError as error:
                record[kind] = missing_row(error)
        if world.rank == 0:
            cells = [
                [kind, f"{record[kind]['ms']:.1f}", f"{record[kind]['peak'] / 2**30:.1f}"]
                for kind in flags.kinds
                if "ms" in record[kind]
            ]
            text = markdown_table(["moments or class", "ms", "peak, GiB"], cells)
            text += f"\n\nmuon's iteration: {record['tflop']:.0f} TFLOP over {record['ranks']} ranks."
            write_page(record, flags.out, f"Updates of {flags.preset}, {flags.layers} layers", text)


if __name__ == "__main__":
    main()
