"""Parts of the dynamic planner: runs and blocks of slots, the least-loaded bins, items, divisions, the strong bound."""

import random
from collections.abc import Sequence

import numpy as np
import pytest

from longspan.layout import Layout
from longspan.plan import Cost, PlanOptions, timeline
from longspan.plan.distributions import sample_lengths
from longspan.plan.dynamic.lockstep import (
    Bins,
    Candidate,
    DegreeTable,
    LeastLoaded,
    Settings,
    _first_durations,
    divide_bins,
    lockstep_seconds,
    make_micro_batches,
    place_items,
    search_candidate,
)
from longspan.plan.dynamic.planner import plan_few_items
from longspan.plan.dynamic.problem import FreeSlots, Problem, even_runs
from longspan.plan.planners.options import Request


def problem(lengths: list[int], slots: int, cap: int | None = 8192, min_cp: int = 1, max_cp: int = 0) -> Problem:
    request = Request.of(lengths, Layout(slots), PlanOptions(max_tokens_per_slot=cap, allow_empty=False))
    return Problem.of(request, range(min_cp, (max_cp or slots) + 1))


def placed(mine: Problem, durations: np.ndarray) -> Candidate:
    return place_items(mine, DegreeTable.of(mine), Settings(durations, share=0.5, reach=0.4))


RANGES = [  # slots, degrees, the widths of runs of slots that hold a group
    (8, range(1, 65), [8]),
    (8, range(1, 4), [2, 3, 3]),
    (8, range(3, 4), [3, 3]),
    (8, range(5, 6), [5]),
    (8, range(5, 9), [8]),
    (2, range(3, 9), []),
    (19, range(5, 7), [6, 6, 6]),
    (16, range(5, 6), [5, 5, 5]),
    (8, (1, 2, 3, 4, 6, 12), [4, 4]),
    (7, (1, 2, 4), [4, 2, 1]),
    (7, (2, 4), [4, 2]),
    (11, (4, 6), [6, 4]),
    (3, (4, 6), []),
]


@pytest.mark.parametrize(("slots", "degrees", "widths"), RANGES)
def test_runs_of_slots_are_as_wide_as_degrees_allow(slots: int, degrees: Sequence[int], widths: list[int]) -> None:
    pieces = even_runs(slots, degrees)
    assert [width for _, width in pieces] == widths
    assert [start for start, _ in pieces] == np.cumsum([0, *widths]).tolist()[:-1]


@pytest.mark.parametrize(
    ("slots", "min_cp", "max_cp", "sizes"),
    [
        (16, 1, 16, [8, 8]),
        (13, 1, 13, [8, 5]),
        (13, 6, 13, [13]),
        (6, 1, 6, [6]),
        (64, 12, 64, [16] * 4),
        (20, 12, 12, [12, 8]),
        (29, 3, 3, [8, 8, 8, 5]),
    ],
)
def test_blocks_are_nodes_or_hold_a_group(slots: int, min_cp: int, max_cp: int, sizes: list[int]) -> None:
    assert [size for _, size in problem([9], slots, min_cp=min_cp, max_cp=max_cp).blocks] == sizes


@pytest.mark.parametrize(("slots", "min_cp"), [(10, 4), (18, 4), (13, 6), (16, 4), (20, 12)])
def test_groups_of_a_block_that_spans_nodes_are_priced_as_they_lie(slots: int, min_cp: int) -> None:
    cost, drawn = Cost(across_bytes_per_second=1e9), random.Random(slots)
    for _ in range(3):
        lengths = [drawn.randint(500, 60000) for _ in range(drawn.randint(1, 12))]
        options = PlanOptions(max_tokens_per_slot=65536, cost=cost)
        of_slots = Problem.of(Request.of(lengths, Layout(slots), options), range(min_cp, slots + 1))
        few = plan_few_items(of_slots)
        assert few is not None and few[0] == pytest.approx(timeline(few[1], slots, cost).step_seconds)
        candidate = search_candidate(of_slots, steps=4)
        seconds, division = divide_bins(candidate, level=True)
        ends = np.zeros(len(candidate.durations))
        np.maximum.at(ends, candidate.bins.micro_batch, seconds)
        planned = timeline(make_micro_batches(candidate, division), slots, cost).step_seconds
        assert lockstep_seconds(of_slots, ends.tolist()) == pytest.approx(planned)


