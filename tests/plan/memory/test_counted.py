"""The plan of memory beside bytes of real models, counted on a CPU: what layers keep within 2 %, peaks within 10 %."""

import itertools
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from longspan.attention import all_to_all
from longspan.comm import World
from longspan.comm.channel import Channel
from longspan.layout import Layout
from longspan.model.adapters.new_adapter import NewAdapter, add_lora
from longspan.model.exactness.small_copies import shrink_configuration
from longspan.model.fsdp_params import fsdp_modules, fsdp_param_groups
from longspan.model.layers import decoder_layers
from longspan.plan import Machine, MemoryNeeds, MemorySettings, Plan, messages, plan_fixed
from longspan.plan.memory import layer_table
from longspan.plan.memory.layer_table import LayerTable, slot_loads
from longspan.plan.memory.model_numbers import ModelNumbers
from longspan.plan.messages import count_exchange_slices
from longspan.plan.shape.config_reader import ConfigReader
from longspan.plan.shape.key_choices import read_key_choice
from longspan.plan.shape.layers import attention_widths, layer_kinds
from longspan.testing import backend, run_ranks
from longspan.train import run_step
from tests.model.stock import random_model
from tests.plan.memory.counted import (
    EXPERTS,
    HYBRIDS,
    Counted,
    SavedBytes,
    config_of,
    count_prepared,
    count_step,
    prepared_model,
    use_kernel_gates,
    use_kernel_norms,
)

ROWS = 256
CLOSE, PEAK = 0.02, 0.1
SETTINGS = MemorySettings(parameter_bytes=2, gpu=False, shard_parameters=False)
_ONCE = 40  # bytes of a row: indices of runs and rows


@pytest.fixture(scope="module")
def world() -> Iterator[World]:
    with World(Layout(1), backend=backend()) as world:
        yield world


def _kept(needs: MemoryNeeds, word: Any, layers: int) -> float:
    (place,), (load,) = needs.places, needs.loads
    return sum(layer.kept for layer in place.layer_bytes(load, word)[:layers])


def _head_bytes(needs: MemoryNeeds) -> float:
    """The gradient of the head, which waits until the end."""
    return needs.places[0].numbers.head.trained * 2


def _compare(
    world: World, family: str, word: str, *, settings: MemorySettings = SETTINGS, rows: int = ROWS, **how: Any
) -> tuple[MemoryNeeds, Counted]:
    config, plan = config_of(family), plan_fixed([rows], world.home, cp=1)
    counted = count_step(config, plan, world, activation_checkpointing=word, **how)
    return MemoryNeeds.of(config.to_dict(), world.home, plan, settings), counted


def _check_kept(needs: MemoryNeeds, counted: Counted, word: str, once: int = 0) -> None:
    """All layers within 2 %; `once` are bytes of a row that are made once for all of them, or are gone at the end."""
    kept = _kept(needs, word, len(counted.kept))
    assert abs(kept - sum(counted.kept)) <= CLOSE * sum(counted.kept) + once * needs.loads[0].rows


def _peak(needs: MemoryNeeds, word: str) -> int:
    """Bytes at the worst moment, without shards of weights and states."""
    device = needs.under(word).device
    return device.total - device.weights - device.states - device.communicators


@pytest.mark.parametrize(
    ("family", "word"),
    [
        *((f, "none") for f in ("qwen3", "gpt-oss", "bamba", "deepseek-v3")),
        *(pytest.param(f, "none", marks=pytest.mark.whole) for f in ("gemma3", "qwen3-moe", "qwen3-next")),
        ("qwen3", "selective"),
    ],
)
def test_layers_keep_what_is_planned(world: World, family: str, word: str) -> None:
    """Daily of one of each kind of layers; tests below have gemma3, qwen3-moe and qwen3-next."""
    needs, counted = _compare(world, family, word)
    once = _ONCE * (family in EXPERTS)
    if word == "none":  # the last layer's input is gone
        once = _ONCE + needs.places[0].hidden_row_bytes
    _check_kept(needs, counted, word, once)
    assert abs(_peak(needs, word) / counted.most - 1) <= PEAK


