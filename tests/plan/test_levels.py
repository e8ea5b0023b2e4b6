"""Levels of hierarchical groups: each a partition of the members, and one member of each in common."""

from itertools import pairwise

import pytest

from longspan.errors import PlanError
from longspan.layout import Layout
from longspan.plan import Group, plan_fixed
from longspan.plan.micro_batch import Levels, group_levels, hierarchical_groups

SIZES = [(2, 2), (4, 2), (2, 4), (2, 3), (3, 2), (1, 4), (4, 1)]


@pytest.mark.parametrize("sizes", SIZES)
def test_each_level_holds_every_member_once_and_two_levels_meet_in_one(sizes: tuple[int, int]) -> None:
    slots = tuple(range(10, 10 + sizes[0] * sizes[1]))
    levels = group_levels(Group(slots, (0,), (64,), "a2a+p2p", sizes))
    for level, size in zip((levels.a2a, levels.p2p), sizes, strict=True):
        assert sorted(sum(level, ())) == list(slots) and {len(part) for part in level} == {size}
    assert all(len(set(inner) & set(outer)) == 1 for inner in levels.a2a for outer in levels.p2p)
    assert all(b - a == 1 for inner in levels.a2a for a, b in pairwise(inner)), "neighbours"


def test_levels_in_words() -> None:
    levels = group_levels(Group((0, 1, 2, 3), (0,), (64,), "a2a+p2p", (2, 2)))
    assert str(levels) == "level one, a2a: (0, 1) (2, 3); level two, p2p: (0, 2) (1, 3)"


def test_sizes_that_do_not_make_the_degree_are_an_error() -> None:
    with pytest.raises(PlanError, match=r"sizes \(2, 2\) do not make the degree 2"):
        group_levels(Group((0, 1), (0,), (64,), "a2a+p2p", (2, 2)))
    with pytest.raises(PlanError, match="sizes None"):
        group_levels(Group((0, 1), (0,), (64,)))


def test_hierarchical_groups_of_a_plan_are_named_once() -> None:
    settings = {"cp": 4, "max_tokens_per_slot": 64}
    plan = plan_fixed(
        [200] * 8, Layout(8), cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes=(2, 2), **settings
    )
    groups = list(hierarchical_groups(plan.micro_batches))
    assert [group_levels(group).a2a for group in groups] == [((0, 1), (2, 3)), ((4, 5), (6, 7))]
    assert not list(hierarchical_groups(plan_fixed([200], Layout(8), **settings).micro_batches))
    assert isinstance(group_levels(groups[0]), Levels)
