"""Plans of documents that share prefixes: a family stays in one group, priced by what its rows see."""

import json
from dataclasses import replace

import pytest
from hypothesis import given, settings, strategies as st

from longspan import Group, Layout, MicroBatch, Plan, plan_dynamic, plan_fixed, plan_padded
from longspan.errors import LayoutError, PlanError
from longspan.layout import Partition
from longspan.model.presets import preset_config
from longspan.plan import Cost, CostSettings, Machine
from longspan.plan.plan_rows import plan_row, read_plan_row
from longspan.plan.planners.options import PlanOptions
from longspan.plan.planners.request import Request
from longspan.plan.step_times import GroupTable
from tests.attention.families import forests, paths_of, visible_rows

FAMILY = Group((0, 1), (3, 0, 4, 1, 2), (8, 3, 2, 5, 9), parents=(-1, 0, 0, 2, -1))


def plan_of(group):
    lengths = dict(zip(group.documents, group.lengths, strict=True))
    return Plan(2, tuple(lengths[d] for d in range(len(lengths))), (MicroBatch((group,)),), targets=7)


def test_a_family_is_ordinary_documents_with_parents():
    assert FAMILY.bases == (0, 8, 8, 10, 0) and FAMILY.path_lengths == (8, 11, 10, 15, 9)
    assert [*FAMILY.ancestors()] == [(-1, 0, 0, 0, -1), (-1, -1, -1, 2, -1)]
    plan = plan_of(FAMILY).check()
    assert plan.parents == (3, 4, -1, -1, 3) and plan.bases == (8, 10, 0, 0, 8)
    assert "8   rows fewer: 2 prefixes of 2 documents" in plan.table()
    alone = replace(FAMILY, parents=None)
    assert alone.bases == (0,) * 5 and alone.path_lengths is alone.lengths and not [*alone.ancestors()]
    assert FAMILY.shares == alone.shares == Partition.zigzag(FAMILY.lengths, 2)


def test_plans_without_families_are_written_as_before():
    alone = plan_of(replace(FAMILY, parents=None))
    assert plan_of(FAMILY).digest() != alone.digest()
    group = json.loads(alone.to_json())["micro_batches"][0][0]
    assert "parents" not in group  # so that digests of ordinary plans are as before
    row = plan_row(0, alone)
    assert read_plan_row(row)[1] == alone and '"kinds":[["p2p",null,"zigzag",null]]' in row


@given(forests(), st.integers(1, 4))
@settings(max_examples=40, deadline=None)
def test_any_forest_is_written_and_read(forest, slots):
    lengths, parents = forest
    group = Group(tuple(range(slots)), tuple(range(len(lengths))), lengths, parents=parents)
    plan = Plan(slots, lengths, (MicroBatch((group,)),), targets=0).check()
    assert Plan.from_json(plan.to_json()) == plan and read_plan_row(plan_row(0, plan))[1] == plan
    assert group.path_lengths == tuple(map(len, paths_of(lengths, parents)))
    pairs = 2 * visible_rows(lengths, parents).sum() - sum(lengths)  # causal pairs twice, but rows on the diagonal once
    (squares,) = GroupTable(plan.micro_batches).squares.tolist()
    assert squares == pairs


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ((-1, 0), "parents .* for 5 documents"),
        ((-1, 0, 0, 2, None), "an integer"),
        ((-1, 0, 0, 2, 5), "the parent 5"),
        ((0, 0, 0, 2, -1), "the parent 0"),
        ((-1, 0, 0, -1, 0), "the parent 0"),  # another family stands between
        ((-1, -2, 0, 2, -1), "the parent -2"),
        ((1, -1, 0, 2, -1), "the parent 1"),
    ],
)
def test_parents_that_make_no_families_are_refused(parents, message):
    with pytest.raises(PlanError, match=message):
        plan_of(replace(FAMILY, parents=parents)).check()
    with pytest.raises(PlanError, match="pads to 9"):
        plan_of(replace(FAMILY, pad_to=9)).check()


# ---- planners

PLANNERS = {
    "fixed": lambda lengths, home, **options: plan_fixed(lengths, home, 2 if home.slots % 2 == 0 else 1, **options),
    "dynamic": plan_dynamic,
    "free": lambda lengths, home, **options: plan_dynamic(lengths, home, mode="free", **options),
    "few degrees": lambda lengths, home, **options: plan_dynamic(lengths, home, effort="fast", max_cp=2, **options),
}


