"""Which degrees query heads allow: no planner gives a group more slots than its heads can be dealt out to."""

import random

import pytest

from longspan.attention.attend import Arguments, comm_choices
from longspan.attention.call import AttendCall
from longspan.errors import PlanError
from longspan.layout import Layout
from longspan.plan import Plan, plan_dynamic, plan_fixed, plan_padded
from longspan.plan.dynamic.problem import even_runs
from tests.plan.test_dynamic import check_sound, random_case

HEADS = (1, 2, 4, 6, 7, 12, 25, 32, 40)
TYPES = ("a2a", "a2a+p2p", ("p2p", "a2a"), ("a2a+p2p", "a2a"), "p2p", "all_gather", "auto")


class _Shard:
    """Of a shard, what `comm_choices` reads, without a process group."""

    def __init__(self, batch: object) -> None:
        self.micro_batch = batch


def attends(plan: Plan, heads: int) -> None:
    """`attend` takes every group of the plan in every layer: it raises AttentionError otherwise."""
    kinds = {group.cp_comm_type for batch in plan.micro_batches for group in batch.groups}
    layers = (
        [i for kind in kinds for i in range(1 if isinstance(kind, str) else len(kind))] if "auto" not in kinds else []
    )
    for batch in plan.micro_batches:
        for layer in layers:
            call = AttendCall(heads=heads, kv_heads=1, head_size=8, value_size=8)
            comm_choices(_Shard(batch), Arguments(layer=layer), call)  # type: ignore[arg-type]


@pytest.mark.parametrize("seed", range(2))
def test_dynamic_plans_have_only_degrees_that_the_heads_allow(seed: int) -> None:
    rng, planned = random.Random(seed), 0
    for _ in range(40):
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
    assert planned > 15


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
    with pytest.raises(PlanError, match="heads is 0; give an integer of at least 1"):
        plan_dynamic([400], Layout(4), max_tokens_per_slot=None, heads=0)


def test_without_heads_any_degree_is_planned() -> None:
    arguments = {"max_tokens_per_slot": 1500, "cp_comm_type": "a2a"}
    degrees = [
        sorted({group.degree for batch in plan.micro_batches for group in batch.groups})
        for plan in (plan_dynamic([4000, 4000], Layout(6), heads=heads, **arguments) for heads in (None, 4))
    ]
    assert degrees == [[3], [4]]  # both at once on three slots each, or one after the other on four


@pytest.mark.parametrize(
    ("slots", "degrees", "widths"),
    [
        (8, (1, 2, 3, 4, 6, 12), [4, 4]),
        (7, (1, 2, 4), [4, 2, 1]),
        (7, (2, 4), [4, 2]),
        (11, (4, 6), [6, 4]),
        (3, (4, 6), []),
    ],
)
def test_runs_of_slots_are_as_wide_as_degrees_allow(slots: int, degrees: tuple[int, ...], widths: list[int]) -> None:
    pieces = even_runs(slots, degrees)
    assert [width for _, width in pieces] == widths
    assert [start for start, _ in pieces] == [sum(widths[:i]) for i in range(len(widths))]


@pytest.mark.parametrize(("lengths", "slots", "sizes"), [([4000] * 3, 1, (1, 1)), ([57344] * 2, 7, (1, 7))])
def test_dynamic_plans_of_one_degree_have_the_sizes_of_that_degree(
    lengths: list[int], slots: int, sizes: tuple[int, int]
) -> None:
    arguments = {"cp_comm_type": "a2a+p2p", "hierarchical_context_parallel_sizes": 4, "node_size": 1}
    plan = plan_dynamic(lengths, Layout(slots), max_tokens_per_slot=8192, micro_batch_multiple=4, **arguments)
    groups = [group for batch in plan.micro_batches for group in batch.groups]
    assert {group.hierarchical_context_parallel_sizes for group in groups} == {sizes}
