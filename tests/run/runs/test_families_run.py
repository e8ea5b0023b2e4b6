"""Runs whose documents begin alike: losses are those of separate documents, in float64."""

import json
import pickle
import re
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import transformers

from longspan import Document, Layout, World, share_prefixes
from longspan.cli.model_card import _measured_figures
from longspan.cli.plans.answer import show_dry_run
from longspan.cli.plans.documents import open_planned_documents
from longspan.cli.plans.gpu_run import GpuRun
from longspan.cli.plans.gpus import choose_gpus
from longspan.cli.show import show_rows
from longspan.config.sections import RunConfig
from longspan.data.corpus_documents import Corpus
from longspan.data.shared_prefixes import cut_documents, find_prefix_trees
from longspan.errors import ConfigError, LongspanError
from longspan.evaluation.evaluate_saved import evaluate_saved
from longspan.evaluation.request import EvalRequest, Subject, find_saved_weights
from longspan.evaluation.result import Evaluation
from longspan.plan import Plan, read_plans
from longspan.plan.shape.positions import LengthLimit
from longspan.report.gantt import plan_facts, plan_part
from longspan.resolve.facts import Facts
from longspan.resolve.planner_config import PlannerConfig
from longspan.run.metrics import read_metrics
from longspan.testing import run_ranks
from longspan.train.start.start_times import Starts
from tests.model.stock import without_trials
from tests.mutation import Change, mutated
from tests.run.runs.homes import gone_on_from_the_first_checkpoint, lines_of
from tests.run.runs.test_lora_run import write_base
from tests.run.runs.test_rows_run import TEMPLATE
from tests.train.own_loss.test_families import casts_in_float64
from tests.train.small import WORDS, small_config

PROMPT = 270  # more than LEAST_ROWS
TEXTS = 3


def questions(folder: Path, texts: int = TEXTS, each: int = 4) -> Path:
    """Rows of tokens: several questions on each text, whose answers alone are trained on, and one text on its own."""
    draw = np.random.default_rng(0)
    rows = list[dict[str, Any]]()
    for _ in range(texts):
        text = draw.integers(0, 256, PROMPT)
        for _ in range(each):
            rest = draw.integers(0, 256, draw.integers(4, 30))
            ids = np.append(text, rest)
            labels = np.where(np.arange(len(ids)) < PROMPT - 6, -100, ids)
            rows.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    alone = draw.integers(0, 256, 40).tolist()
    rows.append({"input_ids": alone, "labels": alone})
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def turns(folder: Path) -> tuple[Path, Path]:
    """Conversations of four turns, and the folder of a tokenizer with a template."""
    base = write_base(folder / "base", max_position_embeddings=1024)
    (base / "chat_template.jinja").write_text(TEMPLATE)
    draw = np.random.default_rng(0)
    rows = list[dict[str, Any]]()
    for _ in range(3):
        sizes = zip(("user", "assistant") * 3, (58, 2, 55, 2, 3, 2), strict=True)
        messages = [{"role": role, "content": " ".join(draw.choice(WORDS, size=n).tolist())} for role, n in sizes]
        rows.append({"messages": messages})
    file = folder / "chats.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file, base


def config_of(folder: Path, path: Path, name: str, **changes: Any) -> RunConfig:
    keys: dict[str, Any] = {"data__path": str(path), "run__dir": str(folder / name), "model__dtype": "float64"}
    keys |= {"data__max_document_tokens": 0, "train__tokens_per_step": 4096, "train__steps": 2}
    keys |= {"evaluation__every": 2, "evaluation__documents": 1, "checkpoint__every": 0}
    keys |= {"context__context_parallel_size": 1, "evaluation__context_parallel_size": 1}
    keys |= {"context__max_tokens_per_slot": 1024, "evaluation__max_tokens_per_slot": 1024}
    return small_config(folder, **keys | changes)


