"""A layout on other ranks: nearest degrees that fit, what is said of them, and what a flag gave stays."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from longspan.checkpoint.files import STATE, create_partial_folder, partial_path, publish_checkpoint
from longspan.cli.eval import make_request, parse_eval, prepare_request
from longspan.config.file import load_config, to_toml
from longspan.config.sections import EncoderSection, ParallelConfig, RunConfig
from longspan.errors import ConfigError
from longspan.evaluation.fit_layout import changes_line, fit_evaluation_plans, fit_home_to_ranks, layout_changes
from longspan.layout import Layout
from longspan.resolve.planner_config import DEFAULT_ROWS, PlannerConfig, home_of
from longspan.run.checks import check_config, check_longest_of_set

BASE = {"evaluation.context_parallel_size": 8, "evaluation.max_tokens_per_slot": 64}
DEGREE = "evaluation.context_parallel_size"
LEAST = "context.min_dynamic_context_parallel_size"
MOST = "evaluation.max_dynamic_context_parallel_size"
# parallel of the run, ranks now, what flags gave, parallel that comes out
HOMES: list[tuple[dict[str, Any], int, set[str], dict[str, Any]]] = [
    ({"tp": 2, "pp": 2}, 8, set(), {"tp": 2, "pp": 2}),
    ({"tp": 2, "pp": 2}, 4, set(), {"tp": 2, "pp": 2}),
    ({"tp": 2, "pp": 2}, 2, set(), {"tp": 2}),
    ({"tp": 2, "pp": 2}, 2, {"parallel.pp"}, {"pp": 2}),
    ({"tp": 2, "pp": 2, "vpp": 2, "sequence_parallel": True}, 3, set(), {}),
    ({"tp": 4, "pp": 2}, 6, set(), {"tp": 2}),
    ({"tp": 4, "pp": 3}, 6, set(), {"tp": 2, "pp": 3}),
    ({"pp": 2, "pipeline_schedule": "zero_bubble", "vpp": 2}, 1, set(), {}),
    ({"dp_replicate": 4}, 6, set(), {"dp_replicate": 2}),
    ({"ep": 8}, 4, set(), {"ep": 4}),
    ({"ep": 8, "dp_replicate": 2}, 8, set(), {"ep": 4, "dp_replicate": 2}),
    ({"ep": 4}, 6, set(), {"ep": 2}),
    ({"tp": 2}, 3, {"parallel.tp"}, {"tp": 2}),  # refused later
]


@pytest.mark.parametrize(("before", "ranks", "flag_keys", "after"), HOMES)
def test_a_home_has_the_nearest_degrees_that_fit(
    before: dict[str, Any], ranks: int, flag_keys: set[str], after: dict[str, Any]
) -> None:
    large = load_config(None, BASE | {"model.preset": "qwen3-30b-a3b"})  # 48 layers, 128 experts
    config = replace(large, parallel=ParallelConfig(**before))
    fitted = fit_home_to_ranks(config, ranks, flag_keys)
    assert fitted.parallel == ParallelConfig(**after)
    assert {change.key for change in layout_changes(config, fitted)} == {
        f"parallel.{key}" for key in before if before[key] != getattr(fitted.parallel, key)
    }
    if not flag_keys:
        fitted = fit_evaluation_plans(fitted, home_of(fitted.parallel, ranks), None, 1, flag_keys)
        check_config(replace(fitted, data=replace(fitted.data, max_document_tokens=0)), ranks, training=False)


@pytest.mark.parametrize(
    ("ranks", "flag_keys", "tp"), [(1, set(), 1), (6, set(), 2), (8, set(), 4), (6, {"encoder.tp"}, 4)]
)
def test_an_encoder_has_the_nearest_degree_that_fits(ranks: int, flag_keys: set[str], tp: int) -> None:
    config = replace(load_config(None, BASE), encoder=EncoderSection(tp=4))
    fitted = fit_home_to_ranks(config, ranks, flag_keys)
    changes = [change.key for change in layout_changes(config, fitted)]
    assert fitted.encoder.tp == tp and changes == ["encoder.tp"] * (tp != 4)


def entry_at(config: RunConfig, slots: int, *flag_keys: str, heads: int = 8, longest: int = 100) -> tuple[Any, str]:
    fitted = fit_evaluation_plans(config, Layout(ranks=slots), heads, longest, flag_keys)
    return fitted.evaluation, changes_line(layout_changes(config, fitted), slots)


def subject_of(folder: Path, config: RunConfig, *flags: str) -> RunConfig:
    (folder / "config.toml").write_text(to_toml(config))
    words = [str(folder), *flags]
    return make_request(words, parse_eval(words), 8).subjects[0].config


@pytest.mark.parametrize(("slots", "degree", "rows"), [(8, 8, 64), (6, 6, 64), (4, 4, 64), (3, 3, 64), (1, 1, 100)])
def test_a_degree_is_the_nearest_that_divides_the_slots(slots: int, degree: int, rows: int) -> None:
    entry, line = entry_at(load_config(None, BASE), slots)
    assert (entry.context_parallel_size, entry.max_tokens_per_slot) == (degree, rows)
    assert ("evaluation.context_parallel_size 8 -> " in line) == (degree < 8)
    assert ("evaluation.max_tokens_per_slot 64 -> 100" in line) == (rows > 64)


def test_heads_and_levels_follow() -> None:
    a2a = load_config(None, BASE | {"evaluation.cp_comm_type": "a2a"})
    assert entry_at(a2a, 6, heads=8)[0].context_parallel_size == 2  # 3 and 6 do not deal out 8 heads
    line = entry_at(a2a, 8, heads=4)[1]
    assert line == "on 8 ranks: evaluation.context_parallel_size 8 -> 4"
    levels = {"evaluation.cp_comm_type": "a2a+p2p", "evaluation.hierarchical_context_parallel_sizes": [2, 4]}
    entry, line = entry_at(load_config(None, BASE | levels), 6)
    assert entry.hierarchical_context_parallel_sizes == (2, 3)
    assert "evaluation.hierarchical_context_parallel_sizes (2, 4) -> (2, 3)" in line


def test_what_a_flag_gave_stays(tmp_path: Path) -> None:
    config = load_config(None, BASE)
    entry, line = entry_at(config, 6, "evaluation.context_parallel_size", "evaluation.max_tokens_per_slot")
    assert entry == config.evaluation and not line
    sizes = "evaluation.hierarchical_context_parallel_sizes"
    keys = {"evaluation.cp_comm_type": "a2a+p2p", sizes: [2, 4], "evaluation.max_tokens_per_slot": "auto"}
    keys |= {"context.max_tokens_per_slot": "auto", "model.preset": "qwen3-0.6b"}
    entry, _ = entry_at(load_config(None, BASE | keys), 6, sizes)  # `check_config` refuses them at degree 6
    assert entry.hierarchical_context_parallel_sizes == (2, 4) and entry.max_tokens_per_slot == DEFAULT_ROWS
    dynamic = load_config(None, BASE | {"evaluation.planner": "dynamic"})
    flagged = subject_of(tmp_path, dynamic, f"--{DEGREE}", "4").evaluation
    assert (flagged.planner, flagged.context_parallel_size) == ("fixed", 4)


def test_a_degree_of_0_is_that_of_training(tmp_path: Path) -> None:
    config = load_config(None, BASE | {"context.context_parallel_size": 2})
    assert subject_of(tmp_path, config, f"--{DEGREE}", "0").evaluation.context_parallel_size == 2


def test_a_degree_that_is_chosen_brings_its_type_unless_one_is_given(tmp_path: Path) -> None:
    config = load_config(None, BASE | {"evaluation.cp_comm_type": "a2a"})
    entry = subject_of(tmp_path, config, f"--{DEGREE}", "auto").evaluation
    assert (entry.context_parallel_size, entry.cp_comm_type) == ("auto", "auto")
    flags = f"--{DEGREE}", "auto", "--evaluation.cp_comm_type", "a2a"
    assert subject_of(tmp_path, config, *flags).evaluation.cp_comm_type == "a2a"


def test_rows_of_a_dynamic_plan_are_those_of_the_widest_group() -> None:
    keys = {"evaluation.planner": "dynamic", "context.max_dynamic_context_parallel_size": 2}
    config = load_config(None, BASE | keys)
    assert entry_at(config, 4, longest=1001)[0].max_tokens_per_slot == 501
    tall = replace(config, parallel=ParallelConfig(tp=2, sequence_parallel=True))
    fitted = fit_evaluation_plans(tall, Layout(8, tp=2), 8, 1001, ())
    assert fitted.evaluation.max_tokens_per_slot == 502
    padded = load_config(None, BASE | {"evaluation.planner": "padded"})
    padded = padded.with_keys("evaluation", context_parallel_size=0)
    fitted = fit_evaluation_plans(padded, Layout(4), 8, 3001, (DEGREE,))
    assert fitted.evaluation.max_tokens_per_slot == 3001, "an open degree may be 1"


def test_evaluation_has_a_largest_degree_of_its_own_and_otherwise_the_limits_of_training() -> None:
    sets = [{"name": "long", "path": "x"}]
    keys = {"context.planner": "dynamic", LEAST: 4, "evaluation.planner": "dynamic", "evaluation.sets": sets}
    same = load_config(None, BASE | keys | {"context.max_dynamic_context_parallel_size": 4, MOST: 8})
    choices = [PlannerConfig.training(same), *(PlannerConfig.evaluation(same, entry) for entry in same.evaluations)]
    assert [(choice.min_degree, choice.max_degree) for choice in choices] == [(4, 4), (4, 8), (4, 8)]
    fitted = fit_home_to_ranks(same, 2, ())
    entry, _ = entry_at(fitted, 2, longest=1001)
    assert (PlannerConfig.evaluation(fitted).min_degree, entry.max_tokens_per_slot) == (2, 501)
    assert changes_line(layout_changes(same, fitted), 2) == f"on 2 ranks: {LEAST} 4 -> 2"
    with pytest.raises(ConfigError, match=r"slots \(evaluation\.max_dynamic_context_parallel_size = 0"):
        check_longest_of_set(same, same.evaluation.sets[0], Layout(16), 8 * 2048 + 1, "a file")


def test_a_run_that_trains_at_degrees_2_to_4_evaluates_at_8(tmp_path: Path) -> None:
    keys = {"context.planner": "dynamic", "context.max_tokens_per_slot": 512, "evaluation.max_tokens_per_slot": 512}
    keys |= {"context.min_dynamic_context_parallel_size": 2, "context.max_dynamic_context_parallel_size": 4}
    lengths, home = (2000, 900, 40, 30), Layout(8)
    trained = load_config(None, keys | {"model.preset": "qwen3-8b"})
    with_flags = subject_of(tmp_path, trained, f"--{MOST}", "8")
    with_keys = load_config(None, keys | {"model.preset": "qwen3-8b", MOST: 8, "evaluation.max_tokens_per_slot": 256})
    assert with_flags.evaluation == replace(with_keys.evaluation, max_tokens_per_slot=512)
    for choice, most in ((PlannerConfig.training(with_keys), 4), (PlannerConfig.evaluation(with_keys), 8)):
        groups = [group for batch in choice.plan(lengths, home).micro_batches for group in batch.groups]
        assert max(group.degree for group in groups) == most


def test_open_keys_have_what_the_run_has_chosen(tmp_path: Path) -> None:
    """Its rows on any ranks, its plans on as many as it had; a flag goes before both."""
    config = load_config(None, {"model.preset": "qwen3-8b", "optimizer.lr": 1e-5, "run.dir": str(tmp_path)})
    assert (config.evaluation.planner, config.evaluation.max_tokens_per_slot) == ("auto", "auto")
    assert subject_of(tmp_path, config).evaluation == config.evaluation  # no checkpoint says what was chosen
    chosen = config.with_keys("evaluation", planner="fixed", context_parallel_size=2, max_tokens_per_slot=65536)
    chosen = chosen.with_keys("context", partition="zigzag")
    for ranks, evaluation in ((8, chosen.evaluation), (4, replace(config.evaluation, max_tokens_per_slot=65536))):
        path = tmp_path / "checkpoints/step-000002"
        state = {"config": chosen.tables(), "ranks": ranks, "step": 2}
        shutil.rmtree(path, ignore_errors=True)
        create_partial_folder(partial_path(path))
        publish_checkpoint(partial_path(path), path, {STATE: state}, [])
        found = subject_of(tmp_path, config)
        assert found.evaluation == evaluation
        assert found.context.partition == (chosen if ranks == 8 else config).context.partition
    for key, value in (("max_tokens_per_slot", 512), ("context_parallel_size", 4)):
        flagged = subject_of(tmp_path, config, f"--evaluation.{key}", str(value))
        assert getattr(flagged.evaluation, key) == value


def test_rows_that_nobody_named_hold_the_longest_document() -> None:
    config = load_config(None, BASE | {"evaluation.max_tokens_per_slot": "auto"})
    config = replace(config, evaluation=replace(config.evaluation, max_tokens_per_slot="auto"))
    assert entry_at(config, 1, longest=100)[0].max_tokens_per_slot == 8192
    assert entry_at(config, 1, longest=10000) == (
        replace(config.evaluation, context_parallel_size=1, max_tokens_per_slot=10000),
        "on 1 rank: evaluation.context_parallel_size 8 -> 1",
    )


@pytest.mark.parametrize("keys", [{"mtp.num_layers": 1, "mtp.train_whole": True}, {"model.frozen": "nf4"}])
def test_a_base_is_evaluated_under_all_keys_of_the_run(keys: dict[str, Any], tmp_path: Path) -> None:
    """Also those that need an adapter: the base is the run's own model, with the adapter left out."""
    config = load_config(None, BASE | {"lora.rank": 4} | keys)
    (tmp_path / "config.toml").write_text(to_toml(config))
    words = [str(tmp_path), "--compare", "base"]
    processes, request = prepare_request(words, parse_eval(words), 8, "cpu")
    assert home_of(request.subjects[0].config.parallel, processes.ranks).slots == 8
    run, base = request.subjects
    assert base.config == run.config and (run.weights.base, base.weights.base) == (False, True)
