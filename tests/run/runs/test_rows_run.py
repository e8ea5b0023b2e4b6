"""Runs of `longspan train` on rows: chats, whose targets are counted by hand; and one text in every form."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longspan.config.sections import RunConfig
from longspan.corpus.tokenizer import load_tokenizer
from longspan.data.documents import Corpus
from longspan.data.step_order import StepOrder
from longspan.run.loggers import read_metrics
from longspan.train.plans.order import count_held_out, make_step_order, order_lengths, set_epoch_steps
from tests.corpus.test_formats import rows_as
from tests.run.runs.homes import losses_of_run
from tests.run.runs.test_lora_run import write_base
from tests.train.small import WORDS, small_config

TEMPLATE = (
    "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token if m.role == 'assistant' else '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)
Answers = tuple[str, ...]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny chat model, of whose tokens each is a byte."""
    folder = write_base(tmp_path_factory.mktemp("chat") / "base")
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def config_of(folder: Path, base: Path, path: Path, **changes: Any) -> RunConfig:
    keys = {"train__steps": 2, "train__eval_every": 2, "train__save_every": 0, "train__warmup_steps": 1, **changes}
    keys |= {"data__cache": str(folder / "tokens")}
    keys |= {"context__eval_context_parallel_size": 1, "model__path": str(base), "model__dtype": "float64"}
    return small_config(folder, data__path=str(path), **keys)


def chats() -> list[tuple[dict[str, Any], Answers]]:
    """Twelve conversations of one or two turns that fit 64 bytes, and what the assistant says in them."""
    draw, rows = np.random.default_rng(0), list[tuple[dict[str, Any], Answers]]()
    for i in range(12):
        answers = tuple(str(draw.choice(WORDS)) for _ in range(1 + i % 2))
        turns = [({"role": "user", "content": "q"}, {"role": "assistant", "content": a}) for a in answers]
        rows.append(({"messages": [message for turn in turns for message in turn]}, answers))
    return rows


def test_a_run_on_chats_counts_what_the_assistant_says(tmp_path: Path, base: Path) -> None:
    rows, answers = zip(*chats(), strict=True)
    by_hand = [sum(len(answer) + 1 for answer in one) for one in answers]
    path = rows_as("jsonl", tmp_path / "rows", list(rows))
    config = config_of(tmp_path / "cached", base, path)
    losses = losses_of_run(config, 2)
    corpus = Corpus(Path(config.run.dir) / "corpus")
    order = make_step_order(config, corpus)
    assert isinstance(order, StepOrder)
    metrics = read_metrics(Path(config.run.dir) / "metrics.jsonl")
    steps, evaluations = ([row for row in metrics if key in row] for key in ("loss", "eval_loss"))
    wanted = [sum(by_hand[i] for i in order.documents_of_step(step)) for step in range(2)]
    assert [row["targets"] for row in steps] == wanted and all(row["tokens"] > row["targets"] for row in steps)
    held_out = sum(by_hand[i] for i in order.evaluation)
    assert evaluations[0]["cp"] == 1 and {row["eval_targets"] for row in evaluations} == {held_out}

    with path.open("a") as file:
        file.write(json.dumps({"messages": [{"role": "user", "content": "no answer"}]}))
    skipping = config_of(tmp_path / "skipping", base, path, data__on_bad="skip")
    assert losses_of_run(skipping, 2) == losses
    left_out = Corpus(Path(skipping.run.dir) / "corpus").manifest
    assert left_out.left_out.bad_rows == 1 and left_out.bad[0].startswith("rows.jsonl, line 13: no message is of an")


def test_one_text_in_every_form_gives_the_same_losses(tmp_path: Path, base: Path) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("datasets")
    draw = np.random.default_rng(0)
    texts = [" ".join(draw.choice(WORDS, int(draw.integers(2, 9)))) for _ in range(12)]
    plain = [{"text": text} for text in texts]
    tokens = [{"input_ids": ids.tolist()} for ids in load_tokenizer(base).encode(texts)]
    forms: Sequence[tuple[str, str, list[dict[str, Any]]]] = [
        ("text", "jsonl", plain),
        ("tokens", "jsonl", tokens),
        ("table", "parquet", plain),
        ("saved", "datasets", plain),
    ]
    paths = {name: rows_as(form, tmp_path / name / "rows", rows) for name, form, rows in forms}
    losses = {name: losses_of_run(config_of(tmp_path / name, base, path), 2) for name, path in paths.items()}
    assert len(losses["text"]) >= 3 and all(of_form == losses["text"] for of_form in losses.values()), losses


FEW = [  # tokens a step -> what is logged, where two epochs have 3,800 tokens in documents of 50
    (4096, "only 2 optimizer updates, of up to 1,900 tokens .*; with --train.tokens_per_step 76 there are at least 50"),
    (120, "only 38 optimizer updates, of up to 120 tokens .*; with --train.tokens_per_step 76 there are at least 50"),
    (64, ""),
    (50, ""),
]


@pytest.mark.parametrize(("tokens_per_step", "words"), FEW)
def test_epochs_of_few_steps_are_told_how_to_have_more(tmp_path: Path, tokens_per_step: int, words: str) -> None:
    config = small_config(tmp_path, train__epochs=2.0, train__tokens_per_step=tokens_per_step, train__warmup_steps=0)
    config, lines = replace(config, data=replace(config.data, eval_documents=2)), list[str]()
    set_epoch_steps(config, order_lengths(config, np.full(40, 50)), lines.append)
    assert len(lines) == 1 + bool(words) and re.match(words, lines[-1] if words else ""), lines


def test_a_tenth_of_few_documents_is_held_out_unless_a_number_is_given() -> None:
    counts = {documents: count_held_out("auto", documents) for documents in (1, 2, 7, 153, 319, 320, 9000)}
    assert counts == {1: 0, 2: 1, 7: 1, 153: 15, 319: 31, 320: 32, 9000: 32}
    assert [count_held_out(count, 40) for count in (0, 32, 60)] == [0, 32, 60]
