"""The ranks of `attention_types.py`: check at a short length, then time every type and peer at every length."""

import math
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from bench.attention.type_cases import (
    AttentionCase,
    AttentionSettings,
    Run,
    lengths_of,
    own_cases,
    peer_cases,
    sinks_of,
    tensors_of,
)
from bench.begun import missing_row
from torch import Tensor

from longspan.attention import AttendCall, Mask, choose_kernel
from longspan.bench.record import write_unfinished
from longspan.cli.machine import machine_facts
from longspan.comm import World
from longspan.layout import Layout
from longspan.versions import versions

CHECK_ROWS = 256  # of each rank, in the comparison with dense attention
TOLERANCE = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 2e-2}  # relative, of the 2-norm


def attention_ranks(rank: int, settings: AttentionSettings) -> dict[str, Any]:
    """Open a world, check and time everything; the record, equal on every rank."""
    backend = None if settings.backend == "nccl" else "gloo"
    with World(Layout(settings.ranks), backend=backend, timeout=settings.timeout_seconds) as world:
        if world.device.type == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = False
        record = _empty_record(settings, world)
        cases = [*own_cases(settings), *(peer_cases() if settings.peers else [])]
        for case in cases:
            record["checks"].append({"name": case.name} | _or_missing(case, _check, settings, case, world))
        for case in cases:
            for length in settings.lengths:
                row = _or_missing(case, _measure, settings, case, length, world)
                record["rows"].append({"name": case.name, "length": length} | row)
                _keep(record, settings, rank)
    return record


def _empty_record(settings: AttentionSettings, world: World) -> dict[str, Any]:
    sizes = ("documents", "partition", "window", "sinks", "heads", "key_value_heads", "head_size", "dtype")
    return {
        "bench": "attention",
        **{name: getattr(settings, name) for name in (*sizes, "warmup", "warm_seconds", "repeats", "ranks", "command")},
        "kernel": _kernel(settings, world),
        "backend": world.backend,
        "check_length": CHECK_ROWS * settings.ranks,
        "machine": machine_facts(),
        "versions": versions(),
        "checks": [],
        "rows": [],
    }


def _kernel(settings: AttentionSettings, world: World) -> str:
    sizes = (settings.heads, settings.key_value_heads, settings.head_size, settings.head_size)
    mask = Mask(window=settings.window or None)
    call = AttendCall(*sizes, getattr(torch, settings.dtype), world.device, mask)
    return choose_kernel(call, settings.kernel or None).name


def _keep(record: dict[str, Any], settings: AttentionSettings, rank: int) -> None:
    """Rows that are finished stay where a bench is interrupted; a terminal is told as they come."""
    if rank:
        return
    write_unfinished(record, settings.out)
    if sys.stderr.isatty():
        row = record["rows"][-1]
        print(f"{row['name']}, {row['length']} rows: {row.get('missing') or row['seconds']}", file=sys.stderr)


def _or_missing(case: AttentionCase, measure: Callable[..., dict[str, Any]], *args: Any) -> dict[str, Any]:
    """The result of `measure`, or why a peer did not run."""
    try:
        return measure(*args)
    except Exception as error:
        if not case.peer:
            raise
        return missing_row(error)


def _check(settings: AttentionSettings, case: AttentionCase, world: World) -> dict[str, Any]:
    """Errors of output and gradients against dense attention in float32 (2-norms, relative)."""
    qkv = tensors_of(settings, CHECK_ROWS * settings.ranks, world)
    with case.prepare(settings, qkv, world) as run:
        out = run.forward()
        gradients = run.backward(out)
        with torch.no_grad():
            results = [run.whole(x.detach()) for x in (out, *gradients)]
    exact = _dense(settings, qkv)
    pairs = zip(("output", "dq", "dk", "dv"), results, exact, strict=True)
    errors = {name: _distance(a, b) for name, a, b in pairs}
    tolerance = TOLERANCE[getattr(torch, settings.dtype)]
    return {"errors": errors, "tolerance": tolerance, "good": all(e <= tolerance for e in errors.values())}


