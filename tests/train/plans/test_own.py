"""A planner and a cost of one's own, taken by their dotted names: in plans, in runs, ahead of time; their errors."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longspan import World
from longspan.config.file import load_config
from longspan.config.sections import RunConfig
from longspan.data.step_order import StepOrder
from longspan.errors import ConfigError, PlanError
from longspan.layout import Layout
from longspan.plan import plan_fixed, read_plans
from longspan.run.checks import check_config
from longspan.run.loggers import read_metrics
from longspan.run.loop import train
from longspan.run.progress import ProgressDisplay
from longspan.testing import backend, run_ranks
from longspan.train.plans import PlanChoice, plan_steps
from longspan.train.plans.run_cost import call_planner
from tests.train.plans.own_things import Slow, slow
from tests.train.small import small_config, train_rank

OWN = "tests.train.plans.own_things."
LENGTHS = (90, 7, 40, 12)


def config_of(**keys: Any) -> RunConfig:
    return load_config(None, {key.replace("__", "."): value for key, value in keys.items()})


def test_a_planner_decides_groups_and_the_options_the_rest() -> None:
    config = config_of(context__planner=f"{OWN}one_by_one", context__cp_comm_type="all_gather", parallel__pp=2)
    plan = PlanChoice.training(config, heads=4).plan(LENGTHS, Layout(8, pp=2), targets=77)
    assert [group.slots for batch in plan.micro_batches for group in batch.groups] == [(0, 1, 2, 3)] * 4
    assert (plan.planner, plan.targets, plan.max_tokens_per_slot, len(plan.micro_batches)) == (
        f"{OWN}one_by_one",
        77,
        1024,
        4,
    )
    assert plan.predicted_seconds >= plan.lower_bound_seconds > 0 and plan.check() == plan
    three = PlanChoice.training(config).plan(LENGTHS[:3], Layout(8, pp=2))
    assert len(three.micro_batches) == 4 and not three.micro_batches[3].groups  # a multiple of the stages
    empty = PlanChoice.training(config).plan((), Layout(8, pp=2))
    assert not empty.lengths and len(empty.micro_batches) == 2


def test_a_function_with_an_argument_set_is_a_planner() -> None:
    choice = PlanChoice.training(config_of(context__planner=f"{OWN}one_degree"))
    plan = choice.plan(LENGTHS, Layout(4))
    assert plan.micro_batches == plan_fixed(LENGTHS, Layout(4), 2, options=choice.options).micro_batches


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "dynamc",
            r"context\.planner is 'dynamc'; did you mean 'dynamic'\?, or a function of your own with",
        ),
        (
            "no_such_module.plan",
            r"context\.planner is 'no_such_module\.plan', and no_such_module cannot be imported",
        ),
        (
            f"{OWN}nowhere",
            r"own_things\.nowhere' is no function; name one of lengths, home and options that",
        ),
        (f"{OWN}number", r"own_things\.number' is no function"),
        (f"{OWN}nothing", r"own_things\.nothing' returned NoneType; it must return a longspan\.Plan"),
        (f"{OWN}fails", r"own_things\.fails' failed for 1 document on 4 slots: KeyError: 'slots'"),
        (f"{OWN}fewer_slots", r"must return a longspan\.Plan of 4 slots \(home\.slots\)"),
        (f"{OWN}left_out", r"returned a plan that cannot run: document 0 \(2048 rows\) is in no micro-batch"),
        (f"{OWN}all_on_one_slot", r"cannot run: slot 0 holds 2048 rows .*above context.\w*max_tokens_per_slot 1024"),
    ],
)
def test_a_planner_that_does_not_fit_is_refused_before_a_process_group(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(config_of(context__planner=name), 4)
    of_evaluation = message.replace(r"context\.planner", r"context\.eval_planner")
    rows = {"context__eval_max_tokens_per_slot": 1024}
    with pytest.raises(ConfigError, match=of_evaluation):
        check_config(config_of(context__eval_planner=name, **rows), 4)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("sorted_lengths", r"must return .* of the 4 documents that it received, in their order"),
    ],
)
def test_a_plan_of_a_step_is_checked(name: str, message: str) -> None:
    choice = PlanChoice.training(config_of(), heads=2)
    with pytest.raises(PlanError, match=message):
        call_planner(OWN + name, "context.planner", LENGTHS, Layout(4), options=choice.options)


def test_evaluation_takes_the_planner_of_training_unless_it_has_its_own() -> None:
    sets: list[dict[str, Any]] = [{"name": "a", "path": "x"}, {"name": "b", "path": "x", "context_parallel_size": 4}]
    sets += [{"name": "c", "path": "x", "planner": f"{OWN}one_by_one"}]
    config = config_of(context__planner=f"{OWN}one_degree", context__eval_planner="", eval=sets)
    own = config_of(model__path="folder", context__planner=f"{OWN}one_degree", train__lr=1.0, eval=sets)
    assert [entry.planner for entry in config.eval] == ["fixed", "fixed", f"{OWN}one_by_one"]  # the demo's is fixed
    assert [entry.planner for entry in own.evaluations] == [*[f"{OWN}one_degree"] * 2, "fixed", f"{OWN}one_by_one"]
    plan = PlanChoice.evaluation(own, own.eval[2]).plan(LENGTHS, Layout(4))
    assert plan.cost.passes == "forward" and len(plan.micro_batches) == 4


def test_plans_are_made_ahead_in_another_process() -> None:
    config = config_of(context__planner=f"{OWN}one_by_one", context__max_tokens_per_slot=256)
    lengths = np.random.default_rng(0).integers(2, 400, 40)
    order = StepOrder(lengths, tokens_per_step=1000, seed=3, eval_documents=4)
    choice = PlanChoice.training(config, cost=slow)
    with (
        plan_steps(choice, order, Layout(4), ahead=2) as ahead,
        plan_steps(choice, order, Layout(4), ahead=0) as inline,
    ):
        assert ahead.ahead == 2
        for step in (0, 1, 7):
            assert ahead.plan(step) == inline.plan(step) and ahead.plan(step).planner == f"{OWN}one_by_one"
            assert isinstance(ahead.plan(step).cost, Slow)
    broken = replace(choice, planner=f"{OWN}fails")
    with (
        plan_steps(broken, order, Layout(4), ahead=1) as ahead,
        pytest.raises(PlanError, match="KeyError: 'slots'"),
    ):
        ahead.plan(0)


def test_a_cost_of_ones_own_prices_plans() -> None:
    config = config_of(context__planner="dynamic")
    plan = PlanChoice.training(config, cost=slow).plan((1000, 900, 800, 700), Layout(4))
    assert {group.degree for batch in plan.micro_batches for group in batch.groups} == {1}
    shared = PlanChoice.training(config, cost=slow).plan((2000,), Layout(4))
    assert shared.predicted_seconds > 5.0 and shared.cost.source == "a slow network"
    forward = PlanChoice.evaluation(config, cost=slow).plan((3000,), Layout(4))
    assert isinstance(forward.cost, Slow) and forward.predicted_seconds > 5.0  # its own seconds for both passes


def test_a_run_with_a_planner_of_its_own(tmp_path: Path) -> None:
    (tmp_path / "others").mkdir()
    (tmp_path / "others" / "a.py").write_text("def value(rank):\n    return rank\n" * 9)
    sets = [{"name": "others", "path": str(tmp_path / "others"), "planner": f"{OWN}one_degree"}]
    keys = {"context__planner": f"{OWN}one_by_one", "context__eval_planner": f"{OWN}one_by_one", "eval": sets}
    config = small_config(tmp_path, **keys, train__steps=3)
    (result, _) = run_ranks(train_rank, 2, config, 2, timeout=120)
    folder = Path(config.run.dir)
    plans, rows = list(read_plans(folder / "plans.jsonl")), read_metrics(folder / "metrics.jsonl")
    assert [(step, plan.planner) for step, plan in plans] == [(step, f"{OWN}one_by_one") for step in (1, 2, 3)]
    assert all(
        len(batch.groups) == 1 and batch.groups[0].degree == 2 for _, plan in plans for batch in plan.micro_batches
    )
    assert {row["planner"] for row in rows if "eval_loss" in row and "eval_name" not in row} >= {f"{OWN}one_by_one"}
    assert {row["planner"] for row in rows if row.get("eval_name")} == {f"{OWN}one_degree"}
    usual = small_config(tmp_path / "usual", train__steps=3)
    (other, _) = run_ranks(train_rank, 2, replace(usual, data=config.data), 2, timeout=120)
    assert result.last_loss == pytest.approx(other.last_loss, rel=1e-5)


def refusal(rank: int, config: RunConfig) -> str:
    """What a rank raises before its first collective, in a world whose other ranks it could not reach."""
    with World(Layout(2), backend=backend(), timeout=60) as world, ProgressDisplay(1, None) as display:
        try:
            train(config, world, display)
        except ConfigError as error:
            return str(error)
    return ""


def test_every_rank_refuses_the_same(tmp_path: Path) -> None:
    first, second = run_ranks(refusal, 2, small_config(tmp_path, context__planner=f"{OWN}fails"), timeout=120)
    assert first == second and f"{OWN}fails" in first
