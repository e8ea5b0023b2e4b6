"""Runs of `longspan train` whose model scores: pairs and labels under any plan equal a loop of the stock class."""

import json
import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import peft
import pytest
import torch
import transformers
from torch import Tensor
from torch.nn import functional as F
from transformers import AutoModelForSequenceClassification, AutoTokenizer

from longspan.cli.export import main as export_main
from longspan.config.loss_arguments import loss_arguments
from longspan.config.sections import RunConfig
from longspan.data.corpus_documents import Corpus
from longspan.data.run_order import make_step_order
from longspan.data.step_order import sample_documents
from longspan.errors import ConfigError, LongspanError
from longspan.evaluation.saved_results import differences_by_set
from longspan.model import add_score_head, load_model
from longspan.model.adapters.new_adapter import NewAdapter, add_lora
from longspan.run.metrics import read_metrics
from longspan.train.optim.schedule import Schedule
from tests.evaluation.saved.evaluating import evaluate_here
from tests.run.runs.homes import ALONE, gone_on_from_the_first_checkpoint, refusals, train_rows
from tests.run.runs.test_lora_run import write_base
from tests.train.small import small_config

END = 256  # of a text, and padding
DRAW = np.random.default_rng(0)
Row = dict[str, Any]


def words(count: int) -> str:
    return "".join(DRAW.choice([*"abcdefgh"], count))


PAIRS: list[Row] = [
    {"prompt": words(5), "chosen": words(4 + 7 * i % 50), "rejected": words(3 + 11 * i % 40), "margin": 0.1 * (i % 3)}
    for i in range(11)
]
LABELS: list[Row] = [{"text": words(2 + 13 * i % 60), "label": i % 3} for i in range(14)]
NUMBERS: list[Row] = [{"prompt": words(3), "completion": words(2 + 5 * i), "label": i / 7} for i in range(8)]
KEYS: dict[str, Any] = {"model__dtype": "float64", "train__steps": 3, "optimizer__warmup_steps": 0}
KEYS |= {
    "optimizer__lr": 0.02,
    "optimizer__weight_decay": 0.0,
    "checkpoint__every": 2,
    "evaluation__every": 0,
    "train__tokens_per_step": 160,
}
CENTERED = "center_rewards_coefficient=0.1"
PLANS: dict[str, Any] = {"context__planner": "dynamic", "context__context_parallel_size": 0}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_base(tmp_path_factory.mktemp("scores") / "base")


def config_of(folder: Path, base: Path, rows: Sequence[Row], **changes: Any) -> RunConfig:
    folder.mkdir(exist_ok=True)
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    keys = {"data__path": str(folder / "rows.jsonl"), "model__path": str(base)}
    return small_config(folder, **keys | KEYS | changes)


def stock(base: Path, labels: int) -> Any:
    model: Any = add_score_head(load_model(base, dtype="float64"), labels)
    assert type(model) is transformers.LlamaForSequenceClassification
    model.config.pad_token_id = END
    return model


def texts_of(rows: Sequence[Row]) -> list[str]:
    endings = ("chosen", "rejected") if "chosen" in rows[0] else ("text", "completion")
    return [row.get("prompt", "") + row[key] for row in rows for key in endings if key in row]


def dense_scores(model: Any, texts: Sequence[str]) -> Tensor:
    """Scores (D, L) of texts, by the stock class in one padded batch."""
    tokenizer = AutoTokenizer.from_pretrained(model.name_or_path)
    ids = [torch.tensor([*tokenizer(text).input_ids, END]) for text in texts]
    padded = torch.nn.utils.rnn.pad_sequence(ids, batch_first=True, padding_value=END)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(len(x)) for x in ids], batch_first=True)
    return model(input_ids=padded, attention_mask=mask, use_cache=False).logits


def dense_loss(model: Any, rows: Sequence[Row], center_rewards_coefficient: float) -> tuple[Tensor, float | None]:
    scores = dense_scores(model, texts_of(rows))
    if "chosen" in rows[0]:
        chosen, rejected = scores[::2, 0], scores[1::2, 0]
        margins = torch.tensor([row.get("margin", 0.0) for row in rows], dtype=torch.float64)
        loss = -F.logsigmoid(chosen - rejected - margins) + center_rewards_coefficient * (chosen + rejected) ** 2
        return loss.mean(), (chosen > rejected).double().mean().item()
    if scores.shape[1] == 1:
        return F.mse_loss(scores[:, 0], scores.new_tensor([row["label"] for row in rows])), None
    labels = torch.tensor([row["label"] for row in rows])
    return F.cross_entropy(scores, labels), (scores.argmax(-1) == labels).double().mean().item()


