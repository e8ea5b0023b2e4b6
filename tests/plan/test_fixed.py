"""Packing at a fixed degree: every document once, the cap held, few and level micro-batches, and bad requests named."""

import time
from typing import Any

import numpy as np
import pytest
from hypothesis import given, strategies as st

from longspan.layout import Layout
from longspan.plan import Cost, PlanOptions, plan_fixed, plan_padded, slot_rows
from longspan.plan.planners.fixed import Packer, pack_first_fit, pack_least_loaded, smallest_fitting_degree
from longspan.plan.planners.request import Request
from tests.plan.cases import bounded, lengths

PLANNERS = {"fixed": plan_fixed, "padded": plan_padded}


@st.composite
def requests(draw: st.DrawFn) -> tuple[list[int], Layout, int, dict[str, Any]]:
    """Arguments that a planner must accept."""
    cp, groups, multiple = draw(st.sampled_from([1, 2, 3, 4, 6])), draw(st.integers(1, 5)), draw(st.integers(1, 4))
    drawn = draw(lengths)
    least = -(-max(drawn) // (cp * multiple)) * multiple
    options = {
        "max_tokens_per_slot": draw(st.sampled_from([None, least, least + 3, 2 * least, 5 * least])),
        "row_multiple": multiple,
        "micro_batch_multiple": draw(st.integers(1, 3)),
        "mode": draw(st.sampled_from(["lockstep", "free"])),
        "node_size": draw(st.sampled_from([1, 4, 8])),
        "partition": draw(st.sampled_from(["zigzag", "contiguous"])),
        "cost": draw(st.sampled_from([Cost(), Cost(linear_seconds=0.0, micro_batch_seconds=1.0)])),
    }
    return drawn, Layout(cp * groups), cp, options


@pytest.mark.parametrize("planner", PLANNERS)
@given(request=requests())
@bounded
def test_every_plan(planner: str, request: tuple[list[int], Layout, int, dict[str, Any]]) -> None:
    documents, home, cp, options = request
    plan = PLANNERS[planner](documents, home, cp, **options)
    assert sorted(d for batch in plan.micro_batches for d in batch.documents) == list(range(len(documents)))
    groups = plan.groups
    assert all(group.lengths == tuple(documents[d] for d in group.documents) for group in groups)
    assert {group.partition for group in groups} == {options["partition"] if cp > 1 else "zigzag"}
    assert all(max(group.shares.counts) == group.rows_per_slot for group in groups)
    blocks = {tuple(range(s, s + cp)) for s in range(0, home.slots, cp)}
    for batch in plan.micro_batches:
        slots = [group.slots for group in batch.groups]
        assert set(slots) <= blocks and len(set(slots)) == len(slots)
        assert all(group.pad_to == (max(documents) if planner == "padded" else None) for group in batch.groups)
    rows = slot_rows(plan.micro_batches, plan.slots, options["row_multiple"])
    cap = options["max_tokens_per_slot"]
    assert (rows % options["row_multiple"] == 0).all() and (cap is None or (rows <= cap).all())
    assert len(plan.micro_batches) % options["micro_batch_multiple"] == 0
    assert (plan.tokens, plan.targets) == (sum(documents), sum(documents) - len(documents))
    assert plan.predicted_seconds == plan.timeline().step_seconds >= plan.lower_bound_seconds > 0
    assert plan.check() is plan and plan.planner == planner
    assert PLANNERS[planner](np.array(documents), home, cp, **options) == plan


@given(request=requests(), data=st.data())
@bounded
def test_order_changes_ids_only(request: tuple[list[int], Layout, int, dict[str, Any]], data: st.DataObject) -> None:
    documents, home, cp, options = request
    plan = plan_fixed(documents, home, cp, **options)
    other = plan_fixed(data.draw(st.permutations(documents)), home, cp, **options)
    assert other.predicted_seconds == plan.predicted_seconds
    assert other.lower_bound_seconds == plan.lower_bound_seconds
    for one, two in zip(plan.micro_batches, other.micro_batches, strict=True):
        assert [sorted(g.lengths) for g in one.groups] == [sorted(g.lengths) for g in two.groups]


@given(documents=st.lists(st.integers(1, 9), min_size=1, max_size=30), room=st.integers(9, 25), bins=st.integers(1, 5))
@bounded
def test_bins(documents: list[int], room: int, bins: int) -> None:
    documents = sorted(documents, reverse=True)
    filled: list[int] = []
    slow: list[int] = []
    for length in documents:  # first fit, by definition
        fit = next((b for b, rows in enumerate(filled) if rows + length <= room), len(filled))
        filled[fit:] = [filled[fit] + length, *filled[fit + 1 :]] if fit < len(filled) else [length]
        slow.append(fit)
    assert pack_first_fit(documents, room) == slow

    loads, rows = [0.0] * bins, [0] * bins
    expected: list[int] | None = []
    for length in documents:  # the least loaded bin with room, by definition
        fit = min((b for b in range(bins) if rows[b] + length <= room), key=lambda b: (loads[b], b), default=-1)
        if fit < 0:
            expected = None
            break
        loads[fit], rows[fit] = loads[fit] + length**2, rows[fit] + length
        expected.append(fit)
    assert pack_least_loaded(documents, [float(n * n) for n in documents], bins, room) == expected


@pytest.mark.parametrize(
    ("documents", "cp", "cap", "micro_batches", "expected"),
    [
        ([100, 7, 1, 55], 2, 90, 1, [[(0,), (1, 2, 3)]]),
        ([10] * 8, 4, 5, 2, None),  # two documents a group and micro-batch
        ([10] * 9, 4, 5, 3, None),  # one more micro-batch, in which only one group has work
        ([20, 20, 20, 20], 2, None, 1, [[(0, 2), (1, 3)]]),
        ([17], 4, 5, 1, [[(0,)]]),  # 5 rows on one slot and 4 on the others
        ([1], 1, 1, 1, [[(0,)]]),
    ],
)
def test_small_plans(documents: list[int], cp: int, cap: int | None, micro_batches: int, expected: Any) -> None:
    plan = plan_fixed(documents, Layout(4 if cp < 4 else 8), cp, max_tokens_per_slot=cap)
    assert len(plan.micro_batches) == micro_batches
    if expected:
        assert [[group.documents for group in batch.groups] for batch in plan.micro_batches] == expected


def test_padded_rows_share_a_group_where_the_cap_allows() -> None:
    documents, places = [9, 10, 3, 4, 5, 6, 7], [[[0, 2], [1, 3]], [[4, 6], [5]]]
    plan = plan_padded(documents, Layout(4), 2, max_tokens_per_slot=10)
    assert [[[*group.documents] for group in batch.groups] for batch in plan.micro_batches] == places
    assert {group.pad_to for group in plan.groups} == {10}
    assert slot_rows(plan.micro_batches, 4).tolist() == [[10, 10, 10, 10], [10, 10, 5, 5]]
    alone = plan_padded(documents, Layout(4), 2, max_tokens_per_slot=9)
    assert [len(batch.documents) for batch in alone.micro_batches] == [2, 2, 2, 1]


@given(request=requests())
@bounded
def test_assignments_are_priced_as_their_plans(request: tuple[list[int], Layout, int, dict[str, Any]]) -> None:
    documents, home, cp, options = request
    checked = Request.from_arguments(documents, home, PlanOptions(**options, allow_empty=False))
    packer = Packer(checked, cp)
    prices = []
    for places in packer.assignments_to_price():
        plan = checked.make_plan(packer.micro_batches(places), "fixed")
        assert plan.predicted_seconds == pytest.approx(packer.seconds(places), rel=1e-12)
        prices.append(plan.predicted_seconds)
    assert plan_fixed(documents, home, cp, **options).predicted_seconds == pytest.approx(min(prices), rel=1e-12)


def test_free_groups_are_balanced_over_the_whole_step() -> None:
    documents = [10000, 8000, 2000, 4000, 5000]
    plan = plan_fixed(documents, Layout(2), 1, max_tokens_per_slot=12000, mode="free")
    ends = plan.timeline().end[-1]
    assert ends.max() == pytest.approx(1.9625, abs=1e-4)  # rounds of two bins each, dealt by work, take 1.9725


def test_longest_groups_are_inside_nodes() -> None:
    plan = plan_fixed([28000, 30000, 29999, 29000], Layout(12), 3, node_size=8, max_tokens_per_slot=10000)
    spans = {g.documents: g.slots[0] // 8 == g.slots[-1] // 8 for g in plan.micro_batches[0].groups}
    assert spans == {(1,): True, (2,): True, (3,): True, (0,): False}


def test_layers_and_hierarchy_go_into_the_groups() -> None:
    kinds = ["a2a+p2p", "p2p", "all_gather"]
    plan = plan_fixed([64, 9], Layout(8), 4, cp_comm_type=kinds, hierarchical_context_parallel_sizes=[2, 2])
    group = plan.micro_batches[0].groups[0]
    assert group.cp_comm_type == ("a2a+p2p", "p2p", "all_gather")
    assert group.hierarchical_context_parallel_sizes == (2, 2)
    unused = plan_fixed([64, 9], Layout(8), 4, hierarchical_context_parallel_sizes=(4, 4))
    assert unused.micro_batches[0].groups[0].hierarchical_context_parallel_sizes is None


def test_the_smallest_degree_holds_the_longest_document() -> None:
    options = PlanOptions(max_tokens_per_slot=100)
    longest = {100: 1, 101: 2, 200: 2, 201: 3, 400: 4, 401: 6, 1200: 12, 1201: 12}
    assert {length: smallest_fitting_degree([9, length], Layout(12), options) for length in longest} == longest
    assert smallest_fitting_degree([10**6], Layout(12), PlanOptions()) == 1
    rows = PlanOptions(max_tokens_per_slot=1000, row_multiple=16)  # 992 rows a slot
    assert smallest_fitting_degree([3990], Layout(8), rows) == 8
    assert plan_fixed([3990], Layout(8), 8, options=rows).micro_batches[0].groups[0].degree == 8


@pytest.mark.parametrize("mode", ["lockstep", "free"])
def test_many_documents_are_planned_quickly(mode: Any) -> None:
    rng = np.random.default_rng(0)
    documents = np.clip(np.exp(np.log(2048) + 1.4898 * rng.standard_normal(100_000)), 16, 131072).astype(int)
    start = time.process_time()
    plan = plan_fixed(documents, Layout(1024), 8, max_tokens_per_slot=16384, mode=mode)
    assert time.process_time() - start < 4.0
    assert 1 <= plan.ratio < 1.1
