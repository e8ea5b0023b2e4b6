"""The longest step: all layers of a preset under a window, what layers keep chosen by the plan of memory, or by keys.

    python bench/training/longest.py --rows 524288 --dtype bfloat16 --out longest-1xH200.json            # one H200
    torchrun --nproc_per_node 2 bench/training/longest.py --rows 1048576 --out longest-2xH200.json        # two
    python bench/training/longest.py --preset qwen3-tiny --rows 256 --bytes 2000000000                    # on a CPU

One document of `--rows` tokens over all ranks, two steps at learning rate 0; the second one's seconds and peak are
written next to what was planned, and the bytes of a row that each layer but the last leaves on the device for backward,
which `--small 16` also has of 1/16 of the length. Further arguments are keys of a run, such as
--train.activation_checkpointing selective.
"""

import argparse
import gc
import itertools
import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from live_bytes import LiveBytes

from longspan import World
from longspan.cli.machine import machine_facts, set_gpu_environment
from longspan.config.dtypes import compute_dtype
from longspan.config.file import load_config
from longspan.config.sections import RunConfig
from longspan.data.synthetic_documents import synthetic_documents
from longspan.files import write_atomically
from longspan.model.layers import decoder_layers, vocabulary_size
from longspan.model.presets import preset_config
from longspan.plan import Cost
from longspan.resolve.planner_config import PlannerConfig, home_of, query_heads
from longspan.run.world_facts import gather_facts, resolve_on_ranks
from longspan.train.run_model.load import load_run_model
from longspan.train.run_model.prepare import prepare_run_model
from longspan.train.training import Training, build_run_optimizer
from longspan.versions import versions


def run_steps(config: RunConfig, configuration: Any, rows: int, chosen: Any, world: World) -> dict[str, Any]:
    """Take two steps of one document, of which layers keep what was `chosen`; the second step's seconds and peak.

    The bytes that were planned for the longest document stand beside its peak. Weights that stay gathered are not
    among the bytes of rows.
    """
    gpu = world.device.type == "cuda"
    heads = query_heads(configuration)
    loaded = load_run_model(config, configuration)
    model = prepare_run_model(config, world, loaded, memory=chosen)
    optimizer = build_run_optimizer(config, world, model, memory=chosen)
    training = Training(config, world, model, optimizer, Cost(), memory=chosen)
    plan = PlannerConfig.training(config, heads=heads).plan([rows], world.home)
    documents = synthetic_documents([rows], vocabulary_size(model) or 2)
    row = dict[str, Any](rows=rows)
    counted = LiveBytes()
    alive = note_alive(model, torch.cuda.memory_allocated if gpu else lambda: counted.now)
    for step in range(2):
        alive.clear()
        if gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        started = time.perf_counter()
        if gpu:
            row["loss"] = training.take_step(plan, documents, step).loss
            torch.cuda.synchronize()
        else:
            with counted:
                row["loss"] = training.take_step(plan, documents, step).loss
        row["seconds"] = time.perf_counter() - started
    local_rows = rows // world.home.slots
    stay = gpu and chosen is not None and not chosen.reshard_after_forward  # on CPUs what FSDP2 gathers is not counted
    row["weight_bytes"] = gathered_bytes(config, model, world) if stay else 0
    row["bytes_a_row"] = [
        round((after - before - row["weight_bytes"]) / local_rows) for before, after in itertools.pairwise(alive)
    ]
    row["peak"] = torch.cuda.max_memory_allocated() if gpu else counted.peak
    row["planned"] = chosen.to_json() if chosen is not None and chosen.rows == local_rows else None
    of_ranks = world.control.gather_objects(row)
    return max(of_ranks, key=lambda r: r["peak"]) | {"seconds": max(r["seconds"] for r in of_ranks)}


def gathered_bytes(config: RunConfig, model: torch.nn.Module, world: World) -> int:
    """Return the bytes of a layer's weights, which stay on the device from forward to backward if gathered once."""
    layer = next(iter(decoder_layers(model).values()))
    dtype = compute_dtype(config.model, world.device.type)
    return sum(weight.numel() for weight in layer.parameters()) * dtype.itemsize


