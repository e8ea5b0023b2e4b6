"""Prices of plans on pipeline stages, against closed forms and a slow walk; which evaluation degree; drawn lengths."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.errors import LayoutError, PlanError
from longspan.layout import Layout
from longspan.plan import Cost, Plan, PlanOptions, plan_fixed
from longspan.plan.distributions import DISTRIBUTIONS, sample_lengths
from longspan.plan.ways import which_degree
from tests.plan.cases import bounded, plans

# ---- pipelines


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("stages", [1, 2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_equal_micro_batches_have_the_textbook_bubble(stages: int, chunks: int, rounds: int) -> None:
    """(p - 1) / v micro-batches' time of a stage, over the M that it works (Narayanan et al. 2021)."""
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


def test_a_plan_of_dummies() -> None:
    assert plan_fixed([], Layout(4, pp=2), 2).predicted_seconds == pytest.approx(Cost().micro_batch_seconds)


def test_tensor_parallel_slots_share_the_work() -> None:
    cost = Cost()
    half = cost.shared_by(2)
    assert half.group_seconds(1000, 10**6, 1, True) == pytest.approx(cost.group_seconds(1000, 10**6, 1, True) / 2)
    assert half.micro_batch_seconds == cost.micro_batch_seconds and cost.shared_by(1) == cost
    with pytest.raises(PlanError, match="tp is 0"):
        cost.shared_by(0)


# ---- which degree


@pytest.mark.whole
def test_the_case_of_8192_gpus() -> None:
    """1024 documents at cp 1 on 1024 pipelines of 4 stages: filling them costs 4096 document-steps; cp 4 needs 1024."""
    home = Layout(8192, tp=2, pp=4)
    options = PlanOptions(cost=Cost().shared_by(2), node_size=4, max_tokens_per_slot=8192)  # 8 GPUs a host
    comparison = which_degree([8192] * 1024, home, options=options, degrees=(1, 2, 4, 8))
    by_degree = {c.cp: c for c in comparison.choices}
    assert [by_degree[cp].filled_steps for cp in (1, 2, 4, 8)] == [4096, 2048, 1024, 1024]
    for choice in by_degree.values():
        plan = choice.planned
        assert sorted(d for m in plan.micro_batches for g in m.groups for d in g.documents) == list(range(1024))
        assert choice.planned.predicted_seconds <= choice.filled_seconds * (1 + 1e-9)
    assert len(by_degree[4].planned.micro_batches) == 4
    assert comparison.best.cp == 4 and comparison.dynamic is not None
    assert comparison.dynamic.predicted_seconds <= by_degree[4].planned.predicted_seconds * (1 + 1e-9)
    assert by_degree[1].filled_seconds / by_degree[4].planned.predicted_seconds == pytest.approx(3.7, rel=0.02)


def test_documents_that_do_not_fit_leave_degrees_out() -> None:
    options = PlanOptions(max_tokens_per_slot=1024)
    comparison = which_degree([4000, 10], Layout(8), options=options)
    assert [choice.cp for choice in comparison.choices] == [4, 8]
    assert [choice.filled_steps for choice in comparison.choices] == [2, 2]
    assert comparison.left_out[0] == "cp 1 holds 1,024 rows, the longest document has 4,000"
    with pytest.raises(PlanError, match=r"9000 rows, at max_tokens_per_slot 1024: cp 1 .* to 1125 or more"):
        which_degree([9000], Layout(8), options=options)
    with pytest.raises(LayoutError):
        which_degree([0], Layout(8))


def test_accumulation_fills_each_pass() -> None:
    choice = which_degree([64] * 10, Layout(4), accumulation=3, degrees=(2,)).best
    assert choice.filled_steps == 12


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


def test_lengths_that_cannot_be_drawn() -> None:
    with pytest.raises(PlanError, match="unknown distribution 'normal'; use one of lognorm"):
        sample_lengths("normal", 100)
    with pytest.raises(PlanError, match="make no documents"):
        sample_lengths("expo", 0)
