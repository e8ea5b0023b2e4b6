"""What padding costs a mixture: its experts compute real rows alone, as many as the busiest slot of a group has."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from longspan import Layout, plan_dynamic, plan_fixed, plan_padded
from longspan.plan import Cost, CostSettings, Group, Machine, MicroBatch, PlanOptions
from longspan.plan.cost.correction import Correction
from longspan.plan.cost.cost_changes import scale_times
from longspan.plan.micro_batch import PARTITIONS, Mode, PartitionKind
from longspan.plan.shape.model_shape import ModelShape
from longspan.plan.simulate.row_bytes import QWEN3_8B
from longspan.plan.timeline import GroupTable
from tests.plan.test_dynamic_optimum import QWEN3_30B_A3B as MIXTURE

H200 = Machine.known("H200")
LENGTHS = [775, 1578, 24421, 5467, 177, 21417, 24576, 118]


def real_rows(group: Group) -> list[int]:
    """Count the rows of each member that are no padding."""
    real = np.concatenate([np.arange(pad) < n for n, pad in zip(group.lengths, group.laid_out, strict=True)])
    return [int(real[group.shares.rows(member)].sum()) for member in range(group.degree)]


def without_experts(cost: Cost) -> Cost:
    """Return the cost as files had it that name no share of experts."""
    values = {name: value for name, value in cost.to_json().items() if name not in ("expert_seconds", "forward")}
    return Cost.from_json(json.loads(json.dumps(values)))


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("degree", [1, 2, 3, 8])
@pytest.mark.parametrize("lengths", [(100, 300), (1,), (400, 400), (399, 7, 250)])
def test_the_busiest_slot_computes_its_real_rows(
    partition: PartitionKind, degree: int, lengths: tuple[int, ...]
) -> None:
    group = Group(tuple(range(degree)), tuple(range(len(lengths))), lengths, partition=partition, pad_to=400)
    (skipped,) = GroupTable.of([MicroBatch((group,))]).skipped
    busiest = 400 * len(lengths) / degree - skipped
    assert busiest == pytest.approx(max(real_rows(group)), abs=len(lengths))  # shares are not rounded to whole rows
    assert sum(lengths) / degree <= busiest * (1 + 1e-12)


def test_a_padded_plan_of_a_mixture_costs_what_its_real_rows_make_experts_do() -> None:
    cost = H200.cost(MIXTURE)
    options = PlanOptions(max_tokens_per_slot=6144, heads=32, cost=cost)
    plan = plan_padded(LENGTHS, Layout(4), 4, options=options)
    padding = sum(
        max(group.laid_out) / group.degree - max(real_rows(group)) for b in plan.micro_batches for group in b.groups
    )
    all_rows = plan_padded(LENGTHS, Layout(4), 4, options=replace(options, cost=without_experts(cost)))
    saved = all_rows.predicted_seconds - plan.predicted_seconds
    assert saved == pytest.approx(cost.expert_seconds * padding, rel=1e-3)
    assert all_rows.micro_batches == plan.micro_batches and saved > 0.1 * plan.predicted_seconds
    assert plan.predicted_seconds > plan.lower_bound_seconds


def test_plans_without_padding_and_of_dense_models_cost_the_same() -> None:
    mixture, dense = H200.cost(MIXTURE), H200.cost(QWEN3_8B)
    assert mixture.expert_seconds > 0 and dense.expert_seconds == 0.0 == Cost().expert_seconds
    options, home = PlanOptions(max_tokens_per_slot=8192, heads=32), Layout(4)

    def packed_seconds(cost: Cost, mode: Mode) -> list[float]:
        of_mode = replace(options, cost=cost, mode=mode)
        plans = plan_fixed(LENGTHS, home, 4, options=of_mode), plan_dynamic(LENGTHS, home, options=of_mode)
        return [plan.predicted_seconds for plan in (*plans, plan_padded([8192] * 4, home, 2, options=of_mode))]

    for mode in ("lockstep", "free"):
        assert packed_seconds(mixture, mode) == packed_seconds(without_experts(mixture), mode)
    for cost in (dense, Cost()):
        now, before = (
            plan_padded(LENGTHS, home, 4, options=replace(options, cost=c)) for c in (cost, without_experts(cost))
        )
        assert now.predicted_seconds == before.predicted_seconds


def test_the_share_of_experts_follows_the_rows() -> None:
    """With recomputation, adapters, tensor parallelism, float8, rows that travel, other machines and corrections."""
    weights, plain = ModelShape.of(MIXTURE).expert_weights, H200.cost(MIXTURE)

    def share(**settings: Any) -> float:
        return H200.cost(MIXTURE, CostSettings(**settings)).expert_seconds

    assert plain.expert_seconds == pytest.approx(6 * weights / H200.expert_flops_per_second)
    assert share(forward=True) == pytest.approx(plain.expert_seconds / 3) == plain.forward_only().expert_seconds
    assert share(frozen=True) == pytest.approx(plain.expert_seconds * 4 / 6)
    assert share(tp=2) == pytest.approx(plain.expert_seconds / 2)
    assert plain.expert_seconds < share(recomputation="full") < plain.expert_seconds * 4 / 3
    assert 0 < share(float8=True) < plain.expert_seconds
    travel = H200.cost(MIXTURE, CostSettings(ep=4)).linear_seconds - plain.linear_seconds
    assert share(ep=4) - plain.expert_seconds == pytest.approx(travel)
    assert Correction(linear=1.5).correct_cost(plain).expert_seconds == pytest.approx(1.5 * plain.expert_seconds)
    assert scale_times(plain, 2.0, "slower").expert_seconds == 2 * plain.expert_seconds
    assert Cost.from_json(plain.to_json()) == plain and without_experts(plain).expert_seconds == 0.0
    by_flops = Cost.for_model(MIXTURE, tflops=400)
    assert by_flops.expert_seconds == pytest.approx(6 * weights / 4e14)
    assert all(c.expert_seconds < c.linear_seconds for c in (plain, plain.forward_only(), by_flops))
