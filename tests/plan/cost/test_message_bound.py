"""Messages that no plan avoids: no groups are charged more than they take, and few could take less."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from bench.plans.message_bound import MessageBound
from hypothesis import given
from hypothesis import strategies as st

from longspan.plan import Cost, Group, Machine, MicroBatch
from longspan.plan.micro_batch import level_sizes
from longspan.plan.step_times import GroupTable
from tests.plan.cases import bounded
from tests.plan.shape.test_model_shape import QWEN3_8B

FEW_KEYS = QWEN3_8B | {"num_key_value_heads": 4, "hidden_size": 2048}
KINDS = ("auto", "a2a", "p2p", "all_gather", "a2a+p2p")
NODE = 4


def known_cost(gbps: float, model: Mapping[str, Any] = FEW_KEYS) -> Cost:
    """Price a model on H200s with so many GB/s a slot between hosts, groups of any type."""
    cost = Machine.known("H200").with_link("across", bytes_per_second=gbps * 1e9).cost(model)
    return replace(cost, node_size=NODE).under("auto", heads=32)


def bound_of(cost: Cost, cap: int, widest: int) -> MessageBound:
    """Make the bound of groups of so many slots at most."""
    assert cost.network is not None
    return MessageBound(cost, cost.network, cap, NODE, widest)


@st.composite
def groups(draw: st.DrawFn) -> tuple[Group, str, int]:
    """A group of slots in one host or several, of documents that are short or long, and its type."""
    kind = draw(st.sampled_from(KINDS[1:]))
    degree = draw(st.sampled_from([1, 2, 4, 8, 16] if kind == "a2a" else range(1, 17)))
    slots = draw(st.sets(st.integers(0, 19), min_size=degree, max_size=degree) | st.just(set(range(degree))))
    rows = st.integers(1, 40) | st.integers(1, 3000) | st.integers(3000, 80000)
    lengths = tuple(draw(st.lists(rows, min_size=1, max_size=4)))
    inner = draw(st.sampled_from([i for i in (1, 2, 4, 8) if degree % i == 0]))
    sizes = level_sizes(inner, degree) if kind == "a2a+p2p" else None
    return Group(tuple(sorted(slots)), tuple(range(len(lengths))), lengths, kind, sizes), kind, inner


@given(
    drawn=st.lists(groups(), min_size=1, max_size=4),
    gbps=st.sampled_from([1.0, 2.65, 12.5, 40.0, 400.0]),
    latency=st.sampled_from([0.0, 50e-6, 1e-2]),
    forward=st.booleans(),
    few=st.booleans(),
)
@bounded
def test_no_groups_take_less(
    drawn: list[tuple[Group, str, int]], gbps: float, latency: float, forward: bool, few: bool
) -> None:
    cost = known_cost(gbps, FEW_KEYS if few else QWEN3_8B)
    assert cost.network is not None
    cost = replace(cost, network=replace(cost.network, step_seconds=latency))
    cost = cost.forward_only() if forward else cost
    table = GroupTable.of([MicroBatch((group,)) for group, *_ in drawn])
    taken = math.fsum(table.seconds(cost, NODE) * table.degree)
    rows = np.array([length for group, *_ in drawn for length in group.lengths], dtype=np.int64)
    work = math.fsum(cost.work_seconds(rows, rows * rows))
    cap, widest = int(table.rows.max()), int(table.degree.max())
    types = {kind for _, kind, _ in drawn}
    for kind in ("auto", *types) if len(types) == 1 else ("auto",):
        floor = bound_of(cost.under(kind, heads=32), cap, widest).slot_seconds(rows)
        assert taken >= (work + floor) * (1 - 1e-12), (kind, taken, work, floor)


@pytest.mark.parametrize("cap", [1024, 4096])
@pytest.mark.parametrize("degree", [2, 4, 8, 16])
def test_a_document_that_fills_its_slots_is_charged_nearly_what_it_takes(degree: int, cap: int) -> None:
    cost, rows = known_cost(25.0), np.array([degree * cap])
    work = float(cost.work_seconds(rows, rows * rows)[0])
    taken = degree * float(cost.group_seconds(rows, rows * rows, degree, degree <= NODE)[0])
    floor = bound_of(cost, cap, 16).slot_seconds(rows)
    assert 0.7 * (taken - work) <= floor <= (taken - work) * (1 + 1e-9)


def test_short_documents_are_charged_nothing() -> None:
    bound = bound_of(known_cost(12.5), 1024, 8)
    assert bound.slot_seconds(np.array([1024, 3, 700])) == 0.0
    alone = bound.slot_seconds(np.array([1025]))
    assert alone > 0.0
    assert bound.slot_seconds(np.array([1025, 3, 700])) == pytest.approx(alone)


def test_slower_links_and_wider_needs_are_charged_more() -> None:
    rows = np.array([30000])
    fast, slow = (bound_of(known_cost(gbps), 2048, 16).slot_seconds(rows) for gbps in (50.0, 5.0))
    narrow = bound_of(known_cost(50.0), 4096, 16).slot_seconds(rows)
    assert narrow < fast < slow
