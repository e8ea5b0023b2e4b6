"""Seconds of an evaluation over two emulated nodes: at degree 1, and at that of all slots with two types of attention.

    bench/two_nodes.sh --ranks 2 python bench/evaluation/evaluation_two_nodes.py --out FILE.json    # CPUs: a tiny model
    bench/two_nodes.sh --rate 1.25G python bench/evaluation/evaluation_two_nodes.py --out FILE.json # GPUs

The exit code is 1 if losses differ by more than rounding explains. `--help` shows the flags.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from bench.evaluation.evaluation_degrees import (
    BOUND,
    CPU_RANKS,
    RUN_COLUMNS,
    EvalBenchFlags,
    EvaluationSettings,
    make_settings,
    measure_evaluation,
    prepare_case,
    run_rows,
)

from longspan.bench.benches import origin_text, show_record
from longspan.cli.flags import parse_flags
from longspan.cli.machine import machine_facts
from longspan.cli.processes import run_on_ranks
from longspan.comm import World
from longspan.errors import ConfigError
from longspan.plain_text import markdown_table, text_table
from longspan.versions import versions

PROGRAM = "bench/evaluation/evaluation_two_nodes.py"


@dataclass(frozen=True, kw_only=True)
class TwoNodesFlags(EvalBenchFlags):
    """Time the evaluation of the same documents at degree 1, and at the degree of all slots of two nodes.

    A training step at degree 1 goes before. At the degree of all slots attention is a ring over both nodes (p2p), and
    all-to-all inside each node around a ring between them (a2a+p2p), where a node has more than one slot.
    """

    cases: str = ""
    """Names of cases of evaluation_degrees.py, with commas between; empty: 8k-tp1 on GPUs, tiny-tp1 on CPUs."""


def measure_ranks(rank: int, settings: EvaluationSettings) -> dict[str, Any]:
    about = {"backend": settings.backend, "machine": machine_facts(), "versions": versions()}
    record: dict[str, Any] = {"bench": "evaluation on two nodes", **settings.to_json(), **about, "rows": []}
    backend = None if settings.gpu else "gloo"
    for case in settings.cases:
        with World(case.home(settings.ranks), backend=backend, timeout=settings.flags.timeout_seconds) as world:
            record["node_slots"] = world.node_size
            if world.node_size >= world.home.slots:
                raise ConfigError(f"all {settings.ranks} ranks are on one node: start it with bench/two_nodes.sh")
            bench = prepare_case(case, settings, world)
            slots = world.home.slots
            plans = {"degree 1": bench.at_fixed_degree(1)}
            plans[f"degree {slots}, p2p"] = bench.at_fixed_degree(slots, cp_comm_type="p2p")
            if (inside := world.node_size) > 1:
                sizes = (inside, slots // inside)
                hierarchy = {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": sizes}
                plans[f"degree {slots}, a2a+p2p {sizes}"] = bench.at_fixed_degree(slots, **hierarchy)
            bench.train_step(plans["degree 1"])
            runs: list[dict[str, Any]] = [
                {"name": name} | measure_evaluation(bench, plan) for name, plan in plans.items()
            ]
            losses = [run["loss"] for run in runs]
            row = {"name": case.name, "tokens": case.tokens, "layers": case.layers, "preset": case.preset, "runs": runs}
            record["rows"].append(row | {"difference": max(losses) - min(losses)})
    return record


def record_text(record: dict[str, Any]) -> str:
    return "\n\n".join([_title(record), text_table(RUN_COLUMNS, run_rows(record), left=2), _differences(record)])


def record_markdown(record: dict[str, Any]) -> str:
    weights = "with whole weights" if record["whole"] else "under FSDP2 over both nodes"
    shapes = (f"{r['name']}: {r['preset']}, {r['layers']} layers, {r['tokens']:,} tokens" for r in record["rows"])
    return (
        f"# {_title(record)}\n\n{origin_text(record)}\n\n"
        f"Whole evaluations of {record['documents']} documents {weights}, the slowest rank of each, after a training "
        f"step at degree 1; {record['repeats']} timed after {record['warmup']}. {'; '.join(shapes)}.\n\n"
        f"{markdown_table(RUN_COLUMNS, run_rows(record))}\n\n{_differences(record)}\n"
    )


def _title(record: dict[str, Any]) -> str:
    return (
        f"Evaluation over two emulated nodes of {record['node_slots']} slots, {record['ranks']} ranks in all "
        f"({record['backend']})"
    )


def _differences(record: dict[str, Any]) -> str:
    return "; ".join(f"{row['name']}: losses differ by {row['difference']:.1e}" for row in record["rows"]) + "."


def main(argv: Sequence[str]) -> int:
    flags = parse_flags(TwoNodesFlags, argv, PROGRAM)
    ranks, backend = flags.choose_processes(CPU_RANKS)
    cases = flags.cases or ("tiny-tp1" if backend == "gloo" else "8k-tp1")
    command = ["bench/two_nodes.sh", "python", PROGRAM, *argv]
    settings = make_settings(replace(flags, cases=cases), ranks, backend, command)
    record = run_on_ranks(measure_ranks, (settings,), ranks)
    show_record(record, flags, text=record_text(record), markdown=record_markdown(record))
    bound = BOUND[torch.float32 if backend == "gloo" else torch.bfloat16]
    return 0 if all(row["difference"] <= bound for row in record["rows"]) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
