"""The warm-up before step 1: what it runs stands for coming plans, and no later loss changes by a bit."""

import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

from longspan import World, prepare
from longspan.config.sections import RunConfig
from longspan.layout import Layout
from longspan.model import preset_config
from longspan.mtp import MtpLoss, add_mtp
from longspan.plan import Group, MicroBatch, Plan, plan_dynamic, plan_fixed
from longspan.run import loop as loop_module, warm_up as warm_up_module
from longspan.run.metrics import read_metrics
from longspan.run.warm_up import group_kind, plan_warm_up, repeat_on_all_slots, run_warm_up, smallest_group_of_each_kind
from longspan.testing import run_ranks
from longspan.train.optim.optimizer import allocate_adam_states
from tests.run.runs.test_lora_run import write_base
from tests.train.small import small_config, train_rank, without_times

LENGTHS = [900, 40, 300, 8, 8, 8, 17, 120, 64, 65, 33, 1]
MOE = {"model__preset": "qwen3-moe-tiny"}
MASKED: dict[str, object] = {}  # of rows with masks, that the test writes
HOMES: dict[str, tuple[int, Mapping[str, object]]] = {
    "masked rows": (2, MASKED),
    "stages": (2, {"parallel__pp": 2, "context__context_parallel_size": 1, "evaluation__context_parallel_size": 1}),
    "tensor and experts": (4, MOE | {"parallel__tp": 2, "parallel__ep": 2, "optimizer__class": "sgd"}),
}
MARKS = dict.fromkeys(("stages", "tensor and experts"), pytest.mark.whole)


def _train(rank: int, cold: RunConfig, warm: RunConfig, ranks: int) -> list[str]:
    train_rank(rank, cold, ranks)
    lines: list[str] = []
    before, said = loop_module.needs_warm_up, warm_up_module.run_warm_up

    def noted(training: Any, plans: Any, evaluation: Any, log: Any) -> None:
        said(training, plans, evaluation, lines.append)

    loop_module.needs_warm_up, warm_up_module.run_warm_up = lambda world: True, noted  # type: ignore[assignment]
    try:
        train_rank(rank, warm, ranks)
    finally:
        loop_module.needs_warm_up, warm_up_module.run_warm_up = before, said
    return lines


def _write_masked_rows(path: Path) -> str:
    rows = ({"input_ids": [i, *range(1, 30)], "loss_mask": [0] * 20 + [1] * 10} for i in range(16))
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.mark.parametrize("home", [pytest.param(home, marks=MARKS.get(home, ())) for home in HOMES])
def test_losses_are_the_same_to_the_last_bit(tmp_path: Path, home: str) -> None:
    ranks, changes = HOMES[home]
    if changes is MASKED:
        tokenizer = write_base(tmp_path / "base")
        changes = {"data__path": _write_masked_rows(tmp_path / "rows.jsonl"), "data__tokenizer": str(tokenizer)}
    names = ("cold", "warm")
    configs = [small_config(tmp_path, run__dir=str(tmp_path / name), train__steps=2, **changes) for name in names]
    (begin, end), *_ = run_ranks(_train, ranks, *configs, ranks)
    assert begin.startswith("compiling kernels and finding memory: ") and "coming steps and evaluation" in begin
    assert end.startswith("kernels compiled and memory found in ")
    cold, warm = ([without_times(row) for row in read_metrics(tmp_path / name / "metrics.jsonl")] for name in names)
    assert cold == warm and len(cold) == (3 if home == "stages" else 4)  # stages are evaluated at one degree


def test_kinds_of_groups() -> None:
    def kind(*lengths: int, slots: int = 2, **changes: Any) -> Any:
        return group_kind(Group(tuple(range(slots)), tuple(range(len(lengths))), lengths, **changes))

    assert kind(4096) == kind(9000) != kind(4096, 4096) == kind(9000, 4, 1) != kind(9000, 3, 1)
    assert kind(*[4096] * 256) != kind(*[4096] * 257)
    assert kind(330) != kind(320) == kind(300) and kind(513) == kind(100_000) != kind(512)
    assert kind(4096) != kind(4096, slots=4) and kind(4096) != kind(4096, cp_comm_type="a2a")
    assert kind(3, 5, pad_to=4096) == kind(4096, 4096)


@pytest.mark.parametrize("slots", [1, 3, 4])
def test_every_slot_meets_every_kind(slots: int) -> None:
    plans = [plan_fixed(LENGTHS, Layout(slots), cp=slots, max_tokens_per_slot=1024)]
    plans.append(plan_dynamic(LENGTHS, Layout(slots), max_tokens_per_slot=400 if slots > 1 else 1024))
    training, evaluation = plan_warm_up(plans, plans[1], in_flight=2)
    kinds = {group_kind(group) for plan in plans for batch in plan.micro_batches for group in batch.groups}
    for slot in range(slots):
        groups = [group for batch in training.micro_batches for group in batch.groups]
        assert {group_kind(group) for group in groups if slot in group.slots} == kinds
    assert len(training.micro_batches) % 2 == 0 and training.max_tokens_per_slot is None
    most = max(int(plan.timeline().rows.max()) for plan in plans)
    rows = training.timeline().rows.max(1)
    assert rows[0] == rows[1] == most == rows.max()
    assert evaluation.micro_batches[0].lengths in [batch.lengths for batch in plans[1].micro_batches]


