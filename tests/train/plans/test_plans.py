"""Plans of training steps: from the step alone, the same whether another process makes them ahead or not."""

import json
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Literal

import numpy as np
import pytest

from longspan.config.defaults import resolve_defaults
from longspan.config.sections import ContextConfig, ParallelConfig, RunConfig, RunSection, TrainConfig
from longspan.data.step_order import StepOrder
from longspan.layout import Layout
from longspan.plan import Cost, Link, Machine
from longspan.train.plans import PlanChoice, StepPlanner, find_run_cost, plan_steps

LENGTHS = np.random.default_rng(0).integers(2, 400, 80)
HOME = Layout(ranks=6)
DYNAMIC = ContextConfig(planner="dynamic", max_tokens_per_slot=256)


def run_of(context: ContextConfig) -> RunConfig:
    return resolve_defaults(RunConfig(context=context))


def order() -> StepOrder:
    return StepOrder(LENGTHS, tokens_per_step=2000, seed=3, eval_documents=4)


def test_a_planner_that_has_travelled_makes_the_same_plans() -> None:
    planner = StepPlanner(PlanChoice.training(run_of(DYNAMIC)), order(), HOME)
    travelled = pickle.loads(pickle.dumps(planner))
    for step in (5, 0, 19):
        plan = planner(step)
        assert travelled(step) == plan
        assert list(plan.lengths) == LENGTHS[list(order().documents_of_step(step))].tolist()


def test_a_measured_cost_decides_about_plans(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    slow = Machine(micro_batch_seconds=5.0, inside=Link.of(0.0, 1e6))
    path.write_text(json.dumps(slow.to_json()))
    machine = RunSection(machine=str(path))
    plan = StepPlanner(PlanChoice.training(replace(run_of(DYNAMIC), run=machine)), order(), HOME)(0)
    assert plan != StepPlanner(PlanChoice.training(run_of(DYNAMIC)), order(), HOME)(0)
    assert plan.predicted_seconds >= 5.0 * len(plan.micro_batches)
    path.unlink()  # a run keeps its cost
    assert (
        PlanChoice.evaluation(replace(run_of(DYNAMIC.set_evaluation(context_parallel_size=2)), run=machine))
        .plan((9, 9), HOME)
        .predicted_seconds
        >= 5.0 / 3
    )


def test_without_a_cost_plans_on_gpus_are_priced_for_the_model(tmp_path: Path) -> None:
    path, said, config = tmp_path / "machine.json", list[str](), run_of(DYNAMIC)
    path.write_text(json.dumps(Machine(micro_batch_seconds=5.0).to_json()))
    model = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    model["vocab_size"] = 1000
    on_cpus = find_run_cost(config, model, said.append, gpu=False)
    assert on_cpus == Machine.cpus().cost(model) and on_cpus.source == "" and not said
    measured = replace(config, run=RunSection(machine=str(path)))
    assert find_run_cost(measured, model, said.append, gpu=True).micro_batch_seconds == 5.0
    found = find_run_cost(config, model, said.append, gpu=True)
    assert found == Machine.known("H200").cost(model) != Cost() and not said
    assert PlanChoice.training(config, cost=found).options.cost == found
    assert PlanChoice.evaluation(config, cost=found).options.cost == found.forward_only()
    with plan_steps(PlanChoice.training(run_of(DYNAMIC), cost=found), order(), HOME, ahead=2) as plans:
        assert plans.plan(0).cost == found
    full = replace(config, train=TrainConfig(activation_checkpointing="full"))
    assert found.attention_seconds < find_run_cost(full, model, said.append, gpu=True).attention_seconds
    assert find_run_cost(config, model | {"kv_lora_rank": 8}, said.append, gpu=True) == Cost()
    assert "priced as for a Qwen3-8B: dict has latent attention" in said[0]


def test_tensor_parallel_ranks_share_the_cost_of_a_slot() -> None:
    context = replace(DYNAMIC, node_size=4)
    cost, evaluated = Cost().shared_by(2), run_of(context.set_evaluation(context_parallel_size=2))
    for choice, expected in (
        (PlanChoice.training(run_of(context)), cost),
        (PlanChoice.evaluation(evaluated), cost.forward_only()),
    ):
        assert choice.plan((300, 200, 9), Layout(8, tp=2)).cost == expected


def test_a_free_step_pays_for_the_closing_of_its_home() -> None:
    free = PlanChoice.training(run_of(replace(DYNAMIC, mode="free")))
    seconds = [
        replace(free, weights=weights, weight_bytes=each)
        .plan((300, 200, 9), Layout(6, dp_replicate=copies))
        .predicted_seconds
        for weights, each, copies in ((0, 2, 1), (10**9, 2, 1), (10**9, 8, 1), (10**9, 2, 3))
    ]
    # a slot's five sixths of 6e9 or 16e9 bytes; half, and of its half of 4e9 bytes 4/3 between three replicas
    added = [10e-3 + wire / 350e9 for wire in (5e9, 16e9 * 5 / 6, 3e9 + 2e9 * 4 / 3)]
    assert [each - seconds[0] for each in seconds[1:]] == pytest.approx(added, rel=1e-9)


@pytest.mark.parametrize("planner", ["fixed", "padded", "dynamic"])
def test_evaluation_deals_out_rows_as_training_does(planner: Literal["fixed", "padded", "dynamic"]) -> None:
    context = ContextConfig(planner=planner, partition="contiguous", max_tokens_per_slot=256).set_evaluation(
        planner=planner
    )
    training, evaluation = PlanChoice.training(run_of(context)), PlanChoice.evaluation(run_of(context))
    for choice in (replace(training, degree=4), replace(evaluation, degree=4)):
        batches = choice.plan((1000, 30), Layout(4)).micro_batches
        assert {group.partition for batch in batches for group in batch.groups if group.degree > 1} == {"contiguous"}
    (group,) = evaluation.at_degree(2, longest=1000).plan((1000,), Layout(4)).micro_batches[0].groups
    assert group.shares.rows(1).tolist() == list(range(500, 1000))


@pytest.mark.parametrize("context", [DYNAMIC, replace(DYNAMIC, planner="fixed", context_parallel_size=2)], ids=str)
def test_plans_made_ahead_are_those_made_inline(context: ContextConfig) -> None:
    choice = PlanChoice.training(run_of(context))
    with (
        plan_steps(choice, order(), HOME, ahead=2) as ahead,
        plan_steps(choice, order(), HOME, ahead=0) as inline,
    ):
        assert ahead.ahead == (2 if context.planner == "dynamic" else 0)
        for step in (4, 5, 6, 63, 64, 65, 4):
            assert ahead.plan(step) == inline.plan(step)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_evaluations_lay_out_rows_as_training_does(sequence_parallel: bool) -> None:
    config = resolve_defaults(RunConfig(parallel=ParallelConfig(tp=2, sequence_parallel=sequence_parallel)))
    assert PlanChoice.evaluation(config, cost=Cost(), heads=8).options.row_multiple == (2 if sequence_parallel else 1)
