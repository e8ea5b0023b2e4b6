"""How fast the attention kernel is on documents of each length: in a short burst, and under the load of training.

    python bench/attention/piece_time.py --out bench/records/attention-pieces-H200.json  # one GPU
    python bench/attention/piece_time.py --lengths 256 --alone 256 --rows 512 --seconds 0.1  # tries it on a CPU

A GPU that has done nothing for half a second has higher clocks than one that is at its limit of power. "Burst" is the
median of ten forward and backward passes after three, on a device that has rested; "sustained" that of the last ten
passes of `--seconds` without a pause. Documents of each of `--lengths` share `--rows` rows, those of `--alone` are by
themselves, without other documents beside them.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench.begun import open_record

from longspan import Group, Layout, MicroBatch, World, attend, bind
from longspan.bench.record import origin_text, write_record
from longspan.plain_text import markdown_table

TITLES = ("heads", "documents", "rows each", "burst ms", "TFLOP/s", "sustained ms", "TFLOP/s", "burst over sustained")
REST_SECONDS = 0.5
BURST, WARMUP = 10, 3  # passes


def main() -> None:
    """Measure every number of heads and length in turn."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--heads", type=int, nargs="+", default=[8, 32], help="query heads; a quarter of them of keys")
    parser.add_argument("--lengths", type=int, nargs="+", default=[512, 1024, 2048, 4096, 8192, 16384])
    parser.add_argument("--alone", type=int, nargs="+", default=[4096, 8192, 16384, 32768, 65536, 131072])
    parser.add_argument("--rows", type=int, default=65536, help="that short documents share")
    parser.add_argument("--seconds", type=float, default=1.5, help="of load before what counts as sustained")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    record = open_record("attention by pieces", None, device.type, Path(__file__).parent)
    record["rows"] = rows = list[dict[str, Any]]()
    with World(Layout(ranks=1), backend="nccl" if device.type == "cuda" else "gloo") as world:
        for heads in options.heads:
            packed = [(length, options.rows // length) for length in options.lengths]
            for length, documents in [*packed, *((length, 1) for length in options.alone)]:
                rows.append(_measure(heads, length, documents, options.seconds, world))
                print(" | ".join(_cells(rows[-1])), flush=True)
    text = f"{markdown_table(TITLES, [_cells(row) for row in rows])}\n\n{origin_text(record)}\n"
    if options.out:
        write_record(record, options.out, f"# The attention kernel by the length of documents\n\n{text}")


def _measure(heads: int, length: int, documents: int, seconds: float, world: World) -> dict[str, Any]:
    lengths = (length,) * documents
    shard = bind(MicroBatch((Group((0,), tuple(range(documents)), lengths),)), world)
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    sizes = (heads, max(1, heads // 4), max(1, heads // 4))
    q, k, v = (torch.randn(length * documents, n, 128, device=world.device, dtype=dtype) for n in sizes)
    inputs, gradient = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_()), torch.randn_like(q)

    def run() -> None:
        torch.autograd.grad(attend(*inputs, shard), inputs, gradient)

    _time_passes(run, world, BURST + WARMUP)  # compiles
    time.sleep(REST_SECONDS)
    burst = statistics.median(_time_passes(run, world, BURST + WARMUP)[WARMUP:])
    count = max(BURST, int(seconds / burst))
    sustained = statistics.median(_time_passes(run, world, count)[-BURST:])
    flops = 3.5 * 4 * documents * length**2 / 2 * heads * 128
    return {
        "heads": heads,
        "documents": documents,
        "length": length,
        "burst_seconds": burst,
        "sustained_seconds": sustained,
        "burst_tflops": flops / burst / 1e12,
        "sustained_tflops": flops / sustained / 1e12,
    }


def _time_passes(run: Callable[[], None], world: World, count: int) -> list[float]:
    """The seconds of each of so many passes that follow each other."""
    if world.device.type != "cuda":
        marks = [time.perf_counter()]
        for _ in range(count):
            run()
            marks.append(time.perf_counter())
        return [b - a for a, b in pairwise(marks)]
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    events[0].record()
    for event in events[1:]:
        run()
        event.record()
    torch.cuda.synchronize()
    return [a.elapsed_time(b) * 1e-3 for a, b in pairwise(events)]


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    burst, sustained = row["burst_seconds"], row["sustained_seconds"]
    return (
        f"{row['heads']}",
        f"{row['documents']}",
        f"{row['length']:,}",
        f"{1e3 * burst:.3f}",
        f"{row['burst_tflops']:.0f}",
        f"{1e3 * sustained:.3f}",
        f"{row['sustained_tflops']:.0f}",
        f"{sustained / burst:.3f}",
    )


if __name__ == "__main__":
    main()
