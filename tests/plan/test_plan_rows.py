"""Plans as a run keeps them, in few bytes: they come back equal, and how many bytes a step takes."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from longspan.errors import PlanError
from longspan.layout import Layout
from longspan.plan import Cost, Plan, plan_dynamic, plan_fixed, plan_padded, read_plans
from longspan.plan.distributions import sample_lengths
from longspan.plan.plan import group_counts, plan_row

LENGTHS = [900, 300, 20, 400, 7, 1200, 63]
PLANS = {
    "fixed": plan_fixed(LENGTHS, Layout(8), 4, max_tokens_per_slot=512, cp_comm_type=["p2p", "a2a"]),
    "two levels": plan_fixed(
        LENGTHS, Layout(8), 4, cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes=(2, 2), node_size=4
    ),
    "padded": plan_padded(LENGTHS, Layout(8), 2, row_multiple=2, micro_batch_multiple=3),
    "dynamic": plan_dynamic(LENGTHS, Layout(8), max_tokens_per_slot=512, mode="free", partition="contiguous"),
    "empty": plan_fixed([], Layout(2), 1),
}


def scattered(plan: Plan) -> Plan:
    """A plan whose groups have other slots than neighbours in order."""
    places = [5, 0, 3, 6, 1, 7, 2, 4]
    batches = (
        replace(batch, groups=tuple(replace(g, slots=tuple(places[s] for s in g.slots)) for g in batch.groups))
        for batch in plan.micro_batches
    )
    return replace(plan, micro_batches=tuple(batches))


@pytest.mark.parametrize("plan", [*PLANS.values(), scattered(PLANS["fixed"])], ids=[*PLANS, "scattered"])
def test_a_plan_comes_back(plan: Plan, tmp_path: Path) -> None:
    (tmp_path / "plans.jsonl").write_text(plan_row(3, plan) + "\n")
    ((step, again),) = read_plans(tmp_path / "plans.jsonl")
    assert step == 3 and again == plan and again.digest() == plan.digest() and again.cost.source == plan.cost.source
    assert len(plan_row(3, plan)) < len(plan.to_json())


def test_a_cost_stands_where_it_changes(tmp_path: Path) -> None:
    plan = PLANS["dynamic"]
    other = replace(plan, cost=Cost(linear_seconds=1e-3, source="another machine"))
    rows = [plan_row(1, plan), plan_row(2, plan, after=plan.cost), plan_row(3, other, after=plan.cost)]
    assert ["cost" in json.loads(row) for row in rows] == [True, False, True]
    (tmp_path / "plans.jsonl").write_text("\n".join(rows) + '\n{"step":4,"slo')
    assert dict(read_plans(tmp_path / "plans.jsonl")) == {1: plan, 2: plan, 3: other}


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[]", "line 1 holds no plan: TypeError"),
        ('{"step":1}', "line 1 holds no plan: KeyError"),
        (plan_row(1, PLANS["fixed"]).replace("[0,0,4,", "[0,6,4,", 1), "has slots .* but the plan has slots 0 to 7"),
    ],
)
def test_a_line_that_holds_no_plan(line: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "plans.jsonl").write_text(line + "\n")
    with pytest.raises(PlanError, match=message):
        list(read_plans(tmp_path / "plans.jsonl"))


def test_a_step_of_1024_slots_takes_few_bytes() -> None:
    """Eight million tokens, some 1,500 documents: 9 bytes a document, 16 a group."""
    lengths = [int(n) for n in sample_lengths("lognorm", 1024 * 8192, seed=1)]
    plan = plan_dynamic(lengths, Layout(1024), max_tokens_per_slot=8192)
    row = plan_row(1, plan, after=plan.cost)
    groups = sum(len(micro_batch.groups) for micro_batch in plan.micro_batches)
    assert len(row) < 20_000 and len(row) < 9 * len(lengths) + 16 * groups


def test_groups_are_counted_by_degree_and_type() -> None:
    assert group_counts(PLANS["empty"]) == []
    plan = PLANS["two levels"]
    shared = {"degree": 4, "cp_comm_type": "a2a+p2p (2, 2)"}
    assert group_counts(plan) == [shared | {"count": 2, "tokens": sum(LENGTHS)}]
    kinds = [(row["degree"], row["cp_comm_type"]) for row in group_counts(PLANS["fixed"])]
    assert kinds == [(4, "p2p/a2a")]
    dynamic = group_counts(PLANS["dynamic"])
    assert sum(row["tokens"] for row in dynamic) == sum(LENGTHS)
    assert sum(row["count"] for row in dynamic) == sum(len(b.groups) for b in PLANS["dynamic"].micro_batches)
    assert {row["cp_comm_type"] for row in dynamic if row["degree"] == 1} <= {""}
