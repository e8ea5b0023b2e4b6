"""Where the time of sharded attention goes: kernels, other work on the device, communication that shows, the host.

    torchrun --nproc-per-node 4 bench/attention/attention_time.py --out bench/records/attention-time.json

Each communication type runs forward and backward several times under torch's profiler, on every rank. Of the first
rank's timeline: `attention` is the time in which an attention kernel runs, `other` that of other kernels alone (copies,
merges, sums), `exposed` that in which nothing but communication runs, `idle` that in which the device waits for the
host or for other ranks; they add up to the time of a run. `hidden` is communication beside kernels. `host` is what the
host takes to queue a run, and `limit` the time of the kernel alone, on whole documents with a rank's share of the
heads, on the slowest rank; `apart` is what the fastest rank needs less. `alone` is a run whose kernels compute nothing,
so that communication, copies and sums are left. `--trace DIR` keeps a timeline of each for chrome://tracing or
ui.perfetto.dev. Needs GPUs.
"""

import argparse
import gzip
import json
import statistics
import sys
import time
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench.attention.hollow import hollow_kernel
from bench.attention.type_cases import AttentionSettings, Run, lengths_of, own_cases, tensors_of
from bench.attention.type_ranks import forward_flops
from torch.profiler import ProfilerActivity, profile

from longspan import Group, Layout, MicroBatch, World, attend, bind
from longspan.attention.kernels import table
from longspan.bench.record import origin_text
from longspan.cli.machine import machine_facts
from longspan.run.profile import merge_intervals
from longspan.versions import versions

Span = tuple[float, float]
RUNS = 4  # under the profiler


def main() -> None:
    """Measure every type at every length, print a line for each, and write the record."""
    flags = _flags()
    table.KERNELS = (*table.KERNELS, hollow_kernel("cuda"))
    about = {"machine": machine_facts(), "versions": versions(), "command": " ".join(["torchrun", *sys.argv])}
    record: dict[str, Any] = {"bench": "attention time", **about, "rows": []}
    with World(Layout(int(torch.cuda.device_count()))) as world:
        settings = settings_of(flags, len(world.home.ranks))
        record |= {"ranks": settings.ranks, "documents": settings.documents, "window": settings.window}
        record["partition"] = settings.partition
        for length in settings.lengths:
            limits = world.control.gather_objects(_limit(settings, length, world))
            limit = {"limit": max(limits), "apart": max(limits) - min(limits)}
            for case in own_cases(settings):
                tensors = tensors_of(settings, length, world)
                with case.prepare(settings, tensors, world) as run:
                    row = {"name": case.name, "length": length} | limit | _measured(run, flags, case.name, length)
                with case.prepare(replace(settings, kernel="hollow"), tensors, world) as run:
                    row["alone"] = settled(run)
                del tensors
                row["tflops_per_device"] = 3.5 * forward_flops(settings, length) / row["run"] / settings.ranks / 1e12
                record["rows"].append(row)
                if world.rank == 0:
                    print(_line(row), flush=True)
        if world.rank == 0 and flags.out:
            Path(flags.out).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
            Path(flags.out).with_suffix(".md").write_text(_markdown(record), encoding="utf-8")


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--types", default="p2p,all_gather,a2a,a2a+p2p")
    parser.add_argument("--lengths", default="16384,65536,131072", help="rows of all ranks together")
    parser.add_argument("--documents", type=int, default=1, help="equal packed documents")
    parser.add_argument("--partition", default="zigzag", choices=("zigzag", "contiguous"))
    parser.add_argument("--window", type=int, default=0)
    parser.add_argument("--kernel", default="")
    parser.add_argument("--trace", default="", help="folder for timelines")
    parser.add_argument("--out", default="", help="record: FILE.json, and FILE.md beside it")
    return parser.parse_args()


def settings_of(flags: argparse.Namespace, ranks: int) -> AttentionSettings:
    """The settings of the cases of `attention_types.py`: the shape of Qwen3-8B's attention, over so many ranks."""
    inner = next(a for a in range(2, ranks + 1) if ranks % a == 0)
    return AttentionSettings(
        types=tuple(flags.types.split(",")),
        lengths=tuple(int(n) for n in flags.lengths.split(",")),
        documents=flags.documents,
        partition=flags.partition,
        window=flags.window,
        sinks=False,
        kernel=flags.kernel,
        hierarchical=(inner, ranks // inner),
        heads=32,
        key_value_heads=8,
        head_size=128,
        dtype="bfloat16",
        warmup=3,
        repeats=10,
        peers=False,
        ranks=ranks,
        backend="nccl",
        timeout_seconds=300.0,
        command="",
    )


def _measured(run: Run, flags: argparse.Namespace, name: str, length: int) -> dict[str, float]:
    for _ in range(4):
        run.backward(run.forward())
    torch.cuda.synchronize()
    host = _host_seconds(run)
    seconds = _seconds(run)
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiler:
        for _ in range(RUNS):
            run.backward(run.forward())
        torch.cuda.synchronize()
    trace = Path(flags.trace or "/tmp") / f"{name.split()[-1].replace('+', '-')}-{length}.json"
    trace.parent.mkdir(parents=True, exist_ok=True)
    if torch.distributed.get_rank() != 0:
        return {"run": seconds, "host": host}
    profiler.export_chrome_trace(str(trace))
    events = json.loads(trace.read_text())["traceEvents"]
    if flags.trace:
        _keep_device_events(events, trace)
    return {"run": seconds, "host": host} | _parts([e for e in events if _on_device(e)])


def _host_seconds(run: Run) -> float:
    """Median seconds until a forward and a backward pass are queued, on a device that has nothing else to do."""
    rows = []
    for _ in range(10):
        torch.cuda.synchronize()
        torch.distributed.barrier()
        started = time.perf_counter()
        run.backward(run.forward())
        rows.append(time.perf_counter() - started)
    torch.cuda.synchronize()
    return statistics.median(rows)


def _seconds(run: Run) -> float:
    """Seconds of a run among runs that follow each other."""
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    run.backward(run.forward())
    start.record()
    for _ in range(10):
        run.backward(run.forward())
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) * 1e-4


