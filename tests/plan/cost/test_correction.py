"""Corrections: what they scale, how a plan's seconds fall into parts, and that made factors are recovered."""

import json
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from longspan.errors import PlanError
from longspan.layout import Layout
from longspan.plan import Cost, Plan, PlanOptions, plan_dynamic
from longspan.plan.cost.correction import (
    BOUND,
    NO_CORRECTION,
    PARTS,
    Correction,
    Seconds,
    fit_correction,
    seconds_of_parts,
)
from longspan.plan.cost.cost_changes import scale_times
from longspan.plan.cost.machine import Machine
from longspan.plan.simulate.distributions import sample_lengths

MODEL = {
    "hidden_size": 2048,
    "num_hidden_layers": 16,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "vocab_size": 32000,
}
COST = Machine.known("H200").with_link("across", bytes_per_second=2.65e9).cost(MODEL)
MADE = Correction(linear=1.2, attention=0.85, inside=1.4, across=1.7)


@cache
def plans() -> tuple[Plan, ...]:
    """Dynamic plans over two hosts of four slots, of documents of different lengths."""
    options = PlanOptions(max_tokens_per_slot=8192, cost=COST, node_size=4, cp_comm_type="p2p")
    kinds = ("lognorm", "bimodal")
    lengths = [sample_lengths(kinds[seed % 2], 8 * 8192, seed=seed, longest=65536).tolist() for seed in range(40)]
    return tuple(plan_dynamic(documents, Layout(8), options=options) for documents in lengths)


def seconds_of(plan: Plan, correction: Correction) -> float:
    return plan.timeline(correction.correct_cost(COST)).step_seconds


@cache
def parts() -> tuple[Seconds, ...]:
    return tuple(seconds_of_parts(lambda c, plan=plan: seconds_of(plan, c), NO_CORRECTION) for plan in plans())


def measured(noise: float = 0.0, outliers: float = 0.0) -> list[float]:
    """The seconds of the plans on a machine of the made factors, and of a share of steps that were disturbed."""
    draw = np.random.default_rng(0)
    seconds = np.array(parts()) @ np.array(list(MADE.factors().values()))
    seconds = seconds * (1 + noise * draw.standard_normal(len(seconds)))
    disturbed = draw.choice(len(seconds), round(outliers * len(seconds)), replace=False)
    seconds[disturbed] *= draw.uniform(1.3, 5.0, len(disturbed))
    return seconds.tolist()


def test_parts_add_up_to_a_plan_under_any_correction() -> None:
    for plan, of_plan in zip(plans()[:8], parts(), strict=False):
        assert sum(of_plan) == pytest.approx(plan.predicted_seconds, rel=1e-6)
        found = seconds_of_parts(lambda c, plan=plan: seconds_of(plan, c), MADE)
        assert sum(p * f for p, f in zip(found, MADE.factors().values(), strict=True)) == pytest.approx(
            seconds_of(plan, MADE), rel=1e-6
        )
    assert all(max(values) > 0 for values in zip(*parts(), strict=True)), "each part is in some plan"


def test_a_step_that_waits_for_sharded_weights_has_these_seconds_in_a_part() -> None:
    """Work hides behind the messages, and would give the factors of the few seconds that are left."""
    cost, plan = replace(COST, sharding_seconds=60.0), plans()[0]
    seconds = plan.timeline(cost).step_seconds
    of_plan = seconds_of_parts(lambda c: plan.timeline(c.correct_cost(cost)).step_seconds, NO_CORRECTION)
    assert of_plan == (pytest.approx(seconds, rel=1e-6), 0.0, 0.0, 0.0)
    assert fit_correction([of_plan] * 8, [1.5 * seconds] * 8).linear == pytest.approx(1.5)


@pytest.mark.parametrize("noise", [0.0, 0.001])
def test_made_factors_are_recovered_within_2_percent_under_outliers(noise: float) -> None:
    fitted = fit_correction(parts(), measured(noise, outliers=0.1)).factors()
    for name, factor in MADE.factors().items():
        assert fitted[name] == pytest.approx(factor, rel=0.02), name


@pytest.mark.parametrize("dropped", range(len(PARTS)))
def test_without_one_of_the_parts_they_are_not(dropped: int) -> None:
    """The test above depends on every part: were a part priced with the linear one, others would be wrong."""
    fewer = []
    for of_plan in parts():
        values = list(of_plan)
        moved = values[dropped]
        values[dropped] = 0.0
        values[0 if dropped else 1] += moved
        fewer.append(values)
    fitted = fit_correction(fewer, measured(outliers=0.1)).factors()
    assert any(fitted[name] != pytest.approx(factor, rel=0.02) for name, factor in MADE.factors().items())


def test_steps_that_are_alike_give_the_common_ratio_and_bounds_hold_around_it() -> None:
    alike = [(1.0, 0.5, 0.1, 0.0)] * 20
    draw = np.random.default_rng(1)
    noisy = [160.0 * (1 + 0.01 * x) for x in draw.standard_normal(20)]
    for factor in fit_correction(alike, noisy).factors().values():
        assert factor == pytest.approx(100.0, rel=0.01)
    factors = fit_correction([(1.0, 0.2, 0.0, 0.0), (1.0, 0.4, 0.0, 0.0), (1.0, 0.6, 0.0, 0.0)] * 5, [3, 5, 7] * 5)
    common = 5 / 1.4
    assert max(factors.factors().values()) <= BOUND * common * 1.001
    assert min(factors.factors().values()) >= common / BOUND * 0.999
    assert fit_correction([], []) == NO_CORRECTION == fit_correction([(0.0, 0.0, 0.0, 0.0)], [1.0])


def test_every_constant_of_a_cost_belongs_to_one_part() -> None:
    """All factors together are a machine on which everything takes so much longer."""
    for cost in (COST, Cost(), replace(COST, launch_seconds=0.1, closing_seconds=0.2, sharding_seconds=0.3)):
        found = Correction.of([2.0] * len(PARTS)).correct_cost(cost)
        assert found == scale_times(cost, 2.0, found.source or "")
        assert found.source == f"{cost.source}, refined by measured steps"
    assert NO_CORRECTION.correct_cost(COST) is COST
    assert Correction(linear=2.0).correct_cost(replace(COST, source="")).source == "", "no machine stays none"


def test_json_and_what_is_refused() -> None:
    assert Correction.from_json(json.loads(json.dumps(MADE.factors()))) == MADE
    for values in ({}, None, {**MADE.factors(), "linear": 0.0}, {**MADE.factors(), "linear": True}):
        with pytest.raises(PlanError, match="correction"):
            Correction.from_json(values)
