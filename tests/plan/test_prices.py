"""One plan has one price, whoever asks: planners, evaluations, and a plan that is priced again."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.layout import Layout
from longspan.plan import Cost, CostSettings, Machine, Plan, PlanOptions, plan_dynamic, plan_fixed
from longspan.plan.shape.model_shape import QWEN3_8B
from longspan.plan.ways import plan_evaluation

document_lengths = st.lists(st.one_of(st.integers(1, 400), st.integers(1, 20000)), min_size=1, max_size=24)
homes = st.sampled_from([(4, 1), (8, 1), (6, 2), (4, 3)])  # slots, stages
small = QWEN3_8B | {"num_hidden_layers": 2}
costs = st.sampled_from(
    [
        *(Cost(sharding_seconds=seconds, chunks=chunks) for seconds in (0.0, 0.3, 20.0) for chunks in (1, 2)),
        *(Machine.known("H200").cost(small, CostSettings(shards=shards)) for shards in (0, 8)),
    ]
)


@settings(derandomize=True, deadline=None, max_examples=12)
@given(document_lengths, homes, costs, st.sampled_from([0, 700]), st.booleans())
def test_a_plan_has_one_price_and_the_dynamic_one_is_not_slower_than_others(
    lengths: list[int], shape: tuple[int, int], cost: Cost, room: int, evaluation: bool
) -> None:
    slots, pp = shape
    home, rows = Layout(slots * pp, pp=pp), -(-max(lengths) // slots) + room
    options = PlanOptions(
        cp_comm_type="auto", heads=8, max_tokens_per_slot=rows, node_size=4, cost=cost, micro_batch_multiple=pp
    )
    degrees = [cp for cp in range(1, slots + 1) if slots % cp == 0 and max(lengths) <= cp * rows]

    def made(planner: Callable[..., Plan], widest: int) -> Plan:
        if not evaluation:
            return planner(lengths, home, options=options)
        return plan_evaluation(lambda way: planner(lengths, home, options=way), lengths, home, options, widest)

    fixed = [made(partial(plan_fixed, cp=cp), cp) for cp in degrees]
    dynamic = made(plan_dynamic, slots)
    for plan in (*fixed, dynamic):
        assert plan.predicted_seconds == plan.timeline().step_seconds == plan.reprice(plan.cost).predicted_seconds
        assert plan.lower_bound_seconds <= plan.predicted_seconds
        assert dynamic.predicted_seconds <= plan.predicted_seconds


@pytest.mark.parametrize("pp", [1, 2])
def test_messages_of_sharded_weights_are_in_every_price(pp: int) -> None:
    home, cost = Layout(4 * pp, pp=pp), replace(Cost(), sharding_seconds=10.0)
    options = PlanOptions(max_tokens_per_slot=4096, cost=cost)
    plan = plan_fixed([4096] * 16, home, 1, options=options)
    assert plan.predicted_seconds == pytest.approx((4 + pp - 1) / pp * (10 + cost.micro_batch_seconds))


@pytest.mark.parametrize(
    "cost", [Cost(across_bytes_per_second=1e9), Machine.known("H200").cost(small)], ids=["ideal", "H200"]
)
def test_a2a_p2p_without_sizes_has_the_best_sizes(cost: Cost) -> None:
    home, lengths = Layout(16), [60000, 9000, 8000, 300, 20, 5]
    options = PlanOptions(cp_comm_type="a2a+p2p", heads=8, max_tokens_per_slot=8192, node_size=8, cost=cost)
    best = plan_fixed(lengths, home, 16, options=options)
    sizes = [(inner, 16 // inner) for inner in (1, 2, 4, 8)]
    given = [plan_fixed(lengths, home, 16, options=options, hierarchical_context_parallel_sizes=pair) for pair in sizes]
    assert best.predicted_seconds <= min(plan.predicted_seconds for plan in given) * (1 + 1e-9)
    dynamic = plan_dynamic(lengths, home, options=options)
    assert dynamic.predicted_seconds <= best.predicted_seconds and dynamic.lower_bound_seconds > 0
    unknown = plan_fixed(lengths, home, 16, options=options, heads=None)
    layered = plan_fixed(lengths, home, 16, options=options, cp_comm_type=["p2p", "a2a+p2p", "a2a+p2p"])
    sizes_of_heads = (1, 2, 4, 8)
    for plan, first in (
        (best, sizes_of_heads),
        (unknown, sizes_of_heads if cost.network else (1,)),
        (layered, sizes_of_heads),
    ):
        groups = [group for batch in plan.micro_batches for group in batch.groups]
        assert all(n[0] in first and n[0] * n[1] == 16 for g in groups if (n := g.hierarchical_context_parallel_sizes))
        assert any(g.hierarchical_context_parallel_sizes for g in groups) and plan.check() == plan
