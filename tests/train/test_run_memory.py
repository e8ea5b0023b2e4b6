"""What a run's measures and rows of a slot are chosen by, what a run goes on with, and models that do not fit."""

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import GPT2Config

from longspan.cli.train import train_rank as train_by_command
from longspan.comm import World
from longspan.config.file import load_config
from longspan.config.sections import ModelConfig, OptimizerSection, RunConfig
from longspan.errors import CommError, ConfigError, PlanError
from longspan.layout import Layout
from longspan.model import load_model, preset_config
from longspan.model.lora import NewAdapter, add_lora
from longspan.plan import Cost, FixedMemory, MemoryBudget, MemoryPlan
from longspan.plan.shape.model_shape import QWEN3_8B
from longspan.run import warm_up
from longspan.testing import backend, run_ranks
from longspan.train import run_memory
from longspan.train.plans.run_cost import fixed_memory_keys, optimizer_state_numbers, run_memory_settings
from longspan.train.run_memory import (
    FILE,
    ComingSteps,
    RunMemory,
    SlotRows,
    check_model_fits,
    choose_rows,
    keys_that_decide_rows,
    plan_with_full_slots,
)
from longspan.train.starts import Starts
from tests.train.small import small_config, train_rank

GIB = 1 << 30
AUTO: dict[str, object] = {"context__max_tokens_per_slot": "auto"}
UNHEARD = {"model_type": "unheard of"}


def config_of(**changes: object) -> RunConfig:
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    given: dict[str, object] = {"model.preset": "qwen3-8b", "optimizer.lr": 1e-5, "train.steps": 20}
    return load_config(None, given | {"context.max_tokens_per_slot": 8192} | keys)


def lengths_of_step(step: int) -> list[int]:
    """Short documents, and in step 13 one of 8192 tokens."""
    return [1000 + 10 * step] * 12 + [8192] * (step == 13)


def run_of(config: RunConfig, *, gpus: int = 2, gpu: bool = True, layers: int = 36) -> RunMemory:
    ahead = ComingSteps(lengths_of_step, Layout(ranks=gpus), 32, 0, config.train.steps)
    return RunMemory(config=config, model=QWEN3_8B | {"num_hidden_layers": layers}, ahead=ahead, gpu=gpu)


def test_keys_by_hand_are_not_chosen() -> None:
    off = dict.fromkeys(("offload", "gathered_once", "summed_once", "offload_optimizer_states"), False)
    cases: list[tuple[dict[str, object], FixedMemory]] = [
        ({}, FixedMemory()),
        ({"train.activation_checkpointing": "selective"}, FixedMemory(measure="selective")),
        ({"train.activation_checkpointing": "none"}, FixedMemory(measure="none")),
        ({"train.activation_checkpointing": True}, FixedMemory(measure="full")),
        ({"train.offload_activations": True}, FixedMemory(offload=True)),
        ({"parallel.reshard_after_forward": False}, FixedMemory(gathered_once=True)),
        ({"train.offload_optimizer_states": True}, FixedMemory(offload_optimizer_states=True)),
        ({"optimizer.class": "torch.optim.NAdam"}, FixedMemory(offload_optimizer_states=False)),
        ({"train.plan_memory": False}, FixedMemory(measure="none", mlp_tile_tokens=0, segment_layers=0, **off)),
    ]
    for keys, fixed in cases:
        assert fixed_memory_keys(load_config(None, keys)) == fixed, keys


def test_numbers_of_state_are_counted_on_the_optimizer_itself() -> None:
    momentum = OptimizerSection(lr=1e-3, class_="sgd", arguments=("momentum=0.9",))
    plain, nadam = replace(momentum, arguments=()), OptimizerSection(lr=1e-3, class_="torch.optim.NAdam")
    assert [*map(optimizer_state_numbers, (OptimizerSection(), plain, momentum, nadam))] == [2.0, 0.0, 1.0, 2.0]


