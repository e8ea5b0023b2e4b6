"""What keys mean that were not given: the demo's values with a tiny preset, otherwise those of one's own model."""

from dataclasses import replace
from typing import Any

import pytest

from longspan.config.defaults import resolve_defaults, set_steps, settings_text, warn_about_updates
from longspan.config.file import load_config, to_toml
from longspan.config.keys import NOT_GIVEN
from longspan.config.plan_section import ContextConfig
from longspan.config.sections import ParallelConfig, RunConfig
from longspan.errors import ConfigError
from longspan.run.checks import check_config
from tests.train.small import value_of

OWN = {"model.path": "folder", "train.lr": 1e-5}


def values(*keys: str, **given: Any) -> list[Any]:
    config = load_config(None, OWN | {key.replace("__", "."): value for key, value in given.items()})
    return [value_of(config, key) for key in keys]


def test_steps_that_follow_from_epochs_bring_their_warm_up() -> None:
    for steps, warm_up in ((60, 3), (10_000, 100)):
        config = set_steps(load_config(None, OWN | {"train.epochs": 2}), steps)
        assert [value_of(config, key) for key in ("train.steps", "train.warmup_steps")] == [steps, warm_up]


def test_a_warm_up_that_does_not_end_is_said() -> None:
    for warm_up, share in ((59, None), (60, "100%"), (120, "50%")):
        lines = list[str]()
        warn_about_updates(load_config(None, OWN | {"train.steps": 60, "train.warmup_steps": warm_up}), lines.append)
        assert [f"rises to the end, to {share} of train.lr" in line for line in lines] == [True] * (share is not None)


def test_a_model_of_ones_own_is_not_cut_and_fills_memory() -> None:
    keys = "data.max_document_tokens", "context.max_tokens_per_slot", "context.context_parallel_size"
    assert values(*keys) == [0, "auto", 1]
    assert values("train.tokens_per_step", "train.warmup_steps") == [65536, 15]
    assert values("train.warmup_steps", train__steps=10_000) == [100]
    assert values(*keys, data__max_document_tokens=5, context__max_tokens_per_slot=0) == [5, 0, 1]


@pytest.mark.parametrize("given", [{}, OWN], ids=["demo", "own"])
def test_every_value_is_known_afterwards_and_stays(given: dict[str, Any]) -> None:
    config = load_config(None, given)
    assert resolve_defaults(config) == config and f" = {NOT_GIVEN}\n" not in to_toml(config)
    assert check_config(config, 4).slots == 4


EVAL = ("eval_planner", "eval_context_parallel_size", "eval_cp_comm_type", "partition", "eval_max_tokens_per_slot")
SIZES = "hierarchical_context_parallel_sizes"
FOLLOWS: dict[str, tuple[dict[str, Any], list[Any]]] = {
    "training": ({"context_parallel_size": 4}, ["fixed", 4, "auto", "zigzag", "auto", 0]),
    "all of it": (
        {"context_parallel_size": 2, "cp_comm_type": ("a2a", "p2p"), "partition": "contiguous", "planner": "padded"}
        | {"max_tokens_per_slot": 99, SIZES: (2, 1)},
        ["padded", 2, ("a2a", "p2p"), "contiguous", 99, (2, 1)],
    ),
    "dynamic": ({"planner": "dynamic", SIZES: 4}, ["dynamic", 1, "auto", "zigzag", "auto", 4]),
    "a degree of dynamic": (
        {"planner": "dynamic", SIZES: 4, "eval_context_parallel_size": 2},
        ["fixed", 2, "auto", "zigzag", "auto", (2, 1)],
    ),
    "one degree beside dynamic plans": (
        {"planner": "dynamic", "context_parallel_size": 8, "eval_planner": "fixed", "eval_cp_comm_type": "a2a+p2p"},
        ["fixed", 8, "a2a+p2p", "zigzag", "auto", 0],
    ),
    "another degree": (
        {"context_parallel_size": 4, "eval_context_parallel_size": 8, "max_tokens_per_slot": 64, SIZES: (2, 2)},
        ["fixed", 8, "auto", "zigzag", 64, (2, 4)],
    ),
    "0": ({"context_parallel_size": 4, "eval_context_parallel_size": 0}, ["fixed", 4, "auto", "zigzag", "auto", 0]),
    "auto": (
        {"max_tokens_per_slot": 64, "eval_max_tokens_per_slot": "auto"},
        ["fixed", 1, "auto", "zigzag", 64, 0],
    ),
    "what is given": (
        {"eval_planner": "dynamic", "eval_cp_comm_type": "a2a", "partition": "contiguous"}
        | {"eval_max_tokens_per_slot": 7, f"eval_{SIZES}": 2, "eval_context_parallel_size": 2},
        ["dynamic", 2, "a2a", "contiguous", 7, 2],
    ),
}


