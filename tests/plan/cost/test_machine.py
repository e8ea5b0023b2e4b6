"""Machines: prices of types against what was measured, what they follow from, padding, files, and wrong figures."""

import json
import math
import re
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint
from transformers import Qwen3Config, Qwen3ForCausalLM

from longspan import Layout, plan_fixed, plan_padded
from longspan.attention.all_to_all import HeadSplit
from longspan.cli.main import main
from longspan.config.sections import RunConfig, RunSection
from longspan.errors import ConfigError, PlanError
from longspan.plan import AttentionCall, Cost, CostSettings, Group, Machine, MicroBatch, PlanOptions, timeline
from longspan.plan.cost import cost as costs, machine as machines
from longspan.plan.cost.links import KINDS, Link
from longspan.plan.cost.machine import FORWARD_LAUNCHES, LOGIT_BYTES, find_machine_of_device
from longspan.plan.micro_batch import PARTITIONS, PartitionKind
from longspan.plan.shape.model_shape import QWEN3_8B as CONFIG, ModelShape
from longspan.plan.step_times import GroupTable
from longspan.resolve.run_cost import cost_without_model
from tests.plan.cases import MIXTURE, flops_cost

QWEN3_8B = AttentionCall(heads=32, kv_heads=8, head_dim=128)
H200 = Machine.known("H200")
SOCKETS = H200.with_link("across", bytes_per_second=2.65e9)


def group(degree: int, *lengths: int, first: int = 0) -> Group:
    return Group(tuple(range(first, first + degree)), tuple(range(len(lengths))), lengths)


def test_key_value_heads_are_sent_as_attention_deals_them() -> None:
    shapes = [(heads, kv, n) for heads in (8, 12, 24, 32) for kv in (1, 2, 3, 4, 8) for n in (1, 2, 3, 4, 6, 8, 12, 16)]
    for heads, kv_heads, members in shapes:
        if heads % kv_heads == 0 and heads % members == 0:
            copies = costs.kv_copies(heads, kv_heads, members)
            assert copies == HeadSplit(heads, kv_heads, members).kv_copies, (heads, kv_heads, members)


@pytest.mark.parametrize(
    ("members", "call", "node_size", "expected"),
    [
        # one host: heads for rows are exchanged over fast links, and whole documents make large pieces
        (group(4, 16384), QWEN3_8B, 8, "a2a"),
        (group(4, *[2048] * 8), QWEN3_8B, 8, "a2a"),
        # heads that do not divide by the members
        (group(8, 131072), replace(QWEN3_8B, heads=12, kv_heads=4), 8, "a2a+p2p (4, 2)"),
        (group(7, 131072), QWEN3_8B, 8, "all_gather"),
        # across hosts
        (group(8, 1048576), replace(QWEN3_8B, heads=9, kv_heads=9), 1, "p2p"),
        # a narrow window leaves little to send
        (group(8, 131072), replace(QWEN3_8B, window=4096), 1, "p2p"),
        (group(1, 4096), QWEN3_8B, 8, "p2p"),
    ],
)
def test_choices(members: Group, call: AttentionCall, node_size: int, expected: str) -> None:
    prices = H200.attention_prices(members, call, node_size=node_size)
    assert H200.fastest_type_price(members, call, node_size=node_size).name == expected, [*map(str, prices.values())]


@pytest.mark.parametrize(
    ("members", "call", "skew"),  # of a ring of 4: what its busiest member computes, in means of all
    [
        (group(4, 8192), QWEN3_8B, 1.75),  # rows 6144 to 8192 of a triangle: 7 of 16 parts
        (group(4, 8192), replace(QWEN3_8B, causal=False), 1.0),
        (group(4, 8192), replace(QWEN3_8B, window=1), 1.0),
        (group(4, *[2048] * 4), QWEN3_8B, 1.0),  # a document each
    ],
)
def test_contiguous_rows_are_as_slow_as_the_busiest_member(members: Group, call: AttentionCall, skew: float) -> None:
    machine = replace(H200, memory_bytes_per_second=1e20)  # nothing is merged or laid out
    computed: dict[str, dict[str, float]] = {}
    for partition in ("zigzag", "contiguous"):
        prices = machine.attention_prices(replace(members, partition=partition), call, node_size=8)
        computed[partition] = {kind: price.seconds - price.exposed for kind, price in prices.items()}
    ratios = {kind: computed["contiguous"][kind] / computed["zigzag"][kind] for kind in ("a2a", "p2p", "all_gather")}
    assert ratios == pytest.approx({"a2a": 1.0, "p2p": skew, "all_gather": skew}, rel=1e-3)