def run_in_float64(rank: int, configs: list[RunConfig], ranks: int) -> list[str]:
    for kind in ("llama", "qwen3"):  # whose casts are widened
        import_module(f"transformers.models.{kind}.modeling_{kind}")
    with casts_in_float64():
        return [lines_of(rank, config, ranks) for config in configs]


def losses(config: RunConfig) -> list[float]:
    rows = read_metrics(Path(config.run.dir) / "metrics.jsonl")
    return [float(row[key]) for row in rows for key in ("loss", "grad_norm", "eval_loss") if key in row]


def plans_of(config: RunConfig) -> list[Plan]:
    return [plan for _, plan in read_plans(Path(config.run.dir) / "plans.jsonl")]


def farthest(shared: RunConfig, separate: RunConfig) -> float:
    assert len(losses(shared)) == len(losses(separate)) > 4
    return max(abs(a / b - 1) for a, b in zip(losses(shared), losses(separate), strict=True))


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunConfig, RunConfig, str]:
    """Runs with families and without on one rank, and what the first says."""
    folder = tmp_path_factory.mktemp("alone")
    path = questions(folder)
    shared = config_of(folder, path, "shared", checkpoint__every=1)
    separate = config_of(folder, path, "separate", data__share_prefixes="none")
    with patch("longspan.run.loop.needs_warm_up", return_value=True):  # as on GPUs, with the kinds of families
        said = run_in_float64(0, [shared, separate], 1)[0]
    return shared, separate, said


def test_questions_on_few_texts_are_trained_as_separate_documents(alone: tuple[RunConfig, RunConfig, str]) -> None:
    shared, separate, said = alone
    assert farthest(shared, separate) <= 1e-12
    assert all(plan.parents is None for plan in plans_of(separate))
    plan = plans_of(shared)[0]
    whole = plans_of(separate)[0].lengths
    assert plan.parents is not None and plan.targets == plans_of(separate)[0].targets
    assert plan.spared_rows == sum(whole) - plan.tokens > sum(whole) / 2
    line = re.search(
        r"step 1: (\d+) documents in (\d) prefix trees: ([\d,]+) of ([\d,]+) tokens are computed once", said
    )
    assert line is not None, said
    assert said.count("computed once") == 1
    assert int(line[2]) == TEXTS and line[4] == f"{sum(whole):,}"
    assert re.search(r", [23]\.\d times fewer operations", said)
    row = read_metrics(Path(shared.run.dir) / "metrics.jsonl")[0]
    assert row["tokens"] == plan.tokens and row["spared_tokens"] == sum(whole) - plan.tokens
    # the speed is that of all documents; the shown seconds are rounded
    assert row["tokens_per_second"] * row["seconds"] == pytest.approx(sum(whole), rel=1e-3)


def planned_facts(config: RunConfig) -> Facts:
    """The facts by which a run begins to resolve its plans, where it ends."""
    resolve = patch("longspan.run.set_up.resolve_on_ranks", side_effect=ConfigError("far enough"))
    with resolve as resolve_mock, pytest.raises(ConfigError, match="far enough"):
        lines_of(0, config, 1)
    return resolve_mock.call_args.args[1]


def test_memory_is_planned_without_families_that_the_model_forbids(tmp_path: Path) -> None:
    base = write_base(tmp_path / "base", max_position_embeddings=1024, attention_dropout=0.1)
    path = questions(tmp_path)
    config = config_of(tmp_path, path, "dropout", model__path=str(base))
    planned = [planned_facts(config)]
    run = GpuRun.with_model(config, choose_gpus(config, 1, on_gpus=False))
    lines = list[str]()
    with open_planned_documents(run, lines.append, estimate=False) as (_, facts, _):
        planned.append(facts)
        plans = [facts.plan_step(PlannerConfig.fixed(1, max_tokens_per_slot=8192), 0) for facts in planned]
    assert [plan.tokens for plan in plans] == [sum(facts.lengths_of_step(0)) for facts in planned]
    assert sum("which dropout of attention weights needs" in line for line in lines) == 1


