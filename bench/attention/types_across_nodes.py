"""Attention by type over two nodes with a limited link, and what "auto" takes by the prices of a calibration there.

    bench/two_nodes.sh --ranks 2 --cpu --rate 4M python bench/attention/types_across_nodes.py --out FILE.json
    bench/two_nodes.sh --ranks 4 --cpu --rate 4M python bench/attention/types_across_nodes.py --out FILE.json

Rows of a FILE.json that is there stay, so that both commands make one page. `--help` shows the flags.
"""

import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.attention.attention_types import CPU_RANKS, TYPES, AttentionFlags, attention_ranks, make_settings
from bench.processes.two_nodes import FLAGS_VARIABLE

from longspan import Layout, plan_fixed
from longspan.bench.benches import BenchFlags, origin_text, show_record
from longspan.bench.calibrate import CalibrateFlags, Calibration, calibrate_on_rank, fit_machine
from longspan.cli.flags import parse_flags
from longspan.cli.machine import machine_facts
from longspan.cli.processes import run_on_ranks
from longspan.errors import ConfigError
from longspan.plain_text import markdown_table, text_table
from longspan.plan import AttentionCall
from longspan.versions import versions

PROGRAM = "bench/attention/types_across_nodes.py"
HEADS = 8
HEAD_SIZE = 32


@dataclass(frozen=True, kw_only=True)
class AcrossFlags(BenchFlags):
    """Calibrate two nodes, then time attention of one document over all ranks under each type, in float32.

    Before anything is timed, output and gradients of every type are compared with dense attention.
    """

    key_value_heads: str = "1,2,8"
    """Key and value heads of 8 query heads of 32, with commas between."""
    length: int = 2048
    """Rows of the document."""
    rounds: int = 3
    """Timed rounds of the calibration."""
    warmup: int = 1
    """Runs of attention before the timed ones."""
    repeats: int = 3
    """Timed runs of attention; their median counts."""


def measure_ranks(rank: int, flags: AcrossFlags, ranks: int) -> dict[str, Any]:
    measured = calibrate_on_rank(rank, CalibrateFlags(repeats=flags.rounds), ranks, "gloo")
    if measured.node_size >= ranks:
        raise ConfigError(f"all {ranks} ranks are on one node: start it with bench/two_nodes.sh")
    calibration = fit_machine(measured, ranks, "gloo")
    rows = [_measure_heads(rank, int(heads), flags, ranks, calibration) for heads in flags.key_value_heads.split(",")]
    link = calibration.machine.across.point.bytes_per_second
    return {"rows": rows, "links": {str(ranks): link}, "errors": {str(ranks): calibration.mean_error}}