def test_settings_follow_the_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = run_memory_settings(config_of(), gpu=True)
    assert (usual.parameter_bytes, usual.compute_bytes, usual.state_numbers) == (4, 2, 2.0)
    assert usual.fused_norms and not run_memory_settings(config_of(), gpu=False).fused_norms
    keys = {"train__float8": "rowwise", "lora__rank": 8, "context__mode": "free", "mtp__num_layers": 1}
    other = run_memory_settings(config_of(model__dtype="bfloat16", **keys), gpu=True)
    assert (other.parameter_bytes, other.lora_rank, other.depths) == (2, 8, 1)
    assert other.free and other.float8 and not usual.float8
    # scans go by torch in float32, and on a GPU whose machine has no flash-linear-attention
    assert usual.scan_kernels and run_of(config_of()).memory_settings.scan_kernels
    assert not run_memory_settings(config_of(model__compute_dtype="float32")).scan_kernels
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(run_memory, "fla_device_lack", lambda device: "flash-linear-attention")
    assert not run_of(config_of()).memory_settings.scan_kernels


def test_the_fullest_steps_are_found_among_all_and_a_limit_bounds_dynamic_plans() -> None:
    config = config_of(context__planner="fixed")
    plans, limit = run_of(config).ahead.fullest_plans(config, Cost())
    assert limit == [] and max(plan.most_rows for plan in plans) >= 8192
    assert any(max(plan.lengths) == 8192 for plan in plans)
    # the second: a configuration of one degree whose planners, when they are compared, mix degrees
    for of_run, planners in ((config_of(context__planner="dynamic"), ()), (config, ("dynamic",))):
        plans, (limit,) = replace(run_of(of_run).ahead, planners=planners).fullest_plans(of_run, Cost())
        assert len(plans) <= 2 and any(max(plan.lengths) == 8192 for plan in plans)
        assert limit.most_rows == 8192 and limit.timeline().rows.max() == 8192


def test_rows_to_try_reach_from_the_longest_document_to_one_micro_batch() -> None:
    config = config_of(**AUTO, context__planner="dynamic")
    ahead = run_of(config, gpus=4).ahead
    assert ahead.rows_to_try(config) == [2048 + 2, 4100, 8200] and 4100 < sum(lengths_of_step(13)) / 4 + 2 <= 8200
    fixed = config_of(**AUTO, context__context_parallel_size=1)
    assert ahead.rows_to_try(fixed) == [8194]


def test_rows_to_try_hold_the_longest_document_in_a_group_that_the_heads_allow() -> None:
    """a2a deals 6 heads to 2 of 8 slots at most that fill them evenly; 8 would hold the document in fewer rows."""
    config = config_of(**AUTO, context__planner="dynamic", context__cp_comm_type="a2a")
    ahead = ComingSteps(lambda step: [8192], Layout(ranks=8), 6, 0, config.train.steps)
    rows = ahead.rows_to_try(config)
    assert rows == [4096 + 2]
    limited = replace(config, context=replace(config.context, max_tokens_per_slot=rows[0]))
    assert all(plan.lengths == (8192,) for plan in ahead.fullest_plans(limited, Cost())[0])
    later = replace(ahead, longest=10000)  # in a step that is not looked at
    assert later.rows_to_try(config) == [5002] and replace(later, last=0).rows_to_try(config) == [5002]


def test_rows_auto_are_those_whose_steps_are_fastest() -> None:
    """With little room fewer rows, which need less recomputation, and with much as many as a step has."""
    run = run_of(config_of(**AUTO, context__planner="dynamic"), layers=8)

    def choose(run: RunMemory, device: int, host: int = 0) -> tuple[int, MemoryPlan]:
        config, memory = run.choose_memory(MemoryBudget(device=device, host=host))
        return int(config.context.max_tokens_per_slot), memory

    few_rows, _ = choose(run, 40 * GIB)
    many_rows, much = choose(run, 200 * GIB)
    assert set(much.measures) == {"none"} and many_rows > few_rows
    keys = {"train__activation_checkpointing": "none", "context__planner": "dynamic"}
    by_hand = run_of(config_of(**AUTO, **keys), layers=4)  # all activations are kept: rows alone may give way
    with pytest.raises(PlanError, match="does not fit") as refusal:
        choose(by_hand, GIB, 64 * GIB)
    least = re.search(r"needs at least [^(]*\(([\d,]+) bytes\)", str(refusal.value))
    assert least is not None
    fewest_rows, _ = choose(by_hand, int(least[1].replace(",", "")), 64 * GIB)
    assert fewest_rows == by_hand.ahead.rows_to_try(by_hand.config)[0] < many_rows


