"""Seconds of the bridge between two layouts, beside a design that gathers every row and beside its bytes alone.

    python bench/bridge/bridge_time.py --out FILE.json                         # a rank for each GPU; on CPUs, small
    python bench/bridge/bridge_time.py --received --out bench/records/bridge-bytes.json   # bytes, by arithmetic alone
    bench/two_nodes.sh --rate 1.25G python bench/bridge/bridge_time.py --out FILE.json     # over two emulated nodes

Before anything is timed, both designs have given every rank the same rows and gradients, bit for bit.
"""

import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from longspan import Bridge, Exchange, Layout, Partition, World
from longspan.bench.benches import BenchFlags, origin_text, show_record, write_record
from longspan.bench.calibrate import time_run
from longspan.cli.flags import check_flags_at_least, parse_flags
from longspan.cli.machine import machine_facts
from longspan.cli.processes import run_on_ranks
from longspan.errors import ConfigError
from longspan.plain_text import markdown_table, text_table
from longspan.versions import versions

PROGRAM = "bench/bridge/bridge_time.py"
CPU_RANKS = 4
PERIOD = 2048  # positions of a text and the image after it, where documents are long enough
# torch 2.13 renamed all_gather_into_tensor and warns about the old name.
_all_gather: Callable[..., Any] = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor


@dataclass(frozen=True)
class Case:
    """An encoder on TP·DP ranks, and a language model on TP·CP·DP of the same ranks, tp first and dp last.

    Each replica of the language model has `documents` documents of `positions` positions, text and images in turn, of
    which images take `share`; zigzag over its cp slots. Encoder replicas have the images of equally many positions.
    """

    encoder: tuple[int, int]
    model: tuple[int, int, int]
    positions: int = 65536
    documents: int = 1
    share: float = 0.5
    hidden: int = 4096

    @property
    def name(self) -> str:
        return f"{'·'.join(map(str, self.encoder))} → {'·'.join(map(str, self.model))}"

    @property
    def home(self) -> Layout:
        tp, cp, dp = self.model
        return Layout(tp * cp * dp, tp=tp)

    @cached_property
    def is_image(self) -> np.ndarray:
        """Which positions of one replica's documents, end to end, are an image's."""
        period = min(PERIOD, max(2, self.positions // 8))
        return np.tile(np.arange(self.positions) % period >= round(period * (1 - self.share)), self.documents)

    @property
    def rows(self) -> int:
        """Rows of images of one replica of the language model."""
        return int(self.is_image.sum())

    @cached_property
    def have(self) -> Partition:
        tp, dp = self.encoder
        return Partition.from_rows(
            [part for part in np.split(np.arange(self.rows * self.model[2]), dp) for _ in range(tp)]
        )

    @cached_property
    def need(self) -> Partition:
        tp, cp, dp = self.model
        row_of = np.cumsum(self.is_image) - 1
        zigzag = Partition.zigzag([self.positions] * self.documents, cp)
        lines = list[np.ndarray]()
        for replica in range(dp):
            for member in range(cp):
                places = zigzag.rows(member)
                lines += [row_of[places[self.is_image[places]]] + replica * self.rows] * tp
        return Partition.from_rows(lines)

    def received_rows(self) -> tuple[float, float]:
        """Rows that a rank receives by the bridge, forward and backward: the mean over ranks."""
        there = Exchange(self.have, self.need)
        back = Exchange(self.need, self.have)
        means = [float(np.mean([way.received_rows(rank) for rank in self.home.ranks])) for way in (there, back)]
        return means[0], means[1]

    def gathered_rows(self) -> tuple[float, float]:
        """Rows that a rank receives by the design that gathers, with ring collectives."""
        cp = self.model[1]
        encoders_each = self.encoder[1] / self.model[2]
        gathered = max(0.0, 1 - 1 / encoders_each) * self.rows
        return gathered, (2 * (1 - 1 / cp) + max(0.0, 1 / encoders_each - 1)) * self.rows


STUDIED = (
    Case((2, 4), (2, 2, 2), 32768, documents=2),
    Case((4, 2), (1, 2, 4), 32768),
    Case((1, 8), (2, 4, 1), 131072, share=0.75, hidden=5120),
    Case((2, 32), (4, 8, 2), 131072, share=0.6, hidden=8192),
)


def timed_cases(ranks: int) -> list[Case]:
    """Layouts with one replica of the language model: a copy of the encoder on each rank, one split over all, both."""
    cases = [Case((1, ranks), (1, ranks, 1)), Case((ranks, 1), (1, ranks, 1))]
    return [*cases, Case((2, ranks // 2), (2, ranks // 2, 1))] if ranks % 4 == 0 else cases


class Gathering:
    """The other design on this rank: gather a replica's rows, take one's own; sum gradients that are mostly zeros."""

    def __init__(self, case: Case, world: World, dtype: torch.dtype) -> None:
        encoder_tp, replicas = case.encoder
        tp, cp, _ = case.model
        lines_of_encoder = [[e * encoder_tp + t for e in range(replicas)] for t in range(encoder_tp)]
        self._replicas = _group_of(world.rank, lines_of_encoder)
        self._cp = _group_of(world.rank, [[c * tp + t for c in range(cp)] for t in range(tp)])
        self._first = world.rank // encoder_tp * (case.rows // replicas)
        self._count = case.rows // replicas
        self._places = torch.tensor(case.need.rows(world.rank), device=world.device)
        self._all = torch.empty(case.rows, case.hidden, dtype=dtype, device=world.device)

    def forward(self, x: Tensor) -> Tensor:
        if self._replicas is not None:
            _all_gather(self._all, x, group=self._replicas)
            x = self._all
        return x[self._places]

    def backward(self, gradient: Tensor) -> Tensor:
        self._all.zero_().index_copy_(0, self._places, gradient)
        dist.all_reduce(self._all, group=self._cp)
        return self._all[self._first : self._first + self._count]


def _group_of(rank: int, lines: list[list[int]]) -> ProcessGroup | None:
    """This rank's group of these, which all ranks make in one order; None for one of a single rank."""
    if len(lines[0]) == 1:
        return None
    groups = [(line, dist.new_group(line)) for line in lines]
    group = next(group for line, group in groups if rank in line)
    assert isinstance(group, ProcessGroup)
    return group


@dataclass(frozen=True, kw_only=True)
class BridgeFlags(BenchFlags):
    """Time the bridge forward and backward, beside a design that gathers all rows and an all-to-all of its bytes.

    Encoder and language model run on the same ranks in different layouts. A sequence holds text and images in turn,
    half of its positions each, dealt zigzag. Runs one process for each GPU of this machine, or torchrun's, or --world
    local processes.
    """

    warmup: int = 2
    repeats: int = 10
    rows: str = ""
    """Rows of images of the sequence, with commas between; empty: 32768,131072 on GPUs, 512 on CPUs."""
    hidden: int = 0
    """Width of a row; 0: 4096 on GPUs, 64 on CPUs."""
    calls: int = 10
    """Calls that are timed together."""
    received: bool = False
    """Only count the bytes that ranks receive in layouts of up to 64 ranks; in this process, without communication."""


def measure_ranks(rank: int, flags: BridgeFlags, about: dict[str, Any]) -> dict[str, Any]:
    gpu = about["backend"] != "gloo"
    record = {**about, "machine": machine_facts(), "versions": versions(), "rows": []}
    counts = [int(word) for word in (flags.rows or ("32768,131072" if gpu else "512")).split(",")]
    for layout in timed_cases(about["ranks"]):
        with World(layout.home, backend=None if gpu else "gloo", timeout=flags.timeout_seconds) as world:
            for rows in counts:
                hidden = flags.hidden or (4096 if gpu else 64)
                case = replace(layout, positions=round(rows / layout.share), hidden=hidden)
                record["rows"].append(_measure_case(case, world, flags))
                if not rank:
                    write_record(record, flags.out)
    return record


def _measure_case(case: Case, world: World, flags: BridgeFlags) -> dict[str, Any]:
    dtype = torch.bfloat16 if world.device.type == "cuda" else torch.float32
    bridge = Bridge(case.have, case.need, world, gradient="partial_over_slots")
    gathering = Gathering(case, world, dtype)
    x = _drawn(case, world.rank // case.encoder[0], case.have.counts[world.rank], dtype, world)
    gradient = _drawn(case, world.rank // case.model[0], case.need.counts[world.rank], dtype, world)
    runs: dict[str, Callable[[], Any]] = {
        "bridge forward": partial(bridge, x),
        "bridge backward": partial(bridge.carry_back, gradient),
        "gathering forward": partial(gathering.forward, x),
        "gathering backward": partial(gathering.backward, gradient),
    }
    with torch.no_grad():
        for way in ("forward", "backward"):
            same = torch.equal(runs[f"bridge {way}"](), runs[f"gathering {way}"]())
            if wrong := [rank for rank, good in enumerate(world.control.gather_objects(same)) if not good]:
                raise RuntimeError(f"{case.name}, {case.rows:,} rows: both designs differ {way} on ranks {wrong}")
        for way, (a, b) in {"forward": (case.have, case.need), "backward": (case.need, case.have)}.items():
            moves = Exchange(a, b).moves(world.rank)
            sent, arrived = (
                torch.empty(sum(n), case.hidden, dtype=dtype, device=world.device)
                for n in (moves.sends, moves.receives)
            )
            runs[f"bytes {way}"] = partial(
                dist.all_to_all_single, arrived, sent, list(moves.receives), list(moves.sends)
            )
        seconds = {name: _median_seconds(run, world, flags) for name, run in runs.items()}
    mib = case.hidden * dtype.itemsize / 2**20
    received = {"bridge": case.received_rows(), "gathering": case.gathered_rows()}
    row = {"layouts": case.name, "rows": case.rows, "hidden": case.hidden, "dtype": str(dtype), "seconds": seconds}
    return row | {"mib": {name: [mib * rows for rows in both] for name, both in received.items()}}


def _drawn(case: Case, seed: int, rows: int, dtype: torch.dtype, world: World) -> Tensor:
    generator = torch.Generator(world.device).manual_seed(seed)
    return torch.randn(rows, case.hidden, generator=generator, dtype=dtype, device=world.device)


def _median_seconds(run: Callable[[], Any], world: World, flags: BridgeFlags) -> float:
    """Seconds of one call: the median of runs of several, each of the slowest rank."""

    def run_calls() -> None:
        for _ in range(flags.calls):
            run()

    times = [time_run(run_calls, world) / flags.calls for _ in range(flags.warmup + flags.repeats)][flags.warmup :]
    return statistics.median(map(max, zip(*world.control.gather_objects(times), strict=True)))


COLUMNS = ("TP·DP → TP·CP·DP", "rows", "direction", "bridge, ms", "gathering, ms", "bytes alone, ms")
COLUMNS += ("bridge, MiB", "gathering, MiB")


def _lines(record: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            *(row["layouts"], f"{row['rows']:,}", way),
            *(f"{1e3 * row['seconds'][f'{name} {way}']:.3f}" for name in ("bridge", "gathering", "bytes")),
            *(f"{row['mib'][name][index]:,.4g}" for name in ("bridge", "gathering")),
        )
        for row in record["rows"]
        for index, way in enumerate(("forward", "backward"))
    ]


def record_markdown(record: dict[str, Any]) -> str:
    kinds = sorted({f"{row['hidden']:,} {row['dtype'].removeprefix('torch.')}" for row in record["rows"]})
    return (
        f"# The bridge between two layouts over {record['ranks']} ranks ({record['backend']})\n\n"
        f"{origin_text(record)}\n\n"
        f"Rows of {' and '.join(kinds)}. One replica of the language model, half of whose positions are an image's, "
        "dealt zigzag. Milliseconds of one call: the median of runs, of the slowest rank. *Gathering*: every row to "
        "every rank, and a sum of gradients over cp; it gave the same rows and gradients, bit for bit. *Bytes alone*: "
        "one all-to-all with the bridge's counts; nothing is packed or copied. MiB received: the mean over ranks.\n\n"
        f"{markdown_table(COLUMNS, _lines(record))}\n"
    )


def received_record(command: str) -> dict[str, Any]:
    rows = [
        {
            **{name: getattr(case, name) for name in ("name", "positions", "documents", "share", "hidden")},
            **{name: [2 * case.hidden / 2**20 * n for n in rows] for name, rows in ways.items()},
        }
        for case in STUDIED
        for ways in [{"gathering": case.gathered_rows(), "bridge": case.received_rows()}]
    ]
    origin = {"machine": machine_facts(), "versions": versions(), "command": command}
    return {"bench": "bytes of the bridge", **origin, "rows": rows}


RECEIVED = ("TP·DP → TP·CP·DP", "tokens of a replica", "images", "width", "gathering, MiB", "bridge, MiB")


def _received_lines(record: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            *(row["name"], f"{row['documents']} x {row['positions']:,}", f"{row['share']:.0%}", f"{row['hidden']:,}"),
            *(" / ".join(f"{mib:,.0f}" for mib in row[name]) for name in ("gathering", "bridge")),
        )
        for row in record["rows"]
    ]


def received_markdown(record: dict[str, Any]) -> str:
    return (
        "# Bytes of the bridge and of gathering, by arithmetic\n\n"
        f"{origin_text(record)}\n\n"
        "MiB that a rank receives forward / backward, the mean over ranks, of rows in bfloat16; text and images in "
        "turn, positions dealt zigzag over cp. *Gathering* by its formulas with ring collectives; *bridge* by the "
        f"exchanges that it plans.\n\n{markdown_table(RECEIVED, _received_lines(record))}\n"
    )


def main(argv: Sequence[str]) -> int:
    flags = parse_flags(BridgeFlags, argv, PROGRAM)
    flags.check_flags()
    check_flags_at_least(flags, hidden=0, calls=1)
    command = " ".join(["python", PROGRAM, *argv])
    if flags.received:
        record = received_record(command)
        text = text_table(RECEIVED, _received_lines(record))
        show_record(record, flags, text=text, markdown=received_markdown(record))
        return 0
    ranks, backend = flags.choose_processes(CPU_RANKS)
    if ranks < 2 or ranks % 2:
        raise ConfigError(f"{ranks} ranks: the layouts need an even number of them; give --world 2")
    about = {"bench": "bridge", "ranks": ranks, "backend": backend, "command": command}
    record = run_on_ranks(measure_ranks, (flags, about), ranks)
    show_record(record, flags, text=text_table(COLUMNS, _lines(record)), markdown=record_markdown(record))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
