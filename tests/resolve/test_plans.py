"""Plans of training steps and evaluations: their costs, degrees "auto", planners and costs of one's own, made ahead."""

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longspan.comm import World
from longspan.comm.world_machine import set_world_machine
from longspan.config.defaults import resolve_defaults
from longspan.config.file import load_config
from longspan.config.plan_section import EvaluationSection
from longspan.config.sections import ContextConfig, RunConfig
from longspan.data.step_order import StepOrder
from longspan.errors import ConfigError, PlanError
from longspan.layout import Layout
from longspan.plan import Cost, CostSettings, Link, Machine, plan_fixed, read_plans
from longspan.plan.shape.model_shape import QWEN3_8B
from longspan.resolve.evaluation import compare_degrees
from longspan.resolve.facts import Facts
from longspan.resolve.planner_config import PlannerConfig, StepPlanner, plan_by_custom_planner, plan_steps_ahead
from longspan.resolve.resolved import Reasons, choose_evaluation_degree, resolve
from longspan.resolve.run_cost import KEY, find_run_cost, read_run_machine
from longspan.resolve.ways import RankedWay, Way, set_default_mode
from longspan.run.checks import check_config
from longspan.run.metrics import read_metrics
from longspan.testing import run_ranks
from tests.resolve.own_things import Slow, slow
from tests.train.small import small_config, train_rank, write_texts

LENGTHS = np.random.default_rng(0).integers(2, 400, 80)
HOME = Layout(ranks=6)
DYNAMIC: dict[str, object] = {"context__planner": "dynamic", "context__max_tokens_per_slot": 256}
MODEL = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
MODEL["vocab_size"] = 1000
MEASURED = replace(Machine.cpus(), world=2, node_size=2, assumed=False, inside=Link.of(1e-3, 1e8))


def config_of(**keys: Any) -> RunConfig:
    return load_config(None, {key.replace("__", "."): value for key, value in keys.items()})


def order() -> StepOrder:
    return StepOrder(LENGTHS, tokens_per_step=2000, seed=3, eval_documents=4)


def _write(path: Path, machine: Machine) -> str:
    path.write_text(json.dumps(machine.to_json()))
    return str(path)


def test_plans_made_ahead_are_those_made_inline() -> None:
    fixed = config_of(context__max_tokens_per_slot=256, context__context_parallel_size=2)
    own = PlannerConfig.training(config_of(**DYNAMIC | {"context__planner": f"{OWN}one_by_one"}), cost=slow)
    dynamic = PlannerConfig.training(config_of(**DYNAMIC))
    for choice, count in ((dynamic, 2), (PlannerConfig.training(fixed), 0), (own, 2)):
        with (
            plan_steps_ahead(choice, order(), HOME, ahead=2) as ahead,
            plan_steps_ahead(choice, order(), HOME, ahead=0) as inline,
        ):
            assert ahead.ahead == count
            for step in (4, 5, 63, 64, 4):
                assert (plan := ahead.plan(step)) == inline.plan(step)
                assert list(plan.lengths) == LENGTHS[list(order().documents_of_step(step))].tolist()
            assert isinstance(ahead.plan(4).cost, Slow) == (choice is own)
    with (
        plan_steps_ahead(replace(own, planner=f"{OWN}fails"), order(), HOME, ahead=1) as ahead,
        pytest.raises(PlanError, match="KeyError: 'slots'"),
    ):
        ahead.plan(0)


# ---- costs


def test_a_measured_cost_decides_about_plans(tmp_path: Path) -> None:
    path, config = tmp_path / "machine.json", config_of(**DYNAMIC)
    measured = config_of(**DYNAMIC, run__machine=str(path), evaluation__context_parallel_size=2)
    _write(path, Machine(micro_batch_seconds=5.0, inside=Link.of(0.0, 1e6)))
    plan = StepPlanner(PlannerConfig.training(measured), order(), HOME)(0)
    assert plan != StepPlanner(PlannerConfig.training(config), order(), HOME)(0)
    assert plan.predicted_seconds >= 5.0 * len(plan.micro_batches)
    path.unlink()  # a run keeps its cost
    assert PlannerConfig.evaluation(measured).plan((9, 9), HOME).predicted_seconds >= 5.0 / 3


