"""What a run's measures and rows of a slot are chosen by, what a run goes on with, and models that do not fit."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.optim import AdamW
from transformers import GPT2Config

from longspan.cli.train import train_rank as train_by_command
from longspan.comm import World
from longspan.config.file import load_config
from longspan.config.memory_keys import FORM_KEYS, MEMORY_KEYS, fixed_memory_keys, form_of_config
from longspan.config.sections import OptimizerSection, RunConfig
from longspan.errors import CommError, ConfigError, PlanError
from longspan.layout import Layout
from longspan.model.presets import preset_config
from longspan.plan import FixedMemory, Form, Machine, MemoryBudget, MemoryPlan, MemorySettings
from longspan.plan.shape.model_shape import QWEN3_8B
from longspan.resolve.facts import Facts
from longspan.resolve.kept_rows import FILE, SlotRows, halve_kept_rows, keys_that_decide_rows, resolve_with_kept_rows
from longspan.resolve.planner_config import home_of
from longspan.resolve.resolved import resolve
from longspan.resolve.run_cost import memory_settings_of_run
from longspan.resolve.ways import UNIT, Fit, Way, find_longest, rank_ways, set_default_mode
from longspan.run import loop, warm_up
from longspan.run.world_facts import gather_facts, resolve_on_ranks
from longspan.testing import backend, run_ranks
from longspan.train.optim.state_numbers import optimizer_state_numbers
from longspan.train.start.start_times import Starts
from tests.model.stock import without_trials
from tests.train.small import small_config

GIB = 1 << 30
AUTO: dict[str, object] = {"context__max_tokens_per_slot": "auto"}
UNHEARD = {"model_type": "unheard of", "num_attention_heads": 8}


def config_of(**changes: object) -> RunConfig:
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    given: dict[str, object] = {"model.preset": "qwen3-8b", "optimizer.lr": 1e-5, "train.steps": 20}
    return load_config(None, given | {"context.max_tokens_per_slot": 8192} | keys)


def lengths_of_step(step: int) -> list[int]:
    """Short documents, and in step 13 one of 8192 tokens."""
    return [1000 + 10 * step] * 12 + [8192] * (step == 13)


def way_of(config: RunConfig, *, gpus: int = 2, gpu: bool = True, layers: int = 36, **facts: Any) -> Way:
    model = QWEN3_8B | {"num_hidden_layers": layers}
    values: dict[str, Any] = {"model": model, "lengths_of_step": lengths_of_step, "steps": config.train.steps}
    values |= {"home": Layout(ranks=gpus), "machine": Machine.known("H200"), "gpu": gpu}
    return Way(config, Facts(**values | facts))


class Mine(AdamW):
    """An optimizer that may update parameters together, for all that is known."""


def test_keys_by_hand_are_not_chosen() -> None:
    on_host = ("offload_optimizer_states", "offload_weights")
    off: dict[str, Any] = dict.fromkeys(("offload_activations", *on_host), False)
    off |= {"reshard_after_forward": True, "sync_each_batch": True}
    cases: list[tuple[dict[str, object], FixedMemory]] = [
        ({}, FixedMemory()),
        ({"train.activation_checkpointing": "selective"}, FixedMemory(activation_checkpointing="selective")),
        ({"train.activation_checkpointing": "none"}, FixedMemory(activation_checkpointing="none")),
        ({"train.activation_checkpointing": True}, FixedMemory(activation_checkpointing="full")),
        (
            {"train.activation_checkpointing": "full+host"},
            FixedMemory(activation_checkpointing="full", offload_activations=True),
        ),
        ({"parallel.reshard_after_forward": False}, FixedMemory(reshard_after_forward=False)),
        ({"train.offload_optimizer_states": True}, FixedMemory(offload_optimizer_states=True)),
        ({"train.offload_weights": True}, FixedMemory(offload_weights=True)),
        ({"optimizer.class": "torch.optim.NAdam"}, FixedMemory(offload_optimizer_states=False)),
        ({"optimizer.class": "torch.optim.Adafactor"}, FixedMemory(**dict.fromkeys(on_host, False))),
        ({"optimizer.class": "tests.resolve.test_memory.Mine"}, FixedMemory(**dict.fromkeys(on_host, False))),
        (
            {"train.plan_memory": False},
            FixedMemory(activation_checkpointing="none", mlp_tile_tokens=0, segment_layers=0, **off),
        ),
    ]
    for keys, fixed in cases:
        assert fixed_memory_keys(load_config(None, keys)) == fixed, keys


def test_a_field_of_a_form_has_its_key_by_which_rows_are_kept() -> None:
    assert {*Form.__dataclass_fields__} - {*FORM_KEYS} == {"segment_layers"}
    assert {*MEMORY_KEYS, *FORM_KEYS.values()} - {"train.compile"} <= {*keys_that_decide_rows(config_of())}
    keys: dict[str, Any] = {
        "train.float8": "rowwise",
        "train.compile": "none",
        "train.activation_checkpointing": "full+host",
    }
    form = form_of_config(load_config(None, keys | {"mtp.num_layers": 2, "train.mlp_tile_tokens": 64}))
    changes: dict[str, Any] = {"checkpoint_policies": "full+host", "mtp_layers": 2, "mlp_tile_tokens": 64}
    assert form == Form(float8="rowwise", frozen="auto", **changes)
    assert form.for_prepare(training=False).checkpoint_policies == "full"
    settings = MemorySettings(lora_rank=4).with_form(form)
    assert settings.form == form and settings.lora_rank == 4


def test_numbers_of_state_are_counted_on_the_optimizer_itself() -> None:
    momentum = OptimizerSection(lr=1e-3, class_="sgd", arguments=("momentum=0.9",))
    plain, nadam = replace(momentum, arguments=()), OptimizerSection(lr=1e-3, class_="torch.optim.NAdam")
    assert [*map(optimizer_state_numbers, (OptimizerSection(), plain, momentum, nadam))] == [2.0, 0.0, 1.0, 2.0]


def test_settings_follow_the_keys() -> None:
    usual = memory_settings_of_run(config_of(), gpu=True)
    assert (usual.parameter_bytes, usual.compute_bytes, usual.state_numbers) == (4, 2, 2.0)
    assert not usual.muon and memory_settings_of_run(config_of(optimizer__class="muon")).muon
    keys = {"train__float8": "rowwise", "lora__rank": 8, "context__mode": "free", "mtp__num_layers": 1}
    other = memory_settings_of_run(config_of(model__dtype="bfloat16", **keys), gpu=True)
    assert (other.parameter_bytes, other.lora_rank, other.mtp_layers) == (2, 8, 1)
    assert other.free and other.float8 and not usual.float8
    # scans go by torch in float32, and on a GPU whose machine has no flash-linear-attention
    assert usual.scan_kernels and way_of(config_of()).memory_settings.scan_kernels
    assert not memory_settings_of_run(config_of(model__compute_dtype="float32")).scan_kernels
    assert not way_of(config_of(), scan_kernels=False).memory_settings.scan_kernels


def test_the_fullest_steps_are_found_among_all_and_a_limit_bounds_dynamic_plans() -> None:
    fixed = config_of(context__planner="fixed", context__context_parallel_size=1)
    plans = way_of(fixed).fullest_plans(rows_open=False)
    assert len(plans) == 4 and max(plan.most_rows for plan in plans) >= 8192
    assert any(max(plan.lengths) == 8192 for plan in plans)
    for config in (config_of(context__planner="dynamic"), fixed):
        *plans, limit = way_of(config).fullest_plans(rows_open=True)
        assert len(plans) <= 2 and any(max(plan.lengths) == 8192 for plan in plans)
        assert limit.most_rows == 8192 and limit.timeline().rows.max() == 8192


def test_rows_to_try_reach_from_the_longest_document_to_one_micro_batch() -> None:
    config = config_of(**AUTO, context__planner="dynamic")
    rows = way_of(config, gpus=4).limits_of_rows()
    most = 8192 + UNIT  # a slot may have all of the longest document
    assert rows[0] == 8192 / 4 and rows[-1] == most and all(n % 2 == 0 for n in rows)
    assert way_of(config_of(**AUTO, context__context_parallel_size=1)).limits_of_rows()[0] == 8192


def test_rows_to_try_hold_the_longest_document_in_a_group_that_the_heads_allow() -> None:
    """a2a deals 6 heads to 2 of 8 slots at most that fill them evenly; 8 would hold the document in fewer rows."""
    config = config_of(**AUTO, context__planner="dynamic", context__cp_comm_type="a2a")
    six_heads = QWEN3_8B | {"num_attention_heads": 6}
    way = way_of(config, gpus=8, model=six_heads, lengths_of_step=lambda step: [8192])
    least = way.limits_of_rows()[0]
    assert least == 4096
    (plan,) = way.with_context(max_tokens_per_slot=least).plan_steps([0])
    assert plan.lengths == (8192,)
    for later in (replace(way.facts, longest=10000), replace(way.facts, longest=10000, steps=0)):  # not looked at
        assert Way(config, later).limits_of_rows()[0] == 5000


def fit_in(way: Way, device: int, host: int = 0) -> Fit:
    budget = MemoryBudget(device=device, host=host)
    fit = rank_ways(way.config, replace(way.facts, budget=budget)).best
    if fit.seconds is None:
        raise PlanError(fit.refusal)
    return fit


def memory_of(fit: Fit) -> MemoryPlan:
    assert fit.memory is not None
    return fit.memory


def rows_of(fit: Fit) -> int:
    return int(fit.way.config.context.max_tokens_per_slot)


def test_rows_auto_are_those_whose_steps_are_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """With little room fewer rows, which need less recomputation, and with much as many as a step has."""
    monkeypatch.setattr("longspan.resolve.facts.TIMED_STEPS", 2)
    few, many = (fit_in(way_of(config_of(**AUTO, context__planner="dynamic")), gib * GIB) for gib in (99, 200))
    assert rows_of(many) == many.way.limits_of_rows()[-1] > rows_of(few)
    assert set(memory_of(many).checkpoint_policies) == {"none"}
    keys = {"train__activation_checkpointing": "none", "context__planner": "dynamic"}
    by_hand = way_of(config_of(**AUTO, **keys), layers=4)  # all activations are kept: rows alone may give way
    with pytest.raises(PlanError, match="does not fit") as refusal:
        fit_in(by_hand, GIB, 64 * GIB)
    least = re.search(r"needs at least [^(]*\(([\d,]+) bytes\)", str(refusal.value))
    assert least is not None
    fewest = fit_in(by_hand, int(least[1].replace(",", "")), 64 * GIB)
    assert rows_of(fewest) == by_hand.limits_of_rows()[0] < rows_of(many)


def test_a_mode_auto_is_free_where_weights_fit_whole_and_steps_are_faster() -> None:
    lengths = [int(n) for n in np.random.default_rng(0).lognormal(8, 1.3, 300).clip(64, 32768)]
    # slots wait for the longest row
    padded: dict[str, object] = {"context__planner": "padded", "context__context_parallel_size": 4}
    cases: list[tuple[str, int, dict[str, object]]] = [
        ("free", 200, padded),
        ("lockstep", 200, {"context__planner": "dynamic"}),
        ("lockstep", 17, padded),  # weights and gradients, whole, are more
        ("lockstep", 200, padded | {"parallel__pp": 2}),
    ]
    for mode, gib, keys in cases:
        config = config_of(**keys)
        home = home_of(config.parallel, 16)
        way = way_of(config, layers=4, home=home, lengths_of_step=lambda step: lengths, steps=1)
        fit = fit_in(way, gib * GIB, 64 * GIB)
        assert fit.way.config.context.mode == mode, (mode, gib, keys, fit.memory)
    assert set_default_mode(config_of()).context.mode == "lockstep"


@pytest.mark.parametrize(
    ("name", "gpus", "host", "least", "ring"),
    [("qwen3-32b", 8, 240, 3_400_000, True), ("qwen3-8b", 2, 128, 1_024_000, False)],
)
def test_a_ring_is_taken_where_no_faster_type_fits(name: str, gpus: int, host: int, least: int, ring: bool) -> None:
    """In float32 on H100s of 80 GiB: exchanges of heads fit 2.4 million tokens of the 32B, a ring 3.57 million."""
    keys = {"cp_comm_type": "auto", "planner": "fixed", "context_parallel_size": gpus, "max_tokens_per_slot": 0}
    config = config_of(**{f"context__{key}": value for key, value in keys.items()})
    budget = MemoryBudget(device=int(0.92 * 80 * 2**30), host=host * 2**30)
    facts = way_of(config, gpus=gpus, budget=budget, lengths_of_step=lambda _: [least], longest=least).facts
    facts = replace(facts, model=preset_config(name), steps=1, machine=Machine.known("H100"))
    if ring:
        tokens, way = find_longest(config, facts)
        assert tokens >= least and way.is_ring
    resolved = resolve(config, facts)
    assert resolved.memory is not None and resolved.memory.offload_weights
    assert resolved.config.context.cp_comm_type == ("p2p" if ring else "auto")
    assert any("goes round a ring" in note for note in resolved.reasons.notes) == ring


def test_a_model_that_cannot_be_counted_trains_by_its_keys() -> None:
    facts = replace(way_of(config_of(), layers=4).facts, budget=MemoryBudget(device=400 * GIB))
    fixed = config_of(context__context_parallel_size=1)
    resolved = resolve(fixed, facts)
    assert resolved.config.context.max_tokens_per_slot == 8192 and resolved.memory and not resolved.reasons.notes
    resolved = resolve(fixed, replace(facts, model=UNHEARD))
    assert resolved.config.context.max_tokens_per_slot == 8192 and resolved.memory is None
    assert "hidden_size" in resolved.reasons.notes[0] and resolved.config.context.mode == "lockstep"
    with pytest.raises(PlanError, match="does not fit"):
        resolve(fixed, replace(facts, budget=MemoryBudget(device=GIB)))
    config = config_of(**AUTO, context__planner="dynamic")
    ways = [way_of(config, gpu=gpu, model=UNHEARD) for gpu in (True, False)]
    room = MemoryBudget(device=GIB)
    chosen = [resolve(config, replace(way.facts, budget=room)).config.context.max_tokens_per_slot for way in ways]
    assert chosen == [ways[0].limits_of_rows()[-1], 4096]


@pytest.mark.parametrize(
    ("planner", "degree", "widest"), [("fixed", 2, 2), ("padded", 1, 1), ("dynamic", 1, 4), ("dynamic 3", 1, 2)]
)
def test_a_full_plan_fills_every_slot(planner: str, degree: int, widest: int) -> None:
    name, _, most = planner.partition(" ")
    keys = {"context__context_parallel_size": degree, "context__max_dynamic_context_parallel_size": int(most or 0)}
    plan = way_of(config_of(context__planner=name, **keys), gpus=4).plan_full_slots(64)
    assert plan.timeline().rows.tolist() == [[64] * 4] and plan.efficiency == 1
    assert {group.degree for group in plan.micro_batches[0].groups} == {widest}


# ---- the rows that a run keeps


def _kept(folder: Path) -> dict[str, Any]:
    return json.loads((folder / FILE).read_text())


def test_kept_rows_hold_for_the_same_ranks_and_keys(tmp_path: Path) -> None:
    config = config_of(**AUTO, context__planner="dynamic", run__dir=str(tmp_path))
    keys = keys_that_decide_rows(config)
    other_keys: list[dict[str, object]] = [
        {"train__device_memory_limit": 10**9},
        {"train__activation_checkpointing": "full"},
        {"parallel__tp": 2},
        {"model__preset": "qwen3-0.6b"},  # another model, in a folder without a checkpoint yet
        {"model__dtype": "bfloat16"},
        {"data__vocab_size": 4096},
    ]
    for changes in other_keys:
        assert keys_that_decide_rows(config_of(**AUTO, context__planner="dynamic", **changes)) != keys, changes
    lines = list[str]()
    with World(Layout(1), backend=backend()) as world:
        model = UNHEARD
        facts = gather_facts(config, world, model, lengths_of_step, 20)
        for rows, ranks, its_keys, chosen in (
            (None, 1, keys, 8192),
            (77, 1, keys, 77),
            (77, 4, keys, 8192),
            (77, 1, keys | {"train.device_memory_limit": 10**9}, 8192),
            (77, 1, keys | {"train.memory_fraction": 0.92}, 77),  # a key of 0.2
        ):
            if rows is not None:
                (tmp_path / FILE).write_text(json.dumps(vars(SlotRows(rows, 8192, ranks, its_keys))))
            resolved = resolve_on_ranks(config, facts, world, lines.append, resolve_with_kept_rows)
            assert (resolved.config.context.max_tokens_per_slot, resolved.memory) == (chosen, None)
            assert _kept(tmp_path) == vars(SlotRows(chosen, 8192, 1, its_keys if chosen == rows else keys))
            assert ("77 rows (of 8,192, for which a rank had no memory)" in lines[-1]) == (chosen == 77)
        wrong: Any = (77, "8192", 1, keys), (0, 1, 1, keys), (77, 77, 1, [])
        for content in ("{}", "[]", "", "null", *(json.dumps(vars(SlotRows(*values))) for values in wrong)):
            (tmp_path / FILE).write_text(content)
            with pytest.raises(ConfigError, match=r"is damaged: .*; remove it and rows are chosen again"):
                resolve_on_ranks(config, facts, world, lines.append, resolve_with_kept_rows)
            with pytest.raises(ConfigError, match=rf"{FILE} is damaged: .*; remove it and rows are chosen again"):
                halve_kept_rows(config)
        (tmp_path / FILE).unlink()
        small = replace(config, train=replace(config.train, device_memory_limit=GIB))
        two_layers = QWEN3_8B | {"num_hidden_layers": 2}
        with pytest.raises(ConfigError, match="does not fit"):
            facts = gather_facts(small, world, two_layers, lengths_of_step, 20)
            resolve_on_ranks(small, facts, world, lines.append, resolve_with_kept_rows)
        large = replace(config, train=replace(config.train, device_memory_limit=80 * GIB))
        facts = gather_facts(large, world, two_layers, lengths_of_step, 20)
        resolve_on_ranks(large, facts, world, lines.append, resolve_with_kept_rows)
        assert [line.partition(":")[0] for line in lines[-2:]] == ["memory", "max_tokens_per_slot"]


def _train_short_of_memory(rank: int, config: RunConfig, most: int) -> list[int]:
    """Train with a warm-up in which rank 1 has memory for `most` rows; the rows of each attempt."""
    attempts, step = list[int](), warm_up.run_step

    def run_step(model: Any, plan: Any, *others: Any, **more: Any) -> Any:
        rows = int(plan.timeline().rows.max())
        attempts.append(rows)

        def forward(module: object, inputs: object) -> None:
            if rank == 1 and rows > most:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. GPU 1 has 1 GiB free")

        hook = model.transformer.h[1].register_forward_pre_hook(forward)
        try:
            return step(model, plan, *others, **more)
        finally:
            hook.remove()

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(warm_up, "run_step", run_step)
        patched.setattr(loop, "needs_warm_up", lambda world: True)
        assert train_by_command(rank, config, 2, "gloo", True, Starts()).done == 1
    return attempts


def _short_of_memory(rank: int, halved: RunConfig, least: RunConfig, by_hand: RunConfig) -> list[int]:
    """In the middle of a step, in which the other rank waits for the one without memory."""
    with without_trials():
        attempts = _train_short_of_memory(rank, halved, 200)
        with pytest.raises(ConfigError, match=r"max_tokens_per_slot 19 do not suit the longest document \(64 tokens"):
            _train_short_of_memory(rank, least, 1)
        with pytest.raises(
            (ConfigError, CommError), match=r"rank 1 ran out of memory before step 1, .* rows of a slot"
        ):
            _train_short_of_memory(rank, by_hand, 1)
    return attempts


def test_a_rank_without_memory_halves_the_rows_on_all_ranks(tmp_path: Path) -> None:
    """Of a model whose table of positions is shorter than the rows of a slot."""
    drops = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), 0.0)
    table = GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=80, **drops)
    table.architectures = ["GPT2LMHeadModel"]
    table.save_pretrained(tmp_path / "gpt2")
    keys: dict[str, object] = {"model__config": str(tmp_path / "gpt2"), "train__steps": 1, "evaluation__every": 0}
    more = AUTO | keys | {"train__tokens_per_step": 512, "evaluation__max_tokens_per_slot": "auto"}
    halved = small_config(tmp_path, **more)
    least = small_config(tmp_path, **AUTO, **keys, run__dir=str(tmp_path / "least"))
    by_hand = small_config(tmp_path, **keys, run__dir=str(tmp_path / "by_hand"))
    (tmp_path / "least").mkdir()
    (tmp_path / "least" / FILE).write_text(json.dumps(vars(SlotRows(34, 68, 2, keys_that_decide_rows(least)))))
    attempts, others = run_ranks(_short_of_memory, 2, halved, least, by_hand)
    kept = _kept(tmp_path / "run")
    assert kept["rows"] == kept["planned"] // 2 <= 200 < attempts[0] == others[0] and attempts[-1] <= 200
    plan = json.loads((tmp_path / "run" / "plans" / "step-000001.json").read_text())
    assert plan["max_tokens_per_slot"] == kept["rows"] > 80
    assert 'max_tokens_per_slot = "auto"' in (tmp_path / "run" / "config.toml").read_text()
