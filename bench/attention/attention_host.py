"""What attention costs the host: operators, launches, collectives and microseconds of one forward and backward pass.

    python bench/attention/attention_host.py --out bench/records/attention-host.json

One process is rank 0 of `--ranks`, on torch's `fake` process group, whose exchanges complete at once: what is timed is
the host's work alone, the least of many passes, and no rank waits for another. On a CPU the attention kernels and the
Triton kernels are hollow: calls are counted, nothing is computed, and what their own launchers cost is left out. On a
GPU they are real and launched, and the host does not wait for them (NCCL's own work is left out there too).

Then the geometry: seconds of the processor until one member's launches are known, once per micro-batch.
"""

import argparse
import cProfile
import gc
import json
import pstats
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench.attention.hollow import hollow_kernel
from bench.processes.one_rank import OneRank
from torch import Tensor
from torch.profiler import ProfilerActivity, profile
from torch.utils._python_dispatch import TorchDispatchMode

from longspan import Group, Layout, World, attend, bind, plan_fixed
from longspan.attention import fused_rows as fused
from longspan.attention import rows
from longspan.attention.kernels import table
from longspan.attention.members import Members
from longspan.attention.tiles import Mask
from longspan.cli.machine import machine_facts, machine_text
from longspan.comm.shard import ShardPart
from longspan.versions import versions

TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")
HEADS, KV_HEADS = 32, 8
# Kernels behind a call of FlashAttention-4 with grouped heads: backward fills two buffers, prepares, computes, and
# converts the gradients of q, k and v.
BEHIND_FORWARD, BEHIND_BACKWARD = 1, 7
_ESTIMATED = f" that a GPU would see, with {BEHIND_FORWARD} and {BEHIND_BACKWARD} behind a call of FlashAttention-4"


class Counted:
    """Stands for the module of Triton kernels on a CPU: `kernel[grid](…)` is counted and does nothing."""

    def __init__(self, counts: Counter[str]) -> None:
        self._counts = counts

    def __getattr__(self, name: str) -> "Counted":
        return self

    def __getitem__(self, grid: object) -> "Counted":
        return self

    def __call__(self, *arguments: object, **constants: object) -> "Counted":
        self._counts["triton"] += 1
        return self  # as Triton gives the compiled kernel


class Operators(TorchDispatchMode):
    """Counts torch's operators: those that compute or copy, calls of torch.distributed, and all together."""

    FREE = ("empty", "view", "as_strided", "detach", "alias", "expand", "slice", "select", "split", "transpose")
    FREE += ("unsqueeze", "squeeze", "permute", "t.", "unbind", "reshape", "_unsafe_view", "new_empty")

    def __init__(self, counts: Counter[str]) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        namespace, _, name = str(func).partition(".")
        self._counts["operators"] += 1
        if namespace == "c10d":
            self._counts["distributed"] += 1
        elif not name.startswith(self.FREE) and not getattr(func, "is_view", False):
            self._counts["computing"] += 1
        return func(*args, **(kwargs or {}))


def main() -> None:
    """Measure every type and shape, print a line for each, and write the record."""
    flags = _flags()
    torch.set_num_threads(1)
    device = torch.device("cuda", 0) if torch.cuda.is_available() and not flags.cpu else torch.device("cpu")
    record: dict[str, Any] = {"bench": "attention host", "ranks": flags.ranks, "device": device.type}
    record |= {"machine": machine_facts(), "versions": versions(), "rows": [], "geometry": []}
    record["geometry"] = [_show(row) for row in geometries()]
    counts: Counter[str] = Counter()
    world = OneRank(Layout(flags.ranks), device)
    with _hollow(counts, device):
        record["rows"] = [_show(row) for row in _rows(flags, world, counts)]
    if flags.out:
        Path(flags.out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        Path(flags.out).with_suffix(".md").write_text(_markdown(record), encoding="utf-8")


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="an even number")
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--length", type=int, default=256, help="rows of all ranks; few, so that arithmetic is little")
    parser.add_argument("--window", type=int, default=24)
    parser.add_argument("--repeats", type=int, default=400)
    parser.add_argument("--top", type=int, default=0, help="print this many of the functions that take longest")
    parser.add_argument("--cpu", action="store_true", help="hollow kernels also where there is a GPU")
    parser.add_argument("--out", default="", help="record: FILE.json, and FILE.md beside it")
    return parser.parse_args()


# ---- one call of attend


@contextmanager
def _hollow(counts: Counter[str], device: torch.device) -> Iterator[None]:
    """On a CPU, kernels that are called and do nothing, laid out like FlashAttention-4's; in this process only."""
    if device.type == "cpu":
        table.KERNELS = (hollow_kernel("cpu", counts),)
        counted = Counted(counts)
        rows.runs_fused, fused.kernel_module = lambda x: True, lambda: counted
    yield


def _rows(flags: argparse.Namespace, world: World, counts: Counter[str]) -> Iterator[dict[str, Any]]:
    for kind in flags.types.split(","):
        for documents, window in ((1, None), (8, None), (1, flags.window), (8, flags.window)):
            run = _run(world, kind, flags.length, documents, window)
            row = {"type": kind, "documents": documents, "window": window}
            yield row | _counted(run, counts, world.device) | _seconds(run, flags.repeats)
            if flags.top:
                _print_functions(run, flags.top)


