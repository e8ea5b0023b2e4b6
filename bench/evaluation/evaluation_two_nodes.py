"""Training on two emulated nodes, and evaluation at the degree of all slots, with all-to-all inside a node alone.

python bench/evaluation/evaluation_two_nodes.py --out record.json                      on CPUs, a tiny model
python bench/evaluation/evaluation_two_nodes.py --preset qwen3-4b --layers 4 --tokens 8192 --out record.json     on GPUs

Two torchruns of this machine are the two nodes (`emulated_nodes.py`). The model trains at degree 1, and is evaluated
after each step at the degree of training and at that of all slots under `a2a+p2p`, whose all-to-all is inside a node:
the losses, their difference, and the levels that the group has.
"""

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
import torch
from bench.begun import open_record
from bench.processes.emulated_nodes import run_on_nodes

from longspan import Layout, World, evaluate, load_model, plan_fixed, prepare, run_step
from longspan.bench.layers import change_layer_count
from longspan.bench.record import origin_text, write_record
from longspan.data.document import synthetic_documents
from longspan.model.presets import preset_config
from longspan.plain_text import markdown_table
from longspan.plan import Plan
from longspan.plan.hierarchy import group_levels, hierarchical_groups
from longspan.train import build_optimizer

NODES = 2
BOUND = {"gloo": 1e-5, "nccl": 5e-3}  # of the difference of two losses: float32, bfloat16


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=4, help="of both nodes together")
    parser.add_argument("--preset", default="qwen3-tiny")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=96, help="of each document")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument("--vocabulary", type=int, default=10240)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--timeout", type=float, default=300.0, help="seconds")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--results", type=Path, help="of a node's own process: where the first rank writes results")
    options = parser.parse_args()
    if options.results is not None:
        run_rank(options)
        return
    backend = "nccl" if torch.cuda.is_available() else "gloo"
    names = ("ranks", "preset", "layers", "tokens", "documents", "vocabulary")
    about = {name: getattr(options, name) for name in names}
    record = open_record("evaluation on two nodes", None, backend, Path(__file__).parent) | about
    record |= run_on_nodes(NODES, options.ranks, options.timeout)
    write_record(record, options.out, as_markdown(record))
    print(as_markdown(record))
    sys.exit(0 if record["good"] else f"losses differ by more than {BOUND[backend]:g}, or a level crosses nodes")


def run_rank(options: argparse.Namespace) -> None:
    """What each rank does; the first one writes the results."""
    with World(Layout(options.ranks), timeout=options.timeout) as world:
        gpu = world.device.type == "cuda"
        configuration = change_layer_count(preset_config(options.preset, vocab_size=options.vocabulary), options.layers)
        configuration.vocab_size, configuration.tie_word_embeddings = options.vocabulary, False
        loaded = load_model(config=configuration, sharded=True)
        model = prepare(loaded, world, compute_dtype=torch.bfloat16 if gpu else None)
        lengths = [options.tokens] * options.documents
        documents = [d[np.arange(len(d))] for d in synthetic_documents(lengths, options.vocabulary)]
        narrow, wide = narrow_and_wide(lengths, world)
        rows = list(rows_of_steps(model, documents, narrow, wide, world, options.steps))
        groups = [{"kind": group.kind, "ranks": list(group.ranks)} for group in world.process_groups.made]
        if world.rank == 0:
            backend = "nccl" if gpu else "gloo"
            options.results.write_text(json.dumps(judged(rows, wide, world.node_size, backend) | {"groups": groups}))


def narrow_and_wide(lengths: list[int], world: World) -> tuple[Plan, Plan]:
    """Plans at degree 1, and at that of all slots with all-to-all inside a node."""
    slots, inside = world.home.slots, world.node_size
    wide = plan_fixed(
        lengths,
        world.home,
        slots,
        cp_comm_type="a2a+p2p",
        hierarchical_context_parallel_sizes=(inside, slots // inside),
        node_size=inside,
    )
    return plan_fixed(lengths, world.home, 1, node_size=inside), wide


def rows_of_steps(
    model: torch.nn.Module, documents: Sequence[Any], narrow: Plan, wide: Plan, world: World, steps: int
) -> Iterator[dict[str, Any]]:
    """Training steps under the narrow plan, and after each an evaluation under both."""
    optimizer = build_optimizer(model, lr=1e-4)
    for step in range(1, steps + 1):
        world.prepare(narrow)
        result = run_step(model, narrow, documents, world, optimizer=optimizer)
        yield {"step": step, "does": "training", "degree": 1, "loss": result.loss, "seconds": result.seconds}
        for plan in (narrow, wide):
            evaluation = evaluate(model, documents, plan, world)
            row = {"step": step, "does": "evaluation", "degree": evaluation.cp, "loss": evaluation.loss}
            yield row | {"seconds": evaluation.seconds, "activation_bytes": evaluation.activation_bytes}


def judged(rows: Sequence[dict[str, Any]], wide: Plan, node_size: int, backend: str) -> dict[str, Any]:
    """The rows with the levels of the wide groups, the largest difference of losses, and whether all is as it must."""
    (levels,) = dict.fromkeys(group_levels(group) for group in hierarchical_groups(wide))
    by_step: dict[int, list[float]] = {}
    for row in rows:
        if row["does"] == "evaluation":
            by_step.setdefault(row["step"], []).append(row["loss"])
    difference = max(max(losses) - min(losses) for losses in by_step.values())
    inside = all(len({slot // node_size for slot in slots}) == 1 for slots in levels.a2a)
    return {
        "rows": list(rows),
        "node_size": node_size,
        "levels": {"a2a": levels.a2a, "p2p": levels.p2p},
        "a2a_inside_nodes": inside,
        "difference": difference,
        "good": inside and difference <= BOUND[backend],
    }


def as_markdown(record: dict[str, Any]) -> str:
    """The record for people who read bench/records."""
    rows = [
        (
            str(row["step"]),
            row["does"],
            str(row["degree"]),
            f"{row['loss']:.7f}",
            f"{row['seconds']:.3f}",
            f"{row['activation_bytes'] / 2**20:,.0f} MiB" if row.get("activation_bytes") else "",
        )
        for row in record["rows"]
    ]
    a2a, p2p = (" and ".join(map(str, record["levels"][name])) for name in ("a2a", "p2p"))
    return (
        f"# Training and evaluation on two emulated nodes of {record['node_size']} ranks ({record['backend']})\n\n"
        f"{origin_text(record)}\n\n"
        f"{record['documents']} documents of {record['tokens']:,} tokens, {record['preset']} with {record['layers']} "
        f"layers, vocabulary {record['vocabulary']:,}, FSDP2 over both nodes. Training at degree 1; evaluation at the "
        f"degree of training, and at {record['ranks']} under a2a+p2p: all-to-all inside the slots {a2a}, ring between "
        f"{p2p}. Losses of a step differ by at most {record['difference']:.1e}.\n\n"
        f"{markdown_table(('step', 'what', 'degree', 'loss', 'seconds', 'activations'), rows)}\n"
    )


if __name__ == "__main__":
    main()