def _measure_heads(
    rank: int, kv_heads: int, flags: AcrossFlags, ranks: int, calibration: Calibration
) -> dict[str, Any]:
    timing = AttentionFlags(
        lengths=str(flags.length),
        heads=HEADS,
        key_value_heads=kv_heads,
        head_size=HEAD_SIZE,
        no_peers=True,
        warmup=flags.warmup,
        repeats=flags.repeats,
        timeout_seconds=flags.timeout_seconds,
    )
    group = plan_fixed([flags.length], Layout(ranks), ranks).micro_batches[0].groups[0]
    call = AttentionCall(heads=HEADS, kv_heads=kv_heads, head_dim=HEAD_SIZE, bytes_per_number=4)
    levels = [(size, ranks // size) for size in range(2, ranks) if ranks % size == 0]
    cases = [(kind, ()) for kind in TYPES[:-1]] + [(TYPES[-1], sizes) for sizes in levels]
    types = dict[str, dict[str, float]]()
    for kind, sizes in cases:
        words = ",".join(map(str, sizes))
        record = attention_ranks(
            rank, make_settings(replace(timing, types=kind, hierarchical=words), ranks, "gloo", [])
        )
        if not record["checks"][0]["good"]:
            raise RuntimeError(f"{kind} {words}: {record['checks'][0]}")
        priced_group = replace(group, cp_comm_type=kind, hierarchical_context_parallel_sizes=sizes or None)
        price = calibration.machine.attention_prices(priced_group, call)[kind]
        row = record["rows"][0]
        types[price.name] = {
            "forward_seconds": row["forward_seconds"],
            "seconds": row["seconds"],
            "priced_seconds": price.seconds,
            "error": max(record["checks"][0]["errors"].values()),
        }
    auto = calibration.machine.fastest_type_price(group, call).name
    return {"ranks": ranks, "key_value_heads": kv_heads, "auto": auto, "types": types, "load": os.getloadavg()[0]}


COLUMNS = ("ranks", "K/V heads", "type", "forward ms", "both ms", "priced ms", "")


def _lines(record: dict[str, Any]) -> list[tuple[str, ...]]:
    return [
        (
            str(row["ranks"]),
            str(row["key_value_heads"]),
            name,
            f"{1e3 * one['forward_seconds']:.0f}",
            f"{1e3 * one['seconds']:.0f}",
            f"{1e3 * one['priced_seconds']:.0f}",
            ", ".join(
                word
                for word, is_so in (
                    ("fastest", one["seconds"] == min(other["seconds"] for other in row["types"].values())),
                    ("auto", name == row["auto"]),
                )
                if is_so
            ),
        )
        for row in record["rows"]
        for name, one in row["types"].items()
    ]


def _summary(record: dict[str, Any]) -> str:
    worth = [
        row["types"][row["auto"]]["seconds"] / min(one["seconds"] for one in row["types"].values())
        for row in record["rows"]
    ]
    error = max(one["error"] for row in record["rows"] for one in row["types"].values())
    links = ", ".join(f"{rate / 1e6:.3g} MB/s among {ranks} ranks" for ranks, rate in record["links"].items())
    loads = sorted(row["load"] for row in record["rows"])
    errors = ", ".join(f"{share:.1%}" for share in record["errors"].values())
    return (
        f"What `auto` takes is fastest in {sum(one == 1 for one in worth)} of {len(worth)} rows, and takes at most "
        f"{max(worth):.2f} times the fastest. Each rank's messages across, as calibrated: {links}; mean errors of the "
        f"calibrations: {errors}. Outputs and gradients are within {error:.0e} of dense attention. Load of the machine "
        f"meanwhile: {loads[0]:.1f} to {loads[-1]:.1f}."
    )


def record_markdown(record: dict[str, Any]) -> str:
    return (
        f"# Attention by type over two nodes on CPUs with a limited link\n\n{origin_text(record)}\n\n"
        f"One layer's causal attention of one document of {record['length']:,} rows, {HEADS} query heads of "
        f"{HEAD_SIZE}, float32, forward and backward: median of {record['repeats']} runs, the slowest rank. Two "
        "emulated nodes, within which nothing is limited. *Priced*: by the machine that was calibrated in the same "
        'call; "auto" is what those prices make of `cp_comm_type`. Any machine with network namespaces can run it.\n\n'
        f"{markdown_table(COLUMNS, _lines(record))}\n\n{_summary(record)}\n"
    )


def main(argv: Sequence[str]) -> int:
    flags = parse_flags(AcrossFlags, argv, PROGRAM)
    ranks, _ = flags.choose_processes(CPU_RANKS)
    out = Path(flags.out)
    before = json.loads(out.read_text()) if flags.out and out.exists() else {"rows": [], "links": {}, "errors": {}}
    measured = run_on_ranks(measure_ranks, (flags, ranks), ranks)
    kept = [row for row in before["rows"] if row["ranks"] != ranks]
    command = f"bench/two_nodes.sh {os.environ.get(FLAGS_VARIABLE, '')}"
    record = {
        "bench": "attention by type across nodes",
        "length": flags.length,
        "repeats": flags.repeats,
        "machine": machine_facts(),
        "versions": versions(),
        "command": "; ".join(dict.fromkeys([*filter(None, [before.get("command")]), command])),
        "rows": sorted([*kept, *measured["rows"]], key=lambda row: (row["ranks"], row["key_value_heads"])),
        "links": before["links"] | measured["links"],
        "errors": before["errors"] | measured["errors"],
    }
    text = f"{text_table(COLUMNS, _lines(record), left=3)}\n\n{_summary(record)}"
    show_record(record, flags, text=text, markdown=record_markdown(record))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
