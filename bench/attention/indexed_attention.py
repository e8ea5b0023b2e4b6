"""One layer's choice of keys and attention to them, of A.X K2's and DeepSeek-V3.2's widths, beside dense attention.

    python bench/attention/indexed_attention.py --out bench/records/indexed-attention.json    # a process for each GPU

Attention to the choice goes two ways: by a masked kernel and bits, and by one that gathers latents. Weights, queries
and latents are random, so that choices lie anywhere before a row; what expands or folds latents is in each way's time.
A short length is compared with the class's own scores, and with float64, before anything is timed. Rows that the record
has are left out.
"""

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench.begun import missing_row, open_record, peak_bytes, seconds_now, start_peak
from torch import Tensor
from transformers import DeepseekV32Config
from transformers.models.deepseek_v32.modeling_deepseek_v32 import DeepseekV32Attention

from longspan.bench.benches import origin_text
from longspan.cli.machine import set_gpu_environment
from longspan.cli.processes import run_on_ranks, usable_gpus
from longspan.comm import SequenceShard, World, bind
from longspan.layout import Layout
from longspan.model.seams.attention_calls import sharded_attention
from longspan.model.seams.chosen_keys import index_scores, indexers
from longspan.plain_text import bytes_text, markdown_table
from longspan.plan import plan_fixed

NAMES = ("hidden_size", "q_lora_rank", "index_n_heads", "num_attention_heads")
OF_HEADS = ("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim", "kv_lora_rank")
MODELS = {
    "axk2": ((2048, 384, 16, 32), (64, 32, 64, 128)),
    "deepseek_v32": ((7168, 1536, 64, 128), (128, 64, 128, 512)),
}
CHECKED = (1024, 64)  # rows of each rank, and k
ALLOWED = 2e-2  # relative error of bfloat16
WAYS = ("latents", "bits", "dense")
TIMES = ("choice", *(f"{way} {step}" for way in WAYS for step in ("forward", "backward")))
PEAKS = ("choice bytes", *(f"{way} bytes" for way in WAYS))


