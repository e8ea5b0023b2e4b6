"""A layer's experts on one GPU, forward and backward, beside transformers' own functions for them.

    python bench/experts/expert_time.py --out bench/records/experts.json

Experts of published models at full size, bfloat16, each row visiting experts drawn at random. TFLOP/s count 6 FLOPs for
each weight and visit, which both passes compute at the least: the rest of the time is rows on their way to experts and
back, the gate between the two products, and products short of the GPU's best. GiB: the peak of both passes, beside
weights and their gradients. The record is written after each part; a second run goes on with what is missing.
"""

import argparse
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench.begun import open_record
from torch import Tensor, nn
from transformers import CONFIG_MAPPING
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts

from longspan.bench.record import origin_text, write_record
from longspan.errors import ConfigError
from longspan.model.experts.moe import mix_all_rows

PASSES = 5


class Shape(NamedTuple):
    """Sizes of a layer's experts."""

    hidden: int
    inner: int
    experts: int
    top_k: int


SHAPES = {
    "Qwen3-30B-A3B": Shape(2048, 768, 128, 8),
    "Qwen3-Next, 64 experts": Shape(2048, 512, 64, 10),
    "Mixtral 8x7B": Shape(4096, 14336, 8, 2),
    "GLM-4.5-Air": Shape(4096, 1408, 128, 8),
}
SMALL = {"small": Shape(64, 32, 8, 2)}


def main() -> None:
    """Measure what the record lacks."""
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--shapes", default=";".join(SHAPES), help="with a semicolon between")
    flags.add_argument("--rows", default="16384")
    flags.add_argument("--functions", default="longspan,grouped_mm", help="longspan, and transformers' own")
    flags.add_argument("--small", action="store_true", help="a small layer, to try this on a CPU")
    flags.add_argument("--profile", action="store_true", help="print the kernels of longspan's passes")
    flags.add_argument("--out", type=Path)
    options = flags.parse_args()
    shapes = SMALL if options.small else {name: _shape(name) for name in options.shapes.split(";")}
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    record = open_record("experts", options.out, device.type, Path(__file__).parent, small=options.small)
    rows = record.setdefault("rows", [])
    for name, shape in shapes.items():
        for count in map(int, options.rows.split(",")):
            for function in options.functions.split(","):
                if (name, count, function) not in [(row["shape"], row["rows"], row["function"]) for row in rows]:
                    rows.append(
                        {"shape": name, "rows": count, "function": function}
                        | times(shape, count, function, device, options.profile)
                    )
                    if options.out is not None:
                        write_record(record, options.out, text_of(record))
    print(text_of(record))


def _shape(name: str) -> Shape:
    if name not in SHAPES:
        raise ConfigError(f"--shapes has {name!r}; use {', '.join(SHAPES)}, with a semicolon between")
    return SHAPES[name]


def times(shape: Shape, count: int, function: str, device: torch.device, profile: bool) -> dict[str, Any]:
    """Milliseconds of forward and of both passes, GiB, and the share of both that the products take at the least."""
    experts = _experts(shape, device)
    torch.manual_seed(1)
    x = torch.randn(count, shape.hidden, device=device, dtype=torch.bfloat16).requires_grad_()
    weights, chosen = torch.randn(count, shape.experts, device=device).softmax(1).topk(shape.top_k)
    weights = weights.bfloat16().requires_grad_()
    own = mix_all_rows if function == "longspan" else ALL_EXPERTS_FUNCTIONS[function]
    run = partial(own, experts, x, chosen, weights)
    dout = torch.randn_like(x)
    forward = _milliseconds(run, device)
    before = torch.cuda.memory_allocated() if device.type == "cuda" else 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
    both = _milliseconds(lambda: run().backward(dout), device)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**30 if device.type == "cuda" else 0.0
    if profile and function == "longspan":
        _profile(lambda: run().backward(dout))
    products = 6 * 3 * shape.hidden * shape.inner * shape.top_k * count
    found = {"forward": forward, "both": both, "gib": peak, "tflops": products / (both or 1) / 1e9}
    print(shape, count, function, found, flush=True)
    return found


def _experts(shape: Shape, device: torch.device) -> nn.Module:
    config = CONFIG_MAPPING["qwen3_moe"](
        hidden_size=shape.hidden,
        moe_intermediate_size=shape.inner,
        num_experts=shape.experts,
        num_experts_per_tok=shape.top_k,
    )
    with torch.device(device):
        experts = Qwen3MoeExperts(config).bfloat16()
    for parameter in experts.parameters():
        nn.init.normal_(parameter, std=0.02)
    return experts


def _milliseconds(run: Callable[[], object], device: torch.device) -> float:
    """The least of three means, after three runs."""
    for _ in range(3):
        run()
    if device.type != "cuda":
        return 0.0
    means: list[float] = []
    for _ in range(3):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        for _ in range(PASSES):
            run()
        end.record()
        end.synchronize()
        means.append(start.elapsed_time(end) / PASSES)
    return min(means)


def _profile(run: Callable[[], Tensor | None]) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run()
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    print(profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=30, max_name_column_width=70))


def text_of(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    lines = ["# Experts of a layer on one GPU", "", origin_text(record), ""]
    lines += [
        "Milliseconds, bfloat16. TFLOP/s: 6 FLOPs for each weight and visit over the time of both passes.",
        "",
        "| experts of | rows | function | forward | forward and backward | TFLOP/s | GiB |",
        "| --- " * 7 + "|",
    ]
    lines += [
        f"| {row['shape']} | {row['rows']:,} | {row['function']} | {row['forward']:.2f} | {row['both']:.2f} | "
        f"{row['tflops']:.0f} | {row['gib']:.2f} |"
        for row in record["rows"]
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