@pytest.mark.parametrize(
    ("family", "word"),
    [
        ("minimax-m3", "none"),
        ("deepseek-v3.2", "selective"),
        ("glm-5", "full"),
        *(pytest.param("minimax-m3", word, marks=pytest.mark.whole) for word in ("selective", "full")),
        *(pytest.param("deepseek-v3.2", word, marks=pytest.mark.whole) for word in ("none", "full")),
        *(pytest.param("glm-5", word, marks=pytest.mark.whole) for word in ("none", "selective")),
    ],
)
def test_layers_whose_rows_choose_keep_what_is_planned(world: World, family: str, word: str) -> None:
    """Keys by latents, one choice for two layers, and blocks for each key/value head; 256 rows choose among them.
    Angles of rotation are made once."""
    needs, counted = _compare(world, family, word)
    once = 2 * _ONCE + (2 * _ONCE + needs.places[0].hidden_row_bytes) * (word == "none")
    _check_kept(needs, counted, word, once)
    assert abs(_peak(needs, word) / counted.most - 1) <= PEAK
    if word == "none":  # where no document is so long that rows choose, no choice is kept
        few = MemoryNeeds.of(config_of(family).to_dict(), world.home, plan_fixed([16] * 16, world.home, 1), SETTINGS)
        assert _kept(few, word, 2) < _kept(needs, word, 2)


@pytest.mark.parametrize("word", ["full", *(pytest.param(w, marks=pytest.mark.whole) for w in ("none", "selective"))])
def test_stacks_that_run_several_times_keep_what_is_planned(world: World, word: str) -> None:
    """Of the low one's six runs three have gradients, and all of the high one's two. The last norm behind a stack comes
    after what is counted."""
    needs, counted = _compare(world, "hrm", word)
    (place,) = needs.places
    _check_kept(needs, counted, word, _ONCE + 2 * place.hidden_row_bytes)
    assert abs(_peak(needs, word) / counted.most - 1) <= PEAK
    runs = [(kind.runs, kind.kept_runs) for kind in place.numbers.kinds]
    assert runs == [(6, 3)] * 2 + [(2, 2)] * 2


@pytest.mark.parametrize(
    ("family", "word"),
    [
        ("deepseek-v4", "none"),
        ("qwen4-exp", "full"),
        *(pytest.param("deepseek-v4", word, marks=pytest.mark.whole) for word in ("selective", "full")),
        *(pytest.param("glm-5-next", word, marks=pytest.mark.whole) for word in ("none", "selective", "full")),
        *(pytest.param("qwen4-exp", word, marks=pytest.mark.whole) for word in ("none", "selective")),
        *(pytest.param("glm-5-next", word, marks=pytest.mark.whole) for word in ("none", "full")),
    ],
)
def test_layers_of_several_streams_keep_what_is_planned(world: World, family: str, word: str) -> None:
    """Their inputs are four times as wide. Rows choose pools and entries, whose indices and angles are made once."""
    needs, counted = _compare(world, family, word)
    (place,) = needs.places
    once = 2 * _ONCE + (2 * _ONCE + place.row_bytes_between_layers) * (word == "none")
    _check_kept(needs, counted, word, once)
    assert place.row_bytes_between_layers == 4 * place.hidden_row_bytes
    assert abs(_peak(needs, word) / counted.most - 1) <= PEAK


@pytest.mark.parametrize("family", ["minimax-m3", "deepseek-v3.2", "glm-5"])
def test_parameters_of_layers_whose_rows_choose_are_counted_to_the_number(world: World, family: str) -> None:
    """Indexers and norms of heads among them; the optimizer has states for all."""
    config = config_of(family)
    numbers = ModelNumbers.from_configuration(config.to_dict(), world.home, SETTINGS)
    layers = decoder_layers(random_model(config, torch.float32)).values()
    assert [layer.whole for layer in numbers.layers] == [sum(x.numel() for x in m.parameters()) for m in layers]
    assert [layer.trained for layer in numbers.layers] == [layer.whole for layer in numbers.layers]