def test_a_mode_auto_is_free_where_weights_fit_whole_and_steps_are_faster() -> None:
    lengths = [int(n) for n in np.random.default_rng(0).lognormal(8, 1.3, 300).clip(64, 32768)]
    ahead = ComingSteps(lambda step: lengths, Layout(ranks=16), 32, 0, 1)
    padded: dict[str, object] = {
        "context__planner": "padded",
        "context__context_parallel_size": 4,
    }  # slots wait for the longest row
    cases: list[tuple[str, int, dict[str, object]]] = [
        ("free", 200, padded),
        ("lockstep", 200, {"context__planner": "dynamic"}),
        ("lockstep", 17, padded),  # weights and gradients, whole, are more
        ("lockstep", 200, padded | {"parallel__pp": 2}),
    ]
    for mode, gib, keys in cases:
        home = replace(ahead.home, pp=2) if "parallel__pp" in keys else ahead.home
        run = replace(run_of(config_of(**keys), layers=4), ahead=replace(ahead, home=home))
        config, memory = run.choose_memory(MemoryBudget(device=gib * GIB, host=64 * GIB))
        assert config.context.mode == mode, (mode, gib, keys, memory)
    assert run_memory.set_usual_mode(config_of()).context.mode == "lockstep"


def test_a_model_that_cannot_be_counted_trains_by_its_keys() -> None:
    run, room = run_of(config_of(), layers=4), MemoryBudget(device=400 * GIB)
    config, plan, reason = run_memory.choose_memory_or_explain(run, room)
    assert config.context.max_tokens_per_slot == 8192 and plan is not None and not reason
    config, plan, reason = run_memory.choose_memory_or_explain(replace(run, model=UNHEARD), room)
    assert config.context.max_tokens_per_slot == 8192 and plan is None and "hidden_size" in reason
    assert config.context.mode == "lockstep"
    with pytest.raises(ConfigError, match="does not fit"):
        run_memory.choose_memory_or_explain(run, MemoryBudget(device=GIB))
    config = config_of(**AUTO, context__planner="dynamic")
    runs = [replace(run_of(config, gpu=gpu), model=UNHEARD) for gpu in (True, False)]
    configs = [run_memory.choose_memory_or_explain(run, MemoryBudget(device=GIB))[0] for run in runs]
    auto = [int(chosen.context.max_tokens_per_slot) for chosen in configs]
    assert auto == [runs[0].ahead.rows_to_try(config)[-1], 4096 + 2] and auto[0] > auto[1]


@pytest.mark.parametrize(
    ("planner", "degree", "widest"), [("fixed", 2, 2), ("padded", 1, 1), ("dynamic", 1, 4), ("dynamic 3", 1, 2)]
)
def test_a_full_plan_fills_every_slot(planner: str, degree: int, widest: int) -> None:
    name, _, most = planner.partition(" ")
    keys = {"context__context_parallel_size": degree, "context__max_dynamic_context_parallel_size": int(most or 0)}
    plan = plan_with_full_slots(config_of(context__planner=name, **keys), Layout(ranks=4), 64)
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
        run = replace(run_of(config, gpus=1, gpu=False), model=UNHEARD)
        for rows, ranks, its_keys, chosen in (
            (None, 1, keys, 8194),
            (77, 1, keys, 77),
            (77, 4, keys, 8194),
            (77, 1, keys | {"train.device_memory_limit": 10**9}, 8194),
            (77, 1, keys | {"train.memory_fraction": 0.92}, 77),  # a key of 0.2
        ):
            if rows is not None:
                (tmp_path / FILE).write_text(json.dumps(vars(SlotRows(rows, 8194, ranks, its_keys))))
            found, plan = choose_rows(run, world, lines.append)
            assert (found.context.max_tokens_per_slot, plan) == (chosen, None)
            assert _kept(tmp_path) == vars(SlotRows(chosen, 8194, 1, its_keys if chosen == rows else keys))
            assert ("77 rows (of 8,194, for which a rank had no memory)" in lines[-1]) == (chosen == 77)
        (tmp_path / FILE).write_text("{}")
        with pytest.raises(ConfigError, match=r"is damaged: .*; remove it and rows are chosen again"):
            choose_rows(run, world, lines.append)
        (tmp_path / FILE).unlink()
        small = run_of(
            replace(config, train=replace(config.train, device_memory_limit=GIB)), gpus=1, gpu=False, layers=2
        )
        with pytest.raises(ConfigError, match="does not fit"):
            choose_rows(small, world, lines.append)


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
        patched.setattr(warm_up, "needs_warm_up", lambda world: True)
        assert train_by_command(rank, config, 2, "gloo", True, Starts()).done == 1
    return attempts


