"""Run folders and plans as the report meets them, without training anything."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from longspan.layout import Layout
from longspan.plan import Group, MicroBatch, Plan, plan_fixed

VOCABULARY = 2048
CONFIG = """\
[model]
preset = "qwen3-tiny"
[data]
path = "a<b>&c"
[context]
planner = "fixed"
context_parallel_size = 2

[evaluation]
context_parallel_size = 4
"""


def mixed_plan(slots: int, *, micro_batches: int = 3, cap: int = 8192, seed: int = 0) -> Plan:
    """Documents shared by runs of slots, and short ones beside them, as a dynamic planner makes it."""
    random = np.random.default_rng(seed)
    lengths: list[int] = []
    batches = []
    for _ in range(micro_batches):
        groups, slot = [], 0
        room = np.full(slots, cap)
        while slot < slots * 0.6 and slots - slot >= 2:
            degree = min(int(random.choice([2, 4, 8, 16])), slots - slot)
            lengths.append(int(degree * random.integers(3000, 6000)))
            groups.append(Group(tuple(range(slot, slot + degree)), (len(lengths) - 1,), (lengths[-1],)))
            room[slot : slot + degree] -= -(-lengths[-1] // degree)
            slot += degree
        for slot in range(slots):
            rows = random.integers(16, 700, random.integers(0, 5)).tolist()
            ids = tuple(range(len(lengths), len(lengths) + len(rows)))
            lengths += rows
            if ids and sum(rows) <= room[slot]:
                groups.append(Group((slot,), ids, tuple(rows)))
            else:
                del lengths[len(lengths) - len(rows) :]
        batches.append(MicroBatch(tuple(groups)))
    plan = Plan(slots, tuple(lengths), tuple(batches), sum(lengths) - len(lengths), max_tokens_per_slot=cap).check()
    seconds = plan.timeline().step_seconds
    return replace(plan, predicted_seconds=seconds, lower_bound_seconds=0.9 * seconds)


FACTS: dict[str, Any] = {"parameters": 30_532_122_624, "parameters_of_rank": 3_816_515_328, "trained": 30_532_122_624}
FACTS |= {"device": "NVIDIA H200", "ranks": 16, "node_size": 8, "hosts": 2, "priced_for": "the model on H200s"}
FACTS |= {"steps": 300, "done": 100, "date": "", "command": "", "sessions": []}
FACTS["lines"] = [["model", "Qwen3-30B-A3B: 30.5 B parameters, 8 of 128 experts a token"]]
FACTS["lines"] += [["report", "runs/moe/report.html when the run ends; to watch it: longspan report runs/moe --follow"]]


def evaluation_row(step: int, cp: int, loss: float) -> dict[str, Any]:
    row: dict[str, Any] = {"step": step, "eval_loss": loss, "eval_tokens": 2100, "eval_documents": 7, "cp": cp}
    return row | {"planner": "fixed", "by_position": [], "by_length": []}


def train_row(step: int, **changes: Any) -> dict[str, Any]:
    row = {"step": step, "loss": 4.5 + 3 * math.exp(-step / 50), "tokens": 4000 + step % 7, "targets": 3990}
    row |= {"grad_norm": 1.0 + 1 / step, "lr": 1e-3, "seconds": 0.3, "tokens_per_second": 13000.0 + step % 11}
    row |= {"memory_bytes": 600_000_000, "micro_batches": 2, "efficiency": 0.9}
    return row | changes


def write_run(
    path: Path, *, steps: int = 60, rows: list[dict[str, Any]] | None = None, finished: bool = True, plans: bool = True
) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    written = rows if rows is not None else [train_row(step) for step in range(1, steps + 1)]
    evaluations = [evaluation_row(steps, cp, 4.6 * (1 + d)) for cp, d in ((1, 0), (2, 3e-8), (4, -2e-7))]
    written = [*written, evaluations[2]]
    (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in written))
    (path / "config.toml").write_text(CONFIG)
    if finished:
        summary = {"vocab_size": VOCABULARY, "eval_at_degrees": evaluations, "versions": {"torch": "2.13.0"}}
        (path / "summary.json").write_text(json.dumps(summary))
    if plans:
        (path / "plans").mkdir(exist_ok=True)
        plan = plan_fixed([900, 300, 250, 20, 700], Layout(4), cp=2, max_tokens_per_slot=512)
        for name in ("step-000001", "step-000060"):
            (path / "plans" / f"{name}.json").write_text(plan.to_json())
        evaluation = plan_fixed(plan.lengths, Layout(4), cp=2, max_tokens_per_slot=512, cost=plan.cost.forward_only())
        (path / "plans" / "evaluation-cp4.json").write_text(evaluation.to_json())
    return path


ROW: dict[str, Any] = {"step": 4, "eval_loss": 3.25, "eval_perplexity": 25.79, "eval_token_accuracy": 0.125, "cp": 2}
ROW |= {"planner": "fixed", "eval_documents": 3, "eval_tokens": 261, "eval_targets": 258, "cp_comm_type": ["p2p"]}
ROW |= {"seconds": 0.5}
ROW |= {"by_length": [[0, 127, 3.5, 100, 2], [128, 255, 3.0, 158, 1]], "by_position": [[0, 127, 3.25, 258, 3]]}
RECORD: dict[str, Any] = {"target": "runs/<b>", "kind": "run", "world": 2, "parallel": {"tp": 2, "pp": 1}}
RECORD |= {"changes": [{"key": "parallel.tp", "before": 4, "now": 2}], "evaluations": [ROW]}
DIFFERENCE: dict[str, Any] = {"name": "", "first": 3.25, "other": 3.0, "difference": -0.25, "lower": 2}
DIFFERENCE |= {
    "standard_error": None,
    "figure": "loss",
    "unit": "document",
    "count": 3,
    "by_length": [[0, 127, 3.5, 3.1, 2]],
}
