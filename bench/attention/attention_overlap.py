"""A timeline of what travels while what is computed: one forward and backward pass of each communication type.

    python bench/attention/attention_overlap.py --out bench/records/attention-overlap
    python bench/attention/attention_overlap.py --draw bench/records/attention-overlap.json  # draws its picture anew

Four local processes (one for each GPU where there are some) under torch's profiler. Of the first rank are kept: the
attention kernels, and every message from its start to its end. Writes FILE.json, a trace for ui.perfetto.dev or
chrome://tracing, FILE.svg, the same as a picture, and FILE.md with the sums. Slices of the heads are forced, which
short sequences would do without.
"""

import argparse
import json
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

from longspan import Layout, World, attend, bind, plan_fixed
from longspan.attention import all_gather, all_to_all, ring
from longspan.cli.machine import machine_facts, machine_text
from longspan.comm import run_local
from longspan.run.profile import merge_intervals
from longspan.versions import versions

TYPES = ("p2p", "all_gather", "a2a", "a2a+p2p")
Span = tuple[float, float, str]
STYLE = """<style>svg{--ink:#1d2126;--paper:#fff;--computes:#3b6ea8;--travels:#d98c3f}
@media (prefers-color-scheme: dark){svg{--ink:#e8eaed;--paper:#1b1f25;--computes:#6aaeff;--travels:#ffa26b}}
text{font:11px system-ui,sans-serif;fill:var(--ink)}.kind{font-weight:700}</style>"""


def main() -> None:
    """Record every type, and write the trace, the picture and the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=4096, help="of the sequence, over all ranks")
    parser.add_argument("--out", default="attention-overlap", help="record: FILE.json, FILE.svg and FILE.md")
    parser.add_argument("--draw", type=Path, help="run nothing: draw the picture of this record, FILE.json")
    flags = parser.parse_args()
    if flags.draw:
        trace = json.loads(flags.draw.read_text(encoding="utf-8"))
        flags.draw.with_suffix(".svg").write_text(_picture(_read_trace(trace)), encoding="utf-8")
        return
    gpus = torch.cuda.device_count()
    spans = run_local(recorded, gpus or 4, (flags.rows, gpus > 0), threads=1)[0]
    out = Path(flags.out)
    out.with_suffix(".json").write_text(json.dumps({"traceEvents": list(_trace(spans))}), encoding="utf-8")
    out.with_suffix(".svg").write_text(_picture(spans), encoding="utf-8")
    out.with_suffix(".md").write_text(_table(spans, out.name, flags.rows, gpus), encoding="utf-8")
    print(_table(spans, out.name, flags.rows, gpus))


def recorded(rank: int, rows: int, cuda: bool) -> dict[str, dict[str, list[Span]]]:
    """By type: spans (start, stop, name) in milliseconds of attention kernels and of messages."""
    all_gather.SLICE_BYTES = all_to_all.SLICE_BYTES = ring.HALVES_BYTES = 0  # in this process only
    with World(Layout(torch.cuda.device_count() if cuda else 4)) as world:
        return {kind: _of_type(kind, rows, world) for kind in TYPES}


def _of_type(kind: str, rows: int, world: World) -> dict[str, list[Span]]:
    slots = world.home.slots
    sizes = (2, slots // 2) if kind == "a2a+p2p" else None
    plan = plan_fixed([rows], world.home, slots, cp_comm_type=kind, hierarchical_context_parallel_sizes=sizes)
    world.prepare(plan)
    shard = bind(plan.micro_batches[0], world)
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    q, k, v = (
        torch.randn(shard.local_rows, n, 64, device=world.device, dtype=dtype, requires_grad=True) for n in (16, 8, 8)
    )
    for _ in range(2):
        attend(q, k, v, shard).sum().backward()
    world.control.barrier("start")
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if dtype == torch.bfloat16 else [])]) as p:
        attend(q, k, v, shard).sum().backward()
        if dtype == torch.bfloat16:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        p.export_chrome_trace(str(path := Path(folder) / "trace.json"))
        events = [e for e in json.loads(path.read_text())["traceEvents"] if e.get("ph") == "X"]
    return _attention_spans(events)


def _attention_spans(events: Iterable[dict[str, Any]]) -> dict[str, list[Span]]:
    """Kernels of attention and messages; on a CPU a message is gloo's, from its start to its end."""
    by_lane: dict[str, list[Span]] = {"computes": [], "travels": []}
    for event in events:
        name = event["name"]
        low, device = name.lower(), event.get("cat") == "kernel"
        span = (event["ts"] / 1e3, (event["ts"] + event["dur"]) / 1e3, name[:60])
        if low.startswith("gloo:") or (device and "nccl" in low):
            by_lane["travels"].append(span)
        elif (device and "flash" in low) or name.startswith("aten::_scaled_dot_product_flash_attention_for_cpu"):
            by_lane["computes"].append(span)
    first = min(span[0] for spans in by_lane.values() for span in spans)
    return {lane: sorted((a - first, b - first, name) for a, b, name in spans) for lane, spans in by_lane.items()}


