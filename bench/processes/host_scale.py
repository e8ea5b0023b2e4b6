"""What a rank's host side costs as ranks grow: sockets, messages, bytes and requests to the store, counted and fitted.

    python bench/processes/host_scale.py --ranks 2,8,32,64 --out bench/records/host-scale.json

Gloo processes on this machine open a world and make the calls of a step and of a run, without a model. The kernel
counts: every TCP socket of a process has counters of the bytes and of the data segments that were sent on it
(TCP_INFO; Linux 4.19 or later), and a small message is one segment. Sockets whose other end is the store's port are the
store's, all others lead to other ranks, so nothing that torch or gloo does in C++ is left out. Each figure is the most
of any rank. Fits, from 8 ranks on: constant, a + b log2 n, or a + b n, the first that is within 10%, or within 1, of
every count. Processes share the cores, so times are not fitted. Groups of a CPU's tensors connect all ranks with all;
on GPUs their messages travel over NCCL, which is not counted here. What gloo takes of such a group is in the rows
"group on GPUs". An idle rank asks the store five times a second up to 200 ranks, then less often, once in two seconds
from 2000 ranks on.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np

from longspan import Layout, World
from longspan.bench.benches import origin_text, write_record
from longspan.cli.machine import machine_facts
from longspan.comm import raise_first_error, run_local
from longspan.comm.all_ranks import run_on_every_rank
from longspan.comm.channel import Channels
from longspan.comm.received_signals import StopSignal, find_received_signal
from longspan.errors import CommError
from longspan.plain_text import markdown_table
from longspan.versions import versions

DIGEST = "0f" * 32


def calls_of_a_step(world: World) -> None:
    """What a step of a run asks of all ranks: `World.prepare` and the reading of rows compare plans."""
    world.control.compare_digests(DIGEST)
    world.control.compare_digests(DIGEST)
    world.control.sum_over_ranks([1.0, 2.0, 3.0])
    world.control.flags_on_any_rank(False, False)


CALLS: dict[str, Callable[[World], object]] = {
    "step: all of the following, the first twice": calls_of_a_step,
    "step: comparison of plans": lambda world: world.control.compare_digests(DIGEST),
    "step: loss and norm": lambda world: world.control.sum_over_ranks([1.0, 2.0, 3.0]),
    "step: agreement on the end": lambda world: world.control.flags_on_any_rank(False, False),
    "run: errors of a rank, none": lambda world: raise_first_error(world, None),
    "run: work of every rank": lambda world: run_on_every_rank(world, int, CommError),
    "run: signal received, none": lambda world: find_received_signal(world, StopSignal().received),
    "run: broadcast of an object": lambda world: world.control.broadcast_object(DIGEST),
    "run: gather of an object": lambda world: world.control.gather_objects(DIGEST),
    "run: barrier": lambda world: world.control.barrier(),
}
FORMS: dict[str, Callable[[Any], Any]] = {"1": lambda n: 0 * n, "log n": np.log2, "n": lambda n: 1.0 * n}
TIMES = " ms"  # of more processes than cores, so not fitted
FORM_ERROR = 0.1  # of the slowest growth that is taken
FITTED_FROM = 8  # ranks: among fewer, gloo's rings cut a message into fewer pieces


def main() -> None:
    flags = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    flags.add_argument("--ranks", default="2,8,32,64", help="numbers of ranks, one after the other")
    flags.add_argument("--repeats", type=int, default=20, help="calls of each kind")
    flags.add_argument("--idle-seconds", type=float, default=10.0, help="how long the answering threads are watched")
    flags.add_argument("--extrapolate", type=int, default=8192)
    flags.add_argument("--out", type=Path)
    settings = flags.parse_args()
    rows = dict[str, dict[str, float]]()
    for ranks in map(int, settings.ranks.split(",")):
        by_rank = run_local(_measured, ranks, (ranks, settings.repeats, settings.idle_seconds), timeout=3600)
        rows[str(ranks)] = {name: max(figures[name] for figures in by_rank) for name in by_rank[0]}
        print(f"{ranks} ranks are counted", file=sys.stderr, flush=True)
    about = {"machine": machine_facts(), "versions": versions(), "command": " ".join(["python", *sys.argv])}
    record = {"bench": "host-scale", **about, "extrapolated to": settings.extrapolate, "rows": rows}
    record["fits"] = {
        name: _fit({int(n): row[name] for n, row in rows.items()}, settings.extrapolate)
        for name in next(iter(rows.values()))
        if not name.endswith(TIMES)
    }
    if settings.out is not None:
        write_record(record, settings.out, _text(record))
    print(_text(record))


@dataclass(frozen=True)
class Traffic:
    """What this process holds and has sent so far, by the kernel's counters."""

    peer_sockets: int
    peer_messages: int
    peer_bytes: int
    store_sockets: int
    store_messages: int
    store_bytes: int

    def __sub__(self, other: "Traffic") -> "Traffic":
        return Traffic(*(a - b for a, b in zip(vars(self).values(), vars(other).values(), strict=True)))


