"""Plans of evaluation sets: each document once under every planner; and the choice of a degree and a type by cost."""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.errors import PlanError
from longspan.layout import Layout
from longspan.plan import Cost, Plan, PlanOptions, plan_dynamic, plan_fixed, plan_padded, slot_rows
from longspan.plan.ways import plan_evaluation, plan_type_text, which_degree, widest_degree

few = settings(derandomize=True, deadline=None, max_examples=8)
document_lengths = st.lists(st.one_of(st.integers(1, 40), st.integers(1, 3000)), min_size=1, max_size=30)
homes = st.sampled_from([(4, 1), (4, 2), (6, 3), (8, 4)])  # slots, stages


@pytest.mark.parametrize("planner", ["fixed", "padded", "dynamic"])
@few
@given(lengths=document_lengths, shape=homes, multiple=st.sampled_from([1, 2]), data=st.data())
def test_every_document_of_a_set_is_evaluated_once(
    planner: str, lengths: list[int], shape: tuple[int, int], multiple: int, data: st.DataObject
) -> None:
    """No remainder is dropped and no document is made up, whatever the pipeline and the limit of rows."""
    slots, pp = shape
    home = Layout(slots * pp, pp=pp)
    cp = data.draw(st.sampled_from([d for d in range(1, slots + 1) if slots % d == 0]))
    widest = slots if planner == "dynamic" else cp
    least = -(-max(lengths) // (widest * multiple)) * multiple
    cap = least + data.draw(st.sampled_from([0, 7, 1000, 10**6]))
    options = PlanOptions(max_tokens_per_slot=cap, micro_batch_multiple=pp, row_multiple=multiple, node_size=slots)
    planners = {"fixed": partial(plan_fixed, cp=cp), "padded": partial(plan_padded, cp=cp), "dynamic": plan_dynamic}

    def make(options: PlanOptions) -> Plan:
        return planners[planner](lengths, home, options=options)

    plan = plan_evaluation(make, lengths, home, options, widest)
    documents = [d for batch in plan.micro_batches for group in batch.groups for d in group.documents]
    rows = [n for batch in plan.micro_batches for group in batch.groups for n in group.lengths]
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
def test_the_choice_is_the_fastest_of_what_is_possible(
    lengths: list[int], shape: tuple[int, int], data: st.DataObject
) -> None:
    slots, pp = shape
    home = Layout(slots * pp, pp=pp)
    heads = data.draw(st.sampled_from([None, 3, 8]))
    cap = -(-max(lengths) // slots) + data.draw(st.sampled_from([0, 50, 5000]))
    cost = Cost(ring_step_seconds=data.draw(st.sampled_from([0.0, 1e-3, 1e-1])))
    options = PlanOptions(max_tokens_per_slot=cap, heads=heads, node_size=2, cost=cost, cp_comm_type="auto")
    comparison = which_degree(lengths, home, options=options)
    rings = which_degree(lengths, home, options=replace(options, cp_comm_type="p2p"))
    assert [c.cp for c in comparison.choices] == [c.cp for c in rings.choices]
    for choice, ring in zip(comparison.choices, rings.choices, strict=True):
        plan, kind = choice.planned, choice.options.cp_comm_type
        best, seconds = comparison.best.planned.predicted_seconds, plan.predicted_seconds
        assert plan.lower_bound_seconds <= seconds
        assert best <= seconds <= ring.planned.predicted_seconds * (1 + 1e-9)
        assert {group.cp_comm_type for batch in plan.micro_batches for group in batch.groups} == {kind}
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
    assert plan_evaluation(partial(make, cp=4), [], home, options, 4) == make(
        replace(options, cost=Cost().forward_only()), 4
    )


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
    comparison = which_degree([8192] * 3, home, options=options)
    assert [choice.cp for choice in comparison.choices] == [2, 4]
    assert comparison.left_out == (
        "cp 1 holds 4,096 rows, the longest document has 8,192",
        "cp 8 does not divide 4 query heads",
    )
    line = comparison.reason("long")
    assert line.startswith(f"evaluation of long at cp {comparison.best.cp}, a2a: 3 documents in ")
    assert " s predicted; cp " in line and "; dynamic plan " in line and line.endswith("4 query heads")
    relative = which_degree([8192] * 3, home, options=replace(options, cost=replace(Cost(), source="")))
    assert " x as long" in relative.reason() and "predicted" not in relative.reason() and " s;" not in relative.reason()
    with pytest.raises(PlanError, match=r"cp 4 holds 4 rows.*raise max_tokens_per_slot to 2048 or more"):
        which_degree([8192], Layout(4), options=PlanOptions(max_tokens_per_slot=1))


def test_types_are_weighed_by_heads_links_and_latency() -> None:
    lengths, home = [65536] * 4, Layout(16)
    cost = Cost(across_bytes_per_second=1e9)
    options = PlanOptions(max_tokens_per_slot=8192, heads=32, node_size=8, cost=cost, cp_comm_type="auto")
    assert plan_type_text(which_degree(lengths, home, options=options, degrees=(8,)).best.planned) == "p2p"
    two_levels = which_degree(lengths, home, options=options, degrees=(16,)).best
    assert plan_type_text(two_levels.planned) == "a2a+p2p (8, 2)"
    slow = replace(options, cost=Cost(ring_step_seconds=0.5), node_size=16)
    assert plan_type_text(which_degree(lengths, home, options=slow, degrees=(16,)).best.planned) == "a2a"
    unknown = which_degree(lengths, home, options=replace(slow, heads=None), degrees=(16,)).best
    assert plan_type_text(unknown.planned) == "all_gather"
    contiguous = which_degree(lengths, home, options=replace(options, partition="contiguous"), degrees=(8,)).best
    assert plan_type_text(contiguous.planned) == "a2a"


def test_levels_of_a_type_that_was_asked_for_fit_every_degree() -> None:
    options = PlanOptions(cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes=(2, 4), heads=8)
    comparison = which_degree([512] * 4, Layout(12), options=replace(options, max_tokens_per_slot=512))
    sizes = [c.options.hierarchical_context_parallel_sizes for c in comparison.choices]
    assert sizes == [(1, 1), (2, 1), (1, 3), (2, 2), (2, 3), (2, 6)]
    assert widest_degree(Layout(12), replace(options, cp_comm_type="a2a")) == 8
    assert widest_degree(Layout(12), options, 5) == 5