def _run(
    world: World, kind: str, length: int, documents: int, window: int | None
) -> tuple[Callable[[], Tensor], Callable[[Tensor], Any]]:
    """Forward, and backward of what it gives."""
    sizes = (2, world.home.slots // 2) if kind == "a2a+p2p" else None
    lengths = [length // documents] * documents
    plan = plan_fixed(
        lengths, world.home, world.home.slots, cp_comm_type=kind, hierarchical_context_parallel_sizes=sizes
    )
    shard = bind(plan.micro_batches[0], world)
    size = 128 if world.device.type == "cuda" else 16
    q, k, v, gradient = (
        torch.randn(shard.local_rows, n, size, device=world.device, dtype=torch.bfloat16)
        for n in (HEADS, KV_HEADS, KV_HEADS, HEADS)
    )
    inputs = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
    return lambda: attend(*inputs, shard, window=window), lambda out: torch.autograd.grad(out, inputs, gradient)


def _counted(run: Any, counts: Counter[str], device: torch.device) -> dict[str, int]:
    """How many of what one forward and backward pass has."""
    forward, backward = run
    backward(forward())
    counts.clear()
    launches = 0
    if device.type == "cuda":
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
            backward(forward())
            torch.cuda.synchronize()
        launches = sum(e.device_type == torch.autograd.DeviceType.CUDA for e in profiler.events() or ())
    with Operators(counts):
        backward(forward())
    if device.type != "cuda":
        behind = counts["forward"] * BEHIND_FORWARD + counts["backward"] * BEHIND_BACKWARD
        launches = counts["computing"] + counts["triton"] + behind
    names = ("operators", "computing", "distributed", "triton", "forward", "backward")
    return {"launches": launches} | {name: counts[name] for name in names}


def _seconds(run: Any, repeats: int) -> dict[str, float]:
    """The least seconds of the host in forward and in backward."""
    forward, backward = run
    gc.collect()
    gc.disable()
    best = [float("inf"), float("inf")]
    for _ in range(repeats):
        start = time.perf_counter()
        out = forward()
        middle = time.perf_counter()
        backward(out)
        stop = time.perf_counter()
        best = [min(best[0], middle - start), min(best[1], stop - middle)]
        if out.is_cuda:
            torch.cuda.synchronize()
    gc.enable()
    return {"forward_seconds": best[0], "backward_seconds": best[1]}


def _print_functions(run: Any, top: int) -> None:
    forward, backward = run
    profiler = cProfile.Profile()
    profiler.enable()
    for _ in range(100):
        backward(forward())
    profiler.disable()
    pstats.Stats(profiler).sort_stats("tottime").print_stats(top)


# ---- geometry


def geometries() -> Iterator[dict[str, Any]]:
    """Seconds until the launches of one member against all blocks of a ring, and against all rows, are known.

    All blocks are what a whole pass asks for, once, whatever the number of layers.
    """
    for documents, degree, length, window in (
        (1, 64, 1 << 20, None),
        (2000, 64, 600, None),
        (2000, 64, 600, 100),
        (64, 8, 4096, 1536),
        (64, 8, 4096, None),
    ):
        lengths = tuple(length + 7 * i % 400 for i in range(documents))
        group = Group(tuple(range(degree)), tuple(range(documents)), lengths)
        started = time.process_time()
        members = Members(ShardPart(group, 0, degree // 3, 0, 0), Mask(True, window), torch.device("cpu"))
        ring = [members.launches(owner) for owner in range(degree)]
        middle = time.process_time()
        gathered = members.launches(None)
        yield {
            "documents": documents,
            "degree": degree,
            "window": window,
            "ring_seconds": middle - started,
            "gathered_seconds": time.process_time() - middle,
            "most_launches_of_a_block": max(len(launches) for launches in ring),
            "launches_of_a_ring": sum(len(launches) for launches in ring),
            "launches_on_all_rows": len(gathered),
        }


# ---- the record


def _show(row: dict[str, Any]) -> dict[str, Any]:
    cells = (f"{name} {1e6 * x:.0f} µs" if name.endswith("seconds") else f"{name} {x}" for name, x in row.items())
    print(", ".join(cells).replace("_seconds", ""), flush=True)
    return row


def _markdown(record: dict[str, Any]) -> str:
    lines = [f"# What attention costs the host: rank 0 of {record['ranks']}, exchanges that complete at once", ""]
    lines += [f"One forward and backward pass on {record['device']}; microseconds are the least of many.", ""]
    lines += ["Operators are torch's, of which those that are computing start a kernel; distributed are calls of its"]
    lines += ["collectives, triton those of our own kernels, and forward and backward those of the attention kernel."]
    lines += [
        f"Launches are kernels{_ESTIMATED if record['device'] == 'cpu' else ''}, without those of collectives.",
        "",
    ]
    lines += [*_table(record["rows"]), "", "Geometry of one member, once per micro-batch:", ""]
    packages = ", ".join(f"{name} {number}" for name, number in record["versions"].items())
    machine_line = f"Machine: {machine_text(record['machine'])}. Versions: {packages}."
    return "\n".join([*lines, *_table(record["geometry"]), "", machine_line]) + "\n"


def _table(rows: list[dict[str, Any]]) -> Iterator[str]:
    yield "| " + " | ".join(name.replace("_", " ").replace(" seconds", ", µs") for name in rows[0]) + " |"
    yield "|" + " --- |" * len(rows[0])
    for row in rows:
        cells = (f"{1e6 * x:.0f}" if n.endswith("seconds") else "–" if x is None else str(x) for n, x in row.items())
        yield "| " + " | ".join(cells) + " |"


if __name__ == "__main__":
    main()
