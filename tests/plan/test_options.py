"""The options that planners share, what all planners refuse, and which degrees query heads allow."""

import inspect
import random
from collections.abc import Callable
from dataclasses import fields
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest

from longspan.attention.attend import Arguments, choose_communication
from longspan.attention.call import AttendCall
from longspan.errors import LayoutError, PlanError
from longspan.layout import Layout
from longspan.plan import Cost, MicroBatch, Plan, PlanOptions, plan_dynamic, plan_fixed, plan_padded
from longspan.plan.planners.options import PlanKeywords
from tests.plan.test_dynamic import check_sound, random_case

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


def test_lists_are_kept_as_tuples() -> None:
    options = PlanOptions(cp_comm_type=["p2p", "a2a"], hierarchical_context_parallel_sizes=[2, 2])
    same = PlanOptions(cp_comm_type=("p2p", "a2a"), hierarchical_context_parallel_sizes=(2, 2))
    assert options == same and hash(options) == hash(same)


HOME = Layout(4)


def made(planner: Callable[..., Plan], lengths: Any = (900, 300, 20), home: Layout = HOME, **options: Any) -> Plan:
    return planner(lengths, home, **(options if planner is plan_dynamic else {"cp": 2} | options))


@pytest.mark.parametrize("planner", PLANNERS)
def test_options_are_keywords_or_one_value_and_targets_a_number_beside_a_plan(planner: Callable[..., Plan]) -> None:
    keywords: dict[str, Any] = {"max_tokens_per_slot": 512, "cost": Cost(micro_batch_seconds=1.0), "row_multiple": 2}
    plan = made(planner, **keywords)
    assert plan == made(planner, options=PlanOptions(**keywords))
    wins = made(planner, options=PlanOptions(**keywords), max_tokens_per_slot=600)
    assert (wins.max_tokens_per_slot, wins.row_multiple) == (600, 2)
    usual, masked = made(planner), made(planner, targets=17)
    assert (usual.targets, masked.targets) == (1217, 17) and masked.micro_batches == usual.micro_batches
    assert masked.digest() != usual.digest()  # ranks that counted other targets are found out
    with pytest.raises(TypeError, match=r"unexpected keyword argument 'node_sizes'"):
        made(planner, node_sizes=4)


@pytest.mark.parametrize("mode", ["lockstep", "free"])
@pytest.mark.parametrize("planner", PLANNERS)
def test_micro_batches_without_documents(planner: Callable[..., Plan], mode: str) -> None:
    plan = made(planner, [], max_tokens_per_slot=8, micro_batch_multiple=3, mode=mode)
    assert plan.micro_batches == (MicroBatch(),) * 3 and (plan.tokens, plan.targets, plan.efficiency) == (0, 0, 0.0)
    assert plan.predicted_seconds == pytest.approx(0.03 if mode == "lockstep" else 0.0)
    filled, one = (made(planner, [5], micro_batch_multiple=multiple, mode=mode) for multiple in (4, 1))
    assert len(filled.micro_batches) == 4
    assert mode == "lockstep" or filled.predicted_seconds == one.predicted_seconds