def test_all_types_are_priced_whatever_the_groups_own() -> None:
    prices = H200.attention_prices(replace(group(6, 3000), cp_comm_type="a2a"), QWEN3_8B)
    assert set(prices) == {"p2p", "all_gather", "a2a", "a2a+p2p"}
    assert prices["a2a"].seconds == math.inf and prices["a2a"].impossible == "32 query heads do not divide by 6"
    assert prices["a2a+p2p"].sizes == (2, 3)
    assert not prices["p2p"].impossible


def test_the_cost_of_a_model_prices_groups_as_its_layers() -> None:
    cost, rows = SOCKETS.cost(CONFIG), 131072
    halves = SOCKETS.cost(CONFIG, CostSettings(tp=2))
    assert halves.linear_seconds == cost.linear_seconds / 2 and halves.network and halves.network.heads == 16
    layers = SOCKETS.attention_prices(group(8, rows), QWEN3_8B, node_size=4)
    for kind, inner in (("p2p", 1), ("all_gather", 1), ("a2a", 1), ("a2a+p2p", 4)):
        seconds = float(cost.under(kind, inner).group_seconds(rows, rows**2, 8, False, together=4))
        assert seconds - cost.linear_seconds * rows / 8 == pytest.approx(36 * layers[kind].seconds, rel=1e-9)


def test_sharded_weights_are_gathered_and_summed_in_every_micro_batch_or_once_a_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(machines, "SHARDING_SHARE", 1.0)
    machine, weights = H200, ModelShape.of(CONFIG).stored_weights
    assert weights == pytest.approx(8.19e9, rel=1e-3)
    plain = machine.cost(CONFIG)

    def added(**settings: Any) -> float:
        return machine.cost(CONFIG, CostSettings(**settings)).micro_batch_seconds - plain.micro_batch_seconds

    copies, wire = 3 * weights * machine.weight_copy_seconds, weights / machine.sharding_bytes_per_second
    assert added(shards=1) == pytest.approx(copies)
    assert added(shards=4) == pytest.approx(copies + 8 * 3 / 4 * wire)  # twice 2 bytes, and sums of 4
    assert added(shards=4, reshard_after_forward=False) == pytest.approx(copies / 3 + 4 * 3 / 4 * wire)
    assert added(shards=4, reshard_after_forward=False, sync_each_batch=False) == 0
    once = [
        machine.cost(CONFIG, CostSettings(shards=4, reshard_after_forward=False, sync_each_batch=x))
        for x in (True, False)
    ]
    gathered, both = (cost.closing_seconds for cost in once)
    assert gathered == pytest.approx(copies / 3 + 2 * 3 / 4 * wire) == pytest.approx(both / 2 - 3 / 4 * wire)
    assert once[1].launch_seconds < once[0].launch_seconds and both > 0 == plain.closing_seconds
    assert added(shards=4, trains_all=False) == pytest.approx(copies * 2 / 3 + 4 * 3 / 4 * wire)
    assert added(shards=4, tp=2) == pytest.approx(added(shards=4) / 2) == pytest.approx(added(shards=4, weight_ranks=2))
    assert added(shards=16) == pytest.approx(copies + 8 * 15 / 16 * wire)  # across 40 GB/s a slot, of 8 together
    forward = machine.cost(CONFIG, CostSettings(shards=4, forward=True)).micro_batch_seconds
    assert forward == pytest.approx(copies / 3 + 2 * 3 / 4 * wire)  # launches are a forward pass's own limit


