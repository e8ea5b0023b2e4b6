"""What every dynamic plan must be, checked by code of its own: it prices and counts rows without the planner's help."""

import random

import numpy as np
import pytest
from bench.plans.strong_bound import strong_bound
from hypothesis import given, settings
from hypothesis import strategies as st

from longspan.errors import LongspanError, PlanError
from longspan.layout import Layout
from longspan.plan import Cost, Group, MicroBatch, Plan, plan_dynamic, plan_fixed
from longspan.plan.distributions import sample_lengths
from tests.plan.cases import bounded

COST = Cost()
SEEDS = [pytest.param(seed, marks=[pytest.mark.whole] * (seed > 0)) for seed in range(6)]  # 70 drawn steps of each


def group_seconds(group: Group, cost: Cost, node_size: int) -> float:
    """DESIGN's formula, written out."""
    tokens, squares, c = sum(group.lengths), sum(n * n for n in group.lengths), len(group.slots)
    if c == 1:
        return cost.linear_seconds * tokens + cost.attention_seconds * squares
    nodes = [slot // node_size for slot in group.slots]
    inside = len({*nodes}) == 1
    if group.cp_comm_type != "p2p":  # test_forward_cost.py and test_bound.py write out the other types
        sizes = group.hierarchical_context_parallel_sizes or (1, c)
        together = min(nodes.count(node) for node in nodes)
        priced = cost.under(group.cp_comm_type, sizes[0])
        return float(priced.group_seconds(tokens, squares, c, inside, len(group.lengths), together=together))
    speed = cost.inside_bytes_per_second if inside else cost.across_bytes_per_second
    wire = cost.ring_bytes * tokens * (c - 1) / c / speed
    attention = max(cost.attention_seconds * squares / c, wire)
    return cost.linear_seconds * tokens / c + attention + cost.ring_step_seconds * (c - 1)


def slot_seconds(batch: MicroBatch, plan: Plan) -> list[float]:
    """Seconds of each slot; None where it is in no group."""
    seconds = [0.0] * plan.slots
    for group in batch.groups:
        of_group = group_seconds(group, plan.cost, plan.node_size)
        for slot in group.slots:
            seconds[slot] += of_group
    return seconds


def lockstep_seconds(plan: Plan) -> float:
    return sum(max(slot_seconds(batch, plan)) + plan.cost.micro_batch_seconds for batch in plan.micro_batches)


def free_seconds(plan: Plan) -> float:
    """Event simulation: slots joined by groups start when the last is ready and end with the slowest."""
    clock = [0.0] * plan.slots
    for batch in plan.micro_batches:
        seconds = slot_seconds(batch, plan)
        component = {slot: slot for group in batch.groups for slot in group.slots}
        for _ in batch.groups:
            for group in batch.groups:
                least = min(component[slot] for slot in group.slots)
                component.update(dict.fromkeys(group.slots, least))
        for root in set(component.values()):
            members = [slot for slot in component if component[slot] == root]
            end = max(clock[s] for s in members) + max(seconds[s] for s in members) + plan.cost.micro_batch_seconds
            for slot in members:
                clock[slot] = end
    return max(clock)


def rows_held(batch: MicroBatch, slots: int, row_multiple: int) -> int:
    rows = [0] * slots
    for group in batch.groups:
        for slot in group.slots:
            rows[slot] += -(-sum(group.lengths) // len(group.slots))
    return max(-(-of_slot // row_multiple) * row_multiple for of_slot in rows)


def check_sound(plan: Plan, lengths: list[int], min_cp: int, max_cp: int, multiple: int) -> None:
    """Every document once, the cap in whole rows, degrees in range, a whole number of micro-batches, honest times."""
    documents = [
        (d, n)
        for batch in plan.micro_batches
        for g in batch.groups
        for d, n in zip(g.documents, g.lengths, strict=True)
    ]
    assert sorted(documents) == list(enumerate(lengths))
    assert len(plan.micro_batches) % multiple == 0
    for batch in plan.micro_batches:
        assert all(min_cp <= group.degree <= max_cp for group in batch.groups)
        assert len({group.slots for group in batch.groups}) == len(batch.groups)
        if plan.max_tokens_per_slot is not None:
            assert rows_held(batch, plan.slots, plan.row_multiple) <= plan.max_tokens_per_slot
    seconds = lockstep_seconds(plan) if plan.mode == "lockstep" else free_seconds(plan)
    assert plan.predicted_seconds == pytest.approx(seconds, rel=1e-9)
    assert plan.lower_bound_seconds <= plan.predicted_seconds
    if plan.cost.cp_comm_type != "p2p":  # which is a bound on rings
        return
    strong = strong_bound(
        lengths,
        plan.slots,
        plan.max_tokens_per_slot,
        plan.cost,
        plan.mode,
        min_cp=min_cp,
        max_cp=max_cp,
        node_size=plan.node_size,
    )
    assert strong.seconds <= plan.predicted_seconds


def check_partition(plan: Plan, partition: str) -> None:
    """Wide groups deal out rows as asked; those of one slot say nothing, in memory and in JSON."""
    groups = [group for batch in plan.micro_batches for group in batch.groups]
    assert all(group.partition == (partition if group.degree > 1 else "zigzag") for group in groups)
    assert Plan.from_json(plan.to_json()) == plan


def random_case(rng: random.Random) -> tuple[list[int], int, dict]:
    """Lengths, slots and arguments: prime slot counts, caps of a few rows, degrees that divide nothing."""
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


@pytest.mark.parametrize("seed", SEEDS)
def test_random_plans_are_sound_and_never_worse_than_a_fixed_degree(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(70):
        lengths, slots, arguments = random_case(rng)
        plan = plan_dynamic(lengths, Layout(slots), **arguments)
        widest = min(arguments["max_cp"] or slots, slots)
        check_sound(plan, lengths, arguments["min_cp"], widest, arguments["micro_batch_multiple"])
        check_partition(plan, arguments["partition"])
        shared = {k: v for k, v in arguments.items() if k not in ("min_cp", "max_cp", "effort")}
        cap = arguments["max_tokens_per_slot"] or sum(lengths)
        room = cap // arguments["row_multiple"] * arguments["row_multiple"]
        for cp in range(arguments["min_cp"], widest + 1):
            if slots % cp == 0 and max(lengths) <= cp * room:
                fixed = plan_fixed(lengths, Layout(slots), cp, **shared)
                assert plan.predicted_seconds <= fixed.predicted_seconds * (1 + 1e-9), (lengths, slots, arguments, cp)


@settings(bounded, max_examples=12)
@given(
    st.lists(st.one_of(st.integers(1, 60), st.integers(1, 4000)), min_size=1, max_size=30),
    st.sampled_from([1, 4, 7, 8, 13, 16]),
    st.sampled_from(["lockstep", "free"]),
    st.randoms(use_true_random=False),
)
def test_permuting_documents_changes_only_their_ids(
    lengths: list[int], slots: int, mode: str, rng: random.Random
) -> None:
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
    "lognorm": (1.05, 1.03, 1.03),
    "bimodal": (1.05, 1.03, 1.04),
    "uniform": (1.08, 1.05, 1.03),
    "files": (1.05, 1.03, 1.03),
    "expo": (1.05, 1.03, 1.03),
}


@pytest.mark.parametrize("name", RATIOS)
def test_ratio_to_the_bound_at_64_slots(name: str) -> None:
    lengths = sample_lengths(name, 64 * 32768).tolist()
    for (cap, mode), most in zip([(8192, "lockstep"), (16384, "lockstep"), (8192, "free")], RATIOS[name], strict=True):
        plan = plan_dynamic(lengths, Layout(64), max_tokens_per_slot=cap, mode=mode)
        check_sound(plan, lengths, 1, 64, 1)
        assert plan.ratio <= most, (cap, mode)


@pytest.mark.parametrize("name", ["lognorm", "uniform"])
def test_ratio_to_the_bound_at_1024_slots(name: str) -> None:
    lengths = sample_lengths(name, 1024 * 32768).tolist()
    lockstep = plan_dynamic(lengths, Layout(1024), max_tokens_per_slot=8192)
    free = plan_dynamic(lengths, Layout(1024), max_tokens_per_slot=8192, mode="free")
    assert lockstep.ratio <= RATIOS[name][0]
    assert free.ratio <= RATIOS[name][2]


@pytest.mark.parametrize(("slots", "documents", "multiple"), [(512, 257, 1), (513, 257, 1), (512, 257, 4)])
def test_half_as_many_documents_as_slots_are_planned_near_the_bound(slots: int, documents: int, multiple: int) -> None:
    lengths = np.random.default_rng(0).integers(1000, 60000, documents).tolist()
    plan = plan_dynamic(lengths, Layout(slots), max_tokens_per_slot=16384, micro_batch_multiple=multiple)
    assert plan.ratio <= 1.035 and len(plan.micro_batches) % multiple == 0


def test_three_long_documents_share_sixteen_slots_side_by_side() -> None:
    plan = plan_dynamic([36000] * 3, Layout(16), max_tokens_per_slot=8192)
    assert plan.ratio <= 1.10
    assert len(plan.micro_batches) == 1


def power_of_two_seconds(lengths: list[int], slots: int, cap: int, spread: float) -> float:
    """The usual scheduler: micro-batch by micro-batch, longest first, one power-of-two degree for each slot."""
    todo, total = sorted(lengths, reverse=True), 0.0

    def seconds(group: list[int], start: int = 0) -> float:
        return group_seconds(Group(tuple(range(start, start + group[0])), (), tuple(group[1:])), COST, 8)

    while todo:
        groups, left, most = [], [], None
        for length in todo:
            used, options, degree = sum(g[0] for g in groups), [], 1
            while degree <= slots:
                if length <= degree * cap and used + degree <= slots:
                    options.append((max([seconds([degree, length]), *map(seconds, groups)]), degree, -1))
                for i, g in enumerate(groups):
                    if g[0] == degree and sum(g[1:]) + length <= degree * cap:
                        later = max(seconds([*g, length]), *map(seconds, groups))
                        options.append((later, degree, i))
                degree *= 2
            if not options or (most is not None and min(options)[0] > most):
                left.append(length)
                continue
            end, degree, i = min(options)
            if i < 0:
                groups.append([degree, length])
            else:
                groups[i].append(length)
            most = end * spread if most is None else most
        while True:
            slowest = max(groups, key=seconds)
            wider = [2 * slowest[0], *slowest[1:]]
            if sum(g[0] for g in groups) + slowest[0] > slots or seconds(wider) >= seconds(slowest):
                break
            slowest[0] *= 2
        start, slow = 0, 0.0
        for group in sorted(groups, reverse=True, key=lambda g: g[0]):
            slow, start = max(slow, seconds(group, start)), start + group[0]
        total, todo = total + slow + COST.micro_batch_seconds, left
    return total


@pytest.mark.parametrize("seed", SEEDS[::3])
def test_never_worse_than_powers_of_two(seed: int) -> None:
    rng = random.Random(seed)
    for _ in range(40):
        slots, cap = rng.choice([2, 4, 8, 16, 32]), rng.choice([1024, 4096, 8192, 16384])
        longest = rng.choice([0.05, 0.2, 0.5, 1.0]) * cap * slots
        bend = rng.choice([1, 3])
        lengths = [
            16 + int(rng.random() ** bend * (longest - 16)) for _ in range(rng.choice([1, 2, 3, 4, 6, 8, 12, 20]))
        ]
        usual = min(power_of_two_seconds(lengths, slots, cap, spread) for spread in (1.0, 1.05, 1.3, 3.0))
        plan = plan_dynamic(lengths, Layout(slots), max_tokens_per_slot=cap)
        assert plan.predicted_seconds <= usual * (1 + 1e-9), (lengths, slots, cap)


BAD = [
    ({"lengths": [10, 5000, 9000]}, "document 2 has 9000 rows, more than the 8192"),
    (
        {"lengths": [10, 5000], "max_cp": 4},
        "document 1 has 5000 rows, more than the 4096 that cp 4 x max_tokens_per_slot 1024",
    ),
    ({"lengths": [10, 5000], "row_multiple": 1000, "max_cp": 4}, "more than the 4000 .* in multiples of 1000"),
    ({"lengths": [10, 0]}, "1"),
    ({"lengths": [10, -3]}, "-3"),
    ({"lengths": [10, True]}, "True"),
    ({"lengths": [10, 2.5]}, "2.5"),
    ({"lengths": [float("nan"), 10]}, "nan"),
    ({"lengths": [], "allow_empty": False}, "no documents to plan and allow_empty is False"),
    ({"min_cp": 5, "max_cp": 4}, "min_cp 5 is above max_cp 4"),
    ({"min_cp": 9}, "min_cp 9 is above the 8 slots"),
    ({"min_cp": 0}, "min_cp is 0"),
    ({"max_cp": 0}, "max_cp is 0"),
    ({"max_cp": True}, "max_cp is True"),
    ({"node_size": 0}, "node_size is 0"),
    ({"max_tokens_per_slot": 0}, "max_tokens_per_slot is 0"),
    ({"max_tokens_per_slot": 7, "row_multiple": 8}, "max_tokens_per_slot 7 is below row_multiple 8"),
    ({"micro_batch_multiple": 0}, "micro_batch_multiple is 0"),
    ({"mode": "async"}, "mode is 'async'"),
    ({"partition": "striped"}, "partition is 'striped'; use one of zigzag, contiguous"),
    ({"effort": "heroic"}, "effort is 'heroic'"),
    ({"lengths": [99], "max_tokens_per_slot": 12}, r"12 hold \(1 such document\); .* 13, use a home of more slots, or"),
    ({"lengths": [99], "max_tokens_per_slot": 12, "max_cp": 4}, "to 25, raise max_cp, or cut the document"),
    ({"cp_comm_type": "smoke"}, "cp_comm_type is 'smoke'"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD)
def test_bad_input_is_refused_with_numbers(arguments: dict, message: str) -> None:
    arguments = {"lengths": [10, 20], "max_tokens_per_slot": 1024} | arguments
    with pytest.raises(LongspanError, match=message):
        plan_dynamic(arguments.pop("lengths"), Layout(8), **arguments)


@pytest.mark.parametrize("mode", ["lockstep", "free"])
def test_an_empty_batch_is_dummies_only(mode: str) -> None:
    plan = plan_dynamic([], Layout(4), max_tokens_per_slot=8, micro_batch_multiple=3, mode=mode)
    assert plan.micro_batches == (MicroBatch(),) * 3


def test_many_tiny_documents_are_planned_quickly_and_whole() -> None:
    lengths = [1 + d % 40 for d in range(20000)]
    plan = plan_dynamic(lengths, Layout(16), max_tokens_per_slot=8192)
    check_sound(plan, lengths, 1, 16, 1)
    assert plan.ratio <= 1.05


def test_a_group_of_any_degree_gets_its_own_two_sizes() -> None:
    plan = plan_dynamic(
        [6000, 5000, 300],
        Layout(13),
        max_tokens_per_slot=1024,
        cp_comm_type="a2a+p2p",
        hierarchical_context_parallel_sizes=4,
    )
    for group in plan.micro_batches[0].groups:
        inner, outer = group.hierarchical_context_parallel_sizes or (0, 0)
        assert inner * outer == group.degree
        assert 4 % inner == 0


def test_groups_stay_inside_nodes_where_they_can() -> None:
    lengths = sample_lengths("expo", 64 * 32768, longest=32768).tolist()
    plan = plan_dynamic(lengths, Layout(64), max_tokens_per_slot=8192)
    groups = [group for batch in plan.micro_batches for group in batch.groups if group.degree <= 8]
    across = sum(len({slot // 8 for slot in group.slots}) > 1 for group in groups)
    assert across <= len(groups) // 20


def test_a_slower_network_makes_narrower_groups() -> None:
    lengths = sample_lengths("lognorm", 64 * 32768).tolist()
    fast, slow = (
        plan_dynamic(lengths, Layout(64), max_tokens_per_slot=8192, cost=Cost(across_bytes_per_second=speed))
        for speed in (400e9, 10e9)
    )
    slots_across = [
        sum(g.degree for b in plan.micro_batches for g in b.groups if len({s // 8 for s in g.slots}) > 1)
        for plan in (fast, slow)
    ]
    assert slots_across[0] > slots_across[1]


def test_lengths_may_be_numpy_and_cap_may_be_none() -> None:
    plan = plan_dynamic(np.array([500, 20, 7]), Layout(6), max_tokens_per_slot=None)
    check_sound(plan, [500, 20, 7], 1, 6, 1)
    with pytest.raises(PlanError, match="max_tokens_per_slot 99"):
        plan_dynamic(np.array([500, 20, 7]), Layout(5), max_tokens_per_slot=99)
