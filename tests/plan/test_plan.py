"""What makes a plan sound, its digest, JSON and rows of a file, its text, and the levels of its groups."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from longspan.errors import PlanError
from longspan.layout import Layout
from longspan.plan import Cost, Group, MicroBatch, Plan, plan_dynamic, plan_fixed, plan_padded, read_plans
from longspan.plan.distributions import sample_lengths
from longspan.plan.plan import group_counts
from longspan.plan.plan_rows import plan_row
from tests.plan.cases import bounded, plans

WIDE = Group((0, 1, 2), (0, 1), (10, 20), ("a2a+p2p", "p2p"), (3, 1))
OWN = Group((1,), (2,), (31,), pad_to=33)
GOOD = Plan(4, (10, 20, 31), (MicroBatch((WIDE, OWN)), MicroBatch()), 58, max_tokens_per_slot=43)


def with_group(**changes: Any) -> Plan:
    return replace(GOOD, micro_batches=(MicroBatch((WIDE, replace(OWN, **changes))),))


def test_a_sound_plan() -> None:
    assert GOOD.check() is GOOD
    assert (GOOD.tokens, GOOD.targets) == (61, 58)
    assert GOOD.efficiency == 61 / (4 * 2 * 43)
    assert np.isnan(GOOD.ratio)
    assert replace(GOOD, predicted_seconds=3.0, lower_bound_seconds=2.0).ratio == 1.5


BAD = [
    (with_group(slots=(4,)), r"micro-batch 0, group 1 has slots \(4\), but the plan has slots 0 to 3"),
    (with_group(slots=(1, 1)), r"micro-batch 0, group 1 names a slot twice: slots \(1, 1\)"),
    (with_group(slots=()), "micro-batch 0, group 1 has no slots"),
    (with_group(documents=(), lengths=()), "micro-batch 0, group 1 has no documents; leave the group out"),
    (with_group(slots=(np.int64(1),)), "slots .* must be integers"),
    (with_group(documents=(7,)), r"has documents \(7\), but the plan has documents 0 to 2"),
    (with_group(lengths=(30,)), "gives document 2 30 rows, but the plan's lengths say 31"),
    (with_group(lengths=(31, 4)), "has 1 documents and 2 lengths"),
    (with_group(pad_to=30), "pads to 30 rows, less than its longest document, 31"),
    (with_group(partition="spiral"), "group 1: partition is 'spiral'; use one of zigzag, contiguous"),
    (with_group(cp_comm_type="ring"), "group 1: cp_comm_type is 'ring'"),
    (with_group(cp_comm_type=()), "group 1: cp_comm_type is an empty list"),
    (with_group(cp_comm_type="a2a+p2p"), "group 1: cp_comm_type a2a.p2p needs hierarchical_context_parallel_sizes"),
    (
        with_group(documents=(0,), lengths=(10,), pad_to=None),
        r"document 0 \(10 rows\) is 2 times \(micro-batches \(0\)\)",
    ),
    (replace(GOOD, lengths=(10, 20, 31, 5)), r"document 3 \(5 rows\) is in no micro-batch, .* 1 of 4 documents"),
    (replace(GOOD, max_tokens_per_slot=42), r"slot 1 holds 43 rows in micro-batch 0 \(groups \(0, 1\)\), above .* 42"),
    (replace(GOOD, row_multiple=8, max_tokens_per_slot=47), "slot 1 holds 48 rows in multiples of 8 in micro-batch 0"),
    (replace(GOOD, lengths=(10, 20, 0)), "the plan's lengths: length 2 is 0"),
    (replace(GOOD, lengths=[10, 20, 31]), "lengths must be a tuple of int, got list"),
    (replace(GOOD, slots=0), "slots is 0"),
    (replace(GOOD, targets=-1), "targets is -1"),
    (replace(GOOD, node_size=0), "node_size is 0"),
    (replace(GOOD, row_multiple=True), "row_multiple is True"),
    (replace(GOOD, max_tokens_per_slot=0), "max_tokens_per_slot is 0"),
    (replace(GOOD, mode="loose"), "mode is 'loose'"),
    (replace(GOOD, micro_batches=()), "the plan has no micro-batch"),
]


@pytest.mark.parametrize(("plan", "message"), BAD)
def test_unsound_plans_are_named(plan: Plan, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan.check()


@given(data=st.data())
@bounded
def test_json_gives_an_equal_plan_back(data: st.DataObject) -> None:
    plan = data.draw(plans(data.draw(st.sampled_from(["lockstep", "free"]))))
    plan = replace(plan, predicted_seconds=1 / 3, lower_bound_seconds=0.1, cost=Cost(linear_seconds=1 / 7))
    for indent in (None, 2):
        again = Plan.from_json(plan.to_json(indent))
        assert again == plan and again.digest() == plan.digest()


def test_short_json() -> None:
    groups = [[{"slots": [0, 1], "documents": [1, 0]}], []]
    plan = Plan.from_json(json.dumps({"slots": 2, "lengths": [4, 6], "micro_batches": groups}))
    assert plan == Plan(2, (4, 6), (MicroBatch((Group((0, 1), (1, 0), (6, 4)),)), MicroBatch()), 8)


def edited(**changes: Any) -> dict[str, Any]:
    return json.loads(GOOD.to_json()) | changes


def group(**changes: Any) -> dict[str, Any]:
    group = {"slots": [0], "documents": [0]} | changes
    return {"slots": 1, "lengths": [3], "micro_batches": [[{k: v for k, v in group.items() if v != "gone"}]]}


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("{", "a plan must be JSON as Plan.to_json writes it: .*column 2"),
        ([], "as Plan.to_json writes it: KeyError: 'lengths'"),
        ({"slots": 2}, "as Plan.to_json writes it: KeyError: 'lengths'"),
        (edited(rank=3), "unexpected keyword argument 'rank'"),
        (edited(tokens=60), "the plan says 60 tokens, but its lengths add up to 61"),
        (edited(lengths="x"), "as Plan.to_json writes it: IndexError"),
        (edited(micro_batches=[3]), "'int' object is not iterable"),
        (edited(micro_batches=[[3]]), "'int' object has no attribute 'items'"),
        (edited(predicted_seconds="x"), "predicted_seconds is 'x'"),
        (edited(lower_bound_seconds=float("nan")), "lower_bound_seconds is nan"),
        (edited(cost={"tau": 1}), "a cost is an object with numbers for some of linear_seconds"),
        (edited(slots=2.0), "slots is 2.0"),
        (group(slots="gone"), "missing 1 required positional argument: 'slots'"),
        (group(slots=3), "'int' object is not iterable"),
        (group(slots=["a"]), r"micro-batch 0, group 0: slots \(a\) must be integers"),
        (group(documents=[1]), "as Plan.to_json writes it: IndexError"),
        (group(documents=[-1]), r"micro-batch 0, group 0 has documents \(-1\), but the plan has documents 0 to 0"),
        (group(cp_comm_type=3), "'int' object is not iterable"),
        (group(degree=4), "unexpected keyword argument 'degree'"),
        (group(pad_to="x"), "pads to 'x' rows"),
    ],
)
def test_bad_json_is_named(values: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_json(values if isinstance(values, str) else json.dumps(values))


def test_digest_sees_every_integer_and_string() -> None:
    swapped = MicroBatch((replace(WIDE, slots=(1, 0, 2)), OWN))
    changes: list[dict[str, Any]] = [{"slots": 5}, {"targets": 57}, {"mode": "free"}, {"max_tokens_per_slot": 44}]
    changes += [{"node_size": 4}, {"row_multiple": 43}]
    batches = [GOOD.micro_batches[:1], GOOD.micro_batches[::-1], (swapped, MicroBatch())]
    batches += [(MicroBatch((OWN, WIDE)), MicroBatch())]
    groups: list[dict[str, Any]] = [{"pad_to": None}, {"partition": "contiguous"}, {"cp_comm_type": "a2a"}]
    groups += [{"cp_comm_type": ("p2p",)}, {"lengths": (30,)}, {"hierarchical_context_parallel_sizes": (1, 1)}]
    batches += [(MicroBatch((WIDE, replace(OWN, **change))), MicroBatch()) for change in groups]
    others = [replace(GOOD, **change) for change in (*changes, *({"micro_batches": some} for some in batches))]
    digests = [plan.digest() for plan in [GOOD, *others]]
    assert len(set(digests)) == len(digests) and all(len(digest) == 64 for digest in digests)


def test_digest_leaves_times_out() -> None:
    priced = replace(GOOD, predicted_seconds=1.0, lower_bound_seconds=0.5, cost=Cost(linear_seconds=1.0))
    assert priced.digest() == GOOD.digest() and priced != GOOD
    assert GOOD.digest() is GOOD.digest()  # worked out once
    assert GOOD.digest() == "babfbfac3a42b8fa8ab20a889c792bb3d9c58ef01985eb6fa84712e77dd21ab7"


ROWS = [900, 300, 20, 400, 7, 1200, 63]
PLANS = {
    "fixed": plan_fixed(ROWS, Layout(8), 4, max_tokens_per_slot=512, cp_comm_type=["p2p", "a2a"]),
    "two levels": plan_fixed(
        ROWS, Layout(8), 4, cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes=(2, 2), node_size=4
    ),
    "padded": plan_padded(ROWS, Layout(8), 2, row_multiple=2, micro_batch_multiple=3),
    "dynamic": plan_dynamic(ROWS, Layout(8), max_tokens_per_slot=512, mode="free", partition="contiguous"),
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


def test_a_step_of_256_slots_takes_few_bytes() -> None:
    lengths = sample_lengths("lognorm", 256 * 8192, seed=1).tolist()
    plan = plan_dynamic(lengths, Layout(256), max_tokens_per_slot=8192)
    row = plan_row(1, plan, after=plan.cost)
    groups = sum(len(micro_batch.groups) for micro_batch in plan.micro_batches)
    assert len(row) < 5000 and len(row) < 9 * len(lengths) + 16 * groups


def test_groups_are_counted_by_degree_and_type() -> None:
    assert group_counts(PLANS["empty"]) == []
    shared = {"degree": 4, "cp_comm_type": "a2a+p2p (2, 2)"}
    assert group_counts(PLANS["two levels"]) == [shared | {"count": 2, "tokens": sum(ROWS)}]
    assert [row["cp_comm_type"] for row in group_counts(PLANS["fixed"])] == ["p2p/a2a"]
    dynamic = group_counts(PLANS["dynamic"])
    assert sum(row["count"] for row in dynamic) == sum(len(b.groups) for b in PLANS["dynamic"].micro_batches)
    assert {row["cp_comm_type"] for row in dynamic if row["degree"] == 1} <= {""}


def test_the_table_of_a_plan() -> None:
    wide, narrow = Group((0, 1), (0, 1), (1000, 24)), Group((3,), (2,), (300,))
    plan = Plan(4, (1000, 24, 300), (MicroBatch((wide, narrow)), MicroBatch()), 1321, max_tokens_per_slot=600)
    rows = [" ".join(line.split()) for line in plan.table().splitlines()]
    assert rows[0] == "given plan, lockstep: 4 slots, 2 micro-batches, at most 600 rows a slot"
    assert rows[1:4] == [
        "documents 3 24 to 1,000 rows, median 300",
        "tokens 1,324 1,321 targets",
        "predicted 80.1 ms no lower bound",
    ]
    assert rows[-2:] == ["0 1 x cp 2, 1 x cp 1 1,324 512 70.1 ms 30.6%", "1 dummy 0 0 10 ms 0.0%"]


def test_a_long_plan_counts_the_rest() -> None:
    plan = plan_fixed([100] * 120, Layout(2), 1, max_tokens_per_slot=100)
    lines = plan.table(limit=9).splitlines()
    assert len(plan.micro_batches) == 60
    assert len(lines) == 8 + 9 + 1
    assert lines[-1] == "51 more micro-batches" and lines[-2].split()[0] == "8"
    assert not any("more micro-batch" in plan.table(limit=limit) for limit in (60, 61))
    slow = replace(plan.cost, linear_seconds=1.0)  # a plan under another cost
    assert plan.timeline(slow).step_seconds > 100 * plan.timeline().step_seconds
    assert plan.table(slow, limit=9).splitlines()[:4] != lines[:4]
    groups = tuple(Group(tuple(range(n)), (n - 1,), (5,)) for n in range(1, 7))
    plan = Plan(6, (5,) * 6, (MicroBatch(groups),), 24)
    assert "1 x cp 6, 1 x cp 5, 1 x cp 4, 1 x cp 3, 2 more" in plan.table().splitlines()[-1]
    text = plan_fixed([], Layout(2), 1).table()
    assert "none" in text and "dummy" in text
