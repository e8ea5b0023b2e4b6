"""Bytes a second of an optimizer's step: AdamW in one pass and torch's fused one, per types and ways to round.

    python bench/training/optimizer_time.py --millions 2000 --out bench/records/optimizer-time-H200.json

On one GPU, with tensors of the shapes of Qwen3-8B's layers, as many as fill `--millions` of numbers. Bytes are those
that a step cannot do without: parameter, gradient and two moments are read, all but the gradient are written. Each
figure is the median of `--steps` steps by events of the GPU, which waits before each step until the host has launched
it, as in training, where the host is ahead; `host` is until the call returned. With `--sweep`, other sizes of blocks
and numbers of programs too; `--only` names the variants that have its text. `--cpu` tries the script with few numbers.
"""

import argparse
import math
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import cycle
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from longspan.bench.record import origin_text, write_record
from longspan.cli.machine import machine_facts
from longspan.plain_text import markdown_table
from longspan.train.optim import one_pass_adamw
from longspan.train.optim.one_pass_adamw import OnePassAdamW
from longspan.train.optim.optimizer import OptimizerChoice
from longspan.train.optim.rounding_bits import Places, RoundingBits
from longspan.train.optim.stochastic_rounding import StochasticRounding
from longspan.versions import versions

SHAPES = ((4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), *((12288, 4096),) * 2, (4096, 12288))
NORMS = ((4096,), (4096,), (128,), (128,))
SETTINGS: dict[str, Any] = {"lr": 1e-5, "betas": (0.9, 0.95), "weight_decay": 0.1}
WORLD: Any = SimpleNamespace(seed=1, step=1)
SWEEP = [(512, 2), (512, 4), (1024, 4), (1024, 8), (2048, 8)]  # numbers of a block and warps
PROGRAMS = (1056, 2112, 4224)
HEAD_START = 60_000_000  # cycles of a GPU, about 35 ms, in which the host launches a step


class _Columns(RoundingBits):
    """As if each tensor were some columns of a parameter that is twice as wide, as under tensor parallelism."""

    def places(self, parameter: nn.Parameter) -> Places:
        """Return the places of the second half of a wider parameter's columns."""
        rows, width = (1, *parameter.shape)[-2:]
        return Places.of((rows, 2 * width), (slice(0, rows), slice(width, 2 * width)))


def _in_one_pass(model: nn.Module) -> Optimizer:
    return OnePassAdamW(model.parameters(), **SETTINGS)


def _scaled(model: nn.Module) -> Optimizer:
    optimizer = OnePassAdamW(model.parameters(), **SETTINGS)
    optimizer.gradient_scale = torch.tensor(0.5, device=next(model.parameters()).device)
    return optimizer


def _one_by_one(model: nn.Module) -> Optimizer:
    arguments = (("betas", SETTINGS["betas"]), ("amsgrad", False))  # an argument of torch's own
    return StochasticRounding(OptimizerChoice("adamw", SETTINGS["lr"], 0.1, arguments), model, WORLD)


VARIANTS: dict[str, tuple[torch.dtype, Callable[[nn.Module], Optimizer]]] = {
    "float32, torch fused": (torch.float32, lambda model: AdamW(model.parameters(), **SETTINGS, fused=True)),
    "float32, one pass": (torch.float32, _in_one_pass),
    "float32, one pass with the norm's factor": (torch.float32, _scaled),
    "bfloat16, torch fused": (torch.bfloat16, lambda model: AdamW(model.parameters(), **SETTINGS, fused=True)),
    "bfloat16, one pass to the nearest": (torch.bfloat16, _in_one_pass),
    "bfloat16, one pass by chance": (
        torch.bfloat16,
        lambda model: OnePassAdamW(model.parameters(), **SETTINGS, rounding=RoundingBits(model, WORLD)),
    ),
    "bfloat16, one pass by chance, columns": (
        torch.bfloat16,
        lambda model: OnePassAdamW(model.parameters(), **SETTINGS, rounding=_Columns(model, WORLD)),
    ),
    "bfloat16, by chance, one by one": (torch.bfloat16, _one_by_one),
}


