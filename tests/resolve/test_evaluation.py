"""What is chosen by cost: degrees and types of evaluations, partitions, types; and prices of pipelines."""

from collections import Counter
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings, strategies as st
from transformers import Qwen3NextConfig

from longspan.errors import PlanError
from longspan.layout import Layout
from longspan.plan import Cost, Machine, Plan, PlanOptions, plan_dynamic, plan_fixed, plan_padded, slot_rows
from longspan.plan.distributions import DISTRIBUTIONS, sample_lengths
from longspan.plan.micro_batch import comm_type_text
from longspan.resolve.evaluation import (
    compare_degrees,
    options_by_comm_type,
    plan_evaluation,
    plan_type_text,
    widest_dynamic_degree,
)
from longspan.resolve.partition import PartitionChoice, compare_partitions
from tests.plan.cases import bounded, plans

# ---- pipelines: (p - 1) / v micro-batches' time of a stage, over the M that it works (Narayanan et al. 2021)


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("stages", [1, 2, 3, 8])
@pytest.mark.parametrize("rounds", [1, 5])
def test_equal_micro_batches_have_the_textbook_bubble(stages: int, chunks: int, rounds: int) -> None:
    count, cost = rounds * stages, Cost(stages=stages, chunks=chunks, micro_batch_seconds=0.1)
    expected = max(0.8, 0.8 / stages * (count + (stages - 1) / chunks))
    assert cost.lockstep_seconds([0.7] * count) == pytest.approx(expected)


times = st.lists(st.floats(0.01, 10), min_size=1, max_size=12)


@bounded
@given(times, st.integers(1, 6))
def test_forward_passes_take_as_long_as_a_walk_through_the_stages(seconds: list[float], stages: int) -> None:
    clock = [0.0] * stages  # when each stage is free
    for turn in seconds:
        ready = 0.0
        for stage in range(stages):
            ready = clock[stage] = max(ready, clock[stage]) + turn / stages
    cost = Cost(stages=stages, micro_batch_seconds=0.0)
    assert cost.lockstep_seconds(seconds) == pytest.approx(clock[-1])


def test_a_micro_batch_takes_no_less_than_messages_and_launches() -> None:
    cost = Cost(sharding_seconds=2.0, micro_batch_seconds=0.5, launch_seconds=3.0)
    assert cost.turn_seconds([0.0, 2.2, 2.6]) == [3.0, 3.0, pytest.approx(3.1)]


@bounded
@given(plans(), st.integers(1, 4), st.integers(1, 3))
def test_stages_are_faster_than_one_and_none_beats_the_bound(plan: Plan, stages: int, chunks: int) -> None:
    through = plan.reprice(Cost(stages=stages, chunks=chunks, update_seconds=0.1))
    one = plan.reprice(Cost(update_seconds=0.1))
    assert through.lower_bound_seconds <= through.predicted_seconds <= one.predicted_seconds * (1 + 1e-12)
    assert through.timeline(Cost(update_seconds=0.1)).step_seconds == through.predicted_seconds  # on its own stages


def test_planners_know_the_stages_of_the_home() -> None:
    plans = [plan_fixed([900] * 8, Layout(4 * pp, pp=pp), 1, max_tokens_per_slot=1000) for pp in (1, 2)]
    assert [plan.cost.stages for plan in plans] == [1, 2]
    assert plans[1].predicted_seconds == pytest.approx(plans[0].predicted_seconds * (2 + 1) / 2 / 2)
    assert plan_fixed([], Layout(4, pp=2), 2).predicted_seconds == pytest.approx(Cost().micro_batch_seconds)


def test_tensor_parallel_slots_share_the_work() -> None:
    cost = Cost()
    half = cost.shared_by(2)
    assert half.group_seconds(1000, 10**6, 1, True) == pytest.approx(cost.group_seconds(1000, 10**6, 1, True) / 2)
    assert half.micro_batch_seconds == cost.micro_batch_seconds and cost.shared_by(1) == cost
    with pytest.raises(PlanError, match="tp is 0"):
        cost.shared_by(0)


