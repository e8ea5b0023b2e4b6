"""What keys mean that were not given: the demo's, those of one's own model, of evaluation and of an evaluation set."""

import json
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, strategies as st

from longspan.cli.train_flags import parse_train
from longspan.config.defaults import resolve_defaults, warn_about_small_updates, with_steps
from longspan.config.file import load_config, to_toml
from longspan.config.keys import AUTO, NOT_GIVEN, section_keys
from longspan.config.plan_section import (
    ContextConfig,
    EvalConfig,
    EvaluationPlan,
    PlanSection,
    inherit_keys,
)
from longspan.config.sections import ParallelConfig, RunConfig
from longspan.errors import ConfigError
from longspan.hf.arguments import LongspanArguments
from longspan.model.presets import PRESETS
from longspan.plan.micro_batch import fit_level_sizes
from longspan.resolve.planner_config import PlannerConfig
from longspan.run.checks import check_config, check_data
from tests.plan.cases import bounded
from tests.train.small import value_of

BOOKS = {"name": "books", "path": "books"}
OWN = {"model.path": "folder", "optimizer.lr": 1e-5}


def values(*keys: str, **given: Any) -> list[Any]:
    config = load_config(None, OWN | {key.replace("__", "."): value for key, value in given.items()})
    return [value_of(config, key) for key in keys]


def test_steps_that_follow_from_epochs_bring_their_warm_up() -> None:
    for steps, warm_up in ((60, 3), (10_000, 100)):
        config = with_steps(load_config(None, OWN | {"train.epochs": 2}), steps)
        assert [value_of(config, key) for key in ("train.steps", "optimizer.warmup_steps")] == [steps, warm_up]


def test_a_warm_up_that_does_not_end_is_said() -> None:
    for warm_up, share in ((59, None), (60, "100%"), (120, "50%")):
        lines = list[str]()
        warn_about_small_updates(
            load_config(None, OWN | {"train.steps": 60, "optimizer.warmup_steps": warm_up}), lines.append
        )
        assert [f"rises to the end, to {share} of optimizer.lr" in line for line in lines] == [True] * (
            share is not None
        )


PLANNERS: list[tuple[dict[str, Any], list[Any]]] = [
    ({}, ["auto", 0]),
    ({"context_parallel_size": 4}, ["fixed", 4]),
    ({"min_dynamic_context_parallel_size": 2}, ["dynamic", 0]),
    ({"max_dynamic_context_parallel_size": 2}, ["dynamic", 0]),
    ({"context_parallel_size": 4, "max_dynamic_context_parallel_size": 2}, ["fixed", 4]),
]


@pytest.mark.parametrize(("degrees", "chosen"), PLANNERS)
@pytest.mark.parametrize("model", [OWN, {}])
def test_degrees_that_are_given_decide_the_planner_auto(
    degrees: dict[str, Any], chosen: list[Any], model: dict[str, Any], tmp_path: Path
) -> None:
    """In a file, in flags, in a Trainer, and in a file that a run has written; in evaluation too."""
    keys = model | {f"context.{key}": value for key, value in ({"planner": "auto"} | degrees).items()}
    file = tmp_path / "config.toml"
    file.write_text(to_toml(load_config(None, keys)))
    arguments: Any = LongspanArguments(planner="auto", **degrees)
    words = [f"--{key}={value}" for key, value in keys.items()]
    for config in (load_config(None, keys), load_config(file), parse_train(words)[1], arguments.config()):
        assert config.context.planner == chosen[0]
        assert config.context.planner == "dynamic" or config.context.context_parallel_size == chosen[1]
    if "min_dynamic_context_parallel_size" not in degrees:  # training's holds
        keys = OWN | {f"evaluation.{key}": value for key, value in ({"planner": "auto"} | degrees).items()}
        assert load_config(None, keys).evaluation.planner == chosen[0]