def main() -> None:
    """Measure every variant, print a table, and write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=2000)
    parser.add_argument("--steps", type=int, default=7)
    parser.add_argument("--sweep", action="store_true")
    parser.add_argument("--only", default="")
    parser.add_argument("--cpu", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cpu" if options.cpu else "cuda")
    rows = list(measure(options, device))
    facts = {"machine": machine_facts(), "versions": versions(), "command": " ".join(["python", *sys.argv])}
    record = {"bench": "optimizer-time", **facts, "millions": options.millions, "rows": rows}
    table = markdown_table(
        ["AdamW", "ms", "GB/s", "host, ms"],
        [[row["name"], f"{row['ms']:.2f}", f"{row['gb_per_second']:,.0f}", f"{row['host_ms']:.2f}"] for row in rows],
    )
    text = (
        f"# Seconds of an optimizer's step\n\n{options.millions:,.0f} million numbers in one GPU's memory.\n\n{table}"
    )
    print(table)
    if options.out:
        write_record(record, options.out, f"{text}\n\n{origin_text(record)}\n")


def measure(options: argparse.Namespace, device: torch.device) -> Iterator[dict[str, Any]]:
    """Yield the figures of every variant."""
    for name, (dtype, build) in ((name, VARIANTS[name]) for name in VARIANTS if options.only in name):
        model = make_model(int(options.millions * 1e6), dtype, device)
        optimizer = build(model)
        yield time_variant(name, model, optimizer, options.steps)
        if options.sweep and isinstance(optimizer, OnePassAdamW):
            before = one_pass_adamw.BLOCK, one_pass_adamw.WARPS, one_pass_adamw.PROGRAMS
            for sizes in ((*sizes, programs) for sizes in SWEEP for programs in PROGRAMS):
                one_pass_adamw.BLOCK, one_pass_adamw.WARPS, one_pass_adamw.PROGRAMS = sizes
                yield time_variant(f"{name}, {sizes}", model, optimizer, options.steps)
            one_pass_adamw.BLOCK, one_pass_adamw.WARPS, one_pass_adamw.PROGRAMS = before
        del model, optimizer
        if device.type == "cuda":
            torch.cuda.empty_cache()


def make_model(numbers: int, dtype: torch.dtype, device: torch.device) -> nn.Module:
    """Return a model of a decoder's tensors with gradients, of so many numbers or a little fewer."""
    model: Any = nn.ParameterList()
    shapes, left = cycle((*NORMS, *SHAPES)), numbers
    while left > max(map(math.prod, NORMS)):
        shape = next(shapes)
        rows = min(shape[0], left // math.prod(shape[1:]))
        left -= rows * math.prod(shape[1:])
        if rows:
            model.append(nn.Parameter(torch.empty(rows, *shape[1:], dtype=dtype, device=device).normal_()))
            model[-1].grad = torch.empty_like(model[-1]).normal_()
    return model


def time_variant(name: str, model: nn.Module, optimizer: Optimizer, steps: int) -> dict[str, Any]:
    """Return the milliseconds of a step on the device and of its call, and the bytes a second."""
    seconds, host = list[float](), list[float]()
    for _ in range(2 + steps):
        on_device, on_host = timed_step(optimizer, next(model.parameters()).device)
        seconds.append(on_device)
        host.append(on_host)
    numbers = sum(parameter.numel() for parameter in model.parameters())
    itemsize = next(model.parameters()).dtype.itemsize
    median = statistics.median(seconds[2:])
    row = {"name": name, "numbers": numbers, "tensors": len([*model.parameters()]), "ms": 1e3 * median}
    row |= {"gb_per_second": 7 * itemsize * numbers / median / 1e9, "host_ms": 1e3 * statistics.median(host[2:])}
    print(f"{name}: {row['ms']:.2f} ms, {row['gb_per_second']:,.0f} GB/s, host {row['host_ms']:.2f} ms", flush=True)
    return row


def timed_step(optimizer: Optimizer, device: torch.device) -> tuple[float, float]:
    """Seconds of one step on the device, and until its call returned."""
    if device.type != "cuda":
        started = time.perf_counter()
        optimizer.step()
        return time.perf_counter() - started, time.perf_counter() - started
    before, after = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize(device)
    torch.cuda._sleep(HEAD_START)
    before.record()
    started = time.perf_counter()
    optimizer.step()
    host = time.perf_counter() - started
    after.record()
    torch.cuda.synchronize(device)
    return before.elapsed_time(after) / 1e3, host


if __name__ == "__main__":
    main()
