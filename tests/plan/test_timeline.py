"""When slots start and end, against values of the research model and a slow simulation, slot by slot."""

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from longspan.plan import Cost, Group, Machine, MicroBatch, Plan, slot_rows, timeline
from longspan.plan.shape.model_shape import QWEN3_8B
from longspan.plan.step_times import GroupTable
from tests.plan.cases import bounded, plans

LENGTHS = (5295, 682, 3599, 1484, 2912, 800, 9000)
BLOCKS = [  # (first slot, degree, document), as the research model writes plans
    [(0, 4, 6), (4, 2, 5)],
    [(0, 4, 0), (4, 2, 2)],
    [(0, 2, 4), (2, 2, 1), (4, 2, 3)],
]


def batch(*groups: tuple[tuple[int, ...], int]) -> MicroBatch:
    return MicroBatch(tuple(Group(slots, (d,), (LENGTHS[d],)) for slots, d in groups))


BATCHES = [batch(*((tuple(range(s, s + c)), d) for s, c, d in blocks)) for blocks in BLOCKS]


def test_blocks() -> None:
    assert timeline(BATCHES, 6, Cost()).step_seconds == pytest.approx(0.7383820968607999, rel=1e-12)
    assert timeline(BATCHES, 6, Cost(), mode="free").step_seconds == pytest.approx(0.6871994954665599, rel=1e-12)


def test_tables_of_groups_are_equal_to_themselves_alone() -> None:
    table = GroupTable.of(BATCHES)
    assert table in {table} and table != replace(table) and (table.tokens == GroupTable.of(BATCHES).tokens).all()


def test_a_slot_in_several_groups_adds_their_times() -> None:
    cost = Cost()
    both = timeline([batch(((0, 1, 2, 3), 6), ((2,), 5), ((9, 2), 1))], 10, cost)
    wide, narrow = cost.group_seconds(9000, 9000**2, 4, True), cost.group_seconds(800, 800**2, 1, True)
    across = cost.group_seconds(682, 682**2, 2, False)  # slots 2 and 9 are on two nodes of 8
    assert both.busy[0, 2] == pytest.approx(0.01 + wide + narrow + across, rel=1e-12)
    assert both.rows[0].tolist() == [2250, 2250, 2250 + 800 + 341, 2250, 0, 0, 0, 0, 0, 341]
    assert both.busy[0, 5] == 0.01
    assert both.step_seconds == both.busy[0, 2]


def test_free_slots_wait_only_for_those_that_groups_join_them_to() -> None:
    # 0-1-2 are one component through slot 1; 3 skips, and so is early in the next micro-batch
    batches = [batch(((0, 1), 6), ((1, 2), 5)), batch(((3,), 5), ((2,), 5))]
    times = timeline(batches, 4, Cost(), mode="free")
    longest = times.busy[0, 1]
    assert times.busy[0].argmax() == 1
    assert times.end[0].tolist() == [longest, longest, longest, 0.0]
    assert times.start[1].tolist() == [longest, longest, longest, 0.0]
    assert times.end[1, 3] == times.busy[1, 3] > times.busy[1, 0] == 0.0
    assert times.step_seconds == times.end[1, 2] == longest + times.busy[1, 2]


def test_lockstep_slots_wait_for_the_slowest_and_dummies_cost_a_launch() -> None:
    times = timeline([batch(((0,), 5)), MicroBatch(), batch(((1,), 6))], 2, Cost())
    slowest = times.busy.max(axis=1)
    assert slowest[1] == 0.01
    np.testing.assert_allclose(times.end, np.cumsum(slowest)[:, None].repeat(2, axis=1))
    np.testing.assert_allclose(times.start[1:], times.end[:-1])
    np.testing.assert_allclose(times.idle, 1 - times.busy.mean(axis=1) / slowest)


def test_rows_are_whole_padded_and_rounded() -> None:
    batches = [MicroBatch((Group((0, 1, 2), (0, 1), (5, 6)), Group((2,), (2,), (4,), pad_to=7)))]
    assert slot_rows(batches, 4).tolist() == [[4, 4, 11, 0]]
    assert slot_rows(batches, 4, row_multiple=8).tolist() == [[8, 8, 16, 0]]


