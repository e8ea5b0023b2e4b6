"""A training step of layers of A.X K2's shape, whose rows choose 2,048 keys: latents gathered, bits, dense attention.

    torchrun --nproc_per_node 2 bench/training/indexed_step.py --out bench/records/indexed-step.json

Weights are random, in float32 with arithmetic in bfloat16, sharded by FSDP2; layers are recomputed; one document over
all ranks. Of 128 experts of a layer there are `--experts`. Dense attention is not the model: rows see all keys before.
"""

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench.begun import missing_row, open_record, peak_bytes, seconds_now, start_peak
from transformers import AXK2Config

from longspan import Layout, World, load_model, plan_fixed, prepare, run_step
from longspan.cli.machine import set_gpu_environment
from longspan.data.synthetic_documents import synthetic_documents
from longspan.model.kinds import find_indexers
from longspan.model.seams.chosen_keys import latents
from longspan.train import build_optimizer

WAYS = {"latents": 0.0, "bits": 1e9, "dense": 0.0}


def measure(model: Any, way: str, rows: int, steps: int, world: World) -> dict[str, Any]:
    """Median seconds of steps after one, the slowest rank's, and peak bytes."""
    k = 10**9 if way == "dense" else 2048
    for module in (model, *find_indexers(model).values()):
        vars(module.config if module is model else module)["index_topk"] = k
    optimizer = build_optimizer(model, lr=1e-6)
    plan = plan_fixed([rows], world.home, cp=world.home.slots)
    documents = synthetic_documents([rows], model.config.vocab_size)
    seconds = list[float]()
    loss = 0.0
    with patch.object(latents, "GATHERED_COST", WAYS[way]):
        for step in range(steps + 1):
            seconds_now()
            start_peak()
            world.control.gather_objects(None)  # all begin together
            started = seconds_now()
            loss = run_step(model, plan, documents, world, optimizer=optimizer).loss
            seconds += [seconds_now() - started] if step else []
    of_ranks = world.control.gather_objects((statistics.median(seconds), peak_bytes()))
    return {"loss": loss, "seconds": max(x[0] for x in of_ranks), "peak": max(x[1] for x in of_ranks)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=65536)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--out", type=Path)
    flags = parser.parse_args()
    if torch.cuda.is_available():
        set_gpu_environment()
    feeds = ["dense"] + ["sparse"] * (flags.layers - 1)
    sizes = {"hidden_size": flags.hidden, "n_routed_experts": flags.experts, "num_hidden_layers": flags.layers}
    config = AXK2Config(**sizes, mlp_layer_types=feeds)
    with World(Layout(ranks=int(os.environ.get("WORLD_SIZE", "1")))) as world:
        about = sizes | {"ranks": world.home.slots, "rows": flags.rows}
        record = open_record("indexed step", flags.out, world.backend, Path(__file__).parent, **about)
        options = {"activation_checkpointing": "full", "compute_dtype": torch.bfloat16}
        model = prepare(load_model(config=config, dtype="float32", sharded=True), world, **options)
        for way in WAYS:
            try:
                record[way] = measure(model, way, flags.rows, flags.steps, world)
            except torch.OutOfMemoryError as error:
                record[way] = missing_row(error)
            if world.rank == 0:
                print(way, record[way], flush=True)
                if flags.out is not None:
                    flags.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