def note_alive(model: torch.nn.Module, bytes_now: Callable[[], int]) -> list[int]:
    """Return a list to which each decoder layer adds the bytes in use before it runs forward, in a step's first pass.

    The list is to be cleared before a step. What layers run again for backward adds nothing.
    """
    alive, layers = list[int](), list(decoder_layers(model).values())

    def before(_: torch.nn.Module, __: object) -> None:
        if len(alive) < len(layers):
            alive.append(bytes_now())

    for layer in layers:
        layer.register_forward_pre_hook(before)
    return alive


def read_value(word: str) -> Any:
    try:
        return json.loads(word)
    except ValueError:
        return word


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="qwen3-8b")
    parser.add_argument("--rows", type=int, required=True, help="tokens of the document, over all ranks")
    parser.add_argument("--window", type=int, default=4096)
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--bytes", type=int, default=0, help="train.device_memory_limit: what a rank may fill")
    parser.add_argument("--small", type=int, default=0, help="run a document of 1/SMALL of the length first")
    parser.add_argument("--out", type=Path, default=None)
    flags, others = parser.parse_known_args()
    if set_gpu := torch.cuda.is_available():
        set_gpu_environment()
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    if len(others) % 2:
        parser.error(f"{' '.join(others)} are to be keys and values in turn, such as --train.mlp_tile_tokens 16384")
    if flags.rows < ranks * max(1, flags.small):
        parser.error(f"--rows {flags.rows} on {ranks} ranks; give at least {ranks * max(1, flags.small)}")
    keys: dict[str, Any] = {"model.preset": flags.preset, "model.dtype": flags.dtype, "optimizer.lr": 1e-5}
    keys |= {"train.device_memory_limit": flags.bytes, "data.max_document_tokens": 0, "context.max_tokens_per_slot": 0}
    keys |= {"optimizer.stochastic_rounding": flags.dtype == "bfloat16", "context.context_parallel_size": ranks}
    keys |= {"context.cp_comm_type": "a2a"} if set_gpu and ranks > 1 else {}
    keys |= {name.removeprefix("--"): read_value(word) for name, word in zip(others[::2], others[1::2], strict=True)}
    config = load_config(None, keys)
    config = replace(config, optimizer=replace(config.optimizer, lr=0.0))
    window = {"use_sliding_window": True, "sliding_window": flags.window, "max_window_layers": 0}
    configuration = preset_config(flags.preset, vocab_size=151936 if set_gpu else 512)
    for name, value in window.items():
        setattr(configuration, name, value)
    configuration.layer_types = ["sliding_attention"] * configuration.num_hidden_layers
    configuration.max_position_embeddings = max(flags.rows, configuration.max_position_embeddings)
    record: dict[str, Any] = {"bench": "longest", "command": vars(flags) | {"out": str(flags.out)}, "keys": keys}
    record |= {"machine": machine_facts(), "versions": versions(), "steps": []}
    with World(home_of(config.parallel, ranks)) as world:
        # The memory of a run whose steps have one document of so many tokens.
        facts = gather_facts(config, world, configuration, lambda step: [flags.rows], 1, longest=flags.rows)
        chosen = resolve_on_ranks(config, facts, world, print).memory
        for rows in ([flags.rows // flags.small] if flags.small else []) + [flags.rows]:
            row = run_steps(config, configuration, rows, chosen, world)
            gc.collect()
            record["steps"].append(row)
            if world.rank == 0:
                planned = "no plan"  # where layers keep everything
                if row["planned"] is not None:
                    total = row["planned"]["device"]["total"] / 2**30
                    planned = (
                        f"planned {total:.2f} GiB with the context; {row['planned']['mlp_tile_tokens']} rows a tile, "
                    )
                    planned += f"{row['planned']['segment_layers']} layers a segment"
                print(
                    f"{rows:,} rows: {row['seconds']:.2f} s, peak {row['peak'] / 2**30:.2f} GiB, {planned}",
                    f"bytes of a row that layers leave for backward: {row['bytes_a_row']}",
                    sep="\n",
                    flush=True,
                )
                if flags.out is not None:
                    write_atomically(flags.out, json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
