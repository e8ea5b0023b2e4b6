"""Plans that are made with a constant that is wrong."""

from dataclasses import replace

import pytest
from bench.plans.sensitivity import plan_sensitivity, rows_by_way, wrong_costs

from longspan.layout import Layout
from longspan.plan import Cost, Machine, Plan, plan_dynamic, plan_fixed

LENGTHS = [30000, 9000, 4000, 2000, 900, 300]
MODEL = {"hidden_size": 512, "num_hidden_layers": 4, "num_attention_heads": 8, "num_key_value_heads": 2}
MODEL |= {"intermediate_size": 1024, "vocab_size": 1000}


def make(cost: Cost) -> Plan:
    return plan_dynamic(LENGTHS, Layout(8), cost=cost, cp_comm_type="auto", heads=8, max_tokens_per_slot=8192)


@pytest.mark.parametrize("cost", [Cost(), Machine.known("H200").cost(MODEL)], ids=["ideal links", "network"])
def test_each_constant_is_changed_once_in_each_direction(cost: Cost) -> None:
    wrong = list(wrong_costs(cost, 0.5))
    assert [factor for _, factor, _ in wrong] == [0.5] * (len(wrong) // 2) + [1.5] * (len(wrong) // 2)
    names = [name for name, factor, _ in wrong if factor == 1.5]
    assert len(set(names)) == len(names) and "speed of links across hosts" in names
    assert all(changed != cost for _, _, changed in wrong)
    assert ("rows at which kernels reach half their speed" in names) == (cost.network is not None)


def test_a_faster_link_makes_messages_shorter_and_a_slower_constant_a_step_longer() -> None:
    cost = Machine.known("H200").cost(MODEL)
    group = plan_fixed([1024000], Layout(16), cp=16, cost=cost, cp_comm_type="all_gather")
    seconds = {(name, factor): group.timeline(wrong).step_seconds for name, factor, wrong in wrong_costs(cost)}
    right = group.timeline(cost).step_seconds
    assert seconds["speed of links across hosts", 1.2] < right < seconds["speed of links across hosts", 0.8]
    for name in ("time of attention", "time of linear layers", "latency of a message"):
        assert seconds[name, 0.8] < right < seconds[name, 1.2]


def test_regret_is_at_the_right_price() -> None:
    cost = Cost()
    best = make(cost).timeline(cost).step_seconds
    for change in plan_sensitivity(make, cost):
        assert change.regret == change.plan.timeline(cost).step_seconds / best - 1
        assert 0 <= change.moved <= 1 and abs(change.regret) < 0.5
        assert (change.moved > 0) or change.regret == pytest.approx(0, abs=0.2)


def test_a_plan_that_reads_no_cost_does_not_move() -> None:
    def make_same(cost: Cost) -> Plan:
        return replace(make(Cost()), cost=cost)

    assert {(c.moved, c.regret) for c in plan_sensitivity(make_same, Cost())} == {(0.0, 0.0)}


def test_rows_by_way_counts_each_row_once() -> None:
    rows = rows_by_way(make(Cost()))
    assert sum(rows.values()) >= sum(LENGTHS) and all(kind == "" for degree, kind in rows if degree == 1)