@pytest.mark.parametrize("case", FOLLOWS)
def test_evaluation_follows_training(case: str) -> None:
    given, expected = FOLLOWS[case]
    config = load_config(None, OWN | {f"context.{key}": value for key, value in given.items()})
    assert [value_of(config, f"context.{key}") for key in (*EVAL, f"eval_{SIZES}")] == expected


def test_the_demo_evaluates_as_it_does() -> None:
    config = load_config(None, {"context.planner": "dynamic", "context.cp_comm_type": "a2a"})
    assert [value_of(config, f"context.{key}") for key in EVAL] == ["fixed", 4, "p2p", "zigzag", 2048]
    assert load_config(None, {"context.eval_context_parallel_size": 0}).context.evaluation.context_parallel_size == 2


@pytest.mark.parametrize(
    ("slots", "degrees"), [(1, (1, 1)), (2, (2, 2)), (3, (1, 1)), (4, (2, 4)), (6, (2, 2)), (8, (2, 4))]
)
@pytest.mark.parametrize("planner", ["fixed", "padded", "dynamic"])
def test_the_demo_suits_the_slots_there_are(slots: int, degrees: tuple[int, int], planner: str) -> None:
    config = RunConfig(context=ContextConfig(planner=planner))
    for parallel in (ParallelConfig(), ParallelConfig(tp=2, pp=2)):
        ranks = slots * parallel.tp * parallel.pp
        resolved = resolve_defaults(replace(config, parallel=parallel), ranks)
        context = resolved.context
        assert (context.context_parallel_size, context.evaluation.context_parallel_size) == degrees
        assert check_config(resolved, ranks).slots == slots
    given = resolve_defaults(RunConfig(context=ContextConfig(context_parallel_size=1)), 4)
    assert check_config(given, 4) and given.context.context_parallel_size == 1


@pytest.mark.parametrize("model", [{"model.path": "f"}, {"model.config": "f"}, {"model.preset": "qwen3-8b"}], ids=str)
def test_a_learning_rate_is_asked_for_before_anything_is_read(model: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"train.lr is not given, and \S+ has no default; give --train.lr"):
        check_config(load_config(None, model), 4)
    assert check_config(load_config(None, model), 4, training=False).slots == 4
    assert check_config(load_config(None, model | {"train.lr": 1e-6}), 4).slots == 4


def test_a_line_for_each_section_says_what_a_run_does() -> None:
    line = settings_text(load_config(None, OWN | {"context.eval_context_parallel_size": 4}))
    assert line == (
        "[train] steps = 300, tokens_per_step = 65536, lr = 1e-05, warmup_steps = 15, eval_every = 100, save_every = 0,"
        " save_minutes = 30.0\n[data] max_document_tokens = 0, "
        "eval_documents = auto\n[context] planner = fixed, context_parallel_size = 1, "
        "cp_comm_type = auto, partition = zigzag, max_tokens_per_slot = auto\n"
        "evaluation: eval_context_parallel_size = 4"
    )
    assert settings_text(load_config(None, OWN)).endswith("\nevaluation: as in training")


def test_what_was_not_resolved_is_refused() -> None:
    with pytest.raises(ConfigError, match="is -1; it must be at least"):
        check_config(RunConfig(train=load_config().train), 4)