@pytest.mark.parametrize("family", ["minimax-m3", "deepseek-v3.2", "glm-5-next", "qwen4-exp", "deepseek-v4"])
@pytest.mark.parametrize("rows", [ROWS, pytest.param(16, marks=pytest.mark.whole)])
def test_attention_of_every_kind_saves_what_is_planned(world: World, family: str, rows: int) -> None:
    """Keys, pools by means and by gates, blocks, and entries of both kinds, by what autograd saves in the modules that
    attend, but for angles of rotation, which are made once for all layers, and indices of rows."""
    config, plan = config_of(family), plan_fixed([rows], world.home, cp=1)
    prepared, documents = prepared_model(config, plan, world, None, 0, {"activation_checkpointing": "none"})
    run_step(prepared, plan, documents, world)
    prepared.zero_grad(set_to_none=True)
    read = ConfigReader.read_language_model(config)
    layers = [*zip(decoder_layers(prepared).values(), layer_kinds(read), strict=True)]
    attending = [(layer.self_attn, kind) for layer, kind in layers if kind.attention]
    counted = SavedBytes(prepared, [module for module, _ in attending])
    saved = counted.count(lambda: run_step(prepared, plan, documents, world))
    (load,) = slot_loads([plan], read, SETTINGS, Machine())
    table = LayerTable(read, SETTINGS, load)
    for (_, kind), found in zip(attending, saved, strict=True):
        planned = table.attention_part(kind).saved
        assert 0 <= found - planned <= CLOSE * found + 3 * _ONCE * rows, kind


SENT = (("all_gather", "zigzag"), ("p2p", "zigzag"), ("all_gather", "contiguous"))


def _sent_over_ranks(rank: int, family: str) -> dict[str, dict[str, int]]:
    """Bytes that a rank of two receives of the other in a step, by what they are, of each type and partition."""
    found = dict[str, dict[str, int]]()
    with pytest.MonkeyPatch.context() as monkeypatch, World(Layout(2), backend="gloo") as world:
        plans = [plan_fixed([ROWS], world.home, cp=2, cp_comm_type=kind, partition=part) for kind, part in SENT]
        model, documents = prepared_model(
            *(config_of(family), plans[0], world, None, 0), {"activation_checkpointing": "selective"}
        )
        received = Counter[str]()

        def count(name: str) -> None:
            original = getattr(Channel, name)

            def call(channel: Channel, x: torch.Tensor, counts: Any, *arguments: Any) -> Any:
                rows = arguments[0] if name == "all_to_all_rows" else counts
                others = sum(rows) - rows[channel.index]
                received[arguments[-1]] += others * x.shape[1:].numel() * x.element_size()
                return original(channel, x, counts, *arguments)

            monkeypatch.setattr(Channel, name, call)

        count("all_gather_rows")
        count("all_to_all_rows")
        for plan, words in zip(plans, SENT, strict=True):
            run_step(model, plan, documents, world)
            received.clear()
            run_step(model, plan, documents, world)
            found[" ".join(words)] = dict(received)
    return found


@pytest.mark.whole
@pytest.mark.parametrize(
    ("family", "before"),  # rows before a run, of all layers: those of pools, of entries and of the indexer's
    [
        ("minimax-m3", 0),
        ("deepseek-v4", 7 * 2 * 64 + 7 * 4 * 64 + 7 * 4 * 16),
        ("deepseek-v3.2", 0),
        ("qwen4-exp", 3 * (32 + 2 * 32)),
        ("glm-5-next", 3 * (2 * 16 + 1)),
    ],
)
def test_what_travels_is_what_is_priced(family: str, before: int) -> None:
    """Of two ranks with half of the rows each, under selective recomputation: keys and values, or entries, of the other
    in both passes with gradients in float32, and index keys or pools whenever rows choose. A ring's blocks are not
    counted here."""
    read = ConfigReader.read_language_model(config_of(family))
    rows, choices = ROWS // 2, [(read_key_choice(read, kind.attention), kind) for kind in layer_kinds(read)]
    made = [(choice, kind) for choice, kind in choices if choice]
    full = sum(kind.attention == "full_attention" for _, kind in choices)
    width = sum(2 * choice.key_width for choice, _ in made) + 2 * full * attention_widths(read).key
    index = sum(choice.size / choice.scored for choice, kind in made if kind.chooses)
    runs = 1  # of a rank's two the one that begins a document, or goes on from the other run, needs none
    for found in run_ranks(_sent_over_ranks, 2, family):
        for words, received in found.items():
            indices = received.get("index keys", 0)
            if any(choice.form in ("pools", "entries") for choice, _ in made):
                indices += received.get("entries", 0)
            assert indices == 2 * index * 2 * rows, words  # forward, and again where a layer runs again
            entries = any(choice.form == "entries" for choice, _ in made)
            if "all_gather" in words or entries:
                assert received["attention all-gather backward"] == width * 2 * rows, words
                assert received["attention all-gather backward, gradients"] == width * 4 * rows, words
            if "zigzag" in words:
                times = received.get("rows before a run, entries", 0) / max(1, before * 2 * runs)
                assert times in ((1.0, 2.0) if before else (0.0,)), words