def test_a_model_of_ones_own_is_not_cut_and_fills_memory() -> None:
    keys = "data.max_document_tokens", "context.max_tokens_per_slot", "context.context_parallel_size"
    assert values(*keys) == [0, "auto", 0]
    assert values("train.tokens_per_step", "optimizer.warmup_steps", train__steps=300) == [65536, 15]
    assert values("optimizer.warmup_steps", train__steps=10_000) == [100]
    assert values(*keys, data__max_document_tokens=5, context__max_tokens_per_slot=0) == [5, 0, 0]
    planners = "context.planner", "evaluation.planner", "context.mode"
    assert values(*planners) == ["auto"] * 3
    assert values(*planners, context__context_parallel_size=2) == ["fixed", "fixed", "auto"]
    assert values(*planners, context__max_dynamic_context_parallel_size=2) == ["dynamic", "dynamic", "auto"]
    assert values(*planners, evaluation__context_parallel_size=2) == ["auto", "fixed", "auto"]
    assert values(*planners, evaluation__max_dynamic_context_parallel_size=2) == ["auto", "dynamic", "auto"]


@pytest.mark.parametrize("keys", [{}, OWN, OWN | {"train.steps": 3}], ids=["demo", "own", "own steps"])
def test_every_value_is_known_afterwards_and_stays(keys: dict[str, Any]) -> None:
    config = load_config(None, keys)
    assert resolve_defaults(config) == config
    of_corpus = with_steps(config, 7) if config.train.epochs else config
    assert f" = {NOT_GIVEN}\n" not in to_toml(of_corpus)
    assert check_config(config, 4).slots == 4


SOURCES = ({"path": "chats"}, {"path": "pdfs"})
LENGTHS_OF_RUNS: dict[str, tuple[dict[str, Any], tuple[float, int]]] = {  # keys, and epochs and steps
    "the demo": ({}, (0, 300)),
    "a model of one's own, once": (OWN, (1, NOT_GIVEN)),
    "one table of sources": (OWN | {"data.sources": SOURCES[:1]}, (1, NOT_GIVEN)),
    "steps": (OWN | {"train.steps": 40}, (0, 40)),
    "steps as many as the demo's": (OWN | {"train.steps": 300}, (0, 300)),
    "epochs": (OWN | {"train.epochs": 3}, (3, NOT_GIVEN)),
    "several sources": (OWN | {"data.sources": SOURCES}, (0, 300)),
    "epochs of one of several": (
        OWN | {"data.sources": SOURCES, "train.epochs": 2, "train.epochs_of": "pdfs"},
        (2, NOT_GIVEN),
    ),
    "random weights": ({"model.preset": "qwen3-0.6b", "optimizer.lr": 1e-5}, (0, 300)),
}


@pytest.mark.parametrize(("keys", "length"), LENGTHS_OF_RUNS.values(), ids=LENGTHS_OF_RUNS)
def test_how_long_a_run_is(keys: dict[str, Any], length: tuple[float, int]) -> None:
    tables = {"data": {"sources": keys["data.sources"]}} if "data.sources" in keys else {}
    others = {key: value for key, value in keys.items() if key != "data.sources"}
    config = load_config(None, others | tables)
    assert (config.train.epochs, config.train.steps) == length
    check_data(config)