def test_without_a_cost_plans_on_gpus_are_priced_for_the_model(tmp_path: Path) -> None:
    said, config = list[str](), config_of(**DYNAMIC)
    on_cpus = find_run_cost(config, MODEL, said.append, gpu=False)
    assert on_cpus == Machine.cpus().cost(MODEL) and on_cpus.source == "" and not said
    measured = config_of(**DYNAMIC, run__machine=_write(tmp_path / "m.json", Machine(micro_batch_seconds=5.0)))
    assert find_run_cost(measured, MODEL, said.append, gpu=True).micro_batch_seconds == 5.0
    found = find_run_cost(config, MODEL, said.append, gpu=True)
    assert found == Machine.known("H200").cost(MODEL) != Cost() and not said
    assert PlannerConfig.training(config, cost=found).options.cost == found
    assert PlannerConfig.evaluation(config, cost=found).options.cost == found.forward_only()
    full = config_of(**DYNAMIC, train__activation_checkpointing="full")
    assert found.attention_seconds < find_run_cost(full, MODEL, said.append, gpu=True).attention_seconds
    assert find_run_cost(config, MODEL | {"kv_lora_rank": 8}, said.append, gpu=True) == Cost()
    assert "priced as for a Qwen3-8B: dict has latent attention" in said[0]


def test_what_a_run_does_changes_the_cost_of_its_model_on_a_machine(tmp_path: Path) -> None:
    file = _write(tmp_path / "machine.json", MEASURED)
    keys = {"run__machine": file, "model__preset": "qwen3-tiny", "model__dtype": "float32", "optimizer__lr": 1e-3}
    full = {"train__activation_checkpointing": "full"}
    for changes, settings in (
        ({}, CostSettings(bytes_per_number=4)),
        ({"train__float8": "rowwise"}, CostSettings(bytes_per_number=4, float8="rowwise")),
        (full, CostSettings(bytes_per_number=4, checkpoint_policies="full")),
        (
            full | {"lora__rank": 4},
            CostSettings(bytes_per_number=4, checkpoint_policies="full", trains_all=False, adapted_widths=2176),
        ),
        ({"mtp__num_layers": 1}, CostSettings(bytes_per_number=4, mtp_layers=1)),
    ):
        cost = find_run_cost(config_of(**keys, **changes), MODEL, print, gpu=False)
        assert cost == replace(MEASURED, source=file).cost(MODEL, settings), changes
        assert (cost.source, cost.inside_bytes_per_second) == (file, pytest.approx(1e8))
    on_gpus = find_run_cost(config_of(**keys), MODEL, print, gpu=True)  # computed in bfloat16
    assert on_gpus.ring_bytes < find_run_cost(config_of(**keys), MODEL, print, gpu=False).ring_bytes


def test_tensor_parallel_ranks_share_the_cost_of_a_slot() -> None:
    config = config_of(**DYNAMIC, context__node_size=4, evaluation__context_parallel_size=2)
    for choice, expected in (
        (PlannerConfig.training(config), Cost().shared_by(2)),
        (PlannerConfig.evaluation(config), Cost().shared_by(2).forward_only()),
    ):
        assert choice.plan((300, 200, 9), Layout(8, tp=2)).cost == expected


def _use(rank: int, files: Sequence[str]) -> None:
    device = "was measured on NVIDIA H200 with . ranks? on a host, and this run is on cpu with 2"
    hosts = "was measured on cpu with 4 ranks on a host, and this run is on cpu with 2"
    for file, message in zip(files, ("", device, hosts), strict=True):
        with World(Layout(2), backend="gloo", timeout=60) as world:
            if message:
                with pytest.raises(ConfigError, match=f"^run.machine {file} {message}"):
                    set_world_machine(world, partial(read_run_machine, config_of(run__machine=file)), KEY)
            else:
                set_world_machine(world, partial(read_run_machine, config_of(run__machine=file)), KEY)
            assert world.machine == (Machine.cpus() if message else replace(MEASURED, source=file))


