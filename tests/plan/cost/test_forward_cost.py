"""Costs of forward passes alone, and of each communication type: what they are made of, and what they keep."""

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.errors import PlanError
from longspan.layout import Layout
from longspan.plan import Cost, ModelShape
from longspan.plan.cost.machine import with_recomputation
from tests.plan.cases import bounded

MODEL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
MODEL |= {"intermediate_size": 128, "vocab_size": 1000}


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


groups = st.tuples(st.integers(1, 200_000), st.integers(1, 64), st.booleans())
kinds = st.sampled_from(["p2p", "all_gather", "a2a", "a2a+p2p"])


@bounded
@given(groups, kinds, st.integers(1, 8))
def test_forward_takes_less_than_both_and_more_than_a_quarter(group: tuple, kind: str, size: int) -> None:
    tokens, degree, inside = group
    cost = Cost().under(kind, size)
    both, forward = (
        float(c.group_seconds(tokens, tokens * tokens, degree, inside)) for c in (cost, cost.forward_only())
    )
    assert 2 / 7 * both * (1 - 1e-12) <= forward <= both / 2 * (1 + 1e-12)


@bounded
@given(groups, st.integers(1, 8))
def test_types_meet_where_they_are_the_same(group: tuple, size: int) -> None:
    """One slot communicates nothing; a2a+p2p with one level is p2p or, inside a node, a2a."""
    tokens, degree, inside = group

    def seconds(kind: str, degree: int = degree, size: int = 1, inside: bool = inside) -> float:
        return float(Cost().under(kind, size).group_seconds(tokens, tokens * tokens, degree, inside))

    work = float(Cost().work_seconds(tokens, tokens * tokens))
    assert all(seconds(kind, 1, size) == pytest.approx(work) for kind in ("p2p", "all_gather", "a2a", "a2a+p2p"))
    assert seconds("a2a+p2p", size=1) == pytest.approx(seconds("p2p"))
    assert seconds("a2a+p2p", size=degree, inside=True) == pytest.approx(seconds("a2a", inside=True))
    assert seconds("auto") == pytest.approx(min(seconds("p2p"), seconds("all_gather")))
    bare = dataclasses.replace(Cost(), ring_step_seconds=0.0).group_seconds(tokens, tokens * tokens, degree, inside)
    assert seconds("all_gather") >= float(bare)


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

    def seconds(kind: str, inside: bool = True, squares: float = 1e6) -> float:
        return float(cost.under(kind, 2).group_seconds(1000, squares, 4, inside))

    assert seconds("p2p") == pytest.approx(linear + max(attention, ring) + 15)
    assert seconds("p2p", squares=0) == pytest.approx(linear + ring + 15)
    assert seconds("all_gather") == pytest.approx(linear + attention + ring + 5)
    assert seconds("a2a") == pytest.approx(linear + attention + exchange + 5)
    assert seconds("a2a+p2p", inside=False) == pytest.approx(
        linear + max(attention, two_levels[0]) + two_levels[1] + 10
    )
    np.testing.assert_array_equal(cost.under("a2a+p2p", 4).latency_seconds([1, 2, 4, 6, 12]), [0, 5, 5, 15, 15])


def test_recomputation_is_no_part_of_an_evaluation() -> None:
    cost = Cost.for_model(MODEL, tflops=1.0)
    full = with_recomputation(cost, ModelShape.of(MODEL), "full")
    assert full.linear_seconds > cost.linear_seconds
    assert full.forward_only() == cost.forward_only()
    assert full.shared_by(2).forward_only() == cost.shared_by(2).forward_only()


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


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"passes": "backward"}, "passes of a cost is 'backward'; use one of forward and backward, forward"),
        ({"cp_comm_type": "ring"}, "cp_comm_type of a cost is 'ring'; use one of p2p"),
        ({"a2a_size": -1}, "a2a_size, the slots that exchange heads, is -1"),
        ({"forward": {"linear_seconds": 1.0}}, "forward is the cost of forward passes only"),
    ],
)
def test_refused(values: dict, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Cost.from_json(values)
