"""Runs whose documents begin alike: losses are those of separate documents, in float64; others are as before."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from longspan.config.sections import RunConfig
from longspan.plan import read_plans
from longspan.run.facts import TrainResult
from longspan.run.metrics import read_metrics
from longspan.testing import run_ranks
from tests.run.runs.test_lora_run import write_base
from tests.run.runs.test_rows_run import TEMPLATE
from tests.train.own_loss.test_families import casts_in_float64
from tests.train.small import WORDS, small_config, train_rank

PROMPT = 270
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
            labels = np.where(np.arange(len(ids)) < PROMPT + 2, -100, ids)
            rows.append({"input_ids": ids.tolist(), "labels": labels.tolist()})
    alone = draw.integers(0, 256, 40).tolist()
    rows.append({"input_ids": alone, "labels": alone})
    folder.mkdir(parents=True, exist_ok=True)
    file = folder / "questions.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def turns(folder: Path) -> tuple[Path, Path]:
    """Conversations of four turns, and the folder of a tokenizer with a template."""
    base = write_base(folder / "base")
    (base / "chat_template.jinja").write_text(TEMPLATE)
    draw = np.random.default_rng(0)
    rows = list[dict[str, Any]]()
    for _ in range(3):
        words = lambda n: " ".join(draw.choice(WORDS, size=n).tolist())  # noqa: E731
        messages = [{"role": role, "content": words(n)} for n in (150, 20, 15) for role in ("user", "assistant")]
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
    keys |= {"data__cache_dir": str(folder / "tokens")}
    return small_config(folder, **keys | changes)


def run_in_float64(rank: int, configs: list[RunConfig], ranks: int) -> list[TrainResult]:
    with casts_in_float64():
        return [train_rank(rank, config, ranks) for config in configs]


def losses(config: RunConfig) -> list[float]:
    rows = read_metrics(Path(config.run.dir) / "metrics.jsonl")
    return [float(row[key]) for row in rows for key in ("loss", "grad_norm", "eval_loss") if key in row]


def plans_of(config: RunConfig) -> list[Any]:
    return [plan for _, plan in read_plans(Path(config.run.dir) / "plans.jsonl")]


def farthest(shared: RunConfig, separate: RunConfig) -> float:
    assert len(losses(shared)) == len(losses(separate)) > 4
    return max(abs(a / b - 1) for a, b in zip(losses(shared), losses(separate), strict=True))


WAYS = [
    (1, {}),
    pytest.param(2, {"context__context_parallel_size": 2}, marks=pytest.mark.whole),
    (2, {"context__planner": "dynamic", "context__max_tokens_per_slot": 512}),
]


@pytest.mark.parametrize(("ranks", "keys"), WAYS)
def test_questions_on_few_texts_are_trained_as_separate_documents(
    ranks: int, keys: dict[str, Any], tmp_path: Path
) -> None:
    path = questions(tmp_path)
    shared = config_of(tmp_path, path, "shared", **keys)
    separate = config_of(tmp_path, path, "separate", data__share_prefixes="none", **keys)
    run_ranks(run_in_float64, ranks, [shared, separate], ranks, timeout=120)
    assert farthest(shared, separate) <= 1e-12
    assert all(plan.parents is None for plan in plans_of(separate))
    plan = plans_of(shared)[0]
    assert plan.parents is not None and plan.tokens < plans_of(separate)[0].tokens / 2