@pytest.mark.parametrize("planner", PLANNERS)
@given(st.lists(forests(), min_size=1, max_size=12), st.integers(1, 6), st.randoms(use_true_random=False))
@settings(max_examples=15, deadline=None)
def test_planners_keep_families_whole(planner, parts, slots, random):
    lengths, parents = (), ()
    for part_lengths, part_parents in parts:
        parents += tuple(p + len(lengths) if p >= 0 else -1 for p in part_parents)
        lengths += part_lengths
    order = list(range(len(lengths)))
    random.shuffle(order)  # so that parents stand anywhere
    place = {old: new for new, old in enumerate(order)} | {-1: -1}
    lengths, parents = tuple(lengths[old] for old in order), tuple(place[parents[old]] for old in order)
    home = Layout(slots)
    widest = 1 if planner == "fixed" and slots % 2 else 2
    families = Request.from_arguments(lengths, home, PlanOptions(parents=parents)).trees
    most = max(sum(lengths[d] for d in family) for family in families)
    cap = max(16, -(-most // (widest if slots > 1 else 1)))
    plan = PLANNERS[planner](lengths, home, max_tokens_per_slot=cap, parents=parents)  # checked
    wanted = parents if max(parents) >= 0 else None
    assert (plan.parents or (-1,) * len(lengths)) == (wanted or (-1,) * len(lengths))
    assert plan.ratio > 0.999
    assert plan == PLANNERS[planner](lengths, home, max_tokens_per_slot=cap, parents=list(parents))


@pytest.mark.parametrize("planner", PLANNERS)
def test_families_that_are_wide_get_wide_groups(planner):
    lengths = [400, *[20] * 8] * 3 + [37] * 40
    parents = [p for root in (0, 9, 18) for p in (-1, *[root] * 8)] + [-1] * 40
    plan = PLANNERS[planner](lengths, Layout(4), max_tokens_per_slot=300, parents=parents)
    widths = {g.documents[0]: g.degree for g in plan.groups if g.parents}
    assert all(width >= 2 for width in widths.values())


def test_no_parents_change_nothing():
    lengths, home = [900, 300, 20, 20, 450], Layout(4)
    for make in PLANNERS.values():
        plan = make(lengths, home, max_tokens_per_slot=512)
        assert plan == make(lengths, home, max_tokens_per_slot=512, parents=[-1] * 5) and plan.parents is None


def test_sharing_is_priced():
    cost = Cost()
    separate = plan_fixed([4100] * 8, Layout(1), 1, cost=cost)
    shared = plan_fixed([*[101] * 8, 3999], Layout(1), 1, cost=cost, parents=[8] * 8 + [-1])
    (squares,) = GroupTable(shared.micro_batches).squares.tolist()
    assert squares == 3999**2 + 8 * (101**2 + 2 * 101 * 3999)
    assert 5 < separate.predicted_seconds / shared.predicted_seconds < 8
    assert shared.lower_bound_seconds <= shared.predicted_seconds


@pytest.mark.parametrize(
    ("parents", "message"),
    [
        ([-1], "parents .* for 3 documents"),
        ([-1, 0, 3], "documents 0 to 2"),
        ([1, 0, -1], "circle"),
        ([-1, 0, True], "integer"),
        ([0, -1, -1], "circle"),
    ],
)
def test_parents_that_planners_refuse(parents, message):
    for make in (plan_dynamic, plan_fixed):
        with pytest.raises(PlanError, match=message):
            make([5, 6, 7], Layout(1), **({"cp": 1} if make is plan_fixed else {}), parents=parents)


def test_empty_branches_are_refused():
    with pytest.raises(LayoutError, match="0"):
        plan_fixed([5, 0], Layout(1), 1, parents=[-1, 0])
    empty = Group((0,), (0, 1), (5, 0), parents=(-1, 0))
    with pytest.raises(PlanError, match="0"):
        Plan(1, (5, 0), (MicroBatch((empty,)),), targets=0).check()


def test_a_family_that_does_not_fit_and_padding_are_refused():
    with pytest.raises(PlanError, match=r"document 0 and 2 documents that continue it have 18 rows.*max_rows=16"):
        plan_fixed([5, 6, 7], Layout(1), 1, max_tokens_per_slot=16, parents=[-1, 0, 0])
    with pytest.raises(PlanError, match="padded plan lays documents out alone"):
        plan_padded([5, 6, 7], Layout(1), 1, parents=[-1, 0, 0])


def test_64_answers_to_a_prompt_of_128k_are_priced_at_18_times_as_fast_as_separate_documents():
    """Full training of Qwen3-8B's shape on two H200s, every layer recomputed: at most 75 seconds a step."""
    prompt, answer, count, home = 131_072, 2_048, 64, Layout(2)
    settings = CostSettings(checkpoint_policies=("full",) * 36)
    cost = Machine.known("H200").cost(preset_config("qwen3-8b"), settings)
    lengths = [prompt - 1, *[answer + 1] * count]
    tree = plan_fixed(lengths, home, 2, cost=cost, parents=[-1, *[0] * count])
    separate = min(plan_fixed([prompt + answer] * count, home, cp, cost=cost).predicted_seconds for cp in (1, 2))
    assert tree.predicted_seconds <= 75 and separate >= 18 * tree.predicted_seconds
