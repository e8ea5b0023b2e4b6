"""What padding costs: experts and logits are of real rows alone, as many as the busiest slot of a group has."""

import json
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from longspan import Layout, plan_dynamic, plan_fixed, plan_padded
from longspan.plan import Cost, CostSettings, Group, Machine, MicroBatch, PlanOptions
from longspan.plan.cost.machine import LOGIT_BYTES
from longspan.plan.micro_batch import PARTITIONS, Mode, PartitionKind
from longspan.plan.shape.model_shape import QWEN3_8B, ModelShape
from longspan.plan.step_times import GroupTable
from tests.plan.test_dynamic_optimum import QWEN3_30B_A3B as MIXTURE

H200 = Machine.known("H200")
LENGTHS = [775, 1578, 24421, 5467, 177, 21417, 24576, 118]


def real_rows(group: Group) -> list[int]:
    """Count the rows of each member that are no padding."""
    real = np.concatenate([np.arange(pad) < n for n, pad in zip(group.lengths, group.laid_out, strict=True)])
    return [int(real[group.shares.rows(member)].sum()) for member in range(group.degree)]


def without_real_rows(cost: Cost) -> Cost:
    """Return the cost as files had it that do not name what real rows take alone."""
    values = {name: value for name, value in cost.to_json().items() if name not in ("real_row_seconds", "forward")}
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


@pytest.mark.parametrize(("config", "least"), [(MIXTURE, 0.1), (QWEN3_8B, 0.03)], ids=["mixture", "dense"])
def test_a_padded_plan_costs_what_its_real_rows_make_experts_and_the_head_do(
    config: dict[str, Any], least: float
) -> None:
    cost = replace(H200.cost(config), launch_seconds=0.0)  # the host takes as long for padding
    options = PlanOptions(max_tokens_per_slot=6144, heads=32, cost=cost)
    plan = plan_padded(LENGTHS, Layout(4), 4, options=options)
    padding = sum(
        max(group.laid_out) / group.degree - max(real_rows(group)) for b in plan.micro_batches for group in b.groups
    )
    all_rows = plan_padded(LENGTHS, Layout(4), 4, options=replace(options, cost=without_real_rows(cost)))
    saved = all_rows.predicted_seconds - plan.predicted_seconds
    assert saved == pytest.approx(cost.real_row_seconds * padding, rel=1e-3)
    assert all_rows.micro_batches == plan.micro_batches and saved > least * plan.predicted_seconds
    assert plan.predicted_seconds > plan.lower_bound_seconds


def test_plans_without_padding_and_by_a_cost_of_no_machine_cost_the_same() -> None:
    mixture, dense = H200.cost(MIXTURE), H200.cost(QWEN3_8B)
    assert mixture.real_row_seconds > 0 < dense.real_row_seconds and Cost().real_row_seconds == 0.0
    options, home = PlanOptions(max_tokens_per_slot=8192, heads=32), Layout(4)

    def packed_seconds(cost: Cost, mode: Mode) -> list[float]:
        of_mode = replace(options, cost=cost, mode=mode)
        plans = plan_fixed(LENGTHS, home, 4, options=of_mode), plan_dynamic(LENGTHS, home, options=of_mode)
        return [plan.predicted_seconds for plan in (*plans, plan_padded([8192] * 4, home, 2, options=of_mode))]

    for mode in ("lockstep", "free"):
        for cost in (mixture, dense):
            assert packed_seconds(cost, mode) == packed_seconds(without_real_rows(cost), mode)
    now, before = (
        plan_padded(LENGTHS, home, 4, options=replace(options, cost=c)) for c in (Cost(), without_real_rows(Cost()))
    )
    assert now.predicted_seconds == before.predicted_seconds


def test_what_real_rows_take_alone_follows_the_rows() -> None:
    """With recomputation, adapters, tensor parallelism, float8, rows that travel, and other machines."""
    shape, plain = ModelShape.of(MIXTURE), H200.cost(MIXTURE)
    weights, passes = shape.expert_weights, shape.logits * LOGIT_BYTES / H200.memory_bytes_per_second
    products = 6 * shape.hidden * shape.logits / H200.product_flops_per_second
    experts = 6 * weights / H200.expert_flops_per_second

    def share(**settings: Any) -> float:
        return H200.cost(MIXTURE, CostSettings(**settings)).real_row_seconds

    assert plain.real_row_seconds == pytest.approx(experts + products + passes)
    assert share(target_share=0.25) == pytest.approx(experts + (products + passes) / 4)
    assert share(forward=True) == pytest.approx(plain.real_row_seconds / 3) == plain.forward_only().real_row_seconds
    assert share(frozen=True) == pytest.approx((experts + products) * 4 / 6 + passes)
    assert share(tp=2) == pytest.approx(plain.real_row_seconds / 2)
    assert plain.real_row_seconds < share(recomputation="full") < plain.real_row_seconds * 4 / 3
    assert 0 < share(float8=True) < plain.real_row_seconds
    travel = H200.cost(MIXTURE, CostSettings(ep=4)).linear_seconds - plain.linear_seconds
    assert share(ep=4) - plain.real_row_seconds == pytest.approx(travel)
    assert Cost.from_json(plain.to_json()) == plain and without_real_rows(plain).real_row_seconds == 0.0
    by_flops = Cost.for_model(MIXTURE, tflops=400)
    assert by_flops.real_row_seconds == pytest.approx(6 * weights / 4e14)
    assert all(c.real_row_seconds < c.linear_seconds for c in (plain, plain.forward_only(), by_flops))
