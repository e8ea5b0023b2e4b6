"""What the bridge costs the host of one rank: making its plans, and launching a call.

One process is rank 0 of eight, on torch's `fake` process group, whose exchanges complete at once.
"""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from bench.attention.attention_host import OneRank, Operators
from bridge_layouts import CASES, BridgeCase, with_rows

from longspan import Bridge, World
from longspan.bridge.bridge import forget_plans

HIDDEN = 8
CALL_ROWS = 64  # of a replica: few, so that copies take no time
REPEATS = 300


def plan_rows(totals: Sequence[int]) -> Iterator[dict[str, Any]]:
    """Milliseconds of plans of so many rows in all, and what a call comes to, for every layout over eight ranks."""
    torch.set_num_threads(1)
    for layout in CASES[8]:
        world = OneRank(layout.home, torch.device("cpu"))
        try:
            row: dict[str, Any] = {"layout": layout.name, "TP·DP → TP·CP·DP": layout.label}
            for total in totals:
                first, again = _plan_seconds(with_rows(layout, total // layout.dp, HIDDEN), world)
                row |= {
                    f"plan of {total:,} rows, ms": 1e3 * first,
                    f"the same layout of {total:,} rows again, ms": 1e3 * again,
                }
            yield row | _calls(with_rows(layout, CALL_ROWS, HIDDEN), world)
        finally:
            dist.destroy_process_group()


def _plan_seconds(case: BridgeCase, world: World) -> tuple[float, float]:
    """Of a bridge between new layouts, and of one between layouts that were bridged before: the least of three."""
    seconds: tuple[list[float], list[float]] = [], []
    for _ in range(3):
        forget_plans()
        for times in seconds:
            begun = time.process_time()
            Bridge(case.have(), case.need(), world, gradient=case.gradient)
            times.append(time.process_time() - begun)
    return min(seconds[0]), min(seconds[1])


def _calls(case: BridgeCase, world: World) -> dict[str, float]:
    """Microseconds and operators of forward and of backward."""
    bridge = Bridge(case.have(), case.need(), world, gradient=case.gradient)
    x = torch.zeros(case.have().counts[0], HIDDEN, requires_grad=True)
    y = bridge(x)
    gradient = torch.ones_like(y)
    row: dict[str, float] = {}
    runs: dict[str, Callable[[], object]] = {
        "forward": lambda: bridge(x),
        "backward": lambda: torch.autograd.grad(y, x, gradient, retain_graph=True),
    }
    for name, run in runs.items():
        counts: Counter[str] = Counter()
        row[f"{name}, µs"] = 1e6 * _least_seconds(run)
        with Operators(counts):
            run()
        row |= {f"{name} {what}": counts[what] for what in ("operators", "computing", "distributed")}
    return row


def _least_seconds(run: Callable[[], object]) -> float:
    seconds = []
    for _ in range(REPEATS):
        begun = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begun)
    return min(seconds)
