"""Plans on pipeline stages, against closed forms and a slow simulation; which evaluation degree; drawn lengths."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.errors import LayoutError, PlanError
from longspan.layout import Layout
from longspan.plan import Cost, Group, MicroBatch, Plan, PlanOptions, plan_fixed
from longspan.plan.simulate.distributions import DISTRIBUTIONS, sample_lengths
from longspan.plan.simulate.evaluation import which_degree
from longspan.plan.simulate.row_bytes import RowBytes
from longspan.plan.simulate.simulate import run_pipeline, simulate, simulate_run
from tests.plan.cases import bounded, plans

# ---- pipelines


@pytest.mark.parametrize("chunks", [1, 2, 3])
@pytest.mark.parametrize("stages", [2, 3, 4, 8])
@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_equal_micro_batches_have_the_textbook_bubble(stages: int, chunks: int, rounds: int) -> None:
    """(p - 1) / v micro-batches' time of a stage, over the M that it works (Narayanan et al. 2021)."""
    count = rounds * stages
    run = run_pipeline([0.2] * count, [0.5] * count, stages, chunks)
    assert run.seconds == pytest.approx(0.7 / stages * (count + (stages - 1) / chunks))
    assert run.bubble == pytest.approx((stages - 1) / chunks / (count + (stages - 1) / chunks))


@pytest.mark.parametrize("count", [1, 2, 3, 7])
def test_fewer_micro_batches_than_stages(count: int) -> None:
    assert run_pipeline([0.3] * count, [0.7] * count, 4).seconds == pytest.approx((count + 3) / 4)
    assert run_pipeline([0.3] * count, None, 4).seconds == pytest.approx(0.3 * (count + 3) / 4)


times = st.lists(st.floats(0.01, 10), min_size=1, max_size=12)