def test_steps_of_a_flag_win_over_epochs_of_the_file(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("[train]\nsteps = 7\nepochs = 2.0\n[optimizer]\nlr = 1e-5\n")
    for words, length in (([], (2, 7)), (["--train.steps", "5"], (0, 5)), (["--train.epochs", "1"], (1, 7))):
        _, config = parse_train([str(tmp_path / "config.toml"), *words])
        assert (config.train.epochs, config.train.steps) == length


LORA = {"lora.rank": 4}
DTYPES: list[tuple[dict[str, Any], dict[str, Any], str]] = [  # config.json, keys, and model.dtype
    ({"dtype": "bfloat16"}, LORA, "bfloat16"),
    ({"torch_dtype": "bfloat16"}, LORA, "bfloat16"),
    ({"text_config": {"dtype": "bfloat16"}}, LORA, "bfloat16"),
    ({"dtype": "float64"}, LORA, "float64"),
    ({"dtype": "bfloat16"}, LORA | {"model.dtype": "float32"}, "float32"),
    ({"dtype": "bfloat16"}, {}, "float32"),
    ({"dtype": "bfloat16"}, LORA | {"encoder.trainable": "projector"}, "float32"),
    ({"dtype": "bfloat16"}, LORA | {"model.compute_dtype": "float32"}, "float32"),
    ({"dtype": "float16"}, LORA, "float32"),
    ({}, LORA, "float32"),
]


@pytest.mark.parametrize(("written", "keys", "dtype"), DTYPES)
def test_frozen_weights_have_the_dtype_of_their_folder(
    written: dict[str, Any], keys: dict[str, Any], dtype: str, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(written))
    for key in ("model.path", "model.config"):
        config = load_config(None, {key: str(tmp_path)} | keys)
        assert (config.model.dtype, resolve_defaults(config)) == (dtype, config)


@pytest.mark.parametrize(
    ("model", "dtype"),
    [
        ({"path": "Qwen/Qwen3-8B"}, "bfloat16"),
        ({"preset": "qwen3-30b-a3b"}, "bfloat16"),
        ({"path": "no/folder"}, "float32"),
        *[({"preset": name}, "float32") for name in PRESETS if name.endswith("-tiny")],
        ({}, "float32"),
    ],
    ids=str,
)
def test_frozen_weights_have_the_dtype_of_their_preset(model: dict[str, str], dtype: str) -> None:
    assert load_config(None, {"model": model} | LORA).model.dtype == dtype
    assert load_config(None, {"model": model}).model.dtype == "float32"


PARTS = ("planner", "context_parallel_size", "cp_comm_type")
EVAL = [f"evaluation.{key}" for key in PARTS] + ["context.partition", "evaluation.max_tokens_per_slot"]
SIZES = "hierarchical_context_parallel_sizes"
FOLLOWS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "all of it": (
        {"context_parallel_size": 2, "cp_comm_type": ("a2a", "p2p"), "partition": "contiguous", "planner": "padded"}
        | {"max_tokens_per_slot": 99, SIZES: (2, 1)},
        ["padded", 2, ("a2a", "p2p"), "contiguous", 99, (2, 1)],
    ),
    "a degree of dynamic": (
        {"planner": "dynamic", SIZES: 4, "evaluation.context_parallel_size": 2},
        ["fixed", 2, "auto", "zigzag", "auto", (2, 1)],
    ),
    "what is given": (
        {"evaluation.planner": "dynamic", "evaluation.cp_comm_type": "a2a", "partition": "contiguous"}
        | {"evaluation.max_tokens_per_slot": 7, f"evaluation.{SIZES}": 2, "evaluation.context_parallel_size": 2},
        ["dynamic", 2, "a2a", "contiguous", 7, 2],
    ),
}


@pytest.mark.parametrize("case", FOLLOWS)
def test_evaluation_follows_training(case: str) -> None:
    given, expected = FOLLOWS[case]
    keys = {key if "." in key else f"context.{key}": value for key, value in given.items()}
    config = load_config(None, OWN | keys)
    assert [value_of(config, key) for key in (*EVAL, f"evaluation.{SIZES}")] == expected


def test_the_demo_evaluates_as_it_does() -> None:
    config = load_config(None, {"context.planner": "dynamic", "context.cp_comm_type": "a2a"})
    assert [value_of(config, key) for key in EVAL] == ["fixed", 4, "p2p", "zigzag", 2048]
    assert load_config(None, {"evaluation.context_parallel_size": 0}).evaluation.context_parallel_size == 2


DEGREES = [(1, (1, 1)), (2, (2, 2)), (3, (1, 1)), (4, (2, 4)), (6, (2, 2)), (8, (2, 4))]
DEMOS = [(*suited, "fixed") for suited in DEGREES]
DEMOS += [(*DEGREES[i], planner) for i in (2, 3) for planner in ("padded", "dynamic")]  # 3 and 4 slots