def test_a_world_has_the_machine_of_the_run_and_all_ranks_refuse_one_of_others(tmp_path: Path) -> None:
    others = replace(MEASURED, device="NVIDIA H200"), replace(MEASURED, world=8, node_size=4)
    run_ranks(_use, 2, [_write(tmp_path / f"{i}.json", machine) for i, machine in enumerate((MEASURED, *others))])


# ---- evaluation


@pytest.mark.parametrize("planner", ["fixed", "padded", "dynamic"])
def test_evaluation_deals_out_rows_as_training_does(planner: Any) -> None:
    context = ContextConfig(planner=planner, partition="contiguous", max_tokens_per_slot=256)
    config = resolve_defaults(RunConfig(context=context, evaluation=EvaluationSection(planner=planner)))
    training, evaluation = PlannerConfig.training(config), PlannerConfig.evaluation(config)
    for choice in (replace(training, degree=4), replace(evaluation, degree=4)):
        batches = choice.plan((1000, 30), Layout(4)).micro_batches
        assert {group.partition for batch in batches for group in batch.groups if group.degree > 1} == {"contiguous"}
    (group,) = evaluation.at_degree(2, longest=1001).plan((1001,), Layout(4)).micro_batches[0].groups
    assert group.shares.rows(1).tolist() == list(range(501, 1001))
    for split, multiple in ((False, 1), (True, 2)):
        config = config_of(parallel__tp=2, parallel__sequence_parallel=split)
        assert PlannerConfig.evaluation(config, cost=Cost(), heads=8).options.row_multiple == multiple


DEGREE, ROWS = "evaluation__context_parallel_size", "evaluation__max_tokens_per_slot"


def test_the_choice_is_that_of_which_degree() -> None:
    home, lengths = Layout(16, tp=2), [30000, 900, 800, 700, 20]
    config = config_of(**{DEGREE: "auto", ROWS: 8192, "parallel__tp": 2})
    choice = PlannerConfig.evaluation(config, cost=Cost(), heads=16)
    assert (choice.degree, choice.options.cp_comm_type) == (None, "auto")
    comparison = compare_degrees(lengths, home, options=choice.home_options(home))
    found, reason = choose_evaluation_degree(choice, lengths, home)
    assert found.degree == comparison.best.cp >= 4 and reason == comparison.reason()
    assert found.options.cp_comm_type == comparison.best.options.cp_comm_type != "auto"
    plan = found.plan(lengths, home)
    assert plan.predicted_seconds <= comparison.best.planned.predicted_seconds * (1 + 1e-9)
    assert {group.degree for group in plan.groups} == {found.degree}
    assert choose_evaluation_degree(found, lengths, home) == (found, "") and choose_evaluation_degree(
        choice, [], home
    ) == (choice, "")
    with pytest.raises(
        ConfigError, match=r'evaluation.context_parallel_size is "auto" on 16 ranks: no degree of \(1, 2, 4'
    ):
        choose_evaluation_degree(choice, [10**6], home)


def test_a_choice_of_plans_is_said_in_plain_words() -> None:
    fixed = {cp: RankedWay("fixed", cp, 8192, seconds, priced=False) for cp, seconds in ((2, 1.0), (1, 1.02), (4, 1.8))}
    dynamic = RankedWay("dynamic", None, 8192, 0.998, priced=False)
    words = "as fast as dynamic, 2 % faster than degree 1, 1.8 times as fast as degree 4"
    assert Reasons((fixed[2], dynamic, fixed[1], fixed[4])).planner == f"fixed, degree 2 (predicted {words})"
    words = "0.5 s a step, 5 % faster than degree 2"
    ways = RankedWay("dynamic", None, 8192, 0.5), RankedWay("fixed", 2, 8192, 0.525)
    assert Reasons(ways).planner == f"dynamic (predicted {words})"
    assert [way["degree"] for way in Reasons(ways).to_json()["ways"]] == [0, 2], "records have 0 for dynamic plans"


