"""How far plans are from the best: tiny cases in which every plan can be tried, and a published setting."""

import itertools
import random
from dataclasses import replace

import pytest
from bench.plans.message_bound import bound_with_messages
from bench.plans.strong_bound import strong_bound

from longspan.layout import Layout
from longspan.plan import Cost, Machine, lower_bound_seconds, plan_dynamic
from longspan.plan.distributions import sample_lengths
from tests.plan.shape.test_model_shape import QWEN3_8B

COST = Cost()


def group_seconds(lengths: list[int], slots: tuple[int, ...], node_size: int) -> float:
    tokens, squares, c = sum(lengths), sum(n * n for n in lengths), len(slots)
    inside = len({slot // node_size for slot in slots}) == 1
    speed = COST.inside_bytes_per_second if inside else COST.across_bytes_per_second
    wire = COST.ring_bytes * tokens * (c - 1) / c / speed
    work = COST.linear_seconds * tokens / c + max(COST.attention_seconds * squares / c, wire)
    return work + COST.ring_step_seconds * (c - 1)


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
            for slot in members:
                rows[slot] += -(-sum(documents) // len(members))
                seconds[slot] += group_seconds(documents, members, node_size)
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


@pytest.mark.parametrize("seed", range(4))
def test_tiny_plans_against_all_plans(seed: int) -> None:
    rng, ratios = random.Random(seed), []
    for _ in range(10):
        slots = rng.choice([2, 3, 3, 4])
        cap, node_size = rng.choice([1024, 8192]), rng.choice([2, 8]) if slots % 2 == 0 else 8
        most = cap * slots * rng.choice([0.2, 0.5, 1])
        lengths = [rng.randint(16, int(most)) for _ in range(rng.choice([1, 2, 3] if slots == 4 else [2, 3, 4]))]
        optimum = best_step(lengths, slots, cap, node_size)
        plan = plan_dynamic(lengths, Layout(slots), max_tokens_per_slot=cap, node_size=node_size)
        bounds = (
            lower_bound_seconds(lengths, slots, cap, COST, node_size=node_size),
            strong_bound(lengths, slots, cap, COST, node_size=node_size),
        )
        assert all(bound.seconds <= optimum for bound in bounds), (lengths, slots, cap, node_size)
        assert bounds[0].seconds <= bounds[1].seconds * (1 + 1e-12)
        ratios.append(plan.predicted_seconds / optimum)
        assert 1 - 1e-9 <= ratios[-1] <= 1.03, (lengths, slots, cap, node_size)
    assert sum(ratio < 1 + 1e-9 for ratio in ratios) >= 8


QWEN3_30B_A3B = QWEN3_8B | {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_key_value_heads": 4,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
}


@pytest.mark.parametrize("seed", range(4))
def test_the_published_setting_of_dynamic_context_parallelism(seed: int) -> None:
    cost, cap = replace(Machine.known("H200").cost(QWEN3_30B_A3B), launch_seconds=0.0), 3072  # of a fast host
    lengths = sample_lengths("lognorm", 32 * cap * 8, seed=seed, longest=49152).tolist()
    keywords = {"max_tokens_per_slot": cap, "cost": cost, "cp_comm_type": "auto", "heads": 32}
    plan = plan_dynamic(lengths, Layout(ranks=32), max_cp=16, **keywords)
    assert plan.predicted_seconds <= 1.25 * plan.lower_bound_seconds  # which leaves messages of measured links out
    bound = bound_with_messages(plan, max_cp=16)
    assert plan.lower_bound_seconds < bound <= plan.predicted_seconds <= 1.10 * bound
