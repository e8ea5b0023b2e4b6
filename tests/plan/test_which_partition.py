"""How a hybrid's rows are dealt out: by the time of plans, contiguous where that is close; a user's word is kept."""

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.errors import PlanError
from longspan.layout import Layout
from longspan.plan import Cost, Machine, PlanOptions, plan_dynamic, plan_fixed
from longspan.plan.ways import CLOSE, PartitionChoice, which_partition
from tests.plan.cases import bounded
from tests.plan.cost.test_state_cost import HYBRID

QWEN3_NEXT: dict[str, Any] = {
    "model_type": "qwen3_next",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "vocab_size": 151936,
    "num_attention_heads": 16,
    "num_key_value_heads": 2,
    "head_dim": 256,
    "full_attention_interval": 4,
    "linear_num_key_heads": 16,
    "linear_num_value_heads": 32,
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 128,
    "linear_value_head_dim": 128,
    "moe_intermediate_size": 512,
    "shared_expert_intermediate_size": 512,
    "num_experts_per_tok": 10,
    "num_experts": 512,
}
COST = Machine.known("H200").cost(QWEN3_NEXT)


def weighed(lengths: list[int], partition: Any = "auto", degree: int = 4, **options: Any) -> PartitionChoice:
    usual = PlanOptions(cost=COST, cp_comm_type="auto", heads=16)
    home = Layout(degree)

    def seconds_of(way: PlanOptions) -> float:
        return plan_fixed(lengths, home, degree, options=way).predicted_seconds

    return which_partition(seconds_of, PlanOptions(**vars(usual) | options), partition)


def test_many_documents_want_contiguous_rows() -> None:
    """The case of docs/hybrid.md: 65,536 rows on four slots, as 32 documents and as one."""
    many, one = weighed([2048] * 32), weighed([65536])
    assert (many.options.partition, many.options.cp_comm_type) == ("contiguous", "a2a")
    zigzag = min(way.seconds for way in many.ways if way.options.partition == "zigzag")
    assert zigzag > 1.1 * many.ways[0].seconds  # 704 MiB of states a layer
    assert (one.options.partition, one.options.cp_comm_type) == ("contiguous", "a2a")
    rings = [way for way in one.ways if str(way) == "contiguous under p2p"]
    assert rings[0].seconds > 1.2 * one.ways[0].seconds  # the last slot has most of the work
    assert many.reason.startswith("contiguous under a2a: ") and "zigzag under p2p" in many.reason


def test_where_heads_do_not_divide_the_ring_decides() -> None:
    one = weighed([65536], heads=9)
    assert (one.options.partition, one.options.cp_comm_type) == ("zigzag", "p2p")
    assert one.left_out == ("contiguous under a2a is not possible", "zigzag under a2a is not possible")
    many = weighed([2048] * 32, heads=9)
    assert (many.options.partition, many.options.cp_comm_type) == ("contiguous", "p2p")


def test_what_is_said_is_kept() -> None:
    assert weighed([65536] * 2, "zigzag").options.partition == "zigzag"
    kept = weighed([2048] * 32, cp_comm_type="p2p")
    assert {way.options.cp_comm_type for way in kept.ways} == {"p2p"}
    layers = weighed([2048] * 32, cp_comm_type=("a2a", "p2p"))
    assert str(layers.ways[0]) == "contiguous under a2a/p2p"
    with pytest.raises(PlanError, match="no way to deal out rows is possible: cp_comm_type 'a2a' deals 9 query heads"):
        weighed([65536], cp_comm_type="a2a", heads=9)


def test_a_cost_of_no_machine_tells_no_seconds() -> None:
    cost = Cost.from_json(COST.to_json() | {"source": ""})
    assert weighed([2048] * 32, cost=cost).reason.startswith("contiguous under a2a, by cost; ")
    assert " x as long" in weighed([2048] * 32, cost=cost).reason


def test_groups_are_priced_by_their_own_type_and_partition() -> None:
    options = PlanOptions(cost=COST, cp_comm_type="a2a", partition="contiguous")
    plan = plan_fixed([90], Layout(2), 2, options=options)
    assert plan.cost.cp_comm_type == "a2a" and plan.cost.states and plan.cost.states.partition == "contiguous"
    other = replace(plan.cost.under("p2p"), states=plan.cost.states.for_partition("zigzag"))
    assert plan.timeline(other).step_seconds == plan.timeline().step_seconds


@settings(bounded, max_examples=10)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=20), st.integers(1, 8))
def test_the_chosen_way_is_as_fast_as_any(lengths: list[int], heads: int) -> None:
    cost = Machine.known("H200").cost(HYBRID)
    options = PlanOptions(cost=cost, cp_comm_type="auto", heads=heads, max_tokens_per_slot=1024)

    def seconds_of(way: PlanOptions) -> float:
        plan = plan_dynamic(lengths, Layout(4), options=way, effort="fast")
        groups = [group for batch in plan.micro_batches for group in batch.groups if group.degree > 1]
        assert {group.partition for group in groups} <= {way.partition}
        return plan.predicted_seconds

    choice = which_partition(seconds_of, options)
    assert choice.ways[0].seconds <= CLOSE * min(way.seconds for way in choice.ways)
    assert len(choice.ways) + len(choice.left_out) == 4