@pytest.mark.parametrize("least", [0, -1])
def test_degrees_below_one_are_refused(least: int) -> None:
    for key, choose in {
        "context_parallel_size": lambda: PlannerConfig.fixed(least),
        "min_dynamic_context_parallel_size": lambda: PlannerConfig.dynamic(least),
        "max_dynamic_context_parallel_size": lambda: PlannerConfig.dynamic(1, least),
    }.items():
        with pytest.raises(PlanError, match=f"^{key} is {least}; give an integer of at least 1$"):
            choose()
    keys = {"context.planner": "fixed", "context.context_parallel_size": 0, "model.config": "folder"}
    choice = PlannerConfig.training(load_config(None, keys))
    assert (choice.degree, choice.max_degree, choice.text) == (None, None, "fixed at cp auto"), "keys have 0 for open"


def test_planner_and_degree_are_those_of_the_fastest_plans() -> None:
    """Each choice is compared with plans made one by one; dynamic plans must gain a hundredth."""
    home, own, limit = Layout(ranks=8), {"model.config": "folder"}, {"context.max_tokens_per_slot": 8192}
    machine = Machine.known("H200")
    uneven, even = [[40_000, *[3000] * 40]] * 2, [[8192] * 64]
    cases: list[tuple[dict[str, object], list[list[int]], str]] = [
        ({}, uneven, "dynamic"),
        ({}, even, "fixed"),
        ({"context.planner": "fixed"}, uneven, "fixed"),
        ({"context.planner": "padded"}, uneven, "padded"),
        ({"context.context_parallel_size": 8}, uneven, "fixed"),
        ({"context.planner": "dynamic"}, uneven, "dynamic"),
        ({"context.min_dynamic_context_parallel_size": 2}, even, "dynamic"),
    ]
    for keys, steps, planner in cases:
        given = load_config(None, own | limit | keys)
        facts = Facts(home=home, machine=machine, model=QWEN3_8B, lengths_of_step=steps.__getitem__, steps=len(steps))
        resolved = resolve(given, facts)
        context, evaluation = resolved.config.context, resolved.config.evaluation
        reason = resolved.reasons.planner
        assert (context.planner, evaluation.planner) == (planner, planner), keys
        is_given = "context.context_parallel_size" in keys or (planner == "dynamic" and keys)
        assert bool(reason) != bool(is_given), (keys, reason)
        assert (resolved.config == set_default_mode(given)) == bool(is_given), keys
        if planner == "dynamic" or is_given:
            continue
        seconds, cost = dict[int, float](), Way(resolved.config, facts).cost()
        for degree in (1, 2, 4, 8):
            one = replace(PlannerConfig.training(resolved.config, cost=cost, heads=32), degree=degree)
            with suppress(PlanError):
                seconds[degree] = sum(one.plan(step, home).predicted_seconds for step in steps)
        assert seconds[context.context_parallel_size] == min(seconds.values())
        words = rf"{planner}, degree {context.context_parallel_size}( \(predicted .*\)|, which alone is possible)$"
        assert re.match(words, reason), reason
        assert (8 in seconds) and (1 in seconds) == (max(map(max, steps)) <= 8192)
        # evaluation chooses its own degree, but a padded one, which is not compared, has training's
        assert evaluation.context_parallel_size == (context.context_parallel_size if planner == "padded" else 0)
    one = Facts(home=Layout(1), machine=machine, model=QWEN3_8B, lengths_of_step=lambda step: [100], steps=1)
    one_slot = resolve(load_config(None, own), one)
    context = one_slot.config.context
    assert (context.planner, context.context_parallel_size, one_slot.reasons.planner) == ("fixed", 1, "")
    facts = replace(one, home=home, longest=70_000, lengths_of_step=uneven.__getitem__, steps=2)
    with pytest.raises(PlanError, match=r"70000 rows, more than the \d+ that cp"):
        resolve(load_config(None, own | limit), facts)


def test_a_degree_that_is_not_chosen_yet_holds_the_documents() -> None:
    config = config_of(**{DEGREE: "auto", ROWS: 100})
    levels = replace(config.evaluation, cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes=(2, 2))
    choice, home = PlannerConfig.evaluation(replace(config, evaluation=levels)), Layout(8)
    (group,) = choice.plan([390], home).micro_batches[0].groups
    assert (group.degree, group.hierarchical_context_parallel_sizes) == (4, (2, 2))
    with pytest.raises(
        ConfigError, match=r"evaluation.context_parallel_size auto and evaluation.max_tokens_per_slot 100"
    ):
        choice.check_longest_document(801, home, "a document")


