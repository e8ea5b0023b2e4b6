"""The lower bound: literal values of the research model, and that no plan whatever beats it."""

from dataclasses import replace
from typing import get_args

import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.errors import PlanError
from longspan.layout import Layout
from longspan.plan import Cost, Machine, MicroBatch, Mode, Plan, PlanOptions, lower_bound_seconds, plan_fixed
from longspan.plan.cost.cost import StateCost
from longspan.plan.micro_batch import level_sizes
from tests.plan.cases import bounded, plans
from tests.plan.shape.test_model_shape import QWEN3_8B

CASES = [  # lengths, slots, cap, area, longest; crossing: each step of a long document at the fewest slots waits
    ([5295, 682, 3599, 1484, 2912], 6, 1024, 0.3167267261226666, 0.125821913712, 0.00522421875),
    ([36000] * 3, 16, 16384, 1.40318164, 0.649423, 0.00059326171875),
    ([65536] + [2048] * 40, 64, 8192, 0.45144165486591986, 0.8850351103999999, 0.00063),
    ([131072], 16, 8192, 3.71056130199552, 3.72136130199552, 0.0108),
    ([100] * 1000, 8, 4096, 1.4619755999999997, 0.015092293142857142, 0.0),
]


@pytest.mark.parametrize(("lengths", "slots", "cap", "area", "longest", "crossing"), CASES)
def test_literal_values(lengths: list[int], slots: int, cap: int, area: float, longest: float, crossing: float) -> None:
    bound = lower_bound_seconds(lengths, slots, cap, Cost())
    assert (bound.area, bound.longest, bound.crossing) == pytest.approx((area, longest, crossing), rel=1e-12)
    assert bound.seconds == pytest.approx(max(area + crossing, longest), rel=1e-9)
    assert bound.seconds < max(area + crossing, longest)


def test_launches_are_whole_in_lockstep_and_shared_in_free_mode() -> None:
    lengths, cost = [100] * 30, Cost(micro_batch_seconds=1000.0)
    work = lower_bound_seconds(lengths, 4, 400, Cost(micro_batch_seconds=0.0)).area
    for mode, cap, launches in [
        ("lockstep", 400, 2.0),  # 3000 / (4 x 400) = 1.875
        ("lockstep", 750, 1.0),
        ("lockstep", None, 1.0),
        ("free", 400, 1.875),
        ("free", None, 0.0),
    ]:
        area = lower_bound_seconds(lengths, 4, cap, cost, mode).area
        assert area == pytest.approx(work + 1000.0 * launches, rel=1e-12), (mode, cap)


def test_limits_of_a_group_raise_the_bound() -> None:
    free = lower_bound_seconds([60000], 16, None, Cost()).longest
    assert lower_bound_seconds([60000], 16, None, Cost(), max_cp=4).longest > free
    inside = lower_bound_seconds([60000, 5], 16, None, Cost(across_bytes_per_second=1e9), node_size=16).longest
    assert lower_bound_seconds([60000, 5], 16, None, Cost(across_bytes_per_second=1e9), node_size=2).longest > inside


def test_a_document_that_fits_no_group() -> None:
    with pytest.raises(PlanError, match=r"1000 rows needs 10 slots at max_tokens_per_slot 100, but .* at most 8"):
        lower_bound_seconds([1000], 8, 100, Cost())


def test_no_documents() -> None:
    assert lower_bound_seconds([], 8, 100, Cost()).seconds == pytest.approx(0.01)
    assert lower_bound_seconds([], 8, 100, Cost(), "free").seconds == 0.0


def test_under_auto_a_small_exchange_and_a_hidden_ring_do_not_beat_it() -> None:
    cost = replace(Cost(), ring_bytes=36 * 8192 * 6.0, exchange_bytes=36 * 16384 * 4.0, cp_comm_type="auto", heads=32)
    for speed in (12e9, 25e9, 50e9, 100e9):
        cost = replace(cost, inside_bytes_per_second=speed, across_bytes_per_second=min(speed, 40e9))
        for length in (16384, 98304, 131072):
            options = PlanOptions(max_tokens_per_slot=length // 8, cp_comm_type="auto", heads=32, cost=cost)
            plan = plan_fixed([length], Layout(8), 8, options=options)
            assert plan.lower_bound_seconds <= plan.predicted_seconds < 1.05 * plan.lower_bound_seconds


TYPES = ["p2p", "all_gather", "a2a", "a2a+p2p", "auto"]


def retype(plan: Plan, kind: str, inner: int) -> Plan:
    """The plan with all groups of this type."""
    batches = [
        MicroBatch(
            tuple(
                replace(g, cp_comm_type=kind, hierarchical_context_parallel_sizes=level_sizes(inner, g.degree))
                for g in batch.groups
            )
        )
        for batch in plan.micro_batches
    ]
    return replace(plan, micro_batches=tuple(batches))


@pytest.mark.parametrize("mode", get_args(Mode))
@given(data=st.data())
@bounded
def test_no_plan_beats_it(mode: Mode, data: st.DataObject) -> None:
    plan: Plan = data.draw(plans(mode))
    cost = Cost(
        linear_seconds=data.draw(st.sampled_from([0.0, 1e-4])),
        across_bytes_per_second=data.draw(st.sampled_from([1e6, 40e9, 9e11])),
        micro_batch_seconds=data.draw(st.sampled_from([0.0, 1e-2, 1.0])),
    )
    if data.draw(st.booleans()):
        partition = data.draw(st.sampled_from(["zigzag", "contiguous"]))
        cost = replace(
            cost, states=StateCost(summary_seconds=1e-5, state_bytes=1e6, step_seconds=1e-3, partition=partition)
        )
    if data.draw(st.booleans()):
        speed = data.draw(st.sampled_from([1e6, 2.65e9, 40e9]))
        machine = Machine.known("H200").with_link("across", bytes_per_second=speed)
        cost = replace(machine.cost(QWEN3_8B), states=cost.states)
    elif data.draw(st.booleans()):  # a key/value head for each query head
        cost = replace(cost, ring_bytes=36 * 8192 * 6.0, exchange_bytes=36 * 16384 * 4.0)
    if data.draw(st.booleans()):
        cost = cost.forward_only()
    kind, inner = data.draw(st.sampled_from(TYPES)), data.draw(st.integers(1, 4))
    heads = 8 if kind == "auto" else 27720  # "auto" leaves out what its heads forbid; these every degree here divides
    cost, plan = cost.under(kind, inner, heads=heads), retype(plan, kind, inner)
    widest = max(group.degree for batch in plan.micro_batches for group in batch.groups)
    for cap in (None, plan.max_tokens_per_slot):
        for max_cp in (None, widest):
            bound = lower_bound_seconds(
                plan.lengths, plan.slots, cap, cost, mode, max_cp=max_cp, node_size=plan.node_size
            )
            assert plan.timeline(cost).step_seconds >= bound.seconds
