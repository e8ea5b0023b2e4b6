"""What steps take of a GPU's memory: peaks of some models and settings, with what weights, gradients and states take.

python bench/training/memory_measured.py --out bench/records/memory-measured-H200.json
bench/two_nodes.sh --same-gpus python bench/training/memory_measured.py --cases sharded --out memory-2-ranks.json

Each case takes two steps of one document, at learning rate 0, in a world of its own; the second is measured. Cases that
are in the file are left out, so that a run that was ended goes on. `memory_peaks.py` compares them with what the plan
of memory says.
"""

import argparse
import gc
import json
import os
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch.utils._pytree import tree_leaves

from longspan import World
from longspan.bench.layers import change_layer_count
from longspan.cli.machine import machine_facts, set_gpu_environment
from longspan.config.file import load_config
from longspan.data.document import synthetic_documents
from longspan.files import write_atomically
from longspan.model.prepared import vocabulary_size
from longspan.model.weights.local_tensors import local_tensor
from longspan.plan import Cost
from longspan.train.long_documents import scale_positions
from longspan.train.plans import PlanChoice, home_of, query_heads
from longspan.train.training import Training, load_run_model, make_optimizer, model_configuration, prepare_run_model
from longspan.versions import versions

LONGEST = 32768  # tokens without scaled positions
HYBRID = "examples/gpu/qwen3-next-8-layers"


@dataclass(frozen=True)
class Case:
    """One model, its settings, and the lengths of a step's documents; `layers` of the model (0: all)."""

    name: str
    keys: dict[str, Any]
    lengths: tuple[int, ...]
    layers: int = 0
    cap: int = 0  # rows of a slot in a micro-batch; 0: any
    sharded: bool = False  # for two ranks


def _cases() -> list[Case]:
    dense, experts = {"model.preset": "qwen3-8b"}, {"model.preset": "qwen3-30b-a3b"}
    hybrid = {"model.config": HYBRID, "model.dtype": "bfloat16", "context.partition": "contiguous"}
    lora = {**dense, "model.dtype": "bfloat16", "lora.rank": 16}
    small = {"model.preset": "qwen3-4b"}
    recompute = "train.activation_checkpointing"
    cases = [
        Case("dense, none", {**dense, recompute: "none"}, (16384,), layers=12),
        Case("dense, selective", {**dense, recompute: "selective"}, (16384,), layers=12),
        Case("dense, selective, long", {**dense, recompute: "selective"}, (131072,), layers=12),
        Case("dense, full", {**dense, recompute: "full"}, (65536,), layers=12),
        Case("dense, offloaded", {**dense, recompute: "full", "train.offload_activations": True}, (65536,), layers=12),
        Case("dense, two micro-batches", {**dense, recompute: "none"}, (8192, 8192), layers=12, cap=8192),
        Case("adapters, none", {**lora, recompute: "none"}, (8192,)),
        Case("adapters, selective", {**lora, recompute: "selective"}, (32768,)),
        Case("experts, none", {**experts, recompute: "none"}, (8192,), layers=6),
        Case("experts, selective", {**experts, recompute: "selective"}, (32768,), layers=6),
        Case("experts, full", {**experts, recompute: "full"}, (32768,), layers=6),
        Case("hybrid, none", {**hybrid, recompute: "none"}, (16384,)),
        Case("hybrid, selective", {**hybrid, recompute: "selective"}, (16384,)),
        Case("hybrid, full", {**hybrid, recompute: "full"}, (32768,)),
    ]
    for kind in ("a2a", "p2p", "all_gather"):
        keys = {**small, recompute: "selective", "context.cp_comm_type": kind}
        cases.append(Case(f"two ranks, {kind}", keys, (65536,), layers=12, sharded=True))
    keys = {**small, recompute: "none", "context.cp_comm_type": "a2a"}
    cases.append(Case("two ranks, none", keys, (16384,), layers=12, sharded=True))
    keys = {**keys, "parallel.reshard_after_forward": False}
    cases.append(Case("two ranks, gathered once", keys, (16384,), layers=12, sharded=True))
    return cases


