"""Tables [[eval]]: what is read, what a set inherits, what is refused, all before any process exists."""

from pathlib import Path
from typing import Any

import pytest

from longspan.config.defaults import resolve_defaults
from longspan.config.file import load_config, to_toml
from longspan.config.keys import section_keys
from longspan.config.plan_section import EvalConfig, PlanSection
from longspan.config.sections import ContextConfig
from longspan.errors import ConfigError
from longspan.run.checks import check_config
from longspan.train.plans import PlanChoice

BOOKS = {"name": "books", "path": "books"}


def entry(table: dict[str, Any], **keys: Any) -> EvalConfig:
    """The first set of a configuration with these other keys, as a run has it."""
    given = {key.replace("__", "."): value for key, value in keys.items()}
    return load_config(None, given | {"eval": [BOOKS | table]}).eval[0]


def test_a_set_has_the_keys_of_evaluation_without_their_prefix() -> None:
    plan = [key.name for key in section_keys(PlanSection)]
    of_context = [key.name for key in section_keys(ContextConfig)]
    assert [key for key in of_context if key.startswith("eval_")] == [f"eval_{key}" for key in plan]
    assert of_context[: len(plan)] == plan and set(plan) <= {key.name for key in section_keys(EvalConfig)}


def test_what_is_not_given_is_as_for_the_held_out_documents() -> None:
    changes = {"context__eval_cp_comm_type": "a2a", "context__eval_max_tokens_per_slot": 99, "train__eval_every": 7}
    changes |= {"train__eval_metrics": ("a.b",)}
    inherited = entry({}, **changes, data__max_document_tokens=77)
    assert inherited == EvalConfig(
        name="books",
        path="books",
        max_document_tokens=77,
        every=7,
        metrics=("a.b",),
        planner="fixed",
        context_parallel_size=4,
        cp_comm_type="a2a",
        max_tokens_per_slot=99,
        hierarchical_context_parallel_sizes=0,
    )


@pytest.mark.parametrize(
    ("table", "keys", "values"),
    [
        ({"context_parallel_size": 8}, {}, ("fixed", 8, (2, 4), 2048)),
        ({"context_parallel_size": 0}, {}, ("fixed", 2, (2, 1), 2048)),
        ({"context_parallel_size": 2}, {"context__eval_planner": "dynamic"}, ("fixed", 2, (2, 1), 2048)),
        ({"planner": "dynamic"}, {}, ("dynamic", 4, (2, 2), 2048)),
        ({"max_tokens_per_slot": "auto"}, {}, ("fixed", 4, (2, 2), 1024)),
        ({"hierarchical_context_parallel_sizes": [4, 2]}, {}, ("fixed", 4, (4, 2), 2048)),
        ({"context_parallel_size": "auto"}, {"context__eval_planner": "dynamic"}, ("fixed", "auto", (2, 2), 2048)),
    ],
)
def test_a_degree_alone_changes_the_degree(table: Any, keys: dict[str, Any], values: tuple[object, ...]) -> None:
    made = entry(table, context__hierarchical_context_parallel_sizes=(2, 2), **keys)
    assert (made.planner, made.context_parallel_size) == values[:2]
    assert (made.hierarchical_context_parallel_sizes, made.max_tokens_per_slot) == values[2:]


def test_toml_there_and_back_and_nothing_is_left_open(tmp_path: Path) -> None:
    tables = [
        BOOKS,
        {"name": "code.2", "path": 'a "b"', "every": 0, "metrics": ["m.f"], "cp_comm_type": ["p2p", "a2a"]},
    ]
    config = load_config(None, {"eval": tables})
    (tmp_path / "a.toml").write_text(to_toml(config))
    assert load_config(tmp_path / "a.toml") == config == resolve_defaults(config)
    (tmp_path / "b.toml").write_text('[[eval]]\nname = "books"\npath = "books"\n[train]\neval_every = 3\n')
    assert load_config(tmp_path / "b.toml").eval[0].every == 3