def test_free_slots_are_given_once_and_inside_a_block_where_one_has_them() -> None:
    rng = random.Random(0)
    for slots in (8, 13, 24, 64):
        mine, taken = problem([9], slots), set[int]()
        free = FreeSlots(mine.blocks, mine.degrees)
        while free.total:
            width = rng.randint(1, min(free.total, 12))
            had = free.has_block(width)
            parts = free.take_slots(width)
            members = {slot for start, count in parts for slot in range(start, start + count)}
            assert len(members) == width
            assert not members & taken
            assert (len(parts) == 1) == had
            taken |= members
        assert taken == set(range(slots))


def test_a_group_leaves_none_or_enough_and_spans_blocks_largest_first() -> None:
    mine = problem([9], 16, min_cp=3)
    free = FreeSlots(mine.blocks, mine.degrees)
    assert free.take_slots(3) == [(0, 3)] and free.take_slots(3) == [(8, 3)]
    # five are left of each: two more would be too few
    assert free.take_slots(7) == [(11, 5), (3, 2)] and free.total == 3


def test_one_after_another_a_document_may_have_all_slots() -> None:
    for lengths in ([30000], [30000, 20000]):
        few = plan_few_items(problem(lengths, 4))
        assert few is not None
        groups = [[(group.documents, group.slots) for group in batch.groups] for batch in few[1]]
        assert groups == [[((d,), (0, 1, 2, 3))] for d in range(len(lengths))]


def test_long_documents_are_single_ones_that_matter() -> None:
    mine = problem([*[9] * 400, 40000, 200], 8)
    long = [documents for documents, c in zip(mine.documents, DegreeTable.of(mine).item_class, strict=True) if c >= 0]
    assert long == [(400,)] and len(mine.documents) < 100


def test_a_long_document_gains_by_slots_that_short_documents_could_not_keep_busy() -> None:
    mine = problem([60000, 9000, *[200] * 100], 64, cap=2048)
    durations = np.array([0.1, 3.0, 5.0]) * mine.mean_seconds
    lack = np.maximum(durations - mine.light_density * mine.cap, 0.0)
    degrees = DegreeTable.of(mine)
    width, plain = degrees.choose_degrees(durations, 0.0)
    again, reaching = degrees.choose_degrees(durations, 0.5)
    assert (width == again).all() and np.isfinite(plain[:, 1:]).all() and lack[2] > lack[1] > 0
    np.testing.assert_allclose(reaching[:, 1:], (plain - 0.5 * width * lack)[:, 1:], rtol=1e-12)


@pytest.mark.parametrize("cost", [Cost(), Cost(cp_comm_type="auto", heads=8)], ids=["ring", "auto"])
def test_a_long_document_is_priced_once_at_each_degree_as_a_group_of_its_own(cost: Cost) -> None:
    request = Request.of([30000, 20000, 7, 5], Layout(16), PlanOptions(cost=cost, node_size=8, allow_empty=False))
    degrees = DegreeTable.of(Problem.of(request, range(1, 17)))
    for item, may_be_long in enumerate(degrees.item_class >= 0):
        rows = int(degrees.problem.tokens[item])
        for column, degree in enumerate(degrees.degrees.tolist()):
            alone = [
                float(request.cost.group_seconds(rows, rows**2, degree, inside and degree <= 8)) for inside in (0, 1)
            ]
            assert degrees.item_seconds[:, item, column].tolist() == alone or not may_be_long
    assert degrees.item_class.max() >= 0
    assert np.isnan(degrees.item_seconds[:, degrees.item_class < 0]).all()


def test_the_longest_document_decides_how_short_a_micro_batch_can_be() -> None:
    problems = [problem(lengths, 8) for lengths in ([30000], [30000, 20000], [20000])]
    longest_only, with_shorter, shorter_only = (
        _first_durations(mine, DegreeTable.of(mine), 1000, 0.0)[0] * mine.mean_seconds for mine in problems
    )
    assert with_shorter == longest_only > shorter_only