def dense_run(config: RunConfig, rows: Sequence[Row], model: Any) -> list[tuple[float, float]]:
    """The losses and gradient norms of a loop in one process over the rows of the run's steps, which it trains on."""
    order, results = make_step_order(config, Corpus(Path(config.run.dir) / "corpus")), list[tuple[float, float]]()
    optimizer = torch.optim.AdamW(model.parameters(), betas=(0.9, 0.95), weight_decay=0.0)
    unit = len(texts_of(rows[:1]))
    for step in range(config.train.steps):
        documents = order.documents_of_step(step)
        assert [d for first in documents[::unit] for d in range(first, first + unit)] == [*documents]
        optimizer.param_groups[0]["lr"] = Schedule.of(config.optimizer, config.train.steps).lr_at(step)
        of_step = [rows[d // unit] for d in documents[::unit]]
        loss, _ = dense_loss(model, of_step, **loss_arguments(config.train))
        optimizer.zero_grad()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.optimizer.max_grad_norm)
        optimizer.step()
        results.append((loss.item(), norm.item()))
    return results


def check_run(config: RunConfig, rows: Sequence[Row], model: Any) -> float | None:
    """Losses, norms, weights and evaluations are those of the dense loop, to which `model` is given untrained.

    Returns the share of right pairs or classes.
    """
    wanted = np.array(dense_run(config, rows, model))
    metrics = read_metrics(Path(config.run.dir) / "metrics.jsonl")
    steps = np.array([[row["loss"], row["grad_norm"]] for row in metrics if "loss" in row])
    assert np.abs(steps / wanted - 1).max() < 1e-9
    saved = AutoModelForSequenceClassification.from_pretrained(Path(config.run.dir) / "model", dtype="auto")
    assert saved.dtype == torch.float64 and saved.config.pad_token_id == END
    weights = model.state_dict()
    assert max((x - weights[name]).abs().max().item() for name, x in saved.state_dict().items()) < 1e-9
    unit = len(texts_of(rows[:1]))
    held_out = make_step_order(config, Corpus(Path(config.run.dir) / "corpus")).evaluation
    loss, right = dense_loss(model, [rows[d // unit] for d in held_out[::unit]], **loss_arguments(config.train))
    evaluations = [row for row in metrics if "eval_loss" in row and "eval_name" not in row]
    assert {row["eval_documents"] for row in evaluations} == {len(held_out)}
    for row in evaluations:
        assert abs(row["eval_loss"] / loss.item() - 1) < 1e-9 and "eval_perplexity" not in row
        assert row.get("eval_accuracy") == right
    return right


def check_pairs_beside_each_other(config: RunConfig, saved: Any) -> None:
    """Two checkpoints are compared by the loss of each pair, which counts once; a model without scores is refused. A
    folder that scores takes the same rows."""
    folder = Path(config.run.dir) / "model"
    words = "--compare", f"{config.run.dir}/checkpoints/step-000002", "--evaluation.context_parallel_size", "1"
    (own, other), _ = evaluate_here(config.run.dir, "--data", config.data.path, *words)
    (difference,) = differences_by_set(own, other)
    losses = np.array([dense_loss(saved, [row], 0.1)[0].item() for row in PAIRS])
    (units, others) = (s.sets[0].evaluation.units for s in (own, other))
    assert units is not None and others is not None and np.abs(losses / units.figures["loss"] - 1).max() < 1e-9
    error = np.std(np.array(others.figures["loss"]) - losses, ddof=1) / len(PAIRS) ** 0.5
    assert (difference.unit, difference.count) == ("pair", len(PAIRS))
    assert difference.first == pytest.approx(losses.mean(), rel=1e-9)
    assert difference.standard_error == pytest.approx(error, rel=1e-6)
    rows = own.sets[0].evaluation.document_rows()
    assert [row["loss"] for row in rows] == [loss for loss in units.figures["loss"] for _ in range(2)]
    (alone,), _ = evaluate_here(str(folder), "--data", config.data.path, "--model.dtype", "float64")
    assert alone.sets[0].evaluation.loss == pytest.approx(dense_loss(saved, PAIRS, 0.0)[0].item(), rel=1e-9)
    with pytest.raises(ConfigError, match=f"{folder.parent} gives 1 scores of a document, and .* gives 0 "):
        evaluate_here(config.run.dir, "--compare", config.model.path)


def refused_runs(base: Path, folder: Path) -> Iterator[tuple[RunConfig, str]]:
    text, pair, one, two = {"text": "abc"}, PAIRS[0], {"model__num_labels": 1}, {"model__num_labels": 2}
    add_score_head(load_model(base), 2).save_pretrained(folder / "two")
    add_score_head(load_model(base), 2, tokens=True).save_pretrained(folder / "tokens")
    shutil.copytree(base, folder / "endless")
    (folder / "endless/tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    (stale := load_model(base)).config.problem_type = "multi_label_classification"
    stale.save_pretrained(folder / "stale")
    shutil.copytree(base, folder / "stale", ignore=lambda *_: ["config.json"], dirs_exist_ok=True)
    of_folder = {name: one | {"model__path": str(folder / name)} for name in ("two", "tokens", "endless", "stale")}
    cases: list[tuple[list[Row], dict[str, Any], str]] = [
        ([pair], {}, "are pairs .* model.num_labels is 0; set it to 1"),
        ([pair], {"model__num_labels": 3}, "are pairs .* model.num_labels is 3; set it to 1"),
        ([pair, {**text, "label": 1}], one, "line 2 holds text, and rows.jsonl, line 1 holds chosen and rejected"),
        ([{"chosen": "a"}], one, "the other answer of a pair is called rejected"),
        ([{**pair, "label": 1}], one, '"label" stands beside chosen and rejected'),
        ([{**text, "label": 1}, text], two, r'line 2: needs "label", as model.num_labels is 2'),
        ([{**text, "label": 5}], two, "label is 5, and model.num_labels is 2: classes are 0 to 1"),
        ([{**text, "label": "good"}], two, 'label is "good"; give a finite number'),
        ([{**text, "label": [1, 0, 1]}], two, "label has 3 numbers"),
        ([{**text, "label": 1}, {**text, "label": [0, 1]}], two, "line 1 1 number and .*line 2 2 numbers"),
        ([{**pair, "chosen": words(80)}], one, "a document has 86 tokens, max_document_tokens is 64"),
        ([pair], of_folder["two"], "of 2 scores, and model.num_labels is 1"),
        ([pair], of_folder["tokens"], "ForTokenClassification of 2 scores, and model.num_labels is 1; give a"),
        ([pair] * 2, of_folder["endless"], "no pad_token_id and its tokenizer neither pad_token nor eos_token"),
        (
            [{**text, "label": 1}] * 8,
            of_folder["stale"] | two,
            "problem_type 'multi_label_classification' takes 2 labels of a row, and rows have 1 for 2 scores; set",
        ),
        (
            [pair],
            {"train__loss_arguments": (CENTERED,)},
            "center_rewards_coefficient=0.1, .* model.num_labels 1, and .* 0",
        ),
    ]
    for i, (rows, keys, message) in enumerate(cases):
        yield config_of(folder / str(i), base, rows, **ALONE | keys), message


def test_runs_of_pairs_and_labels_are_those_of_the_stock_class(base: Path, tmp_path: Path) -> None:
    """At degree 2, dynamic, and where a pair's documents are in several micro-batches; then one goes on alone. In the
    same start are some that every rank refuses before its first step; others are refused by one."""
    few = {"context__max_tokens_per_slot": 40, "evaluation__context_parallel_size": 1}
    few |= {"evaluation__max_tokens_per_slot": 64, "evaluation__documents": 4, "model__num_labels": 1}
    (tmp_path / "other.jsonl").write_text("\n".join(map(json.dumps, PAIRS)))
    few["evaluation.sets"] = [{"name": "other", "path": str(tmp_path / "other.jsonl"), "documents": 3}]
    pairs = config_of(tmp_path / "pairs", base, PAIRS, train__loss_arguments=(CENTERED,), **few)
    classes = config_of(tmp_path / "classes", base, LABELS, model__num_labels=3, **PLANS)
    numbers = config_of(tmp_path / "numbers", base, NUMBERS, model__num_labels=1, evaluation__documents=2)
    refused, messages = zip(*refused_runs(base, tmp_path), strict=True)
    errors = refusals([pairs, classes, numbers, *refused[:4]]) + refusals([*refused[4:]], ranks=1)
    assert [errors.pop(0) for _ in range(3)] == [None] * 3
    for error, message in zip(errors, messages, strict=True):
        assert isinstance(error, LongspanError) and re.search(message, str(error)), error
    right = check_run(pairs, PAIRS, stock(base, 1))
    assert right is not None and 0 < right < 1
    other = [row for row in read_metrics(Path(pairs.run.dir) / "metrics.jsonl") if "eval_name" in row]
    chosen = [PAIRS[i] for i in sample_documents(len(PAIRS), 3, pairs.train.seed)]
    saved = AutoModelForSequenceClassification.from_pretrained(Path(pairs.run.dir) / "model", dtype="auto")
    assert abs(other[0]["eval_loss"] / dense_loss(saved, chosen, 0.1)[0].item() - 1) < 1e-9
    assert other[0]["eval_documents"] == 6
    check_pairs_beside_each_other(pairs, saved)
    check_run(classes, LABELS, stock(base, 3))
    check_run(numbers, NUMBERS, stock(base, 1))
    again = gone_on_from_the_first_checkpoint(pairs, tmp_path / "again")
    context = replace(again.context, context_parallel_size=1, max_tokens_per_slot=256)
    evaluation = replace(again.evaluation, max_tokens_per_slot=256)
    train_rows(replace(again, context=context, evaluation=evaluation), 1)
    check_run(again, PAIRS, stock(base, 1))


def test_an_adapter_trains_the_head_and_stock_peft_reads_both(
    base: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    keys = ALONE | {"lora__rank": 4, "model__num_labels": 3, "context__max_tokens_per_slot": 64}
    config = config_of(tmp_path / "lora", base, LABELS, **keys)
    (*_, last) = train_rows(config, 1)
    found = [row for row in read_metrics(Path(config.run.dir) / "metrics.jsonl") if "eval_loss" in row]
    fresh = stock(base, 3)
    whole = add_lora(stock(base, 3), NewAdapter(rank=2)).base_model.model.score.modules_to_save.default
    assert torch.equal(whole.weight, fresh.score.weight)  # of a model that has its weights already
    model = peft.PeftModel.from_pretrained(stock(base, 3), config.run.dir + "/model", torch_device="cpu").eval()
    assert not torch.equal(model.base_model.model.score.weight, fresh.score.weight) and np.isfinite(last["loss"])
    held_out = make_step_order(config, Corpus(Path(config.run.dir) / "corpus")).evaluation
    assert export_main([config.run.dir, str(tmp_path / "merged"), "--merge"]) == 0
    assert capfd.readouterr().out.endswith(f"next: longspan eval {config.run.dir} --data ROWS\n")
    merged = AutoModelForSequenceClassification.from_pretrained(tmp_path / "merged", dtype="auto")
    for one in (model.base_model.model, merged):
        loss, right = dense_loss(one, [LABELS[d] for d in held_out], 0.0)
        assert abs(found[0]["eval_loss"] / loss.item() - 1) < 1e-12 and found[0]["eval_accuracy"] == right
    assert "AutoModelForSequenceClassification" in (tmp_path / "merged" / "README.md").read_text()


def test_a_pair_with_a_long_document_is_left_out_whole(base: Path, tmp_path: Path) -> None:
    rows = [{**PAIRS[1], "chosen": words(80)}, *PAIRS[2:6], {**PAIRS[6], "rejected": "a" * 90}]
    keys = ALONE | {"model__num_labels": 1, "data__on_bad_row": "skip", "train__steps": 1}
    skipping = config_of(tmp_path / "skip", base, rows, **keys)
    train_rows(skipping, 1)
    manifest = Corpus(Path(skipping.run.dir) / "corpus").manifest
    assert (manifest.left_out.bad_rows, manifest.documents, manifest.left_out.cut_texts) == (2, 8, 0)