def test_only_the_largest_micro_batch_is_run_whole() -> None:
    several, pair = Group((0,), (0, 1), (60_000, 5536)), Group((2, 3), (3,), (9000,))
    batches = (MicroBatch((several, Group((1,), (2,), (50_000,)))), MicroBatch((Group((0, 1), (4,), (120,)), pair)))
    lengths = (60_000, 5536, 50_000, 9000, 120)
    plan = Plan(slots=4, lengths=lengths, micro_batches=batches, targets=sum(lengths) - 5)
    evaluations = [MicroBatch((Group((0,), (0,), (rows,)),)) for rows in (60_000, 90_000)]
    shorter, longer = (
        plan_warm_up([plan], Plan(4, batch.lengths, (batch,), targets=batch.lengths[0] - 1), in_flight=1)
        for batch in evaluations
    )
    first, *others = shorter[0].micro_batches
    assert first.lengths == batches[0].lengths
    assert max(n for batch in [*others, *shorter[1].micro_batches] for n in batch.lengths) == 2048
    assert longer[1].lengths[0] == 90_000  # which may not fit


def test_the_smallest_group_of_a_kind_is_laid_on_all_slots() -> None:
    batch = MicroBatch((Group((1, 2), (0, 1), (600, 1500)), Group((3,), (2,), (9000,))))
    other = MicroBatch((Group((0, 1), (3, 4), (600, 900)),))
    plan = Plan(slots=5, lengths=(600, 1500, 9000, 600, 900), micro_batches=(batch, other), targets=12595)
    groups = smallest_group_of_each_kind([plan])
    assert [group.lengths for group in groups.values()] == [(9000,), (600, 900)]
    laid = [[group.slots for group in batch.groups] for batch in repeat_on_all_slots(other.groups[0], 5)]
    assert laid == [[(0, 1), (2, 3)], [(3, 4)]]


@pytest.mark.parametrize("planner", ["fixed", "dynamic"])
def test_groups_are_made_before_the_first_pass(planner: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(warm_up_module, "_run_plan", lambda training, plan, *, backward: calls.append(backward))
    monkeypatch.setattr(warm_up_module, "allocate_adam_states", lambda optimizer: None)
    channels, control = SimpleNamespace(connect_pairs=lambda: calls.append("pairs")), SimpleNamespace(barrier=str)
    world = SimpleNamespace(home=Layout(2), device=torch.device("cpu"), channels=channels, control=control)
    world.prepare = calls.append
    config = small_config(tmp_path, context__planner=planner)
    training: Any = SimpleNamespace(world=world, config=config, optimizer=None, model=nn.Linear(1, 1))
    plans = [plan_fixed(lengths, Layout(2), cp=2) for lengths in ([9, 4], [8], [7, 5])]
    run_warm_up(training, plans[:2], plans[2], lambda line: None)
    assert calls == [*plans, *(["pairs"] if planner == "dynamic" else []), True, False]


@pytest.mark.parametrize("made", [True, False])
def test_states_of_an_optimizer_that_has_not_stepped(made: bool) -> None:
    weights, moved = [], [torch.randn(8, generator=torch.Generator().manual_seed(1)) for _ in range(3)]
    for first in (False, True):
        parameter = nn.Parameter(torch.randn(8, generator=torch.Generator().manual_seed(0)))
        optimizer: Optimizer = AdamW([parameter], lr=0.1, weight_decay=0.5, fused=True) if made else SGD([parameter])
        if first:
            assert allocate_adam_states(optimizer) == made and parameter.grad is None and bool(optimizer.state) == made
            assert not allocate_adam_states(optimizer)
        for gradient in moved:
            parameter.grad = gradient.clone()
            optimizer.step()
        weights.append(parameter.detach().clone())
    assert torch.equal(*weights)


def test_weight_decay_in_the_gradient_leaves_no_moment() -> None:
    parameter = nn.Parameter(torch.ones(4))
    optimizer = Adam([parameter], lr=0.1, weight_decay=0.5)
    assert allocate_adam_states(optimizer) and optimizer.param_groups[0]["weight_decay"] == 0.5
    assert all(not state.any() for state in optimizer.state[parameter].values())
    assert parameter.tolist() == [1.0] * 4


def _warm_up_models(rank: int) -> None:
    config = preset_config("qwen3-tiny", vocab_size=64)
    labelled = preset_config("qwen3-tiny", vocab_size=64)
    labelled.num_labels = 3
    labelled.pad_token_id = 0
    with World(Layout(1), timeout=60) as world:
        family = plan_fixed([9, 7, 30], world.home, 1, parents=(2, 2, -1))
        depths = add_mtp(AutoModelForCausalLM.from_config(config), 2)
        for model, mtp in ((depths, MtpLoss()), (AutoModelForSequenceClassification.from_config(labelled), None)):
            training: Any = SimpleNamespace(
                model=prepare(model, world), world=world, router=None, mtp_loss=mtp, distillation=None
            )
            for plan in (family, plan_fixed([30, 9], world.home, 1)):
                for backward in (False, True):
                    warm_up_module._run_plan(training, plan, backward=backward)


def test_depths_and_scores_are_warmed_up_over_families_too() -> None:
    run_ranks(_warm_up_models, 1)
