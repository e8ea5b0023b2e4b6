"""A state-space layer on one GPU, as a rank alone and as a member of a group whose messages take no time.

    python bench/mixers/one_member.py --out bench/records/mixer-member.json

The layers of `mixers.py`, bfloat16, at full size, over this member's share of one long document. As a member, it scans
for the maps of its rows, folds those of the others, and gives gradients of states back, by the code of a run; what it
receives is what it sent. So the two differ by the work that context parallelism adds to a rank: what several GPUs lose
besides is the wire, and waiting for each other. Efficiency: alone over member. Host: milliseconds until both passes are
queued, which hide behind the GPU's unless they are longer.
"""

import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench.begun import open_record
from mixer_designs import Layer, flags_of, layers, ours, scan_alone
from torch import Tensor

from longspan import Group, Layout, MicroBatch, World
from longspan.bench.record import origin_text, write_record
from longspan.comm import SequenceShard
from longspan.errors import ConfigError
from longspan.ssm.chains import Chains, chains_by_shard
from longspan.testing import run_ranks

PASSES = 5
CASES = ("layer alone", "layer, member", "scan alone", "scan, member")


class Echo:
    """In the place of a channel: a member hears its own rows from every other, at once."""

    def __init__(self, degree: int) -> None:
        self.degree = degree

    def starts(self, counts: Sequence[int]) -> tuple[int, ...]:
        """As a communicator lays them out."""
        return tuple(member * max(counts) for member in range(self.degree))

    def all_gather_rows(self, x: Tensor, counts: Sequence[int], what: str) -> Any:
        """Every member's rows are this one's."""
        rows = x if len(x) == max(counts) else torch.cat([x, x.new_zeros((max(counts) - len(x), *x.shape[1:]))])
        gathered = rows.repeat(self.degree, *[1] * (x.ndim - 1))
        return SimpleNamespace(wait=lambda: gathered)

    def all_to_all_rows(self, x: Tensor, sends: Sequence[int], receives: Sequence[int], what: str) -> Any:
        """Zeros arrive."""
        arrived = x.new_zeros((sum(receives), *x.shape[1:]))
        return SimpleNamespace(wait=lambda: arrived)


class EchoChains(Chains):
    """Chains of a member whose channel is an echo."""

    @property
    def channel(self) -> Any:
        """See `Echo`."""
        return Echo(self.degree)


def shard_of(rows: int, members: int, world: World) -> SequenceShard:
    """The second member's shard of a document of `rows` for each of the members."""
    group = Group(tuple(range(members)), (0,), (rows * members,), partition="contiguous")
    shard = SequenceShard(MicroBatch((group,)), min(1, members - 1), world.key, world.device)
    if members > 1:
        chains_by_shard[shard] = tuple(EchoChains(part, world.device) for part in shard.parts)
    return shard


def main() -> None:
    """Measure what the record lacks."""
    flags = flags_of(__doc__)
    flags.add_argument("--members", type=int, default=4)
    flags.add_argument("--rows", default="16384,32768", help="of one member")
    flags.add_argument("--profile", action="store_true", help="print the kernels of the scan as a member")
    options = flags.parse_args()
    print(text_of(run_ranks(measure, 1, vars(options), timeout=options.timeout)[0]))


def measure(rank: int, options: dict[str, Any]) -> dict[str, Any]:
    """The record, written after every part."""
    out: Path | None = options["out"]
    source, members = Path(__file__).parent, options["members"]
    if members < 2:
        raise ConfigError(f"--members is {members}; a group has at least 2")
    record = open_record("mixer-member", out, options["backend"], source, members=members)
    rows = record.setdefault("rows", [])
    with World(Layout(ranks=1), backend=options["backend"], timeout=options["timeout"]) as world:
        done = [(row["layer"], row["rows"]) for row in rows]
        for name, layer in layers(world.device, options["layers"], small=options["small"]).items():
            for share in map(int, options["rows"].split(",")):
                if (name, share) not in done:
                    rows.append({"layer": name, "rows": share, **times(layer, share, members, world)})
                    if out is not None:
                        write_record(record, out, text_of(record))
                if options["profile"]:
                    _profile(scan_alone(layer, shard_of(share, members, world)), world)
    return record


def times(layer: Layer, rows: int, members: int, world: World) -> dict[str, Any]:
    """Milliseconds of forward, of both passes, and of the host for both."""
    found: dict[str, Any] = {}
    for case, count in zip(CASES, (1, members) * 2, strict=True):
        shard = shard_of(rows, count, world)
        run = ours(layer, shard) if case.startswith("layer") else scan_alone(layer, shard)
        x = torch.randn(1, rows, layer.hidden, device=world.device, dtype=torch.bfloat16).requires_grad_()
        dout = torch.randn_like(run(x))
        both = [_milliseconds(f, world.device) for f in (lambda: run(x), lambda: run(x).backward(dout))]  # noqa: B023
        found[case] = {"forward": both[0][0], "both": both[1][0], "host": both[1][1]}
        print(layer.name, rows, case, found[case], flush=True)
        if world.device.type == "cuda":
            torch.cuda.empty_cache()
    return found


def _milliseconds(run: Callable[[], object], device: torch.device) -> tuple[float, float]:
    """The least of five means, after three runs, and the host's share of it."""
    for _ in range(3):
        run()
    if device.type != "cuda":
        return 0.0, 0.0
    means = list[tuple[float, float]]()
    for _ in range(5):
        torch.cuda.synchronize()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        began = time.perf_counter()
        for _ in range(PASSES):
            run()
        host = 1e3 * (time.perf_counter() - began)
        end.record()
        end.synchronize()
        means.append((start.elapsed_time(end) / PASSES, host / PASSES))
    return min(means)


def _profile(run: Callable[[Tensor], Tensor], world: World) -> None:
    x = torch.empty(0, device=world.device)
    out = run(x)
    out.backward(torch.randn_like(out))
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        run(x).backward(torch.randn_like(out))
        if world.device.type == "cuda":
            torch.cuda.synchronize()
    print(profile.key_averages().table(sort_by="self_cuda_time_total", row_limit=40, max_name_column_width=70))


def text_of(record: dict[str, Any]) -> str:
    """The record as Markdown."""
    lines = ["# A state-space layer as one member of a group", "", origin_text(record), ""]
    lines += [
        "Milliseconds of forward and backward together (forward alone; the host's), of the second of "
        f"{record['members']} members, messages taking no time. Efficiency: alone over member.",
        "",
        "| layer | rows | alone | member | efficiency | scan alone | scan, member |",
        "| --- " * 7 + "|",
    ]
    for row in record["rows"]:
        cells = [f"{c['both']:.2f} ({c['forward']:.2f}; {c['host']:.2f})" for c in (row[case] for case in CASES)]
        efficiency = row["layer alone"]["both"] / (row["layer, member"]["both"] or 1)
        lines.append(
            f"| {row['layer']} | {row['rows']:,} | {cells[0]} | {cells[1]} | {efficiency:.3f} | "
            f"{cells[2]} | {cells[3]} |"
        )
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    main()