def _trace(by_type: dict[str, dict[str, list[Span]]]) -> Iterable[dict[str, Any]]:
    for process, (kind, lanes) in enumerate(by_type.items()):
        yield {"ph": "M", "pid": process, "name": "process_name", "args": {"name": kind}}
        for thread, (lane, spans) in enumerate(lanes.items()):
            yield {"ph": "M", "pid": process, "tid": thread, "name": "thread_name", "args": {"name": lane}}
            for start, stop, name in spans:
                event = {"ph": "X", "pid": process, "tid": thread, "name": name}
                yield event | {"ts": round(start * 1e3, 1), "dur": round((stop - start) * 1e3, 1)}


def _read_trace(trace: dict[str, list[dict[str, Any]]]) -> dict[str, dict[str, list[Span]]]:
    """The spans of a trace that `_trace` wrote."""
    kinds, lanes, spans = dict[int, str](), dict[tuple[int, int], str](), dict[str, dict[str, list[Span]]]()
    for event in trace["traceEvents"]:
        process = event["pid"]
        if event["name"] == "process_name":
            kinds[process] = event["args"]["name"]
        elif event["name"] == "thread_name":
            lanes[process, event["tid"]] = event["args"]["name"]
        else:
            start, lane = event["ts"] / 1e3, lanes[process, event["tid"]]
            by_lane = spans.setdefault(kinds[process], {}).setdefault(lane, [])
            by_lane.append((start, start + event["dur"] / 1e3, event["name"]))
    return spans


def _sums(lanes: dict[str, list[Span]]) -> tuple[float, float, float]:
    """Milliseconds in which something is computed, in which something travels, and in which both happen."""
    computes, travels = (merge_intervals([span[:2] for span in lanes[lane]]) for lane in ("computes", "travels"))
    both = sum(max(0.0, min(b, d) - max(a, c)) for a, b in computes for c, d in travels)
    return sum(b - a for a, b in computes), sum(b - a for a, b in travels), both


def _picture(by_type: dict[str, dict[str, list[Span]]]) -> str:
    """Two lanes a type, each type on its own scale."""
    width, lines = 760, list[str]()
    for row, (kind, lanes) in enumerate(by_type.items()):
        end, y = max(span[1] for spans in lanes.values() for span in spans), 20 + 62 * row
        lines.append(f'<text x="4" y="{y + 12}" class="kind">{kind}</text>')
        lines.append(f'<text x="{width + 116}" y="{y + 12}" text-anchor="end">{end:.0f} ms</text>')
        for i, (lane, spans) in enumerate(lanes.items()):
            top = y + 18 + 18 * i
            lines.append(f'<text x="4" y="{top + 11}">{lane}</text>')
            for a, b, _ in spans:
                box = f'x="{110 + a / end * width:.1f}" y="{top}" width="{max(0.8, (b - a) / end * width):.1f}"'
                lines.append(f'<rect {box} height="14" fill="var(--{lane})" fill-opacity="0.75"/>')
    size = f'viewBox="0 0 {width + 120} {30 + 62 * len(by_type)}" role="img"'
    title = "<title>What is computed and what travels, by communication type</title>"
    background = '<rect width="100%" height="100%" fill="var(--paper)"/>'
    body = "\n".join([title, STYLE, background, *lines])
    return f'<svg xmlns="http://www.w3.org/2000/svg" {size}>\n{body}\n</svg>\n'


def _table(spans: dict[str, dict[str, list[Span]]], name: str, rows: int, gpus: int) -> str:
    where = f"{gpus} GPUs" if gpus else "4 local CPU processes (gloo)"
    lines = [f"# What travels while attention is computed: {where}, {rows:,} rows", ""]
    lines += [f"![timeline]({name}.svg)", "", "One forward and backward pass, first rank, milliseconds."]
    lines += ["", "| type | computes | travels | of that, while computing |", "| --- | --- | --- | --- |"]
    for kind, lanes in spans.items():
        computes, travels, both = _sums(lanes)
        lines.append(f"| {kind} | {computes:.1f} | {travels:.1f} | {both:.1f} ({100 * both / travels:.0f} %) |")
    versioned = ", ".join(f"{key} {value}" for key, value in versions().items())
    command = f"python bench/attention/attention_overlap.py --rows {rows} --out bench/records/{name}"
    lines += ["", f"Machine: {machine_text(machine_facts())}. Versions: {versioned}. Command: `{command}`.", ""]
    return "\n".join(lines)


if __name__ == "__main__":
    main()
