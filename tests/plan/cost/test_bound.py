"""Lower bounds: literal values of the research model, and that no plan whatever beats them, nor any groups."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
from bench.plans.message_bound import MessageBound
from hypothesis import given
from hypothesis import strategies as st

from longspan.errors import PlanError
from longspan.layout import Layout
from longspan.plan import Cost, Group, Machine, MicroBatch, Mode, Plan, PlanOptions, lower_bound_seconds, plan_fixed
from longspan.plan.cost.cost import StateCost
from longspan.plan.micro_batch import level_sizes
from longspan.plan.shape.model_shape import QWEN3_8B
from longspan.plan.step_times import GroupTable
from tests.plan.cases import bounded, plans


@pytest.mark.parametrize(
    (
        "lengths",
        "slots",
        "cap",
        "area",
        "longest",
        "crossing",
    ),  # each step of a long document at the fewest slots waits
    [
        ([5295, 682, 3599, 1484, 2912], 6, 1024, 0.3167267261226666, 0.125821913712, 0.00522421875),
        ([65536] + [2048] * 40, 64, 8192, 0.45144165486591986, 0.8850351103999999, 0.00063),
        ([131072], 16, 8192, 3.71056130199552, 3.72136130199552, 0.0108),
        ([100] * 1000, 8, 4096, 1.4619755999999997, 0.015092293142857142, 0.0),
    ],
)
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


def test_no_documents_and_one_that_fits_no_group() -> None:
    assert lower_bound_seconds([], 8, 100, Cost()).seconds == pytest.approx(0.01)
    assert lower_bound_seconds([], 8, 100, Cost(), "free").seconds == 0.0
    with pytest.raises(PlanError, match=r"1000 rows needs 10 slots at max_tokens_per_slot 100, but .* at most 8"):
        lower_bound_seconds([1000], 8, 100, Cost())


def test_under_auto_a_small_exchange_and_a_hidden_ring_do_not_beat_it() -> None:
    cost = replace(Cost(), ring_bytes=36 * 8192 * 6.0, exchange_bytes=36 * 16384 * 4.0, cp_comm_type="auto", heads=32)
    for speed in (12e9, 25e9, 50e9, 100e9):
        cost = replace(cost, inside_bytes_per_second=speed, across_bytes_per_second=min(speed, 40e9))
        for length in (16384, 98304, 131072):
            options = PlanOptions(max_tokens_per_slot=length // 8, cp_comm_type="auto", heads=32, cost=cost)
            plan = plan_fixed([length], Layout(8), 8, options=options)
            assert plan.lower_bound_seconds <= plan.predicted_seconds < 1.05 * plan.lower_bound_seconds


def retype(plan: Plan, kind: str, inner: int) -> Plan:
    def typed(g: Group) -> Group:
        return replace(g, cp_comm_type=kind, hierarchical_context_parallel_sizes=level_sizes(inner, g.degree))

    batches = (MicroBatch(tuple(typed(group) for group in batch.groups)) for batch in plan.micro_batches)
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
    kind, inner = (
        data.draw(st.sampled_from(["p2p", "all_gather", "a2a", "a2a+p2p", "auto"])),
        data.draw(st.integers(1, 4)),
    )
    heads = 8 if kind == "auto" else 27720  # "auto" leaves out what its heads forbid; these every degree here divides
    cost, plan = cost.under(kind, inner, heads=heads), retype(plan, kind, inner)
    widest = max(group.degree for batch in plan.micro_batches for group in batch.groups)
    for cap in (None, plan.max_tokens_per_slot):
        for max_cp in (None, widest):
            limits = {"max_cp": max_cp, "node_size": plan.node_size}
            bound = lower_bound_seconds(plan.lengths, plan.slots, cap, cost, mode, **limits)
            assert plan.timeline(cost).step_seconds >= bound.seconds


FEW_KEYS = QWEN3_8B | {"num_key_value_heads": 4, "hidden_size": 2048}
NODE = 4


def known_cost(gbps: float, model: Mapping[str, Any] = FEW_KEYS) -> Cost:
    cost = Machine.known("H200").with_link("across", bytes_per_second=gbps * 1e9).cost(model)
    return replace(cost, node_size=NODE).under("auto", heads=32)


def bound_of(cost: Cost, cap: int, widest: int) -> MessageBound:
    assert cost.network is not None
    return MessageBound(cost, cost.network, cap, NODE, widest)


@st.composite
def groups(draw: st.DrawFn) -> tuple[Group, str, int]:
    kind = draw(st.sampled_from(["a2a", "p2p", "all_gather", "a2a+p2p"]))
    degree = draw(st.sampled_from([1, 2, 4, 8, 16] if kind == "a2a" else range(1, 17)))
    slots = draw(st.sets(st.integers(0, 19), min_size=degree, max_size=degree) | st.just(set(range(degree))))
    rows = st.integers(1, 40) | st.integers(1, 3000) | st.integers(3000, 80000)
    lengths = tuple(draw(st.lists(rows, min_size=1, max_size=4)))
    inner = draw(st.sampled_from([i for i in (1, 2, 4, 8) if degree % i == 0]))
    sizes = level_sizes(inner, degree) if kind == "a2a+p2p" else None
    return Group(tuple(sorted(slots)), tuple(range(len(lengths))), lengths, kind, sizes), kind, inner


@given(
    drawn=st.lists(groups(), min_size=1, max_size=4),
    gbps=st.sampled_from([1.0, 2.65, 12.5, 40.0, 400.0]),
    latency=st.sampled_from([0.0, 50e-6, 1e-2]),
    forward=st.booleans(),
    few=st.booleans(),
)
@bounded
def test_no_groups_take_less(
    drawn: list[tuple[Group, str, int]], gbps: float, latency: float, forward: bool, few: bool
) -> None:
    cost = known_cost(gbps, FEW_KEYS if few else QWEN3_8B)
    assert cost.network is not None
    cost = replace(cost, network=replace(cost.network, step_seconds=latency))
    cost = cost.forward_only() if forward else cost
    table = GroupTable.of([MicroBatch((group,)) for group, *_ in drawn])
    taken = math.fsum(table.seconds(cost, NODE) * table.degree)
    rows = np.array([length for group, *_ in drawn for length in group.lengths], dtype=np.int64)
    work = math.fsum(cost.work_seconds(rows, rows * rows))
    cap, widest = int(table.rows.max()), int(table.degree.max())
    types = {kind for _, kind, _ in drawn}
    for kind in ("auto", *types) if len(types) == 1 else ("auto",):
        floor = bound_of(cost.under(kind, heads=32), cap, widest).slot_seconds(rows)
        assert taken >= (work + floor) * (1 - 1e-12), (kind, taken, work, floor)


@pytest.mark.parametrize("cap", [1024, 4096])
@pytest.mark.parametrize("degree", [2, 4, 8, 16])
def test_a_document_that_fills_its_slots_is_charged_nearly_what_it_takes(degree: int, cap: int) -> None:
    cost, rows = known_cost(25.0), np.array([degree * cap])
    work = float(cost.work_seconds(rows, rows * rows)[0])
    taken = degree * float(cost.group_seconds(rows, rows * rows, degree, degree <= NODE)[0])
    floor = bound_of(cost, cap, 16).slot_seconds(rows)
    assert 0.7 * (taken - work) <= floor <= (taken - work) * (1 + 1e-9)
