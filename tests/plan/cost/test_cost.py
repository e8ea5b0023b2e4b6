"""Costs of groups by the research model, forward passes, types, states, layers that run twice; and lower bounds."""

import dataclasses
from dataclasses import replace
from functools import partial
from typing import get_args

import numpy as np
import pytest
import torch
from hypothesis import given, strategies as st
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode
from transformers import Qwen3Config, Qwen3ForCausalLM

from longspan.comm import ShardPart
from longspan.errors import PlanError
from longspan.layout import Layout
from longspan.plan import (
    Cost,
    CostSettings,
    Group,
    Machine,
    MicroBatch,
    Mode,
    Plan,
    PlanOptions,
    lower_bound_seconds,
    plan_dynamic,
    plan_fixed,
)
from longspan.plan.cost.cost import StateCost, attention_imbalance
from longspan.plan.cost.links import Link
from longspan.plan.cost.machine import SHARDING_SHARE, UPDATE_BYTES, cost_with_recomputation
from longspan.plan.micro_batch import fit_level_sizes
from longspan.plan.shape.model_shape import QWEN3_8B, ModelShape
from longspan.ssm.chains import Chains
from tests.plan.cases import HYBRID, bounded, flops_cost, plans


def test_every_constant_counts() -> None:
    # the wire inside a node, the wire across, and attention are the longer in turn
    groups = (np.full(3, 9e4), np.array([1e6, 1e6, 1e12]), np.full(3, 4), np.array([True, False, True]))
    values = Cost().constants()
    of_no_group = ("micro_batch_seconds", "sharding_seconds", "closing_seconds", "update_seconds")
    of_no_group += ("streaming_seconds", "gradient_seconds", "paging_seconds")
    of_no_group += ("launch_seconds", "group_launch_seconds", "document_launch_seconds")
    for name in (*of_no_group, "real_row_seconds"):  # these are of padding that experts skip
        del values[name]
    values |= {"merge_seconds": 1e-6, "copy_seconds": 1e-6}
    base = Cost.from_json(values)
    for name, value in values.items():
        kind = {"exchange_bytes": "a2a", "copy_seconds": "all_gather"}.get(name, "p2p")
        changed = Cost.from_json(values | {name: 2 * value}).under(kind)
        assert (changed.group_seconds(*groups) != base.under(kind).group_seconds(*groups)).any(), name


@pytest.mark.parametrize(
    ("slots", "copies", "node_size", "within", "between", "inside"),  # bytes; which of them stay inside a node
    [
        (4, 1, 8, 4.5e9, 0, "both"),  # 1e9 weights x (2 + 4) bytes x 3/4
        (4, 1, 2, 4.5e9, 0, "none"),
        (8, 2, 8, 4.5e9, 1e9, "both"),  # a slot's 1/4 of 4e9 bytes, twice, of which half is its own
        (8, 2, 4, 4.5e9, 1e9, "within"),
        (8, 2, 3, 4.5e9, 1e9, "none"),
        (12, 2, 8, 5e9, 2e9 / 3, "none"),  # slots 6 to 11 are on two hosts
        (8, 4, 4, 3e9, 3e9, "within"),  # half of 4e9 bytes, twice, of which a quarter is its own
        (8, 8, 8, 0, 7e9, "both"),
    ],
)
def test_a_closing_gathers_within_replicas_and_sums_between_them(
    slots: int, copies: int, node_size: int, within: float, between: float, inside: str
) -> None:
    cost = Cost().with_closing(1e9, Layout(slots, dp_replicate=copies), node_size=node_size)
    wire = within / (40e9 if inside == "none" else 350e9) + between / (350e9 if inside == "both" else 40e9)
    assert cost.closing_seconds == pytest.approx(10e-3 + wire, rel=1e-12)


def test_a_free_step_updates_a_slots_shard_and_gathers_and_sums_in_its_closing() -> None:
    lockstep, free = (Machine().cost(QWEN3_8B, CostSettings(shards=8, free=free)) for free in (False, True))
    copies = Machine().cost(QWEN3_8B, CostSettings(shards=4, dp_replicate=2, free=True))
    weights, machine = ModelShape.of(QWEN3_8B).stored_weights, Machine()
    end, weight = machine.micro_batch_seconds, UPDATE_BYTES / machine.memory_bytes_per_second
    assert free.update_seconds == lockstep.update_seconds == pytest.approx(end + weight * weights / 8)
    ring = 4 * weights / 4 / machine.inside.gather.bytes_per_second  # each of two copies gets half, and then the other
    assert copies.update_seconds == pytest.approx(end + weight * weights / 4 + ring)
    assert (free.sharding_seconds, free.micro_batch_seconds) == (0.0, Machine().micro_batch_seconds)
    wire = (2 + 4) * 7 / 8 / machine.sharding_bytes_per_second  # nothing of it hides
    assert free.closing_seconds == pytest.approx(end + weights * (2 * machine.weight_copy_seconds + wire))
    assert lockstep.closing_seconds == 0 == free.forward_only().closing_seconds