def test_families_of_one_set_of_frequencies_are_planned(tmp_path: Path) -> None:
    """Rows of a long rope change their frequencies at 285 tokens, where the texts' questions end before and behind."""
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "factor": 4.0}
    rope |= {"short_factor": [1.0] * 4, "long_factor": [2.0] * 4}
    limits = {"original_max_position_embeddings": 285, "max_position_embeddings": 1024}
    base = write_base(tmp_path / "base", transformers.Phi3Config, rope_parameters=rope, **limits)
    config = config_of(tmp_path, questions(tmp_path), "longrope", model__path=str(base))
    facts = planned_facts(config)
    plan = facts.plan_step(PlannerConfig.fixed(1, max_tokens_per_slot=8192), 0)
    assert plan.parents is not None and facts.length_limits == (LengthLimit(285, of_each_length=False),)
    for document in plan.whole_documents:
        if plan.parents[document] >= 0:
            siblings = [d for d in plan.whole_documents if plan.parents[d] == plan.parents[document]]
            assert len({plan.path_lengths[d] <= 285 for d in siblings}) == 1


def test_a_dry_run_counts_the_tokens_of_all_documents(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tokens = list[float]()
    lines = list[list[str]]()
    keys = {"model__preset": "qwen3-4b", "context__max_tokens_per_slot": "auto"}
    for share in ("auto", "none"):
        config = config_of(tmp_path, questions(tmp_path), share, data__share_prefixes=share, **keys)
        assert show_dry_run(config, ranks=1, on_gpus=False, as_json=True) == 0
        answer = json.loads(capsys.readouterr().out)
        tokens.append(answer["tokens_per_second_per_gpu"] * answer["seconds"])
        lines.append([note for note in answer["notes"] if "max_tokens_per_slot" in note])
    assert tokens[0] == pytest.approx(tokens[1])
    (line,), no_lines = lines
    assert re.match(r'context.max_tokens_per_slot "auto" is ([\d,]+) rows, .* at most \1 \(× degree 1\)', line), line
    assert no_lines == []


def test_the_model_card_counts_the_tokens_of_all_documents(alone: tuple[RunConfig, RunConfig, str]) -> None:
    shared, separate = (
        dict(_measured_figures(Path(config.run.dir) / "metrics.jsonl", step=2, steps=2)) for config in alone[:2]
    )
    assert shared["trained"] == separate["trained"]


def test_a_family_above_the_cap_is_said_once(alone: tuple[RunConfig, RunConfig, str], tmp_path: Path) -> None:
    cap = 300
    shared = alone[0]
    divided = config_of(tmp_path, Path(shared.data.path), "divided", context__max_tokens_per_slot=cap)
    said = run_in_float64(0, [divided], 1)[0]
    plan = plans_of(shared)[0]
    parents = plan.parents or ()
    families = [[branch for branch, parent in enumerate(parents) if parent == prefix] for prefix in {*parents} - {-1}]
    rows = {sum(plan.lengths[d] for d in (parents[family[0]], *family)): len(family) for family in families}
    most = max(rows)
    assert most > cap and len(plans_of(divided)) == 2
    assert said.count("begin alike") == 1
    assert (
        f"step 1: {rows[most]} documents that begin alike have {most} rows as one prefix tree, and a group holds 300 "
        "(context.max_tokens_per_slot 300 × degree 1): they are divided, or trained as separate documents"
    ) in said, said
    assert "begin alike" not in alone[2]


def test_a_run_that_goes_on_has_the_same_plans(alone: tuple[RunConfig, RunConfig, str], tmp_path: Path) -> None:
    """With sharing off too, as the key may change: the loss is the same to rounding."""
    for share in ("auto", "none"):
        again = gone_on_from_the_first_checkpoint(alone[0], tmp_path / share)
        again = replace(again, data=replace(again.data, share_prefixes=share))
        run_in_float64(0, [again], 1)
        expected = alone[0] if share == "auto" else alone[1]
        assert [plan.digest() for plan in plans_of(again)][1] == plans_of(expected)[1].digest()
        assert farthest(again, alone[0]) <= 1e-12


def test_documents_of_a_corpus_are_planned_and_cut_as_those_in_memory(alone: tuple[RunConfig, RunConfig, str]) -> None:
    read = Corpus(Path(alone[0].run.dir) / "corpus")
    read.pad = 5
    corpus = pickle.loads(pickle.dumps(read))
    assert corpus.pad == 5  # by which another process finds the row of a score
    documents = corpus.select(range(len(corpus)))
    rows = [np.arange(len(d)) for d in documents]
    in_memory = [Document(d[at], labels=d.labels(at)) for d, at in zip(documents, rows, strict=True)]
    families = find_prefix_trees(documents)
    expected = share_prefixes(in_memory)
    shared = cut_documents(documents, families.lengths, families.parents)
    assert (shared.parents, shared.lengths, shared.targets) == (expected.parents, expected.lengths, expected.targets)
    for part, other in zip(shared, expected, strict=True):
        at = np.arange(len(part))
        assert np.array_equal(part[at], other[at]) and np.array_equal(part.labels(at), other.labels(at))
        assert (part.parent, part.targets) == (other.parent, other.targets)
    home, targets = Layout(1), sum(d.targets for d in documents)
    choice = PlannerConfig.fixed(1, max_tokens_per_slot=1024)
    plan = choice.plan_documents(documents.lengths, documents, home, targets=targets)
    assert plan.parents == families.parents
    separate = choice.plan(documents.lengths, home, targets=targets)
    assert plan.predicted_seconds < separate.predicted_seconds
    padded = replace(choice, planner="padded").plan_documents(documents.lengths, documents, home, targets=targets)
    assert padded.parents is None
    others = corpus.select([0, 4, 8, 12])  # that begin unlike each other
    of_others = choice.plan_documents(others.lengths, others, home, targets=others.targets)
    assert of_others == choice.plan(others.lengths, home, targets=others.targets)


def test_longspan_eval_of_questions_reads_their_text_once(alone: tuple[RunConfig, RunConfig, str]) -> None:
    path = questions(Path(alone[0].run.dir).parent / "eval", texts=2)
    weights = find_saved_weights(alone[0].run.dir)
    found = list[Evaluation]()
    with World(Layout(1), backend="gloo", device="cpu") as world, casts_in_float64(), without_trials():
        for config in alone[:2]:
            request = EvalRequest(subjects=(Subject(weights, config),), paths=(("questions", str(path)),))
            (result,) = evaluate_saved(request, world, print, lambda *_: None, Starts())
            found.append(result.sets[0].evaluation)
    shared, separate = found
    assert shared.plan.parents is not None and separate.plan.parents is None
    assert shared.plan.tokens < separate.plan.tokens / 2 and shared.tokens == separate.tokens
    for one, other in zip(shared.document_losses, separate.document_losses, strict=True):
        assert one.count == other.count and one.sum == pytest.approx(other.sum, rel=1e-12)


def test_families_are_drawn(alone: tuple[RunConfig, RunConfig, str], capsys: pytest.CaptureFixture[str]) -> None:
    show_rows(alone[0], 7)
    rows, _, tree = capsys.readouterr().out.partition("begin alike, and are computed once")
    name = Path(alone[0].data.path).name
    lengths = [int(line.split(", ")[1].split()[0]) for line in tree.splitlines() if line.startswith("prefix, ")]
    repeats = [f"… {n} tokens as in {name}, line {first} …" for n, first in zip(lengths, (1, 5), strict=True)]
    assert [rows.count(text) for text in repeats] == [3, 2], "each prefix stands in its first row alone"
    lines = [line.split(", ")[0] for line in tree.splitlines()[1:]]
    first = ["prefix", *(f"├─ shown as {i}" for i in (1, 2, 3)), "└─ shown as 4"]
    assert lines == [*first, "prefix", *(f"├─ shown as {i}" for i in (5, 6)), "└─ shown as 7"]
    show_rows(alone[1], 7)
    assert "begin alike" not in capsys.readouterr().out
    plan = plans_of(alone[0])[0]
    assert ("shared", f"{TEXTS} prefixes, {plan.spared_rows:,} rows fewer") in [*plan_facts(plan)]
    prefix = next(d for d in range(len(plan.lengths)) if d not in plan.whole_documents)
    part = plan_part(plan, "step 1", None, measured=False)
    branches = (plan.parents or ()).count(prefix)
    assert ("computed once for", f"{branches} documents") in part["documents"][prefix]
    assert f"prefix {prefix} · " in part["pictures"][0]


MUTANTS: dict[str, Change] = {
    "a prefix one row longer": ("data.corpus_documents", "(is_target.argmax()) if", "(is_target.argmax()) + 1 if"),
    "parts read from the beginning": ("data.corpus_documents", "return rows + self.start", "return rows"),
    "another family's prefix": ("data.shared_prefixes", "source[part] = document", "source[part] = 0"),
    "parts one row early": ("data.shared_prefixes", "+ lengths[parent]\n", "+ lengths[parent] - 1\n"),
}


@pytest.mark.whole
@pytest.mark.parametrize("name", MUTANTS)
def test_mutants_are_noticed(name: str, alone: tuple[RunConfig, RunConfig, str], tmp_path: Path) -> None:
    shared = replace(alone[0], run=replace(alone[0].run, dir=str(tmp_path / "run")))
    with mutated(MUTANTS[name]):
        try:
            run_in_float64(0, [shared], 1)
        except LongspanError:
            return
    assert farthest(shared, alone[1]) > 1e-9


WAYS = [
    (1, {"data__split_turns": True}),
    pytest.param(2, {"context__context_parallel_size": 2}, marks=pytest.mark.whole),
    pytest.param(2, {"context__planner": "dynamic", "context__max_tokens_per_slot": 600}, marks=pytest.mark.whole),
]


@pytest.mark.parametrize(("ranks", "keys"), WAYS)
def test_turns_are_trained_as_separate_documents(ranks: int, keys: dict[str, Any], tmp_path: Path) -> None:
    path, base = turns(tmp_path)
    keys = {**keys, "model__path": str(base), "data__split_turns": True}
    shared = config_of(tmp_path, path, "shared", **keys)
    separate = config_of(tmp_path, path, "separate", data__share_prefixes="none", **keys)
    if ranks == 1:
        run_in_float64(0, [shared, separate], 1)
    else:
        run_ranks(run_in_float64, ranks, [shared, separate], ranks, timeout=120)
    assert farthest(shared, separate) <= 1e-12
    plan = plans_of(shared)[0]
    assert plan.parents is not None and plan.tokens < plans_of(separate)[0].tokens / 1.4
    generations = max(sum(1 for _ in group.ancestors()) for batch in plan.micro_batches for group in batch.groups)
    assert generations == 2


TERMS: dict[str, dict[str, Any]] = {
    "depths": {"mtp__num_layers": 1},
    "routers": {
        "model__preset": "qwen3-moe-tiny", "train__router_aux_loss_coef": 0.1, "train__router_z_loss_coef": 0.1
    },
}  # fmt: skip


@pytest.mark.whole  # daily: the terms of a step, tests/train/own_loss/test_family_terms.py
@pytest.mark.parametrize("name", ["depths", "routers"])
def test_terms_of_a_run_count_shared_rows_as_separate_documents_do(name: str, tmp_path: Path) -> None:
    path = questions(tmp_path)
    shared = config_of(tmp_path, path, "shared", **TERMS[name])
    separate = config_of(tmp_path, path, "separate", data__share_prefixes="none", **TERMS[name])
    run_ranks(run_in_float64, 1, [shared, separate], 1, timeout=120)
    assert plans_of(shared)[0].parents is not None and plans_of(separate)[0].parents is None
    assert farthest(shared, separate) <= 1e-12
