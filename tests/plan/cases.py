"""Sound random plans and lists of lengths, for the properties that every plan must have."""

from collections.abc import Callable
from typing import Any

from hypothesis import settings, strategies as st

from longspan.plan import Cost, Group, MicroBatch, ModelShape, Plan, slot_rows
from longspan.plan.cost.cost import StateCost, constants_of_shape
from longspan.plan.shape.model_shape import QWEN3_8B

MIXTURE = QWEN3_8B | {"model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48, "num_key_value_heads": 4}
MIXTURE |= {"intermediate_size": 6144, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}

HYBRID: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 8, "intermediate_size": 128}
HYBRID |= {"vocab_size": 100, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_key_head_dim": 16}
HYBRID |= {"linear_value_head_dim": 8, "linear_conv_kernel_dim": 4}
HYBRID |= {"layer_types": [*["linear_attention"] * 3, "full_attention"]}


def flops_cost(config: Any, tflops: float, attention_tflops: float | None = None, depths: int = 0) -> Cost:
    shape = ModelShape.of(config, mtp_layers=depths)
    rates: dict[str, Any] = {"tflops": tflops, "attention_tflops": attention_tflops or tflops, "bytes_per_value": 2}
    states = StateCost.from_shape(shape, scan_tflops=tflops, summary_tflops=tflops, step_latency=10e-6)
    return Cost(**constants_of_shape(shape, states, step_latency=10e-6, **rates))


bounded = settings(derandomize=True, deadline=None, max_examples=50)

lengths = st.lists(st.one_of(st.integers(1, 40), st.integers(1, 3000)), min_size=1, max_size=40)


@st.composite
def plans(draw: st.DrawFn, mode: str = "lockstep") -> Plan:
    """A plan whose groups have any slots, overlap, and leave slots out; its cap is the rows of its fullest slot."""
    slots, count = draw(st.integers(1, 12)), draw(st.integers(1, 4))
    drawn = draw(lengths)
    batches: list[list[Group]] = [[] for _ in range(count)]
    ids = list(range(len(drawn)))
    while ids:
        shared = draw(st.integers(1, 4))
        mine, ids = ids[:shared], ids[shared:]
        members = draw(st.lists(st.integers(0, slots - 1), min_size=1, max_size=slots, unique=True))
        pad = draw(st.sampled_from([None, None, max(drawn)]))
        rows, partition = tuple(drawn[d] for d in mine), draw(st.sampled_from(["zigzag", "contiguous"]))
        group = Group(tuple(members), tuple(mine), rows, partition=partition, pad_to=pad)
        batches[draw(st.integers(0, count - 1))].append(group)
    micro_batches = tuple(MicroBatch(tuple(groups)) for groups in batches)
    multiple, node = draw(st.integers(1, 3)), draw(st.sampled_from([2, 4, 8]))
    cap = int(slot_rows(micro_batches, slots, multiple).max())
    targets = sum(drawn) - len(drawn)
    return Plan(slots, tuple(drawn), micro_batches, targets, mode, cap, node, multiple)


def simulate(plan: Plan, price: Callable[[Group], float]) -> tuple[list[list[float]], ...]:
    """The definition, in plain loops: own seconds, and when each slot starts and may go on, for each micro-batch."""
    clock, busy, start, end = [0.0] * plan.slots, [], [], []
    for micro_batch in plan.micro_batches:
        of_slots = [0.0] * plan.slots
        for group in micro_batch.groups:
            seconds = price(group)
            for slot in group.slots:
                of_slots[slot] += seconds
        joined: list[set[int]] = [set(range(plan.slots))] if plan.mode == "lockstep" else []
        for slots in (set(group.slots) for group in micro_batch.groups if plan.mode == "free"):  # merge what overlaps
            apart = [other for other in joined if not other & slots]
            joined = [*apart, slots.union(*(other for other in joined if other & slots))]
        start.append(list(clock))
        for slots in joined:
            for slot in slots:
                of_slots[slot] += plan.cost.micro_batch_seconds
            ready, longest = max(clock[s] for s in slots), max(of_slots[s] for s in slots)
            for slot in slots:
                start[-1][slot], clock[slot] = ready, ready + longest
        busy.append(of_slots)
        end.append(list(clock))
    return busy, start, end
