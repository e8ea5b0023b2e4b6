"""Which degrees query heads allow: no planner gives a group more slots than its heads can be dealt out to."""

import random
from types import SimpleNamespace

import pytest

from longspan.attention.attend import Arguments, comm_choices
from longspan.attention.call import AttendCall
from longspan.errors import PlanError
from longspan.layout import Layout
from longspan.plan import Plan, plan_dynamic, plan_fixed, plan_padded
from tests.plan.test_dynamic import check_sound, random_case

HEADS = (1, 2, 4, 6, 7, 12, 25, 32, 40)
TYPES = ("a2a", "a2a+p2p", ("p2p", "a2a"), ("a2a+p2p", "a2a"), "p2p", "all_gather", "auto")


def attends(plan: Plan, heads: int) -> None:
    kinds = {group.cp_comm_type for batch in plan.micro_batches for group in batch.groups}
    layers = (
        [i for kind in kinds for i in range(1 if isinstance(kind, str) else len(kind))] if "auto" not in kinds else []
    )
    for batch in plan.micro_batches:
        for layer in layers:
            call = AttendCall(heads=heads, kv_heads=1, head_size=8, value_size=8)
            comm_choices(SimpleNamespace(micro_batch=batch), Arguments(layer=layer), call)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(2))
def test_dynamic_plans_have_only_degrees_that_the_heads_allow(seed: int) -> None:
    rng, planned = random.Random(seed), 0
    for _ in range(25):
        lengths, slots, arguments = random_case(rng)
        heads, tp, kind = rng.choice(HEADS), rng.choice((1, 1, 2)), rng.choice(TYPES)
        arguments |= {
            "cp_comm_type": kind,
            "heads": heads * tp,
            "hierarchical_context_parallel_sizes": rng.choice((1, 2, 4)),
        }
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
        match=r"use cp 1, 2 or 4, or p2p, .* hierarchical_context_parallel_sizes \(1, 8\), \(2, 4\), \(4, 2\)",
    ):
        plan_fixed([100], Layout(8), 8, cp_comm_type="a2a", heads=4)
    sizes = {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": (8, 1)}
    for plan in (
        lambda **how: plan_fixed([100], Layout(8), 8, **how),
        lambda **how: plan_dynamic([100], Layout(8), max_tokens_per_slot=99, **how),
    ):
        with pytest.raises(
            PlanError,
            match=r"deals 12 query heads to 8 slots, the first of .* \(8, 1\), .* a first size of 1, 2, 3, 4 or 6",
        ):
            plan(heads=12, **sizes)
    with pytest.raises(
        PlanError,
        match=r"cp 2 x .* 1500 hold .* use a cp_comm_type other than a2a, which the heads limit to cp 2",
    ):
        plan_dynamic([4000], Layout(4), max_tokens_per_slot=1500, cp_comm_type="a2a", heads=2)
    with pytest.raises(PlanError, match="deals 4 query heads to the 3 slots"):
        plan_dynamic([400], Layout(4), max_tokens_per_slot=1500, min_cp=3, max_cp=3, cp_comm_type="a2a", heads=4)


def test_degrees_of_dynamic_plans_follow_heads_and_have_their_own_sizes() -> None:
    arguments = {"max_tokens_per_slot": 1500, "cp_comm_type": "a2a"}
    for heads, degrees in ((None, {3}), (4, {4})):  # both at once on three slots each, or one after the other on four
        plan = plan_dynamic([4000, 4000], Layout(6), heads=heads, **arguments)
        assert {group.degree for batch in plan.micro_batches for group in batch.groups} == degrees
    arguments = {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": 4, "node_size": 1}
    for lengths, slots in (([4000] * 3, 1), ([57344] * 2, 7)):
        plan = plan_dynamic(lengths, Layout(slots), max_tokens_per_slot=8192, micro_batch_multiple=4, **arguments)
        groups = [group for batch in plan.micro_batches for group in batch.groups]
        assert {group.hierarchical_context_parallel_sizes for group in groups} == {(1, slots)}