def test_rows_that_travel_to_experts_are_priced() -> None:
    shape, layers = ModelShape.of(MIXTURE), 48
    assert (shape.expert_layers, shape.routed_numbers) == (layers, layers * 8 * 2048)
    assert shape.stored_experts == layers * 128 * 3 * 2048 * 768
    plain, link = H200.cost(MIXTURE), H200.inside.exchange

    def added(**settings: Any) -> float:
        alone, shared = (H200.cost(MIXTURE, CostSettings(**settings | ep)).linear_seconds for ep in ({"ep": 1}, {}))
        return shared - alone

    once = layers * 8 * 2048 * 2 * 3 / 4 / link.bytes_per_second  # 2 bytes, to 3 slots of 4
    assert added(ep=4) == pytest.approx(4 * once)
    assert added(ep=4, checkpoint_policies="full") == pytest.approx(6 * once)
    assert added(ep=4, checkpoint_policies=("selective",) * 24) == pytest.approx(5 * once)
    assert added(ep=4, forward=True) == pytest.approx(2 * once)
    assert added(ep=4, tp=2) == pytest.approx(2 * once)  # each rank of a slot sends half of its rows
    far = layers * 8 * 2048 * 2 * 8 / 16 / H200.across.exchange.bytes_per_second  # hosts of 8: half of the rows leave
    assert added(ep=16) == pytest.approx(4 * far)
    waits = H200.cost(MIXTURE, CostSettings(ep=4)).micro_batch_seconds - plain.micro_batch_seconds
    assert waits == pytest.approx(4 * layers * link.latency)
    dense = H200.cost(CONFIG, CostSettings(ep=4))
    assert dense == H200.cost(CONFIG)


def test_a_rank_gathers_and_updates_its_own_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machines, "SHARDING_SHARE", 1.0)
    machine, shape = H200, ModelShape.of(MIXTURE)
    dense, experts = shape.stored_weights - shape.stored_experts, shape.stored_experts

    def gathers(**settings: Any) -> float:
        cost = machine.cost(MIXTURE, CostSettings(**settings))
        waits = machine.cost(MIXTURE, CostSettings(**settings | {"shards": 0})).micro_batch_seconds
        return cost.micro_batch_seconds - waits

    def taken(dense: float, width: float, experts: float, expert_width: float) -> float:
        sent = dense * (width - 1) / width + experts * (expert_width - 1) / expert_width
        copies = 3 * (dense + experts) * machine.weight_copy_seconds
        return copies + 8 * sent / machine.sharding_bytes_per_second

    assert gathers(shards=8) == pytest.approx(taken(dense, 8, experts, 8))
    assert gathers(shards=8, ep=4) == pytest.approx(taken(dense, 8, experts / 4, 2))
    assert gathers(shards=8, ep=8) == pytest.approx(taken(dense, 8, experts / 8, 1))  # nothing of experts travels
    assert gathers(shards=4, ep=2, weight_ranks=2) == pytest.approx(taken(dense / 2, 4, experts / 2, 4))
    ends = {ep: H200.cost(MIXTURE, CostSettings(shards=8, ep=ep)).update_seconds for ep in (1, 4, 8)}
    assert len({round(seconds, 12) for seconds in ends.values()}) == 1  # a rank's part is as large


