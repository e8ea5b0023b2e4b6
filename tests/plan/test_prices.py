"""One plan has one price, whoever asks; when slots start and end, against a simulation; constants that are wrong."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import get_args

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st

from longspan.layout import Layout
from longspan.plan import (
    Cost,
    CostSettings,
    Group,
    Machine,
    MicroBatch,
    Mode,
    Plan,
    PlanOptions,
    plan_dynamic,
    plan_fixed,
    slot_rows,
)
from longspan.plan.micro_batch import PARTITIONS
from longspan.plan.shape.model_shape import QWEN3_8B
from longspan.plan.step_times import GroupTable
from longspan.resolve.evaluation import plan_evaluation
from tests.plan.cases import HYBRID, bounded, plans, simulate

document_lengths = st.lists(st.one_of(st.integers(1, 400), st.integers(1, 20000)), min_size=1, max_size=10)
homes = st.sampled_from([(4, 1), (8, 1), (6, 2), (4, 3)])  # slots, stages
small = QWEN3_8B | {"num_hidden_layers": 2}
costs = st.sampled_from(
    [
        *(Cost(sharding_seconds=seconds, chunks=chunks) for seconds in (0.0, 0.3, 20.0) for chunks in (1, 2)),
        *(Machine.known("H200").cost(small, CostSettings(shards=shards)) for shards in (0, 8)),
        *(Machine.cpus().cost(HYBRID).for_partition(kind) for kind in PARTITIONS),
    ]
)


@settings(derandomize=True, deadline=None, max_examples=8)
@given(document_lengths, homes, costs, st.sampled_from([0, 700]), st.booleans(), st.sampled_from(get_args(Mode)))
def test_a_plan_has_one_price_and_the_dynamic_one_is_not_slower_than_others(
    lengths: list[int], shape: tuple[int, int], cost: Cost, room: int, evaluation: bool, mode: Mode
) -> None:
    slots, pp = shape
    home, rows = Layout(slots * pp, pp=pp), -(-max(lengths) // slots) + room
    options = PlanOptions(
        cp_comm_type="auto",
        heads=8,
        max_tokens_per_slot=rows,
        node_size=4,
        cost=cost,
        micro_batch_multiple=pp,
        mode=mode if pp == 1 else "lockstep",
        partition=cost.states.partition if cost.states else "zigzag",
    )
    degrees = [cp for cp in range(1, slots + 1) if slots % cp == 0 and max(lengths) <= cp * rows]

    def made(planner: Callable[..., Plan], widest: int) -> Plan:
        if not evaluation:
            return planner(lengths, home, options=options)
        return plan_evaluation(lambda way: planner(lengths, home, options=way), lengths, home, options, widest)

    fixed = [made(partial(plan_fixed, cp=cp), cp) for cp in degrees]
    dynamic = made(partial(plan_dynamic, effort="fast"), slots)
    for plan in (*fixed, dynamic):
        assert plan.predicted_seconds == plan.timeline().step_seconds == plan.reprice(plan.cost).predicted_seconds
        assert plan.lower_bound_seconds <= plan.predicted_seconds
        assert dynamic.predicted_seconds <= plan.predicted_seconds * (1 + 1e-9)


@pytest.mark.parametrize(
    "cost", [Cost(across_bytes_per_second=1e9), Machine.known("H200").cost(small)], ids=["ideal", "H200"]
)
def test_a2a_p2p_without_sizes_has_the_best_sizes(cost: Cost) -> None:
    home, lengths = Layout(16), [60000, 9000, 300, 5]
    options = PlanOptions(cp_comm_type="a2a+p2p", heads=8, max_tokens_per_slot=8192, node_size=8, cost=cost)
    best = plan_fixed(lengths, home, 16, options=options)
    sizes = [(inner, 16 // inner) for inner in (1, 2, 4, 8)]
    given = [plan_fixed(lengths, home, 16, options=options, hierarchical_context_parallel_sizes=pair) for pair in sizes]
    assert best.predicted_seconds <= min(plan.predicted_seconds for plan in given) * (1 + 1e-9)
    dynamic = plan_dynamic(lengths, home, options=options)
    assert dynamic.predicted_seconds <= best.predicted_seconds and dynamic.lower_bound_seconds > 0
    layered = plan_fixed(lengths, home, 16, options=options, cp_comm_type=["p2p", "a2a+p2p", "a2a+p2p"])
    for plan in (best, layered):
        found = {group.hierarchical_context_parallel_sizes for group in plan.groups}
        assert found - {None} and found <= {*sizes, None}


def test_rows_are_whole_padded_and_rounded() -> None:
    batches = [MicroBatch((Group((0, 1, 2), (0, 1), (5, 6)), Group((2,), (2,), (4,), pad_to=7)))]
    assert slot_rows(batches, 4).tolist() == [[4, 4, 11, 0]]
    assert slot_rows(batches, 4, row_multiple=8).tolist() == [[8, 8, 16, 0]]


@given(data=st.data())
@bounded
def test_against_a_simulation_slot_by_slot(data: st.DataObject) -> None:
    plan: Plan = data.draw(plans(data.draw(st.sampled_from(["lockstep", "free"]))))
    times = plan.timeline()

    def price(group: Group) -> float:
        inside, rows = len({slot // plan.node_size for slot in group.slots}) == 1, group.laid_out
        return float(plan.cost.group_seconds(sum(rows), sum(n * n for n in rows), group.degree, inside))

    busy, start, end = (np.array(values) for values in simulate(plan, price))
    np.testing.assert_allclose(times.busy, busy, rtol=1e-12)
    np.testing.assert_allclose(times.start, start, rtol=1e-12)
    np.testing.assert_allclose(times.end, end, rtol=1e-12)
    assert times.step_seconds == pytest.approx(max(end[-1]), rel=1e-12)
    if plan.mode == "lockstep":
        np.testing.assert_allclose(times.idle, 1 - busy.mean(axis=1) / busy.max(axis=1), atol=1e-12)
    assert (times.rows <= plan.max_tokens_per_slot).all()


def test_a_known_machine_computes_no_attention_over_padding() -> None:
    group = Group((0, 1), (0, 1), (100, 300), pad_to=400)
    padded, bare = ([MicroBatch((replace(group, pad_to=pad),))] for pad in (400, None))
    known = Machine.known("H200").cost(QWEN3_8B)
    alone = {"linear_seconds": 0.0, "real_row_seconds": 0.0, "ring_bytes": 0.0, "merge_seconds": 0.0}
    attention = replace(known, **alone, network=replace(known.network, half_speed_rows=0.0))
    for cost, same in ((attention, True), (replace(Cost(), **alone), False), (known, False)):  # other layers have it
        tables = map(GroupTable, (padded, bare))
        of_padded, of_bare = (table.group_seconds(cost, 8)[0] for table in tables)
        assert (of_padded == of_bare) == same and of_padded >= of_bare > 0
