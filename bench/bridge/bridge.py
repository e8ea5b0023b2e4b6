"""The bridge between two layouts beside the design that gathers every row, and beside its own bytes alone.

    torchrun --nproc-per-node 8 bench/bridge/bridge.py --out bench/records/bridge-8xH200.json  # on GPUs
    python bench/bridge/bridge.py --ranks 4 --rows 128 --hidden 16 --out record.json  # on CPUs, a check of the path
    python bench/bridge/bridge.py --nodes 2 --ranks 8 --layouts long --out record.json  # two torchruns as two nodes
    python bench/bridge/bridge.py --bytes --out bench/records/bridge-bytes.json  bytes, by arithmetic
    python bench/bridge/bridge.py --plans --out bench/records/bridge-plans.json  # what the host does

Encoder and language model run on the same ranks in different layouts (`bridge_layouts.py`). A sequence holds text and
images in turn, half of its positions each, and is dealt zigzag. Before anything is timed, both designs
(`bridge_gather.py` is the other one) have given every rank the same rows and the same gradients, bit for bit. A record
that is there already, of the same commit, is gone on with.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from bench.begun import open_record
from bench.processes.emulated_nodes import run_on_nodes
from bridge_host import plan_rows
from bridge_layouts import CASES, bytes_table
from bridge_record import as_markdown
from bridge_time import BridgeSettings, measure

from longspan.bench.record import write_record
from longspan.cli.processes import choose_processes, has_torchrun, is_reporting, run_on_ranks


def main() -> None:
    """Do what the flags ask for, write the record and print it."""
    flags = _flags()
    if flags.bytes or flags.plans:
        name = "bytes" if flags.bytes else "plans"
        record = open_record(f"bridge {name}", None, "none", Path(__file__).parent)
        record |= {"rows": list(bytes_table() if flags.bytes else plan_rows(flags.plan_rows))}
        _finish(record, flags.out)
    elif flags.nodes > 1 and not has_torchrun():
        _finish(run_on_nodes(flags.nodes, flags.ranks, flags.timeout, cpu=flags.device == "cpu"), None)
    else:
        record = _measured(flags)
        if flags.results is not None and is_reporting():
            flags.results.write_text(json.dumps(record), encoding="utf-8")
        _finish(record, None)


def _measured(flags: argparse.Namespace) -> dict[str, Any]:
    processes = choose_processes(0 if has_torchrun() else flags.ranks, flags.device, on_gpus=0, on_cpus=4)
    if processes.ranks not in CASES:
        sys.exit(f"{processes.ranks} ranks; there are layouts for {' and '.join(map(str, CASES))}")
    settings = BridgeSettings(
        ranks=processes.ranks,
        backend=processes.backend,
        nodes=flags.nodes,
        layouts=tuple(flags.layouts.split(",")),
        rows=flags.rows,
        hidden=flags.hidden,
        repeats=flags.repeats,
        profile=flags.profile,
        timeout=flags.timeout,
        out=flags.out,
    )
    return run_on_ranks(measure, (settings,), processes.ranks, timeout=flags.timeout)


def _finish(record: dict[str, Any], out: Path | None) -> None:
    """Print a record, and write it where that has not been done."""
    if is_reporting():
        if out is not None:
            write_record(record, out, as_markdown(record))
        print(as_markdown(record))


def _flags() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=0, help="0: those of torchrun, else one for each GPU, else 4")
    parser.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
    parser.add_argument("--layouts", default="fan-in,equal,fan-out,long")
    parser.add_argument(
        "--rows", type=_numbers, default=(32768, 131072), help="of images, in each replica of the language model"
    )
    parser.add_argument("--hidden", type=int, default=4096)
    parser.add_argument("--repeats", type=int, default=20)
    parser.add_argument("--profile", action="store_true", help="kernels of one call of the bridge, on the first rank")
    parser.add_argument("--nodes", type=int, default=1, help="torchruns of this machine that stand for nodes")
    parser.add_argument("--timeout", type=float, default=600.0, help="seconds")
    parser.add_argument("--bytes", action="store_true", help="only bytes, by arithmetic, on up to 64 ranks")
    parser.add_argument("--plans", action="store_true", help="only what the host does, in one process")
    parser.add_argument("--plan-rows", type=_numbers, default=(131072, 1 << 20))
    parser.add_argument("--out", type=Path, help="record: FILE.json and FILE.md")
    parser.add_argument("--results", type=Path, help=argparse.SUPPRESS)  # of a node: where its first rank writes
    flags = parser.parse_args()
    if flags.results is not None:  # it is no part of the command that a record shows
        place = sys.argv.index("--results")
        del sys.argv[place : place + 2]
    return flags


def _numbers(text: str) -> tuple[int, ...]:
    return tuple(map(int, text.split(",")))


if __name__ == "__main__":
    main()
