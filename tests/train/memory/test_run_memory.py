"""What a run's measures are chosen by: its settings, the keys by hand, the fullest plans, and rows of a slot."""

from dataclasses import replace

import pytest

from longspan.config.file import load_config
from longspan.config.sections import RunConfig, TrainConfig
from longspan.errors import ConfigError, PlanError
from longspan.layout import Layout
from longspan.plan import Cost, FixedMemory, MemoryBudget
from longspan.plan.shape.model_shape import QWEN3_8B
from longspan.train import run_memory
from longspan.train.plans.run_cost import fixed_keys, run_memory_settings, state_numbers
from longspan.train.run_memory import ComingSteps, RunMemory

GIB = 1 << 30


def config_of(**changes: object) -> RunConfig:
    keys = {key.replace("__", "."): value for key, value in changes.items()}
    given: dict[str, object] = {"model.preset": "qwen3-8b", "train.lr": 1e-5, "train.steps": 20}
    return load_config(None, given | {"context.max_tokens_per_slot": 8192} | keys)


def lengths_of_step(step: int) -> list[int]:
    """Short documents, and in step 13 one of 8192 tokens."""
    return [1000 + 10 * step] * 12 + [8192] * (step == 13)


def run_of(config: RunConfig, *, gpus: int = 2, gpu: bool = True) -> RunMemory:
    ahead = ComingSteps(lengths_of_step, Layout(ranks=gpus), 32, 0, config.train.steps)
    return RunMemory(config=config, model=QWEN3_8B, ahead=ahead, gpu=gpu)


@pytest.mark.parametrize(
    ("keys", "fixed"),
    [
        ({}, FixedMemory()),
        ({"train.activation_checkpointing": "selective"}, FixedMemory(measure="selective")),
        ({"train.activation_checkpointing": "none"}, FixedMemory(measure="none")),
        ({"train.activation_checkpointing": True}, FixedMemory(measure="full")),
        ({"train.offload_activations": True}, FixedMemory(offload=True)),
        ({"parallel.reshard_after_forward": False}, FixedMemory(gathered_once=True)),
        ({"train.offload_states": True}, FixedMemory(offload_states=True)),
        ({"train.optimizer": "torch.optim.NAdam"}, FixedMemory(offload_states=False)),
        (
            {"train.memory": "none"},
            FixedMemory(
                measure="none",
                offload=False,
                gathered_once=False,
                offload_states=False,
                mlp_tile_rows=0,
                segment_layers=0,
            ),
        ),
    ],
)
def test_keys_by_hand_are_not_chosen(keys: dict[str, object], fixed: FixedMemory) -> None:
    assert fixed_keys(load_config(None, keys)) == fixed


@pytest.mark.parametrize(
    ("train", "numbers"),
    [
        (TrainConfig(), 2.0),
        (TrainConfig(optimizer="sgd"), 0.0),
        (TrainConfig(optimizer="sgd", optimizer_arguments=("momentum=0.9",)), 1.0),
        (TrainConfig(optimizer="torch.optim.NAdam"), 2.0),
    ],
)
def test_numbers_of_state_are_counted_on_the_optimizer_itself(train: TrainConfig, numbers: float) -> None:
    assert state_numbers(replace(train, lr=1e-3)) == numbers


def test_settings_follow_the_keys() -> None:
    usual = run_memory_settings(config_of(), gpu=True)
    assert (usual.parameter_bytes, usual.compute_bytes, usual.state_numbers) == (4, 2, 2.0)
    assert usual.fused_norms and not run_memory_settings(config_of(), gpu=False).fused_norms
    other = run_memory_settings(
        config_of(
            model__dtype="bfloat16",
            train__float8="rows",
            lora__rank=8,
            context__mode="free",
            mtp__depths=1,
        ),
        gpu=True,
    )
    assert (other.parameter_bytes, other.lora_rank, other.depths) == (2, 8, 1)
    assert other.free and other.float8 and not usual.float8


def test_scans_go_by_torch_without_their_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """In float32, and on a GPU whose machine has no flash-linear-attention."""
    assert run_memory_settings(config_of()).scan_kernels
    assert not run_memory_settings(config_of(model__compute_dtype="float32")).scan_kernels
    run = run_of(config_of())
    assert run.settings.scan_kernels
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr(run_memory, "fla_device_lack", lambda device: "flash-linear-attention")
    assert not run.settings.scan_kernels


def test_the_fullest_steps_are_found_among_all() -> None:
    config = config_of()
    plans, limit = run_of(config).ahead.fullest_plans(config, Cost())
    assert max(plan.most_rows for plan in plans) >= 8192 and any(max(plan.lengths) == 8192 for plan in plans)
    assert limit == []


def test_dynamic_plans_are_bounded_by_the_limit_of_rows() -> None:
    config = config_of(context__planner="dynamic", context__max_tokens_per_slot=8192)
    plans, (limit,) = run_of(config).ahead.fullest_plans(config, Cost())
    assert len(plans) <= 2 and any(max(plan.lengths) == 8192 for plan in plans)
    assert limit.most_rows == 8192 and limit.timeline().rows.tolist() == [[8192, 8192]]