def test_plans_of_a_set_are_its_own() -> None:
    config = load_config(None, {"eval": [BOOKS | {"context_parallel_size": 2}]})
    home = check_config(config, 4)
    plans = [PlanChoice.evaluation(config, entry).plan((600, 40), home) for entry in (None, *config.eval)]
    assert [{group.degree for batch in plan.micro_batches for group in batch.groups} for plan in plans] == [{4}, {2}]


READ = [
    ('[[eval]]\nname = "books"\npth = "x"', r"unknown key eval.books.pth in .*: did you mean 'path'"),
    ('[[eval]]\neval_planner = "fixed"', r"unknown key eval.1.eval_planner in .*: did you mean 'planner'"),
    ('[[eval]]\nname = "books"\nevery = "often"', r"eval.books.every is 'often' in .*; it must be an integer"),
    ('[eval]\nname = "books"', r"evaluation sets are tables of an array: write \[\[eval\]\]"),
    ("eval = 3", r"eval is 3 in .*write \[\[eval\]\]"),
    ('[[evals]]\nname = "books"', r"unknown section \[evals\] .*did you mean 'eval'"),
]


@pytest.mark.parametrize(("text", "message"), READ, ids=[text.replace("\n", " ") for text, _ in READ])
def test_tables_that_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "a.toml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        load_config(tmp_path / "a.toml")


IMPOSSIBLE: list[tuple[list[dict[str, Any]], str]] = [
    ([{"path": "a"}], r"table 1 of \[\[eval\]\] has name = ''; give one of letters"),
    ([BOOKS, {"name": "a/b", "path": "a"}], r"table 2 of \[\[eval\]\] has name = 'a/b'"),
    ([{"name": "books"}], r"eval.books.path is empty"),
    ([BOOKS, BOOKS | {"path": "b"}], r"2 of 2 tables \[\[eval\]\] have name = 'books'"),
    (
        [BOOKS | {"context_parallel_size": 3}],
        r"eval.books.context_parallel_size 3 does not divide 4 slots .*1 or 2 or 4",
    ),
    ([BOOKS | {"cp_comm_type": "ring"}], r"eval.books.cp_comm_type is 'ring'"),
    ([BOOKS | {"max_tokens_per_slot": 8}], r"eval.books.max_tokens_per_slot 8 do not suit eval.books.max_document_tok"),
    ([BOOKS | {"max_tokens_per_slot": "most"}], r"eval.books.max_tokens_per_slot is 'most'; .*or \"auto\""),
    ([BOOKS | {"every": -2}], r"eval.books.every is -2; it must be at least 0"),
    ([BOOKS | {"max_document_tokens": 1}], r"eval.books.max_document_tokens is 1; a document of one token"),
    ([BOOKS | {"metrics": ["accuracy"]}], r"eval.books.metrics has 'accuracy'; give a function with its module"),
]


@pytest.mark.parametrize(("tables", "message"), IMPOSSIBLE, ids=[message for _, message in IMPOSSIBLE])
def test_sets_that_are_impossible(tables: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(load_config(None, {"eval": tables}), 4)


def test_the_kernel_is_one_that_there_is() -> None:
    with pytest.raises(ConfigError, match=r"context.attention_kernel is 'fa5'; did you mean 'fa4'"):
        check_config(load_config(None, {"context.attention_kernel": "fa5"}), 4)


def test_a_set_of_version_0_2_is_read_and_one_of_its_gone_keys_is_refused() -> None:
    gone = {"passkey_lengths": [], "passkey_depths": [0.0, 0.25, 0.5, 0.75, 1.0], "passkey_samples": 4}
    assert entry(gone) == entry({})
    with pytest.raises(ConfigError, match=r"unknown key eval\.books\.passkey_samples"):
        entry(gone | {"passkey_samples": 8})