TYPES = r"use one of p2p, all_gather, a2a, a2a"
BAD: list[tuple[dict[str, Any], str]] = [
    ({"lengths": [3, 0]}, "length 1 is 0"),
    ({"lengths": [3, 4.5]}, "length 1 is 4.5"),
    ({"lengths": [3, True]}, "length 1 is True"),
    ({"lengths": [], "allow_empty": False}, "there are no documents to plan and allow_empty is False"),
    ({"max_tokens_per_slot": 0}, "max_tokens_per_slot is 0; give an integer"),
    ({"max_tokens_per_slot": 7, "row_multiple": 8}, "max_tokens_per_slot 7 is below row_multiple 8"),
    ({"micro_batch_multiple": 0}, "micro_batch_multiple is 0; give an integer"),
    ({"node_size": 0}, "node_size is 0"),
    ({"targets": -1}, "targets is -1; give an integer of at least 0"),
    ({"heads": 0}, "heads is 0; give an integer of at least 1"),
    ({"mode": "loose"}, "mode is 'loose'; use one of lockstep, free"),
    ({"mode": "free", "home": Layout(4, ep=2)}, "the home has ep 2: slots that share experts or a pipeline wait"),
    ({"partition": "odd"}, "partition is 'odd'; use one of zigzag, contiguous"),
    ({"cp_comm_type": "ring"}, f"cp_comm_type is 'ring'; {TYPES}"),
    ({"cp_comm_type": ["p2p", "x"]}, "cp_comm_type of layer 1 is 'x'"),
    ({"cp_comm_type": []}, "cp_comm_type is an empty list"),
    ({"lengths": [2**31] * 2}, "2 documents of up to 2147483648 rows cannot be priced .* at most 1 of that length"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_every_planner_refuses(arguments: dict[str, Any], message: str) -> None:
    for planner in PLANNERS:
        with pytest.raises((PlanError, LayoutError), match=message):
            made(planner, **arguments)


SMALL = {"max_tokens_per_slot": 20}
LEVELS = {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": (2, 4)}
BAD_FIXED: list[tuple[dict[str, Any], str]] = [
    ({"cp": 3}, r"cp 3 does not divide 4 slots \(4 ranks / tp 1 / pp 1\); use 1, 2 or 4$"),
    ({"cp": 8, "home": Layout(ranks=16, tp=2, pp=2)}, r"cp 8 does not divide 4 slots \(16 ranks / tp 2 / pp 2\)"),
    ({"cp": 2.0}, "cp is 2.0; give an integer of at least 1"),
    ({"cp": 0}, "cp is 0; give an integer of at least 1"),
    (
        SMALL | {"lengths": [7, 41, 50]},
        r"document 2 has 50 rows, .* the 40 that cp 2 x max_tokens_per_slot 20 hold \(2 ",
    ),
    (SMALL | {"lengths": [50]}, "the 40 .*; raise max_tokens_per_slot to 25, raise cp, or cut the document"),
    (
        SMALL | {"lengths": [90], "cp": 4},
        "the 80 .*; raise max_tokens_per_slot to 23, use a home of more slots, or cut",
    ),
    (SMALL | {"lengths": [35], "row_multiple": 16}, "35 rows, more than the 32 .* hold in multiples of 16 .* to 32"),
    (LEVELS | {"cp": 4}, r"\(2, 4\) multiply to 8, but the group has cp 4; use one of \(1, 4\), \(2, 2\), \(4, 1\)"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_FIXED)
def test_fixed_degrees_are_refused(arguments: dict[str, Any], message: str) -> None:
    for planner in (plan_fixed, plan_padded):
        with pytest.raises((PlanError, LayoutError), match=message):
            made(planner, **arguments)


BAD_DYNAMIC: list[tuple[list[int], dict[str, Any], str]] = [
    ([10, 5000, 9000], {}, "document 2 has 9000 rows, more than the 8192"),
    ([10, 5000], {"max_cp": 4}, "document 1 has 5000 rows, .* the 4096 that cp 4 x max_tokens_per_slot 1024"),
    ([10, 5000], {"row_multiple": 1000, "max_cp": 4}, "more than the 4000 .* in multiples of 1000"),
    ([10], {"min_cp": 5, "max_cp": 4}, "min_cp 5 is above max_cp 4"),
    ([10], {"min_cp": 9}, "min_cp 9 is above the 8 slots"),
    ([10], {"min_cp": 0}, "min_cp is 0"),
    ([10], {"max_cp": 0}, "max_cp is 0"),
    ([10], {"max_cp": True}, "max_cp is True"),
    ([10], {"effort": "heroic"}, "effort is 'heroic'"),
    ([99], {"max_tokens_per_slot": 12}, r"12 hold \(1 such document\); .* 13, use a home of more slots, or"),
    ([99], {"max_tokens_per_slot": 12, "max_cp": 4}, "to 25, raise max_cp, or cut the document"),
]


@pytest.mark.parametrize(("lengths", "options", "message"), BAD_DYNAMIC)
def test_dynamic_plans_are_refused(lengths: list[int], options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        plan_dynamic(lengths, Layout(8), **({"max_tokens_per_slot": 1024} | options))


# ---- heads: no planner gives a group more slots than they can be dealt out to


HEADS = (1, 2, 4, 6, 7, 12, 25, 32, 40)
KINDS = ("a2a", "a2a+p2p", ("p2p", "a2a"), ("a2a+p2p", "a2a"), "p2p", "all_gather", "auto")


def attends(plan: Plan, heads: int) -> None:
    kinds = {group.cp_comm_type for group in plan.groups}
    layers = {i for kind in kinds for i in range(1 if isinstance(kind, str) else len(kind))}
    call = AttendCall(heads=heads, kv_heads=1, head_dim=8, value_dim=8)
    for batch in plan.micro_batches:
        for layer in layers if "auto" not in kinds else ():
            choose_communication(SimpleNamespace(micro_batch=batch), Arguments(layer=layer), call)  # type: ignore[arg-type]


def test_dynamic_plans_have_only_degrees_that_the_heads_allow() -> None:
    rng, planned = random.Random(0), 0
    for _ in range(25):
        lengths, slots, arguments = random_case(rng)
        heads, tp, kind = rng.choice(HEADS), rng.choice((1, 1, 2)), rng.choice(KINDS)
        arguments |= {"cp_comm_type": kind, "heads": heads * tp}
        arguments |= {"hierarchical_context_parallel_sizes": rng.choice((1, 2, 4))}
        try:
            plan = plan_dynamic(lengths, Layout(slots * tp, tp=tp), **arguments)
        except PlanError as error:
            assert "a2a" in str(error) and any(f"{n}" in str(error) for n in (heads, heads * tp, *lengths))
            continue
        planned += 1
        attends(plan, heads)
        widest = min(arguments["max_cp"] or slots, slots)
        check_sound(plan, lengths, arguments["min_cp"], widest, arguments["micro_batch_multiple"])
    assert planned > 8


@pytest.mark.parametrize("planner", [plan_fixed, plan_padded])
def test_fixed_and_padded_plans_refuse_degrees_that_the_heads_do_not_allow(planner: object) -> None:
    for heads in HEADS:
        for cp in (1, 2, 3, 4, 8):
            home = Layout(48, tp=2)
            arguments = {"cp_comm_type": "a2a", "heads": 2 * heads}
            if cp == 1 or heads % cp == 0:
                attends(planner([40, 9], home, cp, **arguments), heads)  # type: ignore[operator]
                continue
            with pytest.raises(
                PlanError, match=rf"deals {heads} query heads \(of each rank, {2 * heads} / tp 2\) to the {cp}"
            ):
                planner([40, 9], home, cp, **arguments)  # type: ignore[operator]


def test_messages_say_which_degrees_and_sizes_fit() -> None:
    with pytest.raises(
        PlanError,
        match=r"'a2a' deals 4 query heads to the 8 slots of a group, .*; use cp 1, 2, 4, or p2p or all_gather",
    ):
        plan_fixed([100], Layout(8), 8, cp_comm_type="a2a", heads=4)
    sizes = {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": (8, 1)}
    for plan in (
        lambda **how: plan_fixed([100], Layout(8), 8, **how),
        lambda **how: plan_dynamic([100], Layout(8), max_tokens_per_slot=99, **how),
    ):
        with pytest.raises(
            PlanError,
            match=r"'a2a\+p2p' deals 12 query heads to the 8 slots of .*; use a first size of 1, 2, 3, 4, 6, or p2p",
        ):
            plan(heads=12, **sizes)
    with pytest.raises(
        PlanError, match=r"cp 2 x .* 1500 hold .* use a cp_comm_type other than a2a, which the heads limit to cp 2"
    ):
        plan_dynamic([4000], Layout(4), max_tokens_per_slot=1500, cp_comm_type="a2a", heads=2)
    with pytest.raises(PlanError, match="deals 4 query heads to the 3 slots"):
        plan_dynamic([400], Layout(4), max_tokens_per_slot=1500, min_cp=3, max_cp=3, cp_comm_type="a2a", heads=4)


def test_degrees_of_dynamic_plans_follow_heads_and_have_their_own_sizes() -> None:
    arguments = {"max_tokens_per_slot": 1500, "cp_comm_type": "a2a"}
    for heads, degrees in ((None, {3}), (4, {4})):  # both at once on three slots each, or one after the other on four
        plan = plan_dynamic([4000, 4000], Layout(6), heads=heads, **arguments)
        assert {group.degree for group in plan.groups} == degrees
    arguments = {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": 4, "node_size": 1}
    for lengths, slots in (([4000] * 3, 1), ([57344] * 2, 7)):
        plan = plan_dynamic(lengths, Layout(slots), max_tokens_per_slot=8192, micro_batch_multiple=4, **arguments)
        groups = plan.groups
        assert {group.hierarchical_context_parallel_sizes for group in groups} == {(1, slots)}
