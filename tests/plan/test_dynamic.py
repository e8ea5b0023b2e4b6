"""What every dynamic plan must be, checked by code of its own: it prices and counts rows without the planner's help."""

import itertools
import random
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
from bench.plans.message_bound import bound_with_messages
from bench.plans.strong_bound import strong_bound
from hypothesis import given, settings, strategies as st

from longspan.layout import Layout
from longspan.plan import (
    Cost,
    Group,
    Machine,
    Plan,
    PlanOptions,
    lower_bound_seconds,
    plan_dynamic,
    plan_fixed,
    timeline,
)
from longspan.plan.distributions import sample_lengths
from longspan.plan.dynamic.lockstep import (
    DegreeTable,
    divide_bins,
    lockstep_seconds,
    make_micro_batches,
    search_candidate,
)
from longspan.plan.dynamic.planner import GroupPrices, plan_few_items
from longspan.plan.dynamic.problem import FreeSlots, Problem, divide_into_even_runs
from longspan.plan.planners.request import Request
from tests.plan.cases import MIXTURE, bounded, simulate

COST = Cost()


def group_seconds(group: Group, cost: Cost, node_size: int) -> float:
    """DESIGN's formula, written out."""
    tokens, squares, c = sum(group.lengths), sum(n * n for n in group.lengths), len(group.slots)
    if c == 1:
        return cost.linear_seconds * tokens + cost.attention_seconds * squares
    nodes = [slot // node_size for slot in group.slots]
    inside = len({*nodes}) == 1
    if group.cp_comm_type != "p2p":  # cost/test_cost.py writes out the others
        sizes = group.hierarchical_context_parallel_sizes or (1, c)
        together = min(nodes.count(node) for node in nodes)
        priced = cost.under(group.cp_comm_type, sizes[0])
        return float(priced.group_seconds(tokens, squares, c, inside, len(group.lengths), together=together))
    speed = cost.inside_bytes_per_second if inside else cost.across_bytes_per_second
    wire = cost.ring_bytes * tokens * (c - 1) / c / speed
    attention = max(cost.attention_seconds * squares / c, wire)
    return cost.linear_seconds * tokens / c + attention + cost.ring_step_seconds * (c - 1)


def check_sound(plan: Plan, lengths: list[int], min_cp: int, max_cp: int, multiple: int) -> None:
    """Every document once, the cap in whole rows, degrees in range, a whole number of micro-batches, honest times."""
    groups = plan.groups
    documents = [pair for group in groups for pair in zip(group.documents, group.lengths, strict=True)]
    assert sorted(documents) == list(enumerate(lengths))
    assert len(plan.micro_batches) % multiple == 0
    for batch in plan.micro_batches:
        assert all(min_cp <= group.degree <= max_cp for group in batch.groups)
        assert len({group.slots for group in batch.groups}) == len(batch.groups)
        if plan.max_tokens_per_slot is not None:
            rows = [0] * plan.slots
            for group in batch.groups:
                for slot in group.slots:
                    rows[slot] += -(-sum(group.lengths) // len(group.slots))
            assert max(-(-n // plan.row_multiple) * plan.row_multiple for n in rows) <= plan.max_tokens_per_slot
    *_, end = simulate(plan, lambda group: group_seconds(group, plan.cost, plan.node_size))
    assert plan.predicted_seconds == pytest.approx(max(end[-1]), rel=1e-9)
    assert plan.lower_bound_seconds <= plan.predicted_seconds
    if plan.cost.cp_comm_type != "p2p":  # which is a bound on rings
        return
    limits = {"min_cp": min_cp, "max_cp": max_cp, "node_size": plan.node_size}
    strong = strong_bound(lengths, plan.slots, plan.max_tokens_per_slot, plan.cost, plan.mode, **limits)
    assert strong.seconds <= plan.predicted_seconds


def random_case(rng: random.Random) -> tuple[list[int], int, dict]:
    slots = rng.choice([1, 2, 3, 5, 6, 7, 8, 11, 13, 16, 17, 24, 29, 48])
    cap, row_multiple = rng.choice([16, 300, 1024, 8192, None]), rng.choice([1, 1, 2, 3])
    min_cp, max_cp = rng.choice([1, 1, 2, 3, 5]), rng.choice([None, None, 1, 3, 6, 12])
    widest = min(max_cp or slots, slots)
    min_cp = min(min_cp, widest)
    most = (cap or 4000) // row_multiple * row_multiple * widest
    scale, bend = rng.choice([most, most // 8 + 1, 40]), rng.choice([1, 4])
    lengths = [1 + int(min(scale, most - 1) * rng.random() ** bend) for _ in range(rng.choice([1, 2, 3, 8, 30]))]
    if rng.random() < 0.2:
        lengths = [most] * len(lengths)
    arguments = {
        "max_tokens_per_slot": cap,
        "min_cp": min_cp,
        "max_cp": max_cp,
        "node_size": rng.choice([1, 2, 3, 4, 8]),
        "micro_batch_multiple": rng.choice([1, 1, 2, 4]),
        "row_multiple": row_multiple,
        "mode": rng.choice(["lockstep", "free"]),
        "partition": rng.choice(["zigzag", "contiguous"]),
        "effort": "fast",
    }
    return lengths, slots, arguments


@pytest.mark.parametrize("seed", [0, pytest.param(1, marks=pytest.mark.whole)])
def test_random_plans_are_sound_and_never_worse_than_a_fixed_degree(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(70 if seed else 10):
        lengths, slots, arguments = random_case(rng)
        plan = plan_dynamic(lengths, Layout(slots), **arguments)
        widest = min(arguments["max_cp"] or slots, slots)
        check_sound(plan, lengths, arguments["min_cp"], widest, arguments["micro_batch_multiple"])
        for group in plan.groups:  # one slot says nothing
            assert group.partition == (arguments["partition"] if group.degree > 1 else "zigzag")
        shared = {k: v for k, v in arguments.items() if k not in ("min_cp", "max_cp", "effort")}
        cap = arguments["max_tokens_per_slot"] or sum(lengths)
        room = cap // arguments["row_multiple"] * arguments["row_multiple"]
        for cp in range(arguments["min_cp"], widest + 1):
            if slots % cp == 0 and max(lengths) <= cp * room:
                fixed = plan_fixed(lengths, Layout(slots), cp, **shared)
                assert plan.predicted_seconds <= fixed.predicted_seconds * (1 + 1e-9), (lengths, slots, arguments, cp)


@settings(bounded, max_examples=4)
@given(
    st.lists(st.one_of(st.integers(1, 60), st.integers(1, 4000)), min_size=1, max_size=12),
    st.sampled_from([1, 4, 7, 13]),
    st.sampled_from(["lockstep", "free"]),
    st.randoms(use_true_random=False),
)
def test_permuted_documents_change_only_ids(lengths: list[int], slots: int, mode: str, rng: random.Random) -> None:
    arguments = {"max_tokens_per_slot": 4096, "mode": mode, "effort": "fast"}
    order = list(range(len(lengths)))
    rng.shuffle(order)
    plan = plan_dynamic(lengths, Layout(slots), **arguments)
    other = plan_dynamic([lengths[d] for d in order], Layout(slots), **arguments)
    check_sound(plan, lengths, 1, slots, 1)
    assert plan == plan_dynamic(lengths, Layout(slots), **arguments)
    for batch, twin in zip(plan.micro_batches, other.micro_batches, strict=True):
        assert [(g.slots, g.lengths) for g in batch.groups] == [(g.slots, g.lengths) for g in twin.groups]
    assert plan.predicted_seconds == other.predicted_seconds


RATIOS = {  # at 64 slots, 32K tokens a slot: lockstep at 8K, lockstep at 16K, free at 8K
    "bimodal": (1.05, 1.03, 1.04),
    "uniform": (1.08, 1.05, 1.03),
    "files": (1.05, 1.03, 1.03),
}


@pytest.mark.parametrize("name", RATIOS)
def test_ratio_to_the_bound_at_64_slots(name: str) -> None:
    lengths = sample_lengths(name, 64 * 32768).tolist()
    for (cap, mode), most in zip([(8192, "lockstep"), (16384, "lockstep"), (8192, "free")], RATIOS[name], strict=True):
        plan = plan_dynamic(lengths, Layout(64), max_tokens_per_slot=cap, mode=mode)
        check_sound(plan, lengths, 1, 64, 1)
        assert plan.ratio <= most, (cap, mode)


@pytest.mark.parametrize(("slots", "multiple"), [(512, 1), (513, 1), (512, 4)])
def test_half_as_many_documents_as_slots_are_planned_near_the_bound(slots: int, multiple: int) -> None:
    lengths = np.random.default_rng(0).integers(1000, 60000, 257).tolist()
    plan = plan_dynamic(lengths, Layout(slots), max_tokens_per_slot=16384, micro_batch_multiple=multiple)
    assert plan.ratio <= 1.035 and len(plan.micro_batches) % multiple == 0


def test_long_documents_share_slots_side_by_side_inside_nodes_where_they_can() -> None:
    plan = plan_dynamic([36000] * 3, Layout(16), max_tokens_per_slot=8192)
    assert plan.ratio <= 1.10 and len(plan.micro_batches) == 1
    lengths = sample_lengths("expo", 64 * 32768, longest=32768).tolist()
    plan = plan_dynamic(lengths, Layout(64), max_tokens_per_slot=8192)
    groups = [group for group in plan.groups if group.degree <= 8]
    assert sum(len({slot // 8 for slot in group.slots}) > 1 for group in groups) <= len(groups) // 20


def test_few_documents_on_few_slots_are_planned_near_the_bound() -> None:
    rng, ratios = random.Random(0), list[float]()
    for _ in range(10):
        slots, cap = rng.choice([2, 4, 8, 16, 32]), rng.choice([1024, 4096, 8192, 16384])
        longest = rng.choice([0.05, 0.2, 0.5, 1.0]) * cap * slots
        bend = rng.choice([1, 3])
        documents = rng.choice([1, 2, 3, 4, 6, 8, 12, 20])
        lengths = [16 + int(rng.random() ** bend * (longest - 16)) for _ in range(documents)]
        plan = plan_dynamic(lengths, Layout(slots), max_tokens_per_slot=cap)
        ratios.append(plan.predicted_seconds / strong_bound(lengths, slots, cap, COST).seconds)
    assert max(ratios) <= 1.18 and np.mean(ratios) <= 1.035, ratios


def test_many_tiny_documents_are_planned_quickly_and_whole() -> None:
    lengths = [1 + d % 40 for d in range(8000)]
    plan = plan_dynamic(lengths, Layout(16), max_tokens_per_slot=8192)
    check_sound(plan, lengths, 1, 16, 1)
    assert plan.ratio <= 1.05


# ---- how far plans are from the best: tiny cases in which every plan can be tried, and a published setting


def best_micro_batch(lengths: list[int], slots: int, cap: int, node_size: int) -> float:
    """The shortest micro-batch of these documents, over every choice of slots for each; inf where none holds them."""
    subsets = [s for count in range(1, slots + 1) for s in itertools.combinations(range(slots), count)]
    best = float("inf")
    for choice in itertools.product(subsets, repeat=len(lengths)):
        groups: dict[tuple[int, ...], list[int]] = {}
        for length, members in zip(lengths, choice, strict=True):
            groups.setdefault(members, []).append(length)
        rows, seconds = [0] * slots, [0.0] * slots
        for members, documents in groups.items():
            taken = group_seconds(Group(members, (), tuple(documents)), COST, node_size)
            for slot in members:
                rows[slot], seconds[slot] = rows[slot] - (-sum(documents) // len(members)), seconds[slot] + taken
        if max(rows) <= cap:
            best = min(best, max(seconds))
    return best


def best_step(lengths: list[int], slots: int, cap: int, node_size: int) -> float:
    """The shortest step in lockstep, over every way to divide the documents into micro-batches."""
    everything = (1 << len(lengths)) - 1
    best = {0: 0.0}
    alone = {}
    for mask in range(1, everything + 1):
        alone[mask] = best_micro_batch([n for d, n in enumerate(lengths) if mask >> d & 1], slots, cap, node_size)
        subsets = [sub for sub in range(1, mask + 1) if sub & mask == sub]
        best[mask] = min(alone[sub] + COST.micro_batch_seconds + best[mask ^ sub] for sub in subsets)
    return best[everything]


def test_tiny_plans_against_all_plans() -> None:
    rng, ratios = random.Random(0), []
    for _ in range(10):
        slots = rng.choice([2, 3, 3, 4])
        cap, node_size = rng.choice([1024, 8192]), rng.choice([2, 8]) if slots % 2 == 0 else 8
        most = cap * slots * rng.choice([0.2, 0.5, 1])
        lengths = [rng.randint(16, int(most)) for _ in range(rng.choice([1, 2, 3] if slots == 4 else [2, 3, 4]))]
        optimum = best_step(lengths, slots, cap, node_size)
        plan = plan_dynamic(lengths, Layout(slots), max_tokens_per_slot=cap, node_size=node_size)
        bounds = [f(lengths, slots, cap, COST, node_size=node_size) for f in (lower_bound_seconds, strong_bound)]
        assert all(bound.seconds <= optimum for bound in bounds), (lengths, slots, cap, node_size)
        assert bounds[0].seconds <= bounds[1].seconds * (1 + 1e-12)
        ratios.append(plan.predicted_seconds / optimum)
        assert 1 - 1e-9 <= ratios[-1] <= 1.03, (lengths, slots, cap, node_size)
    assert sum(ratio < 1 + 1e-9 for ratio in ratios) >= 8


def test_the_published_setting_of_dynamic_context_parallelism() -> None:
    cost, cap = replace(Machine.known("H200").cost(MIXTURE), launch_seconds=0.0), 3072  # of a fast host
    lengths = sample_lengths("lognorm", 32 * cap * 8, seed=0, longest=49152).tolist()
    keywords = {"max_tokens_per_slot": cap, "cost": cost, "cp_comm_type": "auto", "heads": 32}
    plan = plan_dynamic(lengths, Layout(32), max_cp=16, **keywords)
    assert plan.predicted_seconds <= 1.25 * plan.lower_bound_seconds  # which leaves messages of measured links out
    bound = bound_with_messages(plan, max_cp=16)
    assert plan.lower_bound_seconds < bound <= plan.predicted_seconds <= 1.10 * bound


# ---- parts: runs and blocks of slots, groups of blocks that span nodes, slots that are free


def problem(lengths: list[int], slots: int, cap: int | None = 8192, min_cp: int = 1, max_cp: int = 0) -> Problem:
    request = Request.from_arguments(lengths, Layout(slots), PlanOptions(max_tokens_per_slot=cap, allow_empty=False))
    return Problem(request, range(min_cp, (max_cp or slots) + 1))


RANGES = [  # slots, degrees, the widths of runs of slots that hold a group
    (8, range(1, 65), [8]),
    (8, range(1, 4), [2, 3, 3]),
    (8, range(5, 6), [5]),
    (2, range(3, 9), []),
    (19, range(5, 7), [6, 6, 6]),
    (8, (1, 2, 3, 4, 6, 12), [4, 4]),
    (7, (1, 2, 4), [4, 2, 1]),
    (11, (4, 6), [6, 4]),
]


@pytest.mark.parametrize(("slots", "degrees", "widths"), RANGES)
def test_runs_of_slots_are_as_wide_as_degrees_allow(slots: int, degrees: Sequence[int], widths: list[int]) -> None:
    pieces = divide_into_even_runs(slots, degrees)
    assert [width for _, width in pieces] == widths
    assert [start for start, _ in pieces] == np.cumsum([0, *widths]).tolist()[:-1]


@pytest.mark.parametrize(
    ("slots", "min_cp", "max_cp", "sizes"),
    [(13, 1, 13, [8, 5]), (64, 12, 64, [16] * 4), (20, 12, 12, [12, 8]), (29, 3, 3, [8, 8, 8, 5])],
)
def test_blocks_are_nodes_or_hold_a_group(slots: int, min_cp: int, max_cp: int, sizes: list[int]) -> None:
    assert [size for _, size in problem([9], slots, min_cp=min_cp, max_cp=max_cp).blocks] == sizes


@pytest.mark.parametrize(("slots", "min_cp"), [(10, 4), (18, 4), (13, 6), (16, 4), (20, 12)])
def test_groups_of_a_block_that_spans_nodes_are_priced_as_they_lie(slots: int, min_cp: int) -> None:
    cost, drawn = Cost(across_bytes_per_second=1e9), random.Random(slots)
    for _ in range(3):
        lengths = [drawn.randint(500, 60000) for _ in range(drawn.randint(1, 12))]
        options = PlanOptions(max_tokens_per_slot=65536, cost=cost)
        request = Request.from_arguments(lengths, Layout(slots), options)
        of_slots = Problem(request, range(min_cp, slots + 1))
        few = plan_few_items(of_slots)
        assert few is not None
        assert sorted(d for batch in few for d in batch.documents) == [*range(len(lengths))]
        candidate = search_candidate(of_slots, steps=4)
        seconds, division = divide_bins(candidate, level=True)
        ends = np.zeros(len(candidate.durations))
        np.maximum.at(ends, candidate.bins.micro_batch, seconds)
        planned = timeline(make_micro_batches(candidate, division), slots, cost).step_seconds
        assert lockstep_seconds(of_slots, ends.tolist()) == pytest.approx(planned)


def test_groups_that_were_priced_before_have_the_same_price() -> None:
    mine = problem([5000, 900, 700, 20], 4)
    prices = GroupPrices(mine)
    cost, lengths = mine.request.cost, mine.tokens.tolist()
    for groups in ([[0], [1, 2]], [[1, 2], [0, 3]], [[0, 3], [0], [2, 1]]):
        for group, seconds in zip(groups, prices.seconds_at_degrees(groups), strict=True):
            rows = [lengths[item] for item in group]
            alone = [cost.group_seconds(sum(rows), sum(n * n for n in rows), cp, True, len(rows)) for cp in range(1, 5)]
            assert seconds.tolist() == [float(value) for value in alone]


def test_free_slots_are_given_once_inside_a_block_where_one_has_them_and_leave_none_or_enough() -> None:
    rng = random.Random(0)
    for slots in (8, 13, 24, 64):
        mine, taken = problem([9], slots), set[int]()
        free = FreeSlots(mine.blocks, mine.degrees)
        while free.total:
            width = rng.randint(1, min(free.total, 12))
            had = free.smallest_fit(width) > 0
            parts = free.take_slots(width)
            members = {slot for start, count in parts for slot in range(start, start + count)}
            assert len(members) == width
            assert not members & taken
            assert (len(parts) == 1) == had
            taken |= members
        assert taken == set(range(slots))
    mine = problem([9], 16, min_cp=3)
    free = FreeSlots(mine.blocks, mine.degrees)
    assert free.take_slots(3) == [(0, 3)] and free.take_slots(3) == [(8, 3)]
    # five are left of each: two more would be too few
    assert free.take_slots(7) == [(11, 5), (3, 2)] and free.total == 3


@pytest.mark.parametrize("cost", [Cost(), Cost(cp_comm_type="auto", heads=8)], ids=["ring", "auto"])
def test_a_long_document_is_priced_once_at_each_degree_as_a_group_of_its_own(cost: Cost) -> None:
    request = Request.from_arguments([30000, 20000, 7, 5], Layout(16), PlanOptions(cost=cost, node_size=8))
    table = DegreeTable(Problem(request, range(1, 17)))
    long = table.item_class >= 0
    assert long.any() and np.isnan(table.item_seconds[:, ~long]).all()
    for item, (column, degree) in itertools.product(np.flatnonzero(long), enumerate(table.degrees.tolist())):
        rows = int(table.problem.tokens[item])
        alone = [float(request.cost.group_seconds(rows, rows**2, degree, inside)) for inside in (False, degree <= 8)]
        assert table.item_seconds[:, item, column].tolist() == pytest.approx(alone, rel=1e-12)