def _short_of_memory(rank: int, halved: RunConfig, least: RunConfig, by_hand: RunConfig) -> list[int]:
    """In the middle of a step, in which the other rank waits for the one without memory."""
    attempts = _train_short_of_memory(rank, halved, 200)
    with pytest.raises(ConfigError, match=r"max_tokens_per_slot 17 do not suit the longest document \(64 tokens"):
        _train_short_of_memory(rank, least, 1)
    with pytest.raises((ConfigError, CommError), match=r"rank 1 ran out of memory before step 1, .* rows of a slot"):
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


# ---- a device that is too small for a model is refused before anything is made there

CONFIG = RunConfig(model=ModelConfig(preset="qwen3-8b"), optimizer=OptimizerSection(class_="adamw"))


def _refusal(world: World, *, dtype: str = "float32", training: bool = True, rank: int = 0) -> str:
    """Of two layers of Qwen3-8B, 1,630,556,672 weights, on a host with 2 GiB; `rank` of adapters."""
    two_layers, config = preset_config("qwen3-8b"), replace(CONFIG, model=replace(CONFIG.model, dtype=dtype))
    two_layers.num_hidden_layers = 2
    model = load_model(config=two_layers, dtype=dtype, sharded=True)
    if rank:
        add_lora(model, NewAdapter(rank=rank))
    with pytest.MonkeyPatch.context() as patched, pytest.raises(ConfigError) as error:
        patched.setattr(run_memory, "free_host_bytes", lambda swap: 2 << 30)
        check_model_fits(config, model, world, training=training)
    return str(error.value)


def test_bytes_of_a_model_before_any_activation() -> None:
    """Adapters of rank 512 have 77,594,624 weights in float32; frozen weights have no gradients and states."""
    with World(Layout(1), backend=backend()) as world:
        whole = "at least 24.3 GiB before any activation (weights 6.1 GiB, gradients 6.1 GiB, optimizer states 12.1"
        assert whole in _refusal(world)
        assert "at least 6.1 GiB before any activation (weights 6.1 GiB)" in _refusal(world, training=False)
        adapters = "(weights 3.3 GiB, gradients 0.3 GiB, optimizer states 0.6 GiB)"
        assert adapters in _refusal(world, dtype="bfloat16", rank=512)


def _small_host(rank: int, config: RunConfig) -> tuple[str, str]:
    with World(Layout(2), backend=backend()) as world:
        refusal = _refusal(world)
    with pytest.MonkeyPatch.context() as patched, pytest.raises(ConfigError) as error:
        patched.setattr(run_memory, "free_host_bytes", lambda swap: 1 << (20 if rank else 60))
        train_rank(rank, config, 2)
    return refusal, str(error.value)


def test_a_host_that_is_too_small_is_named_on_every_rank(tmp_path: Path) -> None:
    config = small_config(tmp_path, train__steps=1, evaluation__every=0)
    (first, first_run), (last, last_run) = run_ranks(_small_host, 2, config)
    assert "a rank needs at least 12.1 GiB" in first and "rank 0, one of 2 on its host, has 1.0 GiB free" in first
    assert "are all sizes in its configuration?" in first and last.startswith(first)
    assert last_run.startswith(first_run) and "rank 1, one of 2 on its host, has 0.0 GiB free" in first_run
    assert "optimizer states" in first_run and not list(Path(config.run.dir).glob("checkpoints/*"))