@pytest.mark.parametrize(
    "family",
    [
        "lfm2",
        "olmoe",
        *(
            pytest.param(x, marks=pytest.mark.whole)
            for x in (
                "deepseek_v2",
                "glm4_moe_lite",
                "hunyuan_v1_dense",
                "kimi_linear",
                "longcat_flash",
                "mellum",
                "minimax_m2",
                "sarvam_mla",
                "youtu",
            )
        ),
    ],
)
def test_layers_of_a_family_keep_what_its_row_says(world: World, family: str) -> None:
    """By a small copy: norms of heads and others that no configuration names. Daily of a hybrid and of experts."""
    if family not in CONFIG_MAPPING:
        pytest.skip(f"transformers {transformers.__version__} has no {family}")
    config, plan = shrink_configuration(CONFIG_MAPPING[family]()), plan_fixed([ROWS], world.home, cp=1)
    counted = count_step(config, plan, world, activation_checkpointing="none")
    needs = MemoryNeeds.of(config.to_dict(), world.home, plan, SETTINGS)
    _check_kept(needs, counted, "none", _ONCE + needs.places[0].hidden_row_bytes)


def family_plan(home: Layout, cp: int, rows: int = ROWS, **options: Any) -> Plan:
    """A prefix of half the rows, and 8 documents that continue it."""
    branch = rows // 16
    lengths = [*[branch] * 8, rows - 8 * branch]
    return plan_fixed(lengths, home, cp, parents=[8] * 8 + [-1], targets=8 * (branch - 1), **options)


@pytest.mark.parametrize(
    ("family", "word"),
    [
        pytest.param("qwen3", "none", marks=pytest.mark.whole),
        *(("gemma3", "selective"), ("gpt-oss", "full"), ("qwen3-next", "none")),
    ],
)
def test_documents_that_share_a_prefix_keep_what_is_planned(world: World, family: str, word: str) -> None:
    """Also under a window, whose rows of the prefix are gathered for every document: daily gemma3 stands for qwen3."""
    rows = 4 * ROWS if family in HYBRIDS else ROWS  # torch's scans pad runs to chunks of 64 rows
    config, plan = config_of(family), family_plan(world.home, 1, rows)
    counted = count_step(config, plan, world, activation_checkpointing=word)
    needs = MemoryNeeds.of(config.to_dict(), world.home, plan, SETTINGS)
    once = _ONCE * (family in EXPERTS) + (_ONCE + needs.places[0].hidden_row_bytes) * (word == "none")
    _check_kept(needs, counted, word, once)
    assert abs(_peak(needs, word) / counted.most - 1) <= PEAK
    lengths = [plan.lengths[-1] + plan.lengths[0]] * 8  # each with the prefix to itself
    apart = MemoryNeeds.of(config.to_dict(), world.home, plan_fixed(lengths, world.home, 1), SETTINGS)
    assert _peak(needs, word) < 0.5 * _peak(apart, word)


