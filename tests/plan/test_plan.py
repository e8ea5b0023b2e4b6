"""What makes a plan sound, its digest, and its JSON."""

import json
import subprocess
import sys
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.errors import PlanError
from longspan.plan import Cost, Group, MicroBatch, Plan
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
    (with_group(slots=(-1,)), r"has slots \(-1\)"),
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


def test_json_layout() -> None:
    values = json.loads(GOOD.to_json())
    assert values["micro_batches"][1] == []
    assert values["micro_batches"][0][0] == {
        "slots": [0, 1, 2],
        "documents": [0, 1],
        "lengths": [10, 20],
        "cp_comm_type": ["a2a+p2p", "p2p"],
        "hierarchical_context_parallel_sizes": [3, 1],
    }
    assert values["micro_batches"][0][1]["pad_to"] == 33
    assert (values["slots"], values["lengths"], values["tokens"], values["targets"]) == (4, [10, 20, 31], 61, 58)
    assert {"predicted_seconds", "lower_bound_seconds", "mode", "max_tokens_per_slot", "node_size"} <= set(values)


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
        ([], "the plan must be an object, got list"),
        ({"slots": 2}, "the plan lacks lengths, micro_batches"),
        (edited(rank=3), "the plan has unknown rank; known are cost, lengths"),
        (edited(tokens=60), "the plan says 60 tokens, but its lengths add up to 61"),
        (edited(lengths="x"), "lengths must be a list, got str"),
        (edited(lengths=[10, 20, 31.5]), "the plan's lengths: length 2 is 31.5"),
        (edited(micro_batches={}), "micro_batches must be a list, got dict"),
        (edited(micro_batches=[3]), "micro-batch 0 must be a list, got int"),
        (edited(micro_batches=[[3]]), "micro-batch 0, group 0 must be an object, got int"),
        (edited(predicted_seconds="x"), "predicted_seconds is 'x'"),
        (edited(lower_bound_seconds=float("nan")), "lower_bound_seconds is nan"),
        (edited(cost={"tau": 1}), "a cost is an object with numbers for some of linear_seconds"),
        (edited(slots=2.0), "slots is 2.0"),
        (edited(targets=None), "targets is None"),
        (group(slots="gone"), "micro-batch 0, group 0 lacks slots"),
        (group(slots=0), "micro-batch 0, group 0: slots must be a list, got int"),
        (group(slots=["a"]), r"micro-batch 0, group 0: slots \(a\) must be integers"),
        (group(documents=[1]), r"micro-batch 0, group 0 has documents \(1,\), but the plan has 1 lengths"),
        (group(lengths=None), "micro-batch 0, group 0: lengths must be a list, got NoneType"),
        (group(lengths=[4]), "gives document 0 4 rows, but the plan's lengths say 3"),
        (group(cp_comm_type=3), "micro-batch 0, group 0: cp_comm_type must be a list, got int"),
        (group(cp_comm_type=[3]), "cp_comm_type of layer 0 is 3"),
        (group(hierarchical_context_parallel_sizes=4), "sizes must be a list, got int"),
        (group(degree=4), "micro-batch 0, group 0 has unknown degree; known are cp_comm_type"),
        (group(pad_to="x"), "pads to 'x' rows"),
    ],
)
def test_bad_json_is_named(values: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.from_json(values if isinstance(values, str) else json.dumps(values))


def test_digest_sees_every_integer_and_string() -> None:
    swapped = MicroBatch((replace(WIDE, slots=(1, 0, 2)), OWN))
    others = [
        replace(GOOD, slots=5),
        replace(GOOD, targets=57),
        replace(GOOD, mode="free"),
        replace(GOOD, max_tokens_per_slot=44),
        replace(GOOD, node_size=4),
        replace(GOOD, row_multiple=43),
        replace(GOOD, micro_batches=GOOD.micro_batches[:1]),
        replace(GOOD, micro_batches=GOOD.micro_batches[::-1]),
        replace(GOOD, micro_batches=(swapped, MicroBatch())),
        replace(GOOD, micro_batches=(MicroBatch((OWN, WIDE)), MicroBatch())),
        *(
            replace(GOOD, micro_batches=(MicroBatch((WIDE, replace(OWN, **change))), MicroBatch()))
            for change in (
                {"pad_to": None},
                {"partition": "contiguous"},
                {"cp_comm_type": "a2a"},
                {"cp_comm_type": ("p2p",)},
                {"lengths": (30,)},
                {"hierarchical_context_parallel_sizes": (1, 1)},
            )
        ),
    ]
    digests = [plan.digest() for plan in [GOOD, *others]]
    assert len(set(digests)) == len(digests) and all(len(digest) == 64 for digest in digests)


def test_a_digest_is_worked_out_once(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = replace(GOOD)
    digest = plan.digest()
    monkeypatch.setattr(Plan, "_fields_for_digest", lambda plan: {})
    assert plan.digest() == digest != replace(GOOD).digest()


def test_digest_leaves_times_out() -> None:
    priced = replace(GOOD, predicted_seconds=1.0, lower_bound_seconds=0.5, cost=Cost(linear_seconds=1.0))
    assert priced.digest() == GOOD.digest() and priced != GOOD
    assert GOOD.digest() == "babfbfac3a42b8fa8ab20a889c792bb3d9c58ef01985eb6fa84712e77dd21ab7"


def test_planning_imports_no_torch() -> None:
    code = "import sys, longspan.plan; sys.exit('torch' in sys.modules or 'transformers' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
