"""What states cost in groups: bytes as the exchange has them, seconds by hand, and properties of plans."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.errors import PlanError
from longspan.layout import Layout
from longspan.plan import Cost, Group, Machine, ModelShape, plan_dynamic, plan_fixed
from longspan.plan.cost.cost import StateCost, busiest_ratio
from longspan.plan.cost.machine import with_recomputation
from longspan.ssm import state_bytes
from tests.plan.cases import bounded

HEADS, KEY, VALUE = 3, 4, 5
BYTES = StateCost(state_bytes=HEADS * KEY * VALUE * 4.0, transition_bytes=HEADS * KEY * KEY * 4.0)
HYBRID = {
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "intermediate_size": 128,
    "vocab_size": 100,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 4,
}


def sent(lengths: list[int], degree: int, partition: str) -> tuple[float, int]:
    """Bytes that the members of a group give: as priced, and as their exchange has them."""
    group = Group(tuple(range(degree)), tuple(range(len(lengths))), tuple(lengths), partition=partition)
    priced = BYTES.for_partition(partition).run_bytes(len(lengths), sum(lengths), degree)
    return float(priced), state_bytes(group, heads=HEADS, key_size=KEY, value_size=VALUE)


@bounded
@given(st.integers(2, 6), st.data())
def test_bytes_are_those_of_the_exchange(degree: int, data: st.DataObject) -> None:
    """Exactly, of documents with a row for each run and of one contiguous document; otherwise no more."""
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


@pytest.mark.parametrize(("lengths", "degree"), [([4096], 4), ([4096], 2), ([1024] * 4, 8), ([512] * 16, 4)])
def test_the_busiest_slot_of_a_contiguous_ring(lengths: list[int], degree: int) -> None:
    group = Group(tuple(range(degree)), tuple(range(len(lengths))), tuple(lengths), partition="contiguous")
    pairs = []
    for member in range(degree):
        runs = group.shares.segments(member)
        pairs.append(float((runs.stop.astype(float) ** 2 - runs.start.astype(float) ** 2).sum()))
    tokens, squares = float(sum(lengths)), float(sum(n * n for n in lengths))
    priced = busiest_ratio("contiguous", np.array(tokens), np.array(squares), np.array(float(degree)))
    assert priced == pytest.approx(max(pairs) * degree / sum(pairs), rel=0.01)
    assert busiest_ratio("zigzag", np.array(tokens), np.array(squares), np.array(4.0)) == 1.0


groups = st.tuples(st.integers(1, 100_000), st.integers(1, 30), st.integers(2, 64), st.booleans())


@bounded
@given(groups, st.sampled_from(["p2p", "all_gather", "a2a", "a2a+p2p"]))
def test_states_only_add_and_contiguous_ones_do_not_grow_with_documents(group: tuple, kind: str) -> None:
    length, documents, degree, inside = group
    cost = Machine.cpus().cost(HYBRID).under(kind, 2)
    assert cost.states

    def seconds(cost: Cost, documents: int) -> float:
        tokens, squares = length * documents, length * length * documents
        return float(cost.group_seconds(tokens, squares, degree, inside, documents))

    bare, contiguous = dataclasses.replace(cost, states=None), cost.for_partition("contiguous")
    assert seconds(cost, documents) >= seconds(bare, documents)
    assert seconds(contiguous, documents) >= seconds(bare, documents)
    given_by_many = contiguous.states and contiguous.states.run_bytes(documents + 1, length, degree)
    assert given_by_many is not None and given_by_many <= contiguous.states.run_bytes(1, length, degree)
    forward = seconds(cost.forward_only(), documents)
    assert 2 / 7 * seconds(cost, documents) * (1 - 1e-12) <= forward <= seconds(cost, documents) / 2 * (1 + 1e-12)


@settings(bounded, max_examples=25)
@given(st.lists(st.integers(1, 3000), min_size=1, max_size=30), st.sampled_from(["zigzag", "contiguous"]), st.data())
def test_plans_of_hybrids_are_sound_and_meet_their_bound(
    lengths: list[int], partition: str, data: st.DataObject
) -> None:
    kind, mode = data.draw(st.sampled_from(["p2p", "a2a"])), data.draw(st.sampled_from(["lockstep", "free"]))
    cost, home = Machine.cpus().cost(HYBRID).under(kind).for_partition(partition), Layout(4)
    options = {"max_tokens_per_slot": 1024, "cp_comm_type": kind, "heads": 8, "partition": partition, "cost": cost}
    dynamic = plan_dynamic(lengths, home, mode=mode, effort="fast", **options)
    fixed = plan_fixed(lengths, home, 4, mode=mode, **options)
    for plan in (dynamic, fixed):
        assert plan.lower_bound_seconds <= plan.predicted_seconds == plan.timeline().step_seconds
    assert dynamic.predicted_seconds <= fixed.predicted_seconds * (1 + 1e-9)


def test_costs_of_states_follow_the_cost() -> None:
    cost = Machine.cpus().cost(HYBRID)
    assert cost.states and cost.states.state_bytes == 3 * 2 * 4 * 4 * 16 * 8
    assert cost.states.transition_bytes == 3 * 2 * 4 * 4 * 16 * 16
    assert Cost.from_json(cost.to_json()) == cost and Cost.from_json(Cost().to_json()).states is None
    older = cost.to_json()
    older["states"]["halo_bytes"] = 1.0  # of version 0.2
    assert Cost.from_json(older) == cost
    halves = cost.shared_by(2).states
    assert (
        halves and halves.state_bytes == cost.states.state_bytes / 2 and halves.step_seconds == cost.states.step_seconds
    )
    full = with_recomputation(cost, ModelShape.of(HYBRID), "full")
    assert full.states and full.states.state_bytes == cost.states.state_bytes * 3 / 2
    assert full.states.summary_seconds == pytest.approx(cost.states.summary_seconds * 5 / 3)
    assert full.for_partition("contiguous").forward_only() == cost.for_partition("contiguous").forward_only()
    weights = cost.linear_seconds - cost.states.scan_seconds
    frozen = with_recomputation(cost, ModelShape.of(HYBRID), "none", frozen=True).linear_seconds
    assert frozen == pytest.approx(weights * 4 / 6 + cost.states.scan_seconds)
    assert Cost().for_partition("contiguous") == Cost()


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"state_bytes": -1}, "states.state_bytes is -1; give a finite number"),
        ({"partition": "ring"}, "partition of a cost is 'ring'; use one of zigzag, contiguous"),
        ({"halo": 1}, "states of a cost is an object with some of scan_seconds"),
        ([1], "states of a cost is an object"),
    ],
)
def test_refused(values: object, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Cost.from_json({"states": values})