def test_a_step_ends_with_the_optimizer() -> None:
    weights, seconds = ModelShape.of(CONFIG).stored_weights, machines.UPDATE_BYTES / H200.memory_bytes_per_second
    ends = {n: H200.cost(CONFIG, CostSettings(shards=n)).update_seconds - H200.micro_batch_seconds for n in (0, 1, 4)}
    assert ends == pytest.approx({0: weights * seconds, 1: weights * seconds, 4: weights * seconds / 4})
    twice = H200.cost(CONFIG, CostSettings(shards=8, dp_replicate=2)).update_seconds - H200.micro_batch_seconds
    assert twice == pytest.approx(weights / 8 * (seconds + 4 / 40e9))  # each copy sends the half of its sums, twice
    assert H200.cost(CONFIG, CostSettings(trains_all=False)).update_seconds == H200.micro_batch_seconds
    cost = H200.cost(CONFIG)
    plan, bare = (plan_fixed([4096] * 8, Layout(4), 2, cost=c) for c in (cost, replace(cost, update_seconds=0.0)))
    assert plan.predicted_seconds - bare.predicted_seconds == pytest.approx(cost.update_seconds)
    assert plan.lower_bound_seconds - bare.lower_bound_seconds == pytest.approx(cost.update_seconds)
    plan, bare = (p.reprice(replace(p.cost, stages=2)) for p in (plan, bare))
    assert plan.predicted_seconds - bare.predicted_seconds == pytest.approx(cost.update_seconds)


def test_rows_without_a_target_have_no_logits() -> None:
    every, half = (H200.cost(CONFIG, CostSettings(target_share=share)) for share in (1.0, 0.5))
    head = 151936 * (6 * 4096 / H200.product_flops_per_second + machines.LOGIT_BYTES / H200.memory_bytes_per_second)
    assert every.linear_seconds - half.linear_seconds == pytest.approx(head / 2)
    assert every.forward_only().linear_seconds - half.forward_only().linear_seconds == pytest.approx(head / 6)
    frozen, none = (H200.cost(CONFIG, CostSettings(trains_all=False, target_share=share)) for share in (1.0, 0.0))
    head -= 151936 * 2 * 4096 / H200.product_flops_per_second
    assert frozen.linear_seconds - none.linear_seconds == pytest.approx(head)


