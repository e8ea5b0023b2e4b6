"""The cost model, against values computed with the research model that it stands for."""

import doctest
from dataclasses import replace
from functools import partial

import numpy as np
import pytest

import longspan.plan
from longspan.errors import PlanError
from longspan.layout import Layout
from longspan.plan import Cost, CostSettings, Machine, plan_dynamic, plan_fixed
from longspan.plan.cost.links import Link
from longspan.plan.cost.machine import SHARDING_SHARE, UPDATE_BYTES
from longspan.plan.shape.model_shape import QWEN3_8B, ModelShape

CASES = [  # tokens, squares, degree, inside a node, seconds
    (65536, 65536**2, 8, True, 2.32021665099776),
    (65536, 65536**2, 16, False, 1.16838832549888),
    (2048, 2048**2, 1, True, 0.24327131758592),
    (30000, 3 * 10000**2, 16, False, 0.5346525),  # the wire is longer than attention
    (131072, 131072**2, 16, False, 3.7113613019955203),
    (300, 300**2, 3, False, 0.015001839999999999),
    (5000, 5000**2, 2, True, 0.316726),
]


@pytest.mark.parametrize(("tokens", "squares", "degree", "inside", "seconds"), CASES)
def test_group_seconds(tokens: int, squares: int, degree: int, inside: bool, seconds: float) -> None:
    assert float(Cost().group_seconds(tokens, squares, degree, inside)) == pytest.approx(seconds, rel=1e-12)


def test_group_seconds_of_many_groups_at_once() -> None:
    tokens, squares, degree, inside, seconds = (np.array(column) for column in zip(*CASES, strict=True))
    np.testing.assert_allclose(Cost().group_seconds(tokens, squares, degree, inside), seconds, rtol=1e-12)


def test_every_constant_counts() -> None:
    # the wire inside a node, the wire across, and attention are the longer in turn
    groups = (np.full(3, 9e4), np.array([1e6, 1e6, 1e12]), np.full(3, 4), np.array([True, False, True]))
    values = Cost().constants()
    of_no_group = ("micro_batch_seconds", "sharding_seconds", "closing_seconds", "update_seconds")
    of_no_group += ("launch_seconds", "group_launch_seconds", "document_launch_seconds")
    for name in (*of_no_group, "real_row_seconds"):  # these are of padding that experts skip
        del values[name]
    values |= {"merge_seconds": 1e-6, "copy_seconds": 1e-6}
    base = Cost.from_json(values)
    for name, value in values.items():
        kind = {"exchange_bytes": "a2a", "copy_seconds": "all_gather"}.get(name, "p2p")
        changed = Cost.from_json(values | {name: 2 * value}).under(kind)
        assert (changed.group_seconds(*groups) != base.under(kind).group_seconds(*groups)).any(), name


CLOSINGS = [  # slots, dp_replicate, node_size, bytes within a replica and between replicas, which stay inside a node
    (4, 1, 8, 4.5e9, 0, "both"),  # 1e9 weights x (2 + 4) bytes x 3/4
    (4, 1, 2, 4.5e9, 0, "none"),
    (8, 2, 8, 4.5e9, 1e9, "both"),  # a slot's 1/4 of 4e9 bytes, twice, of which half is its own
    (8, 2, 4, 4.5e9, 1e9, "within"),
    (8, 2, 3, 4.5e9, 1e9, "none"),
    (12, 2, 8, 5e9, 2e9 / 3, "none"),  # slots 6 to 11 are on two hosts
    (8, 4, 4, 3e9, 3e9, "within"),  # half of 4e9 bytes, twice, of which a quarter is its own
    (8, 8, 8, 0, 7e9, "both"),
]


@pytest.mark.parametrize(("slots", "copies", "node_size", "within", "between", "inside"), CLOSINGS)
def test_a_closing_gathers_within_replicas_and_sums_between_them(
    slots: int, copies: int, node_size: int, within: float, between: float, inside: str
) -> None:
    cost = Cost().with_closing(1e9, Layout(slots, dp_replicate=copies), node_size=node_size)
    wire = within / (40e9 if inside == "none" else 350e9) + between / (350e9 if inside == "both" else 40e9)
    assert cost.closing_seconds == pytest.approx(10e-3 + wire, rel=1e-12)


def test_a_free_step_updates_a_slots_shard_and_sums_copies_in_its_closing() -> None:
    lockstep, free = (Machine().cost(QWEN3_8B, CostSettings(shards=8, free=free)) for free in (False, True))
    copies = Machine().cost(QWEN3_8B, CostSettings(shards=4, dp_replicate=2, free=True))
    weights, machine = ModelShape.of(QWEN3_8B).stored_weights, Machine()
    end, weight = machine.micro_batch_seconds, UPDATE_BYTES / machine.memory_bytes_per_second
    assert free.update_seconds == lockstep.update_seconds == pytest.approx(end + weight * weights / 8)
    assert copies.update_seconds == pytest.approx(end + weight * weights / 4)
    assert (free.sharding_seconds, free.micro_batch_seconds) == (0.0, Machine().micro_batch_seconds)