@given(data=st.data())
@bounded
def test_against_a_simulation_slot_by_slot(data: st.DataObject) -> None:
    plan: Plan = data.draw(plans(data.draw(st.sampled_from(["lockstep", "free"]))))
    times = plan.timeline()
    busy, end = simulate(plan)
    np.testing.assert_allclose(times.busy, busy, rtol=1e-12)
    np.testing.assert_allclose(times.end, end, rtol=1e-12)
    assert times.step_seconds == pytest.approx(max(end[-1]), rel=1e-12)
    assert (times.end - times.start - times.busy > -1e-9).all()
    assert (times.rows <= plan.max_tokens_per_slot).all()


def simulate(plan: Plan) -> tuple[list[list[float]], list[list[float]]]:
    """The definition, in plain loops: own seconds, and when each slot may go on, for each micro-batch."""
    clock, busy, end = [0.0] * plan.slots, [], []
    for micro_batch in plan.micro_batches:
        of_slots = [sum(seconds(plan, g) for g in micro_batch.groups if s in g.slots) for s in range(plan.slots)]
        members = [set(group.slots) for group in micro_batch.groups]
        if plan.mode == "lockstep":
            members = [set(range(plan.slots))]
        joined: list[set[int]] = []
        for slots in members:  # merge what overlaps
            apart = [other for other in joined if not other & slots]
            joined = [*apart, slots.union(*(other for other in joined if other & slots))]
        for slots in joined:
            for slot in slots:
                of_slots[slot] += plan.cost.micro_batch_seconds
            done = max(clock[s] for s in slots) + max(of_slots[s] for s in slots)
            for slot in slots:
                clock[slot] = done
        busy.append(of_slots)
        end.append(list(clock))
    return busy, end


def seconds(plan: Plan, group: Group) -> float:
    inside = len({slot // plan.node_size for slot in group.slots}) == 1
    rows = group.laid_out
    return float(plan.cost.group_seconds(sum(rows), sum(n * n for n in rows), group.degree, inside))


def test_chained_groups_are_one_component() -> None:
    links = [((i, i + 1), 1) for i in range(199)]
    np.random.default_rng(0).shuffle(links)
    times = timeline([batch(*links), batch(((0,), 5)), batch(((199,), 5))], 200, Cost(), mode="free")
    assert np.unique(times.end[0]).size == 1


@pytest.mark.parametrize("mode", ["lockstep", "free"])
def test_large_plans_are_priced_quickly(mode: str) -> None:
    lengths = np.random.default_rng(0).integers(1, 8000, size=(40, 2560)).tolist()
    blocks = [tuple(range(16 * g, 16 * g + 16)) for g in range(512)]
    wide = Group(tuple(range(8192)), (0,), (9000,))
    batches = [
        MicroBatch((wide, *(Group(block, (0,) * 5, tuple(row[5 * g : 5 * g + 5])) for g, block in enumerate(blocks))))
        for row in lengths
    ]
    start = time.process_time()
    assert timeline(batches, 8192, Cost(), mode=mode).step_seconds > 0
    assert time.process_time() - start < 1.0


def test_a_known_machine_computes_no_attention_over_padding() -> None:
    group = Group((0, 1), (0, 1), (100, 300), pad_to=400)
    padded, bare = ([MicroBatch((replace(group, pad_to=pad),))] for pad in (400, None))
    known = Machine.known("H200").cost(QWEN3_8B)
    alone = {"linear_seconds": 0.0, "real_row_seconds": 0.0, "ring_bytes": 0.0, "merge_seconds": 0.0}
    attention = replace(known, **alone, network=replace(known.network, half_speed_rows=0.0))
    of_padded, of_bare = (GroupTable.of(batches).seconds(attention, 8)[0] for batches in (padded, bare))
    assert of_padded == of_bare > 0
    of_padded, of_bare = (GroupTable.of(batches).seconds(replace(Cost(), **alone), 8)[0] for batches in (padded, bare))
    assert of_padded > of_bare
    assert GroupTable.of(padded).seconds(known, 8)[0] > GroupTable.of(bare).seconds(known, 8)[0]  # other layers have it