def test_known_machines() -> None:
    assert not H200.assumed
    cards = ("l40s", "l4", "a10", "rtx-a6000", "rtx-3090", "rtx-4090", "RTX-5090", "RTX-PRO-6000")
    for name in ("A100-40", "a100-80", "h100", "B200", "B300", "gh200", *cards):
        machine = Machine.known(name)
        assert machine.assumed and machine.device.lower() == name.lower()
        assert machine == Machine.known(name.replace("-", "")) == Machine.known(name.replace("-", " "))
    assert Machine.known("b200").product_flops_per_second > H200.product_flops_per_second
    names: dict[str, str | None] = {
        "H200 NVL": "H200",
        "GB200": "B200",
        "GH200 480GB": "GH200",
        "L4": "L4",
        "L40": None,
        "L40S": "L40S",
        "A10": "A10",
        "A10G": None,
        "A100-SXM4-40GB": "A100-40",
        "A100 80GB PCIe": "A100-80",
        "A1000": None,
    }
    names |= {"GeForce RTX 4090": "RTX-4090", "GeForce RTX 4090 Laptop GPU": None, "RTX 6000 Ada Generation": None}
    names |= {"RTX A6000": "RTX-A6000", "GeForce RTX 3090": "RTX-3090", "RTX 4000 Ada Generation": None}
    names |= {"RTX PRO 6000 Blackwell Server Edition": "RTX-PRO-6000"}
    for device, expected in names.items():
        known = find_machine_of_device(f"NVIDIA {device}")
        assert (known and known.device) == expected, device
    listed = "H200, A100-40, A100-80, H100, B200, B300, GH200, L40S, L4, A10, RTX-A6000, RTX-3090, RTX-4090, RTX-5090, "
    with pytest.raises(PlanError, match=f"no figures of 'MI300X'; known are {listed}RTX-PRO-6000, or"):
        Machine.known("MI300X")
    for name in ("t4", "V100", "rtx 2080 ti"):
        with pytest.raises(PlanError, match="has no products in bfloat16, in which runs on GPUs compute"):
            Machine.known(name)
    spellings = {
        "4090": "RTX-4090",
        "a6000": "RTX-A6000",
        "NVIDIA GeForce RTX 3090": "RTX-3090",
        "pro6000": "RTX-PRO-6000",
    }
    assert {name: Machine.known(name).device for name in spellings} == spellings
    # dense products in bfloat16 and bytes/s of memory, by data sheet, over those of an H200; GiB
    sheets = {"l4": (121, 0.3, 22), "a10": (125, 0.6, 22), "a6000": (154.8, 0.768, 47), "3090": (71, 0.936, 24)}
    for name, (tflops, speed, gib) in sheets.items():
        card = Machine.known(name)
        assert card.product_flops_per_second == pytest.approx(700e12 * tflops / 989), name
        assert card.memory_bytes_per_second == pytest.approx(4e12 * speed / 4.8), name
        assert card.memory_bytes == gib << 30, name
    memory = {name: Machine.known(name).memory_bytes >> 20 for name in ("h200", "H100", "a100-40", "rtx5090")}
    assert memory == {"h200": 143771, "H100": 80 << 10, "a100-40": 40 << 10, "rtx5090": 32 << 10}
    # a card without NVLink: dense products in bfloat16, memory, and half of an H200's bus
    card = Machine.known("rtx4090")
    assert card.product_flops_per_second == pytest.approx(700e12 * 165.2 / 989)
    assert card.memory_bytes_per_second == pytest.approx(4e12 * 1.008 / 4.8)
    assert (card.host_copy_bytes_per_second, card.inside.point.bytes_per_second) == (27.5e9, 12.8e9)
    assert Machine.known("gh200").node_size == 1


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"machine": 1}, "it is version 1 of a machine, and this longspan reads 2; measure again"),
        ({"device": None, "surplus": 1}, "missing or unknown: surplus"),
        ({"memory_bytes_per_second": 0.0}, "memory_bytes_per_second of a machine is 0.0; give a finite number above 0"),
        ({"memory_bytes": -1}, "memory_bytes of a machine is -1"),
        ({"half_speed_rows": -1.0}, "half_speed_rows of a machine is -1.0; give a finite number of at least 0"),
        ({"inside": {"exchange": []}}, "a link is an object with seconds of a message and bytes a second for each of"),
        ({"inside": {kind: [0.0, 0.0] for kind in KINDS}}, "a wire of 0.0 s a message and 0.0 bytes/s; give"),
    ],
)
def test_wrong_files(change: dict[str, object], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Machine.from_json(H200.to_json() | change)
    with pytest.raises(PlanError, match="level of a link is 'between'; use one of inside, across"):
        H200.with_link("between", bytes_per_second=1.0)  # pyright: ignore[reportArgumentType]


def test_products_in_float8_take_less_but_for_gradients_of_weights() -> None:
    shape = ModelShape.of(CONFIG)
    faster = (shape.weights - 151936 * 4096) * (1 / 700e12 - 1 / 1350e12)

    def saved(**settings: Any) -> float:
        seconds = [H200.cost(CONFIG, CostSettings(float8=x, **settings)).linear_seconds for x in ("", "rowwise")]
        return seconds[0] - seconds[1]

    assert saved() == pytest.approx(4 * faster) == pytest.approx(saved(trains_all=False))
    assert saved(forward=True) == pytest.approx(2 * faster)
    again = shape.recomputed_weights / shape.weights
    assert saved(checkpoint_policies="full") == pytest.approx((4 + 2 * again) * faster)


@pytest.mark.parametrize(
    ("settings", "less"),
    [
        ({"compiled": "layers"}, True),
        ({"compiled": "auto"}, True),
        ({"compiled": "auto", "weight_ranks": 2}, False),  # not under tensor parallelism
    ],
)
def test_compiled_layers_make_fewer_passes_over_memory(settings: dict[str, Any], less: bool) -> None:
    shape, bare = ModelShape.of(CONFIG), {name: value for name, value in settings.items() if name != "compiled"}
    before, after = (H200.cost(CONFIG, CostSettings(**values)) for values in (bare, settings))
    saved = (1 - machines.COMPILED_SHARE) * shape.layers * shape.hidden * machines.LAYER_BYTES / 4e12
    assert before.linear_seconds - after.linear_seconds == pytest.approx(saved if less else 0.0)
    assert before.forward is not None and after.forward is not None
    assert (after.forward.linear_seconds < before.forward.linear_seconds) == less
    narrow = CONFIG | {"hidden_size": 512}
    plain, chosen, named = (H200.cost(narrow, CostSettings(compiled=word)) for word in ("none", "auto", "layers"))
    assert chosen == plain and named.linear_seconds < plain.linear_seconds  # by name only


def test_the_host_launches_layers_groups_and_documents() -> None:
    cost, layers = H200.cost(CONFIG, CostSettings(shards=2)), 36
    for shards, share in ((2, 0.54 + 0.3), (1, 0.54 + 0.6)):  # FSDP2 in every micro-batch
        launches = H200.cost(CONFIG, CostSettings(shards=shards)).launch_seconds
        assert launches == pytest.approx(share * layers * H200.layer_seconds)
    # attention is replayed in a host
    for shards, copies, share in ((2, 1, 0.54), (1, 1, 0.54), (16, 1, 1), (8, 2, 1), (0, 1, 1)):
        settings = CostSettings(shards=shards, dp_replicate=copies, free=shards > 0)
        for machine, part in ((H200, share), (replace(H200, world=2), 1)):  # a machine that was measured knows it
            launches = machine.cost(CONFIG, settings).launch_seconds
            assert launches == pytest.approx(part * layers * H200.layer_seconds)
    assert cost.forward_only().launch_seconds == pytest.approx(0.26 * layers * H200.layer_seconds)
    few = [MicroBatch((Group((0,), (0, 1), (8, 8)), Group((1,), (2,), (8,))))]
    more = [MicroBatch((Group((0,), (0,), (8,)), Group((0,), (1,), (8,)), Group((1,), (2,), (8,))))]
    seconds = [timeline(batches, 2, cost).step_seconds - cost.update_seconds for batches in (few, more)]
    launches = [cost.launch_seconds + layers * (n * H200.group_seconds + 2 * H200.document_seconds) for n in (1, 2)]
    assert seconds == pytest.approx(launches)
    long = [MicroBatch((Group((0,), (0,), (65536,)), Group((1,), (1,), (8,))))]
    assert timeline(long, 2, cost).step_seconds == timeline(long, 2, replace(cost, launch_seconds=0.0)).step_seconds


LENGTHS = [775, 1578, 24421, 5467, 177, 21417, 24576, 118]


def real_rows(of: Group) -> list[int]:
    real = np.concatenate([np.arange(pad) < n for n, pad in zip(of.lengths, of.laid_out, strict=True)])
    return [int(real[of.shares.rows(member)].sum()) for member in range(of.degree)]


def without_real_rows(cost: Cost) -> Cost:
    values = {name: value for name, value in cost.to_json().items() if name not in ("real_row_seconds", "forward")}
    return Cost.from_json(json.loads(json.dumps(values)))


@pytest.mark.parametrize("partition", PARTITIONS)
@pytest.mark.parametrize("degree", [1, 3, 8])
@pytest.mark.parametrize("lengths", [(100, 300), (1,), (400, 400), (399, 7, 250)])
def test_the_busiest_slot_computes_real_rows(partition: PartitionKind, degree: int, lengths: tuple[int, ...]) -> None:
    group = Group(tuple(range(degree)), tuple(range(len(lengths))), lengths, partition=partition, pad_to=400)
    (skipped,) = GroupTable([MicroBatch((group,))]).skipped
    busiest = 400 * len(lengths) / degree - skipped
    assert busiest == pytest.approx(max(real_rows(group)), abs=len(lengths))  # shares are not rounded to whole rows
    assert sum(lengths) / degree <= busiest * (1 + 1e-12)


@pytest.mark.parametrize(("config", "least"), [(MIXTURE, 0.1), (CONFIG, 0.03)], ids=["mixture", "dense"])
def test_a_padded_plan_costs_what_real_rows_make_experts_and_the_head_do(config: dict[str, Any], least: float) -> None:
    cost = replace(H200.cost(config), launch_seconds=0.0)  # the host takes as long for padding
    options = PlanOptions(max_tokens_per_slot=6144, heads=32, cost=cost)
    plan = plan_padded(LENGTHS, Layout(4), 4, options=options)
    padding = sum(max(group.laid_out) / group.degree - max(real_rows(group)) for group in plan.groups)
    all_rows = plan_padded(LENGTHS, Layout(4), 4, options=replace(options, cost=without_real_rows(cost)))
    saved = all_rows.predicted_seconds - plan.predicted_seconds
    assert saved == pytest.approx(cost.real_row_seconds * padding, rel=1e-3)
    assert all_rows.micro_batches == plan.micro_batches and saved > least * plan.predicted_seconds
    assert plan.predicted_seconds > plan.lower_bound_seconds


def test_what_real_rows_take_alone_follows_the_rows() -> None:
    shape, plain = ModelShape.of(MIXTURE), H200.cost(MIXTURE)
    weights, passes = shape.expert_weights, shape.logits * LOGIT_BYTES / H200.memory_bytes_per_second
    products = 6 * shape.hidden * shape.logits / H200.product_flops_per_second
    experts = 6 * weights / H200.expert_flops_per_second

    def share(**settings: Any) -> float:
        return H200.cost(MIXTURE, CostSettings(**settings)).real_row_seconds

    assert plain.real_row_seconds == pytest.approx(experts + products + passes)
    assert share(target_share=0.25) == pytest.approx(experts + (products + passes) / 4)
    assert share(forward=True) == pytest.approx(plain.real_row_seconds / 3) == plain.forward_only().real_row_seconds
    assert share(trains_all=False) == pytest.approx((experts + products) * 4 / 6 + passes)
    assert share(tp=2) == pytest.approx(plain.real_row_seconds / 2)
    assert plain.real_row_seconds < share(checkpoint_policies="full") < plain.real_row_seconds * 4 / 3
    assert 0 < share(float8="rowwise") < plain.real_row_seconds
    travel = H200.cost(MIXTURE, CostSettings(ep=4)).linear_seconds - plain.linear_seconds
    assert share(ep=4) - plain.real_row_seconds == pytest.approx(travel)
    assert Cost.from_json(plain.to_json()) == plain and without_real_rows(plain).real_row_seconds == 0.0
    by_flops = flops_cost(MIXTURE, tflops=400)
    assert by_flops.real_row_seconds == pytest.approx(6 * weights / 4e14)
    assert all(c.real_row_seconds < c.linear_seconds for c in (plain, plain.forward_only(), by_flops))


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        (None, "holds no machine: No such file or directory"),
        ("folder", "is a folder"),
        ("{", "holds no machine: Expecting property name"),
        (b"\xff", "holds no machine: 'utf-8' codec"),
        ('{"ring_bytes": 7}', "holds no machine: it is version None of a machine"),  # the cost of one model
        ("[]", "holds no machine: it is version None of a machine"),
    ],
)
def test_a_file_without_a_machine_is_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str | bytes | None, complaint: str
) -> None:
    path = tmp_path / "cost.json"
    if text == "folder":
        path.mkdir()
    elif text is not None:
        path.write_bytes(text if isinstance(text, bytes) else text.encode())
    advice = "; give the file that `longspan bench calibrate --out FILE.json` writes for this machine"
    with pytest.raises(ConfigError, match=rf"run\.machine {path} {re.escape(complaint)}.*{advice}$"):
        cost_without_model(RunConfig(run=RunSection(machine=str(path))))
    assert main(["plan", "--slots", "2", "--same", "2x8", "--machine", str(path)]) == 2
    said = capsys.readouterr().err
    assert said.startswith(f"error: --machine {path} {complaint}") and said.endswith(f"{advice}\n")


