"""What each rank does for `bench/bridge/bridge.py`: compare both designs, then time them and the bridge's bytes alone.

All ranks begin together on their devices: behind a pause in which the host runs ahead, and a sum of one number over all
ranks. Designs take turns. A time is the median over the turns of the slowest rank; what the host takes until it has
launched everything is apart from it. On CPUs times are whole calls.
"""

import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
import torch.distributed as dist
from bench.begun import open_record
from bench.profiled import profile_run
from bridge_gather import GatherBridge
from bridge_layouts import CASES, BridgeCase, with_rows
from bridge_plain import PlainExchange, components, equal_counts
from bridge_record import as_markdown
from torch import Tensor

from longspan import Bridge, Exchange, World
from longspan.bench.record import write_record
from longspan.bench.timing import time_run

WARMUP = 3
PAUSE_CYCLES = 6_000_000  # of a GPU's clock, about 3 ms: longer than the host takes for any call here
Runs = dict[str, Callable[[], Any]]


@dataclass(frozen=True, kw_only=True)
class BridgeSettings:
    """What is measured, on which ranks, and where it is written."""

    ranks: int
    backend: str
    nodes: int
    layouts: tuple[str, ...]
    rows: tuple[int, ...]
    hidden: int
    repeats: int
    profile: bool
    timeout: float
    out: Path | None


def measure(rank: int, settings: BridgeSettings) -> dict[str, Any]:
    """The record; the first rank writes it after every row, and rows that it has already are left out."""
    about = {name: value for name, value in asdict(settings).items() if name in ("ranks", "nodes", "hidden", "repeats")}
    record = open_record("bridge", settings.out, settings.backend, Path(__file__).parent) | about
    record.setdefault("rows", [])
    for layout in CASES[settings.ranks]:
        if layout.name not in settings.layouts:
            continue
        with World(layout.home, backend=settings.backend, timeout=settings.timeout) as world:
            done = world.control.broadcast_object([(row["layout"], row["rows"]) for row in record["rows"]])
            for rows in settings.rows:
                case = with_rows(layout, rows, settings.hidden)
                if (case.name, case.rows) not in done:
                    record["rows"].append(_row(case, world, settings))
                    if rank == 0 and settings.out is not None:
                        write_record(record, settings.out, as_markdown(record))
    return record


def _row(case: BridgeCase, world: World, settings: BridgeSettings) -> dict[str, Any]:
    """Check and time one case."""
    there = Exchange(case.have(), case.need())
    back = there.reverse()  # every row is needed, at one slot
    runs, results = _designs(case, world)
    _check(case, world, results)
    del results
    busiest: dict[str, int] = {}
    groups = components(there.counts + back.counts, world.rank)
    for direction, counts in (("forward", there.counts), ("backward", back.counts)):
        equal, busiest[direction] = equal_counts(counts, groups.ranks)
        for name, table in (("own bytes", equal), ("uneven", counts)):
            exchange = PlainExchange(table, groups, world.rank, case.hidden, _dtype(world), world.device)
            runs[f"{name} {direction}"] = exchange.run
    row = {"layout": case.name, "degrees": case.label, "rows": case.rows, "dtype": str(_dtype(world))}
    row |= {"positions": case.positions} | _times(runs, world, settings.repeats)
    row |= _mib(case, there, back, busiest, _dtype(world).itemsize)
    if settings.profile:
        row["kernels"] = {n: profile_run(run, world)[1] for n, run in runs.items() if n.startswith("bridge")}
    return row


def _designs(case: BridgeCase, world: World) -> tuple[Runs, dict[str, tuple[Tensor, Tensor]]]:
    """Forward and backward of both designs, and what they gave in one pass: rows, and gradients of rows."""
    dtype, device = _dtype(world), world.device
    x, gradient = _inputs(case, world.rank, dtype, device)
    gather, same = GatherBridge(case, world.rank, device, dtype), x.detach()
    runs: Runs = {
        "gathering forward": lambda: gather.forward(same),
        "gathering backward": lambda: gather.backward(gradient),
    }
    bridge = Bridge(case.have(), case.need(), world, gradient=case.gradient)
    runs["bridge forward"] = partial(bridge, x)
    runs["bridge backward"] = partial(torch.autograd.grad, bridge(x), x, gradient, retain_graph=True)
    y, (back,) = runs["bridge forward"](), runs["bridge backward"]()
    return runs, {"rows": (y, gather.forward(same)), "gradients": (back, gather.backward(gradient))}


def _inputs(case: BridgeCase, rank: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    """Rows of this rank's encoder replica, and gradients of the rows of its slot; equal on tensor-parallel ranks."""
    random = torch.Generator(device)
    tensors = []
    for seed, rows in (
        (rank // case.encoder_tp, case.have().counts[rank]),
        (rank // case.tp, case.need().counts[rank]),
    ):
        random.manual_seed(seed)
        tensors.append(torch.randn(rows, case.hidden, generator=random, dtype=dtype, device=device))
    return tensors[0].requires_grad_(), tensors[1]


def _check(case: BridgeCase, world: World, results: dict[str, tuple[Tensor, Tensor]]) -> None:
    """Refuse to time what is not the same, on every rank."""
    wrong = [name for name, (ours, theirs) in results.items() if not torch.equal(ours, theirs)]
    for rank, names in enumerate(world.control.gather_objects(wrong)):
        if names:
            raise RuntimeError(
                f"{case.label}, {case.rows} rows: {' and '.join(names)} of both designs differ at {rank}"
            )


def _times(runs: Runs, world: World, repeats: int) -> dict[str, dict[str, float]]:
    """Seconds of each run, on the devices and on the hosts."""
    turns: dict[str, list[tuple[float, float]]] = {name: [] for name in runs}
    for turn in range(WARMUP + repeats):
        for name, run in runs.items():
            times = _once(run, world)
            if turn >= WARMUP:
                turns[name].append(times)
    slowest = {name: np.max(world.control.gather_objects(times), axis=0) for name, times in turns.items()}
    seconds, host = ({name: statistics.median(times[:, i].tolist()) for name, times in slowest.items()} for i in (0, 1))
    return {"seconds": seconds, "host_seconds": host}


def _once(run: Callable[[], object], world: World) -> tuple[float, float]:
    if world.device.type != "cuda":
        seconds = time_run(run, world)
        return seconds, seconds
    start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda._sleep(PAUSE_CYCLES)
    dist.all_reduce(torch.zeros(1, device=world.device))
    start.record()
    begun = time.perf_counter()
    run()
    host = time.perf_counter() - begun
    stop.record()
    torch.cuda.synchronize()
    return start.elapsed_time(stop) * 1e-3, host


def _mib(case: BridgeCase, there: Exchange, back: Exchange, busiest: dict[str, int], itemsize: int) -> dict[str, Any]:
    """MiB that a rank receives, mean over the ranks, and what the busiest rank sends or receives."""
    mib = case.hidden * itemsize / 2**20
    mean = {name: float(table.counts.sum()) / case.ranks for name, table in (("forward", there), ("backward", back))}
    gathered = dict(zip(("forward", "backward"), case.gathered_rows(), strict=True))
    tables = {"bridge": mean, "gathering": gathered, "busiest": busiest}
    return {"mib": {name: {d: rows * mib for d, rows in table.items()} for name, table in tables.items()}}


def _dtype(world: World) -> torch.dtype:
    return torch.bfloat16 if world.device.type == "cuda" else torch.float32