def test_what_auto_makes_of_the_other_keys() -> None:
    assert config_of(**{DEGREE: "auto"}).evaluation.cp_comm_type == "auto"
    given = {"model__config": "somewhere", DEGREE: "auto", "evaluation__cp_comm_type": "p2p"}
    evaluation = config_of(**given).evaluation
    assert (evaluation.context_parallel_size, evaluation.cp_comm_type) == ("auto", "p2p")
    name, planner = DEGREE.replace("__", "."), "evaluation__planner"
    for more, message in (
        ({DEGREE: "most"}, f"{name} is 'most'; give a number, or \"auto\""),
        ({planner: "dynamic"}, 'evaluation.planner is "dynamic"; use evaluation.planner = "f'),
        ({planner: "padded"}, 'evaluation.planner is "padded"'),
        ({ROWS: 9}, f"{name} auto and evaluation.max_tokens_per_slot 9"),
    ):
        with pytest.raises(ConfigError, match=message):
            check_config(config_of(**{DEGREE: "auto"} | more), 4)


# ---- planners of one's own, taken by their dotted names, and costs

OWN = "tests.resolve.own_things."
FEW = (90, 7, 40, 12)


def test_a_planner_decides_groups_and_the_options_the_rest() -> None:
    config = config_of(context__planner=f"{OWN}one_by_one", context__cp_comm_type="all_gather", parallel__pp=2)
    plan = PlannerConfig.training(config, heads=4).plan(FEW, Layout(8, pp=2), targets=77)
    assert [group.slots for group in plan.groups] == [(0, 1, 2, 3)] * 4
    named = (plan.planner, plan.targets, plan.max_tokens_per_slot, len(plan.micro_batches))
    assert named == (f"{OWN}one_by_one", 77, 1024, 4)
    assert plan.predicted_seconds >= plan.lower_bound_seconds > 0 and plan.check() == plan
    three = PlannerConfig.training(config).plan(FEW[:3], Layout(8, pp=2))
    assert len(three.micro_batches) == 4 and not three.micro_batches[3].groups  # a multiple of the stages
    empty = PlannerConfig.training(config).plan((), Layout(8, pp=2))
    assert not empty.lengths and len(empty.micro_batches) == 2
    choice = PlannerConfig.training(config_of(context__planner=f"{OWN}one_degree"))  # a function with an argument set
    fixed = plan_fixed(FEW, Layout(4), 2, options=choice.options)
    assert choice.plan(FEW, Layout(4)).micro_batches == fixed.micro_batches


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("dynamc", r"context\.planner is 'dynamc'; did you mean 'dynamic'\?, or a function of your own with"),
        ("no_such_module.plan", r"context\.planner is 'no_such_module\.plan', and no_such_module cannot be imported"),
        (f"{OWN}nowhere", r"own_things\.nowhere' is no function; name one of lengths, home and options that"),
        (f"{OWN}number", r"own_things\.number' is no function"),
        (f"{OWN}nothing", r"own_things\.nothing' returned NoneType; it must return a longspan\.Plan"),
        (f"{OWN}fails", r"own_things\.fails' failed for 1 document on 4 slots: KeyError: 'slots'"),
        (f"{OWN}fewer_slots", r"must return a longspan\.Plan of 4 slots \(home\.slots\)"),
        (f"{OWN}left_out", r"returned a plan that cannot run: document 0 \(2048 rows\) is in no micro-batch"),
        (
            f"{OWN}all_on_one_slot",
            r"cannot run: slot 0 holds 2048 rows .*above (context|evaluation).max_tokens_per_slot 1024",
        ),
    ],
)
def test_a_planner_that_does_not_fit_is_refused_before_a_process_group(name: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(config_of(context__planner=name), 4)
    of_evaluation = message.replace(r"context\.planner", r"evaluation\.planner")
    with pytest.raises(ConfigError, match=of_evaluation):
        check_config(config_of(**{"evaluation__planner": name, ROWS: 1024}), 4)


def test_a_plan_of_a_step_is_checked() -> None:
    options = PlannerConfig.training(config_of(), heads=2).options
    with pytest.raises(PlanError, match=r"must return .* of the 4 documents that it received, in their order"):
        plan_by_custom_planner(f"{OWN}sorted_lengths", "context.planner", FEW, Layout(4), options=options)


def test_evaluation_takes_the_planner_of_training_unless_it_has_its_own() -> None:
    sets: list[dict[str, Any]] = [{"name": "a", "path": "x"}, {"name": "b", "path": "x", "context_parallel_size": 4}]
    config = config_of(context__planner=f"{OWN}one_degree", evaluation__planner="", evaluation__sets=sets)
    own = config_of(model__path="folder", context__planner=f"{OWN}one_degree", optimizer__lr=1.0, evaluation__sets=sets)
    assert [entry.planner for entry in config.evaluation.sets] == ["fixed", "fixed"]  # the demo's is fixed
    assert [entry.planner for entry in own.evaluations] == [*[f"{OWN}one_degree"] * 2, "fixed"]
    own = replace(own, evaluation=replace(own.evaluation, planner=f"{OWN}one_by_one"))
    plan = PlannerConfig.evaluation(own).plan(FEW, Layout(4))
    assert plan.cost.passes == "forward" and len(plan.micro_batches) == 4


def test_a_cost_of_ones_own_prices_plans() -> None:
    config = config_of(context__planner="dynamic")
    plan = PlannerConfig.training(config, cost=slow).plan((1000, 900, 800, 700), Layout(4))
    assert {group.degree for group in plan.groups} == {1}
    shared = PlannerConfig.training(config, cost=slow).plan((2000,), Layout(4))
    assert shared.predicted_seconds > 5.0 and shared.cost.source == "a slow network"
    forward = PlannerConfig.evaluation(config, cost=slow).plan((3000,), Layout(4))
    assert isinstance(forward.cost, Slow) and forward.predicted_seconds > 5.0  # its own seconds for both passes


# ---- runs


def test_a_run_with_a_planner_of_its_own_and_a_degree_that_was_chosen(tmp_path: Path) -> None:
    sets: list[dict[str, Any]] = [{"name": "others", "context_parallel_size": 2}]
    sets += [{"name": "books", "context_parallel_size": "auto"}]
    for of_set in sets:
        of_set["path"] = str(write_texts(tmp_path / of_set["name"], count=5))
    keys = {"context__planner": f"{OWN}one_by_one", DEGREE: "auto", "evaluation__planner": "fixed"}
    config = small_config(tmp_path, **keys, evaluation__sets=sets, train__steps=2, evaluation__every=1)
    run_ranks(train_rank, 2, config, 2)
    folder = Path(config.run.dir)
    plans, rows = list(read_plans(folder / "plans.jsonl")), read_metrics(folder / "metrics.jsonl")
    assert [(step, plan.planner) for step, plan in plans] == [(step, f"{OWN}one_by_one") for step in (1, 2)]
    groups = [batch.groups for _, plan in plans for batch in plan.micro_batches]
    assert all(len(of_batch) == 1 and of_batch[0].degree == 2 for of_batch in groups)
    evaluated = {row.get("eval_name"): row for row in rows if "eval_loss" in row and row["step"] == 1}
    assert (evaluated["others"]["planner"], evaluated["others"]["cp"]) == ("fixed", 2)
    facts = json.loads((folder / "run.json").read_text())
    reasons = [text for name, text in facts["lines"] if name == "evaluation"]
    for reason, name in zip(reasons, (None, "books"), strict=True):
        said = re.match(rf"{f'of {name} ' if name else ''}at cp (\d+)[:,] ", reason)
        assert said and evaluated[name]["cp"] == int(said.group(1)), reason
        assert " documents; cp " in reason and " x as long; dynamic plan " in reason
    assert 'context_parallel_size = "auto"' in (folder / "config.toml").read_text()