def _families_over_ranks(rank: int) -> dict[str, tuple[float, float]]:
    """Bytes that layers keep over those that are planned, and of peaks the same, by communication type and partition.
    Unsharded gradients are summed over slots at the end, where most is held.
    """
    found = dict[str, tuple[float, float]]()
    with World(Layout(2), backend=backend()) as world:
        config = config_of("qwen3")
        model = prepared_model(config, family_plan(world.home, 2), world, None, 0, {"activation_checkpointing": "none"})
        for kind, partition in (("p2p", "zigzag"), ("a2a", "zigzag"), ("all_gather", "contiguous")):
            plan = family_plan(world.home, 2, cp_comm_type=kind, partition=partition)
            counted = count_prepared(*model, plan, world)
            needs = MemoryNeeds.of(config.to_dict(), world.home, plan, SETTINGS)
            kept = sum(counted.kept) / _kept(needs, "none", 2)
            found[f"{kind} {partition}"] = kept, counted.most / _peak(needs, "none")
    return found


@pytest.mark.whole
def test_families_over_ranks_keep_what_is_planned() -> None:
    for found in run_ranks(_families_over_ranks, 2):
        for name, (kept, peak) in found.items():
            assert kept == pytest.approx(1, abs=CLOSE) and peak == pytest.approx(1, abs=PEAK), name