def traffic() -> Traffic:
    """The traffic of this process's TCP sockets; the store's are those connected to MASTER_PORT."""
    store_port = int(os.environ["MASTER_PORT"])
    counts = {True: [0, 0, 0], False: [0, 0, 0]}
    for entry in Path("/proc/self/fd").iterdir():
        try:
            if not stat.S_ISSOCK(entry.stat().st_mode):
                continue
            with socket.socket(fileno=os.dup(int(entry.name))) as connection:
                if connection.family not in (socket.AF_INET, socket.AF_INET6) or connection.type != socket.SOCK_STREAM:
                    continue
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
                port = connection.getpeername()[1]
        except OSError:  # it was closed meanwhile, or is not connected
            continue
        segments = struct.unpack_from("<I", info, 156)[0]
        sent = struct.unpack_from("<Q", info, 200)[0]
        for index, value in enumerate((1, segments, sent)):
            counts[port == store_port][index] += value
    return Traffic(*counts[False], *counts[True])


def _measured(_: int, ranks: int, repeats: int, idle_seconds: float) -> dict[str, float]:
    before = traffic()
    of_parents = list[Traffic]()
    with mock.patch.object(Channels, "__init__", _counting(Channels.__init__, of_parents)):
        world = World(Layout(ranks=ranks), backend="gloo")
        world.__enter__()
    with ExitStack() as open_world:
        open_world.push(world)
        figures = _opened("open, host values", traffic() - before - of_parents[0])
        figures |= _opened("open, tensors of a CPU", of_parents[0]) | _process("open")
        before = traffic()
        assert world.meshes.fsdp.size() == ranks
        figures |= _opened("mesh of FSDP2 on a CPU", traffic() - before)
        before = traffic()
        world.process_groups.make_group(range(ranks), "replicate", backend="cpu:gloo")
        figures |= _opened("group on GPUs, gloo", traffic() - before)
        for name, call in CALLS.items():
            figures |= _of_call(world, name, call, repeats)
        figures |= _process("after all calls") | {"after all calls: sockets to ranks": traffic().peer_sockets}
        world.control.barrier()
        time.sleep(1.0)
        before = traffic()
        began = time.perf_counter()
        time.sleep(idle_seconds)
        idle = traffic() - before
        figures["idle: requests to the store a second"] = idle.store_messages / (time.perf_counter() - began)
        world.control.barrier()
    return figures


def _counting(make: Callable[..., None], counts: list[Traffic]) -> Callable[..., None]:
    def make_and_count(channels: Channels, *arguments: Any) -> None:
        before = traffic()
        make(channels, *arguments)
        counts.append(traffic() - before)

    return make_and_count


def _opened(name: str, change: Traffic) -> dict[str, float]:
    return {
        f"{name}: sockets to ranks": change.peer_sockets,
        f"{name}: requests to the store": change.store_messages,
        f"{name}: bytes to the store": change.store_bytes,
    }


def _process(name: str) -> dict[str, float]:
    lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
    words = {line.split(":")[0]: line.split()[1] for line in lines if len(line.split()) > 1}
    return {
        f"{name}: descriptors": len(list(Path("/proc/self/fd").iterdir())),
        f"{name}: threads": int(words["Threads"]),
    }


def _of_call(world: World, name: str, call: Callable[[World], object], repeats: int) -> dict[str, float]:
    """Messages, bytes and CPU time of one of several calls; the first, which may connect ranks, is not counted."""
    call(world)
    world.control.barrier()
    before = traffic()
    cpu = time.process_time()
    for _ in range(repeats):
        call(world)
    cpu = time.process_time() - cpu
    change = traffic() - before
    return {
        f"{name}: messages": change.peer_messages / repeats,
        f"{name}: bytes": change.peer_bytes / repeats,
        f"{name}: CPU ms": 1000 * cpu / repeats,
    }


def _fit(values: dict[int, float], at: int) -> dict[str, Any]:
    """The slowest growth that describes the values, and the value at another number of ranks."""
    fitted = {n: value for n, value in values.items() if n >= FITTED_FROM} or values
    ranks = np.array(list(fitted), float)
    counted = np.array(list(fitted.values()), float)
    best: dict[str, Any] = {}
    for form, grow in FORMS.items():
        terms = np.stack([np.ones_like(ranks), grow(ranks)], 1)
        weights = 1 / np.maximum(counted, 1e-9)
        a, b = np.linalg.lstsq(terms * weights[:, None], counted * weights, rcond=None)[0]
        error = float(np.max(np.abs(terms @ [a, b] - counted) / np.maximum(np.abs(counted), 1e-9)))
        fit = {"form": form, "a": float(a), "b": float(b), "error": error, "there": float(a + b * grow(np.float64(at)))}
        if np.all(np.abs(terms @ [a, b] - counted) <= np.maximum(1, FORM_ERROR * np.abs(counted))):
            return fit
        best = fit if not best or error < best["error"] else best
    return best


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 or value == round(value) else f"{value:.3g}"


def _text(record: dict[str, Any]) -> str:
    rows = record["rows"]
    there = record["extrapolated to"]
    columns = ["of the rank with the most", *(f"{n} ranks" for n in rows), "growth", f"{there:,} ranks"]
    lines = list[list[str]]()
    for name in next(iter(rows.values())):
        cells = [_number(row[name]) for row in rows.values()]
        fit = record["fits"].get(name)
        cells += [""] * 2 if fit is None else [fit["form"], _number(fit["there"])]
        lines.append([name, *cells])
    about = (__doc__ or "").split("\n\n")[2].replace("\n", " ").strip()
    title = "# What a rank's host side costs, by the number of ranks"
    return "\n\n".join([title, origin_text(record), about, markdown_table(columns, lines)]) + "\n"


if __name__ == "__main__":
    main()