@pytest.mark.parametrize("name", ["lognorm", "files", "expo"])
def test_a_candidate_follows_the_durations_that_are_wanted(name: str) -> None:
    mine = problem(sample_lengths(name, 16 * 32768, longest=65536).tolist(), 16)
    candidate = placed(mine, np.array([0.4, 0.3, 0.2, 0.15]))
    assert candidate.durations[1] > 1.3 * candidate.durations[3]


def test_micro_batches_without_documents_take_no_launch() -> None:
    mine = problem([3000, 2000, 100], 4)
    launch = mine.request.cost.micro_batch_seconds
    assert lockstep_seconds(mine, [1.5, 0.0, 0.25]) == pytest.approx(1.75 + 2 * launch, rel=1e-12)


def test_an_item_goes_to_the_bin_that_ends_earliest_among_those_with_room() -> None:
    rng = random.Random(1)
    lengths = sorted((rng.randint(1, 3000) for _ in range(200)), reverse=True)
    mine = problem(lengths, 24)
    bins, twin = Bins(), []
    for b in range(12):
        width, level, rows = rng.choice([1, 3, 8]), rng.random(), rng.randint(500, 9000)
        bins.add_bin(b % 3, (0, width), long=-1, seconds=level, rows=rows)
        twin.append([level - (1.0, 1.5, 2.0)[b % 3], width, rows * width])
    count = LeastLoaded(bins, [1.0, 1.5, 2.0], mine).place_items(
        list(range(200)), 0, mine.tokens.tolist(), mine.work.tolist()
    )
    for item in range(count):
        fits = [c for c, (_, _, room) in enumerate(twin) if room >= lengths[item]]
        best = min(twin[c][0] + mine.work[item] / twin[c][1] for c in fits)
        b = next(c for c in range(12) if item in bins.short[c])
        assert twin[b][0] + mine.work[item] / twin[b][1] == pytest.approx(best, rel=1e-12)
        twin[b][0] = best
        twin[b][2] -= lengths[item]
    assert count == 200 or all(room < lengths[count] for _, _, room in twin)


def test_items_are_documents_or_packs_of_tiny_ones() -> None:
    few, many = problem([5, 3000, 9], 8), problem([5, 3000, 9] * 400, 8)
    assert few.documents == ((1,), (2,), (0,))
    assert sorted(d for item in many.documents for d in item) == list(range(1200))
    assert len(many.documents) < 1200
    order = [d for item in problem([7, 900] * 40, 8).documents for d in item]
    assert order == [*range(1, 80, 2), *range(0, 80, 2)]  # equal ones in the order of their numbers
    assert many.tokens.tolist() == sorted(many.tokens.tolist(), reverse=True)
    for item, tokens in zip(many.documents, many.tokens.tolist(), strict=True):
        assert sum(many.request.lengths[d] for d in item) == tokens <= many.cap


@pytest.mark.parametrize("level", [True, False])
@pytest.mark.parametrize("name", ["lognorm", "files", "expo"])
def test_a_division_holds_the_cap_and_is_no_slower_than_sharing_all(name: str, level: bool) -> None:
    mine = problem(sample_lengths(name, 16 * 32768, longest=65536).tolist(), 16)
    candidate = placed(mine, np.full(6, 1.05 / 6))
    seconds, division = divide_bins(candidate, level=level)
    bins, ends = candidate.bins, np.zeros(len(candidate.durations))
    np.maximum.at(ends, bins.micro_batch, seconds)
    assert ends.sum() <= candidate.durations.sum() * 1.01
    for b, short in enumerate(bins.short):
        shared, width = division[b].count(-1), bins.width[b]
        long = candidate.long[bins.long[b]] if bins.long[b] >= 0 else None
        rows = [(long.rows if long else 0) - (-sum(mine.tokens[short[:shared]].tolist()) // width)] * width
        for position, item in enumerate(short[shared:], start=shared):
            rows[division[b][position]] += int(mine.tokens[item])
        assert max(rows) <= mine.cap