@pytest.mark.parametrize(("slots", "degrees", "planner"), DEMOS)
def test_the_demo_suits_the_slots_there_are(slots: int, degrees: tuple[int, int], planner: str) -> None:
    config = RunConfig(context=ContextConfig(planner=planner))
    for parallel in (ParallelConfig(), ParallelConfig(tp=2, pp=2)):
        ranks = slots * parallel.tp * parallel.pp
        resolved = resolve_defaults(replace(config, parallel=parallel), ranks)
        assert (resolved.context.context_parallel_size, resolved.evaluation.context_parallel_size) == degrees
        assert check_config(resolved, ranks).slots == slots


def test_a_degree_of_one_is_kept() -> None:
    given = resolve_defaults(RunConfig(context=ContextConfig(context_parallel_size=1)), 4)
    assert check_config(given, 4) and given.context.context_parallel_size == 1


@pytest.mark.parametrize("model", [{"model.path": "f"}, {"model.config": "f"}, {"model.preset": "qwen3-8b"}], ids=str)
def test_a_learning_rate_is_asked_for_before_anything_is_read(model: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"optimizer.lr is not given, and \S+ has no default; give --optimizer.lr"):
        check_config(load_config(None, model), 4)
    assert check_config(load_config(None, model), 4, training=False).slots == 4
    assert check_config(load_config(None, model | {"optimizer.lr": 1e-6}), 4).slots == 4


def entry(table: dict[str, Any], **keys: Any) -> EvalConfig:
    given = {key.replace("__", "."): value for key, value in keys.items()}
    return load_config(None, given | {"evaluation.sets": [BOOKS | table]}).evaluation.sets[0]


def test_a_set_has_the_keys_of_evaluation_without_their_prefix() -> None:
    plan = [key.name for key in section_keys(PlanSection)]
    of_context = [key.name for key in section_keys(ContextConfig)]
    assert [key.name for key in section_keys(EvaluationPlan)] == [k for k in plan if k not in EvaluationPlan.INHERITED]
    of_set = {key.name for key in section_keys(EvalConfig)}
    assert of_context[: len(plan)] == plan and {*plan} - of_set == {*EvalConfig.INHERITED} <= {*plan}


def test_what_is_not_given_is_as_for_the_held_out_documents() -> None:
    changes = {"evaluation__cp_comm_type": "a2a", "evaluation__max_tokens_per_slot": 99, "evaluation__every": 7}
    inherited = entry({}, **changes, data__max_document_tokens=77)
    plan: dict[str, Any] = {"planner": "fixed", "context_parallel_size": 4, "cp_comm_type": "a2a"}
    plan |= {"max_tokens_per_slot": 99, "hierarchical_context_parallel_sizes": 0}
    plan |= {"min_dynamic_context_parallel_size": 1, "max_dynamic_context_parallel_size": 0}
    assert inherited == EvalConfig(**BOOKS, max_document_tokens=77, every=7, **plan)


@pytest.mark.parametrize(
    ("table", "keys", "values"),
    [
        ({"context_parallel_size": 8}, {}, ("fixed", 8, (2, 4), 2048)),
        ({"context_parallel_size": 0}, {}, ("fixed", 2, (2, 1), 2048)),
        ({"context_parallel_size": 2}, {"evaluation__planner": "dynamic"}, ("fixed", 2, (2, 1), 2048)),
        ({}, {"evaluation__planner": "dynamic"}, ("dynamic", 4, (2, 2), 2048)),
        ({}, {"evaluation__max_dynamic_context_parallel_size": 2}, ("dynamic", 4, (2, 2), 2048)),
        ({}, {"evaluation__max_tokens_per_slot": "auto"}, ("fixed", 4, (2, 2), 1024)),
        ({}, {"evaluation__hierarchical_context_parallel_sizes": (4, 2)}, ("fixed", 4, (4, 2), 2048)),
        ({"context_parallel_size": "auto"}, {"evaluation__planner": "dynamic"}, ("fixed", "auto", (2, 2), 2048)),
    ],
)
def test_a_degree_alone_changes_the_degree(table: Any, keys: dict[str, Any], values: tuple[object, ...]) -> None:
    made = entry(table, context__hierarchical_context_parallel_sizes=(2, 2), **keys)
    assert (made.planner, made.context_parallel_size) == values[:2]
    assert (made.hierarchical_context_parallel_sizes, made.max_tokens_per_slot) == values[2:]