# ---- lengths


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_drawn_lengths(name: str) -> None:
    drawn = sample_lengths(name, 200_000, seed=3, longest=30_000)
    assert drawn.dtype == np.int64 and drawn.min() >= 16 and drawn.max() <= 30_000
    assert drawn.sum() >= 200_000 > drawn[:-1].sum()
    np.testing.assert_array_equal(drawn, sample_lengths(name, 200_000, seed=3, longest=30_000))
    assert drawn.tolist() != sample_lengths(name, 200_000, seed=4, longest=30_000).tolist()
    more = sample_lengths(name, 400_000, seed=3, longest=30_000)
    np.testing.assert_array_equal(more[: len(drawn)], drawn)
    assert all(len(sample_lengths(name, n)) <= len(sample_lengths(name, m)) for n, m in pairwise((1, 10**4, 10**6)))


few = settings(derandomize=True, deadline=None, max_examples=5)
document_lengths = st.lists(st.one_of(st.integers(1, 40), st.integers(1, 3000)), min_size=1, max_size=12)
homes = st.sampled_from([(4, 1), (4, 2), (6, 3)])  # slots, stages


@pytest.mark.parametrize("planner", ["fixed", "padded", "dynamic"])
@few
@given(lengths=document_lengths, shape=homes, multiple=st.sampled_from([1, 2]), data=st.data())
def test_every_document_of_a_set_is_evaluated_once(
    planner: str, lengths: list[int], shape: tuple[int, int], multiple: int, data: st.DataObject
) -> None:
    slots, pp = shape
    home = Layout(slots * pp, pp=pp)
    cp = data.draw(st.sampled_from([d for d in range(1, slots + 1) if slots % d == 0]))
    widest = slots if planner == "dynamic" else cp
    least = -(-max(lengths) // (widest * multiple)) * multiple
    cap = least + data.draw(st.sampled_from([0, 7, 1000, 10**6]))
    options = PlanOptions(max_tokens_per_slot=cap, micro_batch_multiple=pp, row_multiple=multiple, node_size=slots)
    fast = partial(plan_dynamic, effort="fast")
    planners = {"fixed": partial(plan_fixed, cp=cp), "padded": partial(plan_padded, cp=cp), "dynamic": fast}

    def make(options: PlanOptions) -> Plan:
        return planners[planner](lengths, home, options=options)

    plan = plan_evaluation(make, lengths, home, options, widest)
    documents = [d for group in plan.groups for d in group.documents]
    rows = [n for group in plan.groups for n in group.lengths]
    assert Counter(documents) == Counter(range(len(lengths)))
    assert [rows[documents.index(d)] for d in range(len(lengths))] == lengths
    assert plan.targets == sum(n - 1 for n in lengths) and plan.tokens == sum(lengths)
    assert len(plan.micro_batches) % pp == 0
    assert int(slot_rows(plan.micro_batches, slots, multiple).max()) <= cap
    assert plan.cost.passes == "forward" and plan.predicted_seconds >= plan.lower_bound_seconds
    at_limit = make(replace(options, cost=plan.cost))
    assert plan.lower_bound_seconds <= plan.predicted_seconds <= at_limit.predicted_seconds


@few
@given(lengths=document_lengths, shape=homes, data=st.data())
def test_the_choice_is_the_fastest_possible(lengths: list[int], shape: tuple[int, int], data: st.DataObject) -> None:
    slots, pp = shape
    home = Layout(slots * pp, pp=pp)
    heads = data.draw(st.sampled_from([None, 3, 8]))
    cap = -(-max(lengths) // slots) + data.draw(st.sampled_from([0, 50, 5000]))
    cost = Cost(ring_step_seconds=data.draw(st.sampled_from([0.0, 1e-3, 1e-1])))
    options = PlanOptions(max_tokens_per_slot=cap, heads=heads, node_size=2, cost=cost, cp_comm_type="auto")
    comparison = compare_degrees(lengths, home, options=options)
    rings = compare_degrees(lengths, home, options=replace(options, cp_comm_type="p2p"))
    assert [c.cp for c in comparison.choices] == [c.cp for c in rings.choices]
    for choice, ring in zip(comparison.choices, rings.choices, strict=True):
        plan, kind = choice.planned, choice.options.cp_comm_type
        best, seconds = comparison.best.planned.predicted_seconds, plan.predicted_seconds
        assert plan.lower_bound_seconds <= seconds
        assert best <= seconds <= ring.planned.predicted_seconds * (1 + 1e-9)
        assert {group.cp_comm_type for group in plan.groups} == {kind}
        assert "a2a" not in str(kind) or (heads is not None and choice.cp > 1)
        assert kind != "a2a" or (heads or 1) % choice.cp == 0
    assert {d for d in range(1, slots + 1) if slots % d == 0} - {c.cp for c in comparison.choices} == {
        d for d in range(1, slots + 1) if slots % d == 0 and cap * d < max(lengths)
    }
    assert f"evaluation at cp {comparison.best.cp}" in comparison.reason()


def test_a_pipeline_is_filled_with_micro_batches_of_fewer_rows() -> None:
    """By hand: 8 documents on 8 slots in one micro-batch leave 3 of 4 stages empty; at cp 4 there are 4."""
    home, options = Layout(32, pp=4), PlanOptions(max_tokens_per_slot=8192)
    lengths = [8192] * 8

    def make(options: PlanOptions, cp: int) -> Plan:
        return plan_fixed(lengths, home, cp, options=options)

    assert len(plan_evaluation(partial(make, cp=1), lengths, home, options, 1).micro_batches) == 1
    plan = plan_evaluation(partial(make, cp=4), lengths, home, options, 4)
    assert len(plan.micro_batches) == 4 and plan.max_tokens_per_slot == 2048
    dynamic = plan_evaluation(lambda o: plan_dynamic(lengths, home, options=o), lengths, home, options, 8)
    assert dynamic.predicted_seconds <= plan.predicted_seconds * (1 + 1e-9)
    forward = replace(options, cost=Cost().forward_only())
    assert plan_evaluation(partial(make, cp=4), [], home, options, 4) == make(forward, 4)


def test_micro_batches_are_not_shorter_than_their_launch() -> None:
    """By hand: with two documents at a time, one on each slot, two stages take 3 turns of half a model; with one at
    degree 2, 5 turns of at least the launch; with all four, 2 turns."""
    home, lengths, cost = Layout(4, pp=2), [8192] * 4, replace(Cost().forward_only(), ring_step_seconds=0.0)
    whole = float(cost.work_seconds(8192, 8192**2)) + cost.micro_batch_seconds  # of a document in the whole model
    for launch, micro_batches, seconds in ((0.0, 4, None), (0.9 * whole, 2, 1.5 * whole), (2 * whole, 1, 2 * whole)):
        options = PlanOptions(cost=replace(cost, launch_seconds=launch))
        plan = plan_evaluation(lambda o: plan_dynamic(lengths, home, options=o), lengths, home, options, 2)
        assert len(plan.micro_batches) == micro_batches, launch
        assert seconds is None or plan.predicted_seconds == pytest.approx(seconds)


def test_reasons_have_numbers_and_name_what_is_left_out() -> None:
    home = Layout(8)
    options = PlanOptions(max_tokens_per_slot=4096, heads=4, cp_comm_type="a2a")
    comparison = compare_degrees([8192] * 3, home, options=options)
    assert [choice.cp for choice in comparison.choices] == [2, 4]
    one, eight = comparison.left_out
    assert (
        one == "cp 1 holds 4,096 rows, the longest document has 8,192" and eight == "cp 8 does not divide 4 query heads"
    )
    line = comparison.reason("long")
    assert line.startswith(f"evaluation of long at cp {comparison.best.cp}, a2a: 3 documents in ")
    assert " s predicted; cp " in line and "; dynamic plan " in line and line.endswith("4 query heads")
    relative = compare_degrees([8192] * 3, home, options=replace(options, cost=replace(Cost(), source="")))
    assert " x as long" in relative.reason() and "predicted" not in relative.reason() and " s;" not in relative.reason()
    with pytest.raises(PlanError, match=r"cp 4 holds 4 rows.*raise max_tokens_per_slot to 2048 or more"):
        compare_degrees([8192], Layout(4), options=PlanOptions(max_tokens_per_slot=1))


def test_types_are_weighed_by_heads_links_and_latency() -> None:
    lengths, home = [65536] * 4, Layout(16)
    cost = Cost(across_bytes_per_second=1e9)
    options = PlanOptions(max_tokens_per_slot=8192, heads=32, node_size=8, cost=cost, cp_comm_type="auto")
    slow = replace(options, cost=Cost(ring_step_seconds=0.5), node_size=16)
    for way, cp, expected in (
        (options, 8, "p2p"),
        (options, 16, "a2a+p2p (8, 2)"),
        (slow, 16, "a2a"),
        (replace(slow, heads=None), 16, "all_gather"),
        (replace(options, partition="contiguous"), 8, "a2a"),
    ):
        by_degree = {choice.cp: choice.planned for choice in compare_degrees(lengths, home, options=way).choices}
        assert plan_type_text(by_degree[cp]) == expected


def test_levels_of_a_type_that_was_asked_for_fit_every_degree() -> None:
    options = PlanOptions(cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes=(2, 4), heads=8)
    comparison = compare_degrees([512] * 4, Layout(12), options=replace(options, max_tokens_per_slot=512))
    sizes = [c.options.hierarchical_context_parallel_sizes for c in comparison.choices]
    assert sizes == [(1, 1), (2, 1), (1, 3), (2, 2), (2, 3), (2, 6)]
    assert widest_dynamic_degree(Layout(12), replace(options, cp_comm_type="a2a")) == 8
    assert widest_dynamic_degree(Layout(12), options, 5) == 5


COST = Machine.known("H200").cost(Qwen3NextConfig())


def weighed(lengths: list[int], partition: Any = "auto", degree: int = 4, **options: Any) -> PartitionChoice:
    usual = PlanOptions(cost=COST, cp_comm_type="auto", heads=16)
    return compare_partitions(partial(seconds_of, lengths, degree), PlanOptions(**vars(usual) | options), partition)


def seconds_of(lengths: list[int], degree: int, way: PlanOptions) -> float:
    return plan_fixed(lengths, Layout(degree), degree, options=way).predicted_seconds


def test_many_documents_want_contiguous_rows() -> None:
    many, one = weighed([2048] * 32), weighed([65536])
    assert (many.options.partition, many.options.cp_comm_type) == ("contiguous", "a2a")
    zigzag = seconds_of([2048] * 32, 4, weighed([2048] * 32, "zigzag").options)
    assert zigzag > 1.1 * seconds_of([2048] * 32, 4, many.options)  # 704 MiB of states a layer
    assert (one.options.partition, one.options.cp_comm_type) == ("contiguous", "a2a")
    ring = seconds_of([65536], 4, replace(one.options, cp_comm_type="p2p"))
    assert ring > 1.2 * seconds_of([65536], 4, one.options)  # the last slot has most of the work
    assert many.reason.startswith("contiguous under a2a: ") and "zigzag under p2p" in many.reason


def test_where_heads_do_not_divide_the_ring_decides() -> None:
    one = weighed([65536], heads=9)
    assert (one.options.partition, one.options.cp_comm_type) == ("zigzag", "p2p")
    assert one.reason.endswith("; contiguous under a2a is not possible; zigzag under a2a is not possible")
    many = weighed([2048] * 32, heads=9)
    assert (many.options.partition, many.options.cp_comm_type) == ("contiguous", "p2p")


def test_what_is_said_is_kept() -> None:
    assert weighed([65536] * 2, "zigzag").options.partition == "zigzag"
    kept = weighed([2048] * 32, cp_comm_type="p2p")
    assert kept.options.cp_comm_type == "p2p" and "a2a" not in kept.reason
    assert weighed([2048] * 32, cp_comm_type=("a2a", "p2p")).reason.startswith("contiguous under a2a/p2p: ")
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
def test_types_at_a_degree(cp: int, heads: int | None, tp: int, partition: Any, expected: list[str]) -> None:
    options = PlanOptions(cp_comm_type="auto", heads=heads, partition=partition)
    ways = options_by_comm_type(options, Layout(48 * tp, tp=tp), cp)
    assert [comm_type_text(way.cp_comm_type, [way.hierarchical_context_parallel_sizes]) for way in ways] == expected
    for way in ways:
        plan_fixed([4800], Layout(48 * tp, tp=tp), cp, options=way)


def test_a_type_that_is_named_is_the_only_one() -> None:
    options = PlanOptions(cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes=(4, 2))
    (way,) = options_by_comm_type(options, Layout(8), 2)
    assert way.hierarchical_context_parallel_sizes == (2, 1)
    assert plan_fixed([90], Layout(8), 2, options=way).cost == Cost().under("a2a+p2p", 2)