def test_sharded_parameters_bound_a_micro_batch_from_below() -> None:
    """FSDP2's messages hide behind as much work, and between slow hosts there is less."""
    home, lengths = Layout(ranks=4), (900, 700, 300, 200)
    slow, plain = Cost(sharding_seconds=60.0), Cost()
    for planner in (partial(plan_fixed, cp=2), plan_dynamic):
        plan = planner(lengths, home, max_tokens_per_slot=512, cost=slow)
        count = len(plan.micro_batches)
        assert plan.predicted_seconds == pytest.approx(count * (60.0 + slow.micro_batch_seconds))
        costs = (replace(plain, sharding_seconds=1e-9), plain)
        hidden, usual = (planner(lengths, home, max_tokens_per_slot=512, cost=c) for c in costs)
        assert hidden.predicted_seconds == usual.predicted_seconds
    settings = CostSettings(shards=4)
    near, far = (Machine(node_size=n, across=Link.of(0.0, 3e9)).cost(QWEN3_8B, settings) for n in (4, 1))
    machine = Machine()
    copies = 3 * machine.weight_copy_seconds * ModelShape.of(QWEN3_8B).stored_weights
    shown = near.micro_batch_seconds - Machine().micro_batch_seconds - copies
    assert near.sharding_seconds == pytest.approx(shown * (1 - SHARDING_SHARE) / SHARDING_SHARE)
    assert far.sharding_seconds == pytest.approx(near.sharding_seconds * machine.sharding_bytes_per_second / 3e9)
    assert far.forward_only().sharding_seconds == pytest.approx(far.sharding_seconds / 4)


def test_a_free_step_over_sharded_parameters_pays_for_its_closing() -> None:
    home, lengths = Layout(ranks=4), (900, 700, 30, 20, 10)
    cost = Cost().with_closing(1e9, home)
    for planner in (partial(plan_fixed, cp=2), plan_dynamic):
        free, plain = (planner(lengths, home, max_tokens_per_slot=512, mode="free", cost=c) for c in (cost, Cost()))
        assert free.micro_batches == plain.micro_batches
        added = free.predicted_seconds - plain.predicted_seconds
        assert added == pytest.approx(cost.closing_seconds, rel=1e-9) and free.ratio >= 1
        lockstep = planner(lengths, home, max_tokens_per_slot=512, cost=cost)
        assert lockstep.predicted_seconds == planner(lengths, home, max_tokens_per_slot=512).predicted_seconds


def test_degree_one_pays_no_wire() -> None:
    cost = Cost(inside_bytes_per_second=1.0, across_bytes_per_second=1.0, ring_step_seconds=9.0)
    assert float(cost.group_seconds(1000, 10**6, 1, inside=False)) == float(cost.work_seconds(1000, 10**6))


def test_json_round_trip() -> None:
    cost = Cost(linear_seconds=1e-5, across_bytes_per_second=25e9)
    assert Cost.from_json(cost.to_json()) == cost
    assert Cost.from_json({"ring_bytes": 7}) == Cost(ring_bytes=7)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"linear_seconds": -1.0}, "linear_seconds is -1.0; give a finite number of at least 0"),
        ({"ring_step_seconds": float("nan")}, "ring_step_seconds is nan"),
        ({"across_bytes_per_second": 0}, "across_bytes_per_second is 0; give a finite number above 0"),
        ({"linear_seconds": "fast"}, "linear_seconds is 'fast'"),
        ({"tau": 1.0}, "some of linear_seconds, attention_seconds"),
        ([1.0], "a cost is an object"),
    ],
)
def test_refused(values: object, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Cost.from_json(values)


@pytest.mark.parametrize("module", ["cost.cost", "planners.fixed", None])
def test_docstrings_show_what_happens(module: str | None) -> None:
    subject = longspan.plan if module is None else __import__(f"longspan.plan.{module}", fromlist=["_"])
    outcome = doctest.testmod(subject)
    assert outcome.attempted and not outcome.failed


def test_a_cost_says_what_it_is_of() -> None:
    assert Cost().source == "Qwen3-8B on GPUs of 400 TFLOP/s" and Cost(linear_seconds=1.0).source != Cost().source
    slower = Cost(linear_seconds=1.0, source="slower GPUs")
    assert Cost.from_json(slower.to_json()) == slower and Cost.from_json(slower.to_json()).source == "slower GPUs"
    assert "does not name" in (Cost.from_json({}).source or "")
    with pytest.raises(PlanError, match="source is 3; give words"):
        Cost.from_json({"source": 3})
