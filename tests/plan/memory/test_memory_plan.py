"""Plans of memory: their parts, what decides them, how they are printed; what is chosen, and refusals."""

import json
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest

from longspan.errors import PlanError
from longspan.layout import Layout
from longspan.model.presets import preset_config
from longspan.plan import (
    CHECKPOINT_POLICIES,
    Bytes,
    Cost,
    FixedMemory,
    Group,
    Machine,
    MemoryBudget,
    MemoryNeeds,
    MemoryPlan,
    MemorySettings,
    MicroBatch,
    Plan,
    choose_memory,
    plan_fixed,
)
from longspan.plan.cost.machine import SHARDING_SHARE, CostSettings
from longspan.plan.cost.type_prices import TypePrice
from longspan.plan.form import Form
from longspan.plan.memory.layer_table import LayerTable, slot_loads
from longspan.plan.memory.memory_choice import fit_with_fewest_slow_layers, memory_choices
from longspan.plan.memory.settings import GPU_SHARE
from longspan.plan.shape.config_reader import ConfigReader
from longspan.plan.shape.model_shape import QWEN3_8B
from tests.plan.shape.test_packed import LLAMA_70B, QWEN3_32B

GIB = 2**30


MOE = QWEN3_8B | {"model_type": "qwen3_moe", "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
TOWER = {"depth": 4, "hidden_size": 1280, "num_heads": 16, "intermediate_size": 3420, "spatial_merge_size": 2}
VISION = {"model_type": "qwen2_5_vl", "text_config": QWEN3_8B | {"num_hidden_layers": 4}}
VISION |= {"vision_config": TOWER | {"patch_size": 14, "temporal_patch_size": 2}}


def planned(measures: Any = "selective", *, rows: int = 8192, config: Any = QWEN3_8B, **changes: Any) -> MemoryPlan:
    home = changes.pop("home", Layout(4))
    plan = changes.pop("plan", None) or plan_fixed([rows * home.slots], home, cp=home.slots, cp_comm_type="a2a")
    return MemoryPlan.of(config, home, plan, MemorySettings(**changes), measures)


def test_shards_of_float32_masters() -> None:
    device = planned().device
    assert device.weights == pytest.approx(8.19e9 * 4 / 4, rel=1e-3) and planned(state_numbers=0).device.states == 0
    assert planned(gpu=False).device.communicators == 0 < device.communicators  # no context
    there = planned(offload_optimizer_states=True)
    assert there.host.states == device.states and there.device.states == 512 << 20  # two buckets of an update
    assert there.offload_optimizer_states and "states on the host" in there.summary_line()
    ends = 2 * 151936 * 4096  # embedding and head
    assert planned(state_numbers=1, muon=True).device.states == pytest.approx((8.19e9 + ends) * 4 / 4, rel=1e-3)


def test_measures_keep_less_in_their_order() -> None:
    plans = {word: planned(word, rows=65536) for word in CHECKPOINT_POLICIES}
    totals = [plans[word].device.total for word in ("none", "exchanged", "selective", "full", "full+host")]
    assert totals == sorted(totals, reverse=True) and len(set(totals)) == 5
    assert plans["full+host"].host.kept == 36 * 65536 * 4096 * 2
    assert plans["selective+host"].host.kept == 36 * 65536 * (2 * 4096 * 2 + 4 * 32)
    assert plans["none"].host.total == 0


def test_a_word_for_each_layer() -> None:
    some = planned(["full"] * 12 + ["none"] * 24)
    assert planned("full").device.total < some.device.total < planned("none").device.total
    assert some.checkpoint_policies.count("full") == 12
    with pytest.raises(PlanError, match="35 policies were given for 36 layers"):
        planned(["none"] * 35)
    with pytest.raises(PlanError, match="a layer keeps 'half'; use one of none, exchanged, selective"):
        planned("half")


def test_worst_slot_of_every_micro_batch() -> None:
    small = MicroBatch((Group((0, 1), (0,), (2048,)), Group((2,), (1,), (512,))))
    large = MicroBatch((Group((3,), (2,), (90000,)),))

    def of(*batches: MicroBatch) -> MemoryPlan:
        lengths = (2048, 512, 90000)
        return planned(plan=Plan(4, lengths, batches, targets=1))

    assert of(small, large).rows == 90000
    assert of(small, large).device.total > of(large, small).device.total > of(small, small).device.total
    several = planned(plan=[Plan(4, (2048, 512, 90000), (batch,), targets=1) for batch in (small, large)])
    assert replace(several.device, communicators=0) == replace(of(large).device, communicators=0)


def test_copies_and_free_mode_hold_more() -> None:
    assert planned(home=Layout(4, dp_replicate=2)).device.weights == 2 * planned().device.weights
    free = planned(free=True, rows=512)
    assert free.device.gathered > 8.19e9 * (2 + 4)  # all weights in bfloat16, all gradients in float32
    whole = planned(shard_parameters=False, rows=512).device
    assert whole.weights == pytest.approx(8.19e9 * 4, rel=1e-3)
    assert planned("none", reshard_after_forward=False).device.gathered > planned("none").device.gathered + 10 * GIB


def test_stages_keep_micro_batches_in_flight() -> None:
    home = Layout(4, pp=4)
    plan = plan_fixed([8192] * 8, home, cp=1, max_tokens_per_slot=8192)
    first, last = (MemoryNeeds.of(QWEN3_8B, home, plan, MemorySettings()).places[i] for i in (0, 3))
    assert (first.in_flight, last.in_flight) == (4.0, 1.0)
    with pytest.raises(PlanError, match=r"80 pipeline stages .* for 36 layers"):
        planned(home=Layout(80, pp=80), plan=plan)


def test_images_wait_unless_they_are_encoded_again() -> None:
    def of(**changes: Any) -> MemoryPlan:
        return planned("full", config=VISION, rows=2048, **changes)

    plain, kept = of(), of(encoder_rows=8192)
    again = of(encoder_rows=1024, encoder_recomputed=True)
    assert plain.device.total < again.device.total < kept.device.total
    assert kept.device.kept > plain.device.kept + 8192 * 4 * 4 * 8 * 1280 * 2
    with pytest.raises(PlanError, match="has no tower"):
        planned(encoder_rows=10)


def test_float8_weights_stay_where_passes_follow_each_other_without_a_gather() -> None:
    plain, float8 = (planned(free=True, float8=x).device for x in ("", "rowwise"))
    assert float8.gathered - plain.gathered == pytest.approx(2 * 6.946e9, rel=1e-3)
    assert planned(float8="rowwise").device == planned().device


def test_two_buckets_of_states_on_the_host_are_on_the_device_at_every_moment() -> None:
    """An update goes on behind the next forward pass, and its stream keeps their memory."""
    small = QWEN3_8B | {"num_hidden_layers": 1, "vocab_size": 64, "intermediate_size": 64, "hidden_size": 256}
    settings = MemorySettings(offload_optimizer_states=True, shard_parameters=False)
    for config, states in ((QWEN3_8B, 512 << 20), (small, None)):
        needs = MemoryNeeds.of(config, Layout(1), plan_fixed([8], Layout(1), cp=1), settings)
        (place,) = needs.places
        update, *others = place.bytes_at_moments(needs.loads, needs.under("none").checkpoint_policies)
        assert update.gradients == update.weights
        assert update.states == (states or needs.under("none").host.states) > 0
        assert {moment.states for moment in others} == {update.states}


def test_printed() -> None:
    memory = planned(["selective"] * 12 + ["none"] * 24, reshard_after_forward=False)
    line = memory.summary_line(MemoryBudget(device=100 * GIB))
    assert line.startswith(
        "memory: 12 of 36 layers keep their input and attention's output, 24 keep all, weights gathered once; "
    )
    assert "of 100.0 GiB used, and 0.0 GiB of host memory" in line
    two_layers = planned("full", config=QWEN3_8B | {"num_hidden_layers": 2}, segment_layers=4)
    assert ", segments of 2 layers; " in two_layers.summary_line()
    assert Form(checkpoint_policies="full", segment_layers=8).text == ", segments of 8 layers"
    assert not Form(segment_layers=8).text
    held = Bytes(weights=1, gradients=2, states=3, gathered=4, kept=5, work=6, logits=7, communicators=8)
    assert held.to_json() == {**vars(held), "total": 36} and held.total == 36
    values = json.loads(json.dumps(memory.to_json()))
    assert values["device"]["total"] == memory.device.total and set(values["host"]) == set(values["device"])


LATENT = QWEN3_8B | {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"model_type": "zamba2", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 10}, "shared blocks"),
        (QWEN3_8B | {"kv_lora_rank": 512}, "latent attention"),
        (LATENT | {"model_type": "dots3_note_text"}, "widths of their own"),
        ({"hidden_size": 64, "num_hidden_layers": 2}, "has no vocab_size"),
    ],
)
def test_refuses_what_is_not_counted(config: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        planned(config=config, rows=16)


def test_segments_under_a2a_are_planned_as_measured() -> None:
    """The peak of torch's allocator on two H100s in a step of 720,896 rows of Qwen3-8B with windows of 4,096 rows.

    The input of the segment before, 2.75 GiB, was on the device then, and is fetched later since.
    """
    rows, home = 360448, Layout(2)
    changes = {
        "reshard_after_forward": False,
        "offload_optimizer_states": True,
        "mlp_tile_tokens": 16384,
        "segment_layers": 4,
    }
    device = planned(("full+host",) * 36, rows=rows, home=home, **changes).device
    assert device.total - device.communicators == pytest.approx((73.98 - 2.75) * GIB, rel=0.01)
    assert device.kept == pytest.approx(3 * 8192 * rows)  # inputs of a segment's layers behind the first


def test_loads_have_the_slices_that_attention_chooses() -> None:
    read = ConfigReader.read_language_model(QWEN3_8B)
    for rows, degree, slices in ((4096, 2, 1), (65536, 2, 2), (360448, 2, 4), (360448, 8, 2)):
        plan = plan_fixed([rows * degree], Layout(degree), cp=degree, cp_comm_type="a2a")
        (load,) = slot_loads([plan], read, MemorySettings(), Machine())
        table = LayerTable(read, MemorySettings(), load)
        assert table.head_exchange_slices() == (slices, 1 if degree == 8 else slices, 1), rows


# ---- what is chosen: it fits, nothing that is faster fits, and keys given by hand win


def test_many_micro_batches_have_a_price_for_each_way_of_sharding() -> None:
    """Where all fits, weights and gradients are once a step; with less room gradients are summed in each micro-batch,
    and with the least weights are gathered there too, also on one slot. Of one micro-batch the first two are one.
    """
    plan = plan_fixed([4096] * 16, HOME, cp=1, max_tokens_per_slot=4096)

    def ways(gib: int, home: Layout = HOME, **fixed: Any) -> tuple[bool, bool]:
        budget, of_home = MemoryBudget(device=gib * GIB), plan_fixed(plan.lengths, home, 1, max_tokens_per_slot=4096)
        memory = choose_memory(QWEN3_8B, home, of_home, MemorySettings(), budget, fixed=FixedMemory(**fixed))
        return memory.reshard_after_forward, memory.sync_each_batch

    assert [ways(gib) for gib in (180, 115, 95)] == [(False, False), (False, True), (True, True)]
    assert [ways(gib, Layout(1)) for gib in (180, 150)] == [(False, False), (True, True)]
    assert ways(180, sync_each_batch=True) == (False, True) and ways(180, reshard_after_forward=True) == (True, True)
    once = choose_memory(QWEN3_8B, HOME, plan, MemorySettings(), MemoryBudget(device=180 * GIB))
    assert "gradients summed once" in once.summary_line()
    assert chosen(4096).sync_each_batch
    settings = [MemorySettings(reshard_after_forward=False, sync_each_batch=each) for each in (True, False)]
    kept, summed = (MemoryNeeds.of(QWEN3_8B, HOME, plan, one).under("none").device for one in settings)
    assert kept.gathered > 8.19e9 * 2 and summed.gathered > 8.19e9 * (2 + 4)
    free = planned("none", home=HOME, rows=4096, free=True, plan=plan)
    assert summed.gathered == free.device.gathered


HOME = Layout(2)
H200 = MemoryBudget(device=129 * GIB, host=128 * GIB)


def needs_of(rows: int, kind: str = "a2a", home: Layout = HOME, **settings: Any) -> MemoryNeeds:
    plan = plan_fixed([rows * home.slots], home, cp=home.slots, cp_comm_type=kind)
    return MemoryNeeds.of(QWEN3_8B, home, plan, MemorySettings(**settings))


def chosen(rows: int, budget: MemoryBudget = H200, **fixed: Any) -> MemoryPlan:
    plan = plan_fixed([rows * 2], HOME, cp=2, cp_comm_type="a2a")
    return choose_memory(QWEN3_8B, HOME, plan, MemorySettings(), budget, fixed=FixedMemory(**fixed))


@pytest.mark.parametrize(("slow", "fast"), [("full", "selective+host"), ("full+host", "selective+host")])
def test_more_layers_of_the_slower_policy_where_the_host_is_small(slow: str, fast: str) -> None:
    needs = needs_of(65536)
    least, most = (needs.under(needs.policies_of_layers(slow, count, fast)).host.total for count in (36, 1))
    budget = MemoryBudget(device=200 * GIB, host=(least + most) // 2)
    memory = fit_with_fewest_slow_layers(needs, slow, fast, budget)  # type: ignore[arg-type]
    assert memory is not None and memory.fits(budget)
    count = memory.checkpoint_policies.count(slow)  # type: ignore[arg-type]
    assert 1 < count < 36
    assert not needs.under(needs.policies_of_layers(slow, count - 1, fast)).fits(budget)


ROOM, TIGHT, HOST = (4096, 129, 128), (20480, 75, 0), (65536, 60, 64)  # rows, GiB of the device and of the host
MIXED = (8192, 75, 64), (20480, 75, 8), (32768, 100, 16)  # a later choice of few slow layers beats the first that fits


DAILY = [
    *(({}, sizes) for sizes in (TIGHT, HOST, MIXED[0])),
    ({"reshard_after_forward": True}, TIGHT),
    ({"offload_activations": False}, HOST),
]
RARE = [
    *(({}, sizes) for sizes in (ROOM, *MIXED[1:])),
    ({"activation_checkpointing": "full"}, HOST),
    ({"mlp_tile_tokens": 16384}, TIGHT),
]
RARE += [({"segment_layers": 4}, TIGHT)]


@pytest.mark.parametrize(("fixed", "sizes"), [*DAILY, *(pytest.param(*row, marks=pytest.mark.whole) for row in RARE)])
def test_is_the_first_of_the_fastest_of_all_plans_that_fit(fixed: dict[str, Any], sizes: tuple[int, int, int]) -> None:
    rows, device, host = sizes
    budget, by_hand = MemoryBudget(device=device * GIB, host=host * GIB), FixedMemory(**fixed)
    needs = needs_of(rows)
    prices = needs.prices
    fastest: MemoryPlan | None = None
    sizes_of_segments = (0, 4) if by_hand.segment_layers is None else (4,)
    pairs = [(size, on_host) for size in sizes_of_segments for on_host in (False, True)]
    places = (False, True) if by_hand.reshard_after_forward is not False else (False,)
    for level in range(3):  # neither segments nor weights on the host, one of them, both
        of_level = [pair for pair in pairs if sizes_of_segments.index(pair[0]) + places.index(pair[1]) == level]
        keys = [replace(by_hand, segment_layers=size, offload_weights=on_host) for size, on_host in of_level]
        choices = [choice for one in keys for choice in memory_choices(needs, one)]
        plans = [fit_with_fewest_slow_layers(*choice, budget) for choice in choices]
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


def test_no_choice_that_could_win_is_left_out_for_its_slow_layers() -> None:
    """As many layers as add just so many seconds are tried, and not many more."""
    needs = needs_of(8192)
    prices = needs.prices
    for slow, fast in (("full", "none"), ("selective+host", "selective"), ("full+host", "none")):
        least = prices.least_seconds(needs, (slow, fast))
        for count in (1, 7, 35):
            seconds = prices.seconds(needs.under(needs.policies_of_layers(slow, count, fast))) - least
            assert count <= prices.most_slow_layers(needs, slow, fast, seconds) <= count + 2, (slow, fast, count)
        assert prices.most_slow_layers(needs, slow, fast, float("inf")) == 36


def test_keys_given_by_hand_win() -> None:
    memory = chosen(4096)
    assert (
        set(memory.checkpoint_policies) == {"none"}
        and not memory.reshard_after_forward
        and not memory.offload_optimizer_states
    )
    assert set(chosen(4096, activation_checkpointing="full").checkpoint_policies) <= {"full", "full+host"}
    assert set(chosen(4096, activation_checkpointing="selective", offload_activations=False).checkpoint_policies) <= {
        "selective",
        "exchanged",
    }
    assert all(
        "+host" in word
        for word in chosen(4096, activation_checkpointing="full", offload_activations=True).checkpoint_policies
    )
    assert chosen(4096, reshard_after_forward=True).reshard_after_forward
    assert chosen(4096, offload_optimizer_states=True).offload_optimizer_states


def test_refusals_have_the_bytes() -> None:
    with pytest.raises(PlanError, match=r"does not fit under any policy: with a slot of 4,194,304 rows .* bytes\)"):
        chosen(1 << 22)
    with pytest.raises(PlanError, match="with activation_checkpointing = 'none'"):
        chosen(65536, activation_checkpointing="none")
    with pytest.raises(PlanError, match="no policy keeps 'none' with offload_activations True"):
        chosen(4096, activation_checkpointing="none", offload_activations=True)


def test_seconds_of_measures() -> None:
    """What is recomputed costs, more so attention; copies that are longer than a layer's work cost too."""
    needs = needs_of(32768, "p2p")
    words = ("none", "selective", "full", "selective+host", "full+host")
    seconds = {word: needs.prices.seconds(needs.under(word)) for word in words}
    assert seconds["none"] < seconds["selective"] < seconds["full"]
    assert seconds["selective"] < seconds["selective+host"] and seconds["full"] < seconds["full+host"]
    once = needs_of(32768, "p2p", reshard_after_forward=False)
    assert once.prices.seconds(once.under("none")) < seconds["none"]


def test_what_a_cost_leaves_out() -> None:
    """A cost has what most recomputed layers do, second exchanges too; the others' difference comes on top."""
    needs = needs_of(32768)

    def left_out(*words: str) -> float:
        return needs.prices.seconds_beyond_settings(needs.under(words))

    for word in ("exchanged", "selective", "full", "none"):
        memory = needs.under(word)
        assert memory.cost_settings(CostSettings()).recomputation == word
        assert left_out(*[word] * 36) == 0.0
    for fast, slow in (("exchanged", "selective"), ("selective", "full"), ("exchanged", "full")):
        assert left_out(*[slow] * 20, *[fast] * 16) < 0 < left_out(*[fast] * 20, *[slow] * 16)
    assert left_out(*["selective+host"] * 36) > 0 < left_out(*["full+host"] * 36)


# ---- weights and gradients on the host


def test_weights_on_the_host_take_gradients_and_states_along() -> None:
    layer = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 12288 + 2 * 4096 + 2 * 128
    there, here = planned(offload_weights=True), planned(offload_optimizer_states=True)
    assert there.device.weights == there.device.gradients == 0 and there.device.states == 512 << 20
    assert there.host.weights == there.host.gradients == here.device.weights == pytest.approx(8.19e9, rel=1e-3)
    assert there.host.states == here.host.states and "weights on the host" in there.summary_line()
    at_loss = {on_host: next(_moments(offload_weights=on_host)) for on_host in (False, True)}
    # two buffers of a layer's weights, and two of its gradients
    assert at_loss[True].gathered - at_loss[False].gathered == pytest.approx(4 * layer * 4 / 4)
    assert at_loss[False].weights > at_loss[True].weights == 0
    halved = planned(offload_weights=True, parameter_bytes=2)
    assert 2 * halved.host.total == there.host.total
    # of adapters everything stays, of what they are on nothing
    lora = {"parameter_bytes": 2, "lora_rank": 16}
    streamed, whole = planned(offload_weights=True, **lora), planned(**lora)
    assert streamed.host.gradients == streamed.host.states == 0 < streamed.device.states
    assert streamed.host.weights + streamed.device.weights == whole.device.weights
    adapters = 36 * 16 * (2 * (4096 + 4096) + 2 * (4096 + 1024) + 3 * (4096 + 12288))
    assert streamed.device.weights == adapters * 4 / 4


def _moments(**settings: Any) -> Iterator[Bytes]:
    needs = needs_of(8192, "p2p", Layout(4), **settings)
    moments = needs.places[0].bytes_at_moments(needs.loads, ["selective"] * 36)
    next(moments)  # the update
    return moments


def test_weights_leave_the_device_after_all_that_costs_less() -> None:
    """Segments run layers forward once more, which costs more than copies that hide behind long documents."""
    one = Layout(1)

    def choose(rows: int, device: float = 73.6, host: int = 256, **fixed: Any) -> MemoryPlan:
        budget = MemoryBudget(device=int(device * GIB), host=host * GIB)
        plan = plan_fixed([rows], one, cp=1)
        return choose_memory(QWEN3_8B, one, plan, MemorySettings(), budget, fixed=FixedMemory(**fixed))

    assert not choose(65536, 129).offload_weights and not choose(32768).offload_weights
    long = choose(200_000)
    assert long.offload_weights and long.offload_optimizer_states and not long.segment_layers
    assert long.device.weights == long.device.gradients == 0 < long.host.gradients
    assert choose(680_000).segment_layers  # both
    assert choose(32768, offload_weights=True).offload_weights
    with pytest.raises(PlanError, match=r'of its host.s 100.0 GiB .*; use .*, model.dtype = "bfloat16"'):
        choose(400_000, host=100)
    with pytest.raises(PlanError, match="does not fit"):  # of an optimizer that may not be updated in parts
        choose(200_000, offload_optimizer_states=False)


@pytest.mark.parametrize(
    ("layout", "settings", "config", "reason"),
    [
        (Layout(2, pp=2), {}, QWEN3_8B, "parallel.pp is 2"),
        (Layout(2), {"free": True}, QWEN3_8B, 'context.mode is "free"'),
        (Layout(2, dp_replicate=2), {}, QWEN3_8B, "parallel.dp_replicate is 2"),
        (Layout(2), {"reshard_after_forward": False}, QWEN3_8B, "parallel.reshard_after_forward is false"),
        (Layout(2), {"shard_parameters": False}, QWEN3_8B, "FSDP2 does not shard"),
        (Layout(2), {"encoder_rows": 64}, VISION, "an image encoder"),
    ],
)
def test_weights_that_stay_on_the_device(layout: Layout, settings: Any, config: Any, reason: str) -> None:
    plan = plan_fixed([512] * layout.slots, layout, cp=1, max_tokens_per_slot=512)
    run: Any = (config, layout, plan, MemorySettings(**settings), MemoryBudget(device=2000 * GIB, host=2000 * GIB))
    with pytest.raises(PlanError, match=f"train.offload_weights is true, and {reason}.*; leave it out"):
        choose_memory(*run, fixed=FixedMemory(offload_weights=True))
    choices = memory_choices(
        MemoryNeeds.of(*run[:4]), FixedMemory(reshard_after_forward=settings.get("reshard_after_forward"))
    )
    assert not any(choice.places[0].settings.offload_weights for choice, _, _ in choices)


def test_seconds_of_weights_on_the_host() -> None:
    """A layer's 772 MB arrive in 15.1 ms at 51 GB/s, as many leave; the embedding's 2.49 GB show, each way, and what
    the head's take longer than a layer's forward pass.
    """

    def added(rows: int, **settings: Any) -> float:
        needs = needs_of(rows, home=Layout(1), offload_weights=True, **settings)
        return needs.prices.streaming_seconds(needs.under("full"))

    embedding = (151936 + 1) * 4096 * 4 / 51e9
    assert added(65536) == added(131072) == pytest.approx(2 * embedding)
    assert 2 * embedding < added(32768) < 2.2 * embedding
    assert added(4096) > added(8192) > added(32768)
    assert added(8192, parameter_bytes=2) < added(8192) / 2
    assert added(65536, lora_rank=16, parameter_bytes=2) == pytest.approx(embedding / 2)


def test_seconds_of_an_update_on_the_host() -> None:
    """Weights, gradients and both moments of 4 bytes come at 51 GB/s behind a forward pass, beside the weights of its
    layers, but those of the embedding, which it begins with.
    """

    def added(rows: int, **settings: Any) -> float:
        needs = needs_of(rows, home=Layout(1), **settings)
        prices, memory = needs.prices, needs.under("full")
        cost = Machine().cost(QWEN3_8B, memory.cost_settings(CostSettings(shards=1)))
        plain = Machine().cost(QWEN3_8B, CostSettings(shards=1, checkpoint_policies=["full"] * 36))
        turns = cost.turn_seconds([1e9])
        assert cost.lockstep_seconds([1e9]) == turns[0]  # a pass that is long hides all but what is in an update's time
        shown = cost.update_seconds - plain.update_seconds + cost.lockstep_seconds([0.0]) - cost.turn_seconds([0.0])[0]
        assert shown == pytest.approx(prices.update_seconds(memory) if rows == 1 else shown, rel=0.1)
        return prices.update_seconds(memory)

    number = 8.19e9 * 4 / 51e9
    assert added(32768) == 0.0
    root = 151936 * 4096 / 8.19e9
    assert added(131072, offload_weights=True) == pytest.approx(4 * number * root, rel=1e-3)
    assert added(1, offload_weights=True) == pytest.approx(4 * number, rel=1e-3)  # layers' weights fill the bus
    forward = Machine().cost(QWEN3_8B).work_seconds(32768, 32768**2) / 3
    room = float(forward) - number * (1 - 2 * root)
    assert room > 0.5 and added(32768, offload_weights=True) == pytest.approx(4 * number - room, rel=2e-2)
    assert added(65536, offload_optimizer_states=True) == pytest.approx(2 * number * root, rel=1e-3)
    assert added(1, offload_optimizer_states=True) == pytest.approx(2 * number, rel=1e-2)
    assert added(65536, offload_optimizer_states=True) < added(4096, offload_optimizer_states=True) < 2 * number


def test_a_cost_has_copies_from_the_host() -> None:
    machine = Machine()
    plain = machine.cost(QWEN3_8B, CostSettings(shards=1))
    root = 151936 * 4096 / 8.19e9

    def cost(**settings: Any) -> Cost:
        return machine.cost(QWEN3_8B, CostSettings(shards=1, **settings))

    hidden = cost(paged_bytes=102e9)
    assert hidden.paging_seconds == pytest.approx(2.0 * (1 - root), rel=1e-3)
    assert hidden.update_seconds - plain.update_seconds == pytest.approx(2.0 * root, rel=1e-3)
    streamed = cost(streamed_bytes=51e9)
    assert streamed.streaming_seconds == pytest.approx(1 - root, rel=1e-3)
    assert streamed.micro_batch_seconds - plain.micro_batch_seconds == pytest.approx(2 * root, rel=1e-3)
    assert cost(streamed_bytes=51e9, trains_all=False).micro_batch_seconds < streamed.micro_batch_seconds
    # forward is a third of a turn
    streaming = streamed.streaming_seconds
    for work, shown in ((0.3, 2 * streaming - 0.3), (30.0, 0.0), (1.5, streaming - 0.5)):
        slowest = work - streamed.micro_batch_seconds
        assert streamed.turn_seconds([slowest]) == pytest.approx([work + shown]) or work == 0.3
        turn = hidden.turn_seconds([work])[0]
        assert hidden.lockstep_seconds([work]) == turn + max(0.0, hidden.paging_seconds - turn / 3)
    both = cost(paged_bytes=102e9, streamed_bytes=51e9)
    for work, room in ((1.5, 0.0), (6.0, 2.0 - both.streaming_seconds), (30.0, 9.0)):  # of the bus beside weights
        (turn,) = both.turn_seconds([work - both.micro_batch_seconds])
        shown = both.lockstep_seconds([work - both.micro_batch_seconds]) - turn
        assert shown == pytest.approx(max(0.0, both.paging_seconds - room))
    # sums so far come back and go again in later passes, one way at a time; there are no gradients in adapters' base,
    # and none in evaluations
    first, *others = streamed.turn_seconds([0.5] * 3)
    assert others == pytest.approx([first + streamed.gradient_seconds] * 2)
    one_way = streamed.streaming_seconds * 51 / 55
    assert streamed.gradient_seconds + streamed.streaming_seconds == pytest.approx(3 * one_way)
    assert not cost(streamed_bytes=51e9, trains_all=False).gradient_seconds
    assert not streamed.forward_only().gradient_seconds
    forward = streamed.forward_only()
    (turn,) = forward.turn_seconds([0.1])
    assert turn == pytest.approx(max(0.1 + forward.micro_batch_seconds, forward.streaming_seconds))
    assert not hidden.forward_only().paging_seconds


@pytest.mark.parametrize(
    ("name", "gpus", "gib", "host", "settings", "least"),
    [
        ("qwen3-8b", 1, 80, 256, {}, 670_000),
        ("qwen3-8b", 1, 140.4, 256, {}, 1_300_000),
        ("qwen3-8b", 1, 80, 128, {"parameter_bytes": 2}, 650_000),
        ("qwen3-32b", 8, 80, 240, {}, 3_400_000),
        ("llama-3.3-70b-instruct", 8, 80, 240, {}, 2_000_000),
    ],
)
def test_lengths_that_fit_with_weights_on_the_host(
    name: str, gpus: int, gib: float, host: int, settings: dict[str, Any], least: int
) -> None:
    """A ring holds less than an exchange of heads; without weights on the host not a third of these fits."""
    home = Layout(gpus)
    budget = MemoryBudget(device=int(GPU_SHARE * gib * GIB), host=host * GIB)
    config = preset_config(name)
    memory_settings = MemorySettings(compiled="auto", **settings)

    def choose(tokens: int, **fixed: Any) -> MemoryPlan:
        plan = plan_fixed([tokens], home, cp=gpus, cp_comm_type="p2p")
        return choose_memory(config, home, plan, memory_settings, budget, fixed=FixedMemory(**fixed))

    memory = choose(least)
    assert memory.offload_weights and memory.fits(budget)
    with pytest.raises(PlanError, match="does not fit"):
        choose(least, offload_weights=False)


# ---- frozen weights in 4 and 8 bits


def test_packed_weights_lie_as_bytes_and_are_whole_in_a_gathered_layer() -> None:
    """Of a Qwen3-8B under LoRA: 6.946e9 weights of decoder layers, 36 of them alike."""
    lora = {"parameter_bytes": 2, "lora_rank": 16, "rows": 512}
    layer = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 12288
    whole = planned("none", **lora).device
    nf4 = planned("none", frozen="nf4", **lora).device
    assert nf4.packed == 36 * layer * 0.5625 / 4 and whole.packed == 0
    assert whole.weights - nf4.weights == 36 * layer * 2 / 4
    # of the layer that is fetched ahead the bytes, of the one that runs the weights
    lora.pop("rows")
    gathered = [max(x.gathered for x in _moments(**lora, **form) if not x.logits) for form in ({}, {"frozen": "nf4"})]
    assert gathered[0] - gathered[1] == pytest.approx(layer * (2 - 0.5625), rel=1e-6)
    assert planned("none", frozen="nf4", rows=512).device == planned("none", rows=512).device  # nothing is frozen
    works = list[int]()
    for form in ({"frozen": "nf4"}, {}):  # of short documents a layer's work is the least
        needs = needs_of(64, home=Layout(1), **lora, **form)
        works.append(max(x.work for x in needs.places[0].bytes_at_moments(needs.loads, ["none"] * 36)))
    assert works[0] >= layer * 0.5625 > works[1]  # while it is unpacked
    place = needs_of(32, "p2p", lora_rank=16, frozen="nf4", mtp_layers=1).places[0]
    assert [numbers.packed for numbers in place.numbers.layers] == [layer] * 36 + [0]  # a depth is whole


def test_packed_weights_wait_on_the_host_as_bytes() -> None:
    lora: dict[str, Any] = {"parameter_bytes": 2, "lora_rank": 16, "frozen": "nf4", "home": Layout(1)}
    lora["plan"] = plan_fixed([32768], Layout(1), cp=1)
    here, there = planned("full", **lora), planned("full", offload_weights=True, **lora)
    layer = 4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 12288
    root = 2 * 151936 * 4096
    assert there.device.packed == 0 and there.host.packed == here.device.packed == 36 * layer * 0.5625
    assert there.host.weights == here.device.weights - there.device.weights == pytest.approx(root * 2, rel=1e-3)
    assert there.to_json()["host"]["packed"] == there.host.packed
    # two buffers of a layer's bytes, besides those of which the layer that runs is made
    assert there.device.gathered - here.device.gathered == pytest.approx(2 * layer * 0.5625, rel=1e-3)
    assert there.device.work == here.device.work
    keys: dict[str, Any] = {"home": Layout(1), "parameter_bytes": 2, "lora_rank": 16, "frozen": "nf4"}
    needs, streamed = needs_of(32768, **keys), needs_of(32768, offload_weights=True, **keys)
    shown = streamed.prices.streaming_seconds(streamed.under("full"))
    assert shown == pytest.approx(root / 51e9, rel=1e-3)  # copies of layers and of the head hide
    settings = CostSettings(shards=1, trains_all=False, frozen="nf4")
    costs = [Machine().cost(QWEN3_8B, one.under("full").cost_settings(settings)) for one in (needs, streamed)]
    assert costs[1].streaming_seconds == pytest.approx((36 * layer * 0.5625 + root) / 51e9, rel=1e-2)
    assert costs[1].micro_batch_seconds - costs[0].micro_batch_seconds == pytest.approx(shown, rel=1e-2)


@pytest.mark.parametrize(("config", "rows", "device", "host"), [(LLAMA_70B, 65536, 24, 70), (QWEN3_32B, 65536, 20, 64)])
def test_large_models_on_small_cards(config: Any, rows: int, device: int, host: int) -> None:
    home = Layout(1)
    plan = plan_fixed([rows], home, cp=1)
    settings = MemorySettings(parameter_bytes=2, lora_rank=16, frozen="nf4", compiled="auto")
    budget = MemoryBudget(device=device * GIB, host=host * GIB)
    memory = choose_memory(config, home, plan, settings, budget)
    assert memory.offload_weights and memory.host.packed > memory.host.weights > 0 and memory.fits(budget)
    with pytest.raises(PlanError, match="does not fit"):
        choose_memory(config, home, plan, settings, budget, fixed=FixedMemory(offload_weights=False))


def test_experts_packed_or_not_are_divided_by_ep_where_they_are_gathered() -> None:
    home = Layout(4, ep=4)
    whole, divided = planned(config=MOE), planned(config=MOE, home=home)
    assert divided.device.gathered < 0.6 * whole.device.gathered and divided.device.weights == whole.device.weights
    changes = {"config": MOE, "parameter_bytes": 2, "lora_rank": 16, "frozen": "nf4", "rows": 512}
    alone, shared = planned("none", **changes), planned("none", home=home, **changes)
    assert shared.device.packed == alone.device.packed > 0
    assert shared.device.gathered < 0.6 * alone.device.gathered
    float8 = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]}}
    stored = planned("none", **changes | {"config": MOE | float8, "frozen": "auto"})
    assert stored.device.packed == pytest.approx(alone.device.packed * 1.03125 / 0.5625, rel=1e-3)