@pytest.mark.parametrize(("family", "word"), [("qwen3", "full"), ("qwen3-moe", "selective")])
def test_tiles_keep_what_is_planned(world: World, family: str, word: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernel_norms(monkeypatch)
    settings = MemorySettings(parameter_bytes=2, shard_parameters=False, mlp_tile_tokens=64, gpu=family == "qwen3")
    rows = 2 * ROWS  # of which the gradients of weights are not the most
    needs, counted = _compare(world, family, word, settings=settings, rows=rows, mlp_tile_tokens=64)
    _check_kept(needs, counted, word, once=_ONCE * (family in EXPERTS))
    assert abs(_peak(needs, word) / counted.most - 1) <= PEAK
    plan, settings = plan_fixed([rows], world.home, cp=1), replace(settings, mlp_tile_tokens=0)
    whole = MemoryNeeds.of(config_of(family).to_dict(), world.home, plan, settings)
    assert family in EXPERTS or counted.most < 0.9 * _peak(whole, word)


@pytest.mark.parametrize("family", ["gemma3", pytest.param("qwen3", marks=pytest.mark.whole)])
def test_norms_of_gpus(world: World, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernel_norms(monkeypatch)
    needs, counted = _compare(world, family, "none", settings=MemorySettings(parameter_bytes=2, shard_parameters=False))
    (place,), (load,) = needs.places, needs.loads
    assert [layer.kept for layer in place.layer_bytes(load, "none")[:2]] == pytest.approx(counted.kept, rel=1e-3)
    layer = place.layer_bytes(load, "none")[1]
    others = counted.alive[1] - place.hidden_row_bytes * ROWS + _head_bytes(needs)  # its input counts as kept
    assert counted.backward[1] == pytest.approx(others + layer.kept + layer.backward, rel=PEAK)


@pytest.mark.parametrize(
    "family", ["gpt-oss", *(pytest.param(x, marks=pytest.mark.whole) for x in ("qwen3-moe", "minimax-m3"))]
)
def test_gates_of_experts_on_gpus(world: World, family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """One kernel with the biases keeps what the first product made; peaks on a CPU are those of its attention."""
    use_kernel_norms(monkeypatch)
    use_kernel_gates(monkeypatch)
    needs, counted = _compare(world, family, "none", settings=MemorySettings(parameter_bytes=2, shard_parameters=False))
    _check_kept(needs, counted, "none", _ONCE + needs.places[0].hidden_row_bytes)
    on_cpus = MemoryNeeds.of(config_of(family).to_dict(), world.home, plan_fixed([ROWS], world.home, cp=1), SETTINGS)
    assert _kept(needs, "none", 2) < 0.9 * _kept(on_cpus, "none", 2)


def test_adapters_of_some_projections_keep_less(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernel_norms(monkeypatch)
    targets = ("q_proj", "v_proj")
    settings = MemorySettings(parameter_bytes=2, shard_parameters=False, lora_rank=8, adapter_bytes=2)
    some = replace(settings, lora_targets=targets)
    needs, counted = _compare(world, "qwen3", "none", settings=some, lora={"rank": 8, "targets": targets})
    _check_kept(needs, counted, "none")
    every = MemoryNeeds.of(config_of("qwen3").to_dict(), world.home, plan_fixed([ROWS], world.home, cp=1), settings)
    assert _kept(needs, "none", 2) < 0.8 * _kept(every, "none", 2)


@pytest.mark.parametrize("family", ["gpt-oss", pytest.param("qwen3-moe", marks=pytest.mark.whole)])
def test_adapters_of_experts_keep_what_is_planned(world: World, family: str) -> None:
    targets = ("q_proj", "experts.gate_up_proj", "experts.down_proj")
    settings = replace(SETTINGS, lora_rank=8, adapter_bytes=2, lora_targets=targets)
    needs, counted = _compare(world, family, "none", settings=settings, lora={"rank": 8, "targets": targets})
    (place,), (load,) = needs.places, needs.loads  # the first layer's norms need no gradient
    assert place.layer_bytes(load, "none")[1].kept == pytest.approx(counted.kept[1], rel=1e-3)
    fewer = replace(settings, lora_targets=targets[:1])
    plan = plan_fixed([ROWS], world.home, cp=1)
    bare = MemoryNeeds.of(config_of(family).to_dict(), world.home, plan, fewer)
    assert _kept(bare, "none", 2) < 0.97 * _kept(needs, "none", 2)
    model = add_lora(random_model(config_of(family), torch.float32), NewAdapter(rank=8, targets=targets))
    config = config_of(family).to_dict()
    numbers = [ModelNumbers.from_configuration(config, world.home, x).layers[0] for x in (settings, fewer)]
    layer = model.get_base_model().model.layers[0].mlp
    assert numbers[0].trained - numbers[1].trained == sum(p.numel() for p in layer.parameters() if p.requires_grad)


def test_depths_keep_what_joins_them(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    use_kernel_norms(monkeypatch)
    settings = MemorySettings(parameter_bytes=2, shard_parameters=False, mtp_layers=1)
    needs, counted = _compare(world, "qwen3", "selective", settings=settings, depths=1)
    assert needs.layers == 3
    assert abs(_peak(needs, "selective") / counted.most - 1) <= PEAK


def _over_ranks(rank: int) -> tuple[dict[str, tuple[float, float]], dict[str, tuple[int, float, float]]]:
    """Bytes of layers over two slots, as planned and as counted.

    Those that layers keep, by communication type, key/value heads and measure; then slices of heads and the peak of
    backward, by the order of slices.
    """
    kept, peaks = dict[str, tuple[float, float]](), dict[str, tuple[int, float, float]]()
    with pytest.MonkeyPatch.context() as monkeypatch, World(Layout(2), backend=backend()) as world:
        use_kernel_norms(monkeypatch)
        settings, config = MemorySettings(parameter_bytes=2, shard_parameters=False), config_of("qwen3")
        config.update({"hidden_size": 128, "head_dim": 16, "intermediate_size": 384})
        plans = {kind: plan_fixed([ROWS], world.home, cp=2, cp_comm_type=kind) for kind in ("p2p", "a2a")}
        for config.num_key_value_heads, word, kinds in ((2, "none", plans), (1, "selective", ["a2a"])):
            model = prepared_model(config, plans["a2a"], world, None, 0, {"activation_checkpointing": word})
            for kind in kinds:
                counted = count_prepared(*model, plans[kind], world)
                needs = MemoryNeeds.of(config.to_dict(), world.home, plans[kind], settings)
                name = f"{kind} {config.num_key_value_heads} {word}"
                kept[name] = _kept(needs, word, 2), float(sum(counted.kept))
        monkeypatch.setattr(all_to_all, "SLICE_BYTES", 0)  # tensors are taken for large
        monkeypatch.setattr(layer_table, "count_exchange_slices", partial(count_exchange_slices, slice_bytes=0))
        settings = replace(settings, mlp_tile_tokens=128)
        plan, word = plan_fixed([4 * ROWS], world.home, cp=2, cp_comm_type="a2a"), "full"
        how, config.num_key_value_heads = {"activation_checkpointing": word, "mlp_tile_tokens": 128}, 8
        model = prepared_model(config, plan, world, None, 0, how)
        for order in ("at once", "one by one"):
            monkeypatch.setattr(messages, "QUERY_GRADIENT_BYTES", 1 if order == "one by one" else 1 << 30)
            counted = count_prepared(*model, plan, world)
            needs = MemoryNeeds.of(config.to_dict(), world.home, plan, settings)
            (place,), (load,) = needs.places, needs.loads
            layer = place.layer_bytes(load, word)[1]
            slices, *_ = LayerTable(place.read, settings, load).head_exchange_slices()
            others = counted.alive[1] - place.hidden_row_bytes * load.rows  # its input counts as kept
            planned = others + _head_bytes(needs) + layer.kept + layer.backward
            peaks[order] = slices, planned, counted.backward[1]
    return kept, peaks


def test_exchanged_heads_are_counted_as_they_are_kept_and_travel() -> None:
    """One key/value head is sent to both members. Slices are sent all at once, or one by one where sums are large."""
    for kept, peaks in run_ranks(_over_ranks, 2):
        for name, (planned, counted) in kept.items():
            statistics = ROWS * 8 * 4 if "selective" in name else 0  # a log-sum-exp may be kept with what it is of
            assert abs(planned - counted) <= CLOSE * counted + statistics, name
        assert kept["p2p 2 none"][0] < kept["a2a 2 none"][0]
        for name, (slices, planned, counted) in peaks.items():
            assert slices == (4 if name == "one by one" else 2), name
            assert abs(planned - counted) <= PEAK * counted, (name, planned, counted)
        assert peaks["one by one"][2] < peaks["at once"][2]


# ---- embedding and head, whole only while they run


def _whole_around_layers(model: Any) -> int:
    """Bytes of gathered parameters outside of layers."""
    blocks = [module for layer in decoder_layers(model).values() for module in layer.modules()]
    groups = fsdp_param_groups([module for module in fsdp_modules(model) if module not in blocks])
    whole = [x._unsharded_param for group in groups if group.is_unsharded for x in group.fsdp_params]
    return sum(x.untyped_storage().nbytes() for x in whole)


def _whole_in_a_step(model: Any, run: Callable[[], Any]) -> tuple[set[int], set[int]]:
    """These bytes while layers run, and at the loss."""
    beside_layers, at_loss = set[int](), set[int]()
    for layer in decoder_layers(model).values():
        layer.register_forward_hook(lambda *_: beside_layers.add(_whole_around_layers(model)))
        layer.register_full_backward_pre_hook(lambda *_: beside_layers.add(_whole_around_layers(model)))
    model.get_output_embeddings().register_forward_hook(lambda *_: at_loss.add(_whole_around_layers(model)))
    run()
    return beside_layers, at_loss


def _weights_around_layers(rank: int) -> list[str]:
    """Where what is whole while a layer runs, or at the loss, is not what is planned."""
    wrong = list[str]()
    with World(Layout(2), backend=backend()) as world:
        plan = plan_fixed([64], world.home, cp=2)
        for tied, rank_of_adapter in itertools.product((False, True), (0, 4)):
            config = config_of("qwen3")
            config.tie_word_embeddings = tied
            settings = MemorySettings(parameter_bytes=2, gpu=False, lora_rank=rank_of_adapter, adapter_bytes=2)
            (place,) = MemoryNeeds.of(config.to_dict(), world.home, plan, settings).places
            lora = {"rank": rank_of_adapter} if rank_of_adapter else None
            model, documents = prepared_model(config, plan, world, lora, 0, {"shard_parameters": True})
            found = _whole_in_a_step(model, partial(run_step, model, plan, documents, world))
            planned = {place.root.whole * 2}, {(place.root + place.loss_head).whole * 2}
            if found != planned:
                wrong.append(f"tied {tied}, adapter {rank_of_adapter}: {found} for {planned}")
    return wrong


def test_weights_around_layers_are_whole_when_they_are_planned_to_be() -> None:
    assert run_ranks(_weights_around_layers, 2) == [[], []]