class Layer:
    """A layer's inputs on this rank, and its two steps."""

    def __init__(self, model: str, shard: SequenceShard, k: int) -> None:
        (sizes, of_heads), self.shard = MODELS[model], shard
        values = dict(zip(NAMES, sizes, strict=True)) | dict(zip(OF_HEADS, of_heads, strict=True))
        config = DeepseekV32Config(**values, num_key_value_heads=sizes[3], index_topk=k)
        self.module: Any = DeepseekV32Attention(config, 0).to(shard.device, torch.bfloat16)
        angles = shard.position_ids[:, None] * 10_000.0 ** -torch.linspace(0, 1, of_heads[1] // 2, device=shard.device)
        rope = [x.repeat(1, 2)[None].bfloat16() for x in (angles.cos(), angles.sin())]
        hidden, q_residual = (self.drawn(1, len(angles), size) for size in sizes[:2])
        no_mask = torch.empty(1, 1, len(angles), 0, device=shard.device, dtype=torch.bool)
        self.inputs = hidden, q_residual, tuple(rope), no_mask, shard.position_ids[None]

    def drawn(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.shard.device, dtype=torch.bfloat16)

    def choose(self) -> Tensor:
        with patch.object(indexers, "running_layer", lambda: SimpleNamespace(shard=self.shard)):
            return indexers._choose_keys(self.module.indexer, *self.inputs)

    def draw_heads(self) -> list[Tensor]:
        """Queries, latents, rotated parts of keys, the weight that expands them, and the gradient of the output."""
        m = self.module
        rows = len(self.shard.position_ids)
        shapes = [(1, m.num_heads, rows, m.qk_head_dim), (1, 1, rows, m.kv_lora_rank), (1, 1, rows, m.qk_rope_head_dim)]
        leaves = [self.drawn(*shape).requires_grad_() for shape in shapes]
        return [*leaves, m.kv_b_proj.weight, self.drawn(1, rows, m.num_heads, m.v_head_dim)]

    def attend(self, heads: list[Tensor], indices: Tensor | None, way: str, kernel: str | None = None) -> Tensor:
        query, latents, rotated = heads[:3]
        keys = (rotated, latents) if way == "latents" else DeepseekV32Attention.expand_kv(self.module, latents, rotated)
        more = {"indices": indices, "shard": self.shard, "attention_kernel": kernel}
        return sharded_attention(self.module, query, *keys, None, self.module.scaling, **more)[0]


def measure_ranks(rank: int, options: argparse.Namespace) -> dict[str, Any]:
    with World(Layout(ranks=options.world), backend=None if options.world <= usable_gpus() else "gloo") as world:
        about = {"ranks": options.world, "k": options.k}
        record = open_record("indexed attention", options.out, world.backend, Path(__file__).parent, **about)
        checks = record.setdefault("checks", {})
        rows = record.setdefault("rows", {})
        for model, length in itertools.product(options.models.split(","), map(int, options.lengths.split(","))):
            if (name := f"{model}, {length:,}") in rows:
                continue
            if model not in checks:
                checks[model] = check(Layer(model, bound(CHECKED[0] * options.world, world), CHECKED[1]), world)
            rows[name] = measure(Layer(model, bound(length, world), options.k), world, options.ways.split(","))
            if rank == 0 and options.out is not None:
                print(name, rows[name], flush=True)
                options.out.write_text(json.dumps(record, indent=1))
                options.out.with_suffix(".md").write_text(markdown(record))
    return record


def bound(length: int, world: World) -> SequenceShard:
    return bind(
        plan_fixed([length], world.home, cp=len(world.plane), cp_comm_type="all_gather").micro_batches[0], world
    )


def check(layer: Layer, world: World) -> dict[str, float]:
    """Rows that choose other keys than the class, and errors of both ways beside float64: the largest of all ranks."""
    chosen = layer.choose().sort(-1).values
    with patch.object(index_scores, "can_score", lambda q: False):
        other = (chosen != layer.choose().sort(-1).values).any(-1).double().mean().item()
    heads = layer.draw_heads()
    results = dict[str, list[Tensor]]()
    for way in ("float64", *WAYS[:2]):
        if way == "float64":
            layer.module.double()
        inputs = [x.detach().to(layer.module.kv_b_proj.weight.dtype).requires_grad_() for x in heads]
        inputs[3] = layer.module.kv_b_proj.weight
        out = layer.attend(inputs, chosen, way, "reference" if way == "float64" else None)
        results[way] = [out.detach(), *torch.autograd.grad(out, inputs[:4], inputs[4])]
        torch.distributed.all_reduce(results[way][4])  # of a rank's keys under one way, of its queries under the other
        layer.module.bfloat16()
    exact = results.pop("float64")
    worst = {"rows that choose other keys": other}
    for way, found in results.items():
        for name, x, y in zip(("out", "dq", "dlatents", "drotated", "dweight"), found, exact, strict=True):
            worst[f"{way}, {name}"] = ((x.double() - y).norm() / y.norm()).item()
    of_ranks = world.control.gather_objects(worst)
    worst = {name: max(x[name] for x in of_ranks) for name in worst}
    assert other < 0.01 and max(worst.values()) < ALLOWED, worst
    return worst


def measure(layer: Layer, world: World, ways: list[str]) -> dict[str, Any]:
    """Seconds and bytes of the choice, and of forward and backward of dense attention and of that to chosen keys."""
    row: dict[str, Any] = {}
    (row["choice"],), row["choice bytes"] = timed(lambda: layer.choose() is None, world)
    for way in ways:
        chosen, heads = None if way == "dense" else layer.choose(), layer.draw_heads()

        def both(heads: list[Tensor] = heads, chosen: Tensor | None = chosen, way: str = way) -> float:
            out = layer.attend(heads, chosen, way)
            middle = seconds_now()
            torch.autograd.grad(out, heads[:4], heads[4])
            return middle

        try:
            (row[f"{way} forward"], row[f"{way} backward"]), row[f"{way} bytes"] = timed(both, world)
        except torch.OutOfMemoryError as error:
            row[way] = missing_row(error)
        del heads, both, chosen
    return row


def timed(run: Callable[[], float], world: World) -> tuple[list[float], int]:
    """Median seconds of one to three runs after one, before and after what `run` returns (0: all), and peak bytes."""
    times = list[list[float]]()
    while len(times) < 4 and (len(times) < 2 or max(world.control.gather_objects(sum(times[-1]))) < 1):
        start_peak()
        world.control.gather_objects(None)  # all begin together
        marks = [x for x in (seconds_now(), run(), seconds_now()) if x]
        times.append([after - before for before, after in itertools.pairwise(marks)])
    medians = [statistics.median(x) for x in zip(*times[1:], strict=True)]
    of_ranks = world.control.gather_objects((*medians, peak_bytes()))
    *slowest, peak = (max(x) for x in zip(*of_ranks, strict=True))
    return slowest, peak


def markdown(record: dict[str, Any]) -> str:
    lines = [
        (
            name,
            *(f"{1e3 * row[x]:.1f}" if x in row else "–" for x in TIMES),
            *(bytes_text(row.get(x, 0)) for x in PEAKS),
        )
        for name, row in record["rows"].items()
    ]
    table = markdown_table(("layer, rows", *(f"{x}, ms" for x in TIMES), *PEAKS), lines)
    checks = "".join(f"\n- {model}: {errors}" for model, errors in record["checks"].items())
    return f"{origin_text(record)}\n\nRanks: {record['ranks']}; k {record['k']}.\n\n{table}\n{checks}\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--world", type=int, default=usable_gpus() or 1)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--lengths", default="16384,32768,65536,131072")
    parser.add_argument("--ways", default=",".join(WAYS))
    parser.add_argument("--k", type=int, default=2048)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    set_gpu_environment()
    print(markdown(run_on_ranks(measure_ranks, (options,), options.world)))


if __name__ == "__main__":
    main()
