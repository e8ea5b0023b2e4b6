"""Which communication types come into question for a plan, and what they are called."""

import pytest

from longspan.layout import Layout
from longspan.plan import Cost, PlanOptions, plan_dynamic, plan_fixed
from longspan.plan.micro_batch import type_text
from longspan.plan.ways import list_type_options, plan_type_text


@pytest.mark.parametrize(
    ("cp", "heads", "tp", "partition", "expected"),
    [
        (1, 8, 1, "zigzag", ["p2p"]),
        (4, None, 1, "zigzag", ["p2p", "all_gather"]),
        (4, 8, 1, "zigzag", ["p2p", "all_gather", "a2a", "a2a+p2p"]),
        (8, 8, 2, "zigzag", ["p2p", "all_gather", "a2a+p2p"]),
        (8, 8, 1, "contiguous", ["a2a"]),
        (6, 8, 1, "contiguous", ["p2p", "all_gather"]),
        (16, 32, 1, "zigzag", ["p2p", "all_gather", "a2a", "a2a+p2p"]),
    ],
)
def test_types_at_a_degree(cp: int, heads: int | None, tp: int, partition: str, expected: list[str]) -> None:
    options = PlanOptions(
        cp_comm_type="auto", heads=heads, partition="contiguous" if partition != "zigzag" else "zigzag"
    )
    ways = list_type_options(options, Layout(48 * tp, tp=tp), cp)
    assert [type_text(way.cp_comm_type, [way.hierarchical_context_parallel_sizes]) for way in ways] == expected
    for way in ways:
        plan_fixed([4800], Layout(48 * tp, tp=tp), cp, options=way)


def test_types_of_a_dynamic_plan() -> None:
    options, home = PlanOptions(cp_comm_type="auto", heads=8, max_tokens_per_slot=1000), Layout(12)
    ways = list_type_options(options, home)
    assert [way.cp_comm_type for way in ways] == ["p2p", "all_gather", "a2a", "a2a+p2p"]
    for way in ways:
        plan = plan_dynamic([7000, 900, 30], home, options=way)
        assert plan.cost.cp_comm_type == way.cp_comm_type and plan_type_text(plan).startswith(str(way.cp_comm_type))
    assert plan_type_text(plan_fixed([90, 30], home, 1, options=ways[1])) == ""


def test_a_type_that_is_named_is_the_only_one() -> None:
    options = PlanOptions(cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes=(4, 2))
    (way,) = list_type_options(options, Layout(8), 2)
    assert way.hierarchical_context_parallel_sizes == (2, 1)
    assert plan_fixed([90], Layout(8), 2, options=way).cost == Cost().under("a2a+p2p", 2)
    assert list_type_options(options, Layout(8)) == [options]