def measure(case: Case) -> dict[str, Any]:
    """The bytes of a case on the rank that takes most."""
    config = load_config(
        None,
        {
            **case.keys,
            "train.lr": 1e-4,
            "data.max_document_tokens": max(case.lengths),
            "model.rope_scaling": "yarn" if max(case.lengths) > LONGEST else "",
            "context.max_tokens_per_slot": case.cap,
        },
    )
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    config = replace(config, context=replace(config.context, context_parallel_size=ranks))
    with World(home_of(config.parallel, ranks)) as world:
        return _measure_in(case, config, world)


def _measure_in(case: Case, config: Any, world: World) -> dict[str, Any]:
    device, started = world.device, time.perf_counter()
    configuration = model_configuration(config, config.data.vocab_size)
    configuration = change_layer_count(configuration, case.layers) if case.layers else configuration
    configuration = scale_positions(configuration, config.model, max(case.lengths), "of the bench", print)
    row: dict[str, Any] = {"context": _driver_bytes(device) - torch.cuda.memory_reserved(device)}
    model = prepare_run_model(config, world, load_run_model(config, config.data.vocab_size, configuration))
    gc.collect()
    row["weights"] = torch.cuda.memory_allocated(device)
    training = Training(config, world, model, make_optimizer(config, world, model), Cost())
    plan = PlanChoice.training(config, heads=query_heads(configuration)).plan(case.lengths, world.home)
    documents = synthetic_documents(case.lengths, vocabulary_size(model) or 2)
    seconds = 0.0
    for step in range(2):
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        begun = time.perf_counter()
        training.take_step(plan, documents, step)
        torch.cuda.synchronize(device)
        seconds = time.perf_counter() - begun
    states = [x for state in training.optimizer.state.values() for x in tree_leaves(state)]
    row |= {
        "states": sum(local_tensor(x).nbytes for x in states if isinstance(x, torch.Tensor)),
        "between_steps": torch.cuda.memory_allocated(device),
        "peak": torch.cuda.max_memory_allocated(device),
        "reserved": torch.cuda.max_memory_reserved(device),
        "driver": _driver_bytes(device),
        "seconds": seconds,
        "host": _host_bytes(),
    }
    rows = world.control.gather_objects(row)
    most = max(rows, key=lambda r: r["peak"])
    return most | {"whole_seconds": time.perf_counter() - started, "ranks": len(rows)}


def _driver_bytes(device: torch.device) -> int:
    free, total = torch.cuda.mem_get_info(device)
    return total - free


def _host_bytes() -> int:
    text = Path("/proc/self/status").read_text()
    return 1024 * int(next(line.split()[1] for line in text.splitlines() if line.startswith("VmRSS")))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="file of the record, which is continued")
    parser.add_argument("--cases", default="", help="those whose name has these words; sharded: those of two ranks")
    parser.add_argument("--seconds", type=float, default=1e9, help="begin no case after so many seconds")
    flags = parser.parse_args()
    set_gpu_environment()
    sharded = flags.cases == "sharded"
    words = "" if sharded else flags.cases
    cases = [case for case in _cases() if case.sharded is sharded and words in case.name]
    record = json.loads(flags.out.read_text()) if flags.out.exists() else {"bench": "memory", "cases": {}}
    record |= {"machine": machine_facts(), "versions": versions()}
    began, first = time.perf_counter(), int(os.environ.get("RANK", "0")) == 0
    for case in cases:
        if case.name in record["cases"]:
            continue
        if time.perf_counter() - began > flags.seconds:
            break
        try:
            row = measure(case)
        except (RuntimeError, torch.OutOfMemoryError) as error:
            row = {"missing": f"{type(error).__name__}: {str(error)[:300]}"}
        gc.collect()
        torch.cuda.empty_cache()
        about = {
            "keys": case.keys,
            "lengths": case.lengths,
            "layers": case.layers,
            "cap": case.cap,
            "kept_exchanged": False,
        }
        record["cases"][case.name] = row | about
        if first:
            write_atomically(flags.out, json.dumps(record, indent=1))
            gib = row.get("peak", 0) / 2**30
            print(f"{case.name}: {gib:.2f} GiB at its peak {row.get('missing', '')}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    main()
