"""Train a model at one context-parallel degree, and evaluate it at degrees 1 and 2 on the same ranks and weights.

Four GPUs are two slots of two tensor-parallel ranks. With random weights in the shape of Qwen3-4B:
`torchrun --nproc-per-node 4 examples/gpu/eval_live.py --record eval-live.json`
The same with a tiny model on four local CPU processes:
`python examples/gpu/eval_live.py --preset qwen3-tiny --layers 2 --tokens 64`

Three steps at degree 1, then the evaluation at degree 1, at 2, and at 1 again; then every step trains at another degree
than the one before, and evaluations at both follow it. Each evaluation holds every document once.
"""

import argparse
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from longspan import Layout, World, evaluate, load_model, plan_fixed, prepare, run_step
from longspan.model import preset_config
from longspan.testing import run_ranks

RANKS, TP = 4, 2
BOUND = {"cpu": 1e-5, "cuda": 5e-3}  # of the difference of losses: float32, bfloat16


def main(rank: int, options: argparse.Namespace) -> bool:
    with World(Layout(RANKS, tp=TP)) as world:
        rows = []
        for row in run(world, options):
            rows.append(row)
            if rank == 0:
                print(line_of(row), flush=True)
        largest = max(row["difference"] for row in rows if "difference" in row)
        if rank == 0:
            print(f"evaluations of the same weights differ by at most {largest:.1e}")
            if options.record:
                Path(options.record).write_text(json.dumps({"options": vars(options), "rows": rows}, indent=1))
        return largest <= BOUND[world.device.type]


def run(world: World, options: argparse.Namespace) -> Iterator[dict]:
    config = preset_config(options.preset, vocab_size=options.vocabulary)
    config.num_hidden_layers = options.layers or config.num_hidden_layers
    config.layer_types = config.layer_types[: config.num_hidden_layers]
    compute = torch.bfloat16 if world.device.type == "cuda" else None
    model = prepare(load_model(config=config, sharded=True), world, sequence_parallel=True, compute_dtype=compute)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    random = np.random.default_rng(0)
    batch, held_out = (
        [random.integers(0, config.vocab_size, options.tokens) for _ in range(options.documents)] for _ in range(2)
    )
    lengths = [options.tokens] * options.documents
    plans = {cp: plan_fixed(lengths, world.home, cp, row_multiple=TP, cp_comm_type="auto") for cp in (1, 2)}

    def train(step: int, cp: int) -> dict:
        world.prepare(plans[cp])
        result = run_step(model, plans[cp], batch, world, optimizer=optimizer, step=step)
        return {"step": step, "what": "training", "cp": cp, "loss": result.loss, "seconds": result.seconds}

    def evaluation(step: int, cp: int, first: dict | None = None) -> dict:
        result = evaluate(model, held_out, plans[cp], world)
        row = {"step": step, "what": "evaluation", "cp": cp, "loss": result.loss, "seconds": result.seconds}
        difference = {} if first is None else {"difference": abs(result.loss - first["loss"])}
        return row | {"activation_bytes": result.activation_bytes} | difference

    for step in (1, 2, 3):
        yield train(step, cp=1)
    yield (first := evaluation(3, cp=1))
    yield evaluation(3, cp=2, first=first)
    yield evaluation(3, cp=1, first=first)
    for step in (4, 5, 6):
        yield train(step, cp=2 if step % 2 == 0 else 1)
        yield (first := evaluation(step, cp=1))
        yield evaluation(step, cp=2, first=first)


def line_of(row: dict) -> str:
    text = (
        f"step {row['step']}  {row['what']:<10} at degree {row['cp']}  loss {row['loss']:.7f}  {row['seconds']:7.3f} s"
    )
    if row.get("activation_bytes"):
        text += f"  activations {row['activation_bytes'] / 2**20:,.0f} MiB"
    return text + (f"  difference {row['difference']:.1e}" if "difference" in row else "")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="qwen3-4b")
    parser.add_argument("--layers", type=int, default=0, help="number of layers; 0: as the preset has")
    parser.add_argument("--tokens", type=int, default=8192, help="of each document")
    parser.add_argument("--documents", type=int, default=4, help="of a training step, and of the evaluation")
    parser.add_argument("--vocabulary", type=int, default=512, help="of a tiny preset")
    parser.add_argument("--record", default="", help="JSON file for the rows")
    options = parser.parse_args()
    good = main(int(os.environ["RANK"]), options) if "RANK" in os.environ else all(run_ranks(main, RANKS, options))
    sys.exit(0 if good else "losses at degrees 1 and 2 differ by more than rounding explains")