def test_planners_that_are_compared_decide_which_steps_are_planned() -> None:
    """A configuration of one degree whose planners mix degrees gets the few plans of dynamic ones."""
    config = config_of()
    ahead = replace(run_of(config).ahead, planners=("dynamic",))
    plans, (limit,) = ahead.fullest_plans(config, Cost())
    assert len(plans) <= 2 and limit.most_rows == 8192


def test_rows_to_try_reach_from_the_longest_document_to_one_micro_batch() -> None:
    config = config_of(context__max_tokens_per_slot="auto", context__planner="dynamic")
    rows = run_of(config, gpus=4).ahead.rows_to_try(config)
    assert rows[0] == 2048 + 2 and rows[-2] < sum(lengths_of_step(13)) / 4 + 2 <= rows[-1]


def test_rows_to_try_hold_the_longest_document_in_a_group_that_the_heads_allow() -> None:
    """a2a deals 6 heads to 2 of 8 slots at most that fill them evenly; 8 would hold the document in fewer rows."""
    config = config_of(context__max_tokens_per_slot="auto", context__planner="dynamic", context__cp_comm_type="a2a")
    ahead = ComingSteps(lambda step: [8192], Layout(ranks=8), 6, 0, config.train.steps)
    rows = ahead.rows_to_try(config)
    assert rows == [4096 + 2]
    limited = replace(config, context=replace(config.context, max_tokens_per_slot=rows[0]))
    assert all(plan.lengths == (8192,) for plan in ahead.fullest_plans(limited, Cost())[0])
    fixed = config_of(context__max_tokens_per_slot="auto", context__context_parallel_size=1)
    assert run_of(fixed, gpus=4).ahead.rows_to_try(fixed) == [8194]
    later = replace(ahead, longest=10000)  # in a step that is not looked at
    assert later.rows_to_try(config) == [5002] and replace(later, last=0).rows_to_try(config) == [5002]


def test_less_memory_means_slower_measures_and_then_a_refusal_with_the_bytes() -> None:
    config = config_of()
    run, host = run_of(config), 64 * GIB
    rooms = (400, 100, 90)
    plans = [run.choose_memory(MemoryBudget(device=room * GIB, host=host))[1] for room in rooms]
    assert set(plans[0].measures) == {"none"} and plans[0].gathered_once
    assert [plan.device.total <= room * GIB for plan, room in zip(plans, rooms, strict=True)] == [True] * 3
    kept = [plan.measures.count("none") for plan in plans]
    assert kept == sorted(kept, reverse=True) and kept[-1] < 36
    with pytest.raises(
        PlanError, match=r"does not fit under any measure: with a slot of 8,192 rows .* \([\d,]+ bytes\)"
    ):
        run.choose_memory(MemoryBudget(device=20 * GIB, host=host))
    by_hand = run_of(config_of(train__activation_checkpointing="none"))
    with pytest.raises(PlanError, match="measure = 'none'"):
        by_hand.choose_memory(MemoryBudget(device=50 * GIB, host=host))


def test_rows_auto_are_those_whose_steps_are_fastest() -> None:
    """With little room fewer rows, which need less recomputation, and with much as many as a step has."""
    run = run_of(config_of(context__max_tokens_per_slot="auto", context__planner="dynamic"))
    run = replace(run, model=QWEN3_8B | {"num_hidden_layers": 8})
    few_rows, _ = run.choose_memory(MemoryBudget(device=40 * GIB, host=0))
    many_rows, much = run.choose_memory(MemoryBudget(device=200 * GIB, host=0))
    assert set(much.measures) == {"none"} and many_rows >= few_rows >= much.rows // 2


def test_a_model_that_cannot_be_counted_trains_by_its_keys() -> None:
    run, room = run_of(config_of()), MemoryBudget(device=400 * GIB)
    rows, plan, reason = run_memory.plan_or_explain(run, room)
    assert rows == 8192 and plan is not None and not reason
    unheard = replace(run, model={"model_type": "unheard of"})
    rows, plan, reason = run_memory.plan_or_explain(unheard, room)
    assert rows == 8192 and plan is None and "hidden_size" in reason
    with pytest.raises(ConfigError, match="does not fit"):
        run_memory.plan_or_explain(run, MemoryBudget(device=GIB))


def test_auto_rows_of_a_model_that_cannot_be_counted() -> None:
    """The most that a step has on GPUs, which the warm-up halves; on CPUs the fewest that hold the longest document."""
    config = config_of(context__max_tokens_per_slot="auto", context__planner="dynamic")
    runs = [replace(run_of(config, gpu=gpu), model={"model_type": "unheard of"}) for gpu in (True, False)]
    rows = [run_memory.plan_or_explain(run, MemoryBudget(device=GIB))[0] for run in runs]
    assert rows == [runs[0].ahead.rows_to_try(config)[-1], 4096 + 2] and rows[0] > rows[1]
