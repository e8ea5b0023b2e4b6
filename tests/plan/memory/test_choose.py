"""What is chosen: it fits, nothing that is faster fits, keys given by hand win, and refusals say the bytes."""

from dataclasses import replace
from typing import Any

import pytest

from longspan.errors import PlanError
from longspan.layout import Layout
from longspan.plan import (
    Bytes,
    FixedMemory,
    Machine,
    MemoryBudget,
    MemoryNeeds,
    MemoryPlan,
    MemorySettings,
    choose_memory,
    plan_fixed,
)
from longspan.plan.cost.machine import CostSettings
from longspan.plan.memory.memory_plan import MemoryPrices, fit_fewest_layers, memory_choices, seconds_beyond_settings
from longspan.plan.shape.model_shape import QWEN3_8B

GIB, HOME = 2**30, Layout(2)
H200 = MemoryBudget(device=129 * GIB, host=128 * GIB)


def needs_of(rows: int, kind: str = "a2a", **settings: Any) -> tuple[MemoryNeeds, MemoryPrices]:
    """Of one document over both slots, and prices of an H200 for it."""
    plan = plan_fixed([rows * 2], HOME, cp=2, cp_comm_type=kind)
    needs = MemoryNeeds.of(QWEN3_8B, HOME, plan, MemorySettings(**settings))
    return needs, MemoryPrices(QWEN3_8B, Machine(), needs.places[0], max(needs.loads))


def chosen(rows: int, budget: MemoryBudget = H200, **fixed: Any) -> MemoryPlan:
    plan = plan_fixed([rows * 2], HOME, cp=2, cp_comm_type="a2a")
    return choose_memory(QWEN3_8B, HOME, plan, MemorySettings(), budget, fixed=FixedMemory(**fixed))


@pytest.mark.parametrize(("slow", "fast"), [("full", "selective+host"), ("full+host", "selective+host")])
def test_more_layers_of_the_slower_measure_where_the_host_is_small(slow: str, fast: str) -> None:
    needs, _ = needs_of(65536)
    least, most = (needs.under(needs.measures_of_layers(slow, count, fast)).host.total for count in (36, 1))
    budget = MemoryBudget(device=200 * GIB, host=(least + most) // 2)
    memory = fit_fewest_layers(needs, slow, fast, budget)  # type: ignore[arg-type]
    assert memory is not None and memory.fits(budget)
    count = memory.measures.count(slow)  # type: ignore[arg-type]
    assert 1 < count < 36
    assert not needs.under(needs.measures_of_layers(slow, count - 1, fast)).fits(budget)


ROOM, TIGHT, HOST = (4096, 129, 128), (20480, 75, 0), (65536, 60, 64)  # rows, GiB of the device and of the host


@pytest.mark.parametrize(
    ("fixed", "sizes"),
    [
        *(({}, sizes) for sizes in (ROOM, TIGHT, HOST)),
        ({"gathered_once": False}, TIGHT),
        ({"gathered_once": False}, ROOM),
        ({"offload": False}, HOST),
        ({"offload_states": False}, HOST),
        ({"measure": "selective"}, TIGHT),
        ({"measure": "selective"}, HOST),
        ({"measure": "full"}, HOST),
        ({"mlp_tile_rows": 16384}, TIGHT),
        ({"segment_layers": 4}, TIGHT),
    ],
)
def test_is_the_first_of_the_fastest_of_all_plans_that_fit(fixed: dict[str, Any], sizes: tuple[int, int, int]) -> None:
    rows, device, host = sizes
    budget, by_hand = MemoryBudget(device=device * GIB, host=host * GIB), FixedMemory(**fixed)
    needs, prices = needs_of(rows)
    fastest: MemoryPlan | None = None
    for size in (0, 4) if by_hand.segment_layers is None else (4,):
        choices = list(memory_choices(needs, replace(by_hand, segment_layers=size)))
        plans = [fit_fewest_layers(*choice, budget) for choice in choices]
        for (choice, slow, fast), memory in zip(choices, plans, strict=True):
            if memory is not None:
                assert prices.least_seconds(choice, (slow, fast)) <= prices.seconds(memory)
        if fitting := [memory for memory in plans if memory is not None]:
            fastest = min(fitting, key=prices.seconds)
            break
    if fastest is None:
        with pytest.raises(PlanError, match="does not fit"):
            chosen(rows, budget, **fixed)
    else:
        assert chosen(rows, budget, **fixed) == fastest


def test_keys_given_by_hand_win() -> None:
    memory = chosen(4096)
    assert set(memory.measures) == {"none"} and memory.gathered_once and not memory.offload_states
    assert set(chosen(4096, measure="full").measures) <= {"full", "full+host"}
    assert set(chosen(4096, measure="selective", offload=False).measures) <= {"selective", "exchanged"}
    assert all("+host" in word for word in chosen(4096, measure="full", offload=True).measures)
    assert not chosen(4096, gathered_once=False).gathered_once
    assert chosen(4096, offload_states=True).offload_states


def test_refusals_have_the_bytes() -> None:
    with pytest.raises(PlanError, match=r"does not fit under any measure: with a slot of 4,194,304 rows .* bytes\)"):
        chosen(1 << 22)
    with pytest.raises(PlanError, match="with measure = 'none'"):
        chosen(65536, measure="none")
    with pytest.raises(PlanError, match="no measure keeps 'none' with offload True"):
        chosen(4096, measure="none", offload=True)


def test_seconds_of_measures() -> None:
    """What is recomputed costs, more so attention; copies that are longer than a layer's work cost too."""
    needs, prices = needs_of(32768, "p2p")
    words = ("none", "selective", "full", "selective+host", "full+host")
    seconds = {word: prices.seconds(needs.under(word)) for word in words}
    assert seconds["none"] < seconds["selective"] < seconds["full"]
    assert seconds["selective"] < seconds["selective+host"] and seconds["full"] < seconds["full+host"]
    once, prices = needs_of(32768, "p2p", gathered_once=True)
    assert prices.seconds(once.under("none")) < seconds["none"]


def test_what_a_cost_leaves_out() -> None:
    """A cost has what most recomputed layers do, second exchanges too; the others' difference comes on top."""
    needs, machine = needs_of(32768)[0], Machine()

    def left_out(*words: str) -> float:
        return seconds_beyond_settings(QWEN3_8B, needs.under(words), needs, machine)[0]

    for word in ("exchanged", "selective", "full", "none"):
        memory = needs.under(word)
        assert memory.cost_settings(CostSettings()).recomputation == word
        assert left_out(*[word] * 36) == 0.0
    for fast, slow in (("exchanged", "selective"), ("selective", "full"), ("exchanged", "full")):
        assert left_out(*[slow] * 20, *[fast] * 16) < 0 < left_out(*[fast] * 20, *[slow] * 16)
    assert left_out(*["selective+host"] * 36) > 0 < left_out(*["full+host"] * 36)
    moved = replace(needs.under("selective"), offload_states=True, host=Bytes(states=102 * 10**9))
    state_seconds = seconds_beyond_settings(QWEN3_8B, moved, needs, machine)[1]
    assert state_seconds == pytest.approx(2.0)  # 102 GB/s both ways together
