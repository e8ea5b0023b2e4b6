"""A teacher in plans of memory and in prices: its weights, its pass, and what of it meets the model's loss."""

from dataclasses import replace
from typing import Any

import pytest

from longspan.config.file import load_config
from longspan.layout import Layout
from longspan.plan import Machine, MemorySettings, plan_fixed
from longspan.plan.cost.machine import CostSettings
from longspan.plan.memory.memory_plan import MemoryNeeds
from longspan.plan.memory.teacher_bytes import PlannedTeacher
from longspan.plan.shape.model_shape import ModelShape
from longspan.plan.shape.packed import packed_weights_of_model
from longspan.resolve.facts import Facts
from longspan.resolve.resolved import resolve
from longspan.resolve.run_cost import find_run_cost

SIZES = {"model_type": "qwen3", "vocab_size": 4096, "head_dim": 64, "num_attention_heads": 8, "num_key_value_heads": 2}
STUDENT = {**SIZES, "hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 4}
TEACHER = {**SIZES, "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 6, "vocab_size": 5000}
HOME, ROWS = Layout(2), 4096
PLAN = plan_fixed([2 * ROWS], HOME, cp=2)


def needs(teacher: PlannedTeacher | None, **changes: Any) -> MemoryNeeds:
    return MemoryNeeds.of(STUDENT, HOME, PLAN, MemorySettings(teacher=teacher, **changes))


def test_bytes_of_a_teacher_are_its_shards_its_pass_and_what_meets_the_loss() -> None:
    numbers = ModelShape.of(TEACHER).stored_weights
    packed = packed_weights_of_model(TEACHER, "nf4")
    plain = needs(None).places[0]
    for frozen, on_host in (("whole", False), ("nf4", False), ("nf4", True)):
        teacher = PlannedTeacher(TEACHER, frozen, offload_weights=on_host)
        place = needs(teacher).places[0]
        more = place.resident_bytes.total - plain.resident_bytes.total
        wanted = numbers * 2 if frozen == "whole" else (numbers - packed.numbers) * 2 + packed.bytes
        host = place.host_bytes(needs(teacher).loads, ["none"] * 4).total
        host -= plain.host_bytes(needs(None).loads, ["none"] * 4).total
        # Norms are in no shape.
        assert (host if on_host else more) == pytest.approx(wanted / 2, rel=2e-3)
        assert (more if on_host else host) == 0
        in_pass, at_loss, *_ = [*place.moments(needs(teacher).loads, ["none"] * 4)][1:]
        _, plain_loss, *_ = plain.moments(needs(None).loads, ["none"] * 4)
        assert in_pass.kept == 0 and in_pass.gathered > 0 and in_pass.work > 3 * ROWS * 1024 * 2
        assert at_loss.work - plain_loss.work == ROWS * 1024 * 2  # its hidden rows
        assert at_loss.gathered - plain_loss.gathered == 5000 * 1024 * 2  # its head


def test_a_free_plan_holds_the_whole_teacher() -> None:
    teacher = PlannedTeacher(TEACHER, "nf4")
    free = needs(teacher, free=True)
    *_, last = free.places[0].moments(free.loads, ["none"] * 4)
    plain = needs(None, free=True)
    *_, last_without = plain.places[0].moments(plain.loads, ["none"] * 4)
    whole = ModelShape.of(TEACHER).stored_weights * 2
    assert last.gathered - last_without.gathered == pytest.approx(whole, rel=2e-3)


def test_seconds_have_the_teachers_pass_in_training_and_evaluation() -> None:
    config = load_config(None, {"run.machine": "h200", "context.mode": "lockstep"})
    machine, teacher = Machine.known("H200"), PlannedTeacher(TEACHER)
    logged = list[str]()
    costs = [
        find_run_cost(config, STUDENT, logged.append, gpu=True, machine=machine, slots=2, teacher=one)
        for one in (None, teacher)
    ]
    settings = CostSettings(trains_all=False, forward=True, shards=2)
    wanted = machine.cost(TEACHER, replace(settings, compiled=config.train.compile))
    for without, with_teacher in (costs, [cost.forward_only() for cost in costs]):
        for name in ("linear_seconds", "attention_seconds", "ring_bytes"):
            assert getattr(with_teacher, name) == pytest.approx(getattr(without, name) + getattr(wanted, name))
        assert with_teacher.inside_bytes_per_second == without.inside_bytes_per_second
    assert not logged


def test_lockstep_is_chosen_where_a_teacher_waits_on_the_host() -> None:
    keys = {"model.preset": "qwen3-4b", "optimizer.lr": 1e-5, "context.max_tokens_per_slot": 32768, "teacher.path": "t"}
    for on_host in (False, True):
        config = load_config(None, keys | {"teacher.offload_weights": on_host})
        facts = Facts(
            home=HOME,
            machine=Machine.known("H200"),
            model=STUDENT,
            lengths_of_step=lambda _: [32768, 1000],
            steps=1,
            teacher=PlannedTeacher(TEACHER, offload_weights=on_host),
        )
        mode = resolve(config, facts).config.context.mode
        assert mode == "lockstep" or not on_host
        assert facts.heads == 8
