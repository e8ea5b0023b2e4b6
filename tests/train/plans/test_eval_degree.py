"""A degree "auto": chosen by cost when a run is set up, the same on all ranks, and said in one line."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest

from longspan.config.file import load_config
from longspan.errors import ConfigError
from longspan.layout import Layout
from longspan.plan import Cost
from longspan.plan.ways import which_degree
from longspan.run.checks import check_config
from longspan.run.loggers import read_metrics
from longspan.testing import run_ranks
from longspan.train.plans import PlanChoice
from longspan.train.plans.resolve import choose_degree
from tests.train.small import small_config, train_rank, write_texts

DEGREE = "context.eval_context_parallel_size"


def test_the_choice_is_that_of_which_degree() -> None:
    home, lengths = Layout(16, tp=2), [30000, 900, 800, 700, 20]
    config = load_config(None, {DEGREE: "auto", "context.eval_max_tokens_per_slot": 8192, "parallel.tp": 2})
    choice = PlanChoice.evaluation(config, cost=Cost(), heads=16)
    assert (choice.degree, choice.options.cp_comm_type) == (0, "auto")
    comparison = which_degree(lengths, home, options=choice.home_options(home))
    found, reason = choose_degree(choice, lengths, home)
    assert found.degree == comparison.best.cp >= 4 and reason == comparison.reason()
    assert found.options.cp_comm_type == comparison.best.options.cp_comm_type != "auto"
    plan = found.plan(lengths, home)
    assert plan.predicted_seconds <= comparison.best.planned.predicted_seconds * (1 + 1e-9)
    assert {group.degree for batch in plan.micro_batches for group in batch.groups} == {found.degree}
    assert choose_degree(found, lengths, home) == (found, "") and choose_degree(choice, [], home) == (choice, "")
    with pytest.raises(ConfigError, match=r'eval_context_parallel_size is "auto" on 16 ranks: no degree of \(1, 2, 4'):
        choose_degree(choice, [10**6], home)


def test_a_degree_that_is_not_chosen_yet_holds_the_documents() -> None:
    """Until then plans, of a check or a warm-up, have the smallest degree that fits, with levels fitted to it."""
    config = load_config(None, {DEGREE: "auto", "context.eval_max_tokens_per_slot": 100})
    config = replace(
        config,
        context=config.context.set_evaluation(cp_comm_type="a2a+p2p", hierarchical_context_parallel_sizes=(2, 2)),
    )
    choice, home = PlanChoice.evaluation(config), Layout(8)
    (group,) = choice.plan([390], home).micro_batches[0].groups
    assert (group.degree, group.hierarchical_context_parallel_sizes) == (4, (2, 2))
    with pytest.raises(ConfigError, match=r"eval_context_parallel_size auto and context.eval_max_tokens_per_slot 100"):
        choice.check_longest_document(801, home, "a document")


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        ({DEGREE: "most"}, f"{DEGREE} is 'most'; give a number, or \"auto\""),
        (
            {DEGREE: "auto", "context.eval_planner": "dynamic"},
            'eval_planner is "dynamic"; use context.eval_planner = "f',
        ),
        ({DEGREE: "auto", "context.eval_planner": "padded"}, 'context.eval_planner is "padded"'),
        (
            {DEGREE: "auto", "context.eval_max_tokens_per_slot": 9},
            f"{DEGREE} auto and context.eval_max_tokens_per_slot 9",
        ),
    ],
)
def test_refused(keys: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        check_config(load_config(None, keys), 4)


def test_what_auto_makes_of_the_other_keys() -> None:
    own = {"model.config": "somewhere", "context.planner": "dynamic", "context.cp_comm_type": "a2a", DEGREE: "auto"}
    context = load_config(None, own).context
    assert (context.evaluation.planner, context.evaluation.cp_comm_type) == ("fixed", "auto")
    context = load_config(None, own | {"context.eval_cp_comm_type": "p2p"}).context
    assert (context.evaluation.context_parallel_size, context.evaluation.cp_comm_type) == ("auto", "p2p")
    assert load_config(None, {DEGREE: "auto"}).context.evaluation.cp_comm_type == "auto"


def test_a_run_evaluates_each_set_at_the_degree_that_was_chosen_and_says_why(tmp_path: Path) -> None:
    books = {"name": "books", "path": str(write_texts(tmp_path / "books", count=5)), "context_parallel_size": "auto"}
    changes = {"context__eval_context_parallel_size": "auto", "train__steps": 2, "train__eval_every": 1}
    config = small_config(tmp_path, eval=[books], **changes)
    run_ranks(train_rank, 2, config, 2)
    folder = Path(config.run.dir)
    facts = json.loads((folder / "run.json").read_text())
    rows = [row for row in read_metrics(folder / "metrics.jsonl") if "eval_loss" in row and row["step"] == 1]
    for reason, name in zip(facts["evaluated"].splitlines(), (None, "books"), strict=True):
        said = re.match(rf"evaluation{f' of {name}' if name else ''} at cp (\d+)[:,] ", reason)
        assert said, reason
        degree = int(said.group(1))
        assert " documents; cp " in reason and " x as long; dynamic plan " in reason
        assert [row["cp"] for row in rows if row.get("eval_name") == name] == [degree]
    assert 'eval_context_parallel_size = "auto"' in (folder / "config.toml").read_text()