def test_a_machine_is_read_back_by_file_and_by_name(tmp_path: Path) -> None:
    assert Machine.from_json(SOCKETS.to_json()) == SOCKETS
    assert Cost.from_json(SOCKETS.cost(CONFIG).to_json()) == SOCKETS.cost(CONFIG)
    path = tmp_path / "machine.json"
    machine = Machine(inside=Link.of(2e-5, 1e11), assumed_parts=("across",), world=4, date="2026-01-01")
    path.write_text(json.dumps(machine.to_json()))
    assert machines.read_machine(str(path), "--machine") == replace(machine, source=str(path))
    assert machines.read_machine("A100-80", "--machine") == Machine.known("a100-80")
    path.write_text(json.dumps(machine.to_json() | {"machine": 1}))
    with pytest.raises(
        ConfigError, match=r"--machine \S+ .*is version 1 of a machine, and this longspan reads 2; measure"
    ):
        machines.read_machine(str(path), "--machine")


def test_packed_weights_travel_as_bytes_and_are_unpacked_in_each_gather() -> None:
    """Of a Qwen3-8B over 4 slots: in two gathers of a micro-batch, in one of a forward pass, and once a step."""
    weights = 36 * (4096 * (2 * 4096 + 2 * 1024) + 3 * 4096 * 12288)
    unpacked = H200.unpacking_seconds(weights * 0.5625, weights * 2)
    copies = H200.weight_copy_seconds * weights * (0.5625 / 2 - 1)
    wire = weights * (0.5625 - 2) * 3 / 4 / H200.sharding_bytes_per_second

    def whole_and_packed(**settings: Any) -> tuple[Cost, Cost]:
        whole = CostSettings(trains_all=False, shards=4, **settings)
        return H200.cost(CONFIG, whole), H200.cost(CONFIG, replace(whole, frozen="nf4"))

    shown = copies + unpacked + machines.SHARDING_SHARE * wire
    whole, packed = whole_and_packed()
    assert packed.micro_batch_seconds - whole.micro_batch_seconds == pytest.approx(2 * shown)
    hidden = 2 * (1 - machines.SHARDING_SHARE) * wire
    assert packed.sharding_seconds - whole.sharding_seconds == pytest.approx(hidden)
    forward, packed_forward = whole.forward_only(), packed.forward_only()
    assert packed_forward.micro_batch_seconds - forward.micro_batch_seconds == pytest.approx(shown)
    whole, packed = whole_and_packed(reshard_after_forward=False)
    assert packed.closing_seconds - whole.closing_seconds == pytest.approx(shown)
    assert H200.cost(CONFIG, CostSettings(frozen="nf4")) == H200.cost(CONFIG, CostSettings())