@bounded
@given(times, st.integers(1, 6), st.integers(1, 3), st.booleans())
def test_schedules_hold_every_action_once_and_beat_no_bound(
    seconds: list[float], stages: int, chunks: int, backward: bool
) -> None:
    if chunks > 1:
        stages = max(2, stages)
        seconds = (seconds * stages)[: -(-len(seconds) // stages) * stages]
    run = run_pipeline(seconds, [2 * s for s in seconds] if backward else None, stages, chunks)
    times = 3 if backward else 1
    assert run.seconds >= times * max(*seconds, sum(seconds) / stages) * (1 - 1e-12)
    assert run.seconds <= times * sum(seconds) * (1 + 1e-12)
    for actions in run.actions:
        kinds = ("forward", "backward") if backward else ("forward",)
        assert sorted(actions) == sorted((k, c, m) for k in kinds for c in range(chunks) for m in range(len(seconds)))
        place = {action: i for i, action in enumerate(actions)}
        assert all(place["forward", c, m] < place[k, c, m] for k, c, m in actions if k == "backward")


def test_one_slow_micro_batch_delays_those_behind_it() -> None:
    """By hand: two stages, forward 1 and 5, backward 2 and 10 a stage."""
    assert run_pipeline([2.0, 10.0], [4.0, 20.0], 2).seconds == pytest.approx(
        6 + 5 + 10 + 10
    )  # F0 at 1, F1 at 6 | F1 11, B1 21 | B1 31


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (
            ([1.0] * 3, None, 2, 2),
            "3 micro-batches do not interleave over 2 stages of 2 chunks; .* micro_batch_multiple=2",
        ),
        (([1.0] * 3, None, 1, 2), "use at least 2 stages"),
        (([1.0], None, 0, 1), "0 pipeline stages"),
    ],
)
def test_impossible_pipelines(arguments: tuple, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        run_pipeline(*arguments)


# ---- simulation


@bounded
@given(plans(), st.integers(1, 4), st.booleans())
def test_one_stage_takes_the_plan_s_time_and_none_beats_the_bound(plan: Plan, pp: int, backward: bool) -> None:
    result = simulate(plan, pp=pp, backward=backward)
    step = plan.timeline(plan.cost if backward else plan.cost.forward_only()).step_seconds
    assert result.seconds >= result.lower_bound_seconds
    assert result.seconds <= step * (1 + 1e-12)
    if pp == 1:
        assert result.seconds == pytest.approx(step) and result.bubble == pytest.approx(0, abs=1e-12)


@pytest.mark.parametrize(("stages", "micro_batches"), [(1, 1), (2, 2), (4, 4), (8, 6)])
def test_a_first_stage_keeps_as_many_micro_batches_as_there_are_stages(stages: int, micro_batches: int) -> None:
    lengths = [100] * 12
    plan = plan_fixed(lengths, Layout(2), 1, max_tokens_per_slot=100)
    assert len(plan.micro_batches) == 6
    result = simulate(plan, pp=stages, row_bytes=RowBytes(activations=10.0, between_stages=3.0))
    assert result.peak_rows.tolist() == [100 * micro_batches / stages] * 2
    assert result.activation_bytes.tolist() == [1000 * micro_batches / stages] * 2
    assert result.stage_bytes == 1200 * (stages - 1) * 2 * 3.0
    assert simulate(plan, pp=stages, backward=False).peak_rows.tolist() == [100 / stages] * 2


def test_interleaving_keeps_more_in_flight() -> None:
    """A first stage of v chunks starts 2 (p - 1) + (v - 1) p + 1 chunks before its first backward pass."""
    plan = plan_fixed([100] * 16, Layout(2), 1, max_tokens_per_slot=100)
    assert simulate(plan, pp=4, vpp=2).peak_rows.tolist() == [100 * (6 + 4 + 1) / 8] * 2
    assert simulate(plan, pp=2, vpp=4).peak_rows.tolist() == [100 * (2 + 6 + 1) / 8] * 2


def test_ring_bytes_by_hand() -> None:
    """Each of c members sends (c - 1) / c of the rows: forward, backward and gradients."""
    groups = (Group((0, 1), (0,), (100,)), Group((2, 3, 4), (1,), (60,)), Group((5,), (2,), (9,), pad_to=12))
    plan = Plan(6, (100, 60, 9), (MicroBatch(groups),), 166, node_size=4)
    result = simulate(plan, cost=Cost(ring_bytes=7.0))
    # of the ring over slots 2, 3 and 4 two steps of three lead to another node
    assert (result.inside_bytes, result.across_bytes) == (7.0 * 100 + 7.0 * 60 * 2 / 3, 7.0 * 60 * 4 / 3)
    assert simulate(plan, cost=Cost(ring_bytes=7.0), backward=False).inside_bytes == pytest.approx(980 / 3)


def test_free_plans_have_no_pipeline() -> None:
    plan = plan_fixed([50, 60, 70], Layout(2), 1, max_tokens_per_slot=80, mode="free")
    assert simulate(plan).seconds == plan.predicted_seconds
    with pytest.raises(PlanError, match="free mode has no 2 pipeline stages"):
        simulate(plan, pp=2)


def test_a_run_is_its_steps() -> None:
    run = [plan_fixed([50 * i, 60], Layout(2), 2) for i in range(1, 4)]
    assert [s.seconds for s in simulate_run(run, pp=2)] == [simulate(plan, pp=2).seconds for plan in run]


def test_a_plan_of_dummies() -> None:
    result = simulate(plan_fixed([], Layout(4), 2), pp=2)
    assert result.seconds == pytest.approx(Cost().micro_batch_seconds) and not result.peak_rows.any()
    for backward in (True, False):
        assert simulate(Plan(4, (), (), 0), backward=backward).peak_rows.tolist() == [0.0] * 4


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
    assert [by_degree[cp].wasted_steps for cp in (1, 2, 4, 8)] == [3072, 1024, 0, 0]
    assert (by_degree[4].passes, by_degree[4].groups, by_degree[8].passes) == (1, 256, 2)
    for choice in by_degree.values():
        plan = choice.planned.plan
        assert sorted(d for m in plan.micro_batches for g in m.groups for d in g.documents) == list(range(1024))
        assert choice.planned.seconds <= choice.filled_seconds * (1 + 1e-9)
    assert len(by_degree[4].planned.plan.micro_batches) == 4
    assert comparison.best.cp == 4 and comparison.dynamic is not None
    assert comparison.dynamic.seconds <= by_degree[4].planned.seconds * (1 + 1e-9)
    assert by_degree[1].filled_seconds / by_degree[4].planned.seconds == pytest.approx(3.7, rel=0.02)


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
    assert (choice.passes, choice.filled_steps, choice.wasted_steps) == (2, 12, 2)


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


def test_row_bytes_are_of_the_model_that_costs_are_of() -> None:
    """Qwen3-8B: 36 layers, each of which keeps its input of 4096 values of two bytes, as a stage sends it on."""
    assert RowBytes().activations == 36 * RowBytes().between_stages == 36 * 4096 * 2
    qwen3 = {"hidden_size": 4096, "num_hidden_layers": 36}
    assert RowBytes.of(qwen3) == RowBytes()
    with pytest.raises(PlanError, match="dict has no hidden_size"):
        RowBytes.of({"num_hidden_layers": 36})


def test_stages_of_zamba_2_hand_on_and_keep_the_embedding_too() -> None:
    zamba2 = {"model_type": "zamba2", "hidden_size": 8, "num_hidden_layers": 6}
    row_bytes = RowBytes.of(zamba2, bytes_per_value=4)
    assert row_bytes == RowBytes(activations=6 * 32, between_stages=2 * 32, on_each_stage=32)
    plan = plan_fixed([100] * 12, Layout(2), 1, max_tokens_per_slot=100)
    for vpp in (1, 2):
        result = simulate(plan, pp=2, vpp=vpp, row_bytes=row_bytes)
        rows = result.peak_rows * 2 * vpp  # of one stage's layers
        assert result.activation_bytes.tolist() == (rows * (6 * 32 / (2 * vpp) + 32)).tolist()
        assert result.stage_bytes == 1200 * (2 * vpp - 1) * 2 * 2 * 32