def _dense(settings: AttentionSettings, qkv: tuple[Tensor, ...]) -> list[Tensor]:
    """Output and gradients of causal attention on whole documents, in float32."""
    q, k, v, gradient = (x.float() for x in qkv)
    q, k, v = q.requires_grad_(), k.requires_grad_(), v.requires_grad_()
    repeat = settings.heads // settings.key_value_heads
    sizes = lengths_of(settings, len(q))
    outs = []
    for a, b, c in zip(q.split(sizes), k.split(sizes), v.split(sizes), strict=True):
        b, c = b.repeat_interleave(repeat, 1), c.repeat_interleave(repeat, 1)
        scores = torch.einsum("snh,tnh->nst", a, b) * settings.head_size**-0.5
        seen = torch.ones(len(a), len(a), dtype=torch.bool, device=a.device).tril()
        if settings.window:
            seen = seen.triu(1 - settings.window)
        scores, sinks = scores.masked_fill(~seen, float("-inf")), sinks_of(settings, a.device)
        if sinks is not None:
            scores = torch.cat([scores, sinks[:, None, None].expand(-1, len(a), 1)], 2)
        outs.append(torch.einsum("nst,tnh->snh", scores.softmax(-1)[:, :, : len(a)], c))
    out = torch.cat(outs)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), gradient)]


def _distance(result: Tensor, exact: Tensor) -> float:
    return ((result.double() - exact.double()).norm() / exact.double().norm()).item()


def _measure(settings: AttentionSettings, case: AttentionCase, length: int, world: World) -> dict[str, Any]:
    """Medians of forward, and of forward and backward, on the slowest rank."""
    cuda = world.device.type == "cuda"
    qkv = tensors_of(settings, length, world)
    if cuda:
        torch.cuda.empty_cache()
    with case.prepare(settings, qkv, world) as run:
        del qkv
        if cuda:
            torch.cuda.reset_peak_memory_stats()
        times = _times(run, settings, world)
        peak = torch.cuda.max_memory_allocated() if cuda else 0
    of_ranks = world.control.gather_objects(
        (statistics.median(t[0] for t in times), statistics.median(t[1] for t in times), peak)
    )
    forward, both, peak = (max(x[i] for x in of_ranks) for i in range(3))
    return {
        "forward_seconds": forward,
        "seconds": both,
        "tflops_per_device": 3.5 * forward_flops(settings, length) / both / settings.ranks / 1e12,
        "peak_bytes": peak,
    }


def forward_flops(settings: AttentionSettings, length: int) -> float:
    """FLOPs of two matrix products over the lower half of each document's square, or over the window's band in it."""
    pairs = 0.0
    for n in lengths_of(settings, length):
        window = min(settings.window or n, n)
        pairs += n * window - window * window / 2
    return 4 * pairs * settings.heads * settings.head_size


def _times(run: Run, settings: AttentionSettings, world: World) -> Sequence[tuple[float, float]]:
    """Seconds of forward, and of both passes, of each timed run.

    A GPU that has rested has higher clocks than one in training, for some tenths of a second: warm-up runs go on until
    `warm_seconds` are over, as many on every rank.
    """
    cuda = world.device.type == "cuda"
    warm = _passes(run, settings.warmup, cuda)
    slowest = max(world.control.gather_objects(warm[-1][1] if warm else 0.0))
    more = math.ceil(settings.warm_seconds / slowest) if cuda and slowest else 0
    return _passes(run, more + settings.repeats, cuda)[more:]


def _passes(run: Run, count: int, cuda: bool) -> list[tuple[float, float]]:
    marks: list[tuple[Any, Any, Any]] = []
    for _ in range(count):
        start = _mark(cuda)
        out = run.forward()
        middle = _mark(cuda)
        run.backward(out)
        marks.append((start, middle, _mark(cuda)))
    if cuda:
        torch.cuda.synchronize()
    return [(_between(a, b), _between(a, c)) for a, b, c in marks]


def _mark(cuda: bool) -> Any:
    if not cuda:
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _between(start: Any, stop: Any) -> float:
    return stop - start if isinstance(start, float) else start.elapsed_time(stop) * 1e-3