def settled(run: Run) -> float:
    """Seconds of a run among runs that follow each other, after some that are not counted."""
    for _ in range(3):
        run.backward(run.forward())
    return _seconds(run)


def _limit(settings: AttentionSettings, length: int, world: World) -> float:
    """Seconds of a rank's share of the arithmetic in kernels over whole documents: all rows, a share of the heads."""
    lengths, slots = tuple(lengths_of(settings, length)), world.home.slots
    groups = (Group((s,), tuple(s * len(lengths) + i for i in range(len(lengths))), lengths) for s in range(slots))
    shard = bind(MicroBatch(tuple(groups)), world)
    heads = [n // slots for n in (settings.heads, settings.key_value_heads, settings.key_value_heads)]
    q, k, v = (torch.randn(length, n, 128, device=world.device, dtype=torch.bfloat16) for n in heads)
    inputs = (q.requires_grad_(), k.requires_grad_(), v.requires_grad_())
    run = Run(
        inputs,
        torch.randn_like(q),
        lambda: attend(*inputs, shard, window=settings.window or None, kernel=settings.kernel or None),
        lambda x: x,
    )
    return settled(run)


def _on_device(event: dict[str, Any]) -> bool:
    return event.get("ph") == "X" and event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")


def _parts(events: list[dict[str, Any]]) -> dict[str, float]:
    """Seconds of one run by what the device does."""
    spans = {
        kind: merge_intervals([_span(e) for e in events if _kind(e["name"]) == kind])
        for kind in ("attention", "other", "wire")
    }
    computing = merge_intervals([*spans["attention"], *spans["other"]])
    anything = merge_intervals([*computing, *spans["wire"]])
    duration = anything[-1][1] - anything[0][0]
    seconds = {
        "attention": _length(spans["attention"]),
        "other": _length(computing) - _length(spans["attention"]),
        "exposed": _length(anything) - _length(computing),
        "idle": duration - _length(anything),
        "hidden": _length(computing) + _length(spans["wire"]) - _length(anything),
    }
    return {name: value * 1e-6 / RUNS for name, value in seconds.items()}


def _kind(name: str) -> str:
    low = name.lower()
    if "nccl" in low:
        return "wire"
    return "attention" if any(word in low for word in ("flash", "fmha", "cudnn")) else "other"


def _span(event: dict[str, Any]) -> Span:
    return event["ts"], event["ts"] + event["dur"]


def _length(spans: Iterable[Span]) -> float:
    return sum(stop - start for start, stop in spans)


def _keep_device_events(events: list[dict[str, Any]], trace: Path) -> None:
    """The device's timeline alone, compressed: what the host did is most of a trace's size."""
    shown = [e for e in events if _on_device(e) or e.get("ph") == "M"]
    with gzip.open(trace.with_suffix(".json.gz"), "wt") as file:
        json.dump({"traceEvents": list(_slim(shown))}, file)
    trace.unlink()


def _slim(events: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    for event in events:
        yield {key: value for key, value in event.items() if key != "args" or event["ph"] == "M"}


_COLUMNS = ("run", "attention", "other", "exposed", "idle", "hidden", "alone", "host", "limit", "apart")


def _line(row: dict[str, Any]) -> str:
    parts = ", ".join(f"{name} {1e3 * row[name]:.2f}" for name in _COLUMNS)
    return f"{row['name']}, {row['length']} rows: {row['tflops_per_device']:.0f} TFLOP/s per device; ms: {parts}"


def _markdown(record: dict[str, Any]) -> str:
    what = f"{record['documents']} packed documents" if record["documents"] > 1 else "one document"
    what += f", window {record['window']}" if record["window"] else ""
    what += f", rows {record['partition']}" if record["partition"] != "zigzag" else ""
    lines = [
        f"# Where attention's time goes: {what}, {record['ranks']} ranks",
        "",
        "Milliseconds of a forward and backward pass.",
    ]
    lines += ["", "| type | rows | TFLOP/s | " + " | ".join(_COLUMNS) + " |", "|" + " --- |" * (len(_COLUMNS) + 3)]
    for row in record["rows"]:
        cells = " | ".join(f"{1e3 * row[name]:.2f}" for name in _COLUMNS)
        lines.append(f"| {row['name']} | {row['length']:,} | {row['tflops_per_device']:.0f} | {cells} |")
    return "\n".join([*lines, "", origin_text(record)]) + "\n"


if __name__ == "__main__":
    main()