def test_toml_there_and_back_and_nothing_is_left_open(tmp_path: Path) -> None:
    other = {"name": "code.2", "path": 'a "b"', "every": 0, "context_parallel_size": "auto"}
    tables = [BOOKS, other]
    config = load_config(None, {"evaluation.sets": tables})
    (tmp_path / "a.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "a.toml") == config == resolve_defaults(config)
    (tmp_path / "b.toml").write_text('[[evaluation.sets]]\nname = "books"\npath = "books"\n[evaluation]\nevery = 3\n')
    assert load_config(tmp_path / "b.toml").evaluation.sets[0].every == 3


def test_plans_of_a_set_are_its_own() -> None:
    config = load_config(None, {"evaluation.sets": [BOOKS | {"context_parallel_size": 2}]})
    home = check_config(config, 4)
    plans = [PlannerConfig.evaluation(config, entry).plan((600, 40), home) for entry in (None, *config.evaluation.sets)]
    assert [{group.degree for batch in plan.micro_batches for group in batch.groups} for plan in plans] == [{4}, {2}]


KEYS = tuple(key.name for key in fields(PlanSection))
LEVELS = st.sampled_from([0, 2, 4, (1, 1), (2, 1), (2, 2), (4, 2)])
VALUES: dict[str, Any] = {
    "planner": st.sampled_from(["fixed", "padded", "dynamic"]),
    "max_tokens_per_slot": st.sampled_from([0, 64, 600, AUTO]),
    "cp_comm_type": st.sampled_from(["p2p", "a2a", "a2a+p2p", ("p2p", "a2a")]),
    "hierarchical_context_parallel_sizes": LEVELS,
}
DEGREES = st.sampled_from([1, 2, 4, 8])
TRAINING = st.builds(ContextConfig, context_parallel_size=DEGREES, **VALUES)
SOME = st.fixed_dictionaries({}, optional={"context_parallel_size": DEGREES | st.just(0) | st.just(AUTO), **VALUES})


@bounded
@given(TRAINING, SOME)
def test_what_is_given_stays_and_nothing_is_left_open(training: ContextConfig, keys: dict[str, Any]) -> None:
    evaluation = inherit_keys(PlanSection(**keys), training, training)
    for key, value in keys.items():
        stands_for = {("context_parallel_size", 0), ("max_tokens_per_slot", AUTO)}
        expected = getattr(training, key) if (key, value) in stands_for else value
        assert getattr(evaluation, key) == expected
    assert not {key for key in KEYS if getattr(evaluation, key) in (NOT_GIVEN, "")}
    assert inherit_keys(evaluation, training, training) == evaluation
    assert inherit_keys(PlanSection(), training, training).plan_keys == training.plan_keys


@bounded
@given(TRAINING, SOME, DEGREES | st.just(AUTO))
def test_a_degree_that_is_given_makes_plans_of_one_degree(
    training: ContextConfig, of_all: dict[str, Any], degree: int | str
) -> None:
    evaluation = inherit_keys(PlanSection(**of_all), training, training)
    for parent in (training, evaluation):
        section = inherit_keys(PlanSection(context_parallel_size=degree), parent, training)
        assert section.planner != "dynamic" and section.context_parallel_size == degree
        assert section.cp_comm_type == (AUTO if degree == AUTO else parent.cp_comm_type)
        if isinstance(degree, int) and degree != parent.context_parallel_size:
            sizes = parent.hierarchical_context_parallel_sizes
            assert section.hierarchical_context_parallel_sizes == (fit_level_sizes(sizes, degree) if sizes else 0)