def test_unpacking_takes_time_and_messages_are_shorter() -> None:
    needs = needs_of(8192, parameter_bytes=2, lora_rank=16)
    packed = needs_of(8192, parameter_bytes=2, lora_rank=16, frozen="nf4")
    saved = needs.prices.seconds(needs.under("full")) - packed.prices.seconds(packed.under("full"))
    machine = Machine()
    weights = 36 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 12288)
    copies = machine.weight_copy_seconds * weights * (1 - 0.5625 / 2)
    wire = SHARDING_SHARE * weights * (2 - 0.5625) / 2 / machine.sharding_bytes_per_second
    unpacked = machine.unpacking_seconds(weights * 0.5625, weights * 2)
    assert 36 * 0.15e-3 < unpacked < 36 * 0.3e-3
    assert saved == pytest.approx(2 * (copies + wire - unpacked))


@pytest.mark.parametrize(
    ("config", "gib", "least"),
    [(LLAMA_70B, 80, 120_000), (QWEN3_32B, 80, 320_000), (QWEN3_8B, 80, 650_000), (QWEN3_8B, 24, 64_000)],
)
def test_lengths_that_fit_one_gpu_in_four_bits(config: Any, gib: int, least: int) -> None:
    home = Layout(1)
    plan = plan_fixed([least], home, cp=1)
    settings = MemorySettings(parameter_bytes=2, lora_rank=16, frozen="nf4", compiled="auto")
    budget = MemoryBudget(device=int(GPU_SHARE * (gib << 30)), host=128 * GIB)
    on_device = FixedMemory(offload_weights=False)
    assert choose_memory(config, home, plan, settings, budget, fixed=on_device).device.packed > 0
    whole = replace(settings, frozen="whole")
    with pytest.raises(PlanError, match=r'does not fit .*slot\), model.frozen = "nf4", or a higher parallel.tp'):
        choose_memory(config, home, plan, whole, budget, fixed=on_device)
    with pytest.raises(PlanError, match=r"\(context.max_tokens_per_slot\), or a higher parallel.tp"):
        choose_memory(config, home, plan, settings, replace(budget, device=1 << 30))


def test_slots_of_the_same_groups_are_priced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """512 slots in four groups took minutes, as each slot priced the types of its group, slot by slot."""
    asked = list[Group]()
    fastest = Machine.fastest_type_price

    def count(machine: Machine, group: Group, *args: Any, **kwargs: Any) -> TypePrice:
        asked.append(group)
        return fastest(machine, group, *args, **kwargs)

    monkeypatch.setattr(Machine, "fastest_type_price", count)
    read = ConfigReader.read_language_model(QWEN3_8B)
    groups = tuple(
        Group(tuple(range(128 * i, 128 * i + 128)), (i,), (1024 * (i + 1),), cp_comm_type="auto") for i in range(4)
    )
    plan = Plan(512, (1024, 2048, 3072, 4096), (MicroBatch(groups),), targets=1)
    assert [plan.micro_batches[0].groups_of(slot) for slot in (0, 127, 128, 511)] == [
        ((i, groups[i]),) for i in (0, 0, 1, 3)
    ]
    loads = slot_loads([plan], read, MemorySettings(), Machine())
    assert max(load.rows for load in loads) == 32
    assert len(asked) == len(groups)
