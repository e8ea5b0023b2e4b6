"""Seconds of an optimizer's step and bytes of device and host, with moments on the device and on the host.

python bench/training/offload_states.py --millions 4000 --out bench/records/offload-states-H200.json   # one GPU
python bench/training/offload_states.py --millions 8 --bucket_mib 4                                    # a CPU

Parameters are float32 (or --dtype), one of an eighth of the numbers and matrices of at most 50 million; gradients are
drawn once. Both ways take the same steps from the same values, and sums of the parameters' bits are compared. Rates are
bytes of moments over the step's seconds, each way.
"""

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench.begun import open_record
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from longspan.bench.record import origin_text, write_record
from longspan.plain_text import markdown_table
from longspan.plan.memory.settings import STATE_BUCKET_BYTES
from longspan.train.optim.offload_states import OffloadedStates

LARGEST = 50_000_000
GIB = 1 << 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--millions", type=float, default=1000.0, help="numbers of all parameters")
    parser.add_argument("--steps", type=int, default=8, help="that are timed, after two")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--optimizer", choices=("adamw", "sgd"), default="adamw")
    parser.add_argument("--bucket_mib", type=int, nargs="+", default=[STATE_BUCKET_BYTES >> 20])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    about = {name: getattr(options, name) for name in ("millions", "steps", "dtype", "optimizer")}
    record = open_record("offloaded states", None, device.type, Path(__file__).parent) | about
    rows = [measure(options, device, bucket) for bucket in (None, *(mib << 20 for mib in options.bucket_mib))]
    sums = [row.pop("sums") for row in rows]
    for row, of_row in zip(rows, sums, strict=True):
        row["same bits"] = of_row == sums[0]
    record["rows"] = rows
    text = f"{describe(rows)}\n\n{origin_text(record)}\n"
    if options.out:
        write_record(record, options.out, f"# Moments on the host\n\n{text}")
    print(text)


def measure(options: argparse.Namespace, device: torch.device, bucket: int | None) -> dict[str, Any]:
    """Steps with moments on the device (`bucket` None) or on the host."""
    parameters = make_parameters(int(options.millions * 1e6), getattr(torch, options.dtype), device)
    optimizer = build(options.optimizer, parameters)
    started = time.perf_counter()
    if bucket is not None:
        optimizer = OffloadedStates(optimizer, device, bucket_bytes=bucket)
    made = time.perf_counter() - started
    seconds = [timed_step(optimizer, device) for _ in range(2)]
    before = allocated(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    seconds += [timed_step(optimizer, device) for _ in range(options.steps)]
    size = moment_bytes(optimizer)
    median = statistics.median(seconds[2:])
    return {
        "moments": "device" if bucket is None else "host",
        "bucket": bucket,
        "seconds": median,
        "first_seconds": seconds[0],
        "made_seconds": made,
        "moment_bytes": size,
        "bytes_per_second": size / median,
        "device_bytes": before,
        "added_at_peak": torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else None,
        "host_bytes": optimizer.host_bytes if isinstance(optimizer, OffloadedStates) else 0,
        "sums": [bit_sum(p) for p in parameters],
    }


def make_parameters(numbers: int, dtype: torch.dtype, device: torch.device) -> list[nn.Parameter]:
    """Parameters with gradients, the same for the same arguments."""
    draws = torch.Generator(device).manual_seed(0)
    sizes, left = [numbers // 8], numbers - numbers // 8
    while left:
        sizes.append(min(left, LARGEST))
        left -= sizes[-1]
    parameters = list[nn.Parameter]()
    for size in sizes:
        x, gradient = (torch.randn(size, generator=draws, device=device, dtype=torch.float32) for _ in range(2))
        parameters.append(nn.Parameter(x.to(dtype)))
        parameters[-1].grad = gradient.to(dtype)
    return parameters


def build(name: str, parameters: list[nn.Parameter]) -> Optimizer:
    """The optimizer over all parameters."""
    if name == "adamw":
        return AdamW(parameters, lr=1e-3, fused=True)
    return SGD(parameters, lr=1e-3, momentum=0.9)


def timed_step(optimizer: Optimizer, device: torch.device) -> float:
    """Seconds of one step, until the device is done."""
    synchronize(device)
    started = time.perf_counter()
    optimizer.step()
    synchronize(device)
    return time.perf_counter() - started


def synchronize(device: torch.device) -> None:
    """Wait for the device."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def allocated(device: torch.device) -> int | None:
    """Bytes of the device in use; None on a CPU, which has no figures."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else None


def moment_bytes(optimizer: Optimizer) -> int:
    """Bytes of all states that are more than one number."""
    states = (x for state in optimizer.state.values() for x in state.values())
    return sum(x.nbytes for x in states if isinstance(x, torch.Tensor) and x.ndim)


def bit_sum(x: torch.Tensor) -> int:
    """A sum of the bits of all numbers, each taken as an integer."""
    bits = x.detach().view(torch.int32 if x.element_size() == 4 else torch.int16)
    return int(bits.sum(dtype=torch.int64))


def describe(rows: list[dict[str, Any]]) -> str:
    """The rows as a table."""
    head = ["moments", "bucket, MiB", "step, s", "first, s", "made, s", "moments, GiB", "GB/s each way"]
    head += ["on the device, GiB", "added at the peak, MiB", "on the host, bytes", "same bits"]
    lines = [
        [
            row["moments"],
            "" if row["bucket"] is None else str(row["bucket"] >> 20),
            f"{row['seconds']:.4f}",
            f"{row['first_seconds']:.3f}",
            f"{row['made_seconds']:.2f}",
            f"{row['moment_bytes'] / GIB:.3f}",
            "" if row["bucket"] is None else f"{row['bytes_per_second'] / 1e9:.1f}",
            "" if row["device_bytes"] is None else f"{row['device_bytes'] / GIB:.3f}",
            "" if row["added_at_peak"] is None else f"{row['added_at_peak'] / (1 << 20):.1f}",
            f"{row['host_bytes']:,}",
            "yes" if row["same bits"] else "NO",
        ]
        for row in rows
    ]
    return markdown_table(head, lines)


if __name__ == "__main__":
    main()