def test_sharded_parameters_bound_a_micro_batch_from_below() -> None:
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
        lockstep, without = (planner(lengths, home, max_tokens_per_slot=512, cost=c) for c in (cost, Cost()))
        assert lockstep.predicted_seconds == pytest.approx(without.predicted_seconds + cost.closing_seconds)


def test_json_gives_a_cost_back_with_what_it_is_of() -> None:
    cost = Cost(linear_seconds=1e-5, across_bytes_per_second=25e9, source="slower GPUs")
    again = Cost.from_json(cost.to_json())
    assert again == cost and again.source == "slower GPUs" and Cost.from_json({"ring_bytes": 7}) == Cost(ring_bytes=7)
    assert Cost().source == "Qwen3-8B on GPUs of 400 TFLOP/s" and Cost(linear_seconds=1.0).source != Cost().source
    assert "does not name" in (Cost.from_json({}).source or "")
    tables = [plan_fixed([5, 9], Layout(1), 1, cost=price).table() for price in (Cost(), cost)]
    assert ["400 TFLOP/s, the default: cost=Machine" in table for table in tables] == [True, False]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"linear_seconds": -1.0}, "linear_seconds is -1.0; give a finite number of at least 0"),
        ({"ring_step_seconds": float("nan")}, "ring_step_seconds is nan"),
        ({"across_bytes_per_second": 0}, "across_bytes_per_second is 0; give a finite number above 0"),
        ({"linear_seconds": "fast"}, "linear_seconds is 'fast'"),
        ({"tau": 1.0}, "some of linear_seconds, attention_seconds"),
        ([1.0], "a cost is an object"),
        ({"source": 3}, "source is 3; give words"),
        ({"passes": "backward"}, "passes of a cost is 'backward'; use one of forward and backward, forward"),
        ({"cp_comm_type": "ring"}, "cp_comm_type of a cost is 'ring'; use one of p2p"),
        ({"a2a_size": -1}, "a2a_size, the slots that exchange heads, is -1"),
        ({"forward": {"linear_seconds": 1.0}}, "forward is the cost of forward passes only"),
        ({"states": {"state_bytes": -1}}, "states.state_bytes is -1; give a finite number"),
        ({"states": {"partition": "ring"}}, "partition of a cost is 'ring'; use one of zigzag, contiguous"),
        ({"states": {"halo": 1}}, "a cost is an object .* unexpected keyword argument 'halo'"),
        ({"states": [1]}, "a cost is an object"),
    ],
)
def test_refused(values: object, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Cost.from_json(values)


def test_what_forward_takes_follows_from_flops_and_messages() -> None:
    """Literal: Qwen3-8B's 2 FLOPs a weight, 2 products of attention, keys and values once, half of the exchanges."""
    forward = Cost().forward_only()
    assert forward.linear_seconds == pytest.approx(2 * 45.4e9 / 6 / 4e14)
    assert forward.attention_seconds == pytest.approx(36 * 2 * 4096 / 4e14)
    assert forward.ring_bytes == pytest.approx(36 * 2 * 1024 * 2)
    assert forward.exchange_bytes == pytest.approx(36 * (2 * 4096 + 2 * 1024) * 2)
    assert forward.ring_step_seconds == pytest.approx(36 * 10e-6)
    assert forward.micro_batch_seconds == pytest.approx(10e-3 / 3)
    assert forward.inside_bytes_per_second == Cost().inside_bytes_per_second
    assert forward.source == "Qwen3-8B on GPUs of 400 TFLOP/s; forward passes alone"
    assert forward.forward_only() is forward and dataclasses.replace(Cost(), source="").forward_only().source == ""


def test_each_type_by_hand() -> None:
    """1000 rows on 4 slots of a node: what each slot computes, sends and waits for."""
    cost = Cost(
        linear_seconds=1.0,
        attention_seconds=0.01,
        ring_bytes=20.0,
        exchange_bytes=40.0,
        inside_bytes_per_second=10.0,
        across_bytes_per_second=1.0,
        ring_step_seconds=5.0,
    )
    linear, attention = 250.0, 2500.0
    ring, exchange = 1000 * 20 * 3 / 4 / 10, 250 * 40 * 3 / 4 / 10
    two_levels = 1000 * 20 / 2 * 1 / 2 / 1, 250 * 40 * 1 / 2 / 10  # a ring of two between nodes, pairs inside

    def seconds(kind: str, inside: bool = True, squares: float = 1e6, size: int = 2) -> float:
        return float(cost.under(kind, size).group_seconds(1000, squares, 4, inside))

    assert seconds("p2p") == pytest.approx(linear + max(attention, ring) + 15)
    assert seconds("p2p", squares=0) == pytest.approx(linear + ring + 15)
    assert seconds("all_gather") == pytest.approx(linear + attention + ring + 5)
    assert seconds("a2a") == pytest.approx(linear + attention + exchange + 5)
    apart = linear + max(attention, two_levels[0]) + two_levels[1] + 10
    assert seconds("a2a+p2p", inside=False) == pytest.approx(apart)
    assert seconds("auto") == min(seconds("p2p"), seconds("all_gather"))
    for kind in ("p2p", "all_gather", "a2a", "a2a+p2p"):  # one slot communicates nothing
        assert float(cost.under(kind, 2).group_seconds(1000, 1e6, 1, True)) == float(cost.work_seconds(1000, 1e6))
    assert seconds("a2a+p2p", size=1) == seconds("p2p") and seconds("a2a+p2p", size=4) == seconds("a2a")
    np.testing.assert_array_equal(cost.under("a2a+p2p", 4).latency_seconds([1, 2, 4, 6, 12]), [0, 5, 5, 15, 15])


def test_a_forward_that_was_measured_is_taken() -> None:
    measured = dataclasses.replace(Cost(micro_batch_seconds=4e-3).forward_only(), micro_batch_seconds=3e-3)
    cost = Cost(micro_batch_seconds=4e-3, forward=measured)
    assert cost.forward_only().micro_batch_seconds == 3e-3
    assert cost.under("a2a").forward_only().cp_comm_type == "a2a"
    again = Cost.from_json(cost.to_json())
    assert again == cost and again.forward_only() == cost.forward_only()
    evaluation = Cost().forward_only().under("a2a+p2p", 4)
    assert Cost.from_json(evaluation.to_json()) == evaluation


def test_an_evaluation_in_free_mode_gathers_parameters_and_sums_no_gradients() -> None:
    cost = Cost().with_closing(1e9, Layout(8, dp_replicate=2), node_size=4)
    gathered = 1e9 * 2 * 3 / 4 / 350e9
    assert cost.forward_only().closing_seconds == pytest.approx(10e-3 / 3 + gathered)
    assert Cost().forward_only().with_closing(1e9, Layout(8, dp_replicate=2), node_size=4) == cost.forward_only()


HEADS, KEY, VALUE = 3, 4, 5
BYTES = StateCost(state_bytes=HEADS * KEY * VALUE * 4.0, transition_bytes=HEADS * KEY * KEY * 4.0)


def sent(lengths: list[int], degree: int, partition: str) -> tuple[float, int]:
    """Bytes that the members of a group give: as priced, and as their exchange has them."""
    group = Group(tuple(range(degree)), tuple(range(len(lengths))), tuple(lengths), partition=partition)
    priced = BYTES.for_partition(partition).exchanged_state_bytes(len(lengths), sum(lengths), degree)
    chains = Chains(ShardPart(group, 0, 0, 0, world_key=-1), torch.device("cpu"))
    return float(priced), 4 * HEADS * sum(chains.forward_passing.count_rows(KEY * VALUE, KEY * KEY))


@bounded
@given(st.integers(2, 6), st.data())
def test_bytes_are_those_of_the_exchange(degree: int, data: st.DataObject) -> None:
    lengths = data.draw(st.lists(st.integers(2 * degree, 500), min_size=1, max_size=9))
    priced, exchanged = sent(lengths, degree, "zigzag")
    assert priced == exchanged
    priced, exchanged = sent(lengths[:1], degree, "contiguous")
    assert priced == exchanged
    priced, exchanged = sent(lengths, degree, "contiguous")
    assert exchanged <= priced + (degree - 2) * BYTES.transition_bytes
    short = data.draw(st.lists(st.integers(1, 2 * degree), min_size=1, max_size=30))
    priced, exchanged = sent(short, degree, "zigzag")
    assert exchanged <= priced + len(short) * BYTES.transition_bytes


def test_one_document_over_four_slots_by_hand() -> None:
    states = StateCost(summary_seconds=2.0, state_bytes=8.0, transition_bytes=4.0, step_seconds=5.0)
    bare = Cost(linear_seconds=0, attention_seconds=0, ring_bytes=0, ring_step_seconds=0, inside_bytes_per_second=10.0)
    cost = dataclasses.replace(bare, states=states)

    def seconds(cost: Cost, documents: int = 1, squares: int = 10**6) -> float:
        return float(cost.group_seconds(1000, squares, 4, True, documents))

    wire = (6 * 8 + 5 * 4) * 0.75 / 10  # 7 runs: 6 states and 5 transitions, of which a slot gets three quarters
    assert seconds(cost) == pytest.approx(2 * 250 + wire + 5)
    assert seconds(cost, 10, 10**5) == pytest.approx(2 * 250 + 10 * wire + 5)
    contiguous = cost.for_partition("contiguous")
    assert seconds(contiguous) == pytest.approx(2 * 250 + (3 * 8 + 2 * 4) * 0.75 / 10 + 5)
    # ten documents of 100 rows: three boundaries cut three of them
    assert seconds(contiguous, 10, 10**5) == pytest.approx(2 * 75 + 3 * 8 * 0.75 / 10 + 5)
    assert float(cost.group_seconds(1000, 10**6, 1, True)) == 0.0
    inside = np.array([True, False]).reshape(2, 1, 1)  # as dynamic plans of one slot ask
    assert cost.group_seconds(1000, 10**6, np.ones((1, 1)), inside).tolist() == [[[0.0]], [[0.0]]]


@pytest.mark.parametrize(("lengths", "degree"), [([4096], 4), ([4096], 2), ([1024] * 4, 8), ([512] * 16, 4)])
def test_the_busiest_slot_of_a_contiguous_ring(lengths: list[int], degree: int) -> None:
    group = Group(tuple(range(degree)), tuple(range(len(lengths))), tuple(lengths), partition="contiguous")
    pairs = []
    for member in range(degree):
        runs = group.shares.segments(member)
        pairs.append(float((runs.stop.astype(float) ** 2 - runs.start.astype(float) ** 2).sum()))
    tokens, squares = float(sum(lengths)), float(sum(n * n for n in lengths))
    priced = attention_imbalance("contiguous", np.array(tokens), np.array(squares), np.array(float(degree)))
    assert priced == pytest.approx(max(pairs) * degree / sum(pairs), rel=0.01)
    assert attention_imbalance("zigzag", np.array(tokens), np.array(squares), np.array(4.0)) == 1.0


def test_costs_of_states_follow_the_cost() -> None:
    cost = Machine.cpus().cost(HYBRID)
    assert cost.states and cost.states.state_bytes == 3 * 2 * 4 * 4 * 16 * 8
    assert cost.states.transition_bytes == 3 * 2 * 4 * 4 * 16 * 16
    assert Cost.from_json(cost.to_json()) == cost and Cost.from_json(Cost().to_json()).states is None
    halves = cost.shared_by(2).states
    assert halves and halves.state_bytes == cost.states.state_bytes / 2
    assert halves.step_seconds == cost.states.step_seconds
    full = cost_with_recomputation(cost, ModelShape.of(HYBRID), "full")
    assert full.states and full.states.state_bytes == cost.states.state_bytes * 3 / 2
    assert full.states.summary_seconds == pytest.approx(cost.states.summary_seconds * 5 / 3)
    assert full.for_partition("contiguous").forward_only() == cost.for_partition("contiguous").forward_only()
    weights = cost.linear_seconds - cost.states.scan_seconds
    frozen = cost_with_recomputation(cost, ModelShape.of(HYBRID), "none", frozen=True).linear_seconds
    assert frozen == pytest.approx(weights * 4 / 6 + cost.states.scan_seconds)
    assert Cost().for_partition("contiguous") == Cost()


TINY = Qwen3Config(hidden_size=64, intermediate_size=96, num_hidden_layers=3, num_attention_heads=4)
TINY.update({"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 128})
TINY_SHAPE = ModelShape.of(TINY)


def flops(recomputed: int) -> int:
    model = Qwen3ForCausalLM(TINY)
    for layer in model.model.layers[:recomputed]:
        forward = layer.forward
        layer.forward = lambda *args, forward=forward, **more: checkpoint(forward, *args, use_reentrant=False, **more)
    embedded = torch.randn(1, 1, 64, requires_grad=True)
    with FlopCounterMode(display=False) as counted:
        model(inputs_embeds=embedded, use_cache=False).logits.sum().backward()
    return counted.get_total_flops()


@pytest.mark.parametrize("layers", (1, 2, 3))
def test_recomputed_flops_are_those_that_torch_counts(layers: int) -> None:
    none, some = flops(0), flops(layers)
    cost = flops_cost(TINY, tflops=1.0)
    recomputed = cost_with_recomputation(cost, TINY_SHAPE, "selective", layers)
    assert recomputed.linear_seconds / cost.linear_seconds == pytest.approx(some / none, rel=2e-3)
    assert recomputed == (cost_with_recomputation(cost, TINY_SHAPE, "selective") if layers == 3 else recomputed)


def test_full_recomputation_repeats_attention_and_its_ring() -> None:
    cost = flops_cost(TINY, tflops=1.0)
    full, third = (cost_with_recomputation(cost, TINY_SHAPE, "full", layers) for layers in (None, 1))
    assert full.attention_seconds == pytest.approx(cost.attention_seconds * 9 / 7)
    assert full.ring_step_seconds == pytest.approx(cost.ring_step_seconds * 3 / 2)
    assert full.ring_bytes == pytest.approx(cost.ring_bytes * 4 / 3)
    assert third.attention_seconds == pytest.approx(cost.attention_seconds * (1 + 2 / 21))
    assert cost_with_recomputation(cost, TINY_SHAPE, "none") == cost
    assert full.linear_seconds > cost.linear_seconds
    assert full.forward_only() == cost.forward_only()  # an evaluation computes nothing again
    assert full.shared_by(2).forward_only() == cost.shared_by(2).forward_only()


def test_lean_recomputation_exchanges_queries_keys_and_values_once_more() -> None:
    cost = flops_cost(TINY, tflops=1.0)
    lean, half = (cost_with_recomputation(cost, TINY_SHAPE, "selective", layers) for layers in (0, 1))
    exchanged = cost_with_recomputation(cost, TINY_SHAPE, "exchanged")
    queries, keys = 4 * 16, 2 * 16
    once, again = 2 * 2 * (queries + keys), queries + 2 * keys  # q, k, v and out forward, their gradients backward
    assert lean.exchange_bytes == pytest.approx(cost.exchange_bytes * (1 + again / once))
    assert half.exchange_bytes == pytest.approx(cost.exchange_bytes * (1 + again / once / 3))
    assert exchanged == replace(lean, exchange_bytes=cost.exchange_bytes)


def test_frozen_weights_cost_no_gradients_of_their_own() -> None:
    cost = flops_cost(TINY, tflops=1.0)
    frozen, recomputed = (
        cost_with_recomputation(cost, TINY_SHAPE, kind, frozen=True) for kind in ("none", "selective")
    )
    assert frozen.linear_seconds == pytest.approx(cost.linear_seconds * 4 / 6)
    assert frozen.attention_seconds == cost.attention_seconds and frozen.forward_only() == cost.forward_only()
    more = cost_with_recomputation(cost, TINY_SHAPE, "selective").linear_seconds - cost.linear_seconds
    assert recomputed.linear_seconds == pytest.approx(frozen.linear_seconds + more)


# ---- lower bounds: no plan whatever beats them


def test_launches_are_whole_in_lockstep_and_shared_in_free_mode() -> None:
    lengths, cost = [100] * 30, Cost(micro_batch_seconds=1000.0)
    work = lower_bound_seconds(lengths, 4, 400, Cost(micro_batch_seconds=0.0)).area
    for mode, cap, launches in [
        ("lockstep", 400, 2.0),  # 3000 / (4 x 400) = 1.875
        ("lockstep", 750, 1.0),
        ("lockstep", None, 1.0),
        ("free", 400, 1.875),
        ("free", None, 0.0),
    ]:
        area = lower_bound_seconds(lengths, 4, cap, cost, mode).area
        assert area == pytest.approx(work + 1000.0 * launches, rel=1e-12), (mode, cap)


def test_limits_of_a_group_raise_the_bound() -> None:
    free = lower_bound_seconds([60000], 16, None, Cost()).longest
    assert lower_bound_seconds([60000], 16, None, Cost(), max_cp=4).longest > free
    inside = lower_bound_seconds([60000, 5], 16, None, Cost(across_bytes_per_second=1e9), node_size=16).longest
    assert lower_bound_seconds([60000, 5], 16, None, Cost(across_bytes_per_second=1e9), node_size=2).longest > inside


def test_no_documents_and_one_that_fits_no_group() -> None:
    assert lower_bound_seconds([], 8, 100, Cost()).seconds == pytest.approx(0.01)
    assert lower_bound_seconds([], 8, 100, Cost(), "free").seconds == 0.0
    with pytest.raises(PlanError, match=r"1000 rows needs 10 slots at max_tokens_per_slot 100, but .* at most 8"):
        lower_bound_seconds([1000], 8, 100, Cost())


def test_under_auto_a_small_exchange_and_a_hidden_ring_do_not_beat_it() -> None:
    cost = replace(Cost(), ring_bytes=36 * 8192 * 6.0, exchange_bytes=36 * 16384 * 4.0, cp_comm_type="auto", heads=32)
    for speed in (12e9, 25e9, 50e9, 100e9):
        cost = replace(cost, inside_bytes_per_second=speed, across_bytes_per_second=min(speed, 40e9))
        for length in (16384, 98304, 131072):
            options = PlanOptions(max_tokens_per_slot=length // 8, cp_comm_type="auto", heads=32, cost=cost)
            plan = plan_fixed([length], Layout(8), 8, options=options)
            assert plan.lower_bound_seconds <= plan.predicted_seconds < 1.05 * plan.lower_bound_seconds


def retype(plan: Plan, kind: str, inner: int) -> Plan:
    def typed(g: Group) -> Group:
        return replace(g, cp_comm_type=kind, hierarchical_context_parallel_sizes=fit_level_sizes(inner, g.degree))

    batches = (MicroBatch(tuple(typed(group) for group in batch.groups)) for batch in plan.micro_batches)
    return replace(plan, micro_batches=tuple(batches))


@pytest.mark.parametrize("mode", get_args(Mode))
@given(data=st.data())
@bounded
def test_no_plan_beats_it(mode: Mode, data: st.DataObject) -> None:
    plan: Plan = data.draw(plans(mode))
    cost = Cost(
        linear_seconds=data.draw(st.sampled_from([0.0, 1e-4])),
        across_bytes_per_second=data.draw(st.sampled_from([1e6, 40e9, 9e11])),
        micro_batch_seconds=data.draw(st.sampled_from([0.0, 1e-2, 1.0])),
    )
    if data.draw(st.booleans()):
        partition = data.draw(st.sampled_from(["zigzag", "contiguous"]))
        states = StateCost(summary_seconds=1e-5, state_bytes=1e6, step_seconds=1e-3, partition=partition)
        cost = replace(cost, states=states)
    if data.draw(st.booleans()):
        speed = data.draw(st.sampled_from([1e6, 2.65e9, 40e9]))
        machine = Machine.known("H200").with_link("across", bytes_per_second=speed)
        cost = replace(machine.cost(QWEN3_8B), states=cost.states)
    elif data.draw(st.booleans()):  # a key/value head for each query head
        cost = replace(cost, ring_bytes=36 * 8192 * 6.0, exchange_bytes=36 * 16384 * 4.0)
    if data.draw(st.booleans()):
        cost = cost.forward_only()
    kind, inner = data.draw(
        st.tuples(st.sampled_from(["p2p", "all_gather", "a2a", "a2a+p2p", "auto"]), st.integers(1, 4))
    )
    heads = 8 if kind == "auto" else 27720  # "auto" leaves out what its heads forbid; these every degree here divides
    cost, plan = cost.under(kind, inner, heads=heads), retype(plan, kind, inner)
    widest = max(group.degree for group in plan.groups)
    for cap in (None, plan.max_tokens_per_slot):
        for max_cp in (None, widest):
            limits = {"max_cp": max_cp, "node_size": plan.node_size}
            bound = lower_bound_seconds(plan.lengths, plan.slots, cap, cost, mode, **limits)
            assert plan.timeline(cost).step_seconds >= bound.seconds