class _CountedLaunches(TorchDispatchMode):
    """Counts operations that compute: on a GPU each is a kernel or more."""

    count = 0
    LEFT_OUT = ("empty", "detach", "arange", "alias", "scalar")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns)
        self.count += not is_view and not any(name in func._schema.name for name in self.LEFT_OUT)
        return func(*args, **(kwargs or {}))


def test_a_forward_pass_has_about_the_share_of_launches_that_is_priced() -> None:
    """docs/planning.md has the numbers, of an uncompiled Qwen3 layer under torch's attention."""

    def launches(layers: int, *, backward: bool, recompute: bool = False) -> int:
        sizes = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1}
        config = Qwen3Config(vocab_size=16, head_dim=16, num_hidden_layers=layers, **sizes)
        model: Any = Qwen3ForCausalLM(config)
        for layer in model.model.layers if recompute else ():
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
        ids = torch.arange(16)[None]
        with _CountedLaunches() as counted, torch.set_grad_enabled(backward):
            loss = model(input_ids=ids, position_ids=ids, labels=ids, use_cache=False).loss
            if backward:
                loss.backward()
        return counted.count

    def of_a_layer(**kind: bool) -> float:
        return (launches(3, **kind) - launches(1, **kind)) / 2

    forward = of_a_layer(backward=False)
    assert forward / of_a_layer(backward=True) == pytest.approx(0.35, abs=0.02)
    assert forward / of_a_layer(backward=True, recompute=True) == pytest.approx(0.27, abs=0.02)
    assert pytest.approx(0.27, abs=0.02) == FORWARD_LAUNCHES
