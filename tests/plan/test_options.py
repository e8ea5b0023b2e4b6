"""The options that planners share: one set, whether it comes as keywords or as one value."""

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any, get_type_hints

import pytest

from longspan.errors import PlanError
from longspan.layout import Layout
from longspan.plan import Cost, Plan, PlanOptions, plan_dynamic, plan_fixed, plan_padded
from longspan.plan.planners.options import PlanKeywords

PLANNERS: dict[Callable[..., Plan], tuple[str, ...]] = {
    plan_fixed: ("lengths", "home", "cp", "options"),
    plan_padded: ("lengths", "home", "cp", "options"),
    plan_dynamic: ("lengths", "home", "min_cp", "max_cp", "effort", "options"),
}


def test_keywords_are_the_fields_of_the_options() -> None:
    assert get_type_hints(PlanKeywords) == get_type_hints(PlanOptions)


@pytest.mark.parametrize("planner", PLANNERS)
def test_the_signature_lists_every_option_with_its_default(planner: Callable[..., Plan]) -> None:
    shown = inspect.signature(planner).parameters
    assert tuple(shown) == (*PLANNERS[planner], *(field.name for field in fields(PlanOptions)))
    assert all(shown[field.name].default == field.default for field in fields(PlanOptions))


@pytest.mark.parametrize("planner", PLANNERS)
def test_options_are_keywords_in_one_value_and_a_keyword_beside_them_wins(planner: Callable[..., Plan]) -> None:
    degree = () if planner is plan_dynamic else (2,)
    keywords: dict[str, Any] = {"max_tokens_per_slot": 512, "cost": Cost(micro_batch_seconds=1.0), "row_multiple": 2}
    plan = planner([900, 300, 20], Layout(4), *degree, **keywords)
    assert plan == planner([900, 300, 20], Layout(4), *degree, options=PlanOptions(**keywords))
    wins = planner([900, 300, 20], Layout(4), *degree, options=PlanOptions(**keywords), max_tokens_per_slot=600)
    assert (wins.max_tokens_per_slot, wins.row_multiple) == (600, 2)


@pytest.mark.parametrize("planner", PLANNERS)
def test_targets_are_those_of_documents_or_of_the_caller(planner: Callable[..., Plan]) -> None:
    """They divide the loss and change nothing else of a plan."""
    degree = () if planner is plan_dynamic else (2,)
    usual = planner([900, 300, 20], Layout(4), *degree)
    masked = planner([900, 300, 20], Layout(4), *degree, targets=17)
    assert (usual.targets, masked.targets) == (1217, 17) and masked.micro_batches == usual.micro_batches
    assert masked.digest() != usual.digest()  # ranks that counted other targets are found out
    with pytest.raises(PlanError, match="targets is -1"):
        planner([900, 300, 20], Layout(4), *degree, targets=-1)


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_keyword_that_no_planner_has_is_refused_with_the_nearest(planner: Callable[..., Plan]) -> None:
    with pytest.raises(TypeError, match=rf"{planner.__name__}\(\) .* 'node_sizes': did you mean 'node_size'\?"):
        planner([9], Layout(1), **({} if planner is plan_dynamic else {"cp": 1}), node_sizes=4)


def test_lists_are_kept_as_tuples() -> None:
    """So that options, and what holds them, may be keys of a cache."""
    options = PlanOptions(cp_comm_type=["p2p", "a2a"], hierarchical_context_parallel_sizes=[2, 2])
    same = PlanOptions(cp_comm_type=("p2p", "a2a"), hierarchical_context_parallel_sizes=(2, 2))
    assert options == same and hash(options) == hash(same)
