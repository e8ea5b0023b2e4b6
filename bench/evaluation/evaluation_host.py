"""What an evaluation costs the host: calls of functions and microseconds for each micro-batch and layer.

    python bench/evaluation/evaluation_host.py  # tp 1 and 2, degrees 1 and 2, 8 layers
    python bench/evaluation/evaluation_host.py --tp 2 --degrees 2 --top 40  # which functions
    python bench/evaluation/evaluation_host.py --preset qwen3-4b --tokens 1024  # on a GPU: kernels are only launched

One process is rank 0 of `--ranks`, whose exchanges complete at once (`one_rank.py`), with a model under FSDP2 and, at
tp 2, sequence parallelism. Calls are counted by cProfile, built-in ones too; seconds are the processor's of the main
thread, the least of many evaluations. On a CPU the little arithmetic of a tiny model is in them.
"""

import argparse
import cProfile
import gc
import pstats
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
from bench.processes.one_rank import OneRank
from torch import nn

from longspan import Layout, World, evaluate, load_model, prepare
from longspan.bench.layers import change_layer_count
from longspan.evaluation.result import Evaluation
from longspan.evaluation.row_sums import RowSums, Totals
from longspan.model.presets import preset_config
from longspan.train import PlanChoice
from longspan.train.plans import query_heads

MICRO_BATCHES = (1, 2, 4)
VOCABULARY = 1024
_OVER_RANKS = RowSums.sum_over_ranks


def main() -> None:
    """One line for each degree of a home; homes have a process each, as torch has one default group."""
    flags = _flags()
    torch.set_num_threads(1)
    device = torch.device("cuda", 0) if torch.cuda.is_available() and not flags.cpu else torch.device("cpu")
    world = OneRank(Layout(flags.ranks, tp=flags.tp), device)
    configuration = change_layer_count(preset_config(flags.preset, vocab_size=VOCABULARY), flags.layers)
    configuration.vocab_size, configuration.tie_word_embeddings = VOCABULARY, False
    dtype = torch.bfloat16 if device.type == "cuda" else None
    loaded = load_model(config=configuration, sharded=True)
    model = prepare(loaded, world, sequence_parallel=flags.tp > 1, fused_norms="on", compute_dtype=dtype)
    vars(model)["modes_of_row_trial"] = {False}  # nothing that a fake group gathers has values that could be compared
    for degree in flags.degrees:
        runs = {count: _evaluation(model, world, flags, degree, count) for count in MICRO_BATCHES}
        milliseconds = {count: _least(run, flags.repeats) for count, run in runs.items()}
        calls = {count: _profiled(run).total_calls for count, run in runs.items()}
        further = (milliseconds[4] - milliseconds[2]) / 2 / flags.layers, (calls[4] - calls[2]) / 2 / flags.layers
        print(
            f"tp {flags.tp}, degree {degree}, {flags.layers} layers: 1, 2, 4 micro-batches take "
            f"{', '.join(f'{x:.1f}' for x in milliseconds.values())} ms and "
            f"{', '.join(f'{x:,}' for x in calls.values())} calls; a layer of one more {1e3 * further[0]:,.0f} µs and "
            f"{further[1]:,.0f} calls",
            flush=True,
        )
        if flags.top:
            _profiled(runs[4]).sort_stats("tottime").print_stats(flags.top)


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4)
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--degrees", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--preset", default="qwen3-tiny")
    parser.add_argument("--tokens", type=int, default=16, help="of each document; few, so that arithmetic is little")
    parser.add_argument("--repeats", type=int, default=40)
    parser.add_argument("--top", type=int, default=0, help="print this many of the functions that take longest")
    parser.add_argument("--cpu", action="store_true", help="also where there is a GPU")
    return parser.parse_args()


def _evaluation(
    model: nn.Module, world: World, flags: argparse.Namespace, degree: int, micro_batches: int
) -> Callable[[], Any]:
    """An evaluation of so many micro-batches of one document for each group, that has run three times."""
    documents = [np.arange(flags.tokens)] * (micro_batches * world.home.slots // degree)
    choice = PlanChoice.fixed(
        degree,
        max_tokens_per_slot=flags.tokens // degree,
        row_multiple=flags.tp,
        cp_comm_type="auto",
        heads=query_heads(model.config),
    )

    targets = sum(len(document) - 1 for document in documents)

    def of_all_ranks(sums: RowSums, world: World, *, failed: bool = False) -> Totals:
        """With the rows of the other ranks, which are not here to say how many they had."""
        return _OVER_RANKS(sums, world, failed=failed)._replace(rows=targets)

    def run() -> Evaluation:
        with patch.object(RowSums, "sum_over_ranks", of_all_ranks):
            return evaluate(model, documents, choice, world)

    for _ in range(2):
        run()
    assert len(run().plan.micro_batches) == micro_batches
    return run


def _least(run: Callable[[], Any], repeats: int) -> float:
    gc.collect()
    gc.disable()
    best = float("inf")
    for _ in range(repeats):
        started = time.thread_time()
        run()
        best = min(best, time.thread_time() - started)
    gc.enable()
    return 1e3 * best


def _profiled(run: Callable[[], Any]) -> Any:
    profiler = cProfile.Profile()
    profiler.enable()
    run()
    profiler.disable()
    return pstats.Stats(profiler)


if __name__ == "__main__":
    main()
